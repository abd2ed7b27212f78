"""Two nodes that share nothing but an InfiniStore server."""

import json
from pathlib import Path

import pytest

from kvtide.testing.fake_engine import FakeEngine, Loaded, Shape, make_tokens
from kvtide.testing.node_process import NodeProcess
from kvtide.wire.command import ask
from tests.node.test_engines import check_sums, idle, wait_status
from tests.tiers.infinistore_place import PLACES, Place, running

pytestmark = pytest.mark.long

TOKENS = make_tokens(16 * 10, seed=1)  # two chunks and a tail of two blocks


def node_of(runtime_dir: Path, name: str, place: Place) -> NodeProcess:
    """A node of its own runtime directory, not started."""
    entry = {"type": "infinistore", "url": f"infinistore://127.0.0.1:{place.port}"}
    return NodeProcess(runtime_dir / name, host_bytes="64MiB", tiers=json.dumps([entry]))


@pytest.mark.parametrize("kind", PLACES)
@pytest.mark.parametrize("shape", [Shape(), Shape(shard_count=2)], ids=["one", "two shards"])
def test_what_one_node_stored_is_a_hit_on_another(
    runtime_dir: Path, tmp_path: Path, kind: str, shape: Shape
) -> None:
    with (
        running(kind, tmp_path) as place,
        node_of(runtime_dir, "a", place) as here,
        node_of(runtime_dir, "b", place) as there,
    ):
        with FakeEngine(here.places, "one", shape) as engine:
            assert engine.store(TOKENS).written == 3
            wait_status(here, lambda status: status["tiers"]["infinistore"]["records"] == 3)
        with FakeEngine(there.places, "two", shape) as engine:
            assert engine.load(TOKENS) == Loaded(10, 10)
            status = wait_status(there, idle)
            check_sums(status)
            assert status["counts"]["tier_loads.infinistore.loaded"] == 3
        for node in (here, there):
            ask(node.places, "check")
