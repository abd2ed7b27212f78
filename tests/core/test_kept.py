"""What lookups that wait for tiers and leases keep from being evicted: one bound for both."""

import pytest

from kvtide.core import messages as m
from kvtide.core.effects import LoadFrom
from kvtide.core.leases import PINNED_BY_ONE_RATIO_MAX, PINNED_RATIO_MAX
from kvtide.units import MiB
from tests.core.fake_tier import FakeTier
from tests.core.test_promotions import ask
from tests.core.world import CHUNK_BYTES, Engine, World, prompt

CHUNKS = 64
"""Of the host."""
CHAINS = [prompt(*range(first, first + 14)) for first in (1, 101, 201)]
RESIDENT = range(1_000, 1_020)


@pytest.fixture
def tier() -> FakeTier:
    """Holds all chains, and what it is asked for waits."""
    tier = FakeTier()
    before = Engine(World(64 * MiB, tiers=[tier])).start()
    for chain in CHAINS:
        before.store(chain)
    return tier


@pytest.fixture
def engine(tier: FakeTier) -> Engine:
    """An engine whose node holds as many other chunks as are left."""
    engine = Engine(World(CHUNKS * CHUNK_BYTES, tiers=[tier])).start()
    for part in RESIDENT:
        engine.store(prompt(part))
    tier.answers = False
    return engine


def wait_for_the_last(engine: Engine, tier: FakeTier, chain: list[int]) -> None:
    """Ask for a chain, of which all but the last chunk comes."""
    ask(engine, chain)
    last = engine.chain(chain)[0][-1]
    held_back: list[LoadFrom] = []
    while tier.waiting:
        job = tier.waiting.pop(0)
        if isinstance(job, LoadFrom) and job.record.key == last:
            held_back.append(job)
        else:
            engine.world.give(tier.answer(job))
    assert held_back, "the whole chain is on its way"


def pinned_ratio(engine: Engine) -> float:
    """The share of the host in entries that are pinned, or that something pinned hangs on."""
    kept = set()
    for entry in engine.world.machine.lending.pinned_entries():
        node = entry
        while hasattr(node, "run"):
            kept.add(node)
            node = node.parent
    return len(kept) / CHUNKS


def test_leases_leave_of_the_bound_what_lookups_that_wait_keep(
    engine: Engine, tier: FakeTier
) -> None:
    """Three chains of fourteen chunks wait, and twenty other chunks are asked for: of 64."""
    other = Engine(engine.world, "other").start()
    for chain in CHAINS:
        wait_for_the_last(engine, tier, chain)
    leases = []
    for part in RESIDENT:
        match = other.lookup(prompt(part), keeps=True)
        assert isinstance(match, m.Match)
        assert match.chunks == 1
        leases.append(match.lease)
    assert leases.count(0) == len(RESIDENT) - (CHUNKS * 3 // 4 - 3 * 14)
    assert pinned_ratio(engine) == PINNED_RATIO_MAX
    assert other.offer(prompt(7_000)).outcomes == [""]


def test_a_chain_that_a_lookup_waits_for_costs_a_lease_on_it_nothing(
    engine: Engine, tier: FakeTier
) -> None:
    for chain in CHAINS:
        wait_for_the_last(engine, tier, chain)
    kept_bytes = engine.world.machine.leases.pinned_bytes
    match = engine.lookup(CHAINS[0][: 13 * len(prompt(1))], keeps=True)
    assert isinstance(match, m.Match)
    assert match.lease
    assert engine.world.machine.leases.pinned_bytes == kept_bytes


def test_what_was_loaded_counts_as_its_engines_once_it_is_answered(tier: FakeTier) -> None:
    """However it came, one engine keeps no more than its half."""
    engine = Engine(World(CHUNKS * CHUNK_BYTES, tiers=[tier])).start()
    leases = []
    for chain in CHAINS:
        match = engine.lookup(chain, keeps=True)
        assert isinstance(match, m.Match | m.Pending)
        leases.append(engine.last(m.Match).lease)
    assert [lease > 0 for lease in leases] == [True, True, False]
    assert pinned_ratio(engine) == 28 / CHUNKS <= PINNED_BY_ONE_RATIO_MAX


def test_what_a_lookup_joins_counts_too(engine: Engine, tier: FakeTier) -> None:
    """While a tier is asked for it, an engine stores the chain, and leases fill the bound."""
    chain = CHAINS[0]
    ask(engine, chain)
    asked, tier.waiting, tier.answers = tier.waiting, [], True
    for end in range(4, 18, 4):
        engine.store(chain[: end * len(prompt(1))])
    for number, chunks in enumerate((range(10), range(10, 20))):
        other = Engine(engine.world, f"other {number}").start()
        for part in chunks:
            other.store(prompt(2_000 + part))
            other.lookup(prompt(2_000 + part), keeps=True)
            other.lookup(prompt(RESIDENT[part]), keeps=True)
    assert pinned_ratio(engine) == 40 / CHUNKS
    for job in asked:
        engine.world.give(tier.answer(job))
    assert engine.last(m.Match).chunks == 14, "held, whoever keeps it"
    assert engine.world.machine.counts["promotions.no_memory"] == 1
    assert pinned_ratio(engine) <= PINNED_RATIO_MAX
