"""A retrieve in a worker, from the step's plan to its report, beside plain copies of its pages.

A real node, a fake scheduler, and the real worker role of vLLM's connector: the plan names runs of
the node's cells, mover threads copy them out of mapped regions, every generation is checked, and
the load is reported. What asks is a step without a forward, again and again. The plain arm is one
memmove for each page, by as many threads, out of a region that this process has mapped; measured
twice, it is its own noise. Arms take turns, in both orders. Pages lie as in `paths_mover`.

    python -m benchmarks.paths_retrieve [--quick]

`--quick` copies five times, not forty.
"""

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import torch

from benchmarks.paths_mover import SHAPES, Memories, memories, plain_arm, time_ms
from benchmarks.paths_node import node
from benchmarks.plain import BLOCK_TOKENS
from benchmarks.stats import ratios
from kvtide.core import messages as m
from kvtide.core.lending import HELD
from kvtide.engines.vllm.facts import WorkerFacts
from kvtide.engines.vllm.metadata import LoadJob, StepPlan, StoreJob
from kvtide.engines.vllm.worker import MOVERS_MAX, WorkerSide
from kvtide.movers.host import HostMover
from kvtide.testing.fake_engine import FakeEngine, Shape, make_tokens
from kvtide.wire.places import Places

PAGES = SHAPES["smollm2"]
SHAPE = Shape(
    block_tokens=BLOCK_TOKENS,
    chunk_tokens=2 * BLOCK_TOKENS,
    cell_bytes=PAGES.cell_bytes,
    step_tokens=PAGES.copied_count * BLOCK_TOKENS,
)
ENGINE_ID = "retrieve"
HOST_BYTES = "1GiB"
BLOCKS = list(range(100, 100 + PAGES.copied_count))
CELLS = list(range(4, 4 + PAGES.copied_count))
WARM_UP_ROUNDS = 2
WAIT_S_MAX = 20.0
RATIO_MIN = 0.6
"""Of a plain copy's speed."""
OURS, PLAIN, AGAIN = "kvtide, plan to reported", "plain (memmove a page)", "plain again (noise)"


@contextmanager
def worker_role(places: Places, memory: Memories) -> Iterator[WorkerSide]:
    """The worker role over this paged memory; ended on the way out."""
    facts = WorkerFacts(
        rank=0,
        shard_index=0,
        shard_count=1,
        block_count=PAGES.block_count,
        device="cpu",
        isa="",
        pages=(),
    )
    mover = HostMover(memory.pages(), PAGES.block_count)
    worker = WorkerSide(ENGINE_ID, places, facts, True, mover)
    worker.start()
    try:
        yield worker
    finally:
        worker.close(WAIT_S_MAX)


def store(engine: FakeEngine, worker: WorkerSide, tokens: Sequence[int]) -> None:
    """Have the node hold the prompt's blocks, whose bytes lie in BLOCKS."""
    until_s = time.monotonic() + WAIT_S_MAX
    while True:
        answer = engine.offer(tokens)
        if set(answer.outcomes) == {HELD}:
            return
        assert time.monotonic() < until_s, answer.outcomes
        granted = [number for number, outcome in enumerate(answer.outcomes) if not outcome]
        stores = [
            StoreJob(grant, answer.connections, _blocks_of(chunk), run)
            for grant, run, chunk in zip(answer.grants, answer.runs, granted, strict=True)
        ]
        worker.wait_for_save(StepPlan(stores=stores))
        engine.wait_stored(tokens)


def _blocks_of(chunk: int) -> list[int]:
    return BLOCKS[chunk * SHAPE.chunk_blocks : (chunk + 1) * SHAPE.chunk_blocks]


def retrieve_ms(worker: WorkerSide, runs: list[m.Run]) -> float:
    """From the plan to the report of a load that has gone well."""
    plan = StepPlan(loads=[LoadJob("request", BLOCKS, runs)], has_forward=False)
    began_s = time.perf_counter()
    worker.start_loads(plan)
    while not worker.take_ended():
        pass
    took_ms = (time.perf_counter() - began_s) * 1e3
    failed = worker.take_load_errors()
    assert not failed, failed
    return took_ms


def measure(rounds: int) -> dict[str, list[float]]:
    """Milliseconds of each arm, round by round."""
    threads = min(MOVERS_MAX, len(os.sched_getaffinity(0)))
    tokens = make_tokens(PAGES.copied_count * BLOCK_TOKENS, seed=1)
    with (
        memories(PAGES) as memory,
        node(host_bytes=HOST_BYTES) as running,
        worker_role(running.places, memory) as worker,
        ThreadPoolExecutor(threads) as pool,
    ):
        engine = FakeEngine(running.places, ENGINE_ID, SHAPE)
        engine.workers.clear()
        with engine:
            content = torch.randint(
                256, (PAGES.layers, PAGES.copied_count, PAGES.page_bytes), dtype=torch.uint8
            )
            copied = memory.paged[:, BLOCKS[0] : BLOCKS[-1] + 1]
            copied.copy_(content)
            store(engine, worker, tokens)
            runs = engine.match(tokens).runs
            assert sum(run.cell_count for run in runs) == len(BLOCKS), runs
            copied.zero_()
            retrieve_ms(worker, runs)
            assert torch.equal(copied, content), "other bytes than were stored"

            plain = plain_arm(memory, memory.region)

            def plain_ms() -> float:
                return time_ms(plain, BLOCKS, CELLS, True, pool)

            arms = {PLAIN: plain_ms, OURS: lambda: retrieve_ms(worker, runs), AGAIN: plain_ms}
            return _interleaved(arms, rounds)


def _interleaved(arms: dict[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    taken: dict[str, list[float]] = {name: [] for name in arms}
    for number in range(WARM_UP_ROUNDS + rounds):
        for name in list(arms) if number % 2 else list(reversed(arms)):
            took_ms = arms[name]()
            if number >= WARM_UP_ROUNDS:
                taken[name].append(took_ms)
    return taken


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print; 0 where the budget is kept."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    options = parser.parse_args(argv)
    before = os.getloadavg()[0]
    taken = measure(5 if options.quick else 40)
    print(
        f"{len(BLOCKS)} blocks, {PAGES.copied_bytes / 1e6:.1f} MB; {len(taken[OURS])} rounds;"
        f" load average {before:.2f}; torch {torch.__version__}, Python {sys.version.split()[0]}"
    )
    print(f"{'arm':<28}{'median':>9}{'p10':>9}{'p90':>9}{'GB/s':>7}")
    for name, values in taken.items():
        middle, parts = statistics.median(values), statistics.quantiles(values, n=10)
        print(
            f"{name:<28}{middle:>7.2f}ms{parts[0]:>9.2f}{parts[-1]:>9.2f}"
            f"{PAGES.copied_bytes / middle / 1e6:>7.1f}"
        )
    speed, noise = ratios(taken[PLAIN], taken[OURS]), ratios(taken[PLAIN], taken[AGAIN])
    is_good = speed.spread.median >= RATIO_MIN
    print(f"\nspeed of a retrieve against a plain copy: {speed.percent()}")
    print(f"a plain copy against another, the noise floor: {noise.percent()}")
    print(f"{speed.spread.median:.2f} of a plain copy, to reach {RATIO_MIN}:", end=" ")
    print("kept" if is_good else "MISSED")
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
