"""Attacks of the second round on the node's machine."""

import pytest

from kvtide.core import messages as m
from kvtide.core.effects import Close
from kvtide.core.reasons import DropReason
from tests.core.world import CHUNK_BYTES, Engine, World, prompt


def test_one_hung_writer_of_a_shared_chunk_must_not_fill_the_host() -> None:
    """A hung (or paused) engine holds the grant of the system prompt's chunk; others store behind."""
    world = World(host_bytes=64 * CHUNK_BYTES)
    hung = Engine(world, "hung").start()
    lively = Engine(world, "lively").start()
    other = Engine(world, "other", model="another model").start()
    assert hung.offer(prompt(1)).outcomes == [""]  # never answered: SIGSTOP, /pause, a long step
    for part in range(200):
        lively.store(prompt(1, 100 + part))
        world.tick(after_ms=1_000)
    held = lively.blocks_held(prompt(1, 299))
    index = world.machine.index
    invisible = [e for e in index.entries.values() if not e.is_held and e.is_copied]
    outcome = other.offer(prompt(7)).outcomes
    print(
        "hit blocks",
        held,
        "invisible entries",
        len(invisible),
        "other engine:",
        outcome,
        "granted",
        world.machine.lending.granted_bytes // CHUNK_BYTES,
        "chunks",
    )
    assert outcome == [""], "another engine cannot store anything any more"
    assert len(invisible) * CHUNK_BYTES <= world.machine.host.limit_bytes // 4


def test_a_probe_behind_the_root_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """The node forgets the root registered first, while the scheduler may still probe it."""
    from kvtide.core import instances

    monkeypatch.setattr(instances, "ROOTS_MAX", 4)
    world = World()
    engine = Engine(world).start()
    engine.store(prompt(1, 2))
    for i in range(3):
        engine.register(engine.root_of(f"salt {i}"), f"salt {i}")
    keys, digests = engine.chain(prompt(1, 9))
    engine.say(m.Lookup(1, engine.root, keys[0], b""))  # on_new_request of a request without salt
    engine.register(engine.root_of("salt 3"), "salt 3")  # on_new_request of the next one
    effects = engine.say(m.Probe(2, engine.root, keys[0], digests[1]))  # as Lookups._probe
    assert not [e for e in effects if isinstance(e, Close)], "the scheduler's connection is closed"
