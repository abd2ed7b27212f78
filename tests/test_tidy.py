"""The rules of the house that a machine can hold: imports point down, words mean one thing, files
and functions stay small, and what the documents name is there.

Ranks and rules are those of docs/architecture.md; where one must change, it is changed there too.
"""

import ast
import itertools
import re
import sys
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

HOUSE = Path(__file__).parents[1]
PACKAGE = HOUSE / "src" / "kvtide"

RANK = {
    "core": 1,
    "memory": 1,
    "codec": 2,
    "wire": 2,
    "movers": 2,
    "tiers": 3,
    "node": 4,
    "fleet": 5,
    "engines": 5,
    "cli": 6,
}
"""Imports point down. Modules beside the folders have rank 0, `testing` has none: it sees all."""

MAY_IMPORT = {
    "core": [],
    "memory": [],
    "codec": ["core.keys", "core.layout", "core.records"],
    "wire": ["core"],
    "movers": ["memory", "core.layout"],
    "tiers": ["core.keys", "core.layout", "core.records", "memory", "codec"],
    "node": ["core", "memory", "codec", "wire", "tiers"],
    "fleet": ["wire", "core"],
    "engines": ["wire", "movers", "memory", "core", "node.launch", "node.supervise"],
    "cli": [name for name in RANK if name != "cli"],
    "testing": list(RANK),
}
"""Of the package; besides rank 0 and themselves. (The node's two are how an engine starts one.)"""

OWNERS = {
    "yaml": {"config.py"},
    "msgspec": {"wire", "engines"},  # a worker's facts are opaque to the wire
    "xxhash": {"codec"},
    "click": {"cli"},
}
"""Third-party packages of the base install, and who alone may import them."""
ENGINE_PACKAGES = {"torch", "triton", "numpy", "vllm", "huggingface_hub", "transformers", "regex"}
"""What engines bring: only for `movers`, `engines`, and what is shipped to test them."""
TEST_PACKAGES = {"pytest", "hypothesis"}
"""For `testing` alone."""

FILE_LINES_MAX = 500
FUNCTION_LINES_MAX = 70
LINE_CHARS_MAX = 99
LONGEST_FUNCTION = 51
"""The ratchet: it may only be lowered."""

BANNED = {"util", "utils", "manager", "managers", "helper", "helpers", "batched"}
"""Words that mislead, wherever they stand in a name of ours."""
BANNED |= {"l0", "l1", "l2", "l3"}
"""Places of memory have names, not levels."""
BANNED_START = "new_"
BANNED_CLASS_END = ("Base", "Handler", "Impl", "V1", "V2")
"""Of shipped code."""


def python_files(*folders: str) -> list[Path]:
    """Our Python files below folders of the repository."""
    found = [path for folder in folders for path in (HOUSE / folder).rglob("*.py")]
    return sorted(path for path in found if "__pycache__" not in path.parts)


SHIPPED = python_files("src")
ALL = python_files("src", "tests", "benchmarks", "examples")


def name_of(path: Path) -> str:
    return str(path.relative_to(HOUSE))


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), name_of(path))


def folder_of(path: Path) -> str:
    """The folder of the package that a file is in; its own name beside the folders."""
    parts = path.relative_to(PACKAGE).parts
    return parts[0]


def imports_of(path: Path) -> Iterator[tuple[str, ast.stmt]]:
    """Full names of the modules that a file imports; `from a import b` may be module a.b or a."""
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, node
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name_of(path)}:{node.lineno}: imports are absolute"
            for alias in node.names:
                inside = f"{node.module}.{alias.name}"
                yield (inside if is_module(inside) else node.module or ""), node


def is_module(name: str) -> bool:
    """Whether a name of ours is a module, and not something in one."""
    path = HOUSE / "src" / Path(*name.split("."))
    return path.is_dir() or path.with_suffix(".py").is_file()


def third_party(path: Path) -> set[str]:
    tops = {module.split(".")[0] for module, _ in imports_of(path)}
    return tops - sys.stdlib_module_names - {"kvtide", "benchmarks", "tests"}


