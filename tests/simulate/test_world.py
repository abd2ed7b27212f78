"""Worlds by seed: what production code does under faults, and that a seed decides all of it."""

import functools
import os
import subprocess
import sys
from collections import Counter
from dataclasses import replace

import pytest

from kvtide.testing.simulate.acts import Acts
from kvtide.testing.simulate.main import minimised, shape_of
from kvtide.testing.simulate.plan import Action
from kvtide.testing.simulate.world import Outcome, World, WorldShape

SEEDS = (2, 3, 6)
HASH_OF_A_WORLD = (
    "from dataclasses import replace;"
    "from kvtide.testing.simulate.main import shape_of;"
    "from kvtide.testing.simulate.world import World;"
    "shape = replace(shape_of(2), actions=300, span_s=4.0);"
    "print(World(2, shape).run().digest)"
)


def small(seed: int) -> WorldShape:
    return replace(shape_of(seed), actions=300, span_s=4.0)


@functools.cache
def run(seed: int) -> Outcome:
    return World(seed, small(seed)).run()


@pytest.mark.parametrize("seed", SEEDS)
def test_a_world_under_faults_keeps_its_laws(seed: int) -> None:
    """Each raises what does not hold; and it is no world in which nothing happens."""
    outcome = run(seed)
    assert outcome.machine_events > 500
    assert outcome.requests > 50
    assert outcome.hit_tokens > 100
    assert outcome.faults


@pytest.mark.long
def test_canaries_of_every_long_hit_find_nothing_and_leave_nothing() -> None:
    """Under all faults of worlds; an alarm, or what is still held at idle, would fail one."""
    counts = Counter[str]()
    for seed in range(2, 8):
        shape = small(seed)
        engines = tuple(replace(e, canary_rate=1.0, block_count=96) for e in shape.engines)
        world = World(seed, replace(shape, engines=engines, host_bytes=shape.host_bytes * 4))
        world.run()
        for node in world.nodes.values():
            counts += Counter(node.machine.counts)
    assert counts["canaries.equal"] > 20
    assert not counts["canaries.differs"]


def test_the_same_seed_gives_the_same_log() -> None:
    """Of all that is sent and said; another seed gives another, so there is something in it."""
    assert World(2, small(2)).run().digest == run(2).digest
    assert run(2).digest != run(3).digest


@pytest.mark.long
def test_a_seed_gives_the_same_log_in_another_process() -> None:
    """Where text has other hashes, and objects other addresses."""
    environment = {**os.environ, "PYTHONHASHSEED": "12345"}
    command = [sys.executable, "-W", "ignore", "-c", HASH_OF_A_WORLD]
    found = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert found.stdout.split()[-1] == run(2).digest


def test_what_fails_is_told_with_no_more_actions_than_it_takes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A reset that fails needs no request."""

    def broken(acts: Acts, *numbers: int) -> None:
        acts._kernel.broken("a reset")

    monkeypatch.setattr(Acts, "reset", broken)
    plan = [Action(n * 1_000, "request", (n, n, n, n)) for n in range(20)]
    plan.insert(11, Action(10_500, "reset", (0, 0, 0, 0)))
    left = minimised(1, replace(small(1), span_s=0.1), plan, "SimulationError: a reset")
    assert left == [plan[11]]
