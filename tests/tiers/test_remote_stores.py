"""Stores that wait for a server, or go on while others have ended."""

import mmap
import threading
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar

import pytest

from kvtide.testing import redis_servers
from kvtide.testing.proxy import Proxy
from kvtide.testing.tier_records import chain_of, layout_of, root_of, text
from kvtide.tiers.base import Stored, StoreJob, StoreOutcome
from kvtide.tiers.redis.session import RedisSession
from kvtide.tiers.remote.session import Put
from kvtide.tiers.remote.tier import PUT_MS_MAX
from kvtide.tiers.remote.workers import StoreOp, Workers
from tests.tiers.redis_place import WAIT_S, driven, open_redis


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


class PausingSession(RedisSession):
    """A session that asks for no more stores once one has ended, until it is told to."""

    paused: ClassVar[threading.Event] = threading.Event()
    goes_on: ClassVar[threading.Event] = threading.Event()

    def store(
        self, next_put: Callable[[], Put | None], ended: Callable[[Put, StoreOutcome], None]
    ) -> None:
        ends: list[StoreOutcome] = []

        def next_or_pause() -> Put | None:
            if ends:
                self.paused.set()
                assert self.goes_on.wait(WAIT_S)
            return next_put()

        def noted(put: Put, outcome: StoreOutcome) -> None:
            ended(put, outcome)
            ends.append(outcome)

        super().store(next_or_pause, noted)


def test_nothing_refers_to_the_cells_of_a_store_that_has_ended(tmp_path: Path) -> None:
    """While its child is under way by the same call: their memory can be given back."""
    records = chain_of(root_of(), layout_of(4096), text(1, 16))
    with redis_servers.running("valkey", tmp_path / "server") as server:
        tier = open_redis(server.port, session_type=PausingSession)
        memory = [mmap.mmap(-1, record.payload_bytes) for record in records]
        for number, record in enumerate(records):
            tier.store(StoreJob(number, record, [memoryview(memory[number])]))
        assert PausingSession.paused.wait(WAIT_S)
        assert tier.poll() == [Stored(0, StoreOutcome.STORED)]
        memory[0].close()  # raises where anybody has a view of it
        PausingSession.goes_on.set()
        tier.close(WAIT_S)
