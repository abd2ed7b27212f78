"""A clear: nothing of it is found again, whatever waits, fails, or is killed."""

import errno
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kvtide.core.records import Record
from kvtide.testing.faulty_files import Call, FaultyFiles
from kvtide.testing.tier_records import Cells, chain_of, root_of, text
from kvtide.tiers.base import StoreJob, StoreOutcome
from kvtide.tiers.disk.stores import WRITING_MAX
from kvtide.tiers.disk.tier import DiskTier
from kvtide.units import KiB
from tests.tiers.disk_place import (
    ROOT,
    TINY,
    assert_holds,
    disk_of,
    driven,
    files_of,
    keep,
    open_disk,
    tails,
)


def test_a_store_of_another_salt_that_waits_ends_with_a_clear(tmp_path: Path) -> None:
    """It is the only thing of its kind; the kind ends with it, once."""
    [other] = chain_of(root_of(salt="another"), TINY, text(99, 1))
    with driven(tmp_path / "kv") as tier:
        files = files_of(disk_of(tier))
        with files.stalled(Call.WRITE):
            jobs = [tier.submit_store(record) for record in tails(WRITING_MAX)]
            waiting = tier.submit_store(other)
            tier.tier.clear(None)
            assert tier.stored(waiting) is StoreOutcome.NOT_ANCHORED
        assert {tier.stored(job) for job in jobs} == {StoreOutcome.NOT_ANCHORED}
        assert tier.store([other]) == [StoreOutcome.STORED]
        disk_of(tier).check_integrity()


def test_a_node_starts_where_the_later_of_two_copies_is_gone(tmp_path: Path) -> None:
    """The row that takes the first copy away could not be written; the second was cleared."""
    run_to_its_death(tmp_path / "kv", "two_copies")
    with driven(tmp_path / "kv") as tier:
        disk_of(tier).check_integrity()
        assert not tier.is_there(tails(1)[0])


@pytest.mark.parametrize("scene", ["cleared_and_killed", "cleared_stored_and_killed"])
def test_a_clear_outlives_a_kill(tmp_path: Path, scene: str) -> None:
    """Nothing had time to be removed; what another salt has, and what came later, stays."""
    run_to_its_death(tmp_path / "kv", scene)
    later = tails(2) if scene == "cleared_stored_and_killed" else []
    for _ in range(2):
        with driven(tmp_path / "kv") as tier:
            assert not any(map(tier.is_there, tails(20)[len(later) :]))
            assert_holds(tier, [salted(1), *later], [])


@pytest.mark.parametrize("scope", [(b"", None), (None, ROOT.fingerprint), (b"", ROOT.fingerprint)])
def test_a_clear_outlives_a_drive_that_refuses_writes(
    tmp_path: Path, scope: tuple[bytes | None, bytes | None]
) -> None:
    """No row can be written, no hole be punched, no file be removed, until the node has ended."""
    keep(tmp_path / "kv", tails(20))
    with driven(tmp_path / "kv") as tier:
        files = files_of(disk_of(tier))
        for call in (Call.WRITE, Call.PUNCH, Call.UNLINK):
            files.fail(call, errno.EIO)
        assert tier.tier.clear(*scope) == 20
        tier.poll_for(0.05)
    with driven(tmp_path / "kv") as tier:
        assert not any(map(tier.is_there, tails(20)))
        tier.keep(tails(20))
    with driven(tmp_path / "kv") as tier:
        assert_holds(tier, tails(20), [])


def test_a_clear_that_cannot_be_written_down_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It is not found while the node lives; that the next start finds it, somebody must know."""
    with driven(tmp_path / "kv") as tier:
        tier.keep(tails(3))
        files_of(disk_of(tier)).make_read_only()
        caplog.clear()
        assert tier.tier.clear(None) == 3
        for _ in range(20):
            tier.pass_time(1000)
            tier.poll_for(0.01)
        assert "a clear cannot be written down: Read-only" in tier.tier.statistics().state
        assert caplog.text.count("a clear cannot be written down") == 1
        assert not any(map(tier.is_there, tails(3)))
    assert "not written down: 1 of the clears" in caplog.text
    with driven(tmp_path / "kv") as tier:
        assert tier.is_there(tails(1)[0])


def test_a_clear_while_nothing_works_is_made_when_it_does(tmp_path: Path) -> None:
    """It is known at once, and written down by the first tick that finds the place well."""
    keep(tmp_path / "kv", tails(20))
    with driven(tmp_path / "kv") as tier:
        files = files_of(disk_of(tier))
        files.fail_all(errno.EROFS)
        assert tier.store(tails(9, first=50))[-1] is StoreOutcome.BROKEN
        assert tier.tier.clear(b"") == 20
        tier.poll_for(0.05)
        assert not cleared_in(tmp_path / "kv")
        files.fail(Call.WRITE, errno.EROFS, path_part=".rows")
        files.fail(Call.UNLINK, errno.EROFS, path_part=".segment")
        files._all_code = 0
        while not cleared_in(tmp_path / "kv"):
            tier.pass_time(60_000)
            tier.poll_for(0.02)
        files.heal()


def test_what_a_clear_left_in_the_directory_goes_with_the_last_segment_it_means(
    tmp_path: Path,
) -> None:
    """A later clear of the same replaces it; another salt's record keeps it."""
    with driven(tmp_path / "kv") as tier:
        tier.tier.clear(b"")
        assert not cleared_in(tmp_path / "kv"), "there is nothing to clear"
        tier.keep([salted(1), *tails(3)])
        tier.tier.clear(b"")
        assert cleared_in(tmp_path / "kv") == ["00000001.none.all.cleared"]
        tier.keep(tails(3))
        tier.tier.clear(b"")
        assert "00000002.none.all.cleared" in cleared_in(tmp_path / "kv")
        tier.keep(tails(3))
        tier.tier.clear(root_of(salt="s").salt_digest)
        while cleared_in(tmp_path / "kv"):
            tier.pass_time(1_000)
            tier.poll_for(0.02)
        assert_holds(tier, tails(3), [])
    with driven(tmp_path / "kv") as tier:
        assert_holds(tier, tails(3), [])


