"""Copies between paged KV memory and cells: the host mover against a plain copy, and its rivals.

Both memories are laid out as in a real worker: all layers in one buffer, all blocks of a layer
together (LBHNC of vLLM's CPU build), and a populated region of a memory file. By default 46 blocks
of SmolLM2-135M in bf16, 5,888 tokens or 135.7 MB, to cells that follow one another.

Arms run interleaved in one process, each round in the opposite order of the one before. The
*plain* arm is one memmove for each page, by as many threads; it also runs a second time under
another name, and how far the two medians lie apart is the noise floor. First use (a mapping that
was not populated) is reported apart.

    python -m benchmarks.paths_mover [--rounds 25] [--layout smollm2|cuda16|tiny] [--scattered]
"""

import argparse
import ctypes
import mmap
import os
import random
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch

from kvtide.memory.region import GenerationMemory, MappedRegion, RegionMemory
from kvtide.movers.base import CellPlace, PagePlace
from kvtide.movers.host import HostMover

WARM_UP_ROUNDS = 3
FIRST_USE_ROUNDS = 5
ROUNDS_MIN = 15


@dataclass(frozen=True, slots=True)
class Shape:
    """Geometry of a worker's KV memory; one block's pages fill a cell exactly."""

    layers: int
    page_bytes: int
    block_count: int
    copied_count: int

    @property
    def cell_bytes(self) -> int:
        """Bytes of a block."""
        return self.layers * self.page_bytes

    @property
    def copied_bytes(self) -> int:
        """Bytes that one round of one arm moves."""
        return self.copied_count * self.cell_bytes


SHAPES = {
    "smollm2": Shape(layers=30, page_bytes=96 * 1024, block_count=364, copied_count=46),
    "cuda16": Shape(layers=30, page_bytes=12 * 1024, block_count=2912, copied_count=368),
    "tiny": Shape(layers=4, page_bytes=64 * 1024, block_count=1024, copied_count=46),
}

Arm = Callable[[Sequence[int], Sequence[int], bool], None]
"""Moves these blocks to or from these cells; True: load."""


@dataclass(frozen=True, slots=True)
class Row:
    """One arm in one direction with one number of threads."""

    arm: str
    direction: str
    threads: int
    median_ms: float
    low_ms: float
    high_ms: float
    ratio_to_plain: float


class Memories:
    """Paged memory as torch allocates it, and a region mapped and populated as a worker does."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        self.paged = torch.ones(
            (shape.layers, shape.block_count, shape.page_bytes), dtype=torch.uint8
        )
        cell_count = shape.copied_count + 8
        self.region_bytes = cell_count * shape.cell_bytes
        self.memory = RegionMemory.create("bench", self.region_bytes)
        self.generations = GenerationMemory("bench", cell_count)
        self.region = self.map()
        self.region.populate(threading.Event())

    def map(self) -> MappedRegion:
        """One more mapping of the region, not populated."""
        return MappedRegion(
            self.memory.fd, self.region_bytes, self.generations.fd, self.shape.cell_bytes
        )

    def pages(self) -> list[PagePlace]:
        """As the connector would name them."""
        layer_bytes = self.shape.block_count * self.shape.page_bytes
        return [
            PagePlace(
                self.paged.data_ptr() + layer * layer_bytes,
                self.shape.page_bytes,
                self.shape.page_bytes,
            )
            for layer in range(self.shape.layers)
        ]

    def close(self) -> None:
        """Give all of it back."""
        self.region.close()
        self.generations.close()
        self.memory.close()


@contextmanager
def memories(shape: Shape) -> Iterator[Memories]:
    """Memories that are given back, whatever happens."""
    made = Memories(shape)
    try:
        yield made
    finally:
        made.close()


def mover_arm(memory: Memories, region: MappedRegion) -> Arm:
    """kvtide's own mover."""
    mover = HostMover(memory.pages(), memory.shape.block_count)
    assert mover.cell_bytes == memory.shape.cell_bytes

    def run(blocks: Sequence[int], cells: Sequence[int], load: bool) -> None:
        places = [CellPlace(region.cells, cell) for cell in cells]
        (mover.load if load else mover.store)(blocks, places)

    return run


def plain_arm(memory: Memories, region: MappedRegion) -> Arm:
    """One memmove for each page."""
    shape = memory.shape
    kept = ctypes.addressof(ctypes.c_char.from_buffer(region.cells))
    paged = [page.address for page in memory.pages()]
    memmove = ctypes.memmove

    def run(blocks: Sequence[int], cells: Sequence[int], load: bool) -> None:
        for block, cell in zip(blocks, cells, strict=True):
            inside = kept + cell * shape.cell_bytes
            for layer in paged:
                page = layer + block * shape.page_bytes
                if load:
                    memmove(page, inside, shape.page_bytes)
                else:
                    memmove(inside, page, shape.page_bytes)
                inside += shape.page_bytes

    return run


