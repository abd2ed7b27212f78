"""A place below the host, measured: kvtide's tier beside plain loops and others' clients.

All put and get the same records, so many at a time, and take turns in every round; those that
decide nothing are there in every third. What they hold is bounded, as by a cache that is full:
each put gives back as much, inside what is timed. (LMCache's adapters evict nothing; what they
held is removed between their rounds.) The tier is judged by the fastest plain loop of the same
size, way and depth. One plain loop runs twice under two names: how far those lie apart is the
noise floor. CPU seconds are those of the process that puts or gets. Before the rounds that count,
each arm has been seen to bring back every byte.
"""

import argparse
import itertools
import mmap
import os
import resource
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Protocol

import xxhash

from benchmarks.paths_disk import Taken, as_in_the_node
from benchmarks.stats import Comparison, ratios, rotated, spread
from kvtide.core.keys import fingerprint, root_key
from kvtide.core.layout import KVLayout
from kvtide.core.records import Record, RootName
from kvtide.tier_values import parse_tiers
from kvtide.tiers import registry
from kvtide.tiers.base import Done, Loaded, LoadJob, LoadOutcome, Stored, StoreJob, StoreOutcome
from kvtide.units import MiB

ROUND_BYTES = 128 * MiB
DEPTHS = (1, 4)
"""Records that are under way at the same time."""
WAYS = ("put", "get")
BLOCKS = 2
HELD_ROUNDS = 2
"""So many each arm keeps; older ones make room, inside what is timed."""
WARM_ROUNDS = 2
"""Before it is measured, all memory was used once."""
OTHERS_EVERY = 3
RATIO_MIN = 0.8
"""Of the fastest plain loop."""


@dataclass(frozen=True, slots=True)
class Extent:
    """How much is measured: records of these sizes in bytes, each in so many rounds."""

    sizes: Sequence[int]
    rounds: int


FULL = Extent((MiB, 4 * MiB, 16 * MiB, 32 * MiB), rounds=20)
QUICK = Extent((4 * MiB,), rounds=3)
"""Decides nothing."""

TIER, AGAIN = "kvtide", "plain again"
WAIT_S_MAX = 60.0


class Arm(Protocol):
    """Puts and gets a round's records."""

    def put(self, depth: int) -> None:
        """All of them, under names that are not there."""

    def get(self, depth: int) -> None:
        """Those of the last round."""

    def settle(self) -> None:
        """What is not timed, after each put."""

    def wipe(self) -> None:
        """Make the memory empty that `get` fills."""

    def is_whole(self) -> bool:
        """Whether that memory holds what was put."""

    def cpu_s(self) -> float:
        """Of the process that works, so far."""

    def close(self) -> None: ...


class Memory:
    """A round's bytes, starting on a page, all different."""

    def __init__(self, round_bytes: int = ROUND_BYTES) -> None:
        self.view = memoryview(mmap.mmap(-1, round_bytes))
        self.view[:] = os.urandom(round_bytes)
        self._digest = xxhash.xxh3_64_intdigest(self.view)

    def pieces(self, piece_bytes: int) -> list[memoryview]:
        """One for each record."""
        starts = range(0, len(self.view), piece_bytes)
        return [self.view[start : start + piece_bytes] for start in starts]

    def wipe(self) -> None:
        """Only zeros."""
        for piece in self.pieces(MiB):
            piece[:] = bytes(MiB)

    def is_whole(self) -> bool:
        """Whether all is as it was made."""
        return xxhash.xxh3_64_intdigest(self.view) == self._digest


class Here:
    """What arms have in common that work in this process, on one memory."""

    def __init__(self, memory: Memory) -> None:
        self._memory = memory

    def settle(self) -> None:
        """Nothing."""

    def wipe(self) -> None:
        self._memory.wipe()

    def is_whole(self) -> bool:
        return self._memory.is_whole()

    def cpu_s(self) -> float:
        used = resource.getrusage(resource.RUSAGE_SELF)
        return used.ru_utime + used.ru_stime


