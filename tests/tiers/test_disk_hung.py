"""A drive that hangs: its calls do not fail, they do not come back."""

import logging
import shutil
from pathlib import Path

import pytest

from kvtide.bounds import T_LOAD_MS
from kvtide.testing.faulty_files import Call
from kvtide.testing.tier_drive import DrivenTier
from kvtide.testing.tier_records import chain_of, layout_of, text
from kvtide.tiers.base import LoadOutcome, StoreOutcome
from kvtide.tiers.disk.workers import LOAD_THREADS
from kvtide.units import KiB
from tests.tiers.disk_place import ROOT, assert_holds, disk_of, driven, files_of, tails

HUNG_MS = 20
"""For a change of the directory, in place of half a minute."""


def hang(tier: DrivenTier, count: int) -> list[int]:
    """So many loads; those that threads have begun stand still for too long. Their jobs."""
    jobs = [tier.submit_load(record) for record in tails(count)]
    files_of(disk_of(tier)).wait_stalled(min(count, LOAD_THREADS))
    tier.pass_time(1)
    tier.pass_time(T_LOAD_MS)
    assert tier.tier.statistics().state == "on", "not yet"
    tier.pass_time(1)
    return jobs


def test_reads_stop_when_a_load_does_not_come_back(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """One line; what is queued ends at once, lookups find nothing, until the drive comes back."""
    with driven(tmp_path / "kv") as tier:
        tier.keep(tails(8))
        caplog.clear()
        with files_of(disk_of(tier)).stalled(Call.READ):
            jobs = hang(tier, 8)
            behind = [tier.loaded(job) for job in jobs[LOAD_THREADS:]]
            assert behind == [LoadOutcome.BROKEN] * (8 - LOAD_THREADS)
            assert tier.find(tails(1)) == []
            assert tier.load(tails(8)[7]) is LoadOutcome.BROKEN
            assert tier.store(tails(1, first=50)) == [StoreOutcome.BROKEN]
            for _ in range(10):
                tier.pass_time(60_000)
            assert tier.tier.statistics().state != "on"
        ended = [tier.loaded(job) for job in jobs[:LOAD_THREADS]]
        assert ended == [LoadOutcome.LOADED] * LOAD_THREADS
        assert tier.tier.statistics().state == "on"
        lines = [one.getMessage() for one in caplog.records if one.levelno >= logging.WARNING]
        assert len(lines) == 2, lines
        assert f"{T_LOAD_MS} ms" in lines[0]
        assert_holds(tier, tails(8), [])


def test_reads_go_on_beside_one_load_that_hangs(tmp_path: Path) -> None:
    """One bad place of a drive: a probe shows that others can be read, and the other thread
    reads them; the one that hangs is not told of again."""
    with driven(tmp_path / "kv") as tier:
        tier.keep(tails(8))
        files = files_of(disk_of(tier))
        files.stall(Call.READ)
        [job] = hang(tier, 1)
        assert tier.tier.statistics().state != "on"
        files.release_but_waiting()
        while tier.tier.statistics().state != "on":
            tier.pass_time(60_000)
            tier.poll_for(0.02)
        assert tier.load(tails(8)[5]) is LoadOutcome.LOADED
        tier.pass_time(60_000)
        assert tier.tier.statistics().state == "on"
        files.heal()
        assert tier.loaded(job) is LoadOutcome.LOADED


def test_a_probe_behind_a_write_that_hangs_keeps_nobody_waiting(tmp_path: Path) -> None:
    """The whole drive hangs, the writing thread too; all ends well when it comes back."""
    with driven(tmp_path / "kv") as tier:
        tier.keep(tails(8))
        with files_of(disk_of(tier)).stalled(Call.READ, Call.WRITE):
            store = tier.submit_store(tails(1, first=50)[0])
            files_of(disk_of(tier)).wait_stalled(1)
            loads = [tier.submit_load(tails(1)[0])]
            files_of(disk_of(tier)).wait_stalled(2)
            tier.pass_time(1)
            for _ in range(5):
                tier.pass_time(60_000)
            assert tier.find(tails(1)) == []
        assert tier.stored(store) is StoreOutcome.STORED
        assert tier.loaded(loads[0]) is LoadOutcome.LOADED
        assert tier.tier.statistics().state == "on"
        assert_holds(tier, [*tails(8), *tails(1, first=50)], [])


@pytest.mark.parametrize("path_part", [".segment", ".rows"])
def test_stores_stop_when_a_write_does_not_come_back(
    tmp_path: Path,
    path_part: str,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One line; what comes then ends at once, loads go on, until the drive comes back."""
    with driven(tmp_path / "kv") as tier:
        tier.keep(tails(2))
        caplog.clear()
        files = files_of(disk_of(tier))
        files.stall(Call.WRITE, path_part=path_part)
        job = tier.submit_store(tails(1, first=50)[0])
        files.wait_stalled(1)
        for _ in range(3):
            tier.pass_time(60_000)
        assert tier.tier.statistics().state == "on", "a clock that jumps proves nothing"
        monkeypatch.setattr("kvtide.tiers.disk.tier.CHANGE_MS_MAX", HUNG_MS)
        while tier.tier.statistics().state == "on":
            tier.pass_time(1)
            tier.poll_for(0.01)
        assert f"{HUNG_MS} ms" in tier.tier.statistics().state
        assert tier.store(tails(1, first=60)) == [StoreOutcome.BROKEN]
        assert tier.load(tails(1)[0]) is LoadOutcome.LOADED
        for _ in range(5):
            tier.pass_time(60_000)
            assert tier.tier.statistics().state != "on"
        monkeypatch.undo()
        files.release()
        assert tier.stored(job) is StoreOutcome.STORED
        while tier.tier.statistics().state != "on":
            tier.pass_time(60_000)
            tier.poll_for(0.02)
        tier.keep(tails(1, first=60))
        lines = [one.getMessage() for one in caplog.records if one.levelno >= logging.WARNING]
        assert len(lines) == 2, lines
        assert_holds(tier, [*tails(2), *tails(1, first=50), *tails(1, first=60)], [])


@pytest.mark.parametrize("call", [Call.PUNCH, Call.SYNC])
def test_a_hole_or_a_sync_that_does_not_come_back_is_told_of(
    tmp_path: Path, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is stored once no room comes, or nothing is sealed: the state says why."""
    with driven(tmp_path / "kv", segment_bytes=1 << 17) as tier:
        tier.keep(tails(2))
        with files_of(disk_of(tier)).stalled(call):
            if call is Call.SYNC:
                disk_of(tier)._room.roll()
            else:
                disk_of(tier).remove([tails(1)[0].key])
            files_of(disk_of(tier)).wait_stalled(1)
            monkeypatch.setattr("kvtide.tiers.disk.tier.CHANGE_MS_MAX", HUNG_MS)
            while tier.tier.statistics().state == "on":
                tier.pass_time(1)
                tier.poll_for(0.01)
        monkeypatch.undo()
        tier.wait(tier.running())
        while tier.tier.statistics().state != "on":
            tier.pass_time(60_000)
            tier.poll_for(0.02)
        tier.keep(tails(2))


def test_what_is_stored_while_a_probe_finds_the_directory_emptied_is_found_or_not_stored(
    tmp_path: Path,
) -> None:
    """A load that comes back after all lets stores in again, ahead of what the probe has to say:
    that nothing is left of before. Stores that wait would belong to that."""
    chunks = [chain_of(ROOT, layout_of(64 * KiB), text(number, 4))[0] for number in range(8)]
    with driven(tmp_path / "kv") as tier:
        tier.keep(tails(1))
        files = files_of(disk_of(tier))
        files.stall(Call.READ, Call.MAKE_DIRECTORY)
        [load] = hang(tier, 1)
        assert tier.tier.statistics().state != "on"
        shutil.rmtree(tmp_path / "kv")
        tier.pass_time(1_000)
        files.wait_stalled(2)  # the probe makes the directory anew
        files.release(Call.READ)
        assert tier.loaded(load) is LoadOutcome.LOADED
        assert tier.tier.statistics().state == "on"
        jobs = [tier.submit_store(record) for record in chunks]
        files.release()
        for job in jobs:
            is_stored = tier.stored(job) is StoreOutcome.STORED
            assert tier.is_there(job.record) == is_stored
        assert not tier.is_there(tails(1)[0])
        tier.keep(chunks)
        assert_holds(tier, chunks, tails(1))
