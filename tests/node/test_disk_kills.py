"""Nodes that are killed at any moment while they store: the next finds what was there."""

import random
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from kvtide.errors import KVTideError
from kvtide.testing.fake_engine import FakeEngine, Loaded, make_tokens
from kvtide.testing.node_process import NodeProcess
from kvtide.tiers.disk.check import check
from kvtide.units import GiB
from kvtide.wire.command import ask
from tests.node.fixtures import StartNode

CAP_BYTES = 4 * GiB  # more than is stored: nothing is evicted
WAIT_S_MAX = 20.0
TRIES_MAX = 3
BLOCKS = 22  # five chunks and a tail
UNDER_LOAD_MS_MAX = 400.0


def usage_bytes(path: Path) -> int:
    """What the files take, as the file system counts."""
    return sum(file.stat().st_blocks * 512 for file in path.rglob("*") if file.is_file())


class Life:
    """One node: what was surely on disk before it was killed."""

    def __init__(self, node: NodeProcess, seed: int) -> None:
        self.node = node
        self.seed = seed
        self.is_good = True
        """Whether nothing failed before the node was killed."""
        self.sure: list[int] = []
        """Seeds of prompts whose records were there when the node said that none waited."""

    def store(self, engine: FakeEngine, may_end: threading.Event) -> None:
        """Store prompts until the node is gone."""
        try:
            while not may_end.is_set():
                self.seed += 1
                stored = engine.store(make_tokens(16 * BLOCKS, seed=self.seed))
                status = self.node.status()
                if set(stored.outcomes) <= {"", "held"} and not self._is_waiting(status):
                    self.sure.append(self.seed)
        except (AssertionError, KVTideError):
            self.is_good = may_end.wait(WAIT_S_MAX)

    @staticmethod
    def _is_waiting(status: dict[str, Any]) -> bool:
        return bool(status["tiers"]["disk"]["queued_bytes"]) or bool(status["entries"]["storing"])


@pytest.mark.parametrize("kills", [6, pytest.param(50, marks=pytest.mark.slow)])
@pytest.mark.timeout(600)
def test_every_start_after_a_kill_is_clean_and_finds_what_was_stored(
    new_node: StartNode, tmp_path: Path, kills: int
) -> None:
    draw = random.Random(kills)
    path = tmp_path / "disk"
    sure: list[int] = []
    seed = 0
    for _ in range(kills):
        node = new_node(disk_path=path, disk_bytes_max=str(CAP_BYTES))
        node.start()
        assert usage_bytes(path) <= CAP_BYTES
        life = Life(node, seed)
        engine = FakeEngine(node.places, "one").start()
        may_end = threading.Event()
        thread = threading.Thread(target=life.store, args=(engine, may_end))
        thread.start()
        time.sleep(draw.uniform(0, UNDER_LOAD_MS_MAX) / 1000)  # of its life, not for a state
        may_end.set()
        node.kill()
        engine.close()
        thread.join()
        assert life.is_good, "failed before the kill"
        sure += life.sure
        seed = life.seed
    node = new_node(disk_path=path, disk_bytes_max=str(CAP_BYTES))
    node.start()
    assert sure, "the nodes were killed before anything was stored"
    assert not node.status()["tiers"]["disk"]["evicted"]
    assert usage_bytes(path) < CAP_BYTES * 0.9, "some may have been evicted"
    assert usage_bytes(path) <= CAP_BYTES
    with FakeEngine(node.places, "two") as engine:
        for one in sure:
            tokens = make_tokens(16 * BLOCKS, seed=one)
            # A drive that others keep busy may be too slow for one request, and yet have it.
            tries = (engine.load(tokens) for _ in range(TRIES_MAX))
            assert Loaded(BLOCKS, BLOCKS) in tries, one
        counts = node.status()["counts"]
        assert "tier_loads.disk.corrupt" not in counts
    ask(node.places, "check")
    assert {one.fault for one in check(path)} == {""}, "all that lies there is proven"