def run_arm(memory: Memories, region: MappedRegion) -> Arm:
    """One np.copyto for each run of blocks and cells that follow one another."""
    shape = memory.shape
    paged = memory.paged.numpy().transpose(1, 0, 2)
    kept = np.frombuffer(region.cells, np.uint8).reshape(-1, shape.layers, shape.page_bytes)

    def run(blocks: Sequence[int], cells: Sequence[int], load: bool) -> None:
        start = 0
        while start < len(blocks):
            count = 1
            while start + count < len(blocks) and (
                blocks[start + count] - blocks[start]
                == cells[start + count] - cells[start]
                == count
            ):
                count += 1
            outside = paged[blocks[start] : blocks[start] + count]
            inside = kept[cells[start] : cells[start] + count]
            if load:
                np.copyto(outside, inside)
            else:
                np.copyto(inside, outside)
            start += count

    return run


def void_arm(memory: Memories, region: MappedRegion) -> Arm:
    """One np.copyto for each block, a page being one element."""
    shape = memory.shape
    page = np.dtype((np.void, shape.page_bytes))
    paged = memory.paged.numpy().view(page)[..., 0]
    kept = np.frombuffer(region.cells, page).reshape(-1, shape.layers)

    def run(blocks: Sequence[int], cells: Sequence[int], load: bool) -> None:
        for block, cell in zip(blocks, cells, strict=True):
            if load:
                np.copyto(paged[:, block], kept[cell])
            else:
                np.copyto(kept[cell], paged[:, block])

    return run


def torch_arm(memory: Memories, region: MappedRegion) -> Arm:
    """One copy_ for each block, by one thread of torch."""
    shape = memory.shape
    paged = memory.paged
    flat = torch.frombuffer(region.cells, dtype=torch.uint8)
    kept = flat.view(-1, shape.layers, shape.page_bytes)

    def run(blocks: Sequence[int], cells: Sequence[int], load: bool) -> None:
        for block, cell in zip(blocks, cells, strict=True):
            if load:
                paged[:, block].copy_(kept[cell])
            else:
                kept[cell].copy_(paged[:, block])

    return run


def file_arm(memory: Memories, region: MappedRegion) -> Arm:
    """One preadv or pwritev on the memory file for each block; needs no mapping."""
    shape = memory.shape
    paged = memory.paged.numpy()

    def run(blocks: Sequence[int], cells: Sequence[int], load: bool) -> None:
        for block, cell in zip(blocks, cells, strict=True):
            pages = list(paged[:, block])
            call = os.preadv if load else os.pwritev
            moved = call(memory.memory.fd, pages, cell * shape.cell_bytes)
            assert moved == shape.cell_bytes, moved

    return run


ARMS: dict[str, Callable[[Memories, MappedRegion], Arm]] = {
    "plain (memmove a page)": plain_arm,
    "plain again (noise)": plain_arm,
    "kvtide HostMover": mover_arm,
    "np.copyto a run": run_arm,
    "np.copyto of void pages": void_arm,
    "torch copy_ a block": torch_arm,
    "preadv / pwritev": file_arm,
}
PLAIN = next(iter(ARMS))


def time_ms(
    arm: Arm, blocks: list[int], cells: list[int], load: bool, pool: ThreadPoolExecutor | None
) -> float:
    """One copy of everything, in halves where there is a pool of two."""
    start = time.perf_counter()
    if pool is None:
        arm(blocks, cells, load)
    else:
        half = len(blocks) // 2
        parts = (slice(0, half), slice(half, None))
        for done in [pool.submit(arm, blocks[part], cells[part], load) for part in parts]:
            done.result()
    return (time.perf_counter() - start) * 1e3


def steady(
    memory: Memories, blocks: list[int], cells: list[int], rounds: int, threads: int, load: bool
) -> list[Row]:
    """All arms, interleaved, on populated memory."""
    arms = {name: make(memory, memory.region) for name, make in ARMS.items()}
    times: dict[str, list[float]] = {name: [] for name in arms}
    pool = ThreadPoolExecutor(threads) if threads > 1 else None
    for number in range(WARM_UP_ROUNDS + rounds):
        order = list(arms) if number % 2 else list(reversed(arms))
        for name in order:
            took_ms = time_ms(arms[name], blocks, cells, load, pool)
            if number >= WARM_UP_ROUNDS:
                times[name].append(took_ms)
    if pool is not None:
        pool.shutdown()
    plain_ms = statistics.median(times[PLAIN])
    return [
        Row(
            arm=name,
            direction="load" if load else "store",
            threads=threads,
            median_ms=statistics.median(taken),
            low_ms=statistics.quantiles(taken, n=10)[0],
            high_ms=statistics.quantiles(taken, n=10)[-1],
            ratio_to_plain=plain_ms / statistics.median(taken),
        )
        for name, taken in times.items()
    ]


