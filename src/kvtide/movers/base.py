"""What a mover is: copies whole blocks between paged KV memory and cells, bytes as they are.

    paged memory, one page of block b for each layer      cell of the block
    layer 0  [ b0 | b1 | b2 | … ]                         [ layer 0 | layer 1 | … | pad ]
    layer 1  [ b0 | b1 | b2 | … ]       store ──►          page b    page b         to 4 KiB
    …                                    ◄── load

A page is opaque: engines pack it as their kernels like. So a mover knows addresses, strides and
sizes, and nothing of heads, tokens or dtypes; which engine may read which bytes is the key's
business. Pages of a cell stand one after the other in the order in which they were registered.

Rejected: a common format of tokens that engines of different layouts could share. The CPU build
packs within a page by instruction set, so nothing smaller than a page can be moved there.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from kvtide.core.layout import CELL_ALIGN_BYTES
from kvtide.movers.compare import PageNumbers
from kvtide.units import round_up


@dataclass(frozen=True, slots=True)
class PagePlace:
    """Where one layer's pages are: that of block b begins at address + b * block_stride_bytes."""

    address: int
    block_stride_bytes: int
    page_bytes: int


@dataclass(frozen=True, slots=True, eq=False)
class CellPlace:
    """One cell of a mapped region, whose bytes `region` views. (Equality would compare bytes.)"""

    region: memoryview
    cell: int


class Mover(Protocol):
    """Copies blocks of one worker; made once, when the engine has registered its KV memory.

    Attributes:
        payload_bytes: bytes of one block, all pages.
        cell_bytes: the same, padded: what a cell must have.
    """

    payload_bytes: int
    cell_bytes: int

    def store(self, block_ids: Sequence[int], cells: Sequence[CellPlace]) -> None:
        """Copy block `block_ids[i]` into `cells[i]`; done on return.

        Called by the connector, on the main thread; blocks for the copy. Nothing but the payload
        of these cells is written: padding keeps what it held.
        """
        ...

    def load(self, block_ids: Sequence[int], cells: Sequence[CellPlace]) -> None:
        """Copy `cells[i]` into block `block_ids[i]`; done on return.

        Called by the connector, on mover threads, of which several may run at once on different
        blocks; blocks for the copy, the interpreter's lock free. The caller checks generations
        afterwards: what was copied may already have been another chunk's.
        """
        ...

    def compare(
        self,
        block_ids: Sequence[int],
        cells: Sequence[CellPlace],
        numbers: Sequence[PageNumbers],
    ) -> float:
        """How far `cells[i]` are from block `block_ids[i]`: the greatest `difference` of a page.

        Called by the connector, on the main thread, once in a thousand hits; goes over the bytes
        once, page by page, and changes none. `numbers` tells of each page of a block, in order.
        The caller checks generations afterwards, as for a load.
        """
        ...


def payload_bytes(pages: Sequence[PagePlace]) -> int:
    """Bytes of one block."""
    return sum(page.page_bytes for page in pages)


def cell_bytes(pages: Sequence[PagePlace]) -> int:
    """Bytes of a cell that holds one block."""
    return round_up(payload_bytes(pages), CELL_ALIGN_BYTES)


def check_pages(pages: Sequence[PagePlace], block_count: int) -> None:
    """Assert what every mover believes of the memory that it was made for."""
    assert pages, "no pages"
    assert block_count > 0, block_count
    assert len(set(pages)) == len(pages), "the same pages twice: layers that share memory"
    for page in pages:
        assert 0 < page.page_bytes <= page.block_stride_bytes, page
        assert page.address > 0, page


def check_copy(
    block_ids: Sequence[int], cells: Sequence[CellPlace], block_count: int, cell_bytes: int
) -> None:
    """Assert before the first byte that all of a copy lies within both memories."""
    assert len(block_ids) == len(cells), (len(block_ids), len(cells))
    assert len(set(block_ids)) == len(block_ids), "a block is named twice in one copy"
    for block_id in block_ids:
        assert 0 <= block_id < block_count, (block_id, block_count)
    for place in cells:
        assert 0 <= place.cell < place.region.nbytes // cell_bytes, (
            place.cell,
            place.region.nbytes,
            cell_bytes,
        )
