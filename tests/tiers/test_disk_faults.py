"""A place that fails costs its callers nothing: one line, misses, and it heals by itself."""

import errno
import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from kvtide.errors import ConfigError
from kvtide.testing.faulty_files import Call, FaultyFiles
from kvtide.testing.tier_drive import DrivenTier
from kvtide.testing.tier_records import chain_of, layout_of, text
from kvtide.tiers.base import LoadOutcome, StoreOutcome
from kvtide.tiers.breaker import FAILURES_MAX
from kvtide.tiers.disk.stores import REFUSED_MS
from kvtide.units import KiB, MiB
from tests.tiers.disk_place import (
    ROOT,
    SMALL,
    assert_holds,
    bytes_taken,
    disk_of,
    driven,
    files_of,
    keep,
    open_disk,
    settle,
    tails,
)

LARGE = layout_of(64 * KiB)


def faults_of(tier: DrivenTier) -> FaultyFiles:
    return files_of(disk_of(tier))


def lines_of(caplog: pytest.LogCaptureFixture, level: int) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= level]


def heal(tier: DrivenTier) -> None:
    """The place is well: time passes until the tier has noticed."""
    faults_of(tier).heal()
    for _ in range(200):
        tier.pass_time(60_000)
        tier.poll_for(0.05)
        if tier.tier.statistics().state == "on":
            return
    raise AssertionError(tier.tier.statistics().state)


WRITE_FAULTS: dict[str, tuple[int, Callable[[FaultyFiles], None]]] = {
    "full": (errno.ENOSPC, lambda files: files.fail(Call.WRITE, errno.ENOSPC)),
    "broken drive": (errno.EIO, lambda files: files.fail(Call.WRITE, errno.EIO)),
    "read-only": (errno.EROFS, lambda files: files.make_read_only()),
    "no permission": (errno.EACCES, lambda files: files.fail(Call.OPEN, errno.EACCES)),
    "too many open files": (errno.EMFILE, lambda files: files.fail(Call.OPEN, errno.EMFILE)),
    "over quota": (errno.EDQUOT, lambda files: files.fail(Call.WRITE, errno.EDQUOT)),
}


