"""Loads, or stores, that stop by themselves while all else of a server works."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtide.core.records import Record
from kvtide.redis_address import Address
from kvtide.testing import redis_servers
from kvtide.testing.proxy import Proxy
from kvtide.testing.redis_servers import Server
from kvtide.testing.tier_records import chain_of, layout_of, root_of, text
from kvtide.tiers.base import LoadOutcome, StoreOutcome
from kvtide.tiers.breaker import FAILURES_MAX, RETRY_MS_MIN, SHARED_RETRY_MS_MAX
from kvtide.tiers.redis import stores
from kvtide.tiers.redis.routes import Limits
from kvtide.units import MiB
from tests.tiers.redis_place import driven, pass_calmly

LARGE = layout_of(MiB)
"""Chunks of 4 MiB: their values are of 2."""
HASTY = Limits(connect_s=0.5, silent_s=0.3, call_s=0.5, put_s=1.0)


def record_of(number: int) -> Record:
    return chain_of(root_of(), LARGE, text(number, 4))[0]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    with redis_servers.running("valkey", tmp_path / "server") as one:
        one.ask(b"ACL", b"SETUSER", b"kv", b"on", b">pw", b"~*", b"+@all")
        yield one


@pytest.mark.parametrize("fault", ["not allowed", "too long"])
def test_where_values_are_not_taken_stores_stop_and_loads_go_on(
    server: Server, fault: str
) -> None:
    """A right that is missing; a limit on values, at which the server ends the connection. After
    five in a row nothing is sent but what tries it again, less and less often; what is there
    already is answered meanwhile, and does not show that values are taken."""

    def limit(*, is_on: bool) -> None:
        if fault == "not allowed":
            server.ask(b"ACL", b"SETUSER", b"kv", b"-set" if is_on else b"+set")
        else:
            limit_bytes = MiB if is_on else 512 * MiB
            server.ask(b"CONFIG", b"SET", b"proto-max-bulk-len", b"%d" % limit_bytes)

    kept = record_of(1)
    address = Address((("127.0.0.1", server.port),), username="kv", password="pw")
    with driven(address, 64 * MiB) as tier:
        tier.keep([kept])
        limit(is_on=True)
        for number in range(FAILURES_MAX):
            assert tier.store([kept]) == [StoreOutcome.HELD]
            assert tier.store([record_of(10 + number)]) == [StoreOutcome.FAILED]
            assert tier.find([kept]) == [kept]
            assert tier.load(kept) is LoadOutcome.LOADED
        assert tier.tier.statistics().state.startswith("stores stop: ")
        for wait_ms in (RETRY_MS_MIN, 2 * RETRY_MS_MIN):
            pass_calmly(tier, wait_ms - 1)
            assert tier.store([record_of(20)]) == [StoreOutcome.BROKEN]
            assert tier.load(kept) is LoadOutcome.LOADED
            pass_calmly(tier, 1)
            assert tier.tier.statistics().state.startswith("stores stop: ")
            assert tier.store([record_of(20)]) == [StoreOutcome.FAILED]
        limit(is_on=False)
        pass_calmly(tier, SHARED_RETRY_MS_MAX)
        assert tier.store([record_of(20)]) == [StoreOutcome.STORED]
        assert tier.tier.statistics().state == "on"
        assert tier.load(record_of(20)) is LoadOutcome.LOADED


def test_loads_that_find_nothing_do_not_show_that_values_come(server: Server) -> None:
    """A line too thin for them: what is absent is said at once."""
    proxy, kept = Proxy("127.0.0.1", server.port), record_of(1)
    with driven(proxy.port, 64 * MiB, limits=HASTY) as tier:
        tier.keep([kept])
        proxy.bytes_per_s = 100_000
        for _ in range(FAILURES_MAX):
            assert tier.load(record_of(2)) is LoadOutcome.ABSENT
            assert tier.load(kept) is LoadOutcome.FAILED
        assert tier.load(kept) is LoadOutcome.BROKEN
        assert tier.tier.statistics().state.startswith("loads stop: ")
    proxy.close()


def test_a_server_without_memory_is_not_sent_what_it_refuses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where there is nothing of ours to make room. It is tried again by itself."""
    monkeypatch.setattr(stores, "FULL_S", 3_600.0)
    full = ("--maxmemory", "1mb", "--maxmemory-policy", "noeviction")
    with (
        redis_servers.running("redis", tmp_path / "server", *full) as server,
        driven(server.port, 64 * MiB) as tier,
    ):
        for number in range(FAILURES_MAX):
            assert tier.store([record_of(number)]) == [StoreOutcome.NO_ROOM]
        before = sets_of(server)
        for number in range(10):
            assert tier.store([record_of(number)]) == [StoreOutcome.NO_ROOM]
        assert sets_of(server) == before
        assert tier.tier.statistics().state == "on"
        server.ask(b"CONFIG", b"SET", b"maxmemory", b"100mb")
        monkeypatch.setattr(stores, "FULL_S", 0.0)
        assert tier.store([record_of(1), record_of(2)]) == [StoreOutcome.STORED] * 2


def sets_of(server: Server) -> bytes:
    """How often it was given a value, taken or not, as it says."""
    said = server.ask(b"INFO", b"commandstats")
    assert isinstance(said, bytes)
    return next(line for line in said.splitlines() if line.startswith(b"cmdstat_set:"))
