"""Stores on their way to the drive: bytes ahead of rows, several at once, each with its end."""

import errno
import shutil
from pathlib import Path

import pytest

from kvtide.core.records import Record
from kvtide.testing.faulty_files import Call, FaultyFiles
from kvtide.testing.tier_drive import DrivenTier
from kvtide.testing.tier_records import chain_of, layout_of, text
from kvtide.tiers.base import LoadOutcome, StoreJob, StoreOutcome
from kvtide.tiers.disk import sealing, workers
from kvtide.tiers.disk.check import check
from kvtide.tiers.disk.workers import BYTES_THREADS, LOAD_THREADS
from kvtide.units import KiB, MiB
from tests.tiers.disk_place import (
    ROOT,
    assert_holds,
    bytes_taken,
    disk_of,
    driven,
    files_of,
    open_files,
    settle,
    tails,
)


def submit_together(tier: DrivenTier, records: list[Record]) -> list[StoreJob]:
    """Stores that wait for loads, which stand still until `release`: then all go at once."""
    loaded = tails(LOAD_THREADS + 1, first=900)
    tier.keep(loaded)
    faults = files_of(disk_of(tier))
    faults.stall(Call.READ)
    for record in loaded:
        tier.submit_load(record)
    faults.wait_stalled(LOAD_THREADS)
    jobs = [tier.submit_store(record) for record in records]
    while len(disk_of(tier)._workers._summed) < len(records):
        tier.poll_for(0.01)
    return jobs


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stores wait for loads for as long as a test takes."""
    monkeypatch.setattr(workers, "YIELD_S_MAX", 60.0)


@pytest.mark.usefixtures("patient")
def test_neighbours_are_written_together(kv: Path) -> None:
    """Of stores that wait: one call for their bytes, one for their rows."""
    records = tails(6)
    with driven(kv) as tier:
        jobs = submit_together(tier, records)
        faults = files_of(disk_of(tier))
        before = faults.calls[Call.WRITE]
        faults.release()
        assert [tier.stored(job) for job in jobs] == [StoreOutcome.STORED] * len(jobs)
        assert faults.calls[Call.WRITE] - before == 2
    with driven(kv) as tier:
        assert {tier.load(record) for record in records} == {LoadOutcome.LOADED}


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC])
def test_bytes_of_neighbours_fail_one_by_one(kv: Path, code: int) -> None:
    """Where the one call fails each is tried by itself, and none of them is lost by it."""
    records = tails(6)
    with driven(kv) as tier:
        jobs = submit_together(tier, records)
        faults = files_of(disk_of(tier))
        faults.fail(Call.WRITE, code, count=1)
        before = faults.calls[Call.WRITE]
        faults.release()
        assert [tier.stored(job) for job in jobs] == [StoreOutcome.STORED] * len(jobs)
        assert faults.calls[Call.WRITE] - before == 2 + len(records)
    with driven(kv) as tier:
        assert {tier.load(record) for record in records} == {LoadOutcome.LOADED}


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC])
def test_rows_of_neighbours_fail_one_by_one(kv: Path, code: int) -> None:
    """The same of the write that has their rows."""
    first, *records = tails(7)
    with driven(kv) as tier:
        faults = files_of(disk_of(tier))
        with faults.stalled(Call.FREE_SPACE):
            jobs = [tier.submit_store(first)]
            faults.wait_stalled(1)
            jobs += [tier.submit_store(record) for record in records]
            while len(disk_of(tier)._workers._written) < len(records):
                tier.poll_for(0.01)
            faults.fail(Call.WRITE, code, count=1)
            before = faults.calls[Call.WRITE]
        assert [tier.stored(job) for job in jobs] == [StoreOutcome.STORED] * len(jobs)
        assert faults.calls[Call.WRITE] - before == 1 + len(records)
        assert_holds(tier, [first, *records], [])
    with driven(kv) as tier:
        assert_holds(tier, [first, *records], [])


def test_the_drive_has_the_next_bytes_while_a_store_is_finished(kv: Path) -> None:
    """Rows and measuring stand still; bytes do not, and what they belong to is no record yet."""
    first, second = tails(2)
    with driven(kv) as tier:
        disk = disk_of(tier)
        with files_of(disk).stalled(Call.FREE_SPACE):
            jobs = [tier.submit_store(first)]
            files_of(disk).wait_stalled(1)
            jobs.append(tier.submit_store(second))
            while not disk._workers._written:
                tier.poll_for(0.01)
            rows = sealing.read_rows(disk._directory, 1)
            assert rows is not None
            assert [one.key for one in rows.kept.values()] == [first.key]
            assert not tier.is_there(second)
        assert [tier.stored(job) for job in jobs] == [StoreOutcome.STORED] * 2
        assert_holds(tier, [first, second], [])


@pytest.mark.parametrize("suffix", ["rows", "segment"])
def test_bytes_without_a_row_are_given_back_though_the_drive_refused(
    kv: Path, suffix: str
) -> None:
    """No row can be appended, or not all of the bytes, and no hole punched at once: the space
    comes back all the same."""
    [chunk] = chain_of(ROOT, layout_of(64 * KiB), text(1, 4))
    with driven(kv) as tier:
        tier.keep(tails(1))
        before = bytes_taken(kv)
        faults = files_of(disk_of(tier))
        if suffix == "segment":
            faults.shorten(Call.WRITE, 128 * KiB)
        nth = 2 if suffix == "segment" else 1
        faults.fail(Call.WRITE, errno.EIO, nth=nth, count=1, path_part=f".{suffix}")
        faults.fail(Call.PUNCH, errno.EIO, count=1)
        assert tier.store([chunk]) == [StoreOutcome.FAILED]
        assert faults.injected["punch EIO"] == 1
        settle(tier)
        assert bytes_taken(kv) <= before + 8 * KiB
        disk_of(tier).check_integrity()
        tier.keep([chunk])
        assert_holds(tier, [chunk, *tails(1)], [])
    with driven(kv) as tier:
        assert_holds(tier, [chunk, *tails(1)], [])


def test_a_row_that_could_not_be_synced_is_taken_back(kv: Path, tmp_path: Path) -> None:
    """Its bytes are: a start after a kill would find a record there, and call it damaged."""
    with driven(kv, sync="each") as tier:
        tier.keep(tails(1))
        files_of(disk_of(tier)).fail(Call.SYNC, errno.EIO, count=1, path_part=".rows")
        assert tier.store(tails(1, first=5)) == [StoreOutcome.FAILED]
        shutil.copytree(kv, tmp_path / "killed")
        assert [one.fault for one in check(tmp_path / "killed")] == [""]
        tier.keep(tails(1, first=5))
        assert_holds(tier, [*tails(1), *tails(1, first=5)], [])
    with driven(tmp_path / "killed") as tier:
        assert_holds(tier, tails(1), tails(1, first=5))


def test_a_log_that_is_spoiled_costs_one_segment(kv: Path) -> None:
    """A store that finds it so when the tier has gone on to the next segment spoils no other."""
    kept, first, second, *others = tails(6)
    with driven(kv) as tier:
        tier.keep([kept])
        faults = files_of(disk_of(tier))
        faults.fail(Call.TRUNCATE, errno.EIO)
        faults.fail(Call.WRITE, errno.EIO, count=1, path_part=".rows")
        with faults.stalled(Call.FREE_SPACE):
            jobs = [tier.submit_store(first)]
            faults.wait_stalled(1)
            jobs.append(tier.submit_store(second))
            while not disk_of(tier)._workers._written:
                tier.poll_for(0.01)
            # The second is not done with before the first was told of.
            faults.stall(Call.FREE_SPACE, Call.PUNCH)
            faults.release(Call.FREE_SPACE)
            assert tier.stored(jobs[0]) is StoreOutcome.FAILED
            tier.submit_store(others[0])
        assert tier.stored(jobs[1]) is StoreOutcome.FAILED
        assert set(tier.store(others)) == {StoreOutcome.STORED, StoreOutcome.HELD}
        assert disk_of(tier)._space.next_number == 3
        assert_holds(tier, [kept, *others], [first, second])


def test_a_segment_that_is_unlinked_is_not_held_open(kv: Path) -> None:
    """Its space would not come back, and no number would tell."""
    with driven(kv, segment_bytes=64 * KiB) as tier:
        tier.keep(tails(20))
        tier.tier.clear(None)
        while list(kv.glob("*.segment")):
            tier.poll_for(0.01)
        held = [name for name in open_files() if str(kv) in name and "deleted" in name]
        assert not held, held


def test_a_close_takes_back_what_is_not_begun_and_waits_no_longer_than_told(kv: Path) -> None:
    """The drive hangs: what it has may still be written, and ends when that has ended."""
    records = tails(8)
    with driven(kv) as tier:
        faults = files_of(disk_of(tier))
        faults.stall(Call.WRITE)
        begun = []
        for record in records[:BYTES_THREADS]:
            begun.append(tier.submit_store(record))
            faults.wait_stalled(len(begun))
        jobs = [tier.submit_store(record) for record in records[BYTES_THREADS:]]
        while len(disk_of(tier)._workers._summed) < len(jobs):
            tier.poll_for(0.01)
        tier.close(0.1)
        assert {tier.stored(job) for job in jobs} == {StoreOutcome.CLOSED}
        assert not any(map(tier.has_ended, begun)), "their cells are being read"
        faults.release()
        assert {tier.stored(job) for job in begun} == {StoreOutcome.STORED}
        assert disk_of(tier)._workers.stop(30)
        tier.poll()  # and gives the directory back
    with driven(kv) as tier:
        assert_holds(tier, records[:BYTES_THREADS], [])


def test_a_file_that_is_gone_is_not_made_anew_without_its_bytes(kv: Path) -> None:
    """Somebody removes a segment between a record's bytes and its row: the store fails."""
    with driven(kv) as tier:
        faults = files_of(disk_of(tier))
        with faults.stalled(Call.WRITE):
            job = tier.submit_store(tails(1, first=1)[0])
            faults.wait_stalled(1)
            for path in kv.glob("*.segment"):
                path.unlink()
        assert tier.stored(job) is StoreOutcome.FAILED
        assert not list(kv.glob("*.segment"))


