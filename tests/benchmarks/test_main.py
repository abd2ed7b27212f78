"""`python -m benchmarks`: what the parts without an engine print is shown and kept."""

import sys
from pathlib import Path
from types import ModuleType

import pytest

from benchmarks import __main__ as run
from benchmarks import report


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[list[str]]:
    """A module benchmarks.paths_example that notes its arguments; results go to tmp_path."""
    calls: list[list[str]] = []
    module = ModuleType("benchmarks.paths_example", "Copies of nothing.\n\n[--quick]")

    def main(argv: list[str]) -> int:
        calls.append(argv)
        print("arm   ratio")
        return 0

    module.main = main
    monkeypatch.setitem(sys.modules, "benchmarks.paths_example", module)
    monkeypatch.setattr(report, "RESULTS", tmp_path)
    return calls


def test_output_is_shown_and_written_below_the_machine(
    seen: list[list[str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run.run_paths("paths_example", is_quick=False) == 0
    assert seen == [[]]
    assert "arm   ratio" in capsys.readouterr().out
    text = (tmp_path / "paths_example.md").read_text(encoding="utf-8")
    assert text.startswith("# Copies of nothing\n\n- date: ")
    assert text.endswith("## Output\n\n```\narm   ratio\n```\n")


def test_quick_is_passed_on_and_writes_nothing(seen: list[list[str]], tmp_path: Path) -> None:
    assert run.run_paths("paths_example", is_quick=True) == 0
    assert seen == [["--quick"]]
    assert list(tmp_path.iterdir()) == []


def test_everything_is_of_the_host_or_of_tiers_and_of_one_kind() -> None:
    """`make bench` is the host's; what is new is of tiers unless somebody says otherwise."""
    paths, parts = run.chosen("all")
    host, tiers = run.chosen("host"), run.chosen("tiers")
    assert host == (sorted(run.HOST_PATHS), list(run.HOST_PARTS))
    assert sorted(host[0] + tiers[0]) == paths
    assert sorted(host[1] + tiers[1]) == sorted(parts)
    assert {"paths_disk", "paths_redis"} <= set(tiers[0])
    assert (run.chosen("paths"), run.chosen("engine")) == ((paths, []), ([], parts))
