"""Memory that engines and node share, as bytes; copies that take time; who touches what, when.

    node    RegionFiles ── shards, generations ──┐ files that descriptors stand for
    worker  SimMapping ◄─────────────────────────┘ the same bytes

Bytes of a copy become visible piece by piece, and a process may die, or stand still, between two.
The *interval checker* knows of each cell who writes it now, or reads what must not change: another
writer before that one has ended, or died, was given cells that had another user.
"""

import math
from array import array
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from kvtide.core.layout import KVLayout
from kvtide.core.messages import Run
from kvtide.movers.base import CellPlace
from kvtide.testing.simulate.files import File, Table
from kvtide.testing.simulate.kernel import Kernel, Process
from kvtide.testing.simulate.loop import SimFuture
from kvtide.units import KiB

CELL_BYTES = 4 * KiB
MAKE_US_MAX = 4_000
"""The kernel allocates a region in so long."""
COPY_US_MAX = 400
"""A copy of a block takes so long."""
SLOW_COPY_US_MAX = 1_500_000
"""Where memory is swapped, say: connections come and go meanwhile."""


Uses: TypeAlias = list[int]
"""Cells in one kind of use; a cell stands there as often as it is used."""


class MemoryFile(File):
    """The bytes of one region in one shard."""

    def __init__(self, kernel: Kernel, region: int, cell_count: int, cell_bytes: int) -> None:
        super().__init__()
        self._kernel = kernel
        self.region = region
        self.cell_bytes = cell_bytes
        self.cells = bytearray(cell_count * cell_bytes)
        self.writers: dict[int, Process] = {}
        """Which worker writes a cell just now."""
        self.tiers_read: Uses = []
        self.tiers_write: Uses = []

    def take(self, cell: int, use: str) -> Uses:
        """A tier reads or writes a cell from now on; where that is noted."""
        writer = self.writers.get(cell)
        if writer is not None and writer.is_alive:
            raise self._kernel.broken(
                f"a tier has cell {cell} of region {self.region} {use} while {writer.name} writes"
            )
        if cell in self.tiers_write or (use == "written" and cell in self.tiers_read):
            raise self._kernel.broken(f"two tiers have cell {cell} of region {self.region}")
        uses = self.tiers_write if use == "written" else self.tiers_read
        uses.append(cell)
        return uses

    def begin_write(self, cell: int, process: Process) -> None:
        """A worker writes a cell from now on."""
        other = self.writers.get(cell)
        if other is not None and other.is_alive:
            raise self._kernel.broken(
                f"{process.name} and {other.name} write cell {cell} of region {self.region}"
            )
        if cell in self.tiers_write or cell in self.tiers_read:
            raise self._kernel.broken(
                f"{process.name} writes cell {cell} of region {self.region} that a tier has"
            )
        self.writers[cell] = process


class GenerationFile(File):
    """The generations of one region: written by the node."""

    def __init__(self, kernel: Kernel, cell_count: int) -> None:
        super().__init__()
        self._kernel = kernel
        self.values = array("Q", bytes(8 * cell_count))

    def set(self, first_cell: int, count: int, value: int) -> None:
        """As `GenerationMemory.set`. It is raised also when a silent writer is given up."""
        for cell in range(first_cell, first_cell + count):
            if self.values[cell] >= value:
                raise self._kernel.broken(f"the generation of cell {cell} is not raised")
            self.values[cell] = value


class Shard:
    """The node's hold on one shard's file."""

    def __init__(self, file: Any, number: int) -> None:
        self.file = file
        self.fd = number


class RegionFiles:
    """As `node.memory.RegionFiles`."""

    def __init__(self, table: Table, number: int, layout: KVLayout, cell_count: int) -> None:
        self.layout = layout
        files = [MemoryFile(table.kernel, number, cell_count, size) for size in layout.cell_bytes]
        generations = GenerationFile(table.kernel, cell_count)
        self.shards = [Shard(file, table.add(file)) for file in files]
        self._generations = Shard(generations, table.add(generations))
        self._table = table

    @property
    def generations(self) -> "Generations":
        return Generations(self._generations)

    def close(self) -> None:
        for one in (*self.shards, self._generations):
            self._table.close(one.fd)


class Generations:
    """As `GenerationMemory`."""

    def __init__(self, held: Shard) -> None:
        self.fd = held.fd
        self.set = held.file.set


