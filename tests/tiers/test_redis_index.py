"""What a redis tier leaves on a server fits together, whatever was done to it in which order."""

import hashlib
import random
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvtide.core.records import Record
from kvtide.testing import redis_servers
from kvtide.testing.redis_servers import Server
from kvtide.testing.tier_drive import DrivenTier
from kvtide.testing.tier_records import Cells, chain_of, layout_of, root_of, text
from kvtide.tiers.base import LoadOutcome, StoreOutcome
from kvtide.tiers.redis import index as redis_index
from kvtide.tiers.redis.index import Begun, IndexAnswer, WriteIds, kind_of
from kvtide.tiers.redis.routes import Redirected
from kvtide.tiers.redis.session import RedisSession
from kvtide.tiers.remote.census import Census
from kvtide.tiers.remote.session import Put
from kvtide.units import KiB, MiB
from tests.tiers.redis_place import PATIENT, WAIT_S, driven, part_names, pass_calmly, row_of

TAG = b"kvtide:{kvtide:2}:"
CAP_BYTES = 400 * KiB
LARGE = layout_of(256 * KiB)
SALTS = (None, "one", "another")
LAYOUTS = (layout_of(16 * KiB), layout_of(4096, 12288))


ALL = b"""
local tag = KEYS[1]
local function scored(name) return redis.call('ZRANGE', tag .. name, 0, -1, 'WITHSCORES') end
return { redis.call('HGETALL', tag .. 'index'), redis.call('HGETALL', tag .. 'numbers'),
    scored('leaves'), scored('inner'), scored('loose'), scored('tree') }
"""
"""All at one moment: what nobody needs any more is taken away at any time."""


def table(server: Server, *command: bytes) -> dict[bytes, bytes]:
    """A reply of names and values."""
    return named(server.ask(*command))


def named(reply: object) -> dict[bytes, bytes]:
    """A list of names and values."""
    assert isinstance(reply, list), reply
    flat = [one for one in reply if isinstance(one, bytes)]
    return dict(zip(flat[::2], flat[1::2], strict=True))


def check_index(server: Server) -> int:
    """Every belief of index.lua; how many records can be found."""
    told = server.ask(b"EVAL", ALL, b"1", TAG)
    assert isinstance(told, list)
    rows, numbers, leaves, inner, loose, members = map(named, told)
    parents = {row[40:72] for row in rows.values()}
    assert set(inner) == {key for key in rows if key in parents}
    assert set(leaves) == {key for key in rows if key not in parents}
    assert {row[16:72] + row[92:] + bytes(16) + key[16:] for key, row in rows.items()} == set(
        members
    )
    assert all(row[-16:] == key[:16] for key, row in rows.items())
    taken = sum(int(row[72:88]) for row in rows.values())
    taken += sum(int(one[20:36]) for one in loose)
    assert int(numbers.get(b"bytes", b"0")) == taken
    assert int(numbers.get(b"loose", b"0")) == len(loose)
    live = Counter(
        row[16:32] for row in rows.values() if numbers.get(b"i" + row[16:32]) == row[32:40]
    )
    counted = {name[1:]: int(n) for name, n in numbers.items() if name[:1] == b"n"}
    assert counted == dict(live)
    begun = Counter(one[36:52] for one in loose if numbers.get(b"i" + one[36:52]) == one[52:])
    needed = {name[1:]: int(n) for name, n in numbers.items() if name[:1] == b"u"}
    assert needed == dict(live + begun)
    assert int(numbers.get(b"dead", b"0")) == len(rows) - sum(live.values())
    return sum(live.values())


def has_loose_parts(server: Server) -> bool:
    """Whether there are parts that belong to no record."""
    rows = table(server, b"HGETALL", TAG + b"index")
    parts = {
        b"kvtide:2:%b:%d" % (row[:16].hex().encode(), n)
        for row in rows.values()
        for n in range(int(row[88:92]))
    }
    there = {name for name in server.names() if b"{" not in name}
    assert parts <= there, "the server has not evicted any since it was asked"
    return parts != there


