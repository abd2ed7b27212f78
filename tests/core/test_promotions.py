"""Lookups that find more in a tier than the host has: loaded first, answered then."""

import pytest

from kvtide.core import messages as m
from kvtide.core.effects import AskTier, LoadFrom, StoreTo, TierFound
from kvtide.core.promotions import SILENCES_MAX, SILENT_MS, TELL_MS, WAIT_MS_MAX
from kvtide.units import KiB, MiB
from tests.core.fake_tier import FakeTier
from tests.core.world import CHUNK_BLOCKS, CHUNK_BYTES, Engine, World, prompt

LONG = prompt(1, 2, 3, blocks=2)


def ask(engine: Engine, tokens: list[int]) -> int:
    """Send a lookup whose answer may come later; its number."""
    chunk_keys, digests = engine.chain(tokens)
    engine.number += 1
    whole = len(tokens) // engine.chunk_tokens
    engine.say(m.Lookup(engine.number, engine.root, b"".join(chunk_keys[:whole]), digests[-1]))
    return engine.number


@pytest.fixture
def tier() -> FakeTier:
    return FakeTier()


@pytest.fixture
def engine(tier: FakeTier) -> Engine:
    """An engine of a node that is empty, above a tier that holds LONG."""
    before = Engine(World(tiers=[tier])).start()
    before.store(LONG)
    assert len(tier.records) == 3
    tier.stored.clear()
    return Engine(World(tiers=[tier])).start()


def test_what_only_a_tier_has_is_loaded_and_then_matched(engine: Engine, tier: FakeTier) -> None:
    assert engine.blocks_held(LONG) == 2 * CHUNK_BLOCKS + 2
    assert len(tier.loaded) == 3
    assert engine.blocks_held(LONG) == 2 * CHUNK_BLOCKS + 2
    assert len(tier.loaded) == 3, "the host has it now"
    assert not tier.stored, "what came from the tier is not written there again"


def test_the_engine_is_told_to_wait_before_the_answer(engine: Engine, tier: FakeTier) -> None:
    engine.blocks_held(LONG)
    number = engine.last(m.Match).number
    assert engine.heard(m.Pending) == [m.Pending(number)]


def test_nothing_below_costs_no_second_message(engine: Engine) -> None:
    assert engine.blocks_held(prompt(7, 8)) == 0
    assert not engine.heard(m.Pending)
    assert engine.world.machine.counts["tier_lookups.tier0.absent"] > 0
    engine.blocks_held(LONG)
    assert engine.world.machine.counts["tier_lookups.tier0.found"] > 0


def test_hits_from_a_tier_are_as_fine_as_blocks(engine: Engine) -> None:
    """Also where the prompt leaves a whole chunk in its middle."""
    other = list(LONG)
    other[-1] += 1
    assert engine.blocks_held(other) == 2 * CHUNK_BLOCKS + 1
    other = prompt(1, 2, 3)
    other[CHUNK_BLOCKS * 2 + 5] += 1
    assert engine.blocks_held(other) == CHUNK_BLOCKS + 2


def test_another_salt_finds_nothing(engine: Engine, tier: FakeTier) -> None:
    root = engine.root_of("salt")
    engine.register(root, "salt")
    assert engine.blocks_held(LONG, root) == 0
    assert not tier.loaded


def test_a_second_lookup_joins_the_loads_of_the_first(engine: Engine, tier: FakeTier) -> None:
    tier.answers = False
    ask(engine, LONG)
    ask(engine, LONG)
    engine.world.answer(tier)
    assert [type(job) for job in tier.waiting] == [LoadFrom] * 3
    engine.world.answer(tier)
    first, second = engine.heard(m.Match)
    assert first.chunks == second.chunks == 2
    assert first.runs == second.runs
    assert len(tier.loaded) == 3


def test_a_load_that_fails_ends_the_match_before_it(engine: Engine, tier: FakeTier) -> None:
    tier.answers = False
    ask(engine, LONG)
    engine.world.answer(tier)
    first, *others = tier.waiting
    tier.waiting = []
    engine.world.give(tier.answer(first))
    tier.loads_fail = True
    for job in others:
        engine.world.give(tier.answer(job))
    assert engine.last(m.Match).chunks == 1
    assert engine.world.lent_cells() == CHUNK_BLOCKS, "cells of failed loads came back"


