"""What a Mooncake Store does to its tier: is full, forgets, hangs, loses who has its memory."""

import random
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from kvtide.testing import mooncake_servers
from kvtide.testing.mooncake_servers import OWNED_BYTES_MIN, Store
from kvtide.testing.tier_records import BLOCKS_PER_CHUNK, chain_of, layout_of, root_of, text
from kvtide.tiers.base import LoadOutcome, StoreOutcome
from kvtide.tiers.mooncake.names import names_of
from kvtide.units import KiB
from tests.tiers.mooncake_place import PREFIX, WAIT_S, driven, end_clients, needs_client
from tests.tiers.redis_place import heal

pytestmark = [needs_client, pytest.mark.long]

ROOT = root_of()
SMALL = layout_of(4096, 8192)
LARGE = layout_of(64 * KiB)
LATE_S_MAX = 10.0
"""Beyond a call's own limit: for threads to be scheduled on a busy machine."""


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with mooncake_servers.running(tmp_path / "store", OWNED_BYTES_MIN) as one:
        yield one


# ---- what the suite leaves out


def test_a_full_store_takes_what_is_new(store: Store) -> None:
    """Four times what fits, each found at once; what it evicted is a miss and no more."""
    chunks = [chain_of(ROOT, LARGE, text(n, BLOCKS_PER_CHUNK))[0] for n in range(256)]
    with driven(store) as tier:
        for chunk in chunks:
            assert tier.store([chunk]) == [StoreOutcome.STORED]
            assert tier.is_there(chunk)
        outcomes = {tier.load(chunk) for chunk in chunks}
        assert outcomes == {LoadOutcome.LOADED, LoadOutcome.ABSENT}


def test_a_damaged_record_is_never_loaded_and_is_gone(store: Store) -> None:
    """What lies behind it is not found; once it is there again, all is."""
    first, second, tail = chain_of(ROOT, SMALL, text(1, 10))
    with driven(store) as tier:
        tier.keep([first, second, tail])
        store.flip(names_of(PREFIX, second).record(second.key), -5)
        assert tier.load(second) is LoadOutcome.CORRUPT
        assert tier.find([first, second], tail.digests) == [first]
        assert tier.load(second) is LoadOutcome.ABSENT
        assert tier.store([tail]) == [StoreOutcome.NOT_ANCHORED]
        assert tier.store([second, tail]) == [StoreOutcome.STORED, StoreOutcome.HELD]
        assert tier.find([first, second], tail.digests) == [first, second, tail]


def test_a_damaged_header_is_a_miss(store: Store) -> None:
    record = chain_of(ROOT, SMALL, text(1, 4))[0]
    with driven(store) as tier:
        tier.keep([record])
        store.flip(names_of(PREFIX, record).record(record.key), 100)
        assert tier.find([record]) == []
        assert tier.load(record) is LoadOutcome.CORRUPT
        assert tier.store([record]) == [StoreOutcome.STORED]
        assert tier.load(record) is LoadOutcome.LOADED


def test_another_roots_record_of_the_same_key_is_another(store: Store) -> None:
    """It cannot be; each gives its own bytes."""
    record = chain_of(ROOT, SMALL, text(1, 4))[0]
    root = root_of("other")
    with driven(store) as tier:
        tier.keep([record, replace(record, root=root, parent=root.key)])
        assert tier.load(record) is LoadOutcome.LOADED


def test_small_values_that_are_gone_are_put_back_with_a_store(store: Store) -> None:
    """The store evicts each value by itself; a record that stayed is found by its blocks again."""
    record = chain_of(ROOT, SMALL, text(1, 3))[0]
    with driven(store) as tier:
        tier.keep([record])
        known = names_of(PREFIX, record)
        store.remove([*known.blocks(record.digests), known.children(record.parent)])
        assert not tier.is_there(record)
        assert tier.store([record]) == [StoreOutcome.HELD]
        assert tier.is_there(record)


# ---- the store goes away


def test_a_master_that_comes_back_is_empty_and_is_used_again(store: Store) -> None:
    """It knows nothing; owners come back to it by themselves."""
    records = chain_of(ROOT, SMALL, text(1, 10))
    with driven(store) as tier:
        tier.keep(records)
        store.kill_master()
        assert tier.load(records[0]) is LoadOutcome.FAILED
        store.start()
        store.wait_for_owners()
        assert tier.load(records[0]) is LoadOutcome.ABSENT
        assert tier.store(records) == [StoreOutcome.STORED] * len(records)
        assert tier.find(records[:2], records[2].digests) == records
        assert {tier.load(record) for record in records} == {LoadOutcome.LOADED}


