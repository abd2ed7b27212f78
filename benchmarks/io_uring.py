"""Would io_uring be faster than threads? The same pieces by both, written and read with O_DIRECT.

Threads make plain calls, as the disk tier does; the ring has so many calls under way, from one
thread. Pieces are a header of 4 KiB and the rest, one call each. Arms take turns in every round;
ratios are medians over the rounds, against two threads. Needs `liburing`, which kvtide does not.

    pip install liburing && python -m benchmarks.io_uring [DIRECTORY]
"""

import importlib
import mmap
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

ROUND_BYTES = 128 << 20
HEADER_BYTES = 4096
SIZES = (1 << 20, 4 << 20)
ROUNDS = 12
THREADS = (1, 2, 4)
DEPTHS = (1, 2, 4, 8)
BASE = "threads 2"


class File:
    """One arm's file, and the pieces of a round in it."""

    def __init__(self, path: Path, piece_bytes: int, memory: memoryview) -> None:
        self.fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600)
        self.end = 0
        header = memoryview(mmap.mmap(-1, HEADER_BYTES))
        starts = range(0, ROUND_BYTES, piece_bytes)
        self.parts = [[header, memory[start : start + piece_bytes]] for start in starts]
        self.piece_bytes = HEADER_BYTES + piece_bytes

    def begin(self, direction: str) -> list[int]:
        """Where the pieces of this round lie: behind the last ones, or those themselves."""
        length = len(self.parts) * self.piece_bytes
        start = self.end if direction == "write" else self.end - length
        self.end = start + length
        return list(range(start, self.end, self.piece_bytes))


def by_threads(count: int, file: File, direction: str) -> None:
    """Each thread takes every n-th piece."""
    call: Callable[..., int] = os.pwritev if direction == "write" else os.preadv
    offsets = file.begin(direction)

    def run(share: int) -> None:
        for number in range(share, len(offsets), count):
            assert call(file.fd, file.parts[number], offsets[number]) == file.piece_bytes

    with ThreadPoolExecutor(count) as pool:
        list(pool.map(run, range(count)))


class Ring:
    """So many calls under way."""

    def __init__(self, depth: int) -> None:
        self._uring: Any = importlib.import_module("liburing")
        self._depth = depth
        self._ring, self._done = self._uring.Ring(), self._uring.Cqe()
        self._uring.io_uring_queue_init(depth, self._ring)

    def run(self, file: File, direction: str) -> None:
        """One round."""
        uring, offsets = self._uring, file.begin(direction)
        prepare = getattr(uring, f"io_uring_prep_{direction}v")
        vectors = [uring.Iovec(parts) for parts in file.parts]
        submitted = ended = 0
        while ended < len(offsets):
            while submitted < len(offsets) and submitted - ended < self._depth:
                entry = uring.io_uring_get_sqe(self._ring)
                prepare(entry, file.fd, vectors[submitted], offsets[submitted])
                submitted += 1
            uring.io_uring_submit_and_wait(self._ring, 1)
            for _ in range(uring.io_uring_cq_ready(self._ring)):
                uring.io_uring_peek_cqe(self._ring, self._done)
                assert self._done[0].res == file.piece_bytes, self._done[0].res
                uring.io_uring_cq_advance(self._ring, 1)
                ended += 1


def compare(piece_bytes: int, memory: memoryview, below: Path) -> None:
    """All arms with pieces of one size, a line for each and each way."""
    runs = {f"threads {count}": partial(by_threads, count) for count in THREADS}
    runs |= {f"io_uring {depth}": Ring(depth).run for depth in DEPTHS}
    files = {name: File(below / name, piece_bytes, memory) for name in runs}
    for direction in ("write", "read"):
        taken: dict[str, list[float]] = {name: [] for name in runs}
        for number in range(ROUNDS):
            for name in list(runs)[:: 1 if number % 2 else -1]:
                began_s = time.perf_counter()
                runs[name](files[name], direction)
                taken[name].append(time.perf_counter() - began_s)
        for name, times in taken.items():
            pairs = zip(taken[BASE], times, strict=True)
            ratio = statistics.median(base / other for base, other in pairs)
            rate = ROUND_BYTES / statistics.median(times) / 1e9
            what = f"{piece_bytes >> 20:>3} MiB {direction:5} {name:10}"
            print(f"{what} {rate:.2f} GB/s, {ratio:.2f} of {BASE}", flush=True)


def main(argv: Sequence[str]) -> int:
    """Measure."""
    memory = memoryview(mmap.mmap(-1, ROUND_BYTES))
    memory[:] = os.urandom(1 << 20) * (ROUND_BYTES >> 20)
    for piece_bytes in SIZES:
        with tempfile.TemporaryDirectory(dir=argv[0] if argv else None) as below:
            compare(piece_bytes, memory, Path(below))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
