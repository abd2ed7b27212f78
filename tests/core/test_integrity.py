"""The check of the whole state sees what has come to disagree, wherever it is."""

from collections.abc import Callable

import pytest

from kvtide.core import messages as m
from kvtide.core.host import Refusal
from kvtide.core.instances import Instance
from kvtide.core.lookups import Waiting
from kvtide.core.machine import Machine
from tests.core.world import Engine, World, prompt

FAULTS: dict[str, Callable[[Machine], object]] = {
    "a connection of nobody": lambda machine: machine.peers.update({99: Instance("nobody", 0)}),
    "a third connection of one process": lambda machine: machine.peers.update(
        dict.fromkeys((98, 99), machine.instances["engine"])
    ),
    "an engine under another name": lambda machine: machine.instances.update(
        {"other": machine.instances["engine"]}
    ),
    "a worker of another rank": lambda machine: setattr(
        machine.instances["engine"].workers[0], "rank", 5
    ),
    "a dead worker's grant": lambda machine: machine.instances["engine"].workers.clear(),
    "a lease without a connection": lambda machine: setattr(
        machine.instances["engine"], "connection", None
    ),
    "a region open to an engine that lacks it": lambda machine: machine.host.regions[
        100
    ].mapped.clear(),
    "a region that is open and not known to be": lambda machine: machine.instances[
        "engine"
    ].open_regions.clear(),
    "a region that a stranger has": lambda machine: machine.host.regions[100].offered.add(77),
    "a region that a stranger refused": lambda machine: machine.host.regions[100].refused.update(
        {77: Refusal("", 1, 1)}
    ),
    "a region asked back that does not leave": lambda machine: machine.host.regions[
        100
    ].leave_asked.update(machine.host.regions[100].mapped),
    "a lookup that waits for what is open": lambda machine: machine.lookups._waiting.update(
        {"engine": {1: Waiting(m.Lookup(1, b"", b"", b""), 100)}}
    ),
    "a root that counts wrong": lambda machine: setattr(
        next(iter(machine.index.roots.values())), "entry_count", 7
    ),
    "a held chunk that is not counted": lambda machine: setattr(machine.index, "held_chunks", 0),
    "a lease too few": lambda machine: setattr(machine.index, "leased_bytes", 0),
}


@pytest.mark.parametrize("spoil", FAULTS.values(), ids=FAULTS)
def test_a_state_that_disagrees_with_itself_is_seen(spoil: Callable[[Machine], object]) -> None:
    world = World()
    engine = Engine(world).start()
    engine.store(prompt(1, 2))
    engine.lookup(prompt(1, 2), keeps=True)
    engine.offer(prompt(3))
    world.machine.check_integrity()
    spoil(world.machine)
    with pytest.raises(AssertionError):
        world.machine.check_integrity()
