"""The node in little memory: it grows as far as it may, gives back, and is never killed."""

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvtide.core.plan import PASSING
from kvtide.errors import HostMemoryError
from kvtide.memory.probe import RESERVE_BYTES_MIN, CgroupLimit, HostMemory, reserve_bytes
from kvtide.node.watch import STEP_BYTES, MemoryWatch
from kvtide.testing.fake_engine import FakeEngine, Loaded, Shape, make_tokens
from kvtide.testing.fake_worker import FakeWorker
from kvtide.testing.node_process import NodeProcess, wait_dead
from kvtide.units import GiB, MiB
from tests.node.cgroups import MemoryGroup, memory_group
from tests.node.fixtures import StartNode

HOST_BYTES = 8 * GiB
TOTAL_BYTES = 32 * GiB
RESERVE_BYTES = reserve_bytes(TOTAL_BYTES)


class Machine:
    """A look at memory that the test decides."""

    def __init__(self) -> None:
        self.available_bytes = 16 * GiB
        self.limit: CgroupLimit | None = None
        self.is_blind = False

    def __call__(self) -> HostMemory:
        if self.is_blind:
            raise HostMemoryError("mount /proc")
        return HostMemory(TOTAL_BYTES, self.available_bytes, self.limit)


@pytest.fixture
def machine() -> Machine:
    return Machine()


@pytest.fixture
def watch(machine: Machine) -> MemoryWatch:
    return MemoryWatch(HOST_BYTES, machine)


def test_says_nothing_while_there_is_room(watch: MemoryWatch) -> None:
    assert watch.limit(0) is None
    assert watch.limit(4 * GiB) is None


def test_lowers_the_limit_by_what_is_missing(machine: Machine, watch: MemoryWatch) -> None:
    machine.available_bytes = RESERVE_BYTES - GiB
    assert watch.limit(6 * GiB) == 5 * GiB


def test_says_each_limit_once(machine: Machine, watch: MemoryWatch) -> None:
    machine.available_bytes = RESERVE_BYTES - GiB
    assert watch.limit(6 * GiB) == 5 * GiB
    machine.available_bytes += GiB  # it has been given back
    assert watch.limit(5 * GiB) is None


def test_a_reserve_that_is_short_by_little_is_made_whole(
    machine: Machine, watch: MemoryWatch
) -> None:
    machine.available_bytes = RESERVE_BYTES - MiB
    assert watch.limit(HOST_BYTES) == HOST_BYTES - MiB


def test_small_rises_are_not_said(machine: Machine, watch: MemoryWatch) -> None:
    machine.available_bytes = RESERVE_BYTES - GiB
    watch.limit(6 * GiB)
    machine.available_bytes += STEP_BYTES - 1
    assert watch.limit(6 * GiB) is None
    machine.available_bytes += 1
    assert watch.limit(6 * GiB) == 5 * GiB + STEP_BYTES


def test_grows_back_to_its_full_size_and_no_further(machine: Machine, watch: MemoryWatch) -> None:
    machine.available_bytes = 0
    assert watch.limit(2 * GiB) == 2 * GiB - RESERVE_BYTES
    machine.available_bytes = 20 * GiB
    assert watch.limit(GiB) == HOST_BYTES
    assert watch.limit(GiB) is None


def test_full_size_is_said_even_if_it_is_near(machine: Machine, watch: MemoryWatch) -> None:
    machine.available_bytes = RESERVE_BYTES
    assert watch.limit(HOST_BYTES - STEP_BYTES) == HOST_BYTES - STEP_BYTES
    machine.available_bytes += STEP_BYTES - 1
    assert watch.limit(HOST_BYTES - STEP_BYTES) is None
    machine.available_bytes += 1
    assert watch.limit(HOST_BYTES - STEP_BYTES) == HOST_BYTES


def test_limit_is_never_negative(machine: Machine, watch: MemoryWatch) -> None:
    machine.available_bytes = 0
    assert watch.limit(0) == 0


def test_reserve_follows_the_cgroup_that_limits(machine: Machine, watch: MemoryWatch) -> None:
    limit_bytes = 4 * GiB
    machine.limit = CgroupLimit(Path("/group"), limit_bytes, used_bytes=limit_bytes - 100 * MiB)
    assert watch.limit(2 * GiB) == 2 * GiB + 100 * MiB - RESERVE_BYTES_MIN


def test_memory_that_cannot_be_seen_is_said(machine: Machine, watch: MemoryWatch) -> None:
    """The runtime logs it once and goes on; the limit stays."""
    machine.is_blind = True
    with pytest.raises(HostMemoryError):
        watch.limit(0)


# ---- real groups