@pytest.mark.usefixtures("patient")
def test_loads_go_before_bytes_that_are_not_begun(kv: Path) -> None:
    """While loads wait for a thread no store is begun; then it goes on."""
    records = tails(8)
    with driven(kv) as tier:
        tier.keep(records)
        faults: FaultyFiles = files_of(disk_of(tier))
        with faults.stalled(Call.READ):
            loads = [tier.submit_load(record) for record in records[:3]]
            faults.wait_stalled(2)
            writes = faults.calls[Call.WRITE]
            job = tier.submit_store(tails(1, first=50)[0])
            while not disk_of(tier)._workers._summed:
                tier.poll_for(0.001)
            assert faults.calls[Call.WRITE] == writes
        assert [tier.loaded(load) for load in loads] == [LoadOutcome.LOADED] * 3
        assert tier.stored(job) is StoreOutcome.STORED


def test_what_is_evicted_goes_in_portions(kv: Path) -> None:
    """Neighbours together: one row and one hole for several records, not a call for each."""
    with driven(kv, 2 * MiB) as tier:
        tier.keep(tails(500))
        settle(tier)
        evicted = tier.tier.statistics().evicted
        assert evicted > 200
        assert files_of(disk_of(tier)).calls[Call.PUNCH] <= evicted / 3


