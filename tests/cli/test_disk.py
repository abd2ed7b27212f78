"""`kvtide disk`, as a user runs it, on what a real node has stored."""

import errno
import os
import pty
import shlex
import struct
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtide.cli import disk
from kvtide.testing.fake_engine import FakeEngine, Loaded, make_tokens
from kvtide.testing.faulty_files import Call, FaultyFiles
from kvtide.testing.node_process import NodeProcess
from kvtide.tiers.disk import tier as tier_module
from kvtide.tiers.disk.check import Checked
from kvtide.units import KiB
from tests.cli.runs import KVTIDE, Run, one_line
from tests.node.fixtures import StartNode
from tests.node.test_engines import wait_status
from tests.tiers.disk_place import flip, keep, payload_offset, tails

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
        engine.keep(TOKENS)
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


def test_repair_does_not_say_that_it_removed_what_is_still_there(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    [record] = tails(1)
    file, at = keep(tmp_path, tails(3))[record.key]
    flip(file, at + payload_offset(record))
    files = FaultyFiles()
    files.fail(Call.WRITE, errno.EIO, path_part=".rows")
    with monkeypatch.context() as patched:
        patched.setattr(tier_module, "SystemFiles", lambda: files)
        failed = run("disk", "check", "--repair", str(tmp_path))
    assert failed.exit_code == 1
    assert "removed" not in failed.stdout
    assert "not removed: 1 of the damaged records" in failed.output
    assert run("disk", "check", "--repair", str(tmp_path)).exit_code == 0
    assert run("disk", "check", str(tmp_path)).exit_code == 0


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


def test_a_disk_without_records_has_none(run: Run, tmp_path: Path) -> None:
    keep(tmp_path, [])
    assert run("disk", "show", str(tmp_path)).output.splitlines()[-1] == "no records"
    assert "0 records, all proven" in run("disk", "check", str(tmp_path)).output


@pytest.mark.parametrize("command", [["show"], ["check"], ["check", "--repair"]])
@pytest.mark.parametrize("holds", ["nothing", "others", "a shared directory"])
def test_a_directory_of_something_else_is_no_disk_and_stays_as_it_is(
    run: Run, tmp_path: Path, command: list[str], holds: str
) -> None:
    """Whoever has proven the wrong mount would believe that the data are well. Databases have a
    file LOCK, too."""
    path = tmp_path / "place"
    path.mkdir(mode=0o700)
    if holds == "others":
        (path / "LOCK").touch()
        (path / "000012.ldb").touch()
    elif holds != "nothing":
        assert run("tier", "test", str(path)).exit_code == 0
    before = sorted(path.rglob("*"))
    said = one_line(run("disk", *command, str(path)))
    assert said.startswith(f"Error: no disk tier is in {path}; give the directory that")
    assert sorted(path.rglob("*")) == before


@pytest.mark.parametrize("suffix", ["index", "segment"])
def test_repair_mends_what_is_damaged_beside_records_or_cut_off(
    run: Run, tmp_path: Path, suffix: str
) -> None:
    """A check that comes after it finds nothing."""
    places = keep(tmp_path, tails(10))
    [damaged] = tmp_path.glob(f"*.{suffix}")
    os.truncate(
        damaged, max(offset for _, offset in places.values()) if suffix == "segment" else 90
    )
    checked = run("disk", "check", str(tmp_path))
    assert checked.exit_code == 1
    assert checked.output.splitlines()[-1] == "10 records, 1 fault"
    assert run("disk", "check", "--repair", str(tmp_path)).exit_code == 0
    again = run("disk", "check", str(tmp_path))
    left = 10 if suffix == "index" else 9
    assert again.output.splitlines()[-1] == f"{left} records, all proven"
    assert again.exit_code == 0


def test_repair_leaves_another_version_alone_and_says_so(run: Run, tmp_path: Path) -> None:
    keep(tmp_path, tails(2))
    [index] = tmp_path.glob("*.index")
    content = bytearray(index.read_bytes())
    struct.pack_into("<I", content, 8, 2)
    index.write_bytes(content)
    repaired = run("disk", "check", "--repair", str(tmp_path))
    assert repaired.exit_code == 1
    assert "segment 1: an index has format version 2" in repaired.output
    assert index.read_bytes() == content


@pytest.mark.parametrize("options", [[], ["--repair"]])
def test_a_check_that_is_interrupted_goes_on_where_it_was(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: list[str]
) -> None:
    """By the command that it ends with; what it has found until then is told, or repaired."""
    kv = tmp_path / "a kv"
    records = tails(80)
    places = keep(kv, records, segment_bytes=128 * KiB)
    path, offset = places[records[0].key]
    flip(path, offset + payload_offset(records[0]))
    stop_at = 2

    def interrupted(path: Path, first_segment: int) -> Iterator[Checked]:
        for one in checking(path, first_segment):
            yield one
            if one.segment == stop_at:
                raise KeyboardInterrupt

    checking = disk.check
    with monkeypatch.context() as patch:
        patch.setattr(disk, "check", interrupted)
        stopped = run("disk", "check", *options, str(kv))
    assert stopped.exit_code == 1
    assert "segment 1, byte 0: " in stopped.output
    command = shlex.split(stopped.stderr.splitlines()[-1].partition("go on with: ")[2])
    assert command == ["kvtide", "disk", "check", *options, str(kv), "--from-segment", "2"]
    rest = run(*command[1:])
    assert rest.exit_code == 0, rest.output
    in_first = sum(place == path for place, _ in places.values())
    assert f"{80 - in_first} records from segment 2 on, all proven" in rest.output
    whole = run("disk", "check", str(kv))
    wanted = "79 records, all proven" if options else "80 records, 1 fault"
    assert whole.output.splitlines()[-1] == wanted


def test_a_check_shows_a_bar_on_a_terminal(tmp_path: Path) -> None:
    """It may take hours."""
    keep(tmp_path, tails(10))
    ours, its = pty.openpty()
    try:
        done = subprocess.run([*KVTIDE, "disk", "check", str(tmp_path)], stdout=its, timeout=60)
        shown = os.read(ours, 1 << 16).decode()
    finally:
        os.close(its)
        os.close(ours)
    assert done.returncode == 0
    assert "proving  [" in shown
    assert "100%" in shown
    assert "10 records, all proven" in shown