class SimNodeMemory:
    """As `NodeMemory`: regions come a little later, and the machine may have none."""

    def __init__(self, kernel: Kernel, table: Table) -> None:
        self._kernel = kernel
        self._table = table
        assert kernel.current is not None
        self._process = kernel.current
        self._files: dict[int, RegionFiles] = {}
        self.limit_bytes: int | None = None
        """What the machine says next of what it has to spare."""
        self.is_short = False
        """It has no more memory."""

    def __getitem__(self, region: int) -> RegionFiles:
        return self._files[region]

    def cells(self, run: Run) -> list[memoryview]:
        """As `NodeMemory.cells`."""
        files = self._files[run.region]
        return [
            memoryview(shard.file.cells)[run.first_cell * size : run.end_cell * size]
            for shard, size in zip(files.shards, files.layout.cell_bytes, strict=True)
        ]

    def shard_files(self, region: int) -> list[MemoryFile]:
        """Of a region, for the checker."""
        return [shard.file for shard in self._files[region].shards]

    def look_now(self) -> int | None:
        limit, self.limit_bytes = self.limit_bytes, None
        return limit

    def look(self) -> SimFuture:
        return self._later(self.look_now)

    def make(self, number: int, layout: KVLayout, cell_count: int) -> SimFuture:
        def made() -> RegionFiles | str:
            if self.is_short:
                return "the machine has no more memory"
            return RegionFiles(self._table, number, layout, cell_count)

        return self._later(made)

    def add(self, number: int, files: RegionFiles) -> None:
        self._files[number] = files

    def free(self, number: int) -> None:
        self._files.pop(number).close()

    def _later(self, make: Callable[[], Any]) -> SimFuture:
        future = SimFuture()
        at_us = self._kernel.now_us + self._kernel.draw.randrange(MAKE_US_MAX)
        self._kernel.at(at_us, lambda: future.done_with(make()), self._process)
        return future


class SimMapping:
    """As `MappedRegion`: the bytes of what two descriptors stand for."""

    def __init__(
        self, table: Table, fd: int, bytes_total: int, generations_fd: int, cell_bytes: int
    ) -> None:
        file, generations = table.file(fd), table.file(generations_fd)
        assert isinstance(file, MemoryFile), fd
        assert isinstance(generations, GenerationFile), generations_fd
        assert len(file.cells) == bytes_total, (len(file.cells), bytes_total)
        self._kernel = table.kernel
        self.broken = self._kernel.broken
        self._table = table
        self.file = file
        self.cell_count = bytes_total // cell_bytes
        self.generations = generations.values
        self.cells = self
        """What `CellPlace` carries, for the mover to find the file by."""
        self._kept = [file, generations]
        for one in self._kept:
            one.references += 1
        self._process = table.process()
        self._process.on_death.append(self.close)

    @property
    def is_mapped(self) -> bool:
        """Until it is closed."""
        return bool(self._kept)

    def populate(self, stop: Any) -> bool:
        self._kernel.sleep(self._kernel.draw.random() * 0.003)
        return not stop.is_set()

    def close(self) -> None:
        kept, self._kept = self._kept, []
        for one in kept:
            self._table.let_go(one)
        if self.close in self._process.on_death:
            self._process.on_death.remove(self.close)


class SimMover:
    """As a `Mover`, over the KV memory of one rank of the toy engine."""

    def __init__(
        self,
        kernel: Kernel,
        memory: bytearray,
        block_bytes: int,
        is_slow: Callable[[], bool],
    ) -> None:
        self._kernel = kernel
        self._is_slow = is_slow
        self._memory = memory
        self.payload_bytes = block_bytes
        self.cell_bytes = CELL_BYTES
        self.copied_blocks = 0

    def store(self, block_ids: Sequence[int], cells: Sequence[CellPlace]) -> None:
        """Copy blocks into cells; each becomes visible in two halves."""
        kernel, size, half = self._kernel, self.payload_bytes, self.payload_bytes // 2
        process = kernel.current
        assert process is not None
        for block_id, place in zip(block_ids, cells, strict=True):
            file = _file(place)
            to, source = place.cell * file.cell_bytes, block_id * size
            file.begin_write(place.cell, process)
            block = bytes(self._memory[source : source + size])
            file.cells[to : to + half] = block[:half]
            self._take_time()
            _file(place)
            file.cells[to + half : to + size] = block[half:]
            del file.writers[place.cell]
        self.copied_blocks += len(block_ids)

    def load(self, block_ids: Sequence[int], cells: Sequence[CellPlace]) -> None:
        """Copy cells into blocks, half after half: what is changed meanwhile is torn."""
        size, half = self.payload_bytes, self.payload_bytes // 2
        for block_id, place in zip(block_ids, cells, strict=True):
            file = _file(place)
            start, to = place.cell * file.cell_bytes, block_id * size
            self._memory[to : to + half] = file.cells[start : start + half]
            self._take_time()
            _file(place)
            self._memory[to + half : to + size] = file.cells[start + half : start + size]

    def compare(
        self, block_ids: Sequence[int], cells: Sequence[CellPlace], numbers: object
    ) -> float:
        """Whether cells are as blocks; the toy model rounds nothing."""
        size, difference = self.payload_bytes, 0.0
        for block_id, place in zip(block_ids, cells, strict=True):
            file = _file(place)
            start, mine = place.cell * file.cell_bytes, block_id * size
            if file.cells[start : start + size] != self._memory[mine : mine + size]:
                difference = math.inf
            self._take_time()
            _file(place)
        return difference

    def _take_time(self) -> None:
        """Once in a while: most copies are over before anything else happens."""
        kernel = self._kernel
        kernel.edge()
        if kernel.draw.random() < 0.2:
            most_us = SLOW_COPY_US_MAX if self._is_slow() else COPY_US_MAX
            kernel.sleep(kernel.draw.random() * most_us / 1e6)


def _file(place: CellPlace) -> MemoryFile:
    """What a cell is in; a real worker that has it not mapped would end by SIGSEGV."""
    mapping: Any = place.region
    file: MemoryFile = mapping.file
    if not mapping.is_mapped:
        raise mapping.broken(f"a copy is in region {file.region}, which is not mapped any more")
    return file
