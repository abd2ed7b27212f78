"""A shared directory with less room than its cap, or whose stores alone fail."""

import errno
import logging
import shutil
from pathlib import Path

import pytest

from kvtide.core.records import Record
from kvtide.testing.faulty_files import Call
from kvtide.testing.tier_drive import DrivenTier
from kvtide.testing.tier_records import BLOCKS_PER_CHUNK, chain_of, text
from kvtide.tiers.base import LoadOutcome, StoreOutcome
from kvtide.tiers.breaker import FAILURES_MAX
from kvtide.tiers.shared_dir import cap
from kvtide.units import MiB
from tests.tiers.shared_place import (
    LARGE,
    ROOT,
    driven,
    files_of,
    folder_of,
    shared_of,
    tails,
    wait_on,
    wait_quiet,
)


def large(count: int, first: int = 0) -> list[Record]:
    """Records of a quarter of a megabyte, each right below the root."""
    numbers = range(first, first + count)
    return [chain_of(ROOT, LARGE, text(number, BLOCKS_PER_CHUNK))[0] for number in numbers]


def try_stores(tier: DrivenTier, first: int, count: int, step_ms: int) -> list[StoreOutcome]:
    """One after the other, with time between them."""
    outcomes = []
    for record in large(count, first):
        outcomes += tier.store([record])
        wait_quiet(tier)
        tier.pass_time(step_ms)
    return outcomes


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_a_place_with_less_room_than_the_cap_keeps_what_was_used_last(
    kv: Path, code: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Others fill it, or a quota ends before. One line says so; it is no fault of the place. Once
    there is more room it is used."""
    with driven(kv) as tier:
        files_of(shared_of(tier)).fill_after(2 * MiB, code, is_told=False)
        outcomes = try_stores(tier, 0, 40, 100)
        assert set(outcomes) == {StoreOutcome.STORED, StoreOutcome.NO_ROOM}
        assert outcomes.count(StoreOutcome.NO_ROOM) <= 2, outcomes
        assert tier.tier.statistics().state == "on"
        assert tier.tier.statistics().evicted >= 30
        assert {tier.load(record) for record in large(4, 36)} == {LoadOutcome.LOADED}
        assert tier.load(large(1)[0]) is LoadOutcome.ABSENT
        shared_of(tier).check_integrity()
        assert len([one for one in caplog.records if one.levelno >= logging.WARNING]) == 1
        files_of(shared_of(tier)).heal()
        tier.pass_time(cap.REFUSED_MS)
        evicted = tier.tier.statistics().evicted
        tier.keep(large(10, 100))
        assert tier.tier.statistics().evicted == evicted


def test_evicting_that_makes_no_room_ends(kv: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The place keeps what we give: what is there stays, but for a little now and then."""
    monkeypatch.setattr(cap, "VAIN_MAX", 2)
    with driven(kv) as tier:
        tier.keep(large(16))
        files = files_of(shared_of(tier))
        files.fail(Call.WRITE, errno.ENOSPC, bytes_over=100_000)
        outcomes = try_stores(tier, 50, 60, 5_000)
        assert set(outcomes) <= {StoreOutcome.NO_ROOM, StoreOutcome.BROKEN}, outcomes
        there = tier.tier.statistics().records
        assert 8 <= there < 16
        try_stores(tier, 150, 10, cap.VAIN_MS // 5)
        assert there - 8 < tier.tier.statistics().records < there
        shared_of(tier).check_integrity()


def test_where_stores_alone_fail_they_are_left_alone(
    kv: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Signs of life, clears and removals work all the time: none of them shows that stores do,
    neither before the breaker opens nor after."""
    with driven(kv) as tier:
        tier.keep(tails(9))
        files = files_of(shared_of(tier))
        files.fail(Call.WRITE, errno.EIO, path_part=".tmp", bytes_over=5_000)
        for number in range(FAILURES_MAX):
            assert tier.store(tails(1, first=20 + number)) == [StoreOutcome.FAILED]
            tier.tier.clear(bytes([number]) * 32)
            wait_quiet(tier)
        assert tier.store(tails(1, first=30)) == [StoreOutcome.BROKEN]
        for _ in range(5):
            tier.pass_time(30_000)
            wait_quiet(tier)
            tier.store(tails(1, first=30))
            wait_quiet(tier)
        assert "errno 5" in tier.tier.statistics().state
        warnings = [one.message for one in caplog.records if one.levelno >= logging.WARNING]
        assert len(warnings) == 1, warnings
        files.heal()
        while tier.store(tails(1, first=30)) != [StoreOutcome.STORED]:
            tier.pass_time(30_000)
            wait_quiet(tier)
        assert tier.tier.statistics().state == "on"
        assert tier.load(tails(1)[0]) is LoadOutcome.LOADED


def test_what_a_folder_could_not_take_says_nothing_of_the_next_one(kv: Path) -> None:
    """It was removed; the numbers of stores begin again, and so does what is known of room."""
    with driven(kv) as tier:
        tier.keep(large(9))
        files = files_of(shared_of(tier))
        files.fail(Call.WRITE, errno.ENOSPC, count=1, bytes_over=100_000)
        assert tier.store(large(1, 20)) == [StoreOutcome.NO_ROOM]
        shutil.rmtree(folder_of(shared_of(tier)))
        while tier.tier.statistics().state == "on":
            tier.pass_time(1_000)
            tier.store(large(1, 30))
        wait_on(tier)
        wait_quiet(tier)
        tier.keep(large(4, 40))
        files.fail(Call.WRITE, errno.ENOSPC, count=1, bytes_over=100_000)
        evicted = tier.tier.statistics().evicted
        assert tier.store(large(1, 50)) == [StoreOutcome.NO_ROOM]
        assert tier.tier.statistics().evicted > evicted
