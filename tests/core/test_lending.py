"""Grants: cells are lent, answered by every writer, and come back whatever happens."""

import tracemalloc

import pytest

from kvtide.core import messages as m
from kvtide.core.lending import HELD
from kvtide.core.reasons import DropReason
from kvtide.units import KiB
from tests.core.world import CHUNK_BYTES, Engine, World, prompt


@pytest.fixture
def world() -> World:
    return World()


def engine_of(world: World, name: str = "engine", workers: int = 1, **more: object) -> Engine:
    return Engine(world, name, workers=workers, **more).start()  # type: ignore[arg-type]


def at_rest(world: World) -> None:
    """Nothing is lent for writing, and what is not held is free."""
    lending = world.machine.lending
    assert not lending.grants
    assert not lending.loose
    assert lending.granted_bytes == 0
    held = sum(entry.blocks for entry in world.machine.index.entries.values())
    assert world.lent_cells() == held


# ---- granted together, visible together


def test_a_grant_names_one_run_for_all_shards_and_the_writers_connections(world: World) -> None:
    """Two workers, two shards: the same cells in the regions of both."""
    engine = engine_of(world, workers=2)
    answer = engine.offer(prompt(1, 2, blocks=1))
    assert answer.outcomes == ["", ""]
    assert [run.cell_count for run in answer.runs] == [4, 1]
    assert answer.connections == engine.workers


def test_generations_are_raised_before_the_grant_is_told(world: World) -> None:
    """Effects are done in order: no worker can write into cells that still count as another's."""
    engine = engine_of(world)
    before = len(world.log)
    answer = engine.offer(prompt(1, 2))
    kinds = [type(effect).__name__ for effect in world.log[before:]]
    assert kinds == ["SetGenerations", "SetGenerations", "Send"]
    for run in answer.runs:
        for cell in range(run.first_cell, run.end_cell):
            assert world.generations[run.region, cell] == run.generation


def test_a_chunk_is_visible_only_when_every_writer_has_answered(world: World) -> None:
    engine = engine_of(world, workers=3)
    (grant,) = engine.offer(prompt(1)).grants
    for rank in range(3):
        assert engine.blocks_held(prompt(1)) == 0
        engine.stored([grant], ranks=[rank])
    assert engine.blocks_held(prompt(1)) == 4
    at_rest(world)


def test_one_failed_shard_fails_the_chunk_and_all_behind_it(world: World) -> None:
    """Three chunks; the second fails on one worker of two. The first stays."""
    engine = engine_of(world, workers=2)
    grants = engine.offer(prompt(1, 2, 3)).grants
    engine.stored(grants[:1])
    engine.stored(grants[1:2], ok=False, ranks=[1])
    engine.stored(grants[2:])
    assert engine.blocks_held(prompt(1, 2, 3)) == 4
    engine.stored(grants[1:2], ranks=[0])
    assert engine.blocks_held(prompt(1, 2, 3)) == 4
    at_rest(world)


def test_cells_of_a_failed_chunk_stay_lent_until_the_other_writer_has_answered(
    world: World,
) -> None:
    """It may still be copying; the cells must not be another's meanwhile."""
    engine = engine_of(world, workers=2)
    (grant,) = engine.offer(prompt(1)).grants
    engine.stored([grant], ok=False, ranks=[0])
    assert world.lent_cells() == 4
    engine.stored([grant], ranks=[1])
    assert world.lent_cells() == 0


def test_an_answer_counts_once_and_only_from_a_writer(world: World) -> None:
    """Twice by one worker, by another engine's worker, for a grant that never was."""
    engine, other = engine_of(world, workers=2), engine_of(world, "other", workers=2)
    (grant,) = engine.offer(prompt(1)).grants
    engine.stored([grant, grant], ranks=[0])
    other.stored([grant, grant + 1])
    assert engine.blocks_held(prompt(1)) == 0
    engine.stored([grant], ranks=[1])
    assert engine.blocks_held(prompt(1)) == 4
    engine.stored([grant], ok=False)
    assert engine.blocks_held(prompt(1)) == 4, "answered is answered"


