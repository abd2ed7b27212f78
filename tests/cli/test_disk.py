"""`kvtide disk`, as a user runs it, on what a real node has stored."""

from pathlib import Path

import pytest

from kvtide.testing.fake_engine import FakeEngine, Loaded, make_tokens
from kvtide.testing.node_process import NodeProcess
from tests.cli.runs import Run
from tests.node.fixtures import StartNode
from tests.node.test_engines import wait_status

TOKENS = make_tokens(160, seed=1)  # two chunks and a tail
SETTINGS = {"disk_bytes_max": "256MiB"}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "disk"


@pytest.fixture
def node(new_node: StartNode, path: Path) -> NodeProcess:
    """A node that has stored TOKENS on disk, and runs."""
    node = new_node(disk_path=path, **SETTINGS)
    node.start()
    with FakeEngine(node.places, "one") as engine:
        engine.store(TOKENS)
        wait_status(node, lambda status: status["tiers"]["disk"]["records"] == 3)
    return node


def damage(path: Path, of_record: int) -> None:
    """Flip a byte in the payload of one of the three records, two of 256 KiB and one of 128."""
    (segment,) = path.glob("*.segment")
    with segment.open("r+b") as file:
        file.seek(of_record * (4 + 256) * 1024 + 100_000)
        (byte,) = file.read(1)
        file.seek(-1, 1)
        file.write(bytes([byte ^ 1]))


def test_show_lists_models_layouts_chains_and_sizes(
    run: Run, node: NodeProcess, path: Path
) -> None:
    """Beside the running node."""
    shown = run("disk", "show", str(path))
    assert shown.exit_code == 0
    first, second = shown.output.splitlines()
    assert first.startswith(f"{path}: 1 segment, ")
    assert "3 records (1 tail) in 1 chain, " in second


def test_check_proves_every_record(run: Run, node: NodeProcess, path: Path) -> None:
    """Beside the running node, which goes on."""
    checked = run("disk", "check", str(path))
    assert checked.exit_code == 0, checked.output
    assert checked.output.splitlines()[-1] == "3 records, all proven"
    assert node.status()["tiers"]["disk"]["records"] == 3


def test_check_finds_a_byte_that_changed_and_repair_removes_the_record(
    run: Run, node: NodeProcess, new_node: StartNode, path: Path
) -> None:
    """And what lies behind it, which nobody could reach."""
    node.end()
    damage(path, of_record=1)
    checked = run("disk", "check", str(path))
    assert checked.exit_code == 1
    assert checked.output.splitlines()[-1] == "3 records, 1 fault"
    assert "segment 1, byte " in checked.output
    repaired = run("disk", "check", "--repair", str(path))
    assert repaired.exit_code == 0
    assert repaired.output.splitlines()[-1] == "removed 2 records, what lay behind included"
    assert run("disk", "check", str(path)).output.splitlines()[-1] == "1 record, all proven"
    node = new_node(disk_path=path, **SETTINGS)
    node.start()
    with FakeEngine(node.places, "two") as engine:
        assert engine.load(TOKENS) == Loaded(4, 4)


def test_repair_leaves_the_directory_to_a_node_that_has_it(
    run: Run, node: NodeProcess, path: Path
) -> None:
    damage(path, of_record=2)
    refused = run("disk", "check", "--repair", str(path))
    assert refused.exit_code == 1
    assert str(node.pid) in refused.stderr.splitlines()[-1]
    assert node.status()["tiers"]["disk"]["records"] == 3


def test_a_directory_that_is_not_there_is_named(run: Run, tmp_path: Path) -> None:
    missing = run("disk", "show", str(tmp_path / "none"))
    assert missing.exit_code == 2
    assert "none" in missing.stderr


def test_an_empty_directory_has_no_records(run: Run, tmp_path: Path) -> None:
    assert run("disk", "show", str(tmp_path)).output.splitlines()[-1] == "no records"
    assert "0 records, all proven" in run("disk", "check", str(tmp_path)).output