def test_a_parent_that_fails_takes_what_was_loaded_behind_it_along(
    engine: Engine, tier: FakeTier
) -> None:
    tier.answers = False
    ask(engine, LONG)
    engine.world.answer(tier)
    first, *others = tier.waiting
    tier.waiting = []
    for job in others:
        engine.world.give(tier.answer(job))
    assert engine.world.lent_cells() == 2 * CHUNK_BLOCKS + 2
    tier.loads_fail = True
    engine.world.give(tier.answer(first))
    assert engine.last(m.Match).chunks == 0
    assert engine.world.lent_cells() == 0


def test_a_tier_that_says_nothing_costs_no_more_than_the_wait(
    engine: Engine, tier: FakeTier
) -> None:
    """And what it says later is of use to the next request."""
    tier.answers = False
    ask(engine, LONG)
    assert not engine.heard(m.Pending)
    engine.world.tick(TELL_MS)
    assert engine.heard(m.Pending), "said within the time for a first word"
    engine.world.answer(tier)
    engine.world.tick(WAIT_MS_MAX)
    assert engine.last(m.Match).chunks == 0
    engine.world.answer(tier)
    tier.answers = True
    assert engine.blocks_held(LONG) == 2 * CHUNK_BLOCKS + 2
    assert len(tier.loaded) == 3


def test_an_answer_that_comes_too_late_changes_nothing(engine: Engine, tier: FakeTier) -> None:
    tier.answers = False
    ask(engine, LONG)
    engine.world.tick(WAIT_MS_MAX)
    assert engine.last(m.Match).chunks == 0
    engine.world.answer(tier)
    assert not tier.loaded
    engine.world.give(TierFound(999, [], may_go_on=False))


def test_each_chunk_that_comes_gives_the_others_time(engine: Engine, tier: FakeTier) -> None:
    tier.answers = False
    ask(engine, LONG)
    engine.world.answer(tier)
    jobs, tier.waiting = tier.waiting, []
    for job in jobs:
        engine.world.tick(WAIT_MS_MAX - 1)
        assert not engine.heard(m.Match)
        engine.world.give(tier.answer(job))
    assert engine.last(m.Match).chunks == 2
    assert len(engine.heard(m.Pending)) > 1, "the engine was told that there is progress"


def test_an_engine_that_leaves_leaves_nothing_behind(engine: Engine, tier: FakeTier) -> None:
    tier.answers = False
    ask(engine, LONG)
    engine.world.answer(tier)
    engine.kill_all()
    assert engine.world.lent_cells() == 2 * CHUNK_BLOCKS + 2, "lent until the tier has answered"
    engine.world.answer(tier)
    again = Engine(engine.world).start()
    assert again.blocks_held(LONG) == 2 * CHUNK_BLOCKS + 2
    assert len(tier.loaded) == 3


def test_cells_being_loaded_outlive_a_clear(engine: Engine, tier: FakeTier) -> None:
    tier.answers = False
    ask(engine, LONG)
    engine.world.answer(tier)
    assert engine.world.clear(None) == 3
    assert engine.world.lent_cells() == 2 * CHUNK_BLOCKS + 2
    engine.world.answer(tier)
    assert engine.world.lent_cells() == 0
    assert engine.last(m.Match).chunks == 0


def test_a_chain_longer_than_memory_is_matched_as_far_as_it_fits(tier: FakeTier) -> None:
    long = prompt(*range(1, 41))
    before = Engine(World(host_bytes=1024 * KiB, tiers=[tier])).start()
    for end in range(4, 44, 4):
        before.store(long[: end * CHUNK_BLOCKS * 2])
    assert len(tier.records) == 40
    engine = Engine(World(host_bytes=256 * KiB, tiers=[tier])).start()
    held = engine.blocks_held(long)
    assert 0 < held < 40 * CHUNK_BLOCKS
    assert engine.world.machine.counts["promotions.no_memory"] == 1


