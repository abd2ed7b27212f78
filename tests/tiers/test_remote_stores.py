"""Stores that wait for a server: they are left where they are until they are too old."""

from pathlib import Path

import pytest

from kvtide.testing import redis_servers
from kvtide.testing.proxy import Proxy
from kvtide.testing.tier_records import chain_of, layout_of, root_of, text
from kvtide.tiers.base import StoreOutcome
from kvtide.tiers.remote.tier import PUT_MS_MAX
from kvtide.tiers.remote.workers import StoreOp, Workers
from tests.tiers.redis_place import driven


def test_time_that_passes_takes_no_stores_back_but_old_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However often the clock is told, the thread that sends has the next ones."""
    taken: list[StoreOp] = []
    take_back = Workers.take_back_stores

    def noted(self: Workers) -> list[StoreOp]:
        ops = take_back(self)
        taken.extend(ops)
        return ops

    monkeypatch.setattr(Workers, "take_back_stores", noted)
    records = [chain_of(root_of(), layout_of(4096), text(n, 4))[0] for n in range(8)]
    with redis_servers.running("valkey", tmp_path / "server") as server:
        proxy = Proxy("127.0.0.1", server.port)
        with driven(proxy.port) as tier:
            with proxy.stalled():
                jobs = [tier.submit_store(record) for record in records]
                for _ in range(9):
                    tier.pass_time(PUT_MS_MAX // 10)
                assert not taken
                tier.pass_time(PUT_MS_MAX // 10)
                tier.poll()
                old = [job for job in jobs if tier.has_ended(job)]
                assert old, "the place does not answer"
                assert {id(op.job) for op in taken} == {id(job) for job in old}
            ends = {tier.stored(job) for job in jobs}
            assert ends <= {StoreOutcome.STORED, StoreOutcome.TOO_OLD}
        proxy.close()
