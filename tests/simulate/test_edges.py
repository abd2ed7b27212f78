"""Nothing of what runs in a world asks the real machine: that would go by no seed."""

import ast
from pathlib import Path

import kvtide
from kvtide.testing.simulate.edges import MODULES

PACKAGE = Path(kvtide.__file__).parent
FOLDERS = ("core", "memory", "wire", "node", "engines/vllm", "tiers/remote")
STAND_INS = {"asyncio", "fcntl", "os", "queue", "secrets", "select", "socket", "threading", "time"}
LEFT_ALONE = {
    # Programs, commands and pages, which no world has.
    "node.build threading",
    "node.build time",
    "node.http asyncio",
    "node.http socket",
    "node.http threading",
    "node.http time",
    "node.late time",
    "node.launch os",
    "node.main asyncio",
    "node.main fcntl",
    "node.main os",
    "node.main secrets",
    "node.main time",
    "wire.command socket",
    # Another stands in for all of it.
    "engines.vllm.adapters threading",
    "engines.vllm.adapters time",
    "engines.vllm.file_digests os",
    "engines.vllm.file_digests secrets",
    "engines.vllm.file_digests threading",
    "engines.vllm.file_digests time",
    "engines.vllm.weights os",
    "engines.vllm.weights threading",
    "engines.vllm.weights time",
    "memory.advice os",
    "memory.mapped os",
    "memory.probe fcntl",
    "memory.probe os",
    "memory.region fcntl",
    "memory.region os",
    "memory.region threading",
    "node.memory asyncio",
    "node.processes os",
    "wire.places os",
    "wire.places time",
    # What a real engine says of itself.
    "engines.vllm.facts os",
    "engines.vllm.model_fields os",
    # Names alone: of types, of constants, of the user.
    "wire.channel socket",
    "wire.peer os",
    "wire.peer socket",
    # The end of a node in order: here it is its process's end.
    "node.tiers threading",
    # Names of servers, of which there is none.
    "tiers.remote.resolving socket",
    "tiers.remote.resolving threading",
}


def test_whatever_asks_the_machine_is_exchanged_or_known_to_be_left_alone() -> None:
    """A module that is split takes its edges with it, to where nobody exchanges them."""
    exchanged = {
        f"{module.__name__.removeprefix('kvtide.')} {name}"
        for module, names in MODULES.items()
        for name in STAND_INS.intersection(names)
    }
    found = set()
    for folder in FOLDERS:
        for path in PACKAGE.joinpath(folder).glob("*.py"):
            module = ".".join(path.relative_to(PACKAGE).with_suffix("").parts)
            names = {
                alias.name
                for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
                if isinstance(node, ast.Import)
                for alias in node.names
            }
            found |= {f"{module} {name}" for name in names & STAND_INS}
    assert found - exchanged == LEFT_ALONE
