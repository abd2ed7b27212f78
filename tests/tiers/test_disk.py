"""The disk tier keeps every promise of a tier, and those that are its own."""

import time
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from kvtide.core.records import Record
from kvtide.testing.faulty_files import Call
from kvtide.testing.tier_suite import TierTests
from kvtide.tiers.base import LoadOutcome, StoreOutcome, Tier
from kvtide.tiers.disk.tier import DiskTier
from tests.tiers.disk_place import (
    QUEUE_BYTES_MAX,
    assert_holds,
    bytes_taken,
    disk_of,
    driven,
    files_of,
    flip,
    open_disk,
    payload_offset,
    place_of,
    tails,
)


class TestDiskTier(TierTests):
    """The suite, on the file system below pytest's directory."""

    tier_type = DiskTier
    queue_bytes_max = QUEUE_BYTES_MAX

    def make_tier(self, tmp_path: Path, *, bytes_max: int) -> Tier:
        return open_disk(tmp_path / "kv", self.wake, bytes_max)

    def reopen(self, tier: Tier) -> Tier | None:
        assert isinstance(tier, DiskTier)
        return open_disk(tier.path, self.wake, tier.bytes_max)

    def bytes_taken(self, tier: Tier) -> int:
        assert isinstance(tier, DiskTier)
        tier.check_integrity()
        return bytes_taken(tier.path)

    def stalled(self, tier: Tier) -> AbstractContextManager[None]:
        assert isinstance(tier, DiskTier)
        return files_of(tier).stalled()

    def failing(self, tier: Tier) -> AbstractContextManager[None]:
        assert isinstance(tier, DiskTier)
        return files_of(tier).failing()

    def damage(self, tier: Tier, record: Record) -> None:
        assert isinstance(tier, DiskTier)
        path, at = place_of(tier, record)
        flip(path, at + payload_offset(record) + 5)


@pytest.mark.parametrize(
    ("sync", "at_stores", "at_the_end", "names"),
    [("none", 0, 0, 0), ("sealed", 0, 2, 1), ("each", 20, 22, 2)],
)
def test_what_is_made_to_outlive_a_loss_of_power(
    tmp_path: Path, sync: str, at_stores: int, at_the_end: int, names: int
) -> None:
    """Nothing; a segment and its index, when it is full; and each record with its row. The names
    of files once they hold something."""
    with driven(tmp_path / "kv", sync=sync) as tier:
        tier.keep(tails(10))
        calls = files_of(disk_of(tier)).calls
        assert calls[Call.SYNC] == at_stores
        tier.close(30)
        assert calls[Call.SYNC] == at_the_end
        assert calls[Call.SYNC_DIRECTORY] == names


@pytest.mark.parametrize("state", ["idle", "breaker open", "place failing"])
def test_it_is_closed_in_any_state_and_says_so_afterwards(tmp_path: Path, state: str) -> None:
    """Also twice; calls that come late end at once, and touch nothing."""
    with driven(tmp_path / "kv") as tier:
        tier.keep(tails(4))
        files = files_of(disk_of(tier))
        if state != "idle":
            files.fail_all()
        if state == "breaker open":
            tier.store(tails(10, first=50))
            assert tier.tier.statistics().state != "on"
        began_s = time.monotonic()
        tier.close(30)
        tier.tier.close(30)
        assert time.monotonic() - began_s < 10
        files.heal()
        before = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "kv").iterdir()}
        assert tier.load(tails(1)[0]) is LoadOutcome.CLOSED
        assert tier.store(tails(1, first=90)) == [StoreOutcome.CLOSED]
        assert tier.find(tails(1)) == []
        tier.pass_time(120_000)
        tier.poll()
        assert before == {
            path.name: path.stat().st_mtime_ns for path in (tmp_path / "kv").iterdir()
        }
    with driven(tmp_path / "kv") as tier:
        assert_holds(tier, tails(4), [])