def step(
    tier: DrivenTier, server: Server, chance: random.Random, chains: list[list[Record]]
) -> None:
    """One thing that happens."""
    chain = chance.choice(chains)
    record = chance.choice(chain)
    match chance.randrange(12):
        case 0 | 1 | 2 | 3 | 4:
            jobs = [tier.submit_store(one) for one in chain[: chance.randint(1, len(chain))]]
            tier.wait(jobs)
        case 5 | 6:
            assert tier.load(record) in (LoadOutcome.LOADED, LoadOutcome.ABSENT)
        case 7 | 8:
            tier.find(chain[:-1], chain[-1].digests)
        case 9:
            salt = chance.choice([None, *(root_of(salt=salt).salt_digest for salt in SALTS)])
            tier.tier.clear(salt, chance.choice([None, record.root.fingerprint]))
        case 10 if tier.is_there(record):
            server.ask(b"UNLINK", part_names(server, record)[0])
            assert tier.load(record) is LoadOutcome.ABSENT
        case 11 if tier.is_there(record):
            name = part_names(server, record)[-1]
            server.ask(b"SETRANGE", name, b"3", b"damaged")
            tier.load(record)


def quiet(tier: DrivenTier, server: Server) -> None:
    """Until what was cleared is given back, and what is on the server belongs to a record."""
    deadline_s = time.monotonic() + WAIT_S
    while True:
        pass_calmly(tier, 20_000)
        tier.poll_for(0.02)
        numbers = table(server, b"HGETALL", TAG + b"numbers")
        if numbers.get(b"dead", b"0") == b"0" and not has_loose_parts(server):
            return
        assert time.monotonic() < deadline_s, "parts that nobody removes"


@contextmanager
def session_of(server: Server, bytes_max: int = 8 * MiB) -> Iterator[RedisSession]:
    """A writer of its own, in a call."""
    session = RedisSession(
        server.address, None, "kvtide", bytes_max, Census(), WriteIds(), PATIENT
    )
    session._routes.begin(PATIENT.put_s)
    yield session
    session.close()


def begin(session: RedisSession, record: Record, write_id: bytes) -> Begun:
    """Its parts may be sent now."""
    put = Put(record, write_id, ())
    index = session._index
    begun = index.begun(index.begin(put, {record.parent}, is_behind=False, is_full=False))
    assert begun.answer is IndexAnswer.GO
    return begun


@pytest.mark.parametrize("by", ["a store that is given up", "eviction"])
def test_no_life_ends_while_a_record_of_it_is_sent(tmp_path: Path, by: str) -> None:
    """Whatever goes meanwhile was the last that could be found, or would have been the first."""
    held, slow, other = (chain_of(root_of(), LARGE, text(number, 4))[0] for number in range(3))
    with redis_servers.running("valkey", tmp_path / "server") as server:
        with driven(server.port) as tier:
            tier.keep([held] if by == "eviction" else [])
            used = tier.tier.statistics().bytes_used
        with session_of(server) as session, session_of(server, 2 * used) as theirs:
            life = begin(session, slow, b"w" * 16).life
            if by == "eviction":
                stranger = chain_of(root_of("another"), LARGE, text(0, 4))[0]
                begin(theirs, stranger, b"x" * 16)
                assert not table(server, b"HGETALL", TAG + b"index"), "it is evicted"
            else:
                begun = begin(session, other, b"x" * 16)
                session._index.abandoned(session._index.abandon(other, b"x" * 16, begun.life))
            sent = session._index.complete(slow, b"w" * 16, life, ())
            completed = session._index.completed(sent, slow, b"w" * 16)
            assert completed is IndexAnswer.STORED
        rows = table(server, b"HGETALL", TAG + b"index")
        assert list(rows) == [slow.key]


def test_a_store_that_begins_again_is_one(tmp_path: Path) -> None:
    """Whoever asks twice for the same room has it once."""
    record = chain_of(root_of(), LARGE, text(1, 4))[0]
    with redis_servers.running("valkey", tmp_path / "server") as server:
        with session_of(server) as session:
            life = begin(session, record, b"w" * 16).life
            assert begin(session, record, b"w" * 16).life == life
            sent = session._index.complete(record, b"w" * 16, life, ())
            session._index.completed(sent, record, b"w" * 16)
        assert check_index(server) == 1


