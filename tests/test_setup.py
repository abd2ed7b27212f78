"""Set-up's stages: done once, done again when an input changes or the last try did not end."""

import importlib.util
import os
import sys
from collections.abc import Iterator
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

SETUP = Path(__file__).parents[1] / "scripts" / "setup"


@pytest.fixture
def setup(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The program as a module, with an environment of the test's own and nothing to install."""
    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # it would lie beside the program
    loader = SourceFileLoader("setup", str(SETUP))
    spec = importlib.util.spec_from_loader("setup", loader)
    assert spec is not None
    module: Any = importlib.util.module_from_spec(spec)
    sys.modules["setup"] = module  # where its dataclasses look for it
    loader.exec_module(module)
    module.STAMPS, module.LOG = tmp_path / "stamps", tmp_path / "setup.log"
    module.check_machine = lambda: None
    lock = os.open(tmp_path / "lock", os.O_CREAT | os.O_RDWR)
    module.take_lock = lambda: lock
    yield module
    os.close(lock)
    del sys.modules["setup"]


def stages(setup: ModuleType, tmp_path: Path, *, code: str = "", second: str = "b") -> None:
    """Two, each of which notes that it ran; `code` is run by the second after that."""
    note = f"open({str(tmp_path / 'ran')!r}, 'a').write"
    commands = {name: f"{note}('{name}'); {more}" for name, more in (("one", ""), ("two", code))}
    setup.stages = lambda: [
        setup.Stage("one", (sys.executable, "-c", commands["one"]), ("a",)),
        setup.Stage("two", (sys.executable, "-c", commands["two"]), (second,)),
    ]


def ran(tmp_path: Path) -> str:
    """What ran since the last look."""
    text = (tmp_path / "ran").read_text() if (tmp_path / "ran").exists() else ""
    (tmp_path / "ran").write_text("")
    return text


def test_what_is_there_is_not_done_again(
    setup: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Progress is a line for each stage, and there is none where nothing is to be done."""
    stages(setup, tmp_path)
    assert setup.main() == 0
    assert ran(tmp_path) == "onetwo"
    assert [line.split()[:2] for line in capsys.readouterr().out.splitlines()] == [
        ["setup:", "one"],
        ["setup:", "two"],
    ]
    assert setup.main() == 0
    assert ran(tmp_path) == ""
    assert capsys.readouterr().out == ""
    stages(setup, tmp_path, second="changed")
    assert setup.main() == 0
    assert ran(tmp_path) == "two"


def test_a_stage_that_failed_is_said_and_done_again(
    setup: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The last of what it said is shown; the stages before it are kept."""
    stages(setup, tmp_path, code="raise SystemExit('no such wheel')")
    assert setup.main() == 1
    assert ran(tmp_path) == "onetwo"
    said = capsys.readouterr().err
    assert "no such wheel" in said
    assert "setup: two ended with 1" in said
    stages(setup, tmp_path)
    assert setup.main() == 0
    assert ran(tmp_path) == "two"
