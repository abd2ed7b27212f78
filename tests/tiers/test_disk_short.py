"""A drive that has less than the cap: others fill it, or a quota ends before.

Our own records make room for new ones: as far as need be, a portion at a time, with one line.
"""

import errno
import logging
import shutil
import threading
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvtide.core.records import Record
from kvtide.testing.faulty_files import Call, FaultyFiles
from kvtide.testing.tier_drive import DrivenTier
from kvtide.testing.tier_records import chain_of, layout_of, text
from kvtide.tiers.base import LoadOutcome, StoreOutcome
from kvtide.tiers.disk import opening
from kvtide.tiers.disk.stores import REFUSED_MS, VAIN_MS, VAIN_PORTIONS_MAX
from kvtide.tiers.files import FreeSpace
from kvtide.units import GiB, KiB, MiB
from tests.tiers.disk_place import ROOT, bytes_taken, disk_of, driven, files_of, open_disk, settle

LAYOUT = layout_of(16 * KiB)
CAP, FLOOR = 64 * MiB, 4 * MiB
PORTION = CAP // 64


@pytest.fixture
def kv(tmp_path: Path) -> Path:
    """Where the tier is."""
    return tmp_path / "kv"


def chunks(count: int, first: int = 0) -> list[Record]:
    return [chain_of(ROOT, LAYOUT, text(number, 4))[0] for number in range(first, first + count)]


def ask_drive(tier: DrivenTier) -> None:
    """A second passes."""
    disk = disk_of(tier)
    tier.pass_time(1_000)
    while disk._is_measuring:
        tier.poll_for(0.05)


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [one.getMessage() for one in caplog.records if one.levelno >= logging.WARNING]