def test_a_record_whose_store_began_again_outlives_what_was_set_aside_at_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A slot moves while its parts are sent, and its kind is cleared meanwhile: what was set aside
    first is of another life, and expires."""
    record, other = (chain_of(root_of(), LARGE, text(number, 4))[0] for number in range(2))
    with (
        redis_servers.running("valkey", tmp_path / "server") as server,
        driven(server.port) as tier,
        session_of(server) as session,
    ):
        send = session._stores._send_parts

        def moved(_put: Put) -> None:
            monkeypatch.setattr(session._stores, "_send_parts", send)
            tier.tier.clear(None)
            raise Redirected(b"key", None, is_ask=False)

        monkeypatch.setattr(session._stores, "_send_parts", moved)
        puts = [Put(record, b"w" * 16, Cells(record).fill().views)]
        ends: list[tuple[bytes, StoreOutcome]] = []
        session.store(
            lambda: puts.pop() if puts else None,
            lambda put, outcome: ends.append((put.write_id, outcome)),
        )
        assert ends == [(b"w" * 16, StoreOutcome.STORED)]
        _take_for_lost(server, tier, other)
        assert tier.load(record) is LoadOutcome.LOADED
        assert check_index(server) == 2


def test_an_index_that_counts_less_is_left_alone(tmp_path: Path) -> None:
    """One of version 1 does not tell how many need the life of a kind: with the first record that
    goes there, all others of its kind would."""
    old, new = (chain_of(root_of(), LARGE, text(number, 4))[0] for number in range(2))
    names = (b"index", b"tree", b"leaves", b"inner", b"numbers")
    with redis_servers.running("valkey", tmp_path / "server") as server:
        with driven(server.port) as tier:
            tier.keep([old])
        server.ask(b"HDEL", TAG + b"numbers", b"u" + kind_of(old.root, old.layout))
        for name in names:
            server.ask(b"RENAME", TAG + name, b"kvtide:{kvtide:1}:" + name)
        before = [server.ask(b"DUMP", b"kvtide:{kvtide:1}:" + name) for name in names]
        with driven(server.port) as tier:
            tier.keep([new])
            assert not tier.is_there(old)
            tier.tier.clear(None)
        assert [server.ask(b"DUMP", b"kvtide:{kvtide:1}:" + name) for name in names] == before


def test_stores_that_never_end_leave_no_numbers(tmp_path: Path) -> None:
    """Of a salt that nobody stored anything of but a writer that was killed."""
    lost = chain_of(root_of(salt="lost"), LARGE, text(1, 4))[0]
    others = [chain_of(root_of(), LARGE, text(number, 4))[0] for number in range(2)]
    with (
        redis_servers.running("valkey", tmp_path / "server") as server,
        driven(server.port) as tier,
    ):
        with session_of(server) as session:
            begin(session, lost, b"w" * 16)
        kind = kind_of(lost.root, lost.layout)
        names = {name + kind for name in (b"i", b"k", b"n", b"u")}
        assert names <= set(table(server, b"HGETALL", TAG + b"numbers"))
        _take_for_lost(server, tier, others[0])
        assert not names & set(table(server, b"HGETALL", TAG + b"numbers"))
        assert check_index(server) == 1


def test_more_kinds_than_can_be_told_do_not_stop_the_tier(tmp_path: Path) -> None:
    """As of many salts: how many records there are is known, if not of which."""
    chain = chain_of(root_of(), LAYOUTS[0], text(1, 10))
    with redis_servers.running("valkey", tmp_path / "server") as server:
        with driven(server.port) as tier:
            tier.keep(chain)
        numbers = TAG + b"numbers"
        assert server.ask(b"EVAL", MANY_KINDS, b"1", numbers) == MANY_FIELDS
        with driven(server.port) as tier:
            assert tier.tier.statistics().state == "on"
            assert tier.tier.statistics().records == len(chain)
            assert tier.find(chain[:-1], chain[-1].digests) == chain


MANY_KINDS = b"""
for kind = 1, 180000 do
    local name = string.format('%016d', kind)
    redis.call('HSET', KEYS[1], 'i' .. name, '00000001', 'n' .. name, 0, 'k' .. name, name)
