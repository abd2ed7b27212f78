"""While tiers load, a region that nobody needs yet is put off: making it takes cores."""

import pytest

from kvtide.core.effects import HostLimit, LoadFrom
from kvtide.core.promotions import CALM_MS
from kvtide.core.regions import PUT_OFF_MS_MAX
from kvtide.units import MiB
from tests.core.fake_tier import FakeTier
from tests.core.test_promotions import ask
from tests.core.world import CELL_BYTES, CHUNK_BLOCKS, CHUNK_BYTES, Engine, World, prompt

FITS = prompt(1, 2, 3)
"""Three slots of a region's four."""
REGION_BYTES = 4 * CHUNK_BYTES
TOO_LONG = prompt(1, 2, 3, 4, 5, 6)


@pytest.fixture
def tier() -> FakeTier:
    return FakeTier()


@pytest.fixture
def engine(tier: FakeTier) -> Engine:
    """An engine of a node with one region, empty, above a tier that takes its time."""
    before = Engine(World(2 * MiB, tiers=[tier])).start()
    before.store(FITS)
    before.store(TOO_LONG)
    assert len(tier.records) == 6
    engine = Engine(World(2 * MiB, tiers=[tier])).start()
    tier.answers = False
    assert len(engine.world.made) == 1
    return engine


def loads(engine: Engine, tier: FakeTier, tokens: list[int]) -> None:
    """A lookup whose loads are under way."""
    ask(engine, tokens)
    engine.world.answer(tier)
    assert all(isinstance(job, LoadFrom) for job in tier.waiting)


def test_it_is_made_once_all_has_been_calm_for_a_while(engine: Engine, tier: FakeTier) -> None:
    loads(engine, tier, FITS)
    assert len(tier.waiting) == 3
    engine.world.tick(100)
    engine.world.answer(tier)
    engine.world.tick(CALM_MS - 1)
    assert len(engine.world.made) == 1
    engine.world.tick(1)
    assert len(engine.world.made) == 2


def test_it_is_put_off_no_longer_than_so(engine: Engine, tier: FakeTier) -> None:
    """Be the load as slow as it will."""
    loads(engine, tier, FITS)
    engine.world.tick(PUT_OFF_MS_MAX - 1)
    assert len(engine.world.made) == 1
    engine.world.tick(1)
    assert len(engine.world.made) == 2


def test_it_is_made_at_once_where_what_was_found_needs_it(engine: Engine, tier: FakeTier) -> None:
    loads(engine, tier, TOO_LONG)
    assert len(engine.world.made) == 2
    tier.answers = True
    engine.world.answer(tier)
    assert engine.blocks_held(TOO_LONG) == 6 * CHUNK_BLOCKS


def test_it_is_made_at_once_where_nothing_is_left_for_stores(
    engine: Engine, tier: FakeTier
) -> None:
    loads(engine, tier, FITS)
    assert len(engine.world.made) == 1
    assert engine.store(prompt(7)).outcomes == [""]
    assert len(engine.world.made) == 2
    assert engine.store(prompt(8)).outcomes == [""]


def test_the_first_region_of_a_layout_is_never_put_off(engine: Engine, tier: FakeTier) -> None:
    loads(engine, tier, FITS)
    other = Engine(engine.world, "other", model="other", cell_bytes=2 * CELL_BYTES).start()
    assert other.store(prompt(1)).outcomes == [""]


def test_memory_that_becomes_short_costs_what_is_put_off_before_what_is_held(
    engine: Engine, tier: FakeTier
) -> None:
    """There is room for one region and a half: the one that is there stays, with all in it."""
    tier.answers = True
    assert engine.blocks_held(FITS[: 2 * len(prompt(1))]) == 2 * CHUNK_BLOCKS
    tier.answers = False
    loads(engine, tier, FITS)
    assert len(engine.world.made) == 1
    engine.world.give(HostLimit(REGION_BYTES * 3 // 2))
    engine.world.answer(tier)
    engine.world.tick(PUT_OFF_MS_MAX)
    assert len(engine.world.made) == 1
    assert not engine.world.freed
    assert engine.blocks_held(FITS) == 3 * CHUNK_BLOCKS


def test_what_is_put_off_takes_no_room_from_another_layout(engine: Engine, tier: FakeTier) -> None:
    """There is room for the one region, and the first of another layout."""
    loads(engine, tier, FITS)
    host = engine.world.machine.host
    engine.world.give(HostLimit(3 * REGION_BYTES))
    other = Engine(engine.world, "other", model="other", cell_bytes=2 * CELL_BYTES).start()
    assert other.store(prompt(1)).outcomes == [""]
    assert host.allocated_bytes == 3 * REGION_BYTES
    engine.world.answer(tier)
    assert engine.blocks_held(FITS) == 3 * CHUNK_BLOCKS
