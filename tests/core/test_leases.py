"""Leases and load references: they keep a match, and end by themselves or with their owner."""

import pytest

from kvtide.core import leases as leases_module
from kvtide.core import messages as m
from kvtide.core.leases import LEASE_MS
from kvtide.core.reasons import DropReason
from kvtide.units import KiB
from tests.core.world import CHUNK_BYTES, Engine, World, prompt


@pytest.fixture
def world() -> World:
    """Four regions of four slots: full after sixteen chunks."""
    return World(host_bytes=256 * KiB)


@pytest.fixture
def engine(world: World) -> Engine:
    return Engine(world).start()


def fill(engine: Engine, first: int = 100, count: int = 16) -> list[str]:
    """Store so many other chunks, which evicts all that may be; what became of them."""
    outcomes = []
    for part in range(first, first + count):
        engine.world.now_ms += 1
        outcomes += engine.store(prompt(part)).outcomes
    return outcomes


def leased(engine: Engine, tokens: list[int]) -> m.Match:
    match = engine.lookup(tokens, keeps=True)
    assert isinstance(match, m.Match)
    assert match.lease
    return match


def counts(world: World) -> tuple[int, int]:
    return world.machine.leases.counts()


def test_what_is_leased_is_not_evicted_nor_what_it_hangs_on(world: World, engine: Engine) -> None:
    """A lease is on the deepest chunk; its ancestors have a child, so they are safe too."""
    engine.store(prompt(1, 2, 3))
    leased(engine, prompt(1, 2, 3))
    fill(engine)
    assert engine.blocks_held(prompt(1, 2, 3)) == 12


def test_what_is_not_leased_is_evicted(world: World, engine: Engine) -> None:
    engine.store(prompt(1, 2, 3))
    fill(engine)
    assert engine.blocks_held(prompt(1, 2, 3)) == 0


def test_a_lease_runs_out(world: World, engine: Engine) -> None:
    engine.store(prompt(1))
    leased(engine, prompt(1))
    world.tick(after_ms=LEASE_MS - 1)
    assert counts(world) == (1, 0)
    world.tick(after_ms=1)
    assert counts(world) == (0, 0)
    fill(engine)
    assert engine.blocks_held(prompt(1)) == 0


def test_asking_again_renews_it(world: World, engine: Engine) -> None:
    """The engine asks again for a request that waits: each answer has a lease of its own."""
    engine.store(prompt(1))
    leased(engine, prompt(1))
    world.tick(after_ms=LEASE_MS - 1)
    leased(engine, prompt(1))
    world.tick(after_ms=LEASE_MS - 1)
    assert counts(world) == (1, 0)
    fill(engine)
    assert engine.blocks_held(prompt(1)) == 4


def test_a_load_has_no_deadline(world: World, engine: Engine) -> None:
    engine.store(prompt(1))
    match = leased(engine, prompt(1))
    engine.say(m.LoadBegin(match.lease))
    assert counts(world) == (0, 1)
    world.tick(after_ms=100 * LEASE_MS)
    fill(engine)
    assert engine.blocks_held(prompt(1)) == 4
    engine.say(m.LoadEnd(match.lease, 4))
    assert counts(world) == (0, 0)
    assert world.machine.counts["loaded_blocks"] == 4


def test_a_load_that_began_too_late_is_only_unprotected(world: World, engine: Engine) -> None:
    """The lease had run out: nothing is held or given back twice, it is no error, and counted."""
    engine.store(prompt(1))
    match = leased(engine, prompt(1))
    world.tick(after_ms=LEASE_MS)
    assert engine.say(m.LoadBegin(match.lease)) == []
    assert counts(world) == (0, 0)
    assert world.machine.counts["unprotected_loads"] == 1
    assert engine.say(m.LoadEnd(match.lease, 4)) == []
    assert world.machine.counts["loaded_blocks"] == 4
    engine.say(m.LoadBegin(leased(engine, prompt(1)).lease))
    assert world.machine.counts["unprotected_loads"] == 1
    world.machine.check_integrity()


def test_releasing_twice_changes_nothing(world: World, engine: Engine) -> None:
    """Release is by number: a second one must not end another's lease."""
    engine.store(prompt(1))
    first, second = leased(engine, prompt(1)), leased(engine, prompt(1))
    engine.say(m.LeaseRelease(first.lease))
    engine.say(m.LeaseRelease(first.lease))
    assert counts(world) == (1, 0)
    engine.say(m.LeaseRelease(second.lease))
    assert counts(world) == (0, 0)


def test_leases_and_loads_end_with_the_schedulers_connection(world: World, engine: Engine) -> None:
    engine.store(prompt(1, 2))
    engine.say(m.LoadBegin(leased(engine, prompt(1)).lease))
    leased(engine, prompt(1, 2))
    assert counts(world) == (1, 1)
    engine.disconnect(engine.scheduler)
    assert counts(world) == (0, 0)
    assert world.machine.leases.pinned_bytes == 0


