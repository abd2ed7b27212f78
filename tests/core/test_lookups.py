"""Answers to lookups: which cells, and what an engine that is still mapping is told."""

import pytest

from kvtide.core import lookups as lookups_module
from kvtide.core import messages as m
from kvtide.core.effects import Received
from kvtide.core.host import MAP_MS_MAX
from kvtide.units import KiB
from tests.core.world import Engine, World, prompt


@pytest.fixture
def world() -> World:
    return World(host_bytes=256 * KiB)


@pytest.fixture
def engine(world: World) -> Engine:
    return Engine(world).start()


def late_engine(world: World, workers: int = 1) -> Engine:
    """An engine that has yet to map what it is offered."""
    late = Engine(world, "late", workers=workers)
    late.maps = False
    return late.start()


def test_a_match_names_the_runs_of_its_chunks_and_of_its_last_blocks(
    world: World, engine: Engine
) -> None:
    stored = engine.store(prompt(1, 2, blocks=3))
    match = engine.lookup(prompt(1, 2, blocks=2))
    assert isinstance(match, m.Match)
    assert (match.chunks, match.blocks) == (1, 2)
    whole, tail = stored.runs
    assert match.runs == [whole, tail._replace(cell_count=2)]


def test_a_lookup_is_at_most_two_messages(world: World, engine: Engine) -> None:
    """Keys of whole chunks first; the blocks of the next one only where there are children."""
    engine.store(prompt(1, 2))
    keys, digests = engine.chain(prompt(1, 3, 4))
    engine.say(m.Lookup(1, engine.root, b"".join(keys), b""))
    assert engine.last(m.Match).probe
    engine.say(m.Probe(2, engine.root, keys[0], digests[1]))
    assert engine.last(m.Match) == m.Match(2, 0, 0, [], 0)
    keys, _ = engine.chain(prompt(1, 2, 4))
    engine.say(m.Lookup(3, engine.root, b"".join(keys), b""))
    assert not engine.last(m.Match).probe, "nothing hangs below the second chunk"


def test_a_probe_matches_block_for_block(world: World, engine: Engine) -> None:
    engine.store(prompt(1, 2))
    other = prompt(1, 2)
    other[-1] += 1
    assert engine.blocks_held(other) == 7
    other[9] += 1
    assert engine.blocks_held(other) == 4


def test_a_probe_below_nobody_is_a_miss(world: World, engine: Engine) -> None:
    _, digests = engine.chain(prompt(1))
    engine.say(m.Probe(1, engine.root, bytes(32), digests[0]))
    assert engine.last(m.Match) == m.Match(1, 0, 0, [], 0)


def test_an_empty_lookup_is_a_miss(world: World, engine: Engine) -> None:
    engine.store(prompt(1))
    engine.say(m.Lookup(1, engine.root, b"", b""))
    assert engine.last(m.Match) == m.Match(1, 0, 0, [], 0)


def test_another_salt_finds_nothing(world: World, engine: Engine) -> None:
    """Two tenants of one engine, and one without a salt."""
    roots = [engine.root_of(salt) for salt in ("one", "two")]
    for root, salt in zip(roots, ("one", "two"), strict=True):
        engine.register(root, salt)
    engine.store(prompt(1), roots[0])
    assert [engine.blocks_held(prompt(1), root) for root in roots] == [4, 0]
    assert engine.blocks_held(prompt(1)) == 0


def test_another_epoch_finds_nothing(world: World, engine: Engine) -> None:
    """After `reset_cache()` what was stored before can no longer be reached."""
    engine.store(prompt(1))
    after = engine.root_of(epoch=b"fresh")
    engine.say(m.RegisterRoot(after, b"fresh", b""))
    assert engine.blocks_held(prompt(1), after) == 0
    engine.store(prompt(1), after)
    assert engine.blocks_held(prompt(1), after) == 4


def test_another_engine_of_the_same_model_finds_it(world: World, engine: Engine) -> None:
    engine.store(prompt(1, 2))
    assert Engine(world, "other").start().blocks_held(prompt(1, 2)) == 8


def test_another_model_finds_nothing(world: World, engine: Engine) -> None:
    engine.store(prompt(1))
    assert Engine(world, "other", model="other").start().blocks_held(prompt(1)) == 0


def test_an_engine_that_is_off_is_answered_with_a_miss(world: World, engine: Engine) -> None:
    """It turned itself off while a lookup was under way: no error, no match."""
    engine.store(prompt(1))
    engine.identify(off_reason="weights_change")
    assert engine.blocks_held(prompt(1)) == 0
    assert engine.offer(prompt(2)).outcomes == ["not_mapped"]


# ---- while an engine maps


def test_a_match_in_memory_not_yet_mapped_is_pending(world: World, engine: Engine) -> None:
    """It is answered as soon as the last worker has it."""
    engine.store(prompt(1))
    late = late_engine(world, workers=1)
    assert late.lookup(prompt(1)) == m.Pending(late.number)
    late.map_now()
    match = late.last(m.Match)
    assert (match.number, match.chunks) == (late.number, 1)
    assert match.lease


