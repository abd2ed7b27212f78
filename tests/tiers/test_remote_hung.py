"""Calls of a session that do not come back, and names that a resolver does not resolve."""

import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import pytest

from kvtide.bounds import T_LOAD_MS, T_PUT_MS
from kvtide.core.keys import salt_digest
from kvtide.core.records import Record
from kvtide.redis_address import Address
from kvtide.testing import redis_servers
from kvtide.testing.proxy import Proxy
from kvtide.testing.redis_servers import Server
from kvtide.testing.tier_drive import DrivenTier
from kvtide.testing.tier_records import chain_of, layout_of, root_of, text
from kvtide.tiers.base import LoadOutcome, LookupJob, StoreOutcome
from kvtide.tiers.breaker import FAILURES_MAX, RETRY_MS_MIN
from kvtide.tiers.patience import CLEAR_S_MAX
from kvtide.tiers.redis.routes import Limits
from kvtide.tiers.redis.session import RedisSession
from kvtide.tiers.remote.session import Put
from kvtide.tiers.remote.tier import LATE_MS, RemoteTier
from kvtide.tiers.remote.workers import LOAD_THREADS
from tests.tiers.redis_cluster import wait_until
from tests.tiers.redis_place import WAIT_S, driven, heal

SMALL = layout_of(4096, 8192)
HASTY = Limits(connect_s=0.3, silent_s=5.0, call_s=5.0, put_s=5.0)
STORE_MS_MAX = T_PUT_MS + 2 * T_LOAD_MS + LATE_MS
"""With what may be cleared and swept ahead of it."""


def records(count: int, first: int = 0) -> list[Record]:
    root = root_of()
    return [chain_of(root, SMALL, text(number, 4))[0] for number in range(first, first + count)]


class HangingSession(RedisSession):
    """A session whose calls hang, on their threads, as long as they are told to."""

    hangs: ClassVar[set[str]] = set()
    """Calls that will hang."""
    begun: ClassVar[threading.Semaphore] = threading.Semaphore(0)
    come_back: ClassVar[threading.Event] = threading.Event()

    def _hang(self, call: str) -> None:
        if call in self.hangs:
            self.begun.release()
            self.come_back.wait()

    def find(self, job: LookupJob) -> tuple[list[Record], bool]:
        self._hang("find")
        return super().find(job)

    def load(self, record: Record, cells: Sequence[memoryview]) -> LoadOutcome:
        self._hang("load")
        return super().load(record, cells)

    def store(
        self, next_put: Callable[[], Put | None], ended: Callable[[Put, StoreOutcome], None]
    ) -> None:
        self._hang("store")
        super().store(next_put, ended)


@contextmanager
def hanging(*calls: str) -> Iterator[None]:
    """These calls hang until it ends."""
    HangingSession.come_back.clear()
    HangingSession.hangs |= set(calls)
    try:
        yield
    finally:
        HangingSession.hangs.clear()
        HangingSession.come_back.set()


def wait_hanging(count: int) -> None:
    for _ in range(count):
        assert HangingSession.begun.acquire(timeout=WAIT_S)


def is_probing(tier: DrivenTier) -> bool:
    """Whether the place is being tried, as far as the owner knows; it begins with the clock."""
    assert isinstance(tier.tier, RemoteTier)
    return tier.tier._breaker.is_probing


def let_hang(tier: DrivenTier, for_ms: int) -> None:
    """Time passes, up to the moment when calls count as hung, and then on."""
    tier.pass_time(1)
    tier.pass_time(for_ms)
    assert tier.tier.statistics().state == "on", "not yet"
    tier.pass_time(1)
    assert "has not come back" in tier.tier.statistics().state


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    with redis_servers.running("valkey", tmp_path / "server") as one:
        yield one


@pytest.fixture
def tier(server: Server) -> Iterator[DrivenTier]:
    with driven(server.port, session_type=HangingSession) as one:
        one.keep(records(8))
        yield one