@pytest.mark.parametrize("name", WRITE_FAULTS)
def test_stores_that_fail_open_the_breaker_with_one_line_and_it_heals(
    kv: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Five in a row; the line names errno and path; afterwards all is as before."""
    code, inject = WRITE_FAULTS[name]
    with driven(kv, segment_bytes=64 * KiB) as tier:
        tier.keep(tails(8, first=500))  # the next one begins a segment
        caplog.clear()
        inject(faults_of(tier))
        outcomes = tier.store(tails(20))
        failed = StoreOutcome.NO_ROOM if name in ("full", "over quota") else StoreOutcome.FAILED
        tried = outcomes.index(StoreOutcome.BROKEN)
        assert outcomes[tried:] == [StoreOutcome.BROKEN] * (20 - tried)
        assert set(outcomes[:tried]) <= {failed, StoreOutcome.STORED}
        is_full = failed is StoreOutcome.NO_ROOM  # the first shows that there is less room
        assert outcomes[:tried].count(failed) == FAILURES_MAX + is_full
        [line] = lines_of(caplog, logging.ERROR)
        assert f"errno {code}" in line
        assert str(kv) in line
        assert f"errno {code}" in tier.tier.statistics().state
        caplog.clear()
        heal(tier)
        assert set(tier.store(tails(20))) <= {StoreOutcome.STORED, StoreOutcome.HELD}
        assert len(lines_of(caplog, logging.WARNING)) == 1
        held = tails(20) + ([] if is_full else tails(8, first=500))  # they were to make room
        assert_holds(tier, held, [])
    with driven(kv) as tier:
        assert_holds(tier, held, [])


@pytest.mark.parametrize("code", [errno.EIO, errno.EMFILE, errno.EACCES])
def test_loads_that_fail_open_the_breaker_with_one_line_and_it_heals(
    kv: Path, code: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Lookups find nothing meanwhile: nobody waits for what would fail. No record is removed."""
    records = tails(8)
    with driven(kv) as tier:
        tier.keep(records)
        call = Call.READ if code == errno.EIO else Call.OPEN
        faults_of(tier).fail(call, code)
        outcomes = [tier.load(records[number % 8]) for number in range(12)]
        assert outcomes[:FAILURES_MAX] == [LoadOutcome.FAILED] * FAILURES_MAX
        assert outcomes[FAILURES_MAX:] == [LoadOutcome.BROKEN] * (12 - FAILURES_MAX)
        assert tier.find(records[:1]) == []
        assert not tier.is_there(records[0])
        assert tier.store(tails(1, first=99)) == [StoreOutcome.BROKEN]
        assert len(lines_of(caplog, logging.ERROR)) == 1
        heal(tier)
        assert_holds(tier, records, [])


def test_a_probe_that_works_where_stores_do_not_is_no_reason_to_say_more(
    kv: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Half a minute of stores to a drive that refuses records, and nothing else: one line, few
    tries, also where what goes meanwhile can be removed."""
    with driven(kv) as tier:
        tier.keep(tails(200))
        faults = faults_of(tier)
        faults.fail(Call.WRITE, errno.EIO, path_part=".segment")
        caplog.clear()
        for second in range(30):
            tier.store(tails(6, first=1_000 + 10 * second))
            disk_of(tier).remove([tails(1, first=second)[0].key])
            tier.pass_time(1_000)
            settle(tier)
            while disk_of(tier)._writes.is_probing:
                tier.poll_for(0.05)
        assert tier.tier.statistics().stored["failed"] <= FAILURES_MAX + 5
        assert len(lines_of(caplog, logging.WARNING)) == 1
        heal(tier)
        tier.keep(tails(4, first=900))
        assert len(lines_of(caplog, logging.WARNING)) == 2


def test_reads_that_a_probe_can_do_and_loads_cannot_are_told_of_once(
    kv: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A drive that gives a page and no more."""
    chunks = [chain_of(ROOT, LARGE, text(number, 4))[0] for number in range(8)]
    with driven(kv) as tier:
        tier.keep(chunks)
        files = faults_of(tier)
        files.fail(Call.READ, errno.ENOMEM, bytes_over=4096)
        for second in range(30):
            for record in chunks[:6]:
                assert tier.load(record) in (LoadOutcome.FAILED, LoadOutcome.BROKEN), second
            tier.pass_time(1_000)
            while disk_of(tier)._reads.is_probing:
                tier.poll_for(0.05)
        assert tier.tier.statistics().loaded["failed"] <= FAILURES_MAX + 5
        assert len(lines_of(caplog, logging.WARNING)) == 1
        heal(tier)
        assert_holds(tier, chunks, [])
        assert len(lines_of(caplog, logging.WARNING)) == 2


def test_the_breaker_tries_again_after_a_second_then_after_two(kv: Path) -> None:
    """Up to a minute; a place that goes on failing is not asked more often."""
    with driven(kv) as tier:
        faults = faults_of(tier)
        faults.fail_all(errno.EIO)
        tier.store(tails(FAILURES_MAX))
        assert tier.tier.statistics().state != "on"
        waits = [1_000, 2_000, 4_000, 8_000, 16_000, 32_000, 60_000, 60_000]
        for wait_ms in waits:
            probed = faults.calls.total()
            tier.pass_time(wait_ms - 1)
            assert faults.calls.total() == probed, "not yet"
            tier.pass_time(1)
            disk_of(tier)._workers.wait_result(30)
            tier.poll()
            assert faults.calls.total() > probed
        heal(tier)


@pytest.mark.parametrize("way", ["vanish", "rename", "remove"])
def test_a_vanished_directory_is_not_made_up_for_elsewhere(kv: Path, way: str) -> None:
    """A mount is gone: nothing is written below its mount point; it is found again."""
    records = tails(6)
    with driven(kv) as tier:
        tier.keep(records)
        if way == "vanish":
            faults_of(tier).vanish()
        elif way == "rename":
            kv.rename(kv.parent / "away")
            kv.mkdir()
        else:
            shutil.rmtree(kv)
        outcomes = tier.store(tails(12, first=100))
        assert StoreOutcome.STORED not in outcomes
        assert outcomes[-1] is StoreOutcome.BROKEN
        assert {tier.load(record) for record in records} <= {
            LoadOutcome.FAILED,
            LoadOutcome.BROKEN,
        }
        assert not kv.exists() or way == "vanish" or not list(kv.iterdir())
        if way == "rename":
            kv.rmdir()
            (kv.parent / "away").rename(kv)
        heal(tier)
        if way == "remove":
            assert {tier.load(record) for record in records} == {LoadOutcome.ABSENT}
            records = []
        tier.keep(tails(4, first=200))
        assert_holds(tier, records + tails(4, first=200), [])


@pytest.mark.parametrize("pages", [1, 3])
def test_short_reads_and_writes_go_on_where_they_ended(kv: Path, pages: int) -> None:
    """Whole pages, as direct I/O moves them."""
    chain = chain_of(ROOT, SMALL, text(1, 14))
    with driven(kv) as tier:
        faults = faults_of(tier)
        faults.shorten(Call.WRITE, pages * 4096)
        faults.shorten(Call.READ, pages * 4096)
        tier.keep(chain)
        assert_holds(tier, chain, [])
        assert faults.injected["write short"] > 4
        assert faults.injected["read short"] > 4
    with driven(kv) as tier:
        assert_holds(tier, chain, [])


def test_a_write_that_fails_half_way_leaves_no_record_and_no_bytes(kv: Path) -> None:
    """The drive takes a part of a chunk, and no more; then there is room again."""
    [chunk] = chain_of(ROOT, LARGE, text(1, 4))
    with driven(kv) as tier:
        tier.keep(tails(1))
        before = bytes_taken(kv)
        faults_of(tier).fill_after(100 * KiB)
        assert tier.store([chunk]) == [StoreOutcome.NO_ROOM]
        faults_of(tier).heal()
        assert bytes_taken(kv) <= before + 8 * KiB
        tier.pass_time(REFUSED_MS)  # before that the tail would make room for it
        tier.keep([chunk])
        assert_holds(tier, [chunk, *tails(1)], [])
    with driven(kv) as tier:
        assert_holds(tier, [chunk, *tails(1)], [])


@pytest.mark.parametrize("nth", range(1, 9))
@pytest.mark.parametrize("call", [Call.WRITE, Call.OPEN, Call.TRUNCATE])
def test_one_call_that_fails_costs_one_store_at_most(kv: Path, call: Call, nth: int) -> None:
    """Whichever it is; what was said to be stored is, also after a restart."""
    records = tails(8)
    with driven(kv) as tier:
        faults_of(tier).fail(call, errno.EIO, nth=nth, count=1)
        if call is Call.TRUNCATE:
            faults_of(tier).fail(Call.WRITE, errno.EIO, nth=nth, count=1, path_part=".rows")
        outcomes = tier.store(records)
        assert outcomes.count(StoreOutcome.STORED) >= 7, outcomes
        faults_of(tier).heal()
        good = [one for one, end in zip(records, outcomes, strict=True) if end == "stored"]
        assert_holds(tier, good, [one for one in records if one not in good])
    with driven(kv) as tier:
        assert_holds(tier, good, [one for one in records if one not in good])


def test_a_row_that_was_torn_spoils_no_later_one(kv: Path) -> None:
    """Half of it was written and could not be taken back: the segment is left, not appended to."""
    records = tails(8)
    with driven(kv) as tier:
        tier.keep(records[:3])
        faults = faults_of(tier)
        faults.fail(Call.TRUNCATE, errno.EIO)
        rows = next(kv.glob("*.rows"))
        with rows.open("ab") as file:  # what the drive had taken of it
            file.write(b"torn")
        faults.fail(Call.WRITE, errno.EIO, count=1, path_part=".rows")
        outcomes = tier.store(records[3:])
        assert outcomes.count(StoreOutcome.STORED) >= 3
        good = records[:3]
        good += [one for one, end in zip(records[3:], outcomes, strict=True) if end == "stored"]
        assert_holds(tier, good, [one for one in records if one not in good])
    with driven(kv) as tier:
        assert_holds(tier, good, [one for one in records if one not in good])


def test_holes_that_fail_are_punched_later(kv: Path) -> None:
    """Their space does not count as free until then, and the cap holds."""
    with driven(kv, bytes_max=2 * MiB) as tier:
        chunks = [chain_of(ROOT, LARGE, text(number, 4))[0] for number in range(30)]
        tier.keep(chunks[:4])
        faults_of(tier).fail(Call.PUNCH, errno.EIO, count=2)
        for record in chunks[4:]:
            job = tier.submit_store(record)
            while not tier.has_ended(job):
                tier.poll_for(0.02)
                tier.pass_time(500)
            assert bytes_taken(kv) <= 2 * MiB
        assert tier.tier.statistics().stored["stored"] >= 26
        disk_of(tier).check_integrity()


class Refuses(FaultyFiles):
    """Has no direct I/O."""

    def open(self, path: str, flags: int) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL), path)
        return super().open(path, flags)