def test_bytes_without_a_row_are_not_counted_twice_against_the_floor(kv: Path) -> None:
    """They are set aside for, and the drive has them already: a store waits until that is told
    apart, and is not dropped."""
    chunks = [chain_of(ROOT, layout_of(256 * KiB), text(n, 4))[0] for n in range(4)]
    floor = 4 * MiB
    with driven(kv, floor_bytes=floor, queue_bytes_max=64 * MiB) as tier:
        faults = files_of(disk_of(tier))
        faults.fill_after(floor + 4 * MiB + 512 * KiB)
        with faults.stalled(Call.FREE_SPACE):
            jobs = [tier.submit_store(chunks[0])]
            faults.wait_stalled(1)
            jobs.append(tier.submit_store(chunks[1]))
            while not disk_of(tier)._workers._written:
                tier.poll_for(0.01)
            faults.stall(Call.WRITE)  # the row of the second, and the bytes of the third
            jobs.append(tier.submit_store(chunks[2]))
            while not tier.has_ended(jobs[0]):
                tier.poll_for(0.01)
            jobs.append(tier.submit_store(chunks[3]))
            tier.poll()
            assert not tier.has_ended(jobs[3])
        assert [tier.stored(job) for job in jobs] == [StoreOutcome.STORED] * 4
        assert faults.free_space(str(kv)).free_bytes >= floor
