"""A drive that fails below a real node: engines are served on from memory, a line says what is
wrong, and what lies there is hit again once it is well, without a restart."""

import itertools
import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtide.testing.fake_engine import FakeEngine, Loaded, make_tokens
from kvtide.testing.node_process import NodeProcess
from kvtide.tiers.disk.space import FLOOR_BYTES
from kvtide.units import MiB
from kvtide.wire.command import ask
from tests.mounts import mount, unmount
from tests.node.fixtures import StartNode
from tests.node.test_engines import wait_status

BLOCKS = 64
WHOLE = Loaded(BLOCKS, BLOCKS)
PROMPTS = [make_tokens(16 * BLOCKS, seed=seed) for seed in range(6)]
"""4 MiB each, all together more than host memory: the first ones are on disk alone."""
CAP_BYTES, HOST_BYTES = 128 * MiB, 16 * MiB
DRIVE_BYTES = FLOOR_BYTES + 2 * CAP_BYTES


class Drive:
    """A file system in memory, and the mount by which a node knows it."""

    def __init__(self, below: Path) -> None:
        self._source, self._mount = below / "source", below / "mount"
        for path in (self._source, self._mount):
            path.mkdir()
        self.path = self._mount / "kv"
        self.is_there = mount(
            "-t", "tmpfs", "-o", f"size={DRIVE_BYTES},mode=700", "none", self._source
        )
        if self.is_there:
            assert mount("--bind", self._source, self._mount)

    def fail(self, way: str) -> None:
        """Become so."""
        match way:
            case "full":  # with what it holds now
                found = os.statvfs(self._source)
                taken = (found.f_blocks - found.f_bfree) * found.f_frsize
                assert mount("-o", f"remount,size={taken}", self._source)
            case "read-only":  # by a mount above it: the node has files open for writing
                assert mount("--bind", self._source, self._mount)
                assert mount("-o", "remount,bind,ro", self._mount)
            case "gone":
                unmount(self._mount)

    def heal(self, way: str) -> None:
        """Be as before."""
        match way:
            case "full":
                assert mount("-o", f"remount,size={DRIVE_BYTES}", self._source)
            case "read-only":
                unmount(self._mount)
            case "gone":
                assert mount("--bind", self._source, self._mount)

    def close(self) -> None:
        """Leave nothing mounted."""
        for path in (self._mount, self._source):
            while path.is_mount():
                unmount(path)


@pytest.fixture
def drive(tmp_path: Path) -> Iterator[Drive]:
    """A drive that is well."""
    made = Drive(tmp_path)
    if not made.is_there:
        pytest.skip("mounting is not permitted here")
    try:
        yield made
    finally:
        made.close()


def state_of(node: NodeProcess) -> str:
    state: str = node.status()["tiers"]["disk"]["state"]
    return state


def complaints(node: NodeProcess) -> list[str]:
    """Lines of the log that somebody should read."""
    levels = (" WARNING ", " ERROR ")
    return [line for line in node.log().splitlines() if any(level in line for level in levels)]


STATES = {
    "full": r"the drive is full: [0-9.]+ M?i?B are free, and 1 GiB are left to others",
    "read-only": r"errno 30 \(Read-only file system\)",
    "gone": r"errno 2 \(No such file or directory\)",
}


@pytest.mark.parametrize("way", STATES)
def test_a_drive_that_fails_below_a_node_costs_its_engine_nothing_and_heals(
    drive: Drive, new_node: StartNode, way: str
) -> None:
    node = new_node(disk_path=drive.path, disk_bytes_max=CAP_BYTES, host_bytes=HOST_BYTES)
    node.start()
    fresh = (make_tokens(16 * BLOCKS, seed=seed) for seed in itertools.count(100))
    with FakeEngine(node.places, "one") as engine:
        for tokens in PROMPTS:
            engine.keep(tokens)
            wait_status(node, lambda status: not status["tiers"]["disk"]["queued_bytes"])
        assert complaints(node) == []
        drive.fail(way)

        while state_of(node) == "on":
            tokens = next(fresh)
            engine.keep(tokens)
            assert engine.load(tokens) == WHOLE, "from host memory"
            if way == "gone":
                found = engine.load(PROMPTS[1])
                assert found.verified == found.blocks, "no more than is there"
        assert re.fullmatch(STATES[way], state_of(node)), complaints(node)
        said = complaints(node)
        kinds = [re.search("reads|writes|full", line) for line in said]
        assert len({kind and kind[0] for kind in kinds}) == len(said), "each is said once"
        assert all(re.search(f"disk {drive.path}: .*{STATES[way]}", line) for line in said), said
        if way != "gone":
            assert engine.load(PROMPTS[1]) == WHOLE, "what can be read is read"

        drive.heal(way)
        wait_status(node, lambda status: status["tiers"]["disk"]["state"] == "on")
        before = node.status()["counts"].get("tier_loads.disk.loaded", 0)
        stored = node.status()["counts"]["tier_stores.disk.stored"]
        assert engine.load(PROMPTS[2]) == WHOLE
        assert node.status()["counts"]["tier_loads.disk.loaded"] >= before + BLOCKS // 4
        engine.keep(next(fresh))
        wait_status(
            node,
            lambda status: status["counts"]["tier_stores.disk.stored"] >= stored + BLOCKS // 4,
        )
        wait_status(node, lambda _: len(complaints(node)) == 2 * len(said))  # it is well again
    ask(node.places, "check")
