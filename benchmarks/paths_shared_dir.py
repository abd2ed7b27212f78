"""A shared directory against plain loops of files on the same file system, and LMCache.

    python -m benchmarks.paths_shared_dir [--quick] [--directory DIRECTORY]

A plain loop has a file for each record, which it writes and reads whole with O_DIRECT, by as many
threads as records are under way, and removes one of the oldest for each that it writes. One that
syncs each file, as the tier does before it gives it its name (what a server refuses shows there),
is shown beside; it is the slower one where a sync costs anything. LMCache's adapters for
directories (`fs`, and `fs_native`, in C++) run in a process of their own, past the page cache too.
How they are compared, and what is shown, says benchmarks/places.py.

`--quick` measures few rounds, of one size alone, and decides nothing.
"""

import mmap
import os
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from benchmarks.lmcache_arm import Adapter
from benchmarks.lmcache_server import files_below
from benchmarks.paths_disk import directory
from benchmarks.places import (
    DEPTHS,
    HELD_ROUNDS,
    ROUND_BYTES,
    Arm,
    Arms,
    Cell,
    Extent,
    Here,
    Memory,
    Tier,
    closing,
    judge,
    measured,
    parser_of,
)
from kvtide.units import KiB

HEADER_BYTES = 4 * KiB


class Files(Here):
    """A file for each record, nothing else."""

    def __init__(
        self, below: Path, memory: Memory, piece_bytes: int, *, is_synced: bool = False
    ) -> None:
        super().__init__(memory)
        below.mkdir()
        self._below = below
        self._is_synced = is_synced
        self._pieces = memory.pieces(piece_bytes)
        self._pool = ThreadPoolExecutor(max(DEPTHS))
        self._headers = [mmap.mmap(-1, HEADER_BYTES) for _ in range(max(DEPTHS))]
        self._round = 0

    def _path(self, number: int, of_round: int) -> Path:
        return self._below / f"{of_round}-{number}"

    def put(self, depth: int) -> None:
        self._round += 1

        def write(share: int) -> None:
            for number in range(share, len(self._pieces), depth):
                self._write(self._path(number, self._round), number, self._headers[share])
                self._path(number, self._round - HELD_ROUNDS).unlink(missing_ok=True)

        list(self._pool.map(write, range(depth)))

    def _write(self, path: Path, number: int, header: mmap.mmap) -> None:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_DIRECT, 0o600)
        written = os.pwritev(descriptor, [header, self._pieces[number]], 0)
        assert written == HEADER_BYTES + len(self._pieces[number]), written
        if self._is_synced:
            os.fdatasync(descriptor)
        os.close(descriptor)

    def get(self, depth: int) -> None:
        def read(share: int) -> None:
            for number in range(share, len(self._pieces), depth):
                descriptor = os.open(self._path(number, self._round), os.O_RDONLY | os.O_DIRECT)
                into = [self._headers[share], self._pieces[number]]
                assert os.preadv(descriptor, into, 0) == sum(map(len, into))
                os.close(descriptor)

        list(self._pool.map(read, range(depth)))

    def close(self) -> None:
        self._pool.shutdown()


def arms_of(below: Path, memory: Memory, piece_bytes: int) -> Arms:
    """All for one size."""
    cap_bytes = HELD_ROUNDS * (ROUND_BYTES + ROUND_BYTES // piece_bytes * HEADER_BYTES)
    log = below / "lmcache.log"
    plain: dict[str, Arm] = {
        "plain": Files(below / "plain", memory, piece_bytes),
        "plain, synced": Files(below / "synced", memory, piece_bytes, is_synced=True),
    }
    return Arms(
        plain,
        again=Files(below / "again", memory, piece_bytes),
        tier=Tier(
            memory,
            piece_bytes,
            type="shared_dir",
            path=str(below / "tier"),
            bytes_max=cap_bytes,
        ),
        others={
            f"LMCache {name}": Adapter(files_below(name, below / name), piece_bytes, log)
            for name in ("fs", "fs_native")
        },
    )


def run(below: Path | None, extent: Extent) -> list[Cell]:
    """All sizes."""
    memory = Memory()

    @contextmanager
    def opened(piece_bytes: int) -> Iterator[Arms]:
        with directory(below) as path, closing(arms_of(path, memory, piece_bytes)) as arms:
            yield arms

    return measured("shared_dir", extent, opened)


def main(argv: Sequence[str]) -> int:
    """Measure; 1 where the goal is missed."""
    parser = parser_of(__doc__)
    parser.add_argument("--directory", type=Path, help="on the file system to be measured")
    options = parser.parse_args(argv)
    return judge({"shared_dir": run(options.directory, options.extent)}, options.extent)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
