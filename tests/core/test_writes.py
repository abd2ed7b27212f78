"""Written behind: what goes to a tier, when, and what is dropped."""

import pytest

from kvtide.core import messages as m
from kvtide.core.effects import AskTier, Event, LoadFrom, StoreTo
from kvtide.core.tiering import WritePolicy
from kvtide.units import KiB
from tests.core.fake_tier import FakeTier
from tests.core.world import Engine, World, prompt


@pytest.fixture
def tier() -> FakeTier:
    return FakeTier()


@pytest.fixture
def engine(tier: FakeTier) -> Engine:
    return Engine(World(tiers=[tier])).start()


def keys_of(stored: list[StoreTo]) -> list[bytes]:
    return [job.record.key for job in stored]


def test_what_is_held_is_written_parents_first(engine: Engine, tier: FakeTier) -> None:
    """Also where the copies end in another order."""
    answer = engine.offer(prompt(1, 2, 3))
    engine.stored(answer.grants[::-1])
    assert keys_of(tier.stored) == engine.chain(prompt(1, 2, 3))[0]
    assert tier.stored[1].record.parent == tier.stored[0].record.key
    assert tier.stored[0].record.parent == engine.root
    assert [job.run for job in tier.stored] == answer.runs


def test_what_failed_is_not_written(engine: Engine, tier: FakeTier) -> None:
    engine.stored(engine.offer(prompt(1, 2)).grants, ok=False)
    assert not tier.stored


def test_cells_being_written_are_not_lent_to_others(tier: FakeTier) -> None:
    engine = Engine(World(host_bytes=256 * KiB, tiers=[tier])).start()
    tier.answers = False
    engine.store(prompt(1))
    job = tier.stored[0]
    engine.world.clear(None)
    assert engine.world.lent_cells() == 4
    engine.world.give(tier.answer(job))
    assert engine.world.lent_cells() == 0


def test_more_than_may_wait_is_dropped_and_what_lies_behind_it_too(tier: FakeTier) -> None:
    engine = Engine(World(host_bytes=320 * KiB, tiers=[tier]), step_tokens=8).start()
    tier.answers = False
    long = prompt(1, 2, 3, 4, 5)
    for end in range(1, 6):
        engine.stored(engine.offer(prompt(*range(1, end + 1))).grants)
    counts = engine.world.machine.counts
    assert len(tier.stored) == 2, "a tenth of the host may wait"
    assert counts["tier_stores.tier0.queue_full"] == 1
    assert counts["tier_stores.tier0.not_anchored"] == 2
    engine.world.answer(tier)
    tier.answers = True
    for _ in range(2):
        assert engine.blocks_held(long) == 20
    assert len(tier.records) == 5, "what was dropped is offered again when it is matched"


def test_a_write_that_fails_is_tried_again_when_it_is_matched(
    engine: Engine, tier: FakeTier
) -> None:
    tier.stores_as = "failed"
    engine.store(prompt(1))
    assert engine.world.machine.counts["tier_stores.tier0.failed"] == 1
    tier.stores_as = "stored"
    engine.blocks_held(prompt(1))
    assert len(tier.records) == 1


def test_on_reuse_nothing_is_written_before_it_is_matched(tier: FakeTier) -> None:
    engine = Engine(World(tiers=[tier], policy=WritePolicy.ON_REUSE)).start()
    engine.store(prompt(1, 2, 3))
    assert not tier.stored
    engine.blocks_held(prompt(1, 2))
    assert keys_of(tier.stored) == engine.chain(prompt(1, 2))[0]
    engine.blocks_held(prompt(1, 2))
    assert len(tier.stored) == 2


def test_on_eviction_chains_are_written_root_first_once_memory_is_short(tier: FakeTier) -> None:
    world = World(host_bytes=256 * KiB, tiers=[tier], policy=WritePolicy.ON_EVICTION)
    engine = Engine(world).start()
    engine.store(prompt(1, 2))
    world.tick(1)
    assert not tier.stored
    for part in range(10, 10 + 14):
        world.tick(1)
        engine.store(prompt(part))
    world.tick(1)
    assert keys_of(tier.stored)[:2] == engine.chain(prompt(1, 2))[0]
    engine.store(prompt(40))
    other = Engine(World(tiers=[tier])).start()
    assert other.blocks_held(prompt(1, 2)) == 8


def test_salts_are_told_by_their_digests_alone(engine: Engine, tier: FakeTier) -> None:
    root = engine.root_of("salt")
    engine.register(root, "salt")
    engine.store(prompt(1), root)
    engine.store(prompt(2))
    digest = tier.stored[0].record.root.salt_digest
    assert len(digest) == 32
    assert tier.stored[1].record.root.salt_digest == b""
    engine.world.clear(digest)
    assert keys_of([tier.stored[1]]) == list(tier.records)


def test_without_tiers_nothing_is_remembered_for_them(engine: Engine) -> None:
    plain = Engine(World()).start()
    plain.store(prompt(1, 2))
    assert plain.blocks_held(prompt(1, 2, 3)) == 8
    assert not plain.world.machine.index.shown
    assert not plain.heard(m.Pending)


class Forgetful(FakeTier):
    """Refuses what hangs on nothing, as a disk does."""

    def answer(self, effect: AskTier | LoadFrom | StoreTo) -> Event:
        if isinstance(effect, StoreTo):
            record = effect.record
            is_anchored = record.parent == record.root.key or record.parent in self.records
            self.stores_as = "stored" if is_anchored else "not_anchored"
        return super().answer(effect)


def test_what_a_tier_evicted_is_written_there_again_when_it_is_matched() -> None:
    """It is hot in memory, so the tier never sees it used; what lies behind it hangs on it."""
    tier = Forgetful()
    engine = Engine(World(tiers=[tier])).start()
    engine.store(prompt(1))
    tier.records.clear()
    for part in range(2, 12):
        engine.store(prompt(1, part))
        engine.blocks_held(prompt(1, part))
    assert len(tier.records) == 11
