"""One engine that stands still: what it holds, and what others may still do."""

import math

import pytest

from kvtide.core import instances
from kvtide.core import messages as m
from kvtide.core.effects import Close
from kvtide.core.estimate import SAMPLES_MIN
from kvtide.core.instances import GRANT_STEPS_MAX, GRANT_STEPS_MS_MAX
from kvtide.core.keys import salt_digest
from kvtide.core.lending import PUT_MS_MAX, QUEUE_RATIO_MAX
from kvtide.core.reasons import DropReason
from tests.core.fake_tier import FakeTier
from tests.core.world import CHUNK_BLOCKS, CHUNK_BYTES, Engine, World, prompt


@pytest.fixture
def world() -> World:
    return World(host_bytes=64 * CHUNK_BYTES)


def test_what_is_stored_behind_a_silent_writers_chunk_counts_as_granted(world: World) -> None:
    """It can be neither found nor evicted: others shall have room all the same."""
    hung, lively = Engine(world, "hung").start(), Engine(world, "lively").start()
    other = Engine(world, "other", model="another model").start()
    assert hung.offer(prompt(1)).outcomes == [""]
    outcomes = [lively.store(prompt(1, 100 + part)).outcomes[1] for part in range(60)]
    assert outcomes[-1] == DropReason.QUEUE_FULL
    assert outcomes.count("") * CHUNK_BYTES <= QUEUE_RATIO_MAX * 64 * CHUNK_BYTES
    assert other.offer(prompt(7)).outcomes == [""]


def test_a_silent_writers_chunk_may_be_stored_by_others_in_the_end(world: World) -> None:
    hung, lively = Engine(world, "hung").start(), Engine(world, "lively").start()
    grants = hung.offer(prompt(1)).grants
    assert lively.store(prompt(1, 2)).outcomes == [DropReason.IN_FLIGHT, ""]
    world.tick(PUT_MS_MAX + GRANT_STEPS_MS_MAX - 1)
    assert lively.store(prompt(1, 2)).outcomes == [DropReason.IN_FLIGHT, DropReason.IN_FLIGHT]
    world.tick(1)
    assert lively.store(prompt(1, 2)).outcomes == ["", ""]
    assert lively.blocks_held(prompt(1, 2)) == 2 * CHUNK_BLOCKS
    assert world.lent_cells() == 3 * CHUNK_BLOCKS, "the silent one's cells stay lent"
    hung.stored(grants)
    assert world.lent_cells() == 2 * CHUNK_BLOCKS
    assert world.machine.lending.granted_bytes == 0


@pytest.mark.parametrize("step_s", [0.5, 20])
def test_a_grant_lives_as_long_as_the_steps_of_its_engine_may_take(
    world: World, step_s: float
) -> None:
    """On CPUs a step may take a minute: what it has computed is stored when it ends."""
    slow, other = Engine(world, "slow").start(), Engine(world, "other").start()
    for _ in range(SAMPLES_MIN):
        slow.say(m.Counts({"prefill_tokens": slow.step_tokens, "prefill_us": int(step_s * 1e6)}))
    first, second = (slow.offer(prompt(part)).grants for part in (1, 2))
    world.tick(PUT_MS_MAX + int(GRANT_STEPS_MAX * step_s * 1000) - 1)
    slow.stored(first)
    assert other.blocks_held(prompt(1)) == CHUNK_BLOCKS
    assert other.offer(prompt(2)).outcomes == [DropReason.IN_FLIGHT]
    world.tick(1)
    assert other.offer(prompt(2)).outcomes == [""]
    slow.stored(second)
    assert not other.blocks_held(prompt(2))


def test_what_an_engine_says_of_its_steps_ends_nothing(world: World) -> None:
    """Not even numbers of which no rate can be made."""
    engine = Engine(world, step_tokens=1 << 62).start()
    engine.say(m.Counts({"prefill_tokens": 1, "prefill_us": 1}))
    prefill = engine.world.machine.instances["engine"].prefill
    for _ in range(11_000):
        prefill.add(0, 1e9)
    assert prefill.ms_for(engine.step_tokens) == math.inf
    engine.offer(prompt(1))
    world.tick(PUT_MS_MAX + GRANT_STEPS_MS_MAX)
    assert engine.offer(prompt(1)).outcomes == [""], "the grant was given up"


def test_what_was_stored_behind_is_charged_until_it_can_be_found(world: World) -> None:
    hung, lively = Engine(world, "hung").start(), Engine(world, "lively").start()
    grants = hung.offer(prompt(1)).grants
    lively.store(prompt(1, 2))
    lending = world.machine.lending
    assert lending.granted_to("lively") == CHUNK_BYTES
    hung.stored(grants)
    assert lending.granted_to("lively") == 0
    assert lively.blocks_held(prompt(1, 2)) == 2 * CHUNK_BLOCKS


def test_a_silent_tiers_chunk_may_be_stored_by_engines_in_the_end() -> None:
    tier = FakeTier()
    Engine(World(tiers=[tier])).start().store(prompt(1))
    world = World(tiers=[tier])
    engine = Engine(world).start()
    tier.answers = False
    keys, _ = engine.chain(prompt(1))
    engine.say(m.Lookup(1, engine.root, keys[0], b""))
    world.answer(tier)
    assert engine.offer(prompt(1)).outcomes == [DropReason.IN_FLIGHT]
    world.tick(PUT_MS_MAX)
    engine.store(prompt(1))
    assert engine.heard(m.Match)[0].chunks == 0
    loads, tier.waiting = tier.waiting, []
    for job in loads:
        world.give(tier.answer(job))
    assert world.lent_cells() == CHUNK_BLOCKS


def test_a_root_that_is_named_is_not_forgotten(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A lookup, then a new root beyond the limit, then the probe behind that lookup."""
    monkeypatch.setattr(instances, "ROOTS_MAX", 4)
    engine = Engine(world).start()
    engine.store(prompt(1, 2))
    for number in range(3):
        engine.register(engine.root_of(f"salt {number}"), f"salt {number}")
    keys, digests = engine.chain(prompt(1, 9))
    engine.say(m.Lookup(1, engine.root, keys[0], b""))
    engine.register(engine.root_of("salt 3"), "salt 3")
    effects = engine.say(m.Probe(2, engine.root, keys[0], digests[1]))
    assert not [effect for effect in effects if isinstance(effect, Close)]


def test_what_an_engine_takes_back_is_cleared(world: World) -> None:
    """In memory and in tiers, of its fingerprint and that salt; the engine goes on."""
    tier = FakeTier()
    world = World(tiers=[tier])
    engine, other = Engine(world, "engine").start(), Engine(world, "other", model="b").start()
    salted = engine.root_of("salt")
    engine.register(salted, "salt")
    theirs = other.root_of("salt")
    other.register(theirs, "salt")
    engine.store(prompt(1))
    engine.store(prompt(2), salted)
    other.store(prompt(2), theirs)
    grants = engine.offer(prompt(3), root=salted).grants
    clear = m.Clear(engine.fingerprint, salt_digest("salt"))
    engine.say(clear)
    assert engine.last(m.Clear) == clear
    engine.stored(grants)
    for number in (2, 3):
        assert engine.blocks_held(prompt(number), salted) == 0
    assert engine.blocks_held(prompt(1)) == CHUNK_BLOCKS
    assert other.blocks_held(prompt(2), theirs) == CHUNK_BLOCKS
    of_salt = {
        record.root.fingerprint
        for record in tier.records.values()
        if record.root.salt_digest == salt_digest("salt")
    }
    assert of_salt == {other.fingerprint}
