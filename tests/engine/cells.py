"""The node's memory, read and damaged from outside, as a fault of the hardware would.

Regions are memory files of the node, so anybody of the same user can open them through /proc.
Which cells hold a prompt shows in the generations: each run of cells got its number when it was
lent, from one counter, so what was stored last has the highest.
"""

import contextlib
import os
import re
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_NAME = re.compile(r"/memfd:kvtide:(\d+)-(\d+|g) \(deleted\)")
GENERATION_BYTES = 8


@dataclass(frozen=True, slots=True)
class Cell:
    """One block's bytes in one shard."""

    file: str
    """Path of the region below /proc."""
    offset: int
    size_bytes: int
    generation: int
    number: int
    """Of the cell in its region."""


class NodeMemory:
    """The regions that a node has now."""

    def __init__(self, pid: int) -> None:
        self._pid = pid

    def _files(self) -> dict[tuple[str, str], str]:
        """Paths by region and shard; "g" are the generations."""
        found = {}
        for link in Path(f"/proc/{self._pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                match = _NAME.fullmatch(os.readlink(link))
                if match:
                    found[match[1], match[2]] = str(link)
        return found

    def last_generation(self) -> int:
        """The highest generation that was given so far."""
        return max((cell.generation for cell in self.cells()), default=0)

    def cells(self, after: int = 0, shard: int = 0) -> list[Cell]:
        """Cells lent after that generation: in the order of chunks, then of their blocks."""
        files = self._files()
        found = []
        for (region, kind), path in files.items():
            if kind != "g":
                continue
            generations = array("Q", Path(path).read_bytes())
            data = files.get((region, str(shard)))
            if data is None:  # a region of engines with fewer shards
                continue
            size = os.stat(data).st_size // len(generations)
            found += [
                Cell(data, number * size, size, generation, number)
                for number, generation in enumerate(generations)
                if generation > after
            ]
        return sorted(found, key=lambda cell: (cell.generation, cell.number))


def read(cell: Cell) -> bytes:
    """A cell's bytes."""
    with open(cell.file, "rb") as file:
        file.seek(cell.offset)
        return file.read(cell.size_bytes)


def write(cell: Cell, data: bytes) -> None:
    """Put other bytes there."""
    assert len(data) == cell.size_bytes, len(data)
    with open(cell.file, "r+b", buffering=0) as file:
        file.seek(cell.offset)
        assert file.write(data) == len(data)


@contextlib.contextmanager
def swapped(one: Cell, other: Cell) -> Iterator[None]:
    """Inside, two cells have each other's bytes."""
    before = read(one), read(other)
    assert before[0] != before[1], "equal cells: swapping them would show nothing"
    write(one, before[1])
    write(other, before[0])
    try:
        yield
    finally:
        write(one, before[0])
        write(other, before[1])


@contextlib.contextmanager
def damaged(cell: Cell) -> Iterator[None]:
    """Inside, the two halves of a cell have changed places."""
    before = read(cell)
    half = cell.size_bytes // 2
    write(cell, before[half:] + before[:half])
    try:
        yield
    finally:
        write(cell, before)


def move_generation(pid: int, cell: Cell) -> None:
    """Raise the generation of one cell, as the node does when it lends the cell again.

    The file is sealed against new writers, so this goes through the node's own mapping of it.
    """
    files = NodeMemory(pid)._files()
    region = next(region for (region, _), path in files.items() if path == cell.file)
    name = f"/memfd:kvtide:{region}-g"
    for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
        if name in line and " rw-s " in line:
            address = int(line.split("-", 1)[0], 16) + cell.number * GENERATION_BYTES
            with open(f"/proc/{pid}/mem", "r+b", buffering=0) as memory:
                memory.seek(address)
                memory.write((cell.generation + (1 << 40)).to_bytes(GENERATION_BYTES, "little"))
            return
    raise AssertionError(f"{name} is not mapped by process {pid}")
