"""How the suite of the tiers disturbs the reference tier."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import ClassVar

from kvtide.core.records import Record
from kvtide.testing.memory_tier import MemoryTier
from kvtide.testing.tier_suite import TierTests


class MemoryTierTests(TierTests):
    tier_type: ClassVar[type[MemoryTier]] = MemoryTier
    running_max: ClassVar[int] = 1

    def make_tier(self, tmp_path: Path, *, bytes_max: int) -> MemoryTier:
        return self.tier_type(
            bytes_max,
            self.wake,
            queue_bytes_max=self.queue_bytes_max,
            put_ms_max=self.put_ms_max,
        )

    def reopen(self, tier: MemoryTier) -> MemoryTier:
        return self.tier_type(tier.statistics().bytes_max, self.wake, held=tier.held)

    @contextmanager
    def stalled(self, tier: MemoryTier) -> Iterator[None]:
        tier.answers.clear()
        try:
            yield
        finally:
            tier.answers.set()

    @contextmanager
    def failing(self, tier: MemoryTier) -> Iterator[None]:
        tier.fails = True
        try:
            yield
        finally:
            tier.fails = False

    def damage(self, tier: MemoryTier, record: Record) -> None:
        held = tier.held[record.key]
        held.shards[-1] = held.shards[-1][:-1] + bytes([held.shards[-1][-1] ^ 1])