def test_a_file_system_without_direct_io_gets_plain_calls(
    kv: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """With one line that says so, and advice to keep nothing twice."""
    caplog.set_level(logging.INFO, "kvtide.disk")
    chain = chain_of(ROOT, SMALL, text(1, 14))
    with driven(kv, files=Refuses()) as tier:
        [line] = [line for line in lines_of(caplog, logging.INFO) if "plain I/O" in line]
        assert "O_DIRECT" in line
        assert "Invalid argument" in line
        tier.keep(chain)
        assert_holds(tier, chain, [])
        assert faults_of(tier).calls[Call.DROP_CACHED] >= len(chain)
    with driven(kv) as tier:
        assert_holds(tier, chain, [])


def test_a_drive_without_direct_io_that_is_full_at_a_start_is_read(kv: Path) -> None:
    """It does not take the page that shows what it takes; what lies there is found all the same,
    and stored is again once it has room."""
    keep(kv, tails(3))
    files = Refuses()
    files.fail(Call.WRITE, errno.ENOSPC)
    with driven(kv, files=files) as tier:
        assert_holds(tier, tails(3), [])
        files.heal()
        tier.keep(tails(2, first=50))


def test_a_file_system_without_holes_is_refused(kv: Path) -> None:
    """Space of evicted records would never come back."""
    files = FaultyFiles()
    files.fail(Call.PUNCH, errno.EOPNOTSUPP)
    with pytest.raises(ConfigError, match="punch holes"):
        open_disk(kv, files=files)
    open_disk(kv).close(30)


def test_a_directory_has_one_node(kv: Path) -> None:
    """The other is told whose it is; when that one ends it is free."""
    tier = open_disk(kv)
    with pytest.raises(ConfigError, match=f"process {os.getpid()}"):
        open_disk(kv)
    tier.close(30)
    open_disk(kv).close(30)
    assert kv.stat().st_mode & 0o777 == 0o700
    assert {path.stat().st_mode & 0o777 for path in kv.iterdir()} == {0o600}


def test_a_directory_that_cannot_be_used_is_said_to_be(tmp_path: Path) -> None:
    """With what to do."""
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="name a directory"):
        open_disk(tmp_path / "file" / "kv")
