"""How far the bytes of a page are from those that an engine computed anew.

The same tokens computed in a step of another shape give floats that differ by rounding; bytes of
another place, order or layout differ by everything. Between the two lies a wide gap, and the
measure is made to keep it wide: the relative L2 distance of a whole page, keys and values apart,
since values are often a tenth of keys and would drown in them.

    page of CPU attention   [ keys of head 0 | values of head 0 | keys of head 1 | … ]   planes
    any other               [ the page                                               ]   one plane

Rejected: the greatest difference of single numbers (rounding of a large one is more than all of a
small one); a bound in units of the last place (layers add up, so it would depend on the model).
"""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

DIFFERENCE_MAX = 0.25
"""Of a page; a greater one is no rounding. (Measured: docs/decisions/canary.md.)"""
FLOATS = ("bfloat16", "float16", "float32")
"""What is compared by distance; all else is equal or infinitely far."""


@dataclass(frozen=True, slots=True)
class PageNumbers:
    """What the bytes of a page are.

    Attributes:
        dtype: a float of FLOATS, or anything else, which is compared byte by byte.
        plane_bytes: keys and values take turns after so many bytes; 0: they are not told apart.
    """

    dtype: str
    plane_bytes: int = 0


def difference(computed: Any, kept: Any, numbers: PageNumbers) -> float:
    """The relative distance of two pages, arrays of bytes: of their keys or values, the greater.

    0 where all numbers are equal, infinite where one alone is none; never NaN.
    """
    if np.array_equal(computed, kept):
        return 0.0
    if numbers.dtype not in FLOATS:
        return math.inf
    with np.errstate(all="ignore"):  # bytes that are no KV at all may be anything
        mine, theirs = _floats(computed, numbers.dtype), _floats(kept, numbers.dtype)
        is_same = (mine == theirs) | (np.isnan(mine) & np.isnan(theirs))
        item_bytes = computed.nbytes // mine.size
        plane = numbers.plane_bytes // item_bytes
        shape = (-1, 2, plane) if plane and mine.size % (2 * plane) == 0 else (-1, 1, mine.size)
        apart = np.where(is_same, 0, mine - theirs)  # also where both have overflowed
        sized = np.where(np.isfinite(mine), mine, 0)
        squares = (apart * apart).reshape(shape).sum(axis=(0, 2))
        sizes = (sized * sized).reshape(shape).sum(axis=(0, 2))
        ratios = [
            0.0 if not square else math.sqrt(square / size) if size else math.inf
            for square, size in zip(squares.tolist(), sizes.tolist(), strict=True)
        ]
    return math.inf if any(math.isnan(ratio) for ratio in ratios) else max(ratios)


def _floats(page: Any, dtype: str) -> Any:
    """The numbers of a page, as float64: squares of a float32 may be none."""
    flat = np.ascontiguousarray(page)
    if dtype == "bfloat16":  # the upper half of a float32
        flat, dtype = (flat.view(np.uint16).astype(np.uint32) << 16), "float32"
    return flat.view(dtype).astype(np.float64)