def test_another_engine_ends_none_of_mine(world: World, engine: Engine) -> None:
    engine.store(prompt(1))
    other = Engine(world, "other").start()
    match = leased(engine, prompt(1))
    other.say(m.LeaseRelease(match.lease))
    other.say(m.LoadBegin(match.lease))
    other.say(m.LoadEnd(match.lease, 4))
    assert counts(world) == (1, 0)
    other.disconnect(other.scheduler)
    assert world.machine.leases.counts("engine") == (1, 0)
    assert world.machine.leases.counts("other") == (0, 0)


def test_above_its_share_of_the_host_an_engines_answers_carry_no_lease(
    world: World, engine: Engine
) -> None:
    """Sixteen chunks, of which one engine may pin eight and both twelve: stores still find room,
    loads still come, and one that stands still leaves the other some."""
    other = Engine(world, "other").start()
    fill(engine, first=1)

    def leases_of(one: Engine) -> list[int]:
        matches = [one.lookup(prompt(part), keeps=True) for part in range(1, 17)]
        assert all(isinstance(match, m.Match) and match.chunks == 1 for match in matches)
        return [match.lease for match in matches if isinstance(match, m.Match)]

    leases = leases_of(engine)
    assert [lease > 0 for lease in leases] == [True] * 8 + [False] * 8
    others = leases_of(other)
    assert [lease > 0 for lease in others] == [True] * 12 + [False] * 4, "shared ones cost nothing"
    assert fill(engine) == [""] * 16
    engine.say(m.LeaseRelease(leases[0]))
    other.say(m.LeaseRelease(others[0]))
    assert leased(engine, prompt(2)).lease


def test_a_prefix_that_many_requests_share_is_pinned_once(world: World, engine: Engine) -> None:
    """Six of sixteen chunks are one prompt of all; each request goes on in its own way."""
    shared = range(1, 7)
    engine.store(prompt(*shared[:4]))
    engine.store(prompt(*shared))
    for part in (20, 21):
        engine.store(prompt(*shared, part))
    leases = [leased(engine, prompt(*shared)).lease for _ in range(48)]
    assert world.machine.leases.pinned_bytes == 6 * CHUNK_BYTES
    ends = [leased(engine, prompt(*shared, part)).lease for part in (20, 21, 21)]
    assert world.machine.leases.pinned_bytes == 8 * CHUNK_BYTES
    for lease in [*leases, ends[0]]:
        engine.say(m.LeaseRelease(lease))
    assert world.machine.leases.pinned_bytes == 7 * CHUNK_BYTES
    world.tick(after_ms=LEASE_MS)
    assert world.machine.leases.pinned_bytes == 0


def test_a_cleared_chain_is_pinned_no_more_but_for_what_is_leased_itself(
    world: World, engine: Engine
) -> None:
    engine.store(prompt(1, 2, 3))
    lease = leased(engine, prompt(1, 2, 3)).lease
    assert world.machine.leases.pinned_bytes == 3 * CHUNK_BYTES
    world.machine.clear(None)
    world.machine.check_integrity()
    assert world.machine.leases.pinned_bytes == CHUNK_BYTES
    engine.say(m.LeaseRelease(lease))
    assert world.machine.leases.pinned_bytes == 0


def test_the_number_of_leases_is_bounded(
    world: World, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leases_module, "LEASES_MAX", 3)
    engine.store(prompt(1))
    for _ in range(3):
        leased(engine, prompt(1))
    match = engine.lookup(prompt(1), keeps=True)
    assert isinstance(match, m.Match)
    assert (match.chunks, match.lease) == (1, 0)


def test_a_cleared_match_keeps_its_own_cells_until_the_lease_ends(
    world: World, engine: Engine
) -> None:
    engine.store(prompt(1))
    match = leased(engine, prompt(1))
    world.machine.clear(None)
    assert engine.blocks_held(prompt(1)) == 0
    assert world.lent_cells() == 4
    engine.say(m.LeaseRelease(match.lease))
    assert world.lent_cells() == 0


def test_a_host_full_of_leases_drops_stores_and_recovers(world: World, engine: Engine) -> None:
    """Twelve leased and four being written: a store is dropped, nobody waits."""
    other = Engine(world, "other").start()
    fill(engine, first=1, count=12)
    for part in range(1, 13):
        leased(engine if part <= 8 else other, prompt(part))
    grants = [engine.offer(prompt(part)).grants[0] for part in range(20, 24)]
    assert engine.offer(prompt(30)).outcomes == [DropReason.QUEUE_FULL]
    engine.stored(grants)
    for part in range(20, 24):
        engine.lookup(prompt(part), keeps=True)
    world.tick(after_ms=LEASE_MS)
    assert engine.offer(prompt(30)).outcomes == [""]