def test_a_replica_loads_but_does_not_store(world: World) -> None:
    """One shard, two ranks (MLA): the chunk is visible when its one writer has answered."""
    engine = engine_of(world, workers=2, shards=1)
    answer = engine.offer(prompt(1))
    assert answer.connections == engine.workers[:1]
    engine.stored(answer.grants, ranks=[1])
    assert engine.blocks_held(prompt(1)) == 0
    engine.stored(answer.grants, ranks=[0])
    assert engine.blocks_held(prompt(1)) == 4


# ---- behind one another


def test_a_run_behind_a_storing_one_becomes_visible_after_it(world: World) -> None:
    """The second turn of a chat is offered while the first is still being copied."""
    engine = engine_of(world)
    (first,) = engine.offer(prompt(1)).grants
    answer = engine.offer(prompt(1, 2))
    assert answer.outcomes == [DropReason.IN_FLIGHT, ""]
    engine.stored(answer.grants)
    assert engine.blocks_held(prompt(1, 2)) == 0
    engine.stored([first])
    assert engine.blocks_held(prompt(1, 2)) == 8


def test_a_run_behind_a_storing_one_fails_with_it(world: World) -> None:
    """Also when it was copied long before, and when another engine copied it."""
    engine, other = engine_of(world), engine_of(world, "other")
    (first,) = engine.offer(prompt(1)).grants
    other.stored(other.offer(prompt(1, 2)).grants)
    engine.offer(prompt(1, 2, 3))
    engine.stored([first], ok=False)
    assert engine.blocks_held(prompt(1, 2, 3)) == 0
    assert len(world.machine.lending.grants) == 1, "the third chunk is still being written"
    engine.stored(world.machine.lending.grants.copy())
    at_rest(world)


def test_a_chunk_that_is_being_stored_is_not_granted_twice(world: World) -> None:
    engine, other = engine_of(world), engine_of(world, "other")
    engine.offer(prompt(1))
    assert other.offer(prompt(1)).outcomes == [DropReason.IN_FLIGHT]


def test_a_chunk_that_is_held_is_not_stored_again(world: World) -> None:
    """The offer goes on behind it."""
    engine = engine_of(world)
    engine.store(prompt(1))
    answer = engine.store(prompt(1, 2))
    assert answer.outcomes == [HELD, ""]
    assert engine.blocks_held(prompt(1, 2)) == 8


@pytest.mark.parametrize("parent", ["nobody", "a tail", "evicted", "a root of others"])
def test_a_store_that_hangs_on_nothing_is_dropped(world: World, parent: str) -> None:
    """All of the offer: what is behind a hole could never be found."""
    engine = engine_of(world)
    tokens = prompt(1, 2, 3)
    chunk_keys, digests = engine.chain(tokens)
    key = {"nobody": bytes(32), "a tail": b"", "evicted": chunk_keys[0], "a root of others": b""}[
        parent
    ]
    if parent == "a tail":
        engine.store(prompt(9, blocks=2))
        key = engine.chain(prompt(9, blocks=2))[0][0]
    elif parent == "evicted":
        engine.store(prompt(1))
        world.machine.clear(None)
    elif parent == "a root of others":
        key = Engine(world, "other", model="other").start().root
    engine.say(m.StoreOffer(7, engine.root, key, chunk_keys[1:], digests[1:]))
    answer = engine.last(m.StoreAnswer)
    assert answer.outcomes == [DropReason.NOT_ANCHORED] * 2
    assert (answer.grants, answer.runs) == ([], [])
    at_rest(world)


def test_a_tail_inside_something_held_is_not_stored(world: World) -> None:
    engine = engine_of(world)
    engine.store(prompt(1, 2))
    assert engine.offer(prompt(1, 2, blocks=3)).outcomes == [HELD, HELD]


# ---- returned, died, silent, reconnected