class Tier(Here):
    """The tier of an entry of `tiers`, driven as the node drives it."""

    def __init__(self, memory: Memory, piece_bytes: int, **entry: object) -> None:
        super().__init__(memory)
        (parsed,) = parse_tiers([entry])
        self._woken = threading.Event()
        open_tier = registry.load(parsed.type).open
        self._tier = open_tier(parsed.options, self._woken.set, 2 * ROUND_BYTES)
        self._layout = KVLayout(128, 128 * BLOCKS, (piece_bytes // BLOCKS,))
        name = fingerprint({"engine": "benchmark"})
        key = root_key(name, epoch=b"", salt=None, adapter=b"")
        self._root = RootName(key, name, b"", b"")
        self._views = memory.pieces(piece_bytes)
        self._records: list[Record] = []
        self._under_way = 0

    def put(self, depth: int) -> None:
        """One chain."""
        parent = self._root.key
        self._records = []
        self._tick()
        for number, view in enumerate(self._views):
            key = os.urandom(32)
            digests = os.urandom(16 * (BLOCKS - 1)) + key[:16]
            record = Record(self._root, parent, key, digests, self._layout)
            self._wait(depth - 1)
            self._tier.store(StoreJob(number, record, [view]))
            self._under_way += 1
            self._records.append(record)
            parent = key
        self._wait(0)

    def get(self, depth: int) -> None:
        self._tick()
        for number, (record, view) in enumerate(zip(self._records, self._views, strict=True)):
            self._wait(depth - 1)
            self._tier.load(LoadJob(number, record, [view]))
            self._under_way += 1
        self._wait(0)

    def _tick(self) -> None:
        self._tier.tick(int(time.monotonic() * 1000))

    def _wait(self, under_way_max: int) -> None:
        while self._under_way > under_way_max:
            assert self._woken.wait(WAIT_S_MAX), "the tier does not answer"
            self._woken.clear()
            for done in self._tier.poll():
                _require_good(done)
                self._under_way -= 1

    def close(self) -> None:
        self._tier.close(10)


def _require_good(done: Done) -> None:
    assert isinstance(done, Stored | Loaded), done
    assert done.outcome in (StoreOutcome.STORED, LoadOutcome.LOADED), done


@dataclass(frozen=True, slots=True)
class Arms:
    """What is compared with one size of records; closed together."""

    plain: Mapping[str, Arm]  # any of them may be the fastest
    again: Arm  # the first of them once more
    tier: Arm
    others: Mapping[str, Arm]

    def all(self) -> dict[str, Arm]:
        """By their names in the table."""
        return {**self.plain, AGAIN: self.again, TIER: self.tier, **self.others}


@contextmanager
def closing(arms: Arms) -> Iterator[Arms]:
    """Closed on the way out."""
    try:
        yield arms
    finally:
        for arm in arms.all().values():
            arm.close()


@dataclass(slots=True)
class Cell:
    """What was found for one size, way and depth."""

    piece_bytes: int
    way: str
    depth: int
    plain: Sequence[str]
    taken: dict[str, Taken]

    @property
    def fastest(self) -> str:
        """The plain loop that the tier is judged by."""
        return min(self.plain, key=lambda name: spread(self.taken[name].wall_s).median)

    def ratio(self, name: str, to: str = "") -> Comparison:
        """How much faster it is than the fastest plain loop, or this one, round by round."""
        mine = self.taken[name].wall_s
        theirs = self.taken[to or self.fastest].wall_s
        if len(mine) < len(theirs):  # it was there in every third
            theirs = theirs[::OTHERS_EVERY]
        return ratios(theirs, mine)

    @property
    def is_met(self) -> bool:
        """Whether the tier reaches its goal."""
        return self.ratio(TIER).spread.median >= RATIO_MIN

    def lines(self) -> Iterator[str]:
        """The table of it."""
        for name, taken in self.taken.items():
            rates = spread([ROUND_BYTES / wall_s / 1e9 for wall_s in taken.wall_s])
            shown = f"{rates.median:.2f} ({rates.low:.2f} to {rates.high:.2f})"
            ratio = self.ratio(name, self.plain[0] if name == AGAIN else "")
            interval = f"{ratio.interval.low:.2f} to {ratio.interval.high:.2f}"
            marks = ["fastest plain"] if name == self.fastest else []
            marks += ["noise floor"] if name == AGAIN else []
            marks += ["missed"] if name == TIER and not self.is_met else []
            yield (
                f"{self.piece_bytes // MiB:>4} MiB {self.way} {self.depth}  {name:<22}"
                f" {shown:<21} {ratio.spread.median:.2f} ({interval})"
                f"  {taken.cpu_per_gb(ROUND_BYTES):.2f}  {', '.join(marks)}"
            ).rstrip()


HEAD = (
    f"{'record way depth':<42} {'GB/s, its middle half':<21} ratio to the fastest plain loop,"
    " its 95 % interval; CPU s/GB"
)


Opened = Callable[[int], AbstractContextManager[Arms]]
"""The arms for records of so many bytes."""


def measured(place: str, extent: Extent, opened: Opened) -> list[Cell]:
    """All sizes, both ways, at each depth; shown as they come."""
    print(f"{place}, rounds of {ROUND_BYTES // MiB} MiB, medians of {extent.rounds}\n{HEAD}")
    cells = []
    for piece_bytes in extent.sizes:
        with as_in_the_node(), opened(piece_bytes) as arms:
            for depth, way in itertools.product(DEPTHS, WAYS):
                taken = _turns(arms, way, depth, extent.rounds)
                cells.append(Cell(piece_bytes, way, depth, tuple(arms.plain), taken))
                print(*cells[-1].lines(), sep="\n", flush=True)
    return cells


def _turns(arms: Arms, way: str, depth: int, rounds: int) -> dict[str, Taken]:
    every = arms.all()
    taken = {name: Taken() for name in every}
    for name, arm in every.items():
        for _ in range(WARM_ROUNDS):
            _warm(name, arm, way, depth)
    for number in range(rounds):
        for name in rotated(list(every), number):
            if name not in arms.others or number % OTHERS_EVERY == 0:
                _turn(every[name], way, depth, taken[name])
    return taken


def _warm(name: str, arm: Arm, way: str, depth: int) -> None:
    if way == "get":
        arm.wipe()
    _turn(arm, way, depth, Taken())
    assert arm.is_whole(), f"{name} does not bring back what was put"


def _turn(arm: Arm, way: str, depth: int, taken: Taken) -> None:
    began_cpu_s, began_s = arm.cpu_s(), time.perf_counter()
    if way == "put":
        arm.put(depth)
    else:
        arm.get(depth)
    taken.wall_s.append(time.perf_counter() - began_s)
    taken.cpu_s.append(arm.cpu_s() - began_cpu_s)
    if way == "put":
        arm.settle()


def judge(cells: Mapping[str, Sequence[Cell]], extent: Extent) -> int:
    """Print the goal, cell by cell, for each place; the program's exit code: 1 where it is
    missed, if this decides."""
    print(f"\nbudgets: {RATIO_MIN} of the fastest plain loop of the same run (* missed)")
    columns = "".join(f"{way} {depth}".rjust(8) for depth, way in itertools.product(DEPTHS, WAYS))
    for place, found in cells.items():
        print(f"{place:<12}{columns}")
        for size in dict.fromkeys(cell.piece_bytes for cell in found):
            row = [_shown(cell) for cell in found if cell.piece_bytes == size]
            print(f"{size // MiB:>8} MiB" + "".join(f"{shown:>8}" for shown in row))
    is_met = all(cell.is_met for found in cells.values() for cell in found)
    return 0 if is_met or extent is QUICK else 1


def parser_of(description: str | None) -> argparse.ArgumentParser:
    """Of a program that measures a place; `extent` is what it is to measure."""
    parser = argparse.ArgumentParser(description=(description or "").splitlines()[0])
    parser.add_argument("--quick", dest="extent", action="store_const", const=QUICK, default=FULL)
    return parser


def _shown(cell: Cell) -> str:
    return f"{cell.ratio(TIER).spread.median:.2f}{' ' if cell.is_met else '*'}"
