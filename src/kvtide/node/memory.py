"""The memory of the host tier: allocated, looked at and freed beside the owner's loop.

Ownership
    files by region        the loop's thread
    what is charged        the allocator's one thread, which looks at the machine between two
                           allocations, so what it has counted is there
"""

import asyncio
import contextlib
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeAlias

from kvtide.core.layout import KVLayout
from kvtide.core.messages import Run
from kvtide.errors import HostMemoryError
from kvtide.memory.region import GenerationMemory, RegionMemory
from kvtide.node.watch import MemoryWatch

FREEING_THREADS = 8
"""The kernel takes a quarter of a second to free a GiB; several regions go at once."""


@dataclass(slots=True)
class RegionFiles:
    """The memory of one region: a file for each shard, and the generations."""

    layout: KVLayout
    shards: list[RegionMemory]
    generations: GenerationMemory

    @property
    def bytes_total(self) -> int:
        """Of its shards, as the machine counts regions."""
        return sum(shard.bytes_total for shard in self.shards)

    def populate(self) -> None:
        """Make the views quick; blocks for 0.25 s a GiB."""
        for shard in self.shards:
            shard.populate()

    def close(self) -> None:
        """Let go of the memory; blocks while the kernel frees it."""
        for shard in self.shards:
            shard.close()
        self.generations.close()


Look: TypeAlias = int | str | None
"""A new limit of the host tier; or why none can be seen; or nothing new."""


class NodeMemory:
    """All regions of one node."""

    def __init__(self, host_bytes: int, *, has_tiers: bool) -> None:
        """Raises RuntimeError where the system gives no thread."""
        self._has_tiers = has_tiers
        self._files: dict[int, RegionFiles] = {}
        self._allocator = ThreadPoolExecutor(1, thread_name_prefix="kvtide-memory")
        self._allocator.submit(int).result()  # starts the thread while there is one to be had
        self._charged_bytes = 0
        self._watch = MemoryWatch(host_bytes)

    def __getitem__(self, region: int) -> RegionFiles:
        return self._files[region]

    def cells(self, run: Run) -> list[memoryview]:
        """The bytes of a run of cells, shard by shard, as this process sees them."""
        files = self._files[run.region]
        return [
            shard.view()[run.first_cell * size : run.end_cell * size]
            for shard, size in zip(files.shards, files.layout.cell_bytes, strict=True)
        ]

    def look(self) -> "Future[Look]":
        """Look at what the machine has to spare."""
        return self._allocator.submit(self.look_now)

    def look_now(self) -> Look:
        """The same, in the caller's thread; only while nothing is being allocated."""
        try:
            return self._watch.limit(self._charged_bytes)
        except (HostMemoryError, OSError, ValueError) as error:
            return str(error)

    def make(self, number: int, layout: KVLayout, cell_count: int) -> "Future[RegionFiles | str]":
        """Allocate a region; `add` it when it is there. A text says why it is not."""
        return self._allocator.submit(self._make, number, layout, cell_count)

    def _make(self, number: int, layout: KVLayout, cell_count: int) -> RegionFiles | str:
        files = allocate(number, layout, cell_count)
        if isinstance(files, RegionFiles):
            self._charged_bytes += files.bytes_total
        return files

    def add(self, number: int, files: RegionFiles) -> None:
        """The region is in use from now on; for tiers, which read and write in it, it is made
        quick meanwhile."""
        self._files[number] = files
        if self._has_tiers:
            with contextlib.suppress(HostMemoryError):  # whoever needs the view will be told
                for shard in files.shards:
                    shard.view()
                self._allocator.submit(files.populate)

    def free(self, number: int) -> "Future[None]":
        """Give a region back to the machine."""
        return self._allocator.submit(self._free, self._files.pop(number))

    def _free(self, files: RegionFiles) -> None:
        files.close()
        self._charged_bytes -= files.bytes_total

    async def close(self, timeout_s: float) -> None:
        """Free everything, and wait for that so long.

        Raises:
            TimeoutError: it took longer.
            RuntimeError: the system gives no thread for it.
        """
        files, self._files = list(self._files.values()), {}
        loop = asyncio.get_running_loop()
        # Not the loop's own threads, for which it would wait as long as the kernel likes.
        freeing = ThreadPoolExecutor(FREEING_THREADS, thread_name_prefix="kvtide-free")
        closing = [loop.run_in_executor(freeing, self._allocator.shutdown)]
        closing += [loop.run_in_executor(freeing, one.close) for one in files]
        await asyncio.wait_for(asyncio.gather(*closing), timeout_s)


def allocate(number: int, layout: KVLayout, cell_count: int) -> RegionFiles | str:
    """Allocate a region; why not, where the machine does not give the memory."""
    shards: list[RegionMemory] = []
    try:
        for shard, cell_bytes in enumerate(layout.cell_bytes):
            name = f"{number & 0xFFFF}-{shard}"
            shards.append(RegionMemory.create(name, cell_count * cell_bytes))
        return RegionFiles(layout, shards, GenerationMemory(f"{number & 0xFFFF}-g", cell_count))
    except (HostMemoryError, OSError, ValueError) as error:  # the latter: a strange /proc
        for shard_memory in shards:
            with contextlib.suppress(OSError):
                shard_memory.close()
        return str(error)