def test_what_waits_behind_loads_that_hang_ends(
    tier: DrivenTier, caplog: pytest.LogCaptureFixture
) -> None:
    """One line; nothing shows that loads work until they come back, and then they have brought
    every byte into cells that were theirs all the time."""
    caplog.clear()
    with hanging("load"):
        jobs = [tier.submit_load(record) for record in records(8)]
        wait_hanging(LOAD_THREADS)
        let_hang(tier, T_LOAD_MS + LATE_MS)
        behind = [tier.loaded(job) for job in jobs[LOAD_THREADS:]]
        assert behind == [LoadOutcome.BROKEN] * (8 - LOAD_THREADS)
        assert tier.find(records(1)) == []
        assert tier.load(records(1)[0]) is LoadOutcome.BROKEN
        assert tier.store(records(1, first=50)) == [StoreOutcome.BROKEN]
        tier.pass_time(60_000)
        assert not is_probing(tier)
        assert "has not come back" in tier.tier.statistics().state
        assert not any(map(tier.has_ended, jobs[:LOAD_THREADS]))
    assert [tier.loaded(job) for job in jobs[:LOAD_THREADS]] == [LoadOutcome.LOADED] * LOAD_THREADS
    assert tier.tier.statistics().state == "on"
    lines = [one for one in caplog.records if one.levelno >= logging.WARNING]
    assert len(lines) == 2, lines


def test_loads_go_on_beside_one_that_hangs(tier: DrivenTier) -> None:
    """A probe shows that the place works; the one that hangs is not told of again."""
    with hanging("load"):
        job = tier.submit_load(records(1)[0])
        wait_hanging(1)
        let_hang(tier, T_LOAD_MS + LATE_MS)
        HangingSession.hangs.clear()  # for those that come
        while tier.tier.statistics().state != "on":
            tier.pass_time(60_000)
            tier.poll_for(0.02)
        assert tier.load(records(8)[5]) is LoadOutcome.LOADED
        tier.pass_time(60_000)
        assert tier.tier.statistics().state == "on"
    assert tier.loaded(job) is LoadOutcome.LOADED


def test_a_load_that_hangs_while_it_tries_whether_loads_work_is_followed_by_another(
    server: Server,
) -> None:
    """Values did not come, so one load alone is let through; and that does not come back."""
    proxy, record = Proxy("127.0.0.1", server.port), records(1)[0]
    limits = Limits(connect_s=0.5, silent_s=0.3, call_s=0.5, put_s=5.0)
    with driven(proxy.port, limits=limits, session_type=HangingSession) as tier:
        tier.keep([record])
        proxy.bytes_per_s = 20_000
        for _ in range(FAILURES_MAX):
            assert tier.find([record]) == [record]
            assert tier.load(record) is LoadOutcome.FAILED
        proxy.bytes_per_s = 0
        tier.pass_time(RETRY_MS_MIN)
        with hanging("load"):
            job = tier.submit_load(record)
            wait_hanging(1)
            tier.pass_time(1)
            tier.pass_time(T_LOAD_MS + LATE_MS + 1)
            assert "has not come back" in tier.tier.statistics().state
            HangingSession.hangs.clear()  # for those that come
            heal(tier, record)
            assert not tier.has_ended(job)
        assert tier.loaded(job) is LoadOutcome.LOADED
    proxy.close()


def test_lookups_behind_one_that_hangs_find_nothing(tier: DrivenTier) -> None:
    """And loads that work do not show that lookups do."""
    with hanging("find"):
        asked = [tier.ask(records(1)) for _ in range(4)]
        wait_hanging(1)
        tier.pass_time(1)
        tier.pass_time(T_LOAD_MS + LATE_MS + 1)
        assert [tier.found(job).records for job in asked[1:]] == [[]] * 3
        tier.pass_time(60_000)
        assert not is_probing(tier)
        assert tier.load(records(1)[0]) is LoadOutcome.BROKEN
    assert tier.found(asked[0]).records == records(1)
    heal(tier, records(1)[0])