# ---- imports


@pytest.mark.parametrize("folder", sorted({folder_of(path) for path in SHIPPED}))
def test_imports_point_down(folder: str) -> None:
    """Each folder imports rank 0, itself, and what the table names, which ranks below it."""
    wrong = []
    allowed = MAY_IMPORT.get(folder, [])
    for path in SHIPPED:
        if folder_of(path) != folder:
            continue
        for module, node in imports_of(path):
            top, _, inner = module.partition(".")
            if top != "kvtide" or not inner or inner.split(".")[0] not in (*RANK, "testing"):
                continue  # not ours, or rank 0
            is_own = inner.split(".")[0] == folder
            is_fine = any(f"{inner}.".startswith(f"{name}.") for name in allowed)
            if not is_own and not is_fine:
                wrong.append(f"{name_of(path)}:{node.lineno} imports {module}")
    assert not wrong, "\n".join(wrong)


def test_no_tier_imports_another() -> None:
    """What several need lies beside them; a folder that opens no place is there to be shared."""
    tiers = {path.parent.name for path in (PACKAGE / "tiers").glob("*/opening.py")}
    assert {"disk", "shared_dir", "redis"} <= tiers
    wrong = []
    for path in SHIPPED:
        if folder_of(path) != "tiers":
            continue
        others = tiers - {path.relative_to(PACKAGE / "tiers").parts[0]}
        wrong += [
            f"{name_of(path)}:{node.lineno} imports {module}"
            for module, node in imports_of(path)
            if any(f"{module}.".startswith(f"kvtide.tiers.{other}.") for other in others)
        ]
    assert not wrong, "\n".join(wrong)


def test_the_table_itself_points_down() -> None:
    for folder, allowed in MAY_IMPORT.items():
        ranks = [RANK[name.split(".")[0]] for name in allowed]
        assert all(rank < RANK.get(folder, 7) for rank in ranks), folder


def test_every_folder_has_a_rank() -> None:
    folders = {path.name for path in PACKAGE.iterdir() if path.is_dir()} - {"__pycache__"}
    assert folders <= RANK.keys() | {"testing"}


def test_the_documents_table_of_imports_is_this_one() -> None:
    """Of the folders that are there; the planned ones get their row when they come."""
    text = (HOUSE / "docs" / "architecture.md").read_text()
    rows = re.findall(r"^\| `(\w+)/` \| .* \| (.*) \|$", text, re.MULTILINE)
    told = {folder: set(re.findall(r"`([\w.]+)`", names)) for folder, names in rows}
    there = {path.name for path in PACKAGE.iterdir() if path.is_dir()} & RANK.keys()
    wanted = {
        folder: {name for name in MAY_IMPORT[folder] if name.split(".")[0] in there}
        for folder in there
    }
    assert told == wanted


def test_nothing_shipped_imports_what_is_for_tests() -> None:
    wrong = [
        f"{name_of(path)}:{node.lineno}"
        for path in SHIPPED
        for module, node in imports_of(path)
        if folder_of(path) != "testing" and f"{module}.".startswith("kvtide.testing.")
    ]
    assert not wrong, wrong


def test_no_function_imports_anything_of_ours() -> None:
    """Who needs it there is in the wrong folder."""
    wrong = []
    for path in SHIPPED:
        for function in ast.walk(tree_of(path)):
            if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            for node in ast.walk(function):
                names = []
                if isinstance(node, ast.Import):
                    names = [alias.name for alias in node.names]
                elif isinstance(node, ast.ImportFrom):
                    names = [node.module or ""]
                if any(name.split(".")[0] == "kvtide" for name in names):
                    wrong.append(f"{name_of(path)}:{function.lineno} {function.name}")
    assert not wrong, wrong