def first_use(memory: Memories, blocks: list[int], cells: list[int]) -> list[Row]:
    """The mover on a fresh mapping each time: as it is, and after populating it."""
    rows = []
    plain = plain_arm(memory, memory.region)
    for load in (False, True):
        plain_ms = statistics.median(
            time_ms(plain, blocks, cells, load, None) for _ in range(FIRST_USE_ROUNDS)
        )
        for name, populated in (("not populated", False), ("populated, mover new", True)):
            taken = [
                _time_fresh(memory, blocks, cells, load, populated)
                for _ in range(FIRST_USE_ROUNDS)
            ]
            median_ms = statistics.median(taken)
            rows.append(
                Row(
                    arm=name,
                    direction="load" if load else "store",
                    threads=1,
                    median_ms=median_ms,
                    low_ms=min(taken),
                    high_ms=max(taken),
                    ratio_to_plain=plain_ms / median_ms,
                )
            )
    return rows


def _time_fresh(
    memory: Memories, blocks: list[int], cells: list[int], load: bool, populated: bool
) -> float:
    region = memory.map()
    if populated:
        region.populate(threading.Event())
    took_ms = time_ms(mover_arm(memory, region), blocks, cells, load, None)
    region.close()
    return took_ms


def populate_gb_s(memory: Memories) -> float:
    """How fast a worker fills the page tables of a region that the node has allocated."""
    taken = []
    for _ in range(FIRST_USE_ROUNDS):
        region = memory.map()
        start = time.perf_counter()
        region.populate(threading.Event())
        taken.append(time.perf_counter() - start)
        region.close()
    return memory.region_bytes / statistics.median(taken) / 1e9


def show(title: str, rows: Sequence[Row], copied_bytes: int) -> None:
    """Print a table."""
    print(f"\n{title}")
    print(f"{'arm':<26}{'':<7}{'thr':>4}{'median':>9}{'p10':>8}{'p90':>8}{'GB/s':>7}{'ratio':>7}")
    for row in rows:
        print(
            f"{row.arm:<26}{row.direction:<7}{row.threads:>4}{row.median_ms:>8.2f}m"
            f"{row.low_ms:>8.2f}{row.high_ms:>8.2f}{copied_bytes / row.median_ms / 1e6:>7.1f}"
            f"{row.ratio_to_plain:>7.2f}"
        )


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print; 0 where the mover keeps its budget of 0.8 of a plain copy."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--layout", choices=SHAPES, default="smollm2")
    parser.add_argument("--scattered", action="store_true", help="blocks in no order")
    options = parser.parse_args(argv)
    if options.rounds < ROUNDS_MIN:
        parser.error(f"--rounds: at least {ROUNDS_MIN}, or the medians mean little")
    torch.set_num_threads(1)
    shape = SHAPES[options.layout]
    draw = random.Random(1)
    blocks = list(range(100, 100 + shape.copied_count))
    if options.scattered:
        blocks = draw.sample(range(shape.block_count), shape.copied_count)
    cells = list(range(4, 4 + shape.copied_count))
    order = "scattered" if options.scattered else "consecutive"
    print(
        f"{shape.copied_count} {order} blocks, {shape.layers} pages of {shape.page_bytes} bytes"
        f" each: {shape.copied_bytes / 1e6:.1f} MB; {options.rounds} rounds; load average"
        f" {os.getloadavg()[0]:.2f}; numpy {np.__version__}, torch {torch.__version__},"
        f" Python {sys.version.split()[0]}, page {mmap.PAGESIZE}"
    )
    rows: list[Row] = []
    with memories(shape) as memory:
        first = first_use(memory, blocks, cells)
        for threads in (1, 2):
            for load in (False, True):
                rows += steady(memory, blocks, cells, options.rounds, threads, load)
        populating = populate_gb_s(memory)
    show("steady state, populated", rows, shape.copied_bytes)
    show("first use of a mapping", first, shape.copied_bytes)
    print(f"\npopulating a mapping: {populating:.1f} GB/s")
    noise = max(abs(1 - row.ratio_to_plain) for row in rows if "again" in row.arm)
    worst = min(row.ratio_to_plain for row in rows if "HostMover" in row.arm)
    print(f"noise floor {noise:.1%}; the mover's worst ratio to a plain copy {worst:.2f}")
    return 0 if worst >= 0.8 else 1


if __name__ == "__main__":
    sys.exit(main())
