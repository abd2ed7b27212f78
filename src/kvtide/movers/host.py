"""The mover for KV memory that the processor addresses: one NumPy copy moves a block.

Layers are mostly equally spaced, so the pages of a block are gathered into *stretches*: equal in
size, at equal distances. Most engines need one stretch for all layers. A stretch of a block and
the same stretch of a cell are two views, and one `np.copyto` moves all pages between them:

    paged[block][layer, byte]   strides (distance of layers, 1)
    kept [cell ][layer, byte]   strides (page_bytes, 1)

It copies whole pages by memmove, in the order of the cell, and leaves the interpreter's lock free
until the block is done: threads copy side by side and the engine's own Python runs on.

Sketch: 135.7 MB of SmolLM2 are 46 blocks of 30 pages of 96 KiB, so 46 calls of 0.13 ms. As
benchmarks/paths_mover.py measures on two cores, against one memmove a page by as many threads: one
thread stores 1.02-1.07 as fast and loads 1.08-1.14 (20-22 GB/s); two, where both cores
are free, move 1.5-1.8 as fast (35-40 GB/s): the plain ones take turns at the lock after each page.

Rejected, by the same benchmark: one call for a run of blocks that follow one another, since NumPy
then reads in the order of the engine's memory (loads 0.96-1.00, with pages of 12 KiB a quarter
slower) and an engine stepping beside it got no faster; memmove by ctypes for each page; `copy_` of
torch tensors (0.93); preadv and pwritev on the memory file (0.65 and 0.37); a page as one element
(`numpy.void`), which keeps the lock to store.
"""

import ctypes
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from kvtide.movers.base import (
    CellPlace,
    PagePlace,
    cell_bytes,
    check_copy,
    check_pages,
    payload_bytes,
)
from kvtide.movers.compare import PageNumbers, difference


@dataclass(frozen=True, slots=True)
class _Stretch:
    """Pages of equal size at equal distances, one after the other in a cell.

    Attributes:
        paged: bytes of the engine, by block, page and byte.
        cell_offset_bytes: where in a cell the first of these pages begins.
    """

    paged: Any
    cell_offset_bytes: int

    def kept(self, region: memoryview, cell_bytes: int) -> Any:
        """Bytes of a region, by cell, page and byte."""
        _, page_count, page_bytes = self.paged.shape
        return np.ndarray(
            (region.nbytes // cell_bytes, page_count, page_bytes),
            np.uint8,
            region,
            self.cell_offset_bytes,
            (cell_bytes, page_bytes, 1),
        )


class HostMover:
    """Copies with the processor that calls it."""

    def __init__(self, pages: Sequence[PagePlace], block_count: int) -> None:
        """Remember the engine's memory, which stays where it is as long as this is used."""
        check_pages(pages, block_count)
        self.payload_bytes = payload_bytes(pages)
        self.cell_bytes = cell_bytes(pages)
        self._block_count = block_count
        self._stretches = list(_stretches(pages, block_count))

    def store(self, block_ids: Sequence[int], cells: Sequence[CellPlace]) -> None:
        """Copy blocks into cells."""
        for paged, kept in self._views(block_ids, cells):
            np.copyto(kept, paged)

    def load(self, block_ids: Sequence[int], cells: Sequence[CellPlace]) -> None:
        """Copy cells into blocks."""
        for paged, kept in self._views(block_ids, cells):
            np.copyto(paged, kept)

    def compare(
        self,
        block_ids: Sequence[int],
        cells: Sequence[CellPlace],
        numbers: Sequence[PageNumbers],
    ) -> float:
        """How far cells are from blocks."""
        worst, page = 0.0, 0
        for paged, kept in self._views(block_ids, cells):
            for mine, theirs in zip(paged, kept, strict=True):
                worst = max(worst, difference(mine, theirs, numbers[page]))
                page = (page + 1) % len(numbers)
        return worst

    def _views(
        self, block_ids: Sequence[int], cells: Sequence[CellPlace]
    ) -> Iterator[tuple[Any, Any]]:
        """What to copy: the pages of each stretch of each block, and where they are kept."""
        check_copy(block_ids, cells, self._block_count, self.cell_bytes)
        regions: dict[int, list[Any]] = {}
        for block_id, place in zip(block_ids, cells, strict=True):
            region = regions.get(id(place.region))
            if region is None:
                region = [one.kept(place.region, self.cell_bytes) for one in self._stretches]
                regions[id(place.region)] = region
            for stretch, kept in zip(self._stretches, region, strict=True):
                yield stretch.paged[block_id], kept[place.cell]


def _stretches(pages: Sequence[PagePlace], block_count: int) -> Iterator[_Stretch]:
    """Cut the pages of a block into the longest stretches, from the front."""
    cell_offset_bytes = 0
    start = 0
    while start < len(pages):
        count = _equally_spaced(pages[start:])
        yield _Stretch(_paged(pages[start : start + count], block_count), cell_offset_bytes)
        cell_offset_bytes += count * pages[start].page_bytes
        start += count


def _equally_spaced(pages: Sequence[PagePlace]) -> int:
    """How many of the first pages make a stretch."""
    first, count, distance = pages[0], 1, 0
    for previous, page in pairwise(pages):
        step = page.address - previous.address
        sizes = (page.page_bytes, page.block_stride_bytes)
        if sizes != (first.page_bytes, first.block_stride_bytes):
            break
        if count > 1 and step != distance:
            break
        distance = step
        count += 1
    return count


def _paged(stretch: Sequence[PagePlace], block_count: int) -> Any:
    """The engine's memory from the lowest to the highest page, by block, page and byte."""
    first, last = stretch[0], stretch[-1]
    distance_bytes = stretch[1].address - first.address if len(stretch) > 1 else 0
    lowest = min(first.address, last.address)
    span_bytes = abs(last.address - first.address)
    span_bytes += (block_count - 1) * first.block_stride_bytes + first.page_bytes
    return np.ndarray(
        (block_count, len(stretch), first.page_bytes),
        np.uint8,
        (ctypes.c_uint8 * span_bytes).from_address(lowest),
        first.address - lowest,
        (first.block_stride_bytes, distance_bytes, 1),
    )