def test_core_is_pure() -> None:
    """No I/O, threads, clocks, environment, randomness: it can be replayed."""
    impure = {"asyncio", "os", "pathlib", "random", "secrets", "select", "socket", "subprocess"}
    impure |= {"threading", "time", "datetime", "logging", "uuid", "tempfile", "signal", "mmap"}
    wrong = [
        f"{name_of(path)} imports {module}"
        for path in SHIPPED
        if folder_of(path) == "core"
        for module, _ in imports_of(path)
        if module.split(".")[0] in impure or module in ("kvtide.clock", "kvtide.config")
    ]
    assert not wrong, wrong
    assert not [path for path in SHIPPED if folder_of(path) == "core" and third_party(path)]


def test_engines_packages_are_imported_only_where_engines_are() -> None:
    """The node never imports torch."""
    allowed = ("movers", "engines", "testing")
    wrong = [
        (name_of(path), package)
        for path in SHIPPED
        for package in third_party(path) & ENGINE_PACKAGES
        if folder_of(path) not in allowed
    ]
    assert not wrong, wrong


def test_each_third_party_package_has_one_owner() -> None:
    """Those of the base install live in one folder; an optional one in exactly one file."""
    users = defaultdict(list)
    for path in SHIPPED:
        allowed = TEST_PACKAGES if folder_of(path) == "testing" else set()
        for package in third_party(path) - ENGINE_PACKAGES - allowed:
            users[package].append(path)
    for package, paths in users.items():
        names = [name_of(path) for path in paths]
        if package in OWNERS:
            assert {folder_of(path) for path in paths} <= OWNERS[package], (package, names)
        else:
            assert len(paths) == 1, (package, names)


# ---- sizes


def test_files_stay_small() -> None:
    lengths = {name_of(path): len(path.read_text().splitlines()) for path in ALL}
    long = {name: lines for name, lines in lengths.items() if lines > FILE_LINES_MAX}
    assert not long, long


def functions() -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    for path in ALL:
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                yield f"{name_of(path)}:{node.lineno} {node.name}", node


def test_functions_stay_small() -> None:
    lengths = {name: (node.end_lineno or 0) - node.lineno + 1 for name, node in functions()}
    long = {name: lines for name, lines in lengths.items() if lines > LONGEST_FUNCTION}
    assert not long, long
    assert LONGEST_FUNCTION <= FUNCTION_LINES_MAX


def test_lines_stay_short() -> None:
    long = [
        f"{name_of(path)}:{number}"
        for path in ALL
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if len(line) > LINE_CHARS_MAX
    ]
    assert not long, long


LIMIT = re.compile(r"[A-Z_]+_(MAX|MIN|FIRST|S|MS|TRIES)")
LIMITS_EXPLAINED = ["bounds.py", "core/checks.py", "wire"]
LIMITS_EXPLAINED += [f"node/{name}.py" for name in ("http", "launch", "main", "supervise")]
"""Where every limit has its reason; the list may only grow."""


@pytest.mark.parametrize("place", LIMITS_EXPLAINED)
def test_limits_have_a_reason(place: str) -> None:
    """The string that stands below each: who meets a limit asks why it is this one."""
    wrong = []
    for path in SHIPPED:
        if not path.is_relative_to(PACKAGE / place):
            continue
        body = tree_of(path).body
        for node, below in zip(body, [*body[1:], None], strict=True):
            targets = node.targets if isinstance(node, ast.Assign) else []
            given = [one for target in targets for one in ast.walk(target)]
            names = [one.id for one in given if isinstance(one, ast.Name)]
            is_text = isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant)
            if any(map(LIMIT.fullmatch, names)) and not is_text:
                wrong.append(f"{name_of(path)}:{node.lineno} {', '.join(names)}")
    assert not wrong, "\n".join(wrong)


def test_a_bound_of_the_contract_stands_once() -> None:
    """Whatever says that it is one takes its length from `bounds`, and so keeps step with it."""
    names = [
        one.id for one in ast.walk(tree_of(PACKAGE / "bounds.py")) if isinstance(one, ast.Name)
    ]
    wrong = []
    for path in SHIPPED:
        body = tree_of(path).body
        for node, below in itertools.pairwise(body):
            if not isinstance(node, ast.Assign) or not isinstance(below, ast.Expr):
                continue
            bound = re.match(r"'(T_[a-z]+)", ast.unparse(below).strip('"'))
            is_bound = bound and any(name.startswith(bound[1].upper()) for name in names)
            if is_bound and "T_" not in ast.unparse(node.value) and path.name != "bounds.py":
                wrong.append(f"{name_of(path)}:{node.lineno} {ast.unparse(node)}")
    assert not wrong, "\n".join(wrong)


