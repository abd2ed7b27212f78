"""What a server does to a redis tier: says nothing, ends in the middle, forgets, lies, is full."""

import random
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtide.core.records import Record
from kvtide.redis_address import Address
from kvtide.testing import redis_servers
from kvtide.testing.proxy import Proxy
from kvtide.testing.redis_servers import Server
from kvtide.testing.tier_drive import DrivenTier
from kvtide.testing.tier_records import chain_of, layout_of, root_of, text
from kvtide.tiers.base import LoadOutcome, StoreOutcome
from kvtide.tiers.breaker import FAILURES_MAX, RETRY_MS_MIN, SHARED_RETRY_MS_MAX
from kvtide.tiers.redis.routes import Limits
from kvtide.tiers.remote.tier import CLEARS_MAX
from kvtide.units import KiB, MiB
from tests.tiers.redis_place import PROGRAMS, driven, heal, part_names, pass_calmly, well

ROOT = root_of()
SMALL = layout_of(4096, 8192)
LARGE = layout_of(256 * KiB)
"""Chunks of a megabyte: more than one part, and more than one piece on a socket."""
HASTY = Limits(connect_s=0.5, silent_s=0.3, call_s=0.5, put_s=1.0)
INDEX_KEYS = ("index", "tree", "leaves", "inner", "numbers", "loose")


@pytest.fixture(params=PROGRAMS)
def server(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Server]:
    with redis_servers.running(request.param, tmp_path / "server") as one:
        yield one


@pytest.fixture
def proxy(server: Server) -> Iterator[Proxy]:
    one = Proxy("127.0.0.1", server.port)
    yield one
    one.close()


def records(count: int, first: int = 0) -> list[Record]:
    """Chunks of a megabyte, each right below the root."""
    return [chain_of(ROOT, LARGE, text(number, 4))[0] for number in range(first, first + count)]


# ---- it says nothing, or not enough


@pytest.mark.parametrize("fault", ["stalled", "throttled", "delayed"])
def test_a_server_that_is_too_slow_costs_its_bound_and_then_nothing(
    server: Server, proxy: Proxy, fault: str
) -> None:
    """Each load ends in bounded time; after five in a row nothing is tried, until it is well."""
    record, other = records(2)
    with driven(proxy.port, limits=HASTY) as tier:
        tier.keep([record])
        proxy.delay_s = 0.6 if fault == "delayed" else 0.0
        proxy.bytes_per_s = 100_000 if fault == "throttled" else 0
        stop = proxy.stalled()
        if fault == "stalled":
            stop.__enter__()
        for _ in range(FAILURES_MAX):
            began_s = time.monotonic()
            assert tier.load(record) is LoadOutcome.FAILED
            assert time.monotonic() - began_s < HASTY.call_s + HASTY.connect_s + 5.0
        began_s = time.monotonic()
        assert tier.load(record) is LoadOutcome.BROKEN
        assert tier.find([record]) == []
        assert tier.store([other]) == [StoreOutcome.BROKEN]
        assert time.monotonic() - began_s < 0.1, "it was not asked"
        assert "in time" in tier.tier.statistics().state
        proxy.delay_s = proxy.bytes_per_s = 0
        if fault == "stalled":
            stop.__exit__(None, None, None)
        heal(tier, record)
        assert tier.find([record]) == [record]
        assert tier.tier.statistics().state == "on"


