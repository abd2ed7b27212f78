"""Room for stores: what is evicted for them, and which tails make way by themselves."""

import itertools

import pytest

from kvtide.core import lending as lending_module
from kvtide.core import messages as m
from kvtide.core.host import MAP_MS_MAX
from kvtide.core.lending import HELD
from kvtide.core.reasons import DropReason, EvictCause
from kvtide.units import KiB
from tests.core.test_lending import at_rest, engine_of
from tests.core.world import Engine, World, prompt


@pytest.fixture
def world() -> World:
    return World()


# ---- room


def small_world() -> World:
    """Four regions of four slots, all of one layout after the first sixteen stores."""
    return World(host_bytes=256 * KiB)


def test_a_full_host_evicts_what_was_used_longest_ago() -> None:
    """Sixteen slots; the first is looked up before the seventeenth is stored."""
    world = small_world()
    engine = engine_of(world)
    for part in range(16):
        world.now_ms += 10
        assert engine.store(prompt(part + 1)).outcomes == [""]
    world.now_ms += 10
    assert engine.blocks_held(prompt(1)) == 4
    world.now_ms += 10
    assert engine.store(prompt(17)).outcomes == [""]
    assert [engine.blocks_held(prompt(part)) for part in (1, 2, 3, 17)] == [4, 0, 4, 4]
    assert world.machine.lending.evicted[EvictCause.ROOM] == 1


def test_what_is_evicted_is_a_leaf() -> None:
    """The oldest chain loses its end first, and stays whole up to there."""
    world = small_world()
    engine = engine_of(world)
    chain = prompt(1, 2, 3, 4)
    for length in range(1, 5):
        engine.store(chain[: 8 * length])
    for part in range(10, 24):
        world.now_ms += 10
        engine.store(prompt(part))
    assert 0 < engine.blocks_held(chain) < 16


def test_the_chunk_that_is_stored_behind_is_not_evicted_for_it() -> None:
    """One chain of seventeen chunks in sixteen slots: the end is dropped, nothing breaks."""
    world = small_world()
    engine = engine_of(world)
    chain = prompt(*range(1, 19))
    for length in range(1, 17):
        engine.store(chain[: 8 * length])
    answer = engine.store(chain)
    assert answer.outcomes == [HELD] * 16 + [DropReason.NO_MEMORY] * 2
    assert engine.blocks_held(chain) == 64


def test_what_is_dropped_drops_all_behind_it_for_the_same_reason() -> None:
    world = World(host_bytes=256 * KiB)
    engine = engine_of(world)
    answer = engine.offer(prompt(1, 2, 3, 4, 5, 6))
    assert answer.outcomes == ["", "", "", "", DropReason.QUEUE_FULL, DropReason.QUEUE_FULL]