# ---- words


def words_of(name: str) -> list[str]:
    """The words of an identifier: `KVLayout_of` is kv, layout, of."""
    parts = re.findall(r"[A-Z]+[0-9]*(?![a-z])|[A-Z]?[a-z0-9]+", name)
    return [part.lower() for part in parts]


def is_misleading(name: str) -> bool:
    return not BANNED.isdisjoint(words_of(name))


def defined_in(path: Path) -> Iterator[tuple[str, int]]:
    """Names that a file gives: of classes, functions, arguments, variables and attributes."""
    for node in ast.walk(tree_of(path)):
        match node:
            case ast.ClassDef() | ast.FunctionDef() | ast.AsyncFunctionDef():
                yield node.name, node.lineno
            case ast.arg():
                yield node.arg, node.lineno
            case ast.Name(ctx=ast.Store()):
                yield node.id, node.lineno
            case ast.Attribute(ctx=ast.Store()):
                yield node.attr, node.lineno


def speaks_engine(path: Path) -> bool:
    """Engines have words of their own."""
    return any("engine" in part or "vllm" in part for part in path.relative_to(HOUSE).parts)


def test_names_do_not_mislead() -> None:
    wrong = []
    for path in ALL:
        if speaks_engine(path):
            continue
        if is_misleading(path.stem):
            wrong.append(name_of(path))
        wrong += [
            f"{name_of(path)}:{line} {name}"
            for name, line in defined_in(path)
            if is_misleading(name)
        ]
    assert not wrong, "\n".join(wrong)


def test_shipped_names_say_what_a_thing_is() -> None:
    """Not that it is new, and not that it is there to be inherited."""
    wrong = []
    for path in SHIPPED:
        if not speaks_engine(path):
            wrong += [
                f"{name_of(path)}:{line} {name}"
                for name, line in defined_in(path)
                if name.startswith(BANNED_START) or name.endswith(BANNED_CLASS_END)
            ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("name", ["KVLayout", "handle", "volume_v", "renewed", "level", "all1"])
def test_good_names_are_not_banned(name: str) -> None:
    assert not is_misleading(name)


@pytest.mark.parametrize(
    "name", ["utils", "BlockManager", "_key_helpers", "batched_copy", "l1_bytes", "to_L2"]
)
def test_bad_names_are_banned(name: str) -> None:
    assert is_misleading(name)


def test_modules_say_what_they_are() -> None:
    """Every shipped module opens with its docstring."""
    wrong = [name_of(path) for path in SHIPPED if not ast.get_docstring(tree_of(path))]
    assert not wrong, wrong


# ---- documents


def documents() -> list[Path]:
    named = [HOUSE / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")]
    return [path for path in named if path.exists()] + sorted((HOUSE / "docs").rglob("*.md"))


LINK = re.compile(r"\]\((?!https?:|mailto:|#)([^)#\s]+)")
CODE = re.compile(r"`([^`\n]+)`")
PATH = re.compile(r"(?:src|tests|docs|scripts|benchmarks|examples|deploy|requirements)/[\w./-]+")


@pytest.mark.parametrize("document", documents(), ids=name_of)
def test_what_a_document_names_is_there(document: Path) -> None:
    """Links, paths of the repository, targets of make."""
    text = document.read_text()
    missing = [link for link in LINK.findall(text) if not (document.parent / link).exists()]
    makefile = (HOUSE / "Makefile").read_text()
    for code in CODE.findall(text):
        if PATH.fullmatch(code) and not (HOUSE / code.rstrip("/")).exists():
            missing.append(code)
        if target := re.fullmatch(r"make (\w+)", code):
            known = re.search(rf"^{target[1]}:", makefile, re.MULTILINE)
            missing += [] if known else [code]
    assert not missing, missing
