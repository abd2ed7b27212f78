"""The demo: its verdict, and that it leaves nothing behind when it is interrupted."""

import dataclasses
import importlib.util
import shutil
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from kvtide.node.launch import start_node
from kvtide.testing import leash
from kvtide.testing.completions import Completion, Piece
from kvtide.testing.node_process import LAUNCHER, PROGRAM, node_pids
from kvtide.testing.serving import ServedEngine

TESTS = Path(__file__).parents[1]
DEMO = TESTS.parent / "examples" / "demo.py"
STUB = TESTS / "testing" / "stub_engine.py"


@pytest.fixture(scope="module")
def demo() -> Iterator[ModuleType]:
    """The program, as a module."""
    spec = importlib.util.spec_from_file_location("demo", DEMO)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["demo"] = module  # where its dataclasses look for it
    spec.loader.exec_module(module)
    yield module
    del sys.modules["demo"]


# ---- the verdict


def completion(*token_ids: int) -> Completion:
    return Completion((Piece("yes", token_ids, (), 10.0),), 2000, 0, "length", 20.0)


def good_run(demo: ModuleType) -> list[Any]:
    """All stages of all texts; only those that were computed cold have another answer."""
    stages = demo.Stage
    return [
        demo.Asked(
            document,
            stage,
            completion(1, 2 if stage is not stages.COLD else 3),
            0 if stage in (stages.COLD, stages.OWN) else 1920,
        )
        for document in demo.DOCUMENTS
        for stage in stages
    ]


def test_a_run_is_good_where_every_answer_from_kvtide_is_the_engines_own(demo: ModuleType) -> None:
    text, is_good = demo.table(good_run(demo))
    assert is_good
    lines = text.splitlines()
    assert len(lines) == 1 + len(demo.DOCUMENTS) * len(demo.Stage)
    assert text.count("equal") == len(demo.DOCUMENTS) * (len(demo.Stage) - 2)


@pytest.mark.parametrize("what", ["another answer", "no tokens"])
@pytest.mark.parametrize("name", ["RESET", "RESTARTED", "BESIDE", "KILLED"])
def test_one_answer_that_is_not_spoils_it(demo: ModuleType, name: str, what: str) -> None:
    """In any stage, of the last text."""
    asked = good_run(demo)
    at = max(n for n, one in enumerate(asked) if one.stage is demo.Stage[name])
    change = {"kvtide_tokens": 0} if what == "no tokens" else {"answer": completion(1, 9)}
    asked[at] = dataclasses.replace(asked[at], **change)
    text, is_good = demo.table(asked)
    assert not is_good
    assert text.count("differs") == (what == "another answer")


# ---- the end


@pytest.fixture
def signals() -> Iterator[None]:
    """Handlers as they were."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.getsignal(number) for number in numbers}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("signals")
def test_ctrl_c_leaves_no_engine_and_no_node(
    demo: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any
) -> None:
    """While the first engine starts, which has just launched its node: nobody listens yet."""
    package = tmp_path / "vllm" / "entrypoints" / "cli"
    package.mkdir(parents=True)
    for directory in (package, *package.parents[:2]):
        (directory / "__init__.py").touch()
    shutil.copy(STUB, package / "main.py")
    started: list[ServedEngine] = []

    class StubEngine(ServedEngine):
        """What the demo starts."""

        def start(self) -> None:
            self.runtime_dir = Path(self._variables["KVTIDE_RUNTIME_DIR"])
            self._variables["PYTHONPATH"] = str(tmp_path)
            self._on_wait = self.interrupt
            started.append(self)
            super().start()

        def interrupt(self, elapsed_s: float) -> None:
            start_node(self.runtime_dir, {"KVTIDE_HOST_BYTES": "64MiB"})
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(demo, "ServedEngine", StubEngine)
    assert demo.main() == 130
    [engine] = started
    assert leash.processes_of_session(engine.session) == []
    assert node_pids(engine.runtime_dir, (PROGRAM, LAUNCHER)) == []
    assert not engine.runtime_dir.parent.exists()
    assert "interrupted; all processes have ended" in capfd.readouterr().out