def test_where_values_do_not_come_lookups_do_not_lead_to_them(
    server: Server, proxy: Proxy
) -> None:
    """A line too thin for them: lookups are answered, each load takes all its time. After five in
    a row nothing is asked but what tries it again, less and less often; one that works ends it."""
    record = records(1)[0]
    with driven(proxy.port, limits=HASTY) as tier:
        tier.keep([record])
        proxy.bytes_per_s = 100_000
        for _ in range(FAILURES_MAX):
            assert tier.find([record]) == [record]
            assert tier.load(record) is LoadOutcome.FAILED
        assert "in time" in tier.tier.statistics().state
        for wait_ms in (RETRY_MS_MIN, 2 * RETRY_MS_MIN):
            tier.pass_time(wait_ms - 1)
            assert tier.find([record]) == []
            assert tier.load(record) is LoadOutcome.BROKEN
            tier.pass_time(1)
            assert tier.find([record]) == [record], "else nobody would load what tries it"
            probe, other = tier.submit_load(record), tier.submit_load(record)
            assert tier.loaded(other) is LoadOutcome.BROKEN
            assert tier.loaded(probe) is LoadOutcome.FAILED
        assert tier.find([record]) == []
        proxy.bytes_per_s = 0
        tier.pass_time(SHARED_RETRY_MS_MAX)
        assert tier.load(record) is LoadOutcome.LOADED
        assert tier.tier.statistics().state == "on"


def test_loads_that_wait_end_with_those_that_fail(server: Server, proxy: Proxy) -> None:
    """Each would take as long in vain; lookups are answered meanwhile."""
    record = records(1)[0]
    with driven(proxy.port, limits=HASTY) as tier:
        tier.keep([record])
        proxy.bytes_per_s = 100_000
        for _ in range(FAILURES_MAX - 1):
            assert tier.find([record]) == [record]
            assert tier.load(record) is LoadOutcome.FAILED
        loads = [tier.submit_load(record) for _ in range(20)]
        assert tier.find([record]) == [record]
        ends = [tier.loaded(load) for load in loads]
        assert ends.count(LoadOutcome.FAILED) < FAILURES_MAX, "the last, and those under way"
        assert set(ends) == {LoadOutcome.FAILED, LoadOutcome.BROKEN}
        proxy.bytes_per_s = 0
        heal(tier, record)


def test_an_answer_that_ends_anywhere_is_a_failure_and_no_other_answer_is_shifted(
    server: Server, proxy: Proxy
) -> None:
    """Loads and stores end after any number of bytes of answers; what follows is right."""
    first, second, tail = chain = chain_of(ROOT, SMALL, text(1, 10))
    with driven(server.port) as tier:
        tier.keep(chain)
    failed = 0
    for end_after in [*range(1, 120, 7), *range(1_000, 60_000, 4_999)]:
        with driven(proxy.port) as tier:
            assert tier.find([first, second], tail.digests) == chain
            proxy.end_after = end_after
            outcomes = [tier.load(record) for record in chain]
            assert set(outcomes) <= {LoadOutcome.LOADED, LoadOutcome.FAILED}, outcomes
            failed += outcomes.count(LoadOutcome.FAILED)
            proxy.end_after = None
            assert tier.load(second) is LoadOutcome.LOADED, end_after
            assert tier.find([first, second], tail.digests) == chain
    assert failed > 20


def test_a_store_whose_answers_end_anywhere_leaves_a_whole_record_or_none(
    server: Server, proxy: Proxy
) -> None:
    """It is found and brings every byte, or is not found, and can be stored."""
    seen = set()
    for number, end_after in enumerate(range(1, 600, 23)):
        record = chain_of(ROOT, SMALL, text(number, 4))[0]
        with driven(proxy.port) as tier:
            proxy.end_after = end_after
            outcome = tier.store([record])[0]
            proxy.end_after = None
            seen.add(outcome)
            assert outcome in (StoreOutcome.STORED, StoreOutcome.FAILED)
            is_there = tier.is_there(record)
            assert is_there or outcome is StoreOutcome.FAILED
            if not is_there:
                assert tier.store([record]) == [StoreOutcome.STORED], end_after
            assert tier.load(record) is LoadOutcome.LOADED
    assert seen == {StoreOutcome.STORED, StoreOutcome.FAILED}