def test_what_an_owner_took_with_it_fails_and_another_takes_what_is_new(store: Store) -> None:
    """Until its master has noticed, what it had is there by name, and fails; then it is absent."""
    record = chain_of(ROOT, SMALL, text(1, 4))[0]
    with driven(store) as tier:
        tier.keep([record])
        store.kill_owners()
        assert tier.load(record) in (LoadOutcome.FAILED, LoadOutcome.ABSENT)
        other = chain_of(ROOT, SMALL, text(2, 4))[0]
        assert not tier.store([other])[0].is_kept
        assert tier.find([other]) == []
        store.add_owner(OWNED_BYTES_MIN)
        deadline_s = time.monotonic() + WAIT_S
        while not tier.store([record])[0].is_kept or tier.load(record) is not LoadOutcome.LOADED:
            assert time.monotonic() < deadline_s, tier.tier.statistics()
            tier.pass_time(5_000)
            tier.poll_for(0.05)


def test_one_owner_of_several_that_dies_costs_what_it_had(store: Store) -> None:
    """Lookups end where its values begin, and nothing else stops, though its master tells of them
    for another ten seconds."""
    chains = [chain_of(ROOT, SMALL, text(number, 10)) for number in range(30)]
    store.add_owner(OWNED_BYTES_MIN)
    with driven(store) as tier:
        for chain in chains:
            tier.keep(chain)
        owner = store.owners.pop()
        owner.kill()
        owner.wait()
        counts = []
        for chain in chains:
            found = tier.find(chain[:2], chain[2].digests)
            assert found == chain[: len(found)]
            assert {tier.load(record) for record in found} <= {LoadOutcome.LOADED}
            counts.append(len(found))
        assert tier.tier.statistics().state == "on"
        assert 0 < sum(counts) < sum(len(chain) for chain in chains), counts


def test_a_store_that_hangs_costs_its_time_and_no_more(store: Store) -> None:
    """Its client ends with the call: nothing of it is written when the store goes on."""
    record = chain_of(ROOT, SMALL, text(1, 4))[0]
    with driven(store, call_s=2.0, put_s=2.0) as tier:
        tier.keep([record])
        heal(tier, record)
        with store.stopped():
            begin_s = time.monotonic()
            assert tier.load(record) is LoadOutcome.FAILED
            assert time.monotonic() - begin_s < 2.0 + LATE_S_MAX
        heal(tier, record)


# ---- all of it


@pytest.mark.parametrize("seed", range(3))
def test_whatever_dies_every_byte_is_right_and_it_works_again(store: Store, seed: int) -> None:
    """Two nodes store, load and look up, while clients, owner and master die or hang."""
    chaos = random.Random(seed)
    chains = [chain_of(ROOT, SMALL, text(number, 10)) for number in range(6)]

    def restart_master() -> None:
        store.kill_master()
        store.start()
        store.wait_for_owners()

    def replace_owner() -> None:
        store.kill_owners()
        store.add_owner(OWNED_BYTES_MIN)

    def hang() -> None:
        with store.stopped():
            work()

    def work() -> None:
        for _ in range(8):
            tier, chain = chaos.choice(tiers), chaos.choice(chains)
            for record in chain:
                tier.submit_store(record)
                tier.submit_load(record)
            tier.ask(chain[:2], chain[2].digests)
            tier.pass_time(5_000)
            tier.poll()

    faults = [lambda: end_clients(signal.SIGKILL), restart_master, replace_owner, hang]
    with driven(store, call_s=2.0, put_s=4.0) as one, driven(store, call_s=2.0, put_s=4.0) as two:
        tiers = [one, two]
        for fault in chaos.sample(faults, len(faults)):
            work()
            fault()
        for tier in tiers:
            deadline_s = time.monotonic() + WAIT_S
            while any(tier.load(record) is not LoadOutcome.LOADED for record in chains[0]):
                assert time.monotonic() < deadline_s, tier.tier.statistics()
                tier.store(chains[0])
                tier.pass_time(5_000)
