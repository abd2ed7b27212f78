"""Loads: only bytes that were read in full and verified count; each is reported exactly once."""

import contextlib
import queue
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from kvtide.core import messages as m
from kvtide.engines.vllm import worker as worker_side
from kvtide.engines.vllm.metadata import LoadJob, StepPlan
from kvtide.engines.vllm.worker import IDLE_WAIT_S, WorkerSide, _Load
from kvtide.testing.vllm_toy import ToyEngine, ToyOptions
from tests.engines.vllm.connector.toys import (
    Toys,
    assert_right,
    held_loads,
    own_hit,
    scheduler_of,
    stored,
    tokens,
    until,
    workers_of,
)

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("patient")]

BLOCK = 16
OPTIONS = ToyOptions(chunk_tokens=64, step_tokens=64)


@contextlib.contextmanager
def reports(engine: ToyEngine) -> Iterator[Counter[str]]:
    """How often each request's load was reported to vLLM."""
    seen: Counter[str] = Counter()
    original = engine.scheduler._update_from_kv_xfer_finished

    def update(output: Any) -> None:
        before = set(engine.scheduler.finished_recving_kv_req_ids), set(engine.scheduler.requests)
        original(output)
        seen.update(engine.scheduler.finished_recving_kv_req_ids - before[0])
        seen.update(before[1] - set(engine.scheduler.requests))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine.scheduler, "_update_from_kv_xfer_finished", update)
        yield seen


# ---- the oracle can fail


@pytest.mark.parametrize("length", [3 * BLOCK, 5 * BLOCK + 7, 200])
def test_two_blocks_swapped_in_host_memory_show(toys: Toys, length: int) -> None:
    """The twin of every equality test: this is what the toy model is for."""
    engine = toys.start(OPTIONS)
    prompt = stored(toys, engine, length)
    (worker,) = workers_of(engine)
    load = worker._mover.load

    def swap_and_load(block_ids: Sequence[int], cells: Sequence[Any]) -> None:
        size = worker._mover.cell_bytes
        one, other = (place.region[place.cell * size :][:size] for place in cells[:2])
        one[:], other[:] = bytes(other), bytes(one)
        load(block_ids, cells)

    worker._mover.load = swap_and_load
    result = engine.generate(prompt)
    assert result.external == own_hit(length, length)
    with pytest.raises(AssertionError):
        assert_right(result, 1)


# ---- what fails is computed


def moved(toys: Toys, engine: ToyEngine, prompt: list[int]) -> str:
    """A request whose cells were lent to somebody else between its load's plan and its copy."""
    other = toys.start(OPTIONS)
    (worker,) = workers_of(engine)
    with held_loads(engine):
        request_id = engine.add(prompt)
        while not scheduler_of(engine)._loads:
            engine.step()
        (load,) = scheduler_of(engine)._loads.values()
        scheduler_of(engine)._link.send(m.LoadEnd(load.lease, 0))
        until("nothing protects it", toys.node.is_at_rest)
        toys.node.clear()
        (planned,) = worker._loads.values()
        run = planned.job.runs[-1]
        generations = worker._regions._mappings[run.region].region.generations
        while generations[run.first_cell] == run.generation:
            other.generate(tokens(len(prompt)))
            toys.rest(other)
    return request_id


def test_cells_lent_again_between_plan_and_copy_are_computed(toys: Toys) -> None:
    """The load fails by the generation; the request is answered 0 from then on."""
    engine = toys.start(OPTIONS)
    prompt = stored(toys, engine, 150)
    request_id = moved(toys, engine, prompt)
    with reports(engine) as seen:
        engine.run()
    assert seen == {request_id: 1}
    result = engine.results[request_id]
    assert_right(result, 1)
    assert result.external < own_hit(150, 150)