def test_a_region_is_open_when_every_worker_has_it() -> None:
    world = World(host_bytes=512 * KiB)
    engine = Engine(world, workers=2).start()
    engine.store(prompt(1))
    late = late_engine(world, workers=2)
    assert late.lookup(prompt(1)) == m.Pending(late.number)
    late.map_now(rank=0)
    assert not late.heard(m.Match)
    late.map_now(rank=1)
    assert late.last(m.Match).chunks == 1


def test_pending_is_said_once_and_answered_once(world: World, engine: Engine) -> None:
    engine.store(prompt(1))
    late = late_engine(world)
    late.lookup(prompt(1))
    for _ in range(3):
        world.tick(after_ms=100)
    assert len(late.heard(m.Pending)) == 1
    late.map_now()
    late.map_now()
    world.tick(after_ms=MAP_MS_MAX)
    assert len(late.heard(m.Match)) == 1


def test_after_t_load_a_match_ends_before_what_is_not_mapped(world: World, engine: Engine) -> None:
    """Three chunks, the last of which lies in the second region; only the first is mapped."""
    engine.store(prompt(1, 2))
    engine.store(prompt(7, 8))
    engine.store(prompt(1, 2, 3))
    assert engine.blocks_held(prompt(1, 2, 3)) == 12
    late = late_engine(world)
    offers = world.offered[late.workers[0]]
    first = min(offer.region for offer in offers)
    late.mapped[0].add(first)
    late.tell(0, m.RegionOpen(first))
    assert late.lookup(prompt(1, 2, 3)) == m.Pending(late.number)
    world.tick(after_ms=MAP_MS_MAX - 1)
    assert not late.heard(m.Match)
    world.tick(after_ms=1)
    match = late.last(m.Match)
    assert (match.number, match.chunks, match.probe) == (late.number, 2, False)
    assert {run.region for run in match.runs} == {first}
    assert world.machine.counts["lookups.not_mapped"] == 1
    assert late.blocks_held(prompt(1, 2, 3)) == 8, "no waiting any more"


def test_a_probe_is_never_pending(world: World, engine: Engine) -> None:
    engine.store(prompt(1))
    late = late_engine(world)
    _, digests = late.chain(prompt(1))
    late.say(m.Probe(1, late.root, late.root, digests[0][:32]))
    assert late.last(m.Match) == m.Match(1, 0, 0, [], 0)
    assert world.machine.counts["lookups.not_mapped"] == 1


def test_regions_are_offered_most_recently_hit_first(world: World, engine: Engine) -> None:
    """Sixteen chunks in four regions, hit in another order than they were stored."""
    for part in range(1, 17):
        engine.store(prompt(part))
    for part in (9, 1, 13, 5):
        world.now_ms += 10
        assert engine.blocks_held(prompt(part)) == 4
    late = late_engine(world)
    hit = [engine.lookup(prompt(part)) for part in (5, 13, 1, 9)]
    wanted = [match.runs[0].region for match in hit if isinstance(match, m.Match)]
    assert [offer.region for offer in world.offered[late.workers[0]]] == wanted


def test_what_was_evicted_meanwhile_is_a_miss_in_the_end(world: World, engine: Engine) -> None:
    engine.store(prompt(1))
    late = late_engine(world)
    late.lookup(prompt(1))
    world.machine.clear(None)
    world.tick(after_ms=MAP_MS_MAX)
    assert late.last(m.Match) == m.Match(late.number, 0, 0, [], 0)


def test_lookups_of_a_connection_that_ended_wait_no_more(world: World, engine: Engine) -> None:
    """Nobody is told, and no lease is taken for nobody."""
    engine.store(prompt(1))
    late = late_engine(world)
    late.lookup(prompt(1))
    late.disconnect(late.scheduler)
    late.map_now()
    late.connect_scheduler()
    late.identify()
    late.register(late.root)
    world.tick(after_ms=MAP_MS_MAX)
    assert not late.heard(m.Match)
    assert world.machine.leases.counts() == (0, 0)


def test_no_more_than_so_many_lookups_are_pending(
    world: World, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those above are answered at once with what is mapped."""
    monkeypatch.setattr(lookups_module, "WAITING_MAX", 2)
    engine.store(prompt(1))
    late = late_engine(world)
    answers = [late.lookup(prompt(1)) for _ in range(3)]
    assert [type(answer) for answer in answers] == [m.Pending, m.Pending, m.Match]


def test_the_root_of_a_pending_lookup_may_be_forgotten(world: World, engine: Engine) -> None:
    """Cleared, and so many other roots registered since that this one was dropped."""
    engine.store(prompt(1))
    late = late_engine(world)
    late.lookup(prompt(1))
    world.machine.clear(None)
    del world.machine.instances["late"].roots[late.root]
    world.machine.index.forget_idle_roots(set())
    world.give(Received(0, m.LeaseRelease(1)))  # any event
    world.tick(after_ms=MAP_MS_MAX)
    assert late.last(m.Match).chunks == 0
