"""The disk tier against a plain loop: bandwidth, latency, what checksums and syncs cost.

The plain loop writes and reads the same sizes with O_DIRECT, by as many threads as the tier uses,
to a file beside the tier's. At a cap as much is given back as is written: there the plain loop has
one more thread, which punches holes of the same size into its oldest file. Arms take turns in each
round; the plain loop also runs a second time under another name, and how far those two lie apart
is the noise floor. Nothing of it goes through the page cache, so there is none to drop. Python is
set up as in the node: no collector, threads that take turns quickly.

    python -m benchmarks.paths_disk [--quick] [--directory DIRECTORY]

`--quick` measures few rounds.
"""

import argparse
import gc
import mmap
import os
import resource
import shutil
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

import xxhash

from kvtide.core.keys import fingerprint, root_key
from kvtide.core.layout import KVLayout
from kvtide.core.records import Record, RootName
from kvtide.node.main import SWITCH_INTERVAL_S
from kvtide.tiers.base import Loaded, LoadJob, LoadOutcome, Stored, StoreJob, StoreOutcome
from kvtide.tiers.disk.tier import DiskTier
from kvtide.tiers.disk.workers import BYTES_THREADS, LOAD_THREADS
from kvtide.tiers.files import SystemFiles
from kvtide.units import GiB, KiB, MiB

BLOCKS = 2
ROUND_BYTES = 256 * MiB
RATIO_MIN = 0.9
RATIO_GATE = 0.7
CHECKSUM_RATIO_MAX = 0.10
HEADER_BYTES = 4 * KiB
ROOMY = 16 * GiB
"""A cap that is not reached: the comparison with a loop that only appends."""
FULL = GiB
"""A cap that is reached before the first round that counts: all that is stored is evicted for."""
LATENCIES, LATENCIES_QUICK = 300, 20
SIZES = (MiB, 4 * MiB, 32 * MiB)


@dataclass(slots=True)
class Taken:
    """Seconds and CPU seconds of one arm, a pair for each round."""

    wall_s: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)

    def rate(self, size_bytes: int) -> float:
        """GB/s, of the median round."""
        return size_bytes / statistics.median(self.wall_s) / 1e9

    def cpu_per_gb(self, size_bytes: int) -> float:
        """CPU seconds for each GB."""
        return statistics.median(self.cpu_s) / size_bytes * 1e9


def timed(taken: Taken, work: Callable[[], None]) -> None:
    """One round of one arm."""
    began_s, began_cpu_s = time.perf_counter(), _cpu_s()
    work()
    taken.wall_s.append(time.perf_counter() - began_s)
    taken.cpu_s.append(_cpu_s() - began_cpu_s)


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


class Plain:
    """A file that is written and read whole, piece by piece."""

    def __init__(self, path: Path, piece_bytes: int, memory: memoryview) -> None:
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_DIRECT, 0o600)
        self._piece_bytes = piece_bytes + HEADER_BYTES
        self._count = ROUND_BYTES // piece_bytes
        self._header = mmap.mmap(-1, HEADER_BYTES)
        self._memory = memory
        self._end = 0

    def store(self) -> None:
        """Append a round's pieces, as the tier appends records."""
        start = self._end
        self._end += self._count * self._piece_bytes

        def write(share: int) -> None:
            for number in range(share, self._count, BYTES_THREADS):
                offset = start + number * self._piece_bytes
                os.pwritev(self._fd, [self._header, self._of(number)], offset)

        _by_threads(BYTES_THREADS, write)

    def load(self) -> None:
        """Read the last round's pieces."""
        first = self._end - self._count * self._piece_bytes
        headers = [mmap.mmap(-1, HEADER_BYTES) for _ in range(LOAD_THREADS)]

        def read(share: int) -> None:
            for number in range(share, self._count, LOAD_THREADS):
                offset = first + number * self._piece_bytes
                os.preadv(self._fd, [headers[share], self._of(number)], offset)

        _by_threads(LOAD_THREADS, read)

    def store_one(self) -> None:
        """Append a piece."""
        self._end += self._piece_bytes
        offset = self._end - self._piece_bytes
        os.pwritev(self._fd, [self._header, self._of(0)], offset)

    def load_one(self) -> None:
        """Read the last piece."""
        offset = self._end - self._piece_bytes
        os.preadv(self._fd, [self._header, self._of(0)], offset)

    def punch(self) -> None:
        """Give the space of all pieces back, one by one."""
        for offset in range(0, self._end, self._piece_bytes):
            SystemFiles().punch(self._fd, offset, self._piece_bytes)

    def _of(self, number: int) -> memoryview:
        size = self._piece_bytes - HEADER_BYTES
        return self._memory[number * size : (number + 1) * size]

    def close(self) -> None:
        os.close(self._fd)


