"""Regions that a worker could not map: they are no room, are offered again, and may go back."""

import pytest

from kvtide.core import messages as m
from kvtide.core.host import REFUSED_REGIONS_MAX
from kvtide.core.reasons import DropReason
from kvtide.core.regions import CLOSED_MS_MAX
from tests.core.world import Engine, World, prompt


@pytest.fixture
def world() -> World:
    return World()


def offers_of(engine: Engine, region: int, rank: int = 0) -> int:
    offers = engine.world.offered.get(engine.workers[rank], [])
    return [offer.region for offer in offers].count(region)


def test_a_region_is_not_offered_again_at_once_to_a_worker_that_cannot_map_it(
    world: World,
) -> None:
    """It refused: the engine does without for now, others do not."""
    engine = Engine(world, workers=1)
    engine.maps = False
    engine.start()
    (offer,) = world.offered[engine.workers[0]]
    engine.tell(0, m.RegionFailed(offer.region, "no locked memory left " * 100))
    other = Engine(world, "other").start()
    assert offers_of(engine, offer.region) == 1
    assert engine.offer(prompt(1)).outcomes == [DropReason.NOT_MAPPED]
    assert other.offer(prompt(1)).outcomes == [""]
    assert "cannot map region 100: no locked memory" in world.notes()[0]
    assert len(world.notes()[0]) <= 500


def test_a_region_that_a_worker_could_not_map_is_offered_again_later(world: World) -> None:
    """Ten seconds later, then after twenty; at the third time it is mapped, and serves."""
    engine = Engine(world)
    engine.maps = False
    engine.start()
    for pause_ms in (10_000, 20_000):
        engine.refuse_now()
        world.tick(after_ms=pause_ms - 1)
        assert not engine.to_map[0]
        world.tick(after_ms=1)
        assert 100 in engine.to_map[0]
    engine.map_now()
    assert not world.machine.host.regions[100].refused
    assert engine.offer(prompt(1)).outcomes == [""]


def test_a_worker_that_is_back_is_offered_what_it_could_not_map(world: World) -> None:
    engine = Engine(world)
    engine.maps = False
    engine.start()
    engine.refuse_now()
    engine.maps = True
    engine.connect_worker(0)
    assert engine.offer(prompt(1)).outcomes == [""]


def test_another_region_is_made_for_one_that_a_worker_cannot_map(world: World) -> None:
    """Its free cells are none of the engine's."""
    engine = Engine(world)
    engine.maps = False
    engine.start()
    engine.tell(0, m.RegionFailed(engine.to_map[0].pop(), "this one is broken"))
    assert engine.to_map[0] == [101]
    engine.map_now()
    assert engine.offer(prompt(1)).outcomes == [""]


def test_where_a_worker_maps_nothing_no_more_than_two_regions_are_made(world: World) -> None:
    engine = Engine(world)
    engine.maps = False
    engine.start()
    for _ in range(9):
        engine.refuse_now()
        world.tick(after_ms=1_000)
    assert len(world.made) == REFUSED_REGIONS_MAX


def test_a_region_that_nobody_can_map_goes_back(world: World) -> None:
    """One of two workers refuses again and again: the memory is of no use to anybody."""
    engine = Engine(world, workers=2)
    engine.maps = False
    engine.start()
    for second in range(CLOSED_MS_MAX // 1_000 + 1):
        engine.map_now(0)
        engine.refuse_now(1)
        assert second == 0 or not world.freed
        world.tick(after_ms=1_000)
    assert 100 in world.freed
    engine.map_now(0)
    engine.map_now(1)
    assert engine.offer(prompt(1)).outcomes == [""]


def test_a_region_that_another_engine_uses_does_not_go_back(world: World) -> None:
    engine = Engine(world)
    engine.maps = False
    engine.start()
    other = Engine(world, "other").start()
    other.store(prompt(1))
    for _ in range(2 * CLOSED_MS_MAX // 1_000):
        engine.refuse_now()
        world.tick(after_ms=1_000)
    assert other.blocks_held(prompt(1)) == 4


def test_a_region_that_was_being_mapped_is_not_open_when_its_worker_is_back(world: World) -> None:
    """It is still being populated, which then fails: nobody was ever told to use it."""
    engine = Engine(world)
    engine.maps = False
    engine.start()
    engine.disconnect(engine.workers[0])
    engine.connect_worker(0, mapping=1)
    assert engine.offer(prompt(1)).outcomes == [DropReason.NOT_MAPPED]
    assert offers_of(engine, 100) == 0, "it has it already"
    engine.tell(0, m.RegionFailed(100, "no memory"))
    assert engine.offer(prompt(1)).outcomes == [DropReason.NOT_MAPPED]
    world.tick(after_ms=10_000)
    engine.map_now()
    assert engine.offer(prompt(1)).outcomes == [""]


def test_a_region_that_failed_after_it_was_open_is_open_no_more(world: World) -> None:
    engine = Engine(world).start()
    engine.store(prompt(1))
    engine.maps = False
    engine.mapped[0].clear()
    engine.tell(0, m.RegionFailed(100, "lost it"))
    assert engine.offer(prompt(2)).outcomes == [DropReason.NOT_MAPPED]
