"""Nodes with a disk: what they held is found again, and a disk in trouble troubles nobody."""

import os
from pathlib import Path
from typing import Any

import pytest

from kvtide.cli.page import page
from kvtide.core.layout import KVLayout
from kvtide.node.memory import NodeMemory, RegionFiles
from kvtide.testing.fake_engine import FakeEngine, Loaded, Shape, make_tokens
from kvtide.testing.node_process import NodeProcess
from kvtide.units import KiB, MiB, format_bytes
from kvtide.wire.command import ask
from tests.node.fixtures import StartNode
from tests.node.test_engines import check_sums, idle, wait_status

TOKENS = make_tokens(16 * 10, seed=1)  # two chunks and a tail of two blocks
TWO_SHARDS = Shape(shard_count=2)


@pytest.fixture
def disk_path(tmp_path: Path) -> Path:
    return tmp_path / "disk"


def disk_node(new_node: StartNode, disk_path: Path, **settings: object) -> NodeProcess:
    """A node with a disk, started."""
    node = new_node(**({"disk_path": disk_path, "disk_bytes_max": "256MiB"} | settings))
    node.start()
    return node


def wait_written(node: NodeProcess, records: int) -> None:
    """Wait until so many records are on disk, and nothing is on its way there."""
    wait_status(
        node,
        lambda status: (
            status["tiers"]["disk"]["records"] >= records
            and not status["tiers"]["disk"]["queued_bytes"]
        ),
    )


@pytest.mark.parametrize("end", ["kill", "end"])
@pytest.mark.parametrize("shape", [Shape(), TWO_SHARDS], ids=["one shard", "two shards"])
def test_what_a_node_held_is_found_by_the_next(
    new_node: StartNode, disk_path: Path, end: str, shape: Shape
) -> None:
    node = disk_node(new_node, disk_path)
    with FakeEngine(node.places, "one", shape) as engine:
        assert engine.store(TOKENS).written == 3
        wait_written(node, 3)
        getattr(node, end)()
    node = disk_node(new_node, disk_path)
    with FakeEngine(node.places, "two", shape) as engine:
        assert engine.load(TOKENS) == Loaded(10, 10)
        assert engine.load(TOKENS) == Loaded(10, 10)
        status = wait_status(node, idle)
        check_sums(status)
        assert status["counts"]["tier_loads.disk.loaded"] == 3
        assert "tier_stores.disk.stored" not in status["counts"], "it came from there"
    ask(node.places, "check")


def test_memory_that_tiers_read_and_write_is_populated(
    new_node: StartNode, disk_path: Path
) -> None:
    """Direct I/O into a view that is not runs at half of what drives give."""
    node = disk_node(new_node, disk_path)
    with FakeEngine(node.places, "one"):
        host = wait_status(node, lambda status: status["host"]["regions"])["host"]
        wait_status(node, lambda _: shared_bytes(node.pid) >= host["allocated_bytes"])


def test_without_tiers_no_memory_is_populated() -> None:
    memory = NodeMemory(64 * MiB, has_tiers=False)
    before = shared_bytes(os.getpid())
    made = memory.make(1, KVLayout(16, 64, (MiB,)), 8).result()
    assert isinstance(made, RegionFiles), made
    memory.add(1, made)
    memory.free(1).result()  # by the same thread: whatever was handed to it before has run
    assert shared_bytes(os.getpid()) - before < 8 * MiB


def shared_bytes(pid: int) -> int:
    """Shared memory in the page tables of a process."""
    (line,) = (
        line
        for line in Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines()
        if line.startswith("RssShmem:")
    )
    return int(line.split()[1]) * KiB


def test_more_than_memory_holds_is_still_hit(new_node: StartNode, disk_path: Path) -> None:
    node = disk_node(new_node, disk_path, host_bytes="16MiB")
    prompts = [make_tokens(16 * 64, seed=seed) for seed in range(12)]  # 4 MiB each
    with FakeEngine(node.places, "one") as engine:
        for tokens in prompts:
            engine.keep(tokens)
            wait_status(node, lambda status: not status["tiers"]["disk"]["queued_bytes"])
        for tokens in prompts:
            assert engine.load(tokens) == Loaded(64, 64), node.status()["counts"]
        status = wait_status(node, idle)
        check_sums(status)
        assert status["evicted"]["room"] > 0
        ask(node.places, "check")


