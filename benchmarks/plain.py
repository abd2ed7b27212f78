"""A plain copy of the pages that a hit moves: what a hit may at best cost over the engine's own.

The pages lie as vLLM's CPU build lays SmolLM2's: all layers in one buffer, all blocks of a layer
together. Each is one memmove; ctypes releases the GIL meanwhile, so two threads copy at once.
"""

import ctypes
import mmap
import statistics
import time
from concurrent.futures import ThreadPoolExecutor

LAYERS = 30
BLOCK_TOKENS = 128
PAGE_BYTES = 96 * 1024  # 2 × 3 KV heads × 64 × 2 bytes, of 128 tokens
BLOCKS_MAX = 364
ROUNDS = 9


class PlainCopy:
    """Paged memory and memory for as many whole blocks, both touched."""

    def __init__(self) -> None:
        size = LAYERS * BLOCKS_MAX * PAGE_BYTES
        # Touched by writing: a page that was only read may be the kernel's one page of zeros.
        self._paged = mmap.mmap(-1, size)
        self._kept = mmap.mmap(-1, size)
        for memory in (self._paged, self._kept):
            for offset in range(0, size, mmap.PAGESIZE):
                memory[offset] = 1

    def load_ms(self, block_count: int, thread_count: int) -> float:
        """Median time to copy so many blocks, spread over the paged memory, by so many threads."""
        blocks = [number * (BLOCKS_MAX // block_count) for number in range(block_count)]
        shares = [list(enumerate(blocks))[thread::thread_count] for thread in range(thread_count)]
        times_ms = []
        with ThreadPoolExecutor(thread_count) as pool:
            for _ in range(ROUNDS):
                began_s = time.perf_counter()
                list(pool.map(self._copy, shares))
                times_ms.append((time.perf_counter() - began_s) * 1000)
        return statistics.median(times_ms)

    def _copy(self, places: list[tuple[int, int]]) -> None:
        paged = ctypes.addressof(ctypes.c_char.from_buffer(self._paged))
        kept = ctypes.addressof(ctypes.c_char.from_buffer(self._kept))
        for cell, block in places:
            for layer in range(LAYERS):
                page = (layer * BLOCKS_MAX + block) * PAGE_BYTES
                inside = (cell * LAYERS + layer) * PAGE_BYTES
                ctypes.memmove(paged + page, kept + inside, PAGE_BYTES)
