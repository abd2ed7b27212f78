"""Two nodes that share nothing but a directory: what one stored is a hit on the other."""

import json
from pathlib import Path

import pytest

from kvtide.cli.page import page
from kvtide.testing.fake_engine import FakeEngine, Loaded, Shape, make_tokens
from kvtide.testing.node_process import NodeProcess
from kvtide.wire.command import ask
from tests.node.test_engines import check_sums, idle, wait_status

TOKENS = make_tokens(16 * 10, seed=1)  # two chunks and a tail of two blocks


def node_of(runtime_dir: Path, name: str, *entries: dict[str, object]) -> NodeProcess:
    """A node of its own runtime directory, not started."""
    return NodeProcess(runtime_dir / name, host_bytes="64MiB", tiers=json.dumps(entries))


@pytest.fixture
def shared(tmp_path: Path) -> dict[str, object]:
    """The entry of both."""
    return {"type": "shared_dir", "path": str(tmp_path / "all"), "bytes_max": "256MiB"}


def folders(shared: dict[str, object]) -> set[Path]:
    """Sub-directories of members."""
    return {path for path in Path(str(shared["path"])).iterdir() if path.is_dir()}


def wait_written(node: NodeProcess, tier: str, records: int) -> None:
    wait_status(
        node,
        lambda status: (
            status["tiers"][tier]["records"] >= records
            and not status["tiers"][tier]["queued_bytes"]
        ),
    )


@pytest.mark.parametrize("shape", [Shape(), Shape(shard_count=2)], ids=["one", "two shards"])
def test_what_one_node_stored_is_a_hit_on_another(
    runtime_dir: Path, shared: dict[str, object], shape: Shape
) -> None:
    with node_of(runtime_dir, "a", shared) as here, node_of(runtime_dir, "b", shared) as there:
        with FakeEngine(here.places, "one", shape) as engine:
            assert engine.store(TOKENS).written == 3
            wait_written(here, "shared_dir", 3)
            wait_written(there, "shared_dir", 3)
        with FakeEngine(there.places, "two", shape) as engine:
            assert engine.load(TOKENS) == Loaded(10, 10)
            status = wait_status(there, idle)
            check_sums(status)
            assert status["counts"]["tier_loads.shared_dir.loaded"] == 3
            assert "tier_stores.shared_dir.stored" not in status["counts"], "it came from there"
        for node in (here, there):
            ask(node.places, "check")


def test_a_node_that_was_killed_has_its_folder_again(
    runtime_dir: Path, shared: dict[str, object]
) -> None:
    """And what it stored is a hit on the other in between."""
    with node_of(runtime_dir, "a", shared) as here, node_of(runtime_dir, "b", shared) as there:
        with FakeEngine(here.places, "one") as engine:
            engine.keep(TOKENS)
            wait_written(here, "shared_dir", 3)
            here.kill()
        wait_written(there, "shared_dir", 3)
        before = folders(shared)
        with FakeEngine(there.places, "two") as engine:
            assert engine.load(TOKENS) == Loaded(10, 10)
        here.start()
        with FakeEngine(here.places, "three") as engine:
            assert engine.load(TOKENS) == Loaded(10, 10)
        assert folders(shared) == before
        assert here.status()["tiers"]["shared_dir"]["bytes_used"] > 3 * 16 * 4096


def test_what_comes_from_the_farther_tier_is_kept_by_the_nearer_one(
    runtime_dir: Path, shared: dict[str, object], tmp_path: Path
) -> None:
    """Each tier has its own section and numbers; two of a type have names."""
    disks = [
        {"type": "disk", "name": name, "path": str(tmp_path / name), "bytes_max": "256MiB"}
        for name in ("fast", "slow")
    ]
    with node_of(runtime_dir, "a", shared) as here:
        with FakeEngine(here.places, "one") as engine:
            engine.keep(TOKENS)
            wait_written(here, "shared_dir", 3)
        with node_of(runtime_dir, "b", *disks, shared) as there:
            with FakeEngine(there.places, "two") as engine:
                assert engine.load(TOKENS) == Loaded(10, 10)
                engine.load(TOKENS)  # which offers to the tiers that have it not
                for name in ("fast", "slow"):
                    wait_written(there, name, 3)
            lines = page(there.status(), "here").splitlines()
            for name in ("fast", "slow", "shared_dir"):
                assert [line for line in lines if line.startswith(f"{name} ")], lines
    with node_of(runtime_dir, "b", *disks) as there, FakeEngine(there.places, "two") as engine:
        assert engine.load(TOKENS) == Loaded(10, 10)
        assert there.status()["counts"]["tier_loads.fast.loaded"] == 3


def test_a_clear_is_this_nodes_alone(runtime_dir: Path, shared: dict[str, object]) -> None:
    with node_of(runtime_dir, "a", shared) as here, node_of(runtime_dir, "b", shared) as there:
        with FakeEngine(here.places, "one") as engine:
            engine.keep(TOKENS)
            wait_written(here, "shared_dir", 3)
        wait_written(there, "shared_dir", 3)
        ask(there.places, "clear")
        with FakeEngine(there.places, "two") as engine:
            assert engine.load(TOKENS) == Loaded(0, 0)
        with FakeEngine(here.places, "three") as engine:
            assert engine.load(TOKENS) == Loaded(10, 10)
