"""What canaries show: after a difference nobody is served under the fingerprint, and nothing of it
is kept anywhere, until a clear of everything."""

import pytest

from kvtide.core import messages as m
from kvtide.core import quarantine
from kvtide.core.effects import Alarm
from kvtide.core.keys import salt_digest
from kvtide.core.reasons import DropReason, Off, OffReason, Verdict
from tests.core.fake_tier import FakeTier
from tests.core.world import CHUNK_BLOCKS, Engine, World, prompt


@pytest.fixture
def tier() -> FakeTier:
    return FakeTier()


@pytest.fixture
def world(tier: FakeTier) -> World:
    return World(tiers=[tier])


def compared(engine: Engine, verdict: str, difference: float = 0.0, rank: int = 0) -> None:
    engine.tell(rank, m.Compared(engine.fingerprint, verdict, difference))


def is_off(engine: Engine) -> bool:
    return engine.last(m.Serving).off_reason == OffReason.CANARY


def alarms(world: World) -> list[str]:
    return [effect.text for effect in world.log if isinstance(effect, Alarm)]


def test_a_difference_ends_the_fingerprint_for_all_its_engines(
    world: World, tier: FakeTier
) -> None:
    """Nothing of it is found, in memory or below, nothing more is taken; others are served on."""
    engine, twin = Engine(world, "engine", workers=2).start(), Engine(world, "twin", workers=2)
    twin.start()
    other = Engine(world, "other", model="another model").start()
    for one in (engine, other):
        one.store(prompt(1, 2))
    compared(engine, Verdict.DIFFERS, 1.41, rank=1)
    assert is_off(engine)
    assert is_off(twin)
    assert not other.last(m.Serving).off_reason
    assert engine.blocks_held(prompt(1, 2)) == twin.blocks_held(prompt(1, 2)) == 0
    assert other.blocks_held(prompt(1, 2)) == 2 * CHUNK_BLOCKS
    assert twin.offer(prompt(3)).outcomes == [DropReason.NOT_MAPPED]
    assert {record.root.fingerprint for record in tier.records.values()} == {other.fingerprint}
    (alarm,) = alarms(world)
    assert engine.fingerprint.hex()[:8] in alarm
    assert "1.41" in alarm
    assert world.machine.counts["canaries.differs"] == 1


def test_whoever_comes_later_is_off_at_once_and_the_alarm_is_raised_once(world: World) -> None:
    engine = Engine(world, "engine").start()
    compared(engine, Verdict.DIFFERS, 2.0)
    compared(engine, Verdict.DIFFERS, 3.0)
    assert len(alarms(world)) == 1
    late = Engine(world, "late")
    late.connect_scheduler()
    late.connect_worker(0)
    late.identify()
    assert is_off(late)
    instance = world.machine.instances["late"]
    assert isinstance(instance.off, Off)
    assert "engine" in instance.off.detail


def test_a_clear_of_everything_begins_anew(world: World) -> None:
    """That of one salt does not: what is wrong with a layout is wrong with all salts."""
    engine = Engine(world).start()
    engine.store(prompt(1))
    compared(engine, Verdict.DIFFERS, 1.0)
    world.clear(salt_digest("a salt"))
    assert is_off(engine)
    world.clear(None)
    assert not is_off(engine)
    assert not world.machine.quarantined
    engine.store(prompt(1))
    assert engine.blocks_held(prompt(1)) == CHUNK_BLOCKS


def test_what_was_asked_before_the_alarm_holds_nothing_behind_it(world: World) -> None:
    """A lease, a load, a grant and lookups that wait for a tier: all of it ends as usual."""
    engine = Engine(world).start()
    engine.store(prompt(1, 2))
    match = engine.lookup(prompt(1, 2), keeps=True)
    assert isinstance(match, m.Match)
    engine.say(m.LoadBegin(match.lease))
    granted = engine.offer(prompt(3))
    compared(engine, Verdict.DIFFERS, 1.0)
    engine.stored(granted.grants)
    engine.say(m.LoadEnd(match.lease, 0))
    world.tick()
    assert world.machine.leases.counts() == (0, 0)
    assert not world.machine.lending.grants
    assert not world.lent_cells()


def test_lookups_that_wait_for_a_tier_are_let_go(world: World, tier: FakeTier) -> None:
    first = Engine(world, "first").start()
    first.store(prompt(1, 2))
    while (entry := world.machine.index.next_to_evict(world.machine.host.regions)) is not None:
        world.machine.lending.evict(entry, "room")  # type: ignore[arg-type]
    tier.answers = False
    keys, _ = first.chain(prompt(1, 2))
    first.say(m.Lookup(9, first.root, b"".join(keys), b""))
    world.answer(tier)
    assert first.last(m.Pending).number == 9
    compared(first, Verdict.DIFFERS, 1.0)
    world.answer(tier)
    assert all(answer.number != 9 for answer in first.heard(m.Match))
    world.clear(None)
    tier.answers = True
    assert first.blocks_held(prompt(1, 2)) == 0


@pytest.mark.parametrize("verdict", [Verdict.EQUAL, Verdict.NO_VERDICT])
def test_no_other_verdict_changes_anything(world: World, verdict: Verdict) -> None:
    """They are counted; and how near to an alarm the equal ones came is kept."""
    engine = Engine(world).start()
    engine.store(prompt(1))
    compared(engine, verdict, 0.01)
    compared(engine, verdict, 0.002)
    assert world.machine.counts[f"canaries.{verdict}"] == 2
    assert world.machine.quarantine.greatest_difference == (verdict is Verdict.EQUAL) * 0.01
    assert engine.blocks_held(prompt(1)) == CHUNK_BLOCKS
    assert not alarms(world)


def test_a_worker_speaks_for_its_own_engine_alone(world: World) -> None:
    engine, other = Engine(world, "engine").start(), Engine(world, "other", model="b").start()
    other.store(prompt(1))
    engine.tell(0, m.Compared(other.fingerprint, Verdict.DIFFERS, 1.0))
    assert not is_off(other)
    assert not alarms(world)
    assert other.blocks_held(prompt(1)) == CHUNK_BLOCKS


def test_there_is_a_limit_to_what_is_quarantined(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quarantine, "QUARANTINED_MAX", 2)
    engines = [Engine(world, f"{n}", model=f"model {n}").start() for n in range(3)]
    for engine in engines:
        compared(engine, Verdict.DIFFERS, 1.0)
    assert list(world.machine.quarantined) == [one.fingerprint for one in engines[1:]]
