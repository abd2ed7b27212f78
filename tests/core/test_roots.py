"""Root keys: registered, forgotten, and cleared by the salt that they were made with."""

import pytest

from kvtide.core import lending as lending_module
from kvtide.core import messages as m
from kvtide.core.effects import Close
from kvtide.core.instances import ROOTS_MAX
from kvtide.core.keys import salt_digest
from kvtide.core.reasons import DropReason
from tests.core.world import Engine, World, prompt


@pytest.fixture
def world() -> World:
    return World()


# ---- roots


def test_a_root_may_be_registered_again(world: World) -> None:
    engine = Engine(world).start()
    engine.store(prompt(1))
    engine.register(engine.root)
    assert engine.blocks_held(prompt(1)) == 4


def test_a_root_belongs_to_a_connection(world: World) -> None:
    """An engine that names a root which only another one registered is refused."""
    engine = Engine(world).start()
    salted = engine.root_of("secret")
    engine.register(salted, "secret")
    other = Engine(world, "other").start()
    effects = other.say(m.Lookup(1, salted, b"", b""))
    assert Close(other.scheduler) in effects


def test_the_root_registered_longest_ago_is_forgotten(world: World) -> None:
    """An engine with a salt for each of its many users; its chunks stay, and come back."""
    engine = Engine(world).start()
    engine.store(prompt(1))
    instance = world.machine.instances["engine"]
    for number in range(ROOTS_MAX):
        instance.register_root(number.to_bytes(32, "big"))
    assert len(instance.roots) == ROOTS_MAX
    assert engine.root not in instance.roots
    engine.register(engine.root)
    assert engine.blocks_held(prompt(1)) == 4


def test_idle_roots_do_not_pile_up(world: World) -> None:
    world.machine.index.roots_max = 8
    engine = Engine(world).start()
    engine.store(prompt(1))
    for number in range(20):
        engine.register(engine.root_of(str(number)), str(number))
    other = Engine(world, "other").start()
    engine.kill_all()
    world.machine.index.roots_max = 8
    other.register(other.root_of("one more"), "one more")
    assert len(world.machine.index.roots) == 2


# ---- clear


def test_clear_by_salt_takes_only_what_that_salt_stored(world: World) -> None:
    engine = Engine(world).start()
    roots = {salt: engine.root_of(salt) for salt in ("one", "two", None)}
    for salt, root in roots.items():
        engine.register(root, salt)
        engine.store(prompt(1, 2), root)
    assert world.machine.clear(salt_digest("one")) == 2
    assert [engine.blocks_held(prompt(1, 2), root) for root in roots.values()] == [0, 8, 8]
    assert world.machine.clear(salt_digest("nobody")) == 0
    assert world.machine.clear(salt_digest(None)) == 2
    assert [engine.blocks_held(prompt(1, 2), root) for root in roots.values()] == [0, 8, 0]
    assert world.machine.clear(None) == 2
    assert world.lent_cells() == 0


@pytest.fixture
def slow_clear(monkeypatch: pytest.MonkeyPatch) -> None:
    """Five steps at once: as slow as where a million chunks are cleared."""
    monkeypatch.setattr(lending_module, "CLEARED_VISITS_MAX", 5)


@pytest.mark.usefixtures("slow_clear")
def test_much_is_cleared_in_small_steps_and_found_no_more_from_the_first(world: World) -> None:
    engine = Engine(world).start()
    for part in range(1, 9):
        engine.store(prompt(1, part, 10 + part, blocks=2))
    before = world.lent_cells()
    keys, digests = engine.chain(prompt(1, 2, 12, blocks=2))
    assert world.machine.clear(None) == 17
    assert before - world.lent_cells() < 10
    assert engine.blocks_held(prompt(1, 2)) == 0
    engine.say(m.Probe(99, engine.root, keys[0], digests[1]))
    assert engine.last(m.Match).runs == [], "nor by the key of a chunk that was found before"
    engine.say(m.StoreOffer(100, engine.root, keys[0], keys[1:2], digests[1:2]))
    assert engine.last(m.StoreAnswer).outcomes == [DropReason.NOT_ANCHORED]
    assert engine.store(prompt(9)).outcomes == [""]
    assert world.machine.clear(None) == 1, "what was stored since"
    freed = []
    while world.lent_cells():
        cells = world.lent_cells()
        world.tick()
        freed.append(cells - world.lent_cells())
    assert max(freed) <= 5 * 4
    assert world.machine.lending.evicted["cleared"] == 18
    assert engine.store(prompt(1, 2)).outcomes == ["", ""]
    assert engine.blocks_held(prompt(1, 2)) == 8


@pytest.mark.usefixtures("slow_clear")
def test_what_is_written_while_it_is_cleared_is_not_found(world: World) -> None:
    engine = Engine(world).start()
    for part in range(1, 9):
        engine.store(prompt(part))
    grants = engine.offer(prompt(1, 2)).grants
    world.machine.clear(None)
    engine.stored(grants)
    assert engine.blocks_held(prompt(1, 2)) == 0
    for _ in range(9):
        world.tick()
    assert world.lent_cells() == 0


def test_clear_takes_what_is_stored_under_any_epoch_and_by_any_engine(world: World) -> None:
    engines = [Engine(world, name, model=name).start() for name in ("a", "b")]
    for engine in engines:
        engine.store(prompt(1))
        epoch = engine.root_of(epoch=b"e")
        engine.say(m.RegisterRoot(epoch, b"e", b""))
        engine.store(prompt(1), epoch)
    assert world.machine.clear(None) == 4
    assert world.machine.take_effects() == []
