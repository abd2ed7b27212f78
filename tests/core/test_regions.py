"""Regions come ahead of need, open when all workers of an engine have them, and go in order."""

from collections.abc import Iterator, Sequence

import pytest

from kvtide.core import messages as m
from kvtide.core.effects import FreeRegion, HostLimit, MakeRegion, Send, SendRegion
from kvtide.core.host import LEAVE_MS_MAX
from kvtide.core.leases import LEASE_MS
from kvtide.core.reasons import DropReason
from kvtide.units import KiB
from tests.core.world import CELL_BYTES, Engine, World, prompt

REGION_BYTES = 64 * KiB


@pytest.fixture
def world() -> World:
    """Room for four regions of four slots."""
    return World(host_bytes=4 * REGION_BYTES)


def fill(engine: Engine, first: int = 1, count: int = 16) -> None:
    for part in range(first, first + count):
        engine.world.now_ms += 1
        assert set(engine.store(prompt(part)).outcomes) == {""}


def bytes_of(world: World, engine: Engine) -> int:
    """Memory that the engine's layout has."""
    layout = world.machine.instances[engine.engine_id].layout
    assert layout is not None
    return sum(region.bytes for region in world.machine.host.of(layout))


def regions_of(world: World) -> list[int]:
    return list(world.machine.host.regions)


# ---- growing


def test_the_first_region_is_made_as_soon_as_the_engine_is_known(world: World) -> None:
    engine = Engine(world)
    engine.connect_scheduler()
    engine.connect_worker(0)
    assert not world.made
    effects = engine.identify()
    order = [effect for effect in effects if isinstance(effect, MakeRegion | SendRegion)]
    assert [type(effect) for effect in order] == [MakeRegion, SendRegion]
    assert order[1] == SendRegion(engine.workers[0], 100, 0, 16, CELL_BYTES)


def test_the_next_region_is_made_when_half_of_the_last_is_used(world: World) -> None:
    engine = Engine(world).start()
    engine.store(prompt(1, 2))
    assert len(world.made) == 1
    engine.store(prompt(3, blocks=1))
    assert len(world.made) == 2


def test_one_region_is_made_at_a_time(world: World) -> None:
    engine = Engine(world).start()
    world.holds_regions = True
    for part in range(1, 5):
        engine.store(prompt(part))
    assert len(world.making) == 1


def test_memory_ends_at_the_limit(world: World) -> None:
    engine = Engine(world).start()
    fill(engine, count=40)
    assert world.machine.host.allocated_bytes == 4 * REGION_BYTES


def test_a_host_that_gets_no_more_memory_stays_and_evicts(world: World) -> None:
    """The machine refuses the third region: a note, no more asking, and stores go on."""
    world.memory_cells = 2 * 16
    engine = Engine(world).start()
    fill(engine, count=20)
    assert world.machine.host.allocated_bytes == 2 * REGION_BYTES
    assert world.machine.lending.evicted["room"] == 12
    assert [note for note in world.notes() if "stays at 128 KiB" in note] == world.notes()
    assert len(world.notes()) == 1
    assert engine.blocks_held(prompt(20)) == 4


def test_a_refused_region_is_asked_for_again_when_the_limit_is_set_anew(world: World) -> None:
    world.memory_cells = 2 * 16
    engine = Engine(world).start()
    fill(engine)
    world.memory_cells = None
    world.give(HostLimit(world.machine.host.limit_bytes))
    assert world.machine.host.allocated_bytes == 3 * REGION_BYTES


def test_a_host_that_was_refused_its_first_region_asks_again(world: World) -> None:
    """Memory was short for a moment when the first engine came; ten seconds later it is not."""
    world.memory_cells = 0
    engine = Engine(world).start()
    assert world.machine.host.reachable_bytes == 0
    assert engine.offer(prompt(1)).outcomes == [DropReason.NOT_MAPPED]
    world.memory_cells = None
    world.tick(after_ms=9_999)
    assert engine.offer(prompt(1)).outcomes == [DropReason.NOT_MAPPED]
    world.tick(after_ms=1)
    assert engine.offer(prompt(1)).outcomes == [""]


