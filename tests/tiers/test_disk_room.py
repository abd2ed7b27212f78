"""Room that comes back: holes, segments that go, indexes that are written anew."""

import errno
import logging
import shutil
from pathlib import Path

import pytest

from kvtide.testing.faulty_files import Call
from kvtide.testing.tier_drive import DrivenTier
from kvtide.testing.tier_records import chain_of, layout_of, text
from kvtide.tiers.base import StoreOutcome
from kvtide.tiers.disk.room import REWRITE_ROWS_MIN
from kvtide.units import KiB
from tests.tiers.disk_place import (
    ROOT,
    assert_holds,
    bytes_taken,
    disk_of,
    driven,
    files_of,
    settle,
    tails,
)

GONE = REWRITE_ROWS_MIN + 1
SALT = bytes(range(32))


def fail_again(tier: DrivenTier, fault: str, times: int) -> None:
    """Ticks pass until what cannot be removed was tried so often."""
    injected = files_of(disk_of(tier)).injected
    until = injected[fault] + times
    while injected[fault] < until:
        tier.pass_time(100)
        tier.poll_for(0.001)
    settle(tier)


def take_away(tier: DrivenTier, first: int, count: int) -> None:
    """So many records, from this number on, in one removal."""
    assert disk_of(tier).remove(record.key for record in tails(count, first)) == count


@pytest.mark.parametrize("call", [Call.RENAME, Call.READ])
def test_an_index_that_cannot_be_written_anew_waits_for_the_next_removal(
    kv: Path, call: Call, caplog: pytest.LogCaptureFixture
) -> None:
    """It is not tried again and again meanwhile, and told of once; then it is written."""
    records = tails(100)
    with driven(kv, segment_bytes=1024 * KiB) as tier:
        disk, faults = disk_of(tier), files_of(disk_of(tier))
        tier.keep(records)
        disk._room.roll()
        while not disk._space.segments[1].is_sealed:
            tier.poll_for(0.01)
        caplog.clear()
        faults.fail(call, errno.EIO, path_part=".index")
        for turn in range(2):
            with faults.stalled(call):
                take_away(tier, *[(0, GONE), (GONE, 1)][turn])
                while not faults.stalled_count:
                    tier.poll_for(0.01)
            assert disk._workers.wait_result(30)
            tier.poll()
            assert not disk._space.segments[1].is_rewriting, turn
        assert len([one for one in caplog.records if one.levelno == logging.WARNING]) == 1
        assert "index of segment 1 could" in caplog.text
        faults.heal()
        take_away(tier, GONE + 1, 1)
        while disk._space.segments[1].indexed != len(records) - GONE - 2:
            tier.poll_for(0.01)
        settle(tier)
        assert_holds(tier, records[GONE + 2 :], [])


BAD_FILES = {
    "segment": (Call.PUNCH, "1.segment"),
    "whole segment": (Call.UNLINK, "1.segment"),
    "clear": (Call.OPEN, ".cleared"),
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_one_file_that_cannot_be_removed_does_not_stop_stores(kv: Path, name: str) -> None:
    """It is tried with each tick; neither that nor a trial of stores is ended by it."""
    call, path_part = BAD_FILES[name]
    fault, records = f"{call} EUCLEAN", tails(6)
    with driven(kv) as tier:
        disk, faults = disk_of(tier), files_of(disk_of(tier))
        tier.keep(records)
        faults.fail(call, errno.EUCLEAN, path_part=path_part)
        disk._room.roll()
        if name == "clear":
            tier.tier.clear(SALT)  # of nobody here: the segment stays, and the clear with it
        else:
            take_away(tier, 0, 6 if name == "whole segment" else 1)
        fail_again(tier, fault, 10)
        assert tier.tier.statistics().state == "on"
        faults.fail(Call.WRITE, errno.EIO, path_part=".segment")
        assert tier.store(tails(10, first=100))[-1] is StoreOutcome.BROKEN
        faults.heal()
        faults.fail(call, errno.EUCLEAN, path_part=path_part)
        tier.pass_time(60_000)
        while disk._writes.is_open:
            tier.poll_for(0.05)
        fail_again(tier, fault, 10)
        assert tier.tier.statistics().state == "on", "on trial"
        tier.keep(tails(4, first=200))
        fail_again(tier, fault, 10)
        assert tier.tier.statistics().state == "on"
        disk.check_integrity()


@pytest.mark.parametrize("is_indexed", [False, True])
def test_a_kill_between_a_row_and_its_hole_costs_no_room(kv: Path, *, is_indexed: bool) -> None:
    """The next start punches it: it makes an index of the log, which was all that told of it. Also
    where the kill comes once more, between that index and the end of the log."""
    chunks = [chain_of(ROOT, layout_of(64 * KiB), text(number, 4))[0] for number in range(6)]
    copy = kv.parent / "copy"
    with driven(kv) as tier:
        tier.keep(chunks)
        files_of(disk_of(tier)).fail(Call.PUNCH, errno.EIO)
        gone = [chunks[number].key for number in (0, 2, 5)]
        assert disk_of(tier).remove(gone) == len(gone)
        settle(tier)
        if is_indexed:
            files_of(disk_of(tier)).fail(Call.UNLINK, errno.EIO, path_part=".rows")
            tier.close(30)
        shutil.copytree(kv, copy)
    assert {path.suffix for path in copy.glob("0*")} >= {".segment", ".rows"}
    assert is_indexed == bool(list(copy.glob("*.index")))
    assert bytes_taken(copy) > 6 * chunks[0].payload_bytes
    for _ in range(2):
        with driven(copy) as tier:
            assert tier.tier.statistics().bytes_used == bytes_taken(copy)
            assert bytes_taken(copy) < 3 * chunks[0].payload_bytes + 64 * KiB
            assert_holds(
                tier, [chunks[1], chunks[3], chunks[4]], [chunks[0], chunks[2], chunks[5]]
            )
