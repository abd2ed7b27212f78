"""The tier keeps every promise of a tier."""

import sqlite3
from pathlib import Path

from kvtide_sqlite import SQLiteTier

from kvtide.core.records import Record
from kvtide.testing.tier_suite import TierTests
from kvtide.tiers.base import Tier


class TestSQLiteTier(TierTests):
    """The suite; tests that need a file which stands still or fails skip: it says how."""

    tier_type = SQLiteTier

    def make_tier(self, tmp_path: Path, *, bytes_max: int) -> Tier:
        return SQLiteTier(tmp_path / "kv.sqlite", bytes_max, self.wake, self.queue_bytes_max)

    def reopen(self, tier: Tier) -> Tier | None:
        assert isinstance(tier, SQLiteTier)
        return SQLiteTier(tier.path, tier.bytes_max, self.wake, self.queue_bytes_max)

    def damage(self, tier: Tier, record: Record) -> None:
        assert isinstance(tier, SQLiteTier)
        with sqlite3.connect(tier.path, isolation_level=None) as sql:
            ((content,),) = sql.execute("SELECT content FROM records WHERE key = ?", (record.key,))
            wrong = content[:-1] + bytes([content[-1] ^ 1])
            sql.execute("UPDATE records SET content = ? WHERE key = ?", (wrong, record.key))
        sql.close()
