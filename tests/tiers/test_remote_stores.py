"""Stores that wait for a server: what is done ahead for them stays done."""

import threading
from pathlib import Path
from typing import Any

import pytest

from kvtide.testing import redis_servers
from kvtide.testing.proxy import Proxy
from kvtide.testing.tier_records import chain_of, layout_of, root_of, text
from kvtide.tiers.base import StoreOutcome
from kvtide.tiers.remote import parts
from kvtide.tiers.remote.tier import PUT_MS_MAX
from tests.tiers.redis_place import WAIT_S, driven


def test_time_that_passes_takes_no_checksums_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each store is summed once, however often the clock is told while they wait."""
    summed = threading.Semaphore(0)
    count = 0
    fill = parts.fill_headers

    def counted(*arguments: Any) -> None:
        nonlocal count
        fill(*arguments)
        count += 1
        summed.release()

    monkeypatch.setattr(parts, "fill_headers", counted)
    records = [chain_of(root_of(), layout_of(4096), text(n, 4))[0] for n in range(8)]
    with redis_servers.running("valkey", tmp_path / "server") as server:
        proxy = Proxy("127.0.0.1", server.port)
        with driven(proxy.port) as tier:
            with proxy.stalled():
                jobs = [tier.submit_store(record) for record in records]
                for _ in jobs:
                    assert summed.acquire(timeout=WAIT_S)
                for _ in range(5):
                    tier.pass_time(PUT_MS_MAX // 10)
            assert {tier.stored(job) for job in jobs} == {StoreOutcome.STORED}
        proxy.close()
    assert count == len(records)