def test_stores_behind_one_that_hangs_end(tier: DrivenTier) -> None:
    """Too old by then; the one that hangs is kept when it is back."""
    with hanging("store"):
        jobs = [tier.submit_store(record) for record in records(40, first=50)]
        wait_hanging(1)
        tier.pass_time(1)
        tier.pass_time(T_PUT_MS)
        tier.wait(jobs[1:])
        assert {tier.stored(job) for job in jobs[1:]} == {StoreOutcome.TOO_OLD}
        tier.pass_time(STORE_MS_MAX)
        assert "has not come back" in tier.tier.statistics().state
        assert tier.load(records(1)[0]) is LoadOutcome.BROKEN
    assert tier.stored(jobs[0]) is StoreOutcome.STORED
    heal(tier, records(51)[50])


def test_a_clear_behind_a_long_store_is_done_before_the_end(
    server: Server, tier: DrivenTier
) -> None:
    """It has waited for its fifth of a second; the store ends while the tier is being closed."""
    assert isinstance(tier.tier, RemoteTier)
    workers = tier.tier._workers
    looks = workers._for_quiet = Looks(workers._lock)
    seen = lambda: looks.count > 1 or workers._is_ending  # noqa: E731
    with hanging("store"):
        job = tier.submit_store(records(1, first=50)[0])
        wait_hanging(1)
        tier.tier.clear(None)
        closing = threading.Thread(target=tier.tier.close, args=(WAIT_S,))
        closing.start()
        wait_until(lambda: looks.count == 1, "it waits")
        # The thread that stores goes on once it is seen that its store has ended.
        workers._wake = lambda: wait_until(seen, "it looks again, or goes on")
    closing.join()
    tier.poll()
    assert not tier.stored(job).is_kept
    with driven(server.port) as other:
        assert not any(map(other.is_there, [*records(8), *records(1, first=50)]))


def test_clears_in_a_row_hold_up_the_owner_no_longer_than_one(tier: DrivenTier) -> None:
    """One for each salt of an adapter, while a store hangs ahead of them."""
    with hanging("store"):
        job = tier.submit_store(records(1, first=50)[0])
        wait_hanging(1)
        began_s = time.monotonic()
        for number in range(20):
            tier.tier.clear(salt_digest(f"salt {number}"))
        assert time.monotonic() - began_s < 5 * CLEAR_S_MAX
        tier.pass_time(1)
        began_s = time.monotonic()
        tier.tier.clear(salt_digest("one more"))
        assert time.monotonic() - began_s > CLEAR_S_MAX / 2, "the next tick brings patience"
    assert tier.stored(job) is StoreOutcome.STORED, "it is of another salt"


class Looks(threading.Condition):
    """Counts how often the one that waits has looked, and must wait."""

    count = 0

    def wait(self, timeout: float | None = None) -> bool:
        self.count += 1
        return super().wait(timeout)


def test_close_does_not_wait_for_a_call_that_hangs(tier: DrivenTier) -> None:
    """What it was asked for ends when it comes back."""
    with hanging("load"):
        job = tier.submit_load(records(1)[0])
        wait_hanging(1)
        tier.close(0.2)
        assert not tier.has_ended(job)
    assert tier.loaded(job) is LoadOutcome.CLOSED


def test_a_name_that_is_not_resolved_costs_its_bound(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A resolver that hangs: calls end, one thread waits for it, and hits resume after it."""
    answers = threading.Event()
    asked: list[str] = []
    resolve = socket.getaddrinfo

    def slow(host: str, port: int, **more: Any) -> Any:
        if more["flags"] & socket.AI_NUMERICHOST:
            return resolve(host, port, **more)
        asked.append(host)
        answers.wait()
        return resolve("127.0.0.1", port, **more)

    with driven(server.port) as tier:
        tier.keep(records(1))
    monkeypatch.setattr(socket, "getaddrinfo", slow)
    with driven(Address((("cache.example", server.port),)), limits=HASTY) as tier:
        try:
            for _ in range(FAILURES_MAX):
                assert tier.load(records(1)[0]) in (LoadOutcome.FAILED, LoadOutcome.BROKEN)
            assert "in time" in tier.tier.statistics().state
            assert asked == ["cache.example"], "all wait for the same answer"
        finally:
            answers.set()
        heal(tier, records(1)[0])
