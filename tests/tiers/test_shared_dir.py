"""The shared directory keeps every promise of a tier, as its only member."""

from contextlib import AbstractContextManager
from pathlib import Path

from kvtide.core.records import Record
from kvtide.testing.tier_suite import TierTests
from kvtide.tiers.base import Tier
from kvtide.tiers.shared_dir.tier import SharedDirTier
from tests.tiers.disk_place import flip, payload_offset
from tests.tiers.shared_place import (
    QUEUE_BYTES_MAX,
    bytes_taken,
    file_of,
    files_of,
    folder_of,
    open_shared,
)


class TestSharedDirTier(TierTests):
    """The suite, on the file system below pytest's directory."""

    tier_type = SharedDirTier
    queue_bytes_max = QUEUE_BYTES_MAX

    def make_tier(self, tmp_path: Path, *, bytes_max: int) -> Tier:
        return open_shared(tmp_path / "kv", self.wake, bytes_max)

    def reopen(self, tier: Tier) -> Tier | None:
        assert isinstance(tier, SharedDirTier)
        return open_shared(tier.path, self.wake, tier.bytes_max)

    def bytes_taken(self, tier: Tier) -> int:
        assert isinstance(tier, SharedDirTier)
        tier.check_integrity()
        return bytes_taken(folder_of(tier))

    def stalled(self, tier: Tier) -> AbstractContextManager[None]:
        assert isinstance(tier, SharedDirTier)
        return files_of(tier).stalled()

    def failing(self, tier: Tier) -> AbstractContextManager[None]:
        assert isinstance(tier, SharedDirTier)
        return files_of(tier).failing()

    def damage(self, tier: Tier, record: Record) -> None:
        assert isinstance(tier, SharedDirTier)
        flip(file_of(tier, record), payload_offset(record) + 5)