def test_what_is_loaded_is_not_evicted_before_the_answer(tier: FakeTier) -> None:
    """Another chain is stored meanwhile into a host that is full."""
    before = Engine(World(tiers=[tier])).start()
    before.store(LONG)
    engine = Engine(World(host_bytes=256 * KiB, tiers=[tier])).start()
    tier.answers = False
    ask(engine, LONG)
    engine.world.answer(tier)
    engine.world.answer(tier)
    lookup = engine.last(m.Match)
    assert lookup.lease
    for part in range(10, 40):
        engine.store(prompt(part))
        engine.world.answer(tier)
    assert engine.world.machine.index.entries[engine.chain(LONG)[0][0]].is_held


def test_the_next_tier_is_asked_for_what_the_first_lacks(tier: FakeTier) -> None:
    first, second = FakeTier(), tier
    before = Engine(World(tiers=[first, second])).start()
    before.store(LONG)
    deep = before.chain(LONG)[0]
    del first.records[deep[1]], first.records[deep[2]]
    engine = Engine(World(tiers=[first, second])).start()
    assert engine.blocks_held(LONG) == 2 * CHUNK_BLOCKS + 2
    assert [job.record.key for job in first.loaded] == deep[:1]
    assert [job.record.key for job in second.loaded] == deep[1:]
    assert [job.record.key for job in second.stored[3:]] == deep[:1]


@pytest.mark.parametrize("failed", range(3))
def test_the_next_tier_is_asked_for_what_the_first_cannot_load(
    tier: FakeTier, failed: int
) -> None:
    """It found everything, and one load fails; the other tier has that, and what is behind."""
    first, second = FakeTier(), tier
    before = Engine(World(tiers=[first, second])).start()
    before.store(LONG)
    deep = before.chain(LONG)[0]
    engine = Engine(World(tiers=[first, second])).start()
    first.answers = False
    ask(engine, LONG)
    engine.world.answer(first)
    del first.records[deep[failed]]
    engine.world.answer(first)
    assert engine.last(m.Match).chunks == 2
    assert [job.record.key for job in second.loaded] == deep[failed:]
    assert engine.blocks_held(LONG) == 2 * CHUNK_BLOCKS + 2
    assert engine.world.lent_cells() == 2 * CHUNK_BLOCKS + 2


def test_what_came_before_a_load_that_fails_is_not_evicted_while_others_run(
    tier: FakeTier,
) -> None:
    """The next tier is asked when they have ended, for what is behind it."""
    first, second = FakeTier(), tier
    before = Engine(World(tiers=[first, second])).start()
    before.store(LONG)
    deep = before.chain(LONG)[0]
    engine = Engine(World(host_bytes=256 * KiB, tiers=[first, second])).start()
    first.answers = False
    ask(engine, LONG)
    engine.world.answer(first)
    good, bad, running = first.waiting
    first.waiting = []
    engine.world.give(first.answer(good))
    first.loads_fail = True
    engine.world.give(first.answer(bad))
    first.answers = True
    for part in range(10, 40):
        engine.store(prompt(part))
    engine.world.give(first.answer(running))
    assert [job.record.key for job in second.loaded] == deep[1:]
    assert engine.last(m.Match).chunks == 2


def test_an_engine_that_is_storing_the_same_is_waited_for(engine: Engine, tier: FakeTier) -> None:
    """Its copy is as good as the tier's."""
    tier.answers = False
    grants = engine.offer(LONG).grants
    ask(engine, LONG)
    engine.world.answer(tier)
    assert not tier.loaded
    assert not engine.heard(m.Match)
    engine.stored(grants)
    assert engine.last(m.Match).chunks == 2


def test_a_chunk_being_loaded_is_not_granted_to_an_engine(engine: Engine, tier: FakeTier) -> None:
    tier.answers = False
    ask(engine, LONG)
    engine.world.answer(tier)
    assert engine.offer(LONG).outcomes == ["in_flight"] * 3


def test_two_shards_are_loaded_as_one(tier: FakeTier) -> None:
    before = Engine(World(tiers=[tier]), workers=2).start()
    before.store(LONG)
    assert [job.record.layout.shard_count for job in tier.stored] == [2, 2, 2]
    engine = Engine(World(tiers=[tier]), workers=2).start()
    assert engine.blocks_held(LONG) == 2 * CHUNK_BLOCKS + 2
    assert not any(isinstance(job, StoreTo) for job in tier.waiting)


# ---- tiers that are slow, silent, or out of order