end
return redis.call('HLEN', KEYS[1])
"""
MANY_FIELDS = 5 + 4 + 3 * 180_000
"""More than a reply may have."""


def test_a_row_of_no_whole_chunk_is_no_answer(tmp_path: Path) -> None:
    """Though it ends as it should: the lookup finds nothing, and who asked is not misled."""
    chain = chain_of(root_of(), LAYOUTS[0], text(1, 10))
    with (
        redis_servers.running("valkey", tmp_path / "server") as server,
        driven(server.port) as tier,
    ):
        tier.keep(chain)
        row = row_of(server, chain[0])
        server.ask(b"HSET", TAG + b"index", chain[0].key, row[:92] + row[-16:])
        assert tier.find(chain[:2]) == []


def test_a_tail_of_a_chunk_that_is_not_there_is_no_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a server says that runs another script."""
    monkeypatch.setattr(redis_index, "SCRIPT", LIAR)
    monkeypatch.setattr(redis_index, "_SHA", hashlib.sha1(LIAR).hexdigest().encode())
    whole, tail = chain_of(root_of(), LAYOUTS[0], text(1, 6))
    with (
        redis_servers.running("valkey", tmp_path / "server") as server,
        driven(server.port) as tier,
    ):
        asked = tier.ask((), tail.digests, root=tail.root, layout=tail.layout)
        assert tier.found(asked).records, "where it may be, it is believed until it is loaded"
        assert tier.find([whole], tail.digests) == []


LIAR = b"""
local head, digests = '1' .. string.rep('0', 20), ARGV[5]
if ARGV[1] == 'survey' then return { head, { 0, {} } } end
local key = string.sub(digests, -16) .. string.rep('x', 16)
return { head, { {}, key, string.rep('0', 92) .. digests, 0 } }
"""


def test_parts_that_come_after_their_time_are_given_up(tmp_path: Path) -> None:
    """A writer is so slow that others take what it had set aside for lost, and then it goes on:
    its store fails, none of its parts stays uncounted, and the record can be stored."""
    slow, other = (chain_of(root_of(), LARGE, text(number, 4))[0] for number in (1, 2))
    with (
        redis_servers.running("valkey", tmp_path / "server") as server,
        driven(server.port, bytes_max=8 * MiB) as tier,
    ):
        cells = Cells(slow).fill()
        puts = [None, Put(slow, b"w" * 16, cells.views)]
        ends: list[StoreOutcome] = []

        def next_put() -> Put | None:
            if puts:
                return puts.pop()
            if not ends:  # room was set aside, nothing is sent yet
                _take_for_lost(server, tier, other)
            return None

        with session_of(server) as session:
            session.store(next_put, lambda _put, outcome: ends.append(outcome))
        assert ends == [StoreOutcome.FAILED]
        assert not server.names(b"kvtide:2:" + (b"w" * 16).hex().encode() + b":*")
        assert check_index(server) == 1
        assert not has_loose_parts(server)
        assert tier.store([slow]) == [StoreOutcome.STORED]
        assert {tier.load(one) for one in (slow, other)} == {LoadOutcome.LOADED}


def _take_for_lost(server: Server, tier: DrivenTier, other: Record) -> None:
    """A minute later, another node stores something."""
    loose = server.ask(b"ZRANGE", TAG + b"loose", b"0", b"-1")
    assert isinstance(loose, list)
    for one in loose:
        assert isinstance(one, bytes)
        server.ask(b"ZADD", TAG + b"loose", b"1", one)
    tier.keep([other])
    tier.keep([other])


def test_the_index_fits_together_after_anything(tmp_path: Path) -> None:
    """Stores, loads, lookups, clears, evictions by cap and by the server, damage; two layouts and
    three salts, of prompts that share beginnings and of tails that grow."""
    seed = random.randrange(1 << 30)
    chance = random.Random(seed)
    prompts = [text(number % 3, 4) + text(10 + number, 1 + number % 7) for number in range(12)]
    chains = [
        chain_of(root_of(salt=salt), layout, prompt)
        for layout in LAYOUTS
        for salt in SALTS
        for prompt in prompts
    ]
    with (
        redis_servers.running("valkey", tmp_path / "server") as server,
        driven(server.port, bytes_max=CAP_BYTES) as tier,
    ):
        for number in range(400):
            step(tier, server, chance, chains)
            if number % 20 == 19:
                quiet(tier, server)
                found = check_index(server)
                assert tier.tier.statistics().records == found, seed
                assert tier.tier.statistics().bytes_used <= CAP_BYTES
        assert tier.tier.statistics().evicted > 0
        assert tier.tier.statistics().state == "on"
