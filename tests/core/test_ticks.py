"""When ticks matter: while something waits for time to pass, and not beside an engine at work."""

import pytest

from kvtide.core import messages as m
from kvtide.core.effects import HostLimit, Tick
from kvtide.core.leases import LEASE_MS
from kvtide.core.lending import PUT_MS_MAX
from kvtide.core.tiering import WritePolicy
from kvtide.units import KiB
from tests.core.fake_tier import FakeTier
from tests.core.world import Engine, World, prompt


def is_waiting(engine: Engine) -> bool:
    return engine.world.machine.is_waiting(engine.world.now_ms)


def ask(engine: Engine, tokens: list[int]) -> None:
    """Send a lookup of whole chunks, whose answer may come later."""
    engine.number += 1
    engine.say(m.Lookup(engine.number, engine.root, b"".join(engine.chain(tokens)[0]), b""))


@pytest.fixture
def engine() -> Engine:
    return Engine(World()).start()


def test_an_engine_without_hits_needs_no_ticks(engine: Engine) -> None:
    """It asks in vain, is granted cells, and answers them in its next steps."""
    for part in range(4):
        assert engine.blocks_held(prompt(part)) == 0
        answer = engine.offer(prompt(part))
        assert not is_waiting(engine)
        engine.stored(answer.grants)
        assert not is_waiting(engine)


def test_a_lease_needs_ticks_until_it_ends(engine: Engine) -> None:
    engine.store(prompt(1))
    engine.lookup(prompt(1), keeps=True)
    assert is_waiting(engine)
    engine.world.tick(LEASE_MS)
    assert not is_waiting(engine)


def test_a_grant_that_nobody_answers_needs_ticks(engine: Engine) -> None:
    """From half of its time on: it ends when it shall."""
    engine.offer(prompt(1))
    engine.world.tick(PUT_MS_MAX // 2)
    assert not is_waiting(engine)
    engine.world.now_ms += 1
    assert is_waiting(engine)


def test_a_worker_that_is_missing_needs_ticks() -> None:
    engine = Engine(World(), workers=2)
    engine.connect_scheduler()
    engine.connect_worker(0)
    assert is_waiting(engine)
    engine.connect_worker(1)
    engine.identify()
    assert not is_waiting(engine)
    engine.kill(engine.workers[1])
    assert is_waiting(engine)


def test_a_region_on_its_way_out_needs_ticks(engine: Engine) -> None:
    engine.store(prompt(1))
    engine.leaves = False
    engine.world.give(HostLimit(0))
    assert is_waiting(engine)
    engine.leave_now()
    engine.world.give(Tick())
    assert not is_waiting(engine)


def test_what_was_cleared_needs_ticks_until_it_is_gone(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.store(prompt(*range(4)))
    monkeypatch.setattr("kvtide.core.lending.CLEARED_VISITS_MAX", 2)
    assert engine.world.clear(None) == 4
    assert is_waiting(engine)
    while engine.world.machine.index.entries:
        engine.world.tick()
    engine.world.tick()
    assert not is_waiting(engine)


def test_a_lookup_that_waits_for_regions_needs_ticks(engine: Engine) -> None:
    engine.store(prompt(1))
    other = Engine(engine.world, "other")
    other.maps = False
    other.start()
    assert not is_waiting(engine)
    ask(other, prompt(1))
    assert other.heard(m.Pending)
    assert is_waiting(engine)
    other.map_now()
    other.say(m.LeaseRelease(other.last(m.Match).lease))
    assert not is_waiting(engine)


def test_what_a_tier_is_asked_needs_ticks() -> None:
    tier = FakeTier()
    engine = Engine(World(tiers=[tier])).start()
    tier.answers = False
    engine.store(prompt(1))
    assert is_waiting(engine)
    engine.world.answer(tier)
    assert not is_waiting(engine)
    ask(engine, prompt(1, 2))
    assert is_waiting(engine)
    engine.world.answer(tier)
    engine.say(m.LeaseRelease(engine.last(m.Match).lease))
    assert not is_waiting(engine)


def test_a_tier_that_takes_what_is_evicted_needs_ticks() -> None:
    """How full memory is, is looked at as time passes."""
    world = World(host_bytes=256 * KiB, tiers=[FakeTier()], policy=WritePolicy.ON_EVICTION)
    assert is_waiting(Engine(world).start())


def test_a_node_without_engines_disturbs_none() -> None:
    engine = Engine(World()).start()
    engine.kill_all()
    assert is_waiting(engine)
