"""Runs commands as a user does."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from kvtide.cli.main import main
from kvtide.node import main as node_main

Run = Callable[..., Result]

KVTIDE = [sys.executable, "-m", "kvtide.cli.main"]


@pytest.fixture
def run(runtime_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs a command in the runtime directory of the test, and in its process, which `serve` must
    not make a node's: that would last."""
    monkeypatch.setenv("KVTIDE_RUNTIME_DIR", str(runtime_dir))
    monkeypatch.setattr(node_main, "prepare_process", lambda: None)

    def run_it(*arguments: str, typed: str | None = None) -> Result:
        return CliRunner().invoke(main, arguments, input=typed)

    return run_it


def one_line(result: Result, code: int = 1) -> str:
    """What a command that fails says: one line, no traceback."""
    assert result.exit_code == code, result.output
    assert isinstance(result.exception, SystemExit)
    lines = result.stderr.strip().splitlines()
    assert len(lines) == 1, lines
    return lines[0]
