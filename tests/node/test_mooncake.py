"""Two nodes that share nothing but a Mooncake Store, whose clients run beside them."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtide.testing import mooncake_servers
from kvtide.testing.fake_engine import FakeEngine, Loaded, Shape, make_tokens
from kvtide.testing.mooncake_servers import Store, clients_of
from kvtide.testing.node_process import NodeProcess, wait_dead
from kvtide.units import MiB
from kvtide.wire.command import ask
from tests.node.test_engines import check_sums, idle, wait_status
from tests.tiers.mooncake_place import needs_client

pytestmark = [needs_client, pytest.mark.long]

TOKENS = make_tokens(16 * 10, seed=1)  # two chunks and a tail of two blocks
WAIT_S = 30.0


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with mooncake_servers.running(tmp_path / "store", 64 * MiB) as one:
        yield one


def node_of(runtime_dir: Path, name: str, store: Store) -> NodeProcess:
    """A node of its own runtime directory, not started."""
    entry = {"type": "mooncake", "url": str(store.address), "metrics_port": store.metrics_port}
    return NodeProcess(runtime_dir / name, host_bytes="64MiB", tiers=json.dumps([entry]))


@pytest.mark.parametrize("shape", [Shape(), Shape(shard_count=2)], ids=["one", "two shards"])
def test_what_one_node_stored_is_a_hit_on_another(
    runtime_dir: Path, store: Store, shape: Shape
) -> None:
    with node_of(runtime_dir, "a", store) as here, node_of(runtime_dir, "b", store) as there:
        with FakeEngine(here.places, "one", shape) as engine:
            assert engine.store(TOKENS).written == 3
            wait_status(here, lambda status: status["tiers"]["mooncake"]["records"] == 3)
        with FakeEngine(there.places, "two", shape) as engine:
            assert engine.load(TOKENS) == Loaded(10, 10)
            status = wait_status(there, idle)
            check_sums(status)
            assert status["counts"]["tier_loads.mooncake.loaded"] == 3
        for node in (here, there):
            ask(node.places, "check")


@pytest.mark.parametrize("end", ["kill", "end"])
def test_clients_end_with_their_node(runtime_dir: Path, store: Store, end: str) -> None:
    with node_of(runtime_dir, "a", store) as node:
        wait_status(node, lambda status: status["tiers"]["mooncake"]["state"] == "on")
        clients = clients_of(node.pid)
        assert clients
        getattr(node, end)()
        for pid in clients:
            assert wait_dead(pid, WAIT_S), pid
