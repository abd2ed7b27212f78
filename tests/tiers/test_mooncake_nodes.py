"""Several nodes on one Mooncake Store, records of many windows, and what names say."""

import re
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvtide.core.records import Record
from kvtide.testing import mooncake_servers
from kvtide.testing.mooncake_servers import Store
from kvtide.testing.tier_records import chain_of, layout_of, root_of, text
from kvtide.tiers.base import LoadOutcome, StoreOutcome
from kvtide.tiers.mooncake import names
from kvtide.tiers.mooncake.client import WINDOW_BYTES, Client
from kvtide.tiers.mooncake.loads import window_lengths
from kvtide.tiers.scope import EVERYTHING, Scope
from kvtide.units import MiB
from tests.tiers.mooncake_place import PREFIX, WAIT_S, driven, needs_client

pytestmark = needs_client

ROOT = root_of()
SMALL = layout_of(4096, 8192)
SHAPES = {
    "shards that begin inside windows": layout_of(2 * MiB, 1 * MiB),
    "one shard": layout_of(3 * MiB),
    "many small shards": layout_of(*[512 * 1024] * 5),
}


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with mooncake_servers.running(tmp_path / "store", 64 * MiB) as one:
        yield one


# ---- many windows


@pytest.mark.long
@pytest.mark.parametrize("shape", SHAPES)
def test_a_record_of_many_windows_brings_every_byte(store: Store, shape: str) -> None:
    """Headers lie anywhere in windows, and are sent last."""
    chunk, tail = chain_of(ROOT, SHAPES[shape], text(1, 5))
    assert len(window_lengths(chunk)) > 2
    with driven(store, queue_bytes_max=64 * MiB) as tier:
        assert tier.store([chunk, tail]) == [StoreOutcome.STORED] * 2
        assert tier.find([chunk], tail.digests) == [chunk, tail]
        assert [tier.load(record) for record in (chunk, tail)] == [LoadOutcome.LOADED] * 2


@pytest.mark.long
@pytest.mark.parametrize("at", [4096, WINDOW_BYTES + 5, -1])
def test_a_byte_that_changed_in_any_window_is_seen(store: Store, at: int) -> None:
    chunk = chain_of(ROOT, SHAPES["one shard"], text(1, 4))[0]
    with driven(store, queue_bytes_max=64 * MiB) as tier:
        tier.keep([chunk])
        store.flip(names.names_of(PREFIX, chunk).record(chunk.key), at)
        assert tier.load(chunk) is LoadOutcome.CORRUPT
        assert tier.load(chunk) is LoadOutcome.ABSENT
        assert tier.store([chunk]) == [StoreOutcome.STORED]
        assert tier.load(chunk) is LoadOutcome.LOADED


# ---- several nodes


@pytest.mark.long
def test_what_one_node_stored_another_finds_at_once(store: Store) -> None:
    records = chain_of(ROOT, SMALL, text(1, 10))
    with driven(store) as one, driven(store) as other:
        for count, record in enumerate(records, start=1):
            one.keep([record])
            assert other.load(record) is LoadOutcome.LOADED
            assert len(other.find(records[:2], records[2].digests)) == count
        assert other.store(records) == [StoreOutcome.HELD] * 3


@pytest.mark.long
def test_nodes_that_store_the_same_at_once_keep_it_once(store: Store) -> None:
    """Who comes second is told that it is there, or that somebody is just writing it."""
    chains = [chain_of(ROOT, SMALL, text(number, 10)) for number in range(20)]
    with driven(store) as one, driven(store) as other:
        jobs = [
            (tier, tier.submit_store(record))
            for chain in chains
            for record in chain
            for tier in (one, other)
        ]
        outcomes = [tier.stored(job) for tier, job in jobs]
        assert outcomes.count(StoreOutcome.STORED) <= 3 * len(chains)
        assert StoreOutcome.NO_ROOM not in outcomes
        for chain in chains:
            one.store(chain)
            assert other.find(chain[:2], chain[2].digests) == chain
            assert {other.load(record) for record in chain} == {LoadOutcome.LOADED}