def test_a_lookup_that_joins_behind_a_chunk_that_came_out_of_order_is_answered(
    engine: Engine, tier: FakeTier
) -> None:
    """The second and third chunk are copied, the first still loads when somebody else asks."""
    tier.answers = False
    ask(engine, LONG)
    engine.world.answer(tier)
    first, *others = tier.waiting
    tier.waiting = []
    for job in others:
        engine.world.give(tier.answer(job))
    second = ask(engine, LONG)
    engine.world.answer(tier)
    engine.world.give(tier.answer(first))
    assert second in [match.number for match in engine.heard(m.Match)]
    assert not engine.world.machine.promotions._joined


def test_an_answer_to_a_lookup_of_the_connection_before_is_nobodys(
    engine: Engine, tier: FakeTier
) -> None:
    """The scheduler is back and asks under the same number."""
    tier.answers = False
    number = ask(engine, LONG)
    old, tier.waiting = tier.waiting, []
    engine.disconnect(engine.scheduler)
    engine.connect_scheduler()
    engine.identify()
    engine.register(engine.root)
    engine.number = number - 1
    ask(engine, LONG)
    for job in old:
        engine.world.give(tier.answer(job))
    assert not tier.loaded
    engine.world.answer(tier)
    assert len(tier.loaded) == 3


def many_prompts(tier: FakeTier, count: int) -> Engine:
    """An engine of an empty node above a tier that holds so many prompts of one chunk."""
    before = Engine(World(host_bytes=16 * MiB, tiers=[tier])).start()
    for part in range(1, count + 1):
        before.store(prompt(part))
    return Engine(World(host_bytes=16 * MiB, tiers=[tier])).start()


def test_a_tier_that_hangs_costs_a_few_lookups(tier: FakeTier) -> None:
    """It answers what it has, and never loads."""
    engine = many_prompts(tier, 40)
    tier.answers = False
    waited = 0
    for part in range(1, 41):
        number = ask(engine, prompt(part))
        for job in [job for job in tier.waiting if isinstance(job, AskTier)]:
            tier.waiting.remove(job)
            engine.world.give(tier.answer(job))
        if number not in [match.number for match in engine.heard(m.Match)]:
            waited += 1
            engine.world.tick(WAIT_MS_MAX)
    assert waited == SILENCES_MAX
    assert engine.world.machine.counts["promotions.silent"] == 40 - SILENCES_MAX
    engine.world.answer(tier)
    tier.answers = True
    assert engine.blocks_held(prompt(40)) == CHUNK_BLOCKS, "it has come back"


def test_a_tier_that_hangs_is_tried_again(tier: FakeTier) -> None:
    engine = many_prompts(tier, SILENCES_MAX + 1)
    tier.answers = False
    for part in range(1, SILENCES_MAX + 1):
        ask(engine, prompt(part))
        engine.world.tick(WAIT_MS_MAX)
    asked = len(tier.asked)
    ask(engine, prompt(SILENCES_MAX + 1))
    assert len(tier.asked) == asked
    engine.world.tick(SILENT_MS)
    ask(engine, prompt(SILENCES_MAX + 1))
    assert len(tier.asked) == asked + 1


def test_an_engine_that_hangs_is_no_silence_of_a_tier(tier: FakeTier) -> None:
    """Lookups wait for what it was storing; the tier has answered all that it was asked."""
    engine = many_prompts(tier, SILENCES_MAX + 1)
    hung = Engine(engine.world, "hung").start()
    for part in range(1, SILENCES_MAX + 1):
        hung.offer(prompt(part))
        ask(engine, prompt(part))
        engine.world.tick(WAIT_MS_MAX)
        assert len(engine.heard(m.Match)) == part
    assert engine.blocks_held(prompt(SILENCES_MAX + 1)) == CHUNK_BLOCKS


def test_memory_that_does_not_come_is_no_silence_of_a_tier(tier: FakeTier) -> None:
    Engine(World(tiers=[tier])).start().store(LONG)
    world = World(tiers=[tier])
    world.holds_regions = True
    engine = Engine(world).start()
    for asked in range(1, SILENCES_MAX + 1):
        ask(engine, LONG)
        world.tick(WAIT_MS_MAX)
        assert len(engine.heard(m.Match)) == asked
    for event in world.make_regions():
        world.give(event)
    assert engine.blocks_held(LONG) == 2 * CHUNK_BLOCKS + 2


