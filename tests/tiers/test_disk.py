"""The disk tier keeps every promise of a tier, and those that are its own."""

from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from kvtide.core.records import Record
from kvtide.testing.faulty_files import Call
from kvtide.testing.tier_records import chain_of, text
from kvtide.testing.tier_suite import TierTests
from kvtide.tiers.base import Tier
from kvtide.tiers.disk.tier import DiskTier
from tests.tiers.disk_place import (
    QUEUE_BYTES_MAX,
    ROOT,
    SMALL,
    bytes_taken,
    disk_of,
    driven,
    files_of,
    flip,
    keep,
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
    ("sync", "at_stores", "at_the_end"), [("none", 0, 0), ("sealed", 0, 2), ("each", 20, 22)]
)
def test_what_is_made_to_outlive_a_loss_of_power(
    tmp_path: Path, sync: str, at_stores: int, at_the_end: int
) -> None:
    """Nothing; a segment and its index, when it is full; and each record with its row."""
    with driven(tmp_path / "kv", sync=sync) as tier:
        tier.keep(tails(10))
        calls = files_of(disk_of(tier)).calls
        assert calls[Call.SYNC] == at_stores
        tier.close(30)
        assert calls[Call.SYNC] == at_the_end
        assert calls[Call.SYNC_DIRECTORY] == (sync != "none")


def test_partial_matches_of_a_large_directory_are_there_soon(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A start lists some first digests at once and the others as it is polled; whole chunks are
    found from the first moment."""
    monkeypatch.setattr("kvtide.tiers.disk.catalog.EAGER_ROWS", 0)
    monkeypatch.setattr("kvtide.tiers.disk.start.EAGER_ROWS", 0)
    chains = [chain_of(ROOT, SMALL, text(number, 6)) for number in range(20)]
    keep(tmp_path / "kv", [record for chain in chains for record in chain], segment_bytes=1 << 18)
    with driven(tmp_path / "kv") as tier:
        whole, tail = chains[13]
        assert tier.find([whole])[:1] == [whole]
        while not disk_of(tier)._catalog.is_swept:
            tier.poll_for(0.1)
        assert tier.find([whole], tail.digests) == [whole, tail]
        assert all(tier.find(chain[:1], chain[1].digests) == chain for chain in chains)
        disk_of(tier).check_integrity()