def test_a_clear_waits_for_a_drive_that_hangs_only_for_a_moment(tmp_path: Path) -> None:
    """It is made once the drive comes back."""
    with driven(tmp_path / "kv") as tier:
        tier.keep(tails(3))
        with files_of(disk_of(tier)).stalled():
            begun_s = time.monotonic()
            assert tier.tier.clear(None) == 3
            assert time.monotonic() - begun_s < 5
        assert tier.find(tails(1)) == []


def test_a_directory_that_cannot_be_synced_takes_clears(tmp_path: Path) -> None:
    """Some file systems have no such call; stores go on."""
    with driven(tmp_path / "kv", sync="none") as tier:
        files_of(disk_of(tier)).fail(Call.SYNC_DIRECTORY, errno.EINVAL)
        for _ in range(8):
            tier.keep(tails(2))
            assert tier.tier.clear(b"") == 2
            tier.pass_time(1_000)
            tier.poll_for(0.02)
        assert tier.tier.statistics().state == "on"
        tier.keep(tails(2))


def test_an_end_without_time_leaves_what_was_cleared_to_the_next_start(tmp_path: Path) -> None:
    """A clear of millions takes seconds to be swept, and a node has fewer to end."""
    with driven(tmp_path / "kv") as tier:
        tier.keep([salted(1), *tails(3)])
        tier.tier.clear(b"")
        disk_of(tier).close(0.0)
        assert not disk_of(tier)._catalog.is_swept
        assert disk_of(tier)._workers.stop(30)
        tier.poll()  # and gives the directory back
    with driven(tmp_path / "kv") as tier:
        assert_holds(tier, [salted(1)], [])
        assert not any(map(tier.is_there, tails(3)))


def cleared_in(path: Path) -> list[str]:
    return sorted(one.name for one in path.glob("*.cleared"))


# ---- in a process that is killed


def run_to_its_death(path: Path, scene: str) -> None:
    """Play one scene in a process of its own, to the kill at its end."""
    command = [sys.executable, "-m", "tests.tiers.test_disk_clear", str(path), scene]
    ended = subprocess.run(command, timeout=60, check=False)
    assert ended.returncode == -signal.SIGKILL, ended.returncode


def store(tier: DiskTier, record: Record) -> None:
    tier.store(StoreJob(1, record, Cells(record).fill().views))
    until_s = time.monotonic() + 30
    while not tier.poll():
        assert time.monotonic() < until_s
        time.sleep(0.001)


def poll_on(tier: DiskTier) -> None:
    """Let what is under way end."""
    for _ in range(20):
        tier.poll()
        time.sleep(0.01)


def salted(number: int) -> Record:
    return chain_of(root_of(salt="s"), TINY, text(number, 1))[0]


def two_copies(path: Path) -> None:
    files = FaultyFiles()
    tier = open_disk(path, files=files, segment_bytes=32 * KiB)
    [record] = tails(1)
    store(tier, record)
    for number in range(5):
        store(tier, salted(number))
    files.fail(Call.WRITE, 5, path_part="00000001.rows")
    files.fail(Call.OPEN, 5, path_part=".cleared")
    tier.clear(b"")
    poll_on(tier)
    store(tier, record)
    for number in range(50, 58):
        store(tier, salted(number))
    tier.clear(b"")
    poll_on(tier)


def cleared_and_killed(path: Path) -> None:
    tier = open_disk(path)
    for record in [salted(1), *tails(20)]:
        store(tier, record)
    assert tier.clear(b"") == 20


def cleared_stored_and_killed(path: Path) -> None:
    tier = open_disk(path)
    for record in [salted(1), *tails(20)]:
        store(tier, record)
    files_of(tier).fail(Call.WRITE, errno.EIO, path_part="00000001.rows")
    assert tier.clear(b"") == 20
    for record in tails(2):
        store(tier, record)


if __name__ == "__main__":
    globals()[sys.argv[2]](Path(sys.argv[1]))
    os.kill(os.getpid(), signal.SIGKILL)


def test_clears_of_what_is_not_there_cost_nothing_that_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A salt whose records are gone, or never were there, leaves no file: so many of them would
    end as a clear of all."""
    monkeypatch.setattr("kvtide.tiers.disk.tier.CLEARS_MAX", 4)
    with driven(tmp_path / "kv", segment_bytes=64 * KiB) as tier:
        tier.keep(tails(40))
        for number in range(9):
            assert tier.tier.clear(root_of(salt=f"{number}").salt_digest) == 0
        assert files_of(disk_of(tier)).calls[Call.SYNC_DIRECTORY] >= 9, "of what was unlinked"
        assert not list((tmp_path / "kv").glob("*.cleared"))
        assert tier.tier.statistics().records == 40
