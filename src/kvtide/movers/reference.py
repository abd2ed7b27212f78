"""The plainest mover: one page after the other. Slow, right by inspection: the tests' oracle."""

import ctypes
from collections.abc import Sequence

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


class ReferenceMover:
    """Copies page by page."""

    def __init__(self, pages: Sequence[PagePlace], block_count: int) -> None:
        check_pages(pages, block_count)
        self.payload_bytes = payload_bytes(pages)
        self.cell_bytes = cell_bytes(pages)
        self._pages = list(pages)
        self._block_count = block_count

    def store(self, block_ids: Sequence[int], cells: Sequence[CellPlace]) -> None:
        """Copy blocks into cells."""
        check_copy(block_ids, cells, self._block_count, self.cell_bytes)
        for block_id, place in zip(block_ids, cells, strict=True):
            offset = place.cell * self.cell_bytes
            for page in self._pages:
                source = page.address + block_id * page.block_stride_bytes
                place.region[offset : offset + page.page_bytes] = ctypes.string_at(
                    source, page.page_bytes
                )
                offset += page.page_bytes

    def load(self, block_ids: Sequence[int], cells: Sequence[CellPlace]) -> None:
        """Copy cells into blocks."""
        check_copy(block_ids, cells, self._block_count, self.cell_bytes)
        for block_id, place in zip(block_ids, cells, strict=True):
            offset = place.cell * self.cell_bytes
            for page in self._pages:
                target = page.address + block_id * page.block_stride_bytes
                content = bytes(place.region[offset : offset + page.page_bytes])
                ctypes.memmove(target, content, page.page_bytes)
                offset += page.page_bytes

    def compare(
        self,
        block_ids: Sequence[int],
        cells: Sequence[CellPlace],
        numbers: Sequence[PageNumbers],
    ) -> float:
        """How far cells are from blocks."""
        check_copy(block_ids, cells, self._block_count, self.cell_bytes)
        worst = 0.0
        for block_id, place in zip(block_ids, cells, strict=True):
            offset = place.cell * self.cell_bytes
            for page, kind in zip(self._pages, numbers, strict=True):
                source = page.address + block_id * page.block_stride_bytes
                computed = ctypes.string_at(source, page.page_bytes)
                kept = bytes(place.region[offset : offset + page.page_bytes])
                mine, theirs = (np.frombuffer(one, np.uint8) for one in (computed, kept))
                worst = max(worst, difference(mine, theirs, kind))
                offset += page.page_bytes
        return worst
