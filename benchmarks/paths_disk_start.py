"""The disk tier's start and its index: time to a first proven hit, memory, lookups, and holes.

A start is a process of its own, from the making of the tier to the end of the load of a chain's
last record, its tail, which the first lookup found: every byte of it is proven by then.
Directories are those of `disk_made`: chains of 32 records of 16 blocks, in segments of 1 GiB.
Killed: as a node leaves them that was killed at its cap.
Cold: nothing of them is in the page cache. `all rows`: when nothing of the start goes on any more;
memory is what the process has grown by then.

Lookups ask for whole chains with their tails, at random, and are answered by the owner's `poll`,
which has the ends of stores to see to as well while the disk writes.

    python -m benchmarks.paths_disk_start [--quick] [--directory DIRECTORY]

`--quick` leaves a million records out.
"""

import argparse
import ctypes
import gc
import json
import mmap
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.disk_made import (
    CHAIN_RECORDS,
    ROOT,
    Driven,
    Shape,
    be_killed,
    chain_from,
    chain_keys,
    digests_of,
    fill,
    first_chain,
)
from benchmarks.paths_disk import directory
from kvtide.core.keys import KEY_BYTES
from kvtide.core.records import Record
from kvtide.node.main import SWITCH_INTERVAL_S
from kvtide.tiers.disk.directory import INDEX, SEGMENT
from kvtide.tiers.files import SystemFiles, page_memory
from kvtide.units import MiB, format_bytes

STARTS, STARTS_QUICK = 7, 2
HIT_S_MAX = 1.0
"""The budget of 10⁶ records; fewer are quicker."""
BESIDE_S, BESIDE_S_QUICK = 8.0, 2.0
BESIDE_BYTES = 4 * MiB
QUEUED = 12
"""Stores that wait or are written: the disk is never without one."""
P50_US_MAX, P99_US_MAX = 300.0, 1000.0
"""Of a chain's lookup: a round trip to the host's index may take no longer."""
HOLES_BYTES, HOLES_BYTES_QUICK = 512 * MiB, 128 * MiB
HOLE_SIZES = (MiB, 4 * MiB, 32 * MiB)
DROP_CACHES = Path("/proc/sys/vm/drop_caches")


# ---- a start, in a process of its own


@dataclass(frozen=True, slots=True)
class Start:
    """What one start took."""

    opened_s: float
    hit_s: float
    all_rows_s: float
    memory_bytes: int


def start(path: Path, shape: Shape, *, is_cold: bool) -> Start:
    """Start, and hit."""
    _be_as_the_node()
    if shape.is_killed:
        be_killed(path)
    if is_cold:
        drop_cached(path)
    chain = first_chain(shape.layout)
    before = _resident_bytes()
    began_s = time.perf_counter()
    tier = Driven(path)
    opened_s = time.perf_counter() - began_s
    found = tier.find(chain).records
    assert found == chain, len(found)
    tier.load(chain[-1])
    hit_s = time.perf_counter() - began_s
    tier.settle()
    all_rows_s = time.perf_counter() - began_s
    _trim()
    taken = Start(opened_s, hit_s, all_rows_s, _resident_bytes() - before)
    assert tier.tier.statistics().records == shape.records + len(chain)
    tier.close()
    return taken


def _be_as_the_node() -> None:
    """Its interpreter's settings."""
    gc.freeze()
    gc.disable()
    sys.setswitchinterval(SWITCH_INTERVAL_S)


def drop_cached(path: Path) -> None:
    """Out of the page cache: everything, or where only root may, the directory's indexes."""
    os.sync()
    try:
        DROP_CACHES.write_text("3\n", encoding="ascii")
    except OSError:
        for file in path.glob(f"*.{INDEX}"):
            descriptor = os.open(file, os.O_RDONLY)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


def _trim() -> None:
    """What the allocator holds without need is not the index's."""
    ctypes.CDLL(None).malloc_trim(0)


def _resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * mmap.PAGESIZE


# ---- lookups beside stores, in a process of its own


@dataclass(frozen=True, slots=True)
class Beside:
    """Microseconds of lookups, and what was written meanwhile."""

    quiet_us: list[float]
    busy_us: list[float]
    gb_per_s: float