def test_random_faults_never_bring_a_wrong_byte(server: Server, proxy: Proxy) -> None:
    """The driver looks at each byte of each load that ended well; at the end all heals."""
    seed = random.randrange(1 << 30)
    chance = random.Random(seed)
    chains = [chain_of(ROOT, SMALL, text(number, 10)) for number in range(6)]
    loaded = 0
    with driven(proxy.port) as tier:
        for _ in range(120):
            proxy.end_after = chance.choice([None, None, None, chance.randrange(1, 80_000)])
            if chance.random() < 0.1:
                proxy.cut()
            chain = chance.choice(chains)
            jobs = [tier.submit_store(record) for record in chain]
            loads = [tier.submit_load(record) for record in chance.choice(chains)]
            tier.wait([*jobs, *loads, tier.ask(chain[:2], chain[2].digests)])
            loaded += sum(tier.loaded(job) is LoadOutcome.LOADED for job in loads)
            if tier.tier.statistics().state != "on":
                proxy.end_after = None
                well(tier, chain[0])
        proxy.end_after = None
        for chain in chains:
            while not all(outcome.is_kept for outcome in tier.store(chain)):
                pass_calmly(tier, 5_000)
                tier.poll_for(0.05)
        for chain in chains:
            assert tier.find(chain[:2], chain[2].digests) == chain, seed
            assert {tier.load(record) for record in chain} == {LoadOutcome.LOADED}, seed
    assert loaded > 20, seed


# ---- it forgets


@pytest.mark.parametrize("part", [0, 1])
def test_a_part_that_the_server_evicts_is_a_miss_that_removes_its_record(
    server: Server, part: int
) -> None:
    """With what lies behind it; its other parts go too, and it can be stored again."""
    first, second = chain_of(ROOT, LARGE, text(1, 8))
    with driven(server.port) as tier:
        tier.keep([first, second])
        server.ask(b"UNLINK", part_names(server, first)[part])
        assert tier.load(first) is LoadOutcome.ABSENT
        assert tier.tier.statistics().state == "on"
        assert tier.find([first, second]) == []
        assert tier.tier.statistics().records == 0
        assert tier.tier.statistics().bytes_used == 0
        assert all(b"{" in key for key in server.names()), "only the index is left"
        assert tier.store([first, second]) == [StoreOutcome.STORED] * 2
        assert tier.load(second) is LoadOutcome.LOADED


@pytest.mark.parametrize("name", INDEX_KEYS)
def test_an_index_that_lost_a_key_begins_anew(server: Server, name: str) -> None:
    """Never half of it: nothing is found that could not be evicted, cleared or counted."""
    chain = chain_of(ROOT, SMALL, text(1, 10))
    with driven(server.port) as tier:
        tier.keep(chain)
        tag = b"kvtide:{kvtide:2}:"
        assert server.ask(b"UNLINK", tag + name.encode()) in (0, 1)
        is_there = bool(tier.find(chain[:2]))
        assert is_there == (name == "loose" and server.ask(b"EXISTS", tag + b"index") == 1)
        outcomes = tier.store(chain)
        assert all(outcome.is_kept for outcome in outcomes)
        assert tier.find(chain[:2], chain[2].digests) == chain
        assert {tier.load(record) for record in chain} == {LoadOutcome.LOADED}
        assert tier.tier.statistics().records == 3


@pytest.mark.parametrize("keeps", [True, False])
def test_hits_resume_after_the_server_was_killed(tmp_path: Path, keeps: bool) -> None:
    """With its data they are hits, without it misses, and never errors for long."""
    chain = chain_of(ROOT, SMALL, text(1, 10))
    options = ("--save", "3600 1000000") if keeps else ()
    server = redis_servers.server("valkey", tmp_path / "server", *options)
    server.start()
    with driven(server.port) as tier:
        tier.keep(chain)
        if keeps:
            assert server.ask(b"SAVE") == b"OK"
        server.kill()
        outcomes = [tier.load(chain[0]) for _ in range(FAILURES_MAX + 1)]
        assert outcomes == [LoadOutcome.FAILED] * FAILURES_MAX + [LoadOutcome.BROKEN]
        server.start()
        well(tier, chain[0])
        wanted = chain if keeps else []
        assert tier.find(chain[:2], chain[2].digests) == wanted
        assert tier.load(chain[2]) is (LoadOutcome.LOADED if keeps else LoadOutcome.ABSENT)
        outcome = StoreOutcome.HELD if keeps else StoreOutcome.STORED
        assert tier.store(chain) == [outcome] * 3
    server.kill()


