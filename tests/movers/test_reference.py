"""The oracle itself, against bytes written out by hand."""

import ctypes

from kvtide.movers.base import CellPlace, PagePlace
from kvtide.movers.reference import ReferenceMover


def test_pages_of_a_block_stand_one_after_the_other_in_its_cell() -> None:
    """Two layers of three blocks, pages of 2 and 1 bytes, strides of 2."""
    paged = ctypes.create_string_buffer(b"AaBbCc" + b"x.y.z.", 12)
    base = ctypes.addressof(paged)
    mover = ReferenceMover([PagePlace(base, 2, 2), PagePlace(base + 6, 2, 1)], block_count=3)
    region = bytearray(b"-" * 8192)
    cells = [CellPlace(memoryview(region), 1), CellPlace(memoryview(region), 0)]
    assert (mover.payload_bytes, mover.cell_bytes) == (3, 4096)

    mover.store([0, 2], cells)
    assert (region[:4], region[4096:4100]) == (b"Ccz-", b"Aax-")
    assert region.count(b"-") == 8192 - 6

    mover.load([1, 0], cells)
    assert paged.raw == b"CcAaCc" + b"z.x.z."