def test_each_worker_gets_the_cells_of_its_own_shard() -> None:
    """Shards of unequal pages: three cell sizes, the same number of cells."""
    world = World(host_bytes=2048 * KiB)
    engine = Engine(world, workers=3)
    engine.cell_bytes = [CELL_BYTES, 2 * CELL_BYTES, 3 * CELL_BYTES]
    engine.start()
    for rank, cell_bytes in enumerate(engine.cell_bytes):
        (offer,) = world.offered[engine.workers[rank]]
        assert (offer.shard, offer.cell_bytes, offer.cell_count) == (rank, cell_bytes, 16)


def test_an_engine_of_the_same_layout_shares_the_regions(world: World) -> None:
    Engine(world).start()
    other = Engine(world, "other", model="another of the same shape").start()
    assert len(world.made) == 1
    assert other.offer(prompt(1)).outcomes == [""]


# ---- moving


def test_a_second_layout_reaches_half_the_memory() -> None:
    """The first had filled it; both engines live and answer."""
    world = World(host_bytes=16 * REGION_BYTES)
    first = Engine(world).start()
    fill(first, count=64)
    assert bytes_of(world, first) == 16 * REGION_BYTES
    second = Engine(world, "second", model="wide", cell_bytes=2 * CELL_BYTES).start()
    for part in range(1, 80):
        second.store(prompt(part))
        world.tick(after_ms=10)
    assert bytes_of(world, first) == bytes_of(world, second) == 8 * REGION_BYTES
    held = [part for part in range(1, 65) if first.blocks_held(prompt(part))]
    assert held == list(range(33, 65)), "what was used longest ago went"


def test_room_does_not_move_to_and_fro() -> None:
    """Two layouts store in turns for long: once both have half, no region moves."""
    world = World(host_bytes=16 * REGION_BYTES)
    engines = [Engine(world).start(), Engine(world, "other", chunk_blocks=2).start()]
    for part in range(1, 400):
        engines[part % 2].store(prompt(part))
        world.tick(after_ms=10)
        if part == 200:
            freed = list(world.freed)
    assert world.freed == freed
    shares = [bytes_of(world, engine) for engine in engines]
    assert min(shares) >= 7 * REGION_BYTES


def test_empty_regions_given_up_for_another_layout_are_not_made_again() -> None:
    """The first layout is full, and its newest region is empty: its worker is away. The second
    needs two regions at once; the first would take each one back as soon as it is free."""
    world = World(host_bytes=8 * REGION_BYTES)
    idle = Engine(world, "idle", model="idle", chunk_blocks=6).start()
    idle.kill_all()
    first = Engine(world).start()
    fill(first, count=16)
    world.holds_regions = True
    fill(first, first=30, count=4)
    first.disconnect(first.workers[0])
    world.holds_regions = False
    for event in world.make_regions():
        world.give(event)
    second = Engine(world, "second", model="wide", cell_bytes=2 * CELL_BYTES).start()
    made = max(world.machine.host.regions)
    for _ in range(20):
        world.tick(after_ms=100)
    assert max(world.machine.host.regions) == made
    first.connect_worker(0)
    assert bytes_of(world, second) == 2 * REGION_BYTES


def test_a_layout_whose_engine_has_gone_keeps_its_share(world: World) -> None:
    """Another engine fills the node; the first model's engine is started anew and hits."""
    world = World(host_bytes=16 * REGION_BYTES)
    first = Engine(world).start()
    fill(first, count=64)
    first.kill_all()
    second = Engine(world, "second", model="wide", cell_bytes=2 * CELL_BYTES).start()
    for part in range(1, 80):
        second.store(prompt(part))
    again = Engine(world, "again").start()
    assert sum(again.blocks_held(prompt(part)) for part in range(1, 65)) == 32 * 4


def test_fresh_stores_are_worth_as_much_as_hits(world: World) -> None:
    """The region given up is not the one that was just written to."""
    first = Engine(world).start()
    fill(first)
    world.now_ms += 10
    assert first.blocks_held(prompt(1)) == 4
    world.now_ms += 10
    newest = first.store(prompt(17)).runs[0].region
    world.give(HostLimit(3 * REGION_BYTES))
    assert newest in regions_of(world)
    assert first.blocks_held(prompt(17)) == 4