def test_lookups_that_wait_keep_no_more_than_leases_may(tier: FakeTier) -> None:
    """Each keeps its chain; one that would keep too much is answered with what is held."""
    chains = [list(range(start, start + 20)) for start in (100, 200, 300)]
    engine = Engine(World(tiers=[tier])).start()
    for chain in chains:
        for end in range(4, 24, 4):
            engine.store(prompt(*chain[:end]))
        assert engine.blocks_held(prompt(*chain)) == 20 * CHUNK_BLOCKS
    tier.answers = False
    before = len(engine.heard(m.Match))
    waiting = [ask(engine, prompt(*chains[0], 1)), ask(engine, prompt(*chains[1], 1))]
    waiting.append(ask(engine, prompt(*chains[0], 2)))
    assert len(engine.heard(m.Match)) == before, "what is kept already costs nothing more"
    ask(engine, prompt(*chains[2], 1))
    assert engine.last(m.Match).chunks == 20
    assert engine.world.machine.counts["promotions.no_memory"] == 1
    engine.world.tick(WAIT_MS_MAX)
    assert [match.number for match in engine.heard(m.Match)[-3:]] == waiting
    number = ask(engine, prompt(*chains[2], 1))
    assert engine.last(m.Match).number != number, "there is room again"


def test_what_is_loaded_for_lookups_that_wait_is_bounded_too(tier: FakeTier) -> None:
    """Of each chain the last chunk does not come."""
    chains = [prompt(*range(start, start + 13)) for start in (100, 200, 300, 400)]
    before = Engine(World(host_bytes=16 * MiB, tiers=[tier])).start()
    for chain in chains:
        before.store(chain)
    assert len(tier.records) == 4 * 13
    engine = Engine(World(host_bytes=64 * CHUNK_BYTES, tiers=[tier])).start()
    for part in range(64):
        engine.store(prompt(part))
    tier.answers = False
    for chain in chains:
        hung, tier.waiting = tier.waiting, []
        ask(engine, chain)
        engine.world.answer(tier)
        *come, last = tier.waiting
        tier.waiting = [*hung, last]
        for job in come:
            engine.world.give(tier.answer(job))
    assert not engine.heard(m.Match)
    assert len(tier.loaded) == 48, "three quarters of the host"


def test_no_more_is_read_ahead_than_keeps_a_tier_busy(
    tier: FakeTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a long chain so much is on its way at a time; each chunk that comes makes room."""
    monkeypatch.setattr("kvtide.core.promotions.READ_AHEAD_BYTES", 4 * CHUNK_BYTES)
    chain = prompt(*range(1, 13))
    Engine(World(host_bytes=16 * MiB, tiers=[tier])).start().store(chain)
    engine = Engine(World(host_bytes=16 * MiB, tiers=[tier])).start()
    tier.answers = False
    ask(engine, chain)
    engine.world.answer(tier)
    for come in range(12):
        assert len(tier.waiting) == min(4, 12 - come), come
        job = tier.waiting.pop(0)
        engine.world.give(tier.answer(job))
    assert engine.last(m.Match).number == engine.number


def test_a_load_takes_no_longer_than_computing_would(tier: FakeTier) -> None:
    """A chunk comes just in time, again and again; computing all of them would take 2.4 ms."""
    long = prompt(*range(1, 31))
    before = Engine(World(host_bytes=16 * MiB, tiers=[tier])).start()
    for end in range(4, 34, 4):
        before.store(long[: end * CHUNK_BLOCKS * 2])
    engine = Engine(World(host_bytes=16 * MiB, tiers=[tier])).start()
    for _ in range(20):
        engine.say(m.Counts({"prefill_tokens": 1_000, "prefill_us": 10_000}))
    tier.answers = False
    began_ms = engine.world.now_ms
    ask(engine, long)
    engine.world.answer(tier)
    jobs, tier.waiting = tier.waiting, []
    for job in jobs:
        if engine.heard(m.Match):
            break
        engine.world.tick(WAIT_MS_MAX - 1)
        engine.world.give(tier.answer(job))
    assert engine.world.now_ms - began_ms < WAIT_MS_MAX