def _by_threads(count: int, work: Callable[[int], None]) -> None:
    with ThreadPoolExecutor(count) as pool:
        list(pool.map(work, range(count)))


class PlainAtCap:
    """The same at a cap: as much is given back as is written, by another thread at the same time.

    One file a round, as the tier has segments; holes of the size of a piece in the oldest of them,
    and once a round has none left its file goes.
    """

    def __init__(self, path: Path, piece_bytes: int, memory: memoryview) -> None:
        self._path = path
        self._piece_bytes = piece_bytes
        self._memory = memory
        self._rounds: list[tuple[Path, Plain]] = []
        self._number = 0

    def store(self) -> None:
        """A round's pieces into a file of their own, while those of the oldest go."""
        self._number += 1
        path = self._path.with_name(f"{self._path.name}-{self._number}")
        self._rounds.append((path, Plain(path, self._piece_bytes, self._memory)))
        with ThreadPoolExecutor(1) as pool:
            freeing = pool.submit(self._free)
            self._rounds[-1][1].store()
            freeing.result()

    def _free(self) -> None:
        if len(self._rounds) * ROUND_BYTES > FULL:
            path, oldest = self._rounds.pop(0)
            oldest.punch()
            oldest.close()
            path.unlink()

    def close(self) -> None:
        for _, plain in self._rounds:
            plain.close()