def test_a_grant_that_was_never_planned_is_returned(world: World) -> None:
    """Its cells come back at once, and what was granted behind it fails."""
    engine = engine_of(world, workers=2)
    first, second = engine.offer(prompt(1, 2)).grants
    engine.say(m.GrantReturn([first]))
    assert world.lent_cells() == 4
    engine.stored([second])
    assert engine.blocks_held(prompt(1, 2)) == 0
    engine.say(m.GrantReturn([first, 999]))
    at_rest(world)
    lending = world.machine.lending
    assert (lending.stored_blocks, lending.failed_blocks) == (0, 4)  # of the second alone


def test_what_was_copied_behind_a_chunk_that_fails_was_never_stored(world: World) -> None:
    """The first chunk is an engine's that dies; another has copied the second behind it."""
    dying, lively = engine_of(world, "dying"), engine_of(world, "lively")
    dying.offer(prompt(1))
    lively.stored(lively.offer(prompt(1, 2)).grants)
    lending = world.machine.lending
    assert (lending.stored_blocks, lending.failed_blocks) == (0, 0), "not found yet"
    dying.kill_all()
    assert lively.blocks_held(prompt(1, 2)) == 0
    assert (lending.stored_blocks, lending.failed_blocks) == (0, 8)
    at_rest(world)


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0)])
def test_what_is_copied_in_any_order_is_stored_once_it_is_found(
    world: World, order: tuple[int, ...]
) -> None:
    engine = engine_of(world)
    grants = engine.offer(prompt(1, 2, 3)).grants
    for position in order:
        engine.stored([grants[position]])
        assert world.machine.lending.stored_blocks == engine.blocks_held(prompt(1, 2, 3))
    assert world.machine.lending.stored_blocks == 12
    assert world.machine.lending.failed_blocks == 0


def test_an_engine_cannot_return_the_grant_of_another(world: World) -> None:
    engine, other = engine_of(world), engine_of(world, "other")
    grants = engine.offer(prompt(1)).grants
    other.say(m.GrantReturn(grants))
    engine.stored(grants)
    assert engine.blocks_held(prompt(1)) == 4


def test_grants_of_a_dead_worker_fail_and_their_cells_come_back(world: World) -> None:
    """Its pidfd proves that it writes no more. The other worker must still answer."""
    engine = engine_of(world, workers=2)
    grants = engine.offer(prompt(1, 2)).grants
    engine.stored(grants[:1], ranks=[1])
    engine.kill(engine.workers[0])
    assert world.lent_cells() == 4, "rank 1 has not answered for the second"
    engine.stored(grants[1:], ranks=[1])
    at_rest(world)
    assert not world.machine.index.entries


def test_grants_of_a_silent_worker_stay_lent(world: World) -> None:
    """Its connection ended; it may be writing. No deadline proves anything: an hour passes."""
    engine = engine_of(world)
    engine.offer(prompt(1, 2))
    engine.disconnect(engine.workers[0])
    for _ in range(60):
        world.tick(after_ms=60_000)
    assert world.lent_cells() == 8
    assert world.machine.lending.granted_bytes == 2 * CHUNK_BYTES


def test_quarantine_counts_against_the_queue_of_its_own_engine(world: World) -> None:
    """A hung worker holds as much as its engine's queue allows; then others still store."""
    engine = engine_of(world, step_tokens=0)
    hung, granted = engine_of(world, "hung"), 0
    for part in range(1, 40):
        granted += len(hung.offer(prompt(part)).grants)
    assert granted * CHUNK_BYTES == world.machine.lending.granted_bytes == 256 * KiB
    hung.disconnect(hung.workers[0])
    hung.connect_worker(0, grants_held=list(world.machine.lending.grants))
    assert hung.offer(prompt(50)).outcomes == [DropReason.QUEUE_FULL]
    for part in range(60, 80):
        assert engine.store(prompt(part)).outcomes == [""]
    outcomes = [engine.offer(prompt(part)).outcomes[0] for part in range(80, 90)]
    assert outcomes == [""] * 6 + [DropReason.QUEUE_FULL] * 4, "a tenth of the host, its own"
    hung.kill(hung.workers[0])
    assert world.machine.lending.granted_bytes == 6 * CHUNK_BYTES