def test_a_connection_that_the_server_ended_while_idle_costs_nothing(
    server: Server, proxy: Proxy
) -> None:
    """As with its setting `timeout`, or after a quick restart: no job fails by it."""
    chain = chain_of(ROOT, SMALL, text(1, 10))
    with driven(proxy.port) as tier:
        tier.keep(chain)
        for _ in range(3):
            proxy.cut()
            while clients_of(server) > 1:  # but this one
                time.sleep(0.01)
            assert tier.find(chain[:2], chain[2].digests) == chain
            assert {tier.load(record) for record in chain} == {LoadOutcome.LOADED}
            assert tier.store(chain[:1]) == [StoreOutcome.HELD]


def test_a_server_that_forgot_the_script_is_told_again(server: Server) -> None:
    """As after its restart, or SCRIPT FLUSH."""
    chain = chain_of(ROOT, SMALL, text(1, 10))
    with driven(server.port) as tier:
        tier.keep(chain[:1])
        server.ask(b"SCRIPT", b"FLUSH")
        tier.keep(chain[1:])
        assert tier.find(chain[:2], chain[2].digests) == chain


def test_what_a_killed_writer_left_is_removed_by_the_next(server: Server) -> None:
    """Parts without a record count until their time is over, and then they go."""
    one, other, third = records(3)
    with driven(server.port) as tier:
        tier.keep([one])
        tag = b"kvtide:{kvtide:2}:"
        left = bytes(16)
        server.ask(b"SET", b"kvtide:2:" + left.hex().encode() + b":0", b"x" * 1000)
        server.ask(b"ZADD", tag + b"loose", b"1", left + b"0001" + b"%016d" % 5000)
        server.ask(b"HINCRBY", tag + b"numbers", b"loose", b"1")
        server.ask(b"HINCRBY", tag + b"numbers", b"bytes", b"5000")
        before = tier.tier.statistics().bytes_used
        tier.keep([other])
        assert server.ask(b"EXISTS", b"kvtide:2:" + left.hex().encode() + b":0") == 0
        assert tier.find([one]) == [one]
        assert tier.tier.statistics().bytes_used == 2 * before
        tier.keep([third])  # says that they are gone
        assert server.ask(b"ZCARD", tag + b"loose") == 0


def clients_of(server: Server) -> int:
    said = server.ask(b"CLIENT", b"LIST", b"TYPE", b"normal")
    assert isinstance(said, bytes)
    return said.count(b"\n")


# ---- it lies