def test_bytes_that_were_damaged_are_a_miss(new_node: StartNode, disk_path: Path) -> None:
    """And what lies before them is still a hit."""
    node = disk_node(new_node, disk_path)
    with FakeEngine(node.places, "one") as engine:
        engine.keep(TOKENS)
        wait_written(node, 3)
    node.end()
    segment = max(disk_path.rglob("*.segment"), key=lambda path: path.stat().st_size)
    with segment.open("r+b") as file:
        file.seek(-5, os.SEEK_END)
        last = file.read(1)
        file.seek(-5, os.SEEK_END)
        file.write(bytes([last[0] ^ 1]))
    node = disk_node(new_node, disk_path)
    with FakeEngine(node.places, "two") as engine:
        assert engine.load(TOKENS) == Loaded(8, 8)
        assert wait_status(node, idle)["counts"]["tier_loads.disk.corrupt"] == 1


def test_a_second_node_on_one_disk_serves_from_memory(
    new_node: StartNode, disk_path: Path, tmp_path: Path, runtime_dir: Path
) -> None:
    """One that an engine started goes without, and says so; the first one's disk is untouched, and
    is taken in once nobody else has it."""
    first = disk_node(new_node, disk_path)
    other = NodeProcess(
        runtime_dir / "other",
        host_bytes="64MiB",
        disk_path=disk_path,
        disk_bytes_max="256MiB",
    )
    with other:
        assert f"{first.pid}" in other.log()
        assert "one node may use it" in other.status()["tiers"]["disk"]["state"]
        with FakeEngine(other.places, "two") as engine:
            assert engine.store(TOKENS).written == 3
            assert engine.load(TOKENS) == Loaded(10, 10)
            first.end()
            wait_status(other, lambda status: status["tiers"]["disk"]["state"] == "on")
            engine.keep(make_tokens(64, seed=2))
            wait_written(other, 1)


def test_status_tells_of_the_disk(new_node: StartNode, disk_path: Path) -> None:
    node = disk_node(new_node, disk_path)
    with FakeEngine(node.places, "one") as engine:
        engine.keep(TOKENS)
        wait_written(node, 3)
    disk = node.status()["tiers"]["disk"]
    assert disk["state"] == "on"
    assert disk["bytes_max"] == 256 << 20
    assert 0 < disk["bytes_used"] <= disk["bytes_max"]
    with FakeEngine(node.places, "two") as engine:
        assert engine.load(make_tokens(64, seed=9)) == Loaded(0, 0)
    shown = disk_section(node.status())
    assert "of 256 MiB, 3 records, 0 B waiting\n" in shown
    assert "loads: none; 0 B" in shown
    assert "stores: stored 3; " in shown
    assert "questions (0%) found something" in shown
    status = node.status()
    status["counts"]["tier_stored_bytes.disk"] = 30 * MiB
    status["node"]["uptime_s"] = 10
    assert "written 3 MiB a second since the node's start" in disk_section(status)


def test_status_tells_of_what_a_disk_gives(new_node: StartNode, disk_path: Path) -> None:
    """Loads, the share of questions that found something, and what is wrong with it."""
    node = disk_node(new_node, disk_path)
    with FakeEngine(node.places, "one") as engine:
        engine.keep(TOKENS)
        wait_written(node, 3)
    node.end()
    node = disk_node(new_node, disk_path)
    with FakeEngine(node.places, "two") as engine:
        assert engine.load(TOKENS) == Loaded(10, 10)
        assert engine.load(make_tokens(64, seed=9)) == Loaded(0, 0)
    status = node.status()
    shown = disk_section(status)
    found, absent = (status["counts"][f"tier_lookups.disk.{way}"] for way in ("found", "absent"))
    assert min(found, absent) > 0
    share = f"hits: {found} of {found + absent} questions ({found / (found + absent):.0%}) found"
    assert share in shown
    assert f"loads: loaded 3; {format_bytes(status['counts']['tier_loaded_bytes.disk'])}" in shown
    status["tiers"]["disk"]["state"] = "errno 5 (Input/output error)"
    assert "0 B waiting; errno 5 (Input/output error)\n" in disk_section(status)


def disk_section(status: dict[str, Any]) -> str:
    """What the page for people says of the disk."""
    lines = page(status, "here").splitlines()
    first = next(n for n, line in enumerate(lines) if line.startswith("disk "))
    return "\n".join(lines[first:])
