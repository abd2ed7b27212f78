"""What a redis tier leaves on a server fits together, whatever was done to it in which order."""

import random
import time
from collections import Counter
from pathlib import Path

from kvtide.core.records import Record
from kvtide.testing import redis_servers
from kvtide.testing.redis_servers import Server
from kvtide.testing.tier_drive import DrivenTier
from kvtide.testing.tier_records import Cells, chain_of, layout_of, root_of, text
from kvtide.tiers.base import LoadOutcome, StoreOutcome
from kvtide.tiers.redis.index import WriteIds
from kvtide.tiers.redis.routes import Limits
from kvtide.tiers.redis.session import RedisSession
from kvtide.tiers.remote.census import Census
from kvtide.tiers.remote.session import Put
from kvtide.units import KiB, MiB
from tests.tiers.redis_place import WAIT_S, driven, part_names

TAG = b"kvtide:{kvtide:1}:"
CAP_BYTES = 400 * KiB
LARGE = layout_of(256 * KiB)
SALTS = (None, "one", "another")
LAYOUTS = (layout_of(16 * KiB), layout_of(4096, 12288))


def table(server: Server, *command: bytes) -> dict[bytes, bytes]:
    """A reply of names and values."""
    reply = server.ask(*command)
    assert isinstance(reply, list), reply
    flat = [one for one in reply if isinstance(one, bytes)]
    return dict(zip(flat[::2], flat[1::2], strict=True))


def check_index(server: Server) -> int:
    """Every belief of index.lua; how many records can be found."""
    rows = table(server, b"HGETALL", TAG + b"index")
    numbers = table(server, b"HGETALL", TAG + b"numbers")
    leaves = table(server, b"ZRANGE", TAG + b"leaves", b"0", b"-1", b"WITHSCORES")
    inner = table(server, b"ZRANGE", TAG + b"inner", b"0", b"-1", b"WITHSCORES")
    loose = table(server, b"ZRANGE", TAG + b"loose", b"0", b"-1", b"WITHSCORES")
    members = server.ask(b"ZRANGE", TAG + b"tree", b"0", b"-1")
    assert isinstance(members, list)
    parents = {row[40:72] for row in rows.values()}
    assert set(inner) == {key for key in rows if key in parents}
    assert set(leaves) == {key for key in rows if key not in parents}
    assert {row[16:72] + row[92:] + bytes(16) + key[16:] for key, row in rows.items()} == set(
        members
    )
    assert all(row[-16:] == key[:16] for key, row in rows.items())
    taken = sum(int(row[72:88]) for row in rows.values()) + sum(int(one[20:]) for one in loose)
    assert int(numbers.get(b"bytes", b"0")) == taken
    assert int(numbers.get(b"loose", b"0")) == len(loose)
    live = Counter(
        row[16:32] for row in rows.values() if numbers.get(b"i" + row[16:32]) == row[32:40]
    )
    counted = {name[1:]: int(n) for name, n in numbers.items() if name[:1] == b"n"}
    assert counted == dict(live)
    assert int(numbers.get(b"dead", b"0")) == len(rows) - sum(live.values())
    return sum(live.values())


def has_loose_parts(server: Server) -> bool:
    """Whether there are parts that belong to no record."""
    rows = table(server, b"HGETALL", TAG + b"index")
    parts = {
        b"kvtide:1:%b:%d" % (row[:16].hex().encode(), n)
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
        tier.pass_time(20_000)
        tier.poll_for(0.02)
        numbers = table(server, b"HGETALL", TAG + b"numbers")
        if numbers.get(b"dead", b"0") == b"0" and not has_loose_parts(server):
            return
        assert time.monotonic() < deadline_s, "parts that nobody removes"


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

        limits, known = Limits(), WriteIds()
        session = RedisSession(server.address, None, "kvtide", 8 * MiB, Census(), known, limits)
        session.store(next_put, lambda _put, outcome: ends.append(outcome))
        session.close()
        assert ends == [StoreOutcome.FAILED]
        assert not server.names(b"kvtide:1:" + (b"w" * 16).hex().encode() + b":*")
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
