"""Room that comes back: holes, segments that go, indexes that are written anew."""

import errno
import logging
import shutil
import subprocess
from pathlib import Path

import pytest

from kvtide.testing.faulty_files import Call
from kvtide.testing.tier_drive import DrivenTier
from kvtide.testing.tier_records import chain_of, layout_of, root_of, text
from kvtide.tiers.base import StoreOutcome
from kvtide.tiers.disk.room import RETRY_MS_MAX, REWRITE_ROWS_MIN
from kvtide.units import KiB
from tests.tiers.disk_place import (
    ROOT,
    TINY,
    assert_holds,
    bytes_taken,
    disk_of,
    driven,
    files_of,
    settle,
    tails,
)

CLEAR_FAILS = "a clear cannot be written down: Structure needs cleaning"
GONE = REWRITE_ROWS_MIN + 1
SALTED = root_of(salt="s")


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


def seal(tier: DrivenTier) -> None:
    """Nothing more is appended to the first segment, and it has its index."""
    disk_of(tier)._room.roll()
    while not disk_of(tier)._space.segments[1].is_sealed:
        tier.poll_for(0.01)


@pytest.mark.parametrize("call", [Call.RENAME, Call.READ])
def test_an_index_that_cannot_be_written_anew_waits_for_the_next_removal(
    kv: Path, call: Call, caplog: pytest.LogCaptureFixture
) -> None:
    """It is not tried again and again meanwhile, and told of once; then it is written."""
    records = tails(100)
    with driven(kv, segment_bytes=1024 * KiB) as tier:
        disk, faults = disk_of(tier), files_of(disk_of(tier))
        tier.keep(records)
        seal(tier)
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
        if name == "clear":
            tier.keep(chain_of(SALTED, TINY, text(1, 1)))
        disk._room.roll()
        if name == "clear":
            tier.tier.clear(SALTED.salt_digest)  # the segment stays, and the clear with it
        else:
            take_away(tier, 0, 6 if name == "whole segment" else 1)
        well = CLEAR_FAILS if name == "clear" else "on"
        fail_again(tier, fault, 10)
        assert tier.tier.statistics().state == well
        faults.fail(Call.WRITE, errno.EIO, path_part=".segment")
        assert tier.store(tails(10, first=100))[-1] is StoreOutcome.BROKEN
        faults.heal()
        faults.fail(call, errno.EUCLEAN, path_part=path_part)
        tier.pass_time(60_000)
        while disk._writes.is_open:
            tier.poll_for(0.05)
        fail_again(tier, fault, 10)
        assert tier.tier.statistics().state == well, "on trial"
        tier.keep(tails(4, first=200))
        fail_again(tier, fault, 10)
        assert tier.tier.statistics().state == well
        disk.check_integrity()


@pytest.mark.parametrize("path_part", ["1.segment", "1.rows"], ids=["holes", "rows"])
def test_what_cannot_be_given_back_is_told_once_and_tried_more_and_more_seldom(
    kv: Path, path_part: str
) -> None:
    """Each row that says it again would take room from others, for as long as it fails."""
    call = Call.PUNCH if path_part == "1.segment" else Call.WRITE
    with driven(kv, segment_bytes=1024 * KiB) as tier:
        disk, faults = disk_of(tier), files_of(disk_of(tier))
        tier.keep(tails(60))
        disk._room.roll()
        tier.keep(tails(20, first=100))
        faults.fail(call, errno.EIO, path_part=path_part)
        take_away(tier, 0, 40)
        fail_again(tier, f"{call} EIO", 2)
        size, tries = (kv / "00000001.rows").stat().st_size, faults.injected[f"{call} EIO"]
        for _ in range(600):  # a minute
            tier.pass_time(100)
            tier.poll_for(0)
            settle(tier)
        assert (kv / "00000001.rows").stat().st_size == size
        assert 5 < faults.injected[f"{call} EIO"] - tries < 20
        taken = bytes_taken(kv)
        faults.heal()
        tier.pass_time(RETRY_MS_MAX)
        settle(tier)
        assert bytes_taken(kv) < taken
        disk.check_integrity()
    with driven(kv) as tier:
        assert_holds(tier, [*tails(20, first=40), *tails(20, first=100)], tails(40))


@pytest.mark.parametrize("other_block_bytes", [64 * KiB, 16 * KiB], ids=["one kind", "two kinds"])
@pytest.mark.parametrize("segment", ["active", "indexed", "sealed"])
def test_a_kill_between_a_row_and_its_hole_costs_no_room(
    kv: Path, other_block_bytes: int, segment: str
) -> None:
    """The next start punches it: it makes an index of the log, which was all that told of it. Also
    where the kill comes between that index and the end of the log, and where the index was there
    before, and the log says what has gone since."""
    layouts = layout_of(64 * KiB), layout_of(other_block_bytes)
    chunks = [chain_of(ROOT, layouts[number % 2], text(number, 4))[0] for number in range(6)]
    gone, left = [chunks[0], chunks[2], chunks[5]], [chunks[1], chunks[3], chunks[4]]
    copy = kv.parent / "copy"
    with driven(kv) as tier:
        tier.keep(chunks)
        if segment == "sealed":
            seal(tier)
        nth = 3 if segment == "sealed" else 1
        files_of(disk_of(tier)).fail(Call.PUNCH, errno.EIO, nth=nth)
        assert disk_of(tier).remove(record.key for record in gone) == len(gone)
        settle(tier)
        if segment == "indexed":
            files_of(disk_of(tier)).fail(Call.UNLINK, errno.EIO, path_part=".rows")
            tier.close(30)
        subprocess.run(["cp", "-r", "--sparse=always", kv, copy], check=True)  # with its holes
    assert {path.suffix for path in copy.glob("0*")} >= {".segment", ".rows"}
    assert bool(list(copy.glob("*.index"))) == (segment != "active")
    there = [*left, gone[-1]] if segment == "sealed" else chunks
    assert bytes_taken(copy) > sum(record.payload_bytes for record in there)
    for _ in range(2):
        with driven(copy) as tier:
            settle(tier)
            assert tier.tier.statistics().bytes_used == bytes_taken(copy)
            assert bytes_taken(copy) < sum(record.payload_bytes for record in left) + 64 * KiB
            assert_holds(tier, left, gone)


def test_a_kill_between_an_index_written_anew_and_the_end_of_its_log_costs_no_record(
    kv: Path,
) -> None:
    """The log says of records that they are gone which the index does not have any more."""
    records, copy = tails(100), kv.parent / "copy"
    with driven(kv, segment_bytes=1024 * KiB) as tier:
        disk = disk_of(tier)
        tier.keep(records)
        seal(tier)
        files_of(disk).fail(Call.UNLINK, errno.EIO, path_part=".rows")
        take_away(tier, 0, GONE)
        while not disk._space.segments[1].is_stale:
            tier.poll_for(0.01)
        shutil.copytree(kv, copy)
    assert (copy / "00000001.rows").stat().st_size > 8 * GONE
    with driven(copy) as tier:
        assert disk_of(tier)._space.segments[1].indexed == len(records) - GONE
        assert_holds(tier, records[GONE:], [])