# ---- going back


def gone(effects: Sequence[object]) -> Iterator[str]:
    """What was done about regions that leave, in order."""
    for effect in effects:
        if isinstance(effect, Send) and isinstance(effect.message, m.RegionLeave):
            yield f"tell {effect.connection}"
        elif isinstance(effect, FreeRegion):
            yield "free"


def test_a_lower_limit_gives_regions_back_one_after_the_other(world: World) -> None:
    """Evicted, workers told, left, freed: then the next, until it fits."""
    engine = Engine(world).start()
    fill(engine)
    effects = world.give(HostLimit(2 * REGION_BYTES))
    assert list(gone(effects)) == [f"tell {engine.workers[0]}", "free"] * 2
    assert world.machine.host.allocated_bytes == 2 * REGION_BYTES
    assert world.machine.lending.evicted["moved"] == 8
    assert [bool(engine.blocks_held(prompt(part))) for part in (1, 8, 9, 16)] == [
        False,
        False,
        True,
        True,
    ]
    fill(engine, first=20)
    assert world.machine.host.allocated_bytes == 2 * REGION_BYTES


def test_the_memory_is_not_freed_while_a_worker_has_it(world: World) -> None:
    """Told to leave, it says nothing, for an hour; its connection ends; then it dies."""
    engine = Engine(world).start()
    fill(engine)
    engine.leaves = False
    world.give(HostLimit(3 * REGION_BYTES))
    for _ in range(60):
        world.tick(after_ms=60_000)
    engine.disconnect(engine.workers[0])
    world.tick(after_ms=60_000)
    assert not world.freed
    engine.kill(engine.workers[0])
    assert len(world.freed) == 1


def test_a_worker_that_was_told_leaves_late(world: World) -> None:
    engine = Engine(world).start()
    fill(engine)
    engine.leaves = False
    world.give(HostLimit(3 * REGION_BYTES))
    assert not world.freed
    region = world.inbox[engine.workers[0]][-1].region
    engine.mapped[0].discard(region)
    engine.tell(0, m.RegionLeft(region))
    assert world.freed == [region]


def test_a_worker_that_comes_back_with_the_region_is_told_again(world: World) -> None:
    """The word was lost with the connection."""
    engine = Engine(world).start()
    fill(engine)
    engine.leaves = False
    world.give(HostLimit(3 * REGION_BYTES))
    engine.disconnect(engine.workers[0])
    engine.leaves = True
    engine.connect_worker(0)
    assert len(world.freed) == 1


def test_a_worker_that_comes_back_without_the_region_has_left_it(world: World) -> None:
    engine = Engine(world).start()
    fill(engine)
    engine.leaves = False
    world.give(HostLimit(3 * REGION_BYTES))
    region = world.inbox[engine.workers[0]][-1].region
    engine.disconnect(engine.workers[0])
    engine.mapped[0].discard(region)
    engine.connect_worker(0)
    assert world.freed == [region]


def test_an_offer_lost_with_a_connection_is_made_again(world: World) -> None:
    engine = Engine(world)
    engine.maps = False
    engine.start()
    engine.disconnect(engine.workers[0])
    engine.maps = True
    engine.connect_worker(0)
    assert engine.offer(prompt(1)).outcomes == [""]


def test_a_region_that_a_worker_was_mapping_is_open_when_it_is_back_with_it(
    world: World,
) -> None:
    """The acknowledgement was lost, the hello names the region."""
    engine = Engine(world)
    engine.maps = False
    engine.start()
    engine.disconnect(engine.workers[0])
    engine.connect_worker(0, regions_mapped=[100])
    assert engine.offer(prompt(1)).outcomes == [""]


def test_nothing_leaves_while_it_is_lent(world: World) -> None:
    """A store is being written into the region that must go."""
    engine = Engine(world).start()
    fill(engine, count=15)
    (grant,) = engine.offer(prompt(50)).grants
    for part in range(1, 16):
        world.now_ms += 1
        engine.blocks_held(prompt(part))
    region = world.machine.lending.grants[grant].entry.region
    world.machine.host.regions[region].used_ms = 0
    effects = world.give(HostLimit(3 * REGION_BYTES)) + world.tick(after_ms=60_000)
    assert list(gone(effects)) == [], "or the worker would unmap what it is writing to"
    engine.stored([grant])
    world.tick()
    assert world.freed == [region]
    assert engine.blocks_held(prompt(50)) == 0