def test_a_cap_larger_than_the_drive_evicts_and_keeps_the_floor(
    kv: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """What is new is stored, all the time, as at a cap; the floor is never touched."""
    files = FaultyFiles()
    files.fill_after(FLOOR + 4 * MiB)
    with driven(kv, CAP, files=files, floor_bytes=FLOOR) as tier:
        for record in chunks(300):  # 20 MiB
            job = tier.submit_store(record)
            while not tier.has_ended(job):
                tier.poll_for(0.2)
                assert files.free_space(str(kv)).free_bytes >= FLOOR
            assert tier.stored(job) is StoreOutcome.STORED
        numbers = tier.tier.statistics()
        assert numbers.state == "on"
        assert numbers.bytes_used > 2 * MiB, "no more is evicted than need be"
        assert tier.is_there(chunks(1, first=299)[0])
        disk_of(tier).check_integrity()
        [line] = lines(caplog)
        assert str(kv) in line
        assert "64 MiB" in line
        assert "4 MiB are left to others" in line
        tier.close(30)
        assert files.free_space(str(kv)).free_bytes >= FLOOR


def test_others_that_fill_the_drive_get_what_keeps_the_floor_and_no_more(kv: Path) -> None:
    """And nothing goes before a store asks for room, nor where it would not be enough."""
    with driven(kv, CAP, floor_bytes=FLOOR) as tier:
        files = files_of(disk_of(tier))
        tier.keep(chunks(100))
        before = tier.tier.statistics()
        files.fill_after(FLOOR - MiB)
        for _ in range(3):
            ask_drive(tier)
        assert tier.tier.statistics().evicted == 0, "nobody asks for room"
        tier.keep(chunks(1, first=200))
        assert files.free_space(str(kv)).free_bytes >= FLOOR
        gone_bytes = before.bytes_used - tier.tier.statistics().bytes_used
        assert gone_bytes < MiB + 2 * PORTION
        evicted = tier.tier.statistics().evicted
        files.fill_after(0)
        disk_of(tier)._space.floor_bytes = GiB  # more than all of ours would give
        ask_drive(tier)
        assert tier.store(chunks(2, first=300)) == [StoreOutcome.NO_ROOM] * 2
        assert tier.tier.statistics().evicted == evicted


def test_a_drive_that_others_have_filled_is_told_of_once(
    kv: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """All of ours would not make room: stores end, and nobody has to guess why. What is there is
    found all the same."""
    with driven(kv, CAP, floor_bytes=FLOOR) as tier:
        files = files_of(disk_of(tier))
        tier.keep(chunks(4))
        files.fill_after(0)
        ask_drive(tier)
        for number in range(3):
            assert tier.store(chunks(1, first=500 + number)) == [StoreOutcome.NO_ROOM]
        full = "the drive is full: 0 B are free, and 4 MiB are left to others"
        assert tier.tier.statistics().state == full
        [line] = lines(caplog)
        assert str(kv) in line
        assert full in line
        assert {tier.load(record) for record in chunks(4)} == {LoadOutcome.LOADED}
        files.heal()
        ask_drive(tier)
        assert tier.tier.statistics().state == "on"
        tier.keep(chunks(2, first=600))
        assert lines(caplog)[1:] == [f"disk {kv}: the drive has room again"]


def test_a_drive_that_was_full_at_a_start_is_used_once_it_is_not(
    kv: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a cap of `auto`, which is a share of what is free: of nothing it would be nothing, for as
    long as the node lives."""
    with monkeypatch.context() as patched:
        patched.setattr(opening.shutil, "disk_usage", lambda _: SimpleNamespace(free=128 * KiB))
        options = {"path": kv, "bytes_max": "auto", "sync": "none"}
        woken = threading.Event()
        disk = opening.open_disk(options, woken.set, 8 * MiB)
    tier = DrivenTier(disk, woken, 30)
    disk._space.floor_bytes = 0
    assert tier.store(chunks(1)) == [StoreOutcome.NO_ROOM]
    ask_drive(tier)
    tier.keep(chunks(2))
    cap = tier.tier.statistics().bytes_max
    assert cap == pytest.approx(opening.RATIO_AUTO * shutil.disk_usage(kv).free, rel=0.1)
    tier.close(30)


def test_a_cap_that_no_chunk_fits_into_says_so_once(
    kv: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Also where others of its chunks do."""
    with driven(kv, MiB) as tier:
        [huge] = chain_of(ROOT, layout_of(512 * KiB), text(900, 4))
        for number in range(3):
            assert tier.store([huge]) == [StoreOutcome.NO_ROOM]
            tier.keep(chunks(1, first=number))
        [line] = lines(caplog)
        state = tier.tier.statistics().state
        assert state.startswith("the cap of 1 MiB is too small for a chunk of 2 MiB")
        assert state in line


class Late(FaultyFiles):
    """Gives space back with a commit that does not come, as Btrfs for half a minute."""

    free_bytes = 0

    def free_space(self, directory: str) -> FreeSpace:
        return FreeSpace(self.free_bytes, 128 * MiB)


def test_a_drive_that_gives_space_back_late_costs_a_portion_a_second(kv: Path) -> None:
    """Not all that there is, at once, for room that would come by itself."""
    files = Late()
    files.free_bytes = 64 * MiB
    with driven(kv, CAP, files=files, floor_bytes=FLOOR) as tier:
        tier.keep(chunks(200))
        files.free_bytes = FLOOR
        ask_drive(tier)
        job = tier.submit_store(chunks(1, first=500)[0])
        for second in range(4):
            before = tier.tier.statistics().bytes_used
            for _ in range(20):
                settle(tier)
                tier.poll()
            gone_bytes = before - tier.tier.statistics().bytes_used
            assert 0 < gone_bytes < 2 * PORTION, second
            ask_drive(tier)
        assert not tier.has_ended(job)
        files.free_bytes = 64 * MiB
        ask_drive(tier)
        assert tier.stored(job) is StoreOutcome.STORED


def test_what_the_drive_never_gives_back_is_not_given_up_for_ever(kv: Path) -> None:
    """A snapshot holds it. Stores end as there is no room, what is there stays; now and then a
    portion shows whether it is still so; where it comes back, stores go on at once."""
    files = Late()
    files.free_bytes = 64 * MiB
    with driven(kv, CAP, files=files, floor_bytes=FLOOR) as tier:
        tier.keep(chunks(600))
        files.free_bytes = FLOOR
        ask_drive(tier)
        held = tier.tier.statistics().bytes_used
        fresh = iter(chunks(100, first=1_000))

        def store_for(seconds: int) -> set[StoreOutcome]:
            """A store each second; how those ended that did."""
            jobs = []
            for _ in range(seconds):
                jobs.append(tier.submit_store(next(fresh)))
                for _ in range(5):
                    settle(tier)
                    tier.poll()
                ask_drive(tier)
            return {tier.stored(job) for job in jobs if tier.has_ended(job)}

        store_for(VAIN_PORTIONS_MAX + 4)
        gone = held - tier.tier.statistics().bytes_used
        assert (VAIN_PORTIONS_MAX - 1) * PORTION < gone < (VAIN_PORTIONS_MAX + 3) * PORTION
        evicted = tier.tier.statistics().evicted
        assert store_for(20) == {StoreOutcome.NO_ROOM}
        assert tier.tier.statistics().evicted == evicted
        assert "the drive is full" in tier.tier.statistics().state
        tier.pass_time(VAIN_MS)
        ask_drive(tier)
        assert StoreOutcome.NO_ROOM in store_for(20)
        more = held - gone - tier.tier.statistics().bytes_used
        assert PORTION // 2 < more < 3 * PORTION
        files.free_bytes = 64 * MiB
        ask_drive(tier)
        assert tier.store(chunks(2, first=5_000)) == [StoreOutcome.STORED] * 2
        assert tier.tier.statistics().state == "on"


@pytest.mark.parametrize("code", [errno.EDQUOT, errno.ENOSPC])
def test_a_quota_below_the_cap_evicts(
    kv: Path, code: int, caplog: pytest.LogCaptureFixture
) -> None:
    """What the drive says to be free is not ours. One store finds out, a minute later another."""
    files = FaultyFiles()
    with driven(kv, CAP, files=files) as tier:
        files.fill_after(4 * MiB, code, is_told=False)
        outcomes = Counter(tier.store(chunks(200)))
        assert outcomes == {StoreOutcome.STORED: 199, StoreOutcome.NO_ROOM: 1}
        assert tier.tier.statistics().bytes_used > 2 * MiB, "no more is evicted than need be"
        assert tier.is_there(chunks(1, first=199)[0])
        [line] = lines(caplog)
        assert f"errno {code}" in line
        tier.pass_time(REFUSED_MS)
        outcomes = Counter(tier.store(chunks(200, first=200)))
        assert outcomes == {StoreOutcome.STORED: 199, StoreOutcome.NO_ROOM: 1}
        assert len(lines(caplog)) == 1
        assert tier.tier.statistics().state == "on"
        files.heal()
        tier.pass_time(REFUSED_MS)
        evicted = tier.tier.statistics().evicted
        tier.keep(chunks(100, first=400))
        assert tier.tier.statistics().evicted == evicted, "it is not kept small for ever"
        disk_of(tier).check_integrity()


def test_a_drive_that_takes_nothing_costs_few_records_before_it_is_left_alone(kv: Path) -> None:
    """Others took all there was, and what we give up too: a portion for each try."""
    files = FaultyFiles()
    with driven(kv, CAP, files=files) as tier:
        tier.keep(chunks(220))
        held = tier.tier.statistics().bytes_used
        files.fail(Call.WRITE, errno.ENOSPC, path_part=".segment")
        outcomes = tier.store(chunks(40, first=500))
        assert outcomes[-1] is StoreOutcome.BROKEN
        assert outcomes.count(StoreOutcome.NO_ROOM) == 6
        assert held - tier.tier.statistics().bytes_used < 6 * 2 * PORTION
        files.heal()


def test_the_hint_of_what_was_used_does_not_touch_the_floor(kv: Path) -> None:
    """It is written at the end, where there is room."""
    tier = open_disk(kv, bytes_max=CAP, floor_bytes=FLOOR)
    files_of(tier).fill_after(FLOOR)
    tier.tick(1_000)
    while tier._is_measuring:
        assert tier._workers.wait_result(30)
        tier.poll()
    tier.close(30)
    assert files_of(tier).calls[Call.RENAME] == 0
    assert bytes_taken(kv) <= 8 * KiB