def test_engines_with_large_steps_leave_something_to_the_next(world: World) -> None:
    """Each may have half of what is left of half the host; the last of many, one chunk."""
    engines = [engine_of(world, f"engine {number}") for number in range(7)]
    granted = []
    for number, engine in enumerate(engines):
        outcomes = [engine.offer(prompt(100 * number + part)).outcomes[0] for part in range(1, 20)]
        granted.append(outcomes.count(""))
        assert set(outcomes[granted[-1] :]) == {DropReason.QUEUE_FULL}
    assert granted == [16, 8, 4, 2, 1, 1, 1]


@pytest.mark.parametrize(
    ("step_tokens", "chunks"),
    [
        (0, 6),  # a tenth of the host: 102 KiB
        (72, 9),  # one step of the engine
        (1_000_000, 16),  # a quarter of the host
    ],
)
def test_the_queue_is_a_tenth_of_the_host_or_a_step_and_at_most_a_quarter(
    world: World, step_tokens: int, chunks: int
) -> None:
    engine = engine_of(world, step_tokens=step_tokens)
    outcomes = [engine.offer(prompt(part)).outcomes[0] for part in range(1, 30)]
    assert outcomes == [""] * chunks + [DropReason.QUEUE_FULL] * (29 - chunks)


def test_a_worker_that_is_back_names_what_it_may_still_write(world: World) -> None:
    """Of three grants it holds the second: the others can never be written, and come back."""
    engine = engine_of(world)
    engine.stored(engine.offer(prompt(9)).grants)
    grants = [engine.offer(prompt(part)).grants[0] for part in (1, 2, 3)]
    engine.disconnect(engine.workers[0])
    assert world.lent_cells() == 16
    engine.connect_worker(0, grants_held=[grants[1]])
    assert world.lent_cells() == 8
    engine.stored([grants[1]])
    assert [engine.blocks_held(prompt(part)) for part in (9, 1, 2, 3)] == [4, 0, 4, 0]


def test_a_worker_that_held_grants_of_another_node_holds_none_of_this_one(world: World) -> None:
    """Numbers of an older node's grants may be those of ours."""
    engine = engine_of(world)
    grants = engine.offer(prompt(1)).grants
    engine.disconnect(engine.workers[0])
    engine.connect_worker(0, grants_held=grants, node=b"an older node", regions_mapped=[])
    at_rest(world)


def test_a_grant_carries_the_number_of_the_new_connection(world: World) -> None:
    engine = engine_of(world)
    engine.disconnect(engine.workers[0])
    engine.connect_worker(0)
    assert engine.offer(prompt(1)).connections == engine.workers


def test_nothing_is_granted_while_a_worker_is_away(world: World) -> None:
    engine = engine_of(world, workers=2)
    engine.disconnect(engine.workers[1])
    assert engine.offer(prompt(1)).outcomes == [DropReason.NOT_MAPPED]


def test_grants_that_were_lost_with_a_connection_come_back(world: World) -> None:
    """The scheduler got the first answer, not the second, and says so when it is back."""
    engine = engine_of(world)
    first, second = (engine.offer(prompt(part)).grants[0] for part in (1, 2))
    engine.disconnect(engine.scheduler)
    assert world.lent_cells() == 8, "both may have been planned"
    engine.connect_scheduler(last_grant=first)
    assert list(world.machine.lending.grants) == [first]
    assert second not in world.machine.lending.grants
    engine.stored([first])
    engine.identify()
    engine.register(engine.root)
    assert engine.blocks_held(prompt(1)) == 4


def test_grants_of_other_engines_are_not_lost_with_a_connection(world: World) -> None:
    engine, other = engine_of(world), engine_of(world, "other")
    (grant,) = other.offer(prompt(1)).grants
    engine.disconnect(engine.scheduler)
    engine.connect_scheduler(last_grant=0)
    other.stored([grant])
    assert other.blocks_held(prompt(1)) == 4