def test_without_the_generation_check_it_would_show(
    toys: Toys, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The twin: the same, but nobody looks."""

    def nothing_failed(*arguments: Any) -> set[int]:
        original(*arguments)
        return set()

    original = WorkerSide._copy_in
    monkeypatch.setattr(WorkerSide, "_copy_in", nothing_failed)
    engine = toys.start(OPTIONS)
    prompt = stored(toys, engine, 150)
    request_id = moved(toys, engine, prompt)
    engine.run()
    with pytest.raises(AssertionError):
        assert_right(engine.results[request_id], 1)


def failing(engine: ToyEngine, fails: Callable[[int, list[int]], set[int]]) -> None:
    """Have loads fail: `fails` says for a rank which of the blocks."""
    for rank, worker in enumerate(workers_of(engine)):
        worker._copy_in = _failing(engine, rank, worker, fails)


def _failing(
    engine: ToyEngine, rank: int, worker: Any, fails: Callable[[int, list[int]], set[int]]
) -> Callable[..., set[int]]:
    original = worker._copy_in

    def copy_in(load: Any, block_ids: list[int], runs: Any) -> set[int]:
        failed = set(original(load, block_ids, runs)) | fails(rank, block_ids)
        engine.workers[rank].memory.scribble(sorted(failed))
        return failed

    return copy_in


@pytest.mark.parametrize("mode", [{}, {"is_async": True}, {"workers": 2}])
@pytest.mark.parametrize("position", range(9))
def test_one_block_fails(toys: Toys, position: int, mode: dict[str, Any]) -> None:
    """What lies before it is used, it and what lies behind it is computed."""
    options = ToyOptions(chunk_tokens=64, step_tokens=64, **mode)
    engine = toys.start(options)
    prompt = tokens(9 * BLOCK + 5)
    engine.generate(prompt)
    toys.rest()
    engine.reset()
    before = toys.node.count("loaded_blocks")
    last = options.workers - 1
    failing(engine, lambda rank, ids: {ids[position]} if rank == last else set())
    with reports(engine) as seen:
        result = engine.generate(prompt)
    assert_right(result, 1, shards=options.workers)
    assert list(seen.values()) == [1]
    toys.rest()
    assert toys.node.count("loaded_blocks") - before == position
    # The failed blocks were computed and are in the engine's own cache now.
    assert engine.generate(prompt).local == 9 * BLOCK


def test_workers_fail_in_different_steps(toys: Toys) -> None:
    """Rank 0 tells of a failed block while rank 1 still loads: the failure is not forgotten."""
    engine = toys.start(ToyOptions(chunk_tokens=64, step_tokens=64, workers=2))
    prompt = tokens(150)
    engine.generate(prompt)
    toys.rest()
    engine.reset()
    failing(engine, lambda rank, ids: set(ids) if rank == 0 else set())
    slow = workers_of(engine)[1]
    engine_of_slow = type("One", (), {"workers": engine.workers[1:]})
    with held_loads(engine_of_slow), reports(engine) as seen:  # type: ignore[arg-type]
        request_id = engine.add(prompt)
        tracker = scheduler_of(engine)._trackers[request_id]
        while request_id not in engine.scheduler.failed_recving_kv_req_ids:
            engine.step()
        assert slow._loads
        assert not seen
    with reports(engine) as seen:
        engine.run()
    assert seen == {request_id: 1}
    assert tracker.no_load == "load_failed"
    assert_right(engine.results[request_id], 1, shards=2)


REQUESTS_AT_ONCE = 8
FAILING_RATIO = 0.01


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("request_count", [200, pytest.param(10_000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("workers", [1, 4])
def test_blocks_that_fail_now_and_then_change_no_output(
    toys: Toys, workers: int, request_count: int
) -> None:
    """One in a hundred, on any rank, in requests that load side by side: the others are hit."""
    options = ToyOptions(chunk_tokens=64, step_tokens=256, block_count=512, workers=workers)
    engine = toys.start(options)
    draw = random.Random(workers)
    prompts = [tokens(draw.randrange(20, 200)) for _ in range(12)]
    for prompt in prompts:
        assert_right(engine.generate(prompt), 1, shards=workers)
    toys.rest()
    before = toys.node.count("failed_blocks")
    failing(engine, lambda rank, ids: {one for one in ids if draw.random() < FAILING_RATIO})
    external = 0
    for _ in range(request_count // REQUESTS_AT_ONCE):
        assert engine.reset()
        asked = [[*draw.choice(prompts), *tokens(5)] for _ in range(REQUESTS_AT_ONCE)]
        ids = [engine.add(prompt, 2) for prompt in asked]
        engine.run()
        for request_id in ids:
            assert_right(engine.results[request_id], 2, shards=workers)
            external += engine.results[request_id].external
    assert external > request_count * BLOCK
    until("failures are counted", lambda: toys.node.count("failed_blocks") > before)


def test_a_region_that_went_between_plan_and_copy(toys: Toys) -> None:
    """The node asked for the memory back: the load fails, and later ones find it again."""
    engine = toys.start(OPTIONS)
    prompt = stored(toys, engine, 150)
    (worker,) = workers_of(engine)
    original, failed = worker._copy_in, []

    def leave_first(load: Any, block_ids: list[int], runs: Any) -> set[int]:
        if failed:
            return set(original(load, block_ids, runs))
        left: list[int] = []
        with pytest.MonkeyPatch.context() as patch:  # told at once, the node offers them again
            patch.setattr(worker._regions, "_on_left", left.append)
            worker._regions.leave_all()
            assert worker._regions.wait_empty(20.0)
            failed.extend(original(load, block_ids, runs))
        for number in left:
            worker._regions._on_left(number)
        return set(failed)

    worker._copy_in = leave_first
    with reports(engine) as seen:
        result = engine.generate(prompt)
    assert len(failed) == 150 // 16
    assert_right(result, 1)
    assert result.hit == 0
    assert list(seen.values()) == [1]
    toys.wait_open(engine)
    engine.reset()
    result = engine.generate(prompt)
    assert_right(result, 1)
    assert result.external == own_hit(150, 150)


def test_a_load_that_takes_too_long_fails(toys: Toys, monkeypatch: pytest.MonkeyPatch) -> None:
    """T_load has passed before the copy began."""
    engine = toys.start(OPTIONS)
    prompt = stored(toys, engine, 100)
    monkeypatch.setattr(worker_side, "LOAD_S_MAX", -1.0)
    with reports(engine) as seen:
        result = engine.generate(prompt)
    assert_right(result, 1)
    assert result.hit == 0
    assert list(seen.values()) == [1]


# ---- in pieces


@pytest.mark.parametrize(("split_blocks", "pieces"), [(4, [4, 5]), (5, [9])])
def test_a_large_load_is_copied_in_halves(
    toys: Toys, monkeypatch: pytest.MonkeyPatch, split_blocks: int, pieces: list[int]
) -> None:
    """Whatever the runs of cells, and reported when both have ended."""
    engine = toys.start(OPTIONS)
    prompt = stored(toys, engine, 150)
    (worker,) = workers_of(engine)
    monkeypatch.setattr(worker_side, "SPLIT_BYTES", split_blocks * worker._mover.payload_bytes)
    monkeypatch.setattr(worker, "_processors", {0, 1})
    copied: list[int] = []
    original = worker._copy_in

    def copy_in(load: Any, block_ids: list[int], runs: Any) -> set[int]:
        copied.append(len(block_ids))
        return set(original(load, block_ids, runs))

    worker._copy_in = copy_in
    with reports(engine) as seen:
        result = engine.generate(prompt)
    assert_right(result, 1)
    assert result.external == own_hit(150, 150)
    assert list(seen.values()) == [1]
    assert sorted(copied) == pieces


def test_a_step_waits_for_all_pieces_no_longer_than_for_one(
    toys: Toys, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What arrives meanwhile is scheduled by the next step."""
    (worker,) = workers_of(toys.start(OPTIONS))
    load = _Load(LoadJob("a", [3], []), piece_count=100)
    now_s = 0.0

    class Ended:
        """Each piece ends after the half of what a step may wait."""

        def get(self, timeout: float) -> _Load:
            nonlocal now_s
            assert timeout <= IDLE_WAIT_S - now_s
            now_s += IDLE_WAIT_S / 2
            return load

        def get_nowait(self) -> _Load:
            raise queue.Empty

    with monkeypatch.context() as patch:
        patch.setattr(worker, "_ended", Ended())
        patch.setattr(worker, "_loads", {"a": load})
        patch.setattr(worker, "_plan", StepPlan(has_forward=False))
        patch.setattr(worker_side, "time", SimpleNamespace(monotonic=lambda: now_s))
        assert worker.take_ended() == set()
    assert now_s == IDLE_WAIT_S
    assert load.piece_count == 98


# ---- aborted while it loads


@pytest.mark.parametrize("is_async", [False, True])
def test_aborted_while_it_loads(toys: Toys, is_async: bool) -> None:
    """Its blocks stay until the report, which comes once; who waited loads for himself."""
    engine = toys.start(ToyOptions(chunk_tokens=64, step_tokens=64, is_async=is_async))
    prompt = stored(toys, engine, 150)
    with reports(engine) as seen:
        with held_loads(engine):
            first = engine.add(prompt)
            second = engine.add([*prompt, *tokens(20)])
            while not scheduler_of(engine)._loads:
                engine.step()
            assert scheduler_of(engine)._loads.keys() == {first}
            engine.abort(first)
            for _ in range(5):
                engine.step()
            assert first in engine.scheduler.requests
        engine.run()
    assert seen == {first: 1, second: 1}
    assert_right(engine.results[second], 1)
    assert engine.results[second].external == own_hit(170, 150)


# ---- one load for all


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize(
    "lengths",
    [
        (150, 150),
        (150, 170),
        (150, 100),
        (100, 150),
        (40, 200),
        (200, 40),
        (200, 120, 80, 33),
    ],
)
def test_requests_with_one_prefix_load_it_once(
    toys: Toys, lengths: Sequence[int], is_async: bool
) -> None:
    """Whole chunks and parts of one alike: nobody loads a block that another is loading."""
    engine = toys.start(ToyOptions(chunk_tokens=64, step_tokens=64, is_async=is_async))
    whole = stored(toys, engine, max(lengths) + 1)
    before = toys.node.count("loaded_blocks")
    with held_loads(engine):
        ids = [engine.add(whole[:length]) for length in lengths]
        while not scheduler_of(engine)._loads:
            engine.step()
        for _ in range(10):
            engine.step()
        assert len(scheduler_of(engine)._loads) == 1, "a stampede"
    engine.run()
    for request_id in ids:
        assert_right(engine.results[request_id], 1)
        length = len(engine.results[request_id].prompt)
        assert engine.results[request_id].hit == own_hit(length, length)
    toys.rest()
    assert toys.node.count("loaded_blocks") - before == own_hit(max(lengths), 1000) // BLOCK


def test_another_prompt_does_not_wait(toys: Toys) -> None:
    """Chunks that begin alike and part are loaded side by side once they have parted."""
    engine = toys.start(OPTIONS)
    one, other = stored(toys, engine, 150), stored(toys, engine, 150)
    with held_loads(engine):
        ids = [engine.add(one), engine.add(other)]
        while len(scheduler_of(engine)._loads) < 2:
            engine.step()
    engine.run()
    for request_id in ids:
        assert_right(engine.results[request_id], 1)