def test_no_more_than_a_few_entries_are_evicted_for_one_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Tails fill every slot, none may go as a whole: an offer still ends in bounded time."""
    monkeypatch.setattr(lending_module, "EVICTIONS_MAX", 3)
    world = small_world()
    engine = engine_of(world)
    for part in range(64):
        world.now_ms += 1
        assert engine.store(prompt(part + 1, blocks=1)).outcomes == [""]
    assert world.lent_cells() == 64
    for rank in range(0, 64, 4):
        engine.lookup(prompt(rank + 1, blocks=1), keeps=True)  # one tail of each slot is leased
    assert engine.offer(prompt(99)).outcomes == [DropReason.NO_MEMORY]
    assert world.machine.lending.evicted[EvictCause.ROOM] == 3


def test_nothing_is_evicted_while_fresh_memory_is_on_its_way() -> None:
    world = small_world()
    engine = engine_of(world)
    world.holds_regions = True
    for part in range(1, 5):
        engine.store(prompt(part))
    assert world.making
    assert engine.offer(prompt(5)).outcomes == [DropReason.NO_MEMORY]
    assert [engine.blocks_held(prompt(part)) for part in range(1, 5)] == [4, 4, 4, 4]
    for event in world.make_regions():
        world.give(event)
    assert engine.offer(prompt(5)).outcomes == [""]


def test_nothing_is_evicted_while_fresh_memory_is_being_mapped() -> None:
    """It is made, and the worker has it in a moment; once it takes too long, room is made."""
    world = small_world()
    engine = engine_of(world)
    engine.maps = False
    for part in range(1, 5):
        engine.store(prompt(part))
    assert len(world.made) == 2
    assert engine.offer(prompt(5)).outcomes == [DropReason.NO_MEMORY]
    world.tick(after_ms=MAP_MS_MAX - 1)
    assert engine.offer(prompt(5)).outcomes == [DropReason.NO_MEMORY]
    world.tick(after_ms=1)
    assert engine.offer(prompt(5)).outcomes == [""]
    assert engine.blocks_held(prompt(1)) == 0
    engine.map_now()
    assert engine.offer(prompt(6)).outcomes == [""]
    assert engine.blocks_held(prompt(2)) == 4


def test_an_engine_evicts_only_what_it_can_write_to() -> None:
    """Both have one layout; one of them has mapped only the first of two regions."""
    world = World(host_bytes=256 * KiB)
    engine = engine_of(world)
    late = engine_of(world, "late")
    late.maps = False
    for part in range(1, 17):
        world.now_ms += 10
        engine.store(prompt(part))
    world.tick(after_ms=MAP_MS_MAX)
    assert late.offer(prompt(20)).outcomes == [""]
    assert engine.blocks_held(prompt(1)) == 0, "the first region's, used longest ago"
    for part in range(2, 17):
        assert engine.blocks_held(prompt(part)) == 4


def test_older_leaves_that_an_engine_cannot_use_are_in_nobodys_way() -> None:
    """More than it looks at for one run lie in regions that it has not mapped; later ones do."""
    world = World(host_bytes=128 * 64 * KiB)
    engine = engine_of(world)
    late = engine_of(world, "late")
    for part in range(1, 513):
        world.now_ms += 10
        engine.store(prompt(part))
    first = engine.lookup(prompt(1))
    assert isinstance(first, m.Match)
    world.tick(after_ms=MAP_MS_MAX)
    for part in range(1, 17):
        world.now_ms += 10
        assert engine.blocks_held(prompt(part)) == 4, "the first region's are the youngest"
    for region in world.machine.host.regions:
        if region != first.runs[0].region:
            late.mapped[0].discard(region)
            late.maps = False
            late.tell(0, m.RegionLeft(region))
    for part in range(1, 9):
        assert late.store(prompt(1_000 + part)).outcomes == [""]


def test_an_engine_without_any_open_region_is_told_so(world: World) -> None:
    engine = Engine(world)
    engine.maps = False
    engine.start()
    assert engine.offer(prompt(1)).outcomes == [DropReason.NOT_MAPPED]


# ---- tails


def test_a_tail_goes_when_what_begins_with_it_becomes_visible(world: World) -> None:
    """Three turns of a chat: two tails, then the whole chunk."""
    engine = engine_of(world)
    for blocks in (1, 3, 4):
        engine.store(prompt(1, blocks=blocks))
        assert len(world.machine.index.entries) == 1
        assert world.lent_cells() == blocks
    assert world.machine.lending.evicted["superseded"] == 2


def test_a_tail_that_is_being_loaded_goes_when_nobody_holds_it(world: World) -> None:
    engine = engine_of(world)
    engine.store(prompt(1, blocks=2))
    match = engine.lookup(prompt(1), keeps=True)
    assert isinstance(match, m.Match)
    engine.store(prompt(1))
    assert world.lent_cells() == 6
    engine.say(m.LoadBegin(match.lease))
    assert world.lent_cells() == 6
    engine.say(m.LoadEnd(match.lease, 2))
    assert world.lent_cells() == 4


@pytest.mark.parametrize("order", list(itertools.permutations((1, 2, 4))))
def test_tails_that_become_superfluous_together_go_once(
    world: World, order: tuple[int, ...]
) -> None:
    """A chunk, two tails and the whole behind it: all are copied before the first is."""
    engine = engine_of(world)
    (first,) = engine.offer(prompt(1)).grants
    for blocks in order:
        engine.stored(engine.offer(prompt(1, 2, blocks=blocks)).grants)
    engine.stored([first])
    assert engine.blocks_held(prompt(1, 2)) == 8
    assert world.lent_cells() == 8
    at_rest(world)


def test_a_tail_copied_after_the_whole_goes_at_once(world: World) -> None:
    engine = engine_of(world)
    (tail,) = engine.offer(prompt(1, blocks=3)).grants
    engine.store(prompt(1))
    engine.stored([tail])
    assert world.lent_cells() == 4
    at_rest(world)


# ---- clear


def test_cleared_chunks_are_gone_and_their_writers_are_waited_for(world: World) -> None:
    engine = engine_of(world)
    engine.store(prompt(1, 2))
    (grant,) = engine.offer(prompt(1, 3)).grants
    assert world.machine.clear(None) == 3
    assert world.lent_cells() == 4
    assert engine.blocks_held(prompt(1, 3)) == 0
    engine.stored([grant])
    at_rest(world)
    assert engine.blocks_held(prompt(1, 3)) == 0