@pytest.mark.long
def test_a_clear_is_for_all_nodes(store: Store) -> None:
    records = chain_of(ROOT, SMALL, text(1, 10))
    with driven(store) as one, driven(store) as other:
        one.keep(records)
        assert other.find(records[:2], records[2].digests) == records
        assert other.tier.clear(None) == 3
        assert one.find(records[:2], records[2].digests) == []
        assert store.names() == [names.cleared_of(PREFIX)]


def test_what_is_being_stored_at_a_clear_is_taken_back(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the node that stores it, when that has ended: the one that clears cannot see it yet."""
    first, second, tail = chain_of(ROOT, SMALL, text(1, 10))
    at_end, go_on = threading.Event(), threading.Event()
    code = Client.code

    def held(client: Client, name: str, *arguments: Any, **more: Any) -> int:
        if name == "end_put":
            at_end.set()
            assert go_on.wait(WAIT_S)
        return code(client, name, *arguments, **more)

    with driven(store) as one, driven(store) as other:
        one.keep([first])
        monkeypatch.setattr(Client, "code", held)
        stores = [one.submit_store(record) for record in (second, tail)]
        assert at_end.wait(WAIT_S)
        other.tier.clear(None)
        while not other.tier._workers._is_quiet():
            other.poll_for(0.01)
        go_on.set()
        assert {one.stored(job) for job in stores} == {StoreOutcome.NOT_ANCHORED}
        assert store.names() == [names.cleared_of(PREFIX)]
        assert one.store([first, second]) == [StoreOutcome.STORED] * 2


@pytest.mark.long
def test_prefixes_share_nothing(store: Store) -> None:
    """Neither records nor clears, nor where one is a pattern of the other."""
    records = chain_of(ROOT, SMALL, text(1, 10))
    with driven(store, prefix="a.b") as one, driven(store, prefix="axb") as other:
        one.keep(records)
        other.keep(records)
        assert one.tier.clear(None) == 3
        assert one.find(records[:1]) == []
        assert other.find(records[:2], records[2].digests) == records


# ---- names


def named(record: Record, prefix: str = PREFIX) -> list[str]:
    """All names of a record."""
    known = names.names_of(prefix, record)
    return [
        known.record(record.key),
        known.children(record.parent),
        *known.blocks(record.digests),
    ]


def test_names_of_different_things_differ() -> None:
    record = chain_of(ROOT, SMALL, text(1, 4))[0]
    others = [
        replace(record, root=root_of("other")),
        replace(record, root=root_of(epoch=b"2")),
        replace(record, root=root_of(salt="secret")),
        replace(record, layout=layout_of(4096)),
        chain_of(ROOT, SMALL, text(2, 4))[0],
    ]
    all_names = [name for one in (record, *others) for name in named(one)]
    assert len(set(all_names)) == len(all_names) - 1, "two have the root as their parent"


def test_a_pattern_is_of_its_scope_alone() -> None:
    salts = ("", "one", "another")
    records = [chain_of(root_of(salt=salt), SMALL, text(1, 4))[0] for salt in salts]
    records.append(chain_of(root_of("other", salt="one"), SMALL, text(1, 4))[0])
    scopes = [EVERYTHING, *(Scope(one.root.salt_digest, None) for one in records[:3])]
    scopes += [Scope(None, ROOT.fingerprint), Scope(records[1].root.salt_digest, ROOT.fingerprint)]
    for scope in scopes:
        for record in records:
            found = [
                re.search(names.pattern_of(PREFIX, scope), name) is not None
                for name in named(record)
            ]
            assert set(found) == {scope.has(record.root)}, (scope, record.root)


def test_records_are_counted_by_their_kinds() -> None:
    """Whatever else is in the store."""
    salted = chain_of(root_of(salt="one"), SMALL, text(1, 10))
    plain = chain_of(ROOT, SMALL, text(1, 4))
    there = [name for record in (*salted, *plain) for name in named(record)]
    there += ["", "another application's", *named(plain[0], "kvtide2")]
    kinds = names.kinds_in(PREFIX, there)
    assert {salt: count for _, salt, count in kinds.values()} == {
        salted[0].root.salt_digest: 3,
        b"": 1,
    }
    assert {fingerprint for fingerprint, _, _ in kinds.values()} == {ROOT.fingerprint}