class Tier:
    """The tier, driven as the node drives it."""

    def __init__(
        self, path: Path, piece_bytes: int, memory: memoryview, sync: str, cap_bytes: int = ROOMY
    ) -> None:
        self._woken = threading.Event()
        self.tier = DiskTier(
            path,
            cap_bytes,
            self._woken.set,
            sync=sync,
            queue_bytes_max=2 * ROUND_BYTES,
            floor_bytes=0,
        )
        self.tier.tick(1)
        self._layout = KVLayout(128, 128 * BLOCKS, (piece_bytes // BLOCKS,))
        name = fingerprint({"engine": "benchmark"})
        key = root_key(name, epoch=b"", salt=None, adapter=b"")
        self._root = RootName(key, name, b"", b"")
        self._piece_bytes = piece_bytes
        self._count = ROUND_BYTES // piece_bytes
        self._memory = memory
        self._number = 0
        self._records: list[Record] = []

    def store(self) -> None:
        """One chain: a round's records."""
        self._store(self._count)

    def load(self) -> None:
        """The records of the last round."""
        self._load()

    def store_one(self) -> None:
        """One record, and nothing else on its way."""
        self._store(1)

    def load_one(self) -> None:
        """That one."""
        self._load()

    def _store(self, count: int) -> None:
        parent = self._root.key
        self._records = []
        for number in range(count):
            key = os.urandom(32)
            digests = os.urandom(16 * (BLOCKS - 1)) + key[:16]
            record = Record(self._root, parent, key, digests, self._layout)
            self._number += 1
            self.tier.store(StoreJob(self._number, record, [self._of(number)]))
            self._records.append(record)
            parent = key
        for done in self._ends():
            assert isinstance(done, Stored), done
            assert done.outcome is StoreOutcome.STORED, done

    def _load(self) -> None:
        for number, record in enumerate(self._records):
            self._number += 1
            self.tier.load(LoadJob(self._number, record, [self._of(number)]))
        for done in self._ends():
            assert isinstance(done, Loaded), done
            assert done.outcome is LoadOutcome.LOADED, done

    def _ends(self) -> Iterator[object]:
        left = len(self._records)
        while left:
            assert self._woken.wait(60), "the tier does not answer"
            self._woken.clear()
            for done in self.tier.poll():
                left -= 1
                yield done

    def _of(self, number: int) -> memoryview:
        return self._memory[number * self._piece_bytes : (number + 1) * self._piece_bytes]

    def close(self) -> None:
        self.tier.close(10)


Arm: TypeAlias = Plain | PlainAtCap | Tier


@contextmanager
def directory(below: Path | None) -> Iterator[Path]:
    """An empty one, removed afterwards."""
    path = Path(tempfile.mkdtemp(prefix="kvtide-bench-", dir=below))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def bandwidth(below: Path | None, rounds: int) -> bool:
    """Both ways, for each size; whether the budget is kept."""
    is_kept = True
    memory = memoryview(mmap.mmap(-1, ROUND_BYTES))
    memory[:] = os.urandom(MiB) * (ROUND_BYTES // MiB)
    print(f"rounds of {ROUND_BYTES // MiB} MiB; GB/s of the median of {rounds} rounds")
    print(f"{'record':>8} {'':6} {'tier':>6} {'plain':>6} {'ratio':>6} {'noise':>6}  CPU s/GB")
    for piece_bytes in SIZES:
        with directory(below) as path:
            arms: dict[str, Arm] = {
                "plain": Plain(path / "plain", piece_bytes, memory),
                "plain again": Plain(path / "again", piece_bytes, memory),
                "plain at its cap": PlainAtCap(path / "plain-full", piece_bytes, memory),
                "tier": Tier(path / "tier", piece_bytes, memory, "none"),
                "tier at its cap": Tier(path / "full", piece_bytes, memory, "none", FULL),
            }
            for _ in range(FULL // ROUND_BYTES):
                arms["plain at its cap"].store()
                arms["tier at its cap"].store()
            stores = _turns(arms, "store", rounds)
            is_kept &= _line(piece_bytes, "store", stores, "tier", "plain")
            is_kept &= _line(piece_bytes, "store", stores, "tier at its cap", "plain at its cap")
            _line(piece_bytes, "store", stores, "tier at its cap", "plain", is_judged=False)
            arms.pop("plain at its cap").close()
            loads = _turns(arms, "load", rounds)
            is_kept &= _line(piece_bytes, "load", loads, "tier", "plain")
            is_kept &= _line(piece_bytes, "load", loads, "tier at its cap", "plain")
            for arm in arms.values():
                arm.close()
    return is_kept


def _turns(arms: dict[str, Arm], direction: str, rounds: int) -> dict[str, Taken]:
    """All arms in every round, each after another one in every other; the first is thrown away."""
    taken = {name: Taken() for name in arms}
    for number in range(rounds + 1):
        for name in list(arms)[:: 1 if number % 2 else -1]:
            timed(taken[name] if number else Taken(), getattr(arms[name], direction))
    return taken


def _line(
    piece_bytes: int,
    direction: str,
    taken: dict[str, Taken],
    arm: str,
    against: str,
    *,
    is_judged: bool = True,
) -> bool:
    pairs = zip(taken[against].wall_s, taken[arm].wall_s, strict=True)
    ratio = statistics.median(plain / tier for plain, tier in pairs)
    again = zip(taken["plain"].wall_s, taken["plain again"].wall_s, strict=True)
    noise = statistics.median(plain / other for plain, other in again)
    cpu = "/".join(f"{taken[name].cpu_per_gb(ROUND_BYTES):.2f}" for name in (arm, against))
    verdict = "" if ratio >= RATIO_MIN else "missed" if ratio < RATIO_GATE else "below the goal"
    print(
        f"{piece_bytes // MiB:>4} MiB {direction:<6} {taken[arm].rate(ROUND_BYTES):>6.2f}"
        f" {taken[against].rate(ROUND_BYTES):>6.2f} {ratio:>6.2f} {noise:>6.2f}"
        f"  {cpu}  {arm} / {against}  {verdict if is_judged else 'not judged'}",
        flush=True,
    )
    return ratio >= RATIO_GATE or not is_judged


def checksums(below: Path | None, rounds: int) -> bool:
    """What proving takes of a load."""
    memory = memoryview(mmap.mmap(-1, ROUND_BYTES))
    memory[:] = os.urandom(MiB) * (ROUND_BYTES // MiB)
    with directory(below) as path:
        tier = Tier(path / "tier", 4 * MiB, memory, "none")
        tier.store()
        loads, proofs = Taken(), Taken()
        for _ in range(rounds):
            timed(loads, tier.load)
            timed(proofs, lambda: _prove(memory))
        tier.close()
    ratio = statistics.median(proofs.wall_s) / statistics.median(loads.wall_s)
    ratio /= LOAD_THREADS  # two threads prove while they load
    print(f"\nchecksums: {proofs.rate(ROUND_BYTES):.1f} GB/s, {ratio:.1%} of a load")
    return ratio <= CHECKSUM_RATIO_MAX


def latency(below: Path | None, count: int) -> None:
    """One store and one load at a time, beside the same call of a plain loop."""
    memory = memoryview(mmap.mmap(-1, max(SIZES)))
    memory[:] = os.urandom(MiB) * (max(SIZES) // MiB)
    print(f"\none at a time, milliseconds, of {count} each")
    print(f"{'record':>8} {'':6} {'tier p50':>9} {'p99':>7} {'plain p50':>10} {'p99':>7}")
    for piece_bytes in SIZES:
        with directory(below) as path:
            arms = {
                "tier": Tier(path / "tier", piece_bytes, memory, "none"),
                "plain": Plain(path / "plain", piece_bytes, memory),
            }
            taken = {(name, what): Taken() for what in ("store", "load") for name in arms}
            for number in range(count + 1):
                for name, arm in list(arms.items())[:: 1 if number % 2 else -1]:
                    for what, call in (("store", arm.store_one), ("load", arm.load_one)):
                        timed(taken[name, what] if number else Taken(), call)
            for what in ("store", "load"):
                tier, plain = (_percentiles_ms(taken[name, what]) for name in arms)
                print(
                    f"{piece_bytes // MiB:>4} MiB {what:<6} {tier[0]:>9.2f} {tier[1]:>7.2f}"
                    f" {plain[0]:>10.2f} {plain[1]:>7.2f}",
                    flush=True,
                )
            for arm in arms.values():
                arm.close()


def _percentiles_ms(taken: Taken) -> tuple[float, float]:
    parts = statistics.quantiles(taken.wall_s, n=100, method="inclusive")
    return 1e3 * parts[49], 1e3 * parts[98]


def _prove(memory: memoryview) -> None:
    for start in range(0, ROUND_BYTES, 2 * MiB):
        xxhash.xxh3_64_intdigest(memory[start : start + 2 * MiB])


def syncs(below: Path | None, rounds: int) -> None:
    """What each level of `disk_sync` costs a store."""
    memory = memoryview(mmap.mmap(-1, ROUND_BYTES))
    print(f"\nstores of 4 MiB by disk_sync; GB/s of the median of {rounds} rounds")
    with directory(below) as path:
        arms = {s: Tier(path / s, 4 * MiB, memory, s) for s in ("none", "sealed", "each")}
        taken = {name: Taken() for name in arms}
        for number in range(rounds + 1):
            for name, arm in list(arms.items())[:: 1 if number % 2 else -1]:
                timed(taken[name] if number else Taken(), arm.store)
        for name, arm in arms.items():
            print(f"  {name:<7} {taken[name].rate(ROUND_BYTES):.2f}", flush=True)
            arm.close()


def main(argv: Sequence[str]) -> int:
    """Measure; 1 where a budget is missed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--directory", type=Path, help="on the disk to be measured")
    options = parser.parse_args(argv)
    rounds = 3 if options.quick else 15
    below = options.directory
    free = shutil.disk_usage(below or tempfile.gettempdir()).free
    if free < 16 * GiB:
        print(f"16 GiB are needed, {free / GiB:.0f} are free", file=sys.stderr)
        return 2
    with as_in_the_node():
        is_kept = bandwidth(below, rounds)
        is_kept &= checksums(below, rounds)
        latency(below, LATENCIES_QUICK if options.quick else LATENCIES)
        syncs(below, rounds)
    return 0 if is_kept else 1


@contextmanager
def as_in_the_node() -> Iterator[None]:
    """No collector, threads that take turns quickly."""
    before_s = sys.getswitchinterval()
    gc.disable()
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    try:
        yield
    finally:
        sys.setswitchinterval(before_s)
        gc.enable()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