def test_nothing_leaves_while_it_is_leased_or_read(world: World) -> None:
    """A load of a chain runs, the first chunk of which lies in the region that must go."""
    engine = Engine(world).start()
    engine.store(prompt(1))
    fill(engine, first=2, count=14)
    engine.store(prompt(1, 20))
    match = engine.lookup(prompt(1, 20), keeps=True)
    assert isinstance(match, m.Match)
    first, last = (run.region for run in match.runs)
    assert first != last
    engine.say(m.LoadBegin(match.lease))
    world.machine.host.regions[first].used_ms = 0
    effects = world.give(HostLimit(3 * REGION_BYTES)) + world.tick(after_ms=LEASE_MS)
    assert list(gone(effects)) == []
    assert engine.blocks_held(prompt(1)) == 0, "nobody new gets it"
    engine.say(m.LoadEnd(match.lease, 8))
    world.tick()
    assert world.freed == [first]


def test_a_worker_that_hangs_holds_up_no_other_engine(world: World) -> None:
    """Stopped in a debugger, it is asked for its region. Ten seconds later the next must go."""
    hung = Engine(world, "hung").start()
    fill(hung, count=8)
    other = Engine(world, "other", model="wide", chunk_blocks=2).start()
    fill(other, count=8)
    hung.leaves = False
    for region in world.machine.host.regions.values():
        region.used_ms = region.number
    freed = len(world.freed)
    world.give(HostLimit(world.machine.host.allocated_bytes - 1))
    world.tick(after_ms=LEAVE_MS_MAX - 1)
    assert len(world.freed) == freed
    world.tick(after_ms=1)
    assert len(world.freed) == freed + 1
    assert other.blocks_held(prompt(8)) > 0
    assert hung.blocks_held(prompt(8)) > 0


def test_cells_of_a_region_that_leaves_are_not_lent(world: World) -> None:
    engine = Engine(world).start()
    fill(engine)
    engine.leaves = False
    world.give(HostLimit(3 * REGION_BYTES))
    region = world.inbox[engine.workers[0]][-1].region
    lent_in = {engine.store(prompt(part)).runs[0].region for part in range(30, 60)}
    assert region not in lent_in


def test_a_worker_may_leave_a_region_without_being_told(world: World) -> None:
    """Its mapping broke, say: nothing is lent there until it has it again."""
    engine = Engine(world).start()
    engine.store(prompt(1))
    engine.maps = False
    engine.mapped[0].clear()
    engine.tell(0, m.RegionLeft(100))
    assert engine.offer(prompt(2)).outcomes == [DropReason.NOT_MAPPED]
    engine.tell(0, m.RegionOpen(100))
    assert engine.offer(prompt(2)).outcomes == [""]


@pytest.mark.parametrize("word", [m.RegionOpen, m.RegionLeft])
def test_words_about_regions_that_are_none_change_nothing(world: World, word: type) -> None:
    engine = Engine(world).start()
    engine.tell(0, word(12345))
    engine.tell(0, m.RegionFailed(12345, "what?"))
    assert engine.offer(prompt(1)).outcomes == [""]


# ---- a node after another


def test_nothing_is_granted_until_the_old_nodes_regions_are_let_go() -> None:
    """The node crashed; this one is new, and a worker still has memory of the old one mapped."""
    world = World()
    engine = Engine(world, workers=2)
    engine.connect_scheduler()
    engine.connect_worker(0, node=b"the old node", regions_mapped=[7, 8])
    engine.connect_worker(1)
    engine.identify()
    engine.register(engine.root)
    assert engine.offer(prompt(1)).outcomes == [DropReason.NOT_MAPPED]
    for region in (7, 8):
        assert not world.offered
        engine.tell(0, m.RegionLeft(region))
    assert engine.offer(prompt(1)).outcomes == [""]