def test_values_that_were_swapped_are_never_loaded(
    server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    """Whole parts of two records: both are misses and gone, and it is said why."""
    one, other, third = records(3)
    with driven(server.port) as tier:
        tier.keep([one, other, third])
        for mine, theirs in zip(part_names(server, one), part_names(server, other), strict=True):
            server.ask(b"RENAME", mine, b"x")
            server.ask(b"RENAME", theirs, mine)
            server.ask(b"RENAME", b"x", theirs)
        assert [tier.load(record) for record in (one, other)] == [LoadOutcome.CORRUPT] * 2
        assert [tier.load(record) for record in (one, other)] == [LoadOutcome.ABSENT] * 2
        assert tier.load(third) is LoadOutcome.LOADED
    for mine, theirs in ((one, other), (other, one)):
        assert f"{mine.key.hex()}: at rest is shard 0 of {theirs.key.hex()}" in caplog.text


@pytest.mark.parametrize("part", [0, 1])
@pytest.mark.parametrize("change", ["shorter", "longer", "empty", "other type", "older write"])
def test_a_value_that_is_not_what_was_written_is_never_loaded(
    server: Server, part: int, change: str
) -> None:
    """It is a miss; what follows on the same tier is right."""
    one, other = records(2)
    with driven(server.port) as tier:
        tier.keep([one])
        old = [server.ask(b"GET", name) for name in part_names(server, one)]
        tier.tier.clear(None)
        tier.keep([one, other])
        name = part_names(server, one)[part]
        value = old[part]
        assert isinstance(value, bytes)
        made = {"shorter": value[:-1], "longer": value + b"x", "empty": b"", "older write": value}
        if change == "other type":
            server.ask(b"UNLINK", name)
            server.ask(b"LPUSH", name, b"x")
        else:
            server.ask(b"SET", name, made[change])
        outcome = tier.load(one)
        if change == "other type":
            assert outcome is LoadOutcome.FAILED
        elif change == "older write" and part == 1:
            assert outcome is LoadOutcome.LOADED, "the same bytes"
        else:
            assert outcome is LoadOutcome.CORRUPT
            assert tier.find([one]) == []
        assert tier.load(other) is LoadOutcome.LOADED


# ---- it is full


@pytest.mark.parametrize("megabytes", [8, 1])
def test_a_server_that_is_full_goes_on_within_what_it_has(tmp_path: Path, megabytes: int) -> None:
    """With `noeviction` it refuses: no fault of a connection. Older records make room for new
    ones; where it has room for none, stores are dropped, and all else goes on."""
    options = ("--maxmemory", f"{megabytes}mb", "--maxmemory-policy", "noeviction")
    with (
        redis_servers.running("redis", tmp_path / "server", *options) as server,
        driven(server.port, bytes_max=64 * MiB) as tier,
    ):
        outcomes = tier.store(records(24))
        assert set(outcomes) <= {StoreOutcome.STORED, StoreOutcome.NO_ROOM}, outcomes
        held = [record for record in records(24) if tier.is_there(record)]
        assert {tier.load(record) for record in held} <= {LoadOutcome.LOADED}
        assert bool(held) == (megabytes == 8)
        if held:
            assert outcomes[-8:].count(StoreOutcome.STORED) >= 4, outcomes
            assert tier.tier.statistics().evicted > 8
        assert tier.tier.statistics().state == "on"
        assert tier.tier.clear(None) == len(held)


def test_a_server_that_evicts_costs_misses_and_no_errors(tmp_path: Path) -> None:
    """Half of what is stored fits: each load is good, or a miss that heals."""
    options = ("--maxmemory", "12mb", "--maxmemory-policy", "allkeys-lru")
    with (
        redis_servers.running("redis", tmp_path / "server", *options) as server,
        driven(server.port, bytes_max=64 * MiB) as tier,
    ):
        for first in range(0, 60, 20):  # the index itself may go: all keys are as new
            kept = [outcome.is_kept for outcome in tier.store(records(20, first))]
            assert any(kept)
            outcomes = [tier.load(record) for record in records(20, first)]
            assert set(outcomes) <= {LoadOutcome.LOADED, LoadOutcome.ABSENT}, outcomes
            assert LoadOutcome.ABSENT in outcomes, "they cannot all be there"
            assert tier.tier.statistics().state == "on"
        there = [record for record in records(60) if tier.is_there(record)]
        assert {tier.load(record) for record in there} <= {LoadOutcome.LOADED}


# ---- others use it


def test_nodes_share_what_they_store_and_what_they_clear(server: Server) -> None:
    """Nothing is sent twice, a clear holds for all, and a cap is one for all."""
    chain = chain_of(ROOT, SMALL, text(1, 10))
    with driven(server.port) as one, driven(server.port) as other:
        one.keep(chain)
        assert other.find(chain[:2], chain[2].digests) == chain
        assert {other.load(record) for record in chain} == {LoadOutcome.LOADED}
        assert other.store(chain) == [StoreOutcome.HELD] * 3
        assert other.tier.clear(ROOT.salt_digest) == 3
        assert one.find(chain[:2], chain[2].digests) == []
        assert one.load(chain[0]) is LoadOutcome.ABSENT
        pass_calmly(one, 20_000)
        while one.tier.statistics().records:
            one.poll_for(0.05)
        for number, record in enumerate(records(24)):
            (one if number % 2 else other).keep([record])
        assert server.bytes_taken() <= 8 * MiB
        held = [record for record in records(24) if one.is_there(record)]
        assert len(held) >= 4
        assert {other.load(record) for record in held} == {LoadOutcome.LOADED}


def test_many_clears_of_a_salt_each_leave_all_others(server: Server) -> None:
    """More than may wait for a server that is away, and none of them waits."""
    chain = chain_of(ROOT, SMALL, text(1, 10))
    with driven(server.port) as tier:
        tier.keep(chain)
        for number in range(2 * CLEARS_MAX):
            assert tier.tier.clear(number.to_bytes(32)) == 0
        assert tier.find(chain[:2], chain[2].digests) == chain


def test_two_prefixes_share_a_server_and_nothing_else(server: Server) -> None:
    """Neither records, nor clears, nor the cap."""
    chain = chain_of(ROOT, SMALL, text(1, 10))
    with driven(server.port) as one, driven(server.port, prefix="other") as other:
        one.keep(chain)
        assert other.find(chain[:2]) == []
        other.keep(chain)
        assert one.tier.clear(None) == 3
        assert other.find(chain[:2], chain[2].digests) == chain


# ---- it says no


def test_a_wrong_password_is_said_without_it_and_heals(server: Server) -> None:
    """The state names the reason; once the server takes the password, hits resume."""
    record = records(1)[0]
    with driven(server.port) as tier:
        tier.keep([record])
    server.ask(b"ACL", b"SETUSER", b"kv", b"on", b">other", b"~*", b"+@all")
    address = Address((("127.0.0.1", server.port),), username="kv", password="hidden%sEcret")
    with driven(address) as tier:
        for _ in range(FAILURES_MAX):
            assert tier.load(record) in (LoadOutcome.FAILED, LoadOutcome.BROKEN)
        state = tier.tier.statistics().state
        assert "WRONGPASS" in state
        assert "sEcret" not in state
        server.ask(b"ACL", b"SETUSER", b"kv", b">hidden%sEcret")
        heal(tier, record)


def test_a_user_needs_no_more_than_the_documented_permissions(server: Server) -> None:
    """docs/tiers.md has them; without one of them the state says which."""
    granted = ("+@read", "+@write", "+@connection", "+eval", "+evalsha", "+time")
    server.ask(b"ACL", b"SETUSER", b"kv", b"on", b">pw", b"~kvtide:*", *map(str.encode, granted))
    address = Address((("127.0.0.1", server.port),), username="kv", password="pw")
    chain = chain_of(ROOT, SMALL, text(1, 10))
    with driven(address) as tier:
        tier.keep(chain)
        assert tier.find(chain[:2], chain[2].digests) == chain
        assert {tier.load(record) for record in chain} == {LoadOutcome.LOADED}
        assert tier.tier.clear(None) == 3
    with driven(address, prefix="elsewhere") as tier:
        assert tier.store(chain[:1]) == [StoreOutcome.FAILED]
        assert "NOPERM" in tier.tier.statistics().state or _told(tier)


def _told(tier: DrivenTier) -> bool:
    """Whether the state says why after some more tries."""
    for _ in range(FAILURES_MAX):
        tier.load(records(1)[0])
    return "permission" in tier.tier.statistics().state
