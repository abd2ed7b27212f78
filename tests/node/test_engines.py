"""Engines on a real node: stores, hits, deaths in every place, and numbers that add up."""

import itertools
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import pytest

from kvtide.core import messages as m
from kvtide.testing.fake_engine import FakeEngine, Loaded, Shape, make_tokens
from kvtide.testing.fake_worker import FakeWorker, WorkerProcess
from kvtide.testing.node_process import NodeProcess
from kvtide.units import KiB, MiB
from kvtide.wire.command import ask
from tests.node.fixtures import StartNode

TOKENS = make_tokens(16 * 10, seed=1)  # two chunks and a tail of two blocks
TWO_SHARDS = Shape(shard_count=2)


def wait_status(node: NodeProcess, is_so: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    """The status once something is so."""
    until_s = time.monotonic() + 20
    while time.monotonic() < until_s:
        status = node.status()
        if is_so(status):
            return status
        time.sleep(0.01)
    raise AssertionError(status)


def check_sums(status: dict[str, Any]) -> None:
    """Every byte that is allocated is free, held, or on its way; regions add up to the host."""
    host = status["host"]
    assert host["allocated_bytes"] == sum(region["bytes"] for region in host["regions"])
    assert host["free_bytes"] == sum(region["free_bytes"] for region in host["regions"])
    accounted = host["held_bytes"] + host["storing_bytes"] + host["loose_bytes"]
    assert accounted + host["free_bytes"] == host["allocated_bytes"], host
    assert host["allocated_bytes"] <= host["limit_bytes"] <= host["size_bytes"]
    assert host["evictable_bytes"] <= host["held_bytes"]
    assert host["quarantine_bytes"] <= host["granted_bytes"]
    for name in ("leases", "loads", "grants"):
        assert host[name] == sum(engine[name] for engine in status["engines"]), name


def idle(status: dict[str, Any]) -> bool:
    """Nobody holds anything."""
    host = status["host"]
    names = ("leases", "loads", "grants", "granted_bytes", "quarantine_bytes", "pinned_bytes")
    return not any(host[name] for name in names)


def open_bytes(status: dict[str, Any]) -> int:
    """Free bytes in regions that some engine has mapped."""
    regions = status["host"]["regions"]
    return sum(region["free_bytes"] for region in regions if region["open_to"])


@pytest.mark.parametrize("shape", [Shape(), TWO_SHARDS], ids=["one shard", "two shards"])
def test_stored_by_one_engine_and_loaded_by_another(
    running_node: NodeProcess, shape: Shape
) -> None:
    with (
        FakeEngine(running_node.places, "one", shape) as one,
        FakeEngine(running_node.places, "two", shape) as two,
    ):
        assert two.load(TOKENS) == Loaded(0, 0)
        assert one.store(TOKENS).written == 3
        assert two.load(TOKENS) == Loaded(10, 10)
        assert two.store(TOKENS).outcomes == ["held", "held", "held"]
        other = TOKENS[:100] + make_tokens(60, seed=2)
        assert two.load(other) == Loaded(6, 6), "whole blocks of the common part"
        status = wait_status(running_node, idle)
        check_sums(status)
        assert status["entries"] == {"chunks": 2, "tails": 1, "storing": 0}
        blocks = 10 * shape.cell_bytes * shape.shard_count
        assert status["host"]["held_bytes"] == status["host"]["evictable_bytes"] == blocks
        assert status["counts"]["stored_blocks"] == 10
        assert status["counts"]["loaded_blocks"] == 16
        assert {region["shards"] for region in status["host"]["regions"]} == {shape.shard_count}
        assert status["host"]["regions"][0]["open_to"] == ["one", "two"]


def test_numbers_add_up_in_the_middle_of_everything(running_node: NodeProcess) -> None:
    with FakeEngine(running_node.places, "one") as engine:
        engine.keep(TOKENS)
        match = engine.match(TOKENS)
        engine.scheduler.link.send(m.LoadBegin(match.lease))
        engine.match(TOKENS)
        offer = engine.offer(make_tokens(64 * 4, seed=3))
        status = running_node.status()
        check_sums(status)
        assert (status["host"]["leases"], status["host"]["loads"]) == (1, 1)
        assert status["host"]["grants"] == len(offer.grants) == 4
        assert status["host"]["storing_bytes"] == 16 * 64 * KiB == status["host"]["granted_bytes"]
        assert status["host"]["evictable_bytes"] == 0
        # The last of the chain is copied first: it is not held before those in front of it.
        worker = engine.workers[0]
        for job in engine.jobs(offer, make_tokens(64 * 4, seed=3))[:0:-1]:
            assert worker.write(*job)
        status = wait_status(running_node, lambda status: status["host"]["grants"] == 1)
        check_sums(status)
        assert status["host"]["storing_bytes"] == 16 * 64 * KiB
        assert status["entries"]["storing"] == 4
        ask(running_node.places, "clear")
        status = running_node.status()
        check_sums(status)
        assert status["host"]["loose_bytes"] > 0, "still read, and still written"
        assert status["host"]["quarantine_bytes"] == 4 * 64 * KiB
        engine.scheduler.link.send(m.LoadEnd(match.lease, 10))
        engine.scheduler.link.send(m.GrantReturn(offer.grants))
        check_sums(wait_status(running_node, idle))


def test_killed_worker_gives_its_cells_back(running_node: NodeProcess) -> None:
    """SIGKILL in the middle of a copy: what it wrote is never seen, its cells are free again."""
    engine = FakeEngine(running_node.places, "one", TWO_SHARDS, worker_processes=True).start()
    try:
        engine.keep(TOKENS)
        wait_status(running_node, lambda status: open_bytes(status) >= 2 * MiB)
        before = running_node.status()["host"]["free_bytes"]
        other = make_tokens(128, seed=2)
        offer = engine.offer(other)
        first, second = engine.workers
        assert isinstance(second, WorkerProcess)
        for job in engine.jobs(offer, other):
            first.write(*job)
        assert second.hold(*engine.jobs(offer, other)[0])
        status = running_node.status()
        assert status["host"]["grants"] == 2
        assert status["host"]["free_bytes"] < before
        second.kill()
        status = wait_status(running_node, idle)
        check_sums(status)
        assert status["host"]["free_bytes"] == before
        assert status["entries"] == {"chunks": 2, "tails": 1, "storing": 0}
        assert list(status["engines"][0]["workers"]) == ["0"]
        assert status["engines"][0]["state"] != "on", "it lacks a worker"
        ask(running_node.places, "check")
    finally:
        engine.close()


def test_last_words_of_a_killed_worker_count(running_node: NodeProcess) -> None:
    """It answered and was killed at once: what it said before it died is still heard."""
    for seed in range(10):
        engine_id = f"engine {seed}"
        engine = FakeEngine(running_node.places, engine_id, worker_processes=True).start()
        try:
            tokens = make_tokens(64, seed)
            job = engine.jobs(engine.offer(tokens), tokens)[0]
            worker = engine.workers[0]
            assert isinstance(worker, WorkerProcess)
            assert worker.write(*job)
            worker.kill()
            wait_status(running_node, idle)
        finally:
            engine.close()
    assert running_node.status()["entries"]["chunks"] == 10
    assert "before its hello" not in running_node.log()


def test_killed_engine_is_forgotten_and_its_counts_stay(running_node: NodeProcess) -> None:
    """Totals never go back: a counter that falls looks like a restart to whoever reads it."""
    place = running_node.places.directory
    command = [sys.executable, "-m", "kvtide.testing.fake_engine", place, "one", "128", "5"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"ready\n"
        wait_status(running_node, lambda status: status["counts"].get("tokens.computed") == 128)
        child.kill()
    status = wait_status(running_node, lambda status: not status["engines"])
    assert status["counts"]["tokens.computed"] == 128
    assert status["counts"]["stored_blocks"] == 8
    assert idle(status)
    with FakeEngine(running_node.places, "two") as engine:
        assert engine.load(make_tokens(128, seed=5)) == Loaded(8, 8)


def test_death_of_the_node_is_told_and_memory_let_go(running_node: NodeProcess) -> None:
    with FakeEngine(running_node.places, "one") as engine:
        engine.keep(TOKENS)
        worker = engine.workers[0]
        assert isinstance(worker, FakeWorker)
        assert worker.open_regions
        running_node.kill()
        assert engine.scheduler.wait_for(lambda: engine.scheduler.downs == [True])
        assert worker.regions.wait_empty(10)
        assert engine.scheduler.wait_for(lambda: engine.scheduler.absences > 0)
        running_node.start()
        engine.wait_serving()
        assert engine.load(TOKENS) == Loaded(0, 0), "it starts empty"
        engine.keep(TOKENS)
        assert engine.load(TOKENS) == Loaded(10, 10)


def test_memory_is_let_go_after_kvtide_stop(running_node: NodeProcess) -> None:
    """The user wants the memory back: engines live on, but must not hold what the node freed."""
    with FakeEngine(running_node.places, "one") as engine:
        engine.keep(TOKENS)
        worker = engine.workers[0]
        assert isinstance(worker, FakeWorker)
        assert worker.open_regions
        ask(running_node.places, "stop")
        assert running_node.wait_gone()
        assert worker.regions.wait_empty(10), "still mapped: the memory is not free"
        assert worker.deaths == 1


def test_room_moves_to_a_second_layout_until_it_has_about_half(new_node: StartNode) -> None:
    """One model fills the host, another comes: regions leave real workers, one by one."""
    node = new_node(host_bytes="32MiB")
    node.start()
    small, large = Shape(), Shape(model="other", cell_bytes=128 * KiB)
    with (
        FakeEngine(node.places, "one", small) as one,
        FakeEngine(node.places, "two", large) as two,
    ):
        fill(node, one)
        layouts = {engine["engine_id"]: engine["layout"] for engine in node.status()["engines"]}
        assert share(node, layouts["one"]) > 0.7
        until_s = time.monotonic() + 30
        seed = 10_000
        while share(node, layouts["two"]) < 0.45 and time.monotonic() < until_s:
            seed += 1
            two.store(make_tokens(64, seed))
        status = node.status()
        assert 0.45 <= share(node, layouts["two"]) <= 0.55, status["host"]
        assert status["evicted"]["moved"] > 0
        check_sums(status)
        two.keep(make_tokens(64, seed))
        assert two.load(make_tokens(64, seed)) == Loaded(4, 4)
        one.keep(TOKENS)
        assert one.load(TOKENS) == Loaded(10, 10)
        ask(node.places, "check")


def fill(node: NodeProcess, engine: FakeEngine) -> None:
    """Store until the layout has all the room there is."""
    until_s = time.monotonic() + 30
    for seed in itertools.count():
        engine.keep(make_tokens(64, seed))
        host = node.status()["host"]
        if host["allocated_bytes"] > 0.9 * host["size_bytes"]:
            return
        assert time.monotonic() < until_s, host


def share(node: NodeProcess, layout: str) -> float:
    """The part of the host that a layout has."""
    host = node.status()["host"]
    own = sum(region["bytes"] for region in host["regions"] if region["layout"] == layout)
    return own / float(host["size_bytes"])


def test_what_keeps_two_engines_from_sharing_is_named(running_node: NodeProcess) -> None:
    plain = Shape(weights=b"same weights", fields={"dtype": "bf16", "attention": "CPU"})
    other = Shape(weights=b"same weights", fields={"dtype": "fp8", "attention": "CPU"})
    third = Shape(weights=b"other weights", fields={"dtype": "fp8"})
    with (
        FakeEngine(running_node.places, "one", plain),
        FakeEngine(running_node.places, "two", other),
        FakeEngine(running_node.places, "three", third),
    ):
        found = running_node.status()["not_shared"]
    assert found == [{"engines": ["one", "two"], "fields": {"dtype": ["bf16", "fp8"]}}]


def test_salts_and_keys_never_appear(running_node: NodeProcess) -> None:
    with FakeEngine(running_node.places, "one") as engine:
        engine.keep(TOKENS)
        said = str(running_node.status()) + running_node.log()
        for chunk in engine.digests(TOKENS):
            for digest in chunk:
                assert digest.hex()[:16] not in said
        assert engine.scheduler.root().hex()[:16] not in said
        assert engine.shape.fingerprint.hex()[:16] not in said
        assert engine.shape.fingerprint.hex()[:8] in said


def test_engine_whose_chunks_do_not_fit_is_told_what_it_needs(new_node: StartNode) -> None:
    node = new_node(host_bytes="2MiB")
    node.start()
    engine = FakeEngine(node.places, "one", Shape(cell_bytes=MiB))
    engine.scheduler.link.start()
    engine.workers[0].start()
    try:
        scheduler = engine.scheduler
        assert scheduler.wait_for(lambda: scheduler.serving is not None)
        assert scheduler.serving is not None
        assert scheduler.serving.off_reason == "host_too_small"
        assert "64 MiB" in scheduler.serving.off_detail
        (shown,) = node.status()["engines"]
        assert shown["state"] == "off"
        assert shown["off"].startswith("host_too_small (")
    finally:
        engine.close()


def test_an_engine_that_says_good_bye_is_gone_though_its_process_lives(
    running_node: NodeProcess,
) -> None:
    """As in a notebook: nothing of it is left, and a node without engines may end."""
    engine = FakeEngine(running_node.places, "notebook").start()
    tokens = make_tokens(64, 1)
    engine.keep(tokens)
    engine.close()
    status = wait_status(running_node, lambda status: not status["engines"])
    assert status["entries"]["chunks"] == 1, "what it stored is kept"
    ask(running_node.places, "check")