def beside(path: Path, shape: Shape, seconds: float) -> Beside:
    """Look up for so long, with and without stores."""
    _be_as_the_node()
    tier = Driven(path)
    tier.settle()
    draw = random.Random(1)

    def look_up() -> float:
        chain = chain_from(chain_keys(draw.randrange(shape.chains)), shape.layout)
        began_ns = time.perf_counter_ns()
        found = tier.find(chain)
        took_us = (time.perf_counter_ns() - began_ns) / 1e3
        assert len(found.records) == CHAIN_RECORDS, len(found.records)
        return took_us

    quiet = list(_until(seconds, look_up))
    memory = page_memory(BESIDE_BYTES)
    memory[:] = os.urandom(MiB) * (BESIDE_BYTES // MiB)
    stores = _endless_stores(tier, memory)
    before = tier.tier.statistics().stored_bytes

    def look_up_busy() -> float:
        next(stores)
        return look_up()

    began_s = time.perf_counter()
    busy = list(_until(seconds, look_up_busy))
    written = tier.tier.statistics().stored_bytes - before
    taken = Beside(quiet, busy, written / (time.perf_counter() - began_s) / 1e9)
    tier.close()
    return taken


def _until(seconds: float, call: Callable[[], float]) -> Iterator[float]:
    end_s = time.perf_counter() + seconds
    while time.perf_counter() < end_s:
        yield call()


def _endless_stores(tier: Driven, memory: memoryview) -> Iterator[None]:
    """Keep the disk busy at each turn; memory serves all, since what it holds does not change."""
    layout = Shape(0, BESIDE_BYTES).layout
    while True:
        while tier.tier.statistics().queued_bytes < QUEUED * BESIDE_BYTES:
            key = os.urandom(KEY_BYTES)
            record = Record(ROOT, ROOT.key, key, digests_of(key, is_tail=False), layout)
            tier.submit_store(record, memory)
        yield


# ---- holes


@dataclass(frozen=True, slots=True)
class Holes:
    """Milliseconds: each hole, then all of them, the file's end, and a copy of half of it."""

    one_ms: list[float]
    all_ms: float
    unlink_ms: float
    rewrite_ms: float


def holes(below: Path, record_bytes: int, total_bytes: int) -> Holes:
    """Punch a file away record by record, in no order; and what would be done instead."""
    files = SystemFiles()
    count = total_bytes // record_bytes
    with directory(below) as path:
        memory = page_memory(record_bytes)
        memory[:] = os.urandom(MiB) * (record_bytes // MiB)

        def made(name: str) -> int:
            flags = os.O_RDWR | os.O_CREAT | os.O_DIRECT
            descriptor = files.open(str(path / name), flags)
            for number in range(count):
                files.write_at(descriptor, [memory], number * record_bytes)
            files.sync(descriptor)
            return descriptor

        def rewrite() -> None:
            copy = files.open(str(path / "copy"), os.O_RDWR | os.O_CREAT | os.O_DIRECT)
            for number in range(0, count, 2):
                files.read_at(source, [memory], number * record_bytes)
                files.write_at(copy, [memory], number // 2 * record_bytes)
            files.sync(copy)
            files.close(copy)

        punched, source = made("punched"), made("source")
        rewrite_ms = _timed_ms(rewrite)
        files.close(source)
        unlink_ms = _timed_ms(lambda: files.unlink(str(path / "source")))
        order = list(range(count))
        random.Random(1).shuffle(order)

        def punch(number: int) -> None:
            files.punch(punched, number * record_bytes, record_bytes)

        one_ms = [_timed_ms(partial(punch, number)) for number in order]
        files.close(punched)
    return Holes(one_ms, sum(one_ms), unlink_ms, rewrite_ms)


def _timed_ms(call: Callable[[], object]) -> float:
    began_s = time.perf_counter()
    call()
    return (time.perf_counter() - began_s) * 1e3


# ---- all of it


def part(values: Sequence[float], hundredths: int) -> float:
    """So many hundredths of the values lie below."""
    return statistics.quantiles(values, n=100, method="inclusive")[hundredths - 1]


def verdict(is_kept: bool) -> str:
    """As a line ends."""
    return "  met" if is_kept else "  MISSED"


def in_child(*arguments: str) -> dict[str, Any]:
    """What a process of its own says."""
    command = [sys.executable, "-m", "benchmarks.paths_disk_start", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def measure_starts(below: Path | None, shapes: Sequence[Shape], count: int) -> bool:
    """Starts on each shape, cold and warm in turn; whether the budget is kept."""
    how = "" if os.access(DROP_CACHES, os.W_OK) else ", but for inodes (this user is not root)"
    print(f"starts, seconds of the median of {count}; cold: nothing is cached{how}")
    print(
        f"{'records':>26}{'segments':>9}{'index':>8}{'memory':>8}"
        f"{'cold: open':>12}{'hit':>7}{'warm: open':>12}{'hit':>7}{'all rows':>10}  budget"
    )
    is_kept = True
    for shape in shapes:
        with directory(below) as path:
            is_kept &= _measure_shape(path / "tier", shape, count)
    return is_kept


def _measure_shape(path: Path, shape: Shape, count: int) -> bool:
    fill(path, shape)
    taken: dict[str, list[Start]] = {"cold": [], "warm": []}
    for number in range(count):
        for how in sorted(taken, reverse=number % 2 == 1):
            answer = in_child("start", str(path), json.dumps(asdict(shape)), how)
            taken[how].append(Start(**answer))
    index_bytes = sum(file.stat().st_size for file in path.glob(f"*.{INDEX}"))
    segments = len(list(path.glob(f"*.{SEGMENT}")))
    cold, warm = taken["cold"], taken["warm"]
    memory_bytes = statistics.median(one.memory_bytes for one in warm)
    hit_s = statistics.median(one.hit_s for one in cold)
    is_met = hit_s <= HIT_S_MAX
    print(
        f"{shape!s:>26}{segments:>9,}{index_bytes / shape.records:>6.0f} B"
        f"{memory_bytes / shape.records:>6.0f} B"
        f"{statistics.median(one.opened_s for one in cold):>12.3f}{hit_s:>7.3f}"
        f"{statistics.median(one.opened_s for one in warm):>12.3f}"
        f"{statistics.median(one.hit_s for one in warm):>7.3f}"
        f"{statistics.median(one.all_rows_s for one in warm):>10.3f}"
        f"  cold hit <= {HIT_S_MAX:g}{verdict(is_met)}",
        flush=True,
    )
    return is_met


def measure_beside(below: Path | None, shape: Shape, seconds: float) -> bool:
    """Lookups with and without stores; whether they are as quick as they should be."""
    with directory(below) as path:
        path = path / "tier"
        fill(path, shape)
        answer = in_child("beside", str(path), json.dumps(asdict(shape)), str(seconds))
    taken = Beside(**answer)
    print(f"\nlookups of {CHAIN_RECORDS} records among {shape.records:,}, microseconds")
    print(f"{'':<34}{'count':>8}{'p50':>9}{'p99':>9}  budget")
    is_kept = True
    rate = f"the disk writes {taken.gb_per_s:.2f} GB/s"
    for what, values in (("the disk is idle", taken.quiet_us), (rate, taken.busy_us)):
        middle, high = statistics.median(values), part(values, 99)
        is_met = middle <= P50_US_MAX and high <= P99_US_MAX
        is_kept &= is_met
        print(
            f"{what:<34}{len(values):>8,}{middle:>9.0f}{high:>9.0f}"
            f"  <= {P50_US_MAX:g} p50, {P99_US_MAX:g} p99{verdict(is_met)}"
        )
    return is_kept


def measure_holes(below: Path | None, total_bytes: int) -> None:
    """What docs/decisions/disk-space-comes-back-by-holes.md rests on."""
    print(f"\nholes in a file of {format_bytes(total_bytes)}, in no order; milliseconds")
    print(
        f"{'record':>8}{'one p50':>10}{'one p99':>10}{'all':>8}{'unlink':>8}{'rewrite half':>14}"
    )
    for size in HOLE_SIZES:
        with directory(below) as path:
            taken = holes(path, size, total_bytes)
        print(
            f"{size // MiB:>4} MiB{statistics.median(taken.one_ms):>10.2f}"
            f"{part(taken.one_ms, 99):>10.2f}{taken.all_ms:>8.0f}{taken.unlink_ms:>8.0f}"
            f"{taken.rewrite_ms:>14.0f}",
            flush=True,
        )


def run_child(arguments: Sequence[str]) -> None:
    """One measurement, told as JSON."""
    what, path, shape_text, how = arguments
    shape = Shape(**json.loads(shape_text))
    if what == "start":
        taken: Start | Beside = start(Path(path), shape, is_cold=how == "cold")
    else:
        taken = beside(Path(path), shape, float(how))
    print(json.dumps(asdict(taken)))


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print; 0 where every budget is kept."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="no directory of a million records")
    parser.add_argument("--directory", type=Path, help="on the disk to be measured")
    options = parser.parse_args(argv)
    shapes = [Shape(320, MiB), Shape(3_200, MiB)]
    if not options.quick:
        shapes += [Shape(32_000, MiB), Shape(32_000, 4 * MiB)]
    shapes += [replace(shape, is_killed=True) for shape in shapes[1:]]
    print(f"Python {sys.version.split()[0]}; load average {os.getloadavg()[0]:.2f}")
    below = options.directory
    is_kept = measure_starts(below, shapes, STARTS_QUICK if options.quick else STARTS)
    largest = shapes[1] if options.quick else shapes[2]
    is_kept &= measure_beside(below, largest, BESIDE_S_QUICK if options.quick else BESIDE_S)
    measure_holes(below, HOLES_BYTES_QUICK if options.quick else HOLES_BYTES)
    print("\nall budgets kept" if is_kept else "\na budget was MISSED")
    return 0 if is_kept else 1


if __name__ == "__main__":
    if sys.argv[1:2] in (["start"], ["beside"]):
        run_child(sys.argv[1:])
    else:
        sys.exit(main(sys.argv[1:]))