def test_a_dead_schedulers_grants_wait_for_its_workers(world: World) -> None:
    """A new scheduler under the same engine_id knows nothing of what the old one planned."""
    engine = engine_of(world)
    (grant,) = engine.offer(prompt(1)).grants
    engine.kill(engine.scheduler)
    assert world.lent_cells() == 4
    engine.incarnation = b"another life"
    engine.connect_scheduler(last_grant=0)
    assert world.lent_cells() == 4, "the worker may be copying right now"
    engine.tell(0, m.Stored(grant, ok=True))
    at_rest(world)


# ---- the check itself


def test_a_check_sees_a_cell_that_is_lent_twice(world: World) -> None:
    """Two tails of one region are made to share a cell."""
    engine = engine_of(world)
    engine.store(prompt(1, blocks=2))
    engine.store(prompt(2, blocks=1))
    long, short = world.machine.index.entries.values()
    entries = world.machine.host.regions[100].entries
    del entries[short.run.first_cell]
    short.run = m.Run(100, long.run.first_cell + 1, 1, 9)
    entries[short.run.first_cell] = short
    with pytest.raises(AssertionError, match="lent twice"):
        world.machine.check_integrity()


def test_a_check_needs_little_memory(world: World) -> None:
    """A node that holds a million chunks is checked without gigabytes: a byte for each cell."""
    engine = engine_of(world, step_tokens=0)
    for part in range(1, 60):
        engine.store(prompt(part))
    world.machine.check_integrity()
    tracemalloc.start()
    world.machine.lending.check_integrity({})
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    cells = sum(region.cells.cell_count for region in world.machine.host.regions.values())
    assert peak < 20 * cells + 2 * KiB, (peak, cells)


# ---- faulty offers


def test_a_key_that_is_held_elsewhere_is_not_stored_here(world: World) -> None:
    """The same key offered below two parents: only a faulty engine does that."""
    engine = engine_of(world)
    engine.store(prompt(1, 2))
    chunk_keys, digests = engine.chain(prompt(1, 2))
    engine.say(m.StoreOffer(1, engine.root, engine.root, chunk_keys[1:] * 2, digests[1:] * 2))
    assert engine.last(m.StoreAnswer).outcomes == [DropReason.NOT_ANCHORED] * 2
    assert engine.blocks_held(prompt(1, 2)) == 8


def test_a_key_offered_behind_itself_is_not_stored(world: World) -> None:
    engine = engine_of(world)
    chunk_keys, digests = engine.chain(prompt(1))
    engine.say(m.StoreOffer(1, engine.root, engine.root, chunk_keys * 2, digests * 2))
    assert engine.last(m.StoreAnswer).outcomes == ["", DropReason.NOT_ANCHORED]


def test_a_key_that_is_a_root_is_not_stored(world: World) -> None:
    engine = engine_of(world)
    digests = bytes(48) + engine.root[:16]
    engine.say(m.StoreOffer(1, engine.root, engine.root, [engine.root], [digests]))
    assert engine.last(m.StoreAnswer).outcomes == [DropReason.NOT_ANCHORED]


def test_two_keys_for_the_same_blocks_end_with_one_of_them(world: World) -> None:
    """Keys that differ only behind the digest they begin with, a chunk behind the second."""
    engine = engine_of(world)
    (key,), (digests,) = engine.chain(prompt(1))
    twin = key[:16] + bytes(16)
    behind = bytes(32)
    engine.say(m.StoreOffer(1, engine.root, engine.root, [key], [digests]))
    engine.say(m.StoreOffer(2, engine.root, engine.root, [twin, behind], [digests, bytes(64)]))
    engine.stored(list(world.machine.lending.grants))
    at_rest(world)
    assert engine.blocks_held(prompt(1)) == 4
    assert len(world.machine.index.entries) == 1
