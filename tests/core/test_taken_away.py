"""What a lookup that waits for tiers does when its chain is taken away meanwhile."""

import pytest

from kvtide.core import lending as lending_module
from kvtide.core import messages as m
from kvtide.core.effects import HostLimit, LoadFrom
from tests.core.fake_tier import FakeTier
from tests.core.test_promotions import ask
from tests.core.world import CHUNK_BLOCKS, Engine, World, prompt

TAIL = prompt(1, 2, blocks=2)
"""A chunk, and a tail of two blocks behind it."""


@pytest.fixture
def tiers() -> list[FakeTier]:
    """Two that hold TAIL."""
    tiers = [FakeTier(), FakeTier()]
    Engine(World(tiers=tiers)).start().store(TAIL)
    assert [len(tier.records) for tier in tiers] == [2, 2]
    return tiers


def probing(tiers: list[FakeTier]) -> Engine:
    """An engine that has the chunk in memory and waits for the first tier's load of the tail."""
    engine = Engine(World(tiers=tiers)).start()
    assert engine.blocks_held(prompt(1)) == CHUNK_BLOCKS
    for tier in tiers:
        tier.answers = False
    keys, digests = engine.chain(TAIL)
    engine.number += 1
    engine.say(m.Probe(engine.number, engine.root, keys[0], digests[1]))
    engine.world.answer(tiers[0])
    assert [type(job) for job in tiers[0].waiting] == [LoadFrom]
    return engine


def cut(engine: Engine) -> int:
    return engine.world.machine.counts.get("promotions.taken_away", 0)


def test_a_probe_behind_a_chunk_that_was_cleared_is_answered(tiers: list[FakeTier]) -> None:
    """Nobody keeps the chunk any more; the other tier is not asked for what nobody could find."""
    engine = probing(tiers)
    engine.world.clear(None)
    engine.world.answer(tiers[0])
    assert not tiers[1].waiting
    assert engine.last(m.Match) == m.Match(engine.number, 0, 0, [], 0, probe=False)
    assert engine.world.lent_cells() == 0
    assert cut(engine) == 1


def test_a_lookup_whose_root_was_cleared_is_answered(tiers: list[FakeTier]) -> None:
    engine = Engine(World(tiers=tiers)).start()
    assert engine.blocks_held(prompt(1)) == CHUNK_BLOCKS
    tiers[0].answers, asked = False, len(tiers[1].asked)
    number = ask(engine, TAIL)
    engine.world.clear(None)
    engine.world.answer(tiers[0])
    assert engine.last(m.Match).number == number
    assert len(tiers[1].asked) == asked
    assert cut(engine) == 1


def test_what_is_behind_a_chunk_that_was_moved_is_counted_as_cut(tiers: list[FakeTier]) -> None:
    """The memory of the first goes back to the machine while the second waits for its turn."""
    engine = probing(tiers)
    engine.world.give(HostLimit(0))
    engine.world.answer(tiers[0])
    assert engine.last(m.Match).number == engine.number
    assert not tiers[1].waiting
    assert cut(engine) == 1


def test_a_chunk_that_was_cleared_and_is_not_gone_yet_is_not_loaded_again(
    tiers: list[FakeTier], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A neighbour stores it in a place of both; here it is taken away piece by piece."""
    monkeypatch.setattr(lending_module, "CLEARED_VISITS_MAX", 0)
    engine = Engine(World(tiers=tiers[:1])).start()
    records = dict(tiers[0].records)
    assert engine.blocks_held(TAIL) == CHUNK_BLOCKS + 2
    engine.world.clear(None)
    tiers[0].records = records
    assert engine.blocks_held(TAIL) == 0
    assert cut(engine) == 1
    monkeypatch.undo()
    engine.world.tick()
    assert engine.blocks_held(TAIL) == CHUNK_BLOCKS + 2