SHAPE = Shape(cell_bytes=MiB, chunk_tokens=64)  # chunks of 4 MiB
CHUNK_BYTES = SHAPE.chunk_blocks * SHAPE.cell_bytes
GROUP_BYTES = 768 * MiB
EATEN_BYTES = 448 * MiB
"""What somebody else in the group takes."""


def start_in(group: MemoryGroup, node: NodeProcess) -> None:
    """Start the node as a process of the group."""
    program = (
        "import pathlib, sys; from kvtide.node.launch import start_node;"
        f"start_node(pathlib.Path({str(node.places.directory)!r}), {node.environment!r})"
    )
    launcher = group.run([sys.executable, "-c", program])
    assert launcher.wait(20) == 0
    node.wait_answer()


def wait_status(node: NodeProcess, is_so: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    """The status once something is so."""
    until_s = time.monotonic() + 20
    while time.monotonic() < until_s:
        status = node.status()
        if is_so(status["host"]):
            return status
        time.sleep(0.05)
    raise AssertionError(status["host"])


def fill(engine: FakeEngine, chunk_count: int, first_seed: int = 0) -> None:
    """Store so many chunks, each a prompt of its own, waiting while memory is on its way."""
    for seed in range(first_seed, first_seed + chunk_count):
        until_s = time.monotonic() + 10
        while engine.store(tokens_of(seed)).outcomes[0] in PASSING:
            assert time.monotonic() < until_s, "no memory comes"


def tokens_of(seed: int) -> list[int]:
    """The prompt of that seed."""
    return make_tokens(SHAPE.chunk_tokens, seed)


def test_grows_until_its_group_is_full_and_evicts_then(new_node: StartNode) -> None:
    """More is asked for, and stored, than the group allows: the node stays below, and serves."""
    with memory_group(GROUP_BYTES) as group:
        node = new_node(host_bytes="640MiB")
        start_in(group, node)
        size_bytes = node.status()["host"]["size_bytes"]
        assert 128 * MiB < size_bytes < GROUP_BYTES - RESERVE_BYTES_MIN
        assert "host_bytes asks for 640 MiB, but only" in node.log()
        with FakeEngine(node.places, "one", SHAPE) as engine:
            fill(engine, 2 * GROUP_BYTES // CHUNK_BYTES)
            last = 2 * GROUP_BYTES // CHUNK_BYTES
            engine.keep(tokens_of(last))
            assert engine.load(tokens_of(last)) == Loaded(4, 4)
            host = node.status()["host"]
            assert group.used_bytes <= GROUP_BYTES
            assert host["allocated_bytes"] >= 128 * MiB, "it did grow"
            assert host["allocated_bytes"] <= GROUP_BYTES - RESERVE_BYTES_MIN
            assert node.status()["evicted"]["room"] > 0
        assert group.kills == 0
        node.end()


@pytest.mark.slow
def test_gives_memory_back_when_its_group_needs_it(new_node: StartNode) -> None:
    """Another process of the group takes most of it: the node shrinks, nobody is killed."""
    with memory_group(GROUP_BYTES) as group:
        node = new_node(host_bytes="448MiB")
        start_in(group, node)
        with FakeEngine(node.places, "one", SHAPE) as engine:
            fill(engine, 256 * MiB // CHUNK_BYTES)
            before = node.status()["host"]["allocated_bytes"]
            before_regions = len(node.status()["host"]["regions"])
            left_bytes = GROUP_BYTES - EATEN_BYTES - RESERVE_BYTES_MIN + STEP_BYTES
            assert before > left_bytes
            eat = (
                "import sys, time\nkept = []\n"
                f"for _ in range({EATEN_BYTES // (8 * MiB)}):\n"
                f"    kept.append(b'x' * {8 * MiB})\n"
                "    time.sleep(0.05)\n"  # slow enough to be seen once a second
                "print('full', flush=True)\nsys.stdin.read()\n"
            )
            with group.run(
                [sys.executable, "-c", eat], stdin=subprocess.PIPE, stdout=subprocess.PIPE
            ) as eater:
                assert eater.stdout is not None
                assert eater.stdout.readline() == b"full\n", "it was killed"
                host = wait_status(node, lambda host: host["allocated_bytes"] <= left_bytes)
                assert host["host"]["limit_bytes"] < 320 * MiB
                worker = engine.workers[0]
                assert isinstance(worker, FakeWorker)
                regions = len(host["host"]["regions"])
                assert len(worker.open_regions) <= regions < before_regions
                assert engine.load(tokens_of(0)).blocks == engine.load(tokens_of(0)).verified
            assert group.kills == 0
            wait_status(node, lambda host: host["limit_bytes"] >= 384 * MiB)
            fill(engine, 32, first_seed=1_000)
        assert not wait_dead(node.pid, 0)
        node.end()
