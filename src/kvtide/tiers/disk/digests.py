"""The block digests of all rows: most of the catalog's bytes, so they are copied as few times as
can be.

    row of a segment that a start has read ──► cut from its *stretch*, the segment's own bytes
    any other row                          ──► bytes of its own

A start takes the digests of a segment in as they lie in its index, without an object for each
row, and cuts what is asked for. A stretch whose rows are mostly gone would keep memory for
nothing: once a quarter of them are, the others get bytes of their own.

Ownership: the node's owner thread, as part of the catalog.
"""

from array import array
from dataclasses import dataclass, field
from itertools import accumulate

from kvtide.core.keys import INNER_DIGEST_BYTES

GONE_RATIO_MAX = 0.25
"""Of a stretch's rows: beyond it bytes of their own take less memory."""


@dataclass(slots=True)
class _Stretch:
    """Digests of neighbouring rows, one behind the other.

    Attributes:
        content: all of them.
        first_row: of these rows.
        blocks: how many each of them has.
        live: rows that are not gone.
        ends: where those of each row end in `content`, in digests; made when first asked for.
    """

    content: memoryview
    first_row: int
    blocks: "array[int]"
    live: int
    ends: "array[int]" = field(default_factory=lambda: array("I"))

    def cut(self, row: int) -> bytes:
        """Those of one row."""
        if not self.ends:
            self.ends.extend(accumulate(self.blocks))
        at = row - self.first_row
        end = self.ends[at]
        begin = end - self.blocks[at]
        return bytes(self.content[begin * INNER_DIGEST_BYTES : end * INNER_DIGEST_BYTES])


class Digests:
    """Of each row; a row that is gone has none."""

    def __init__(self) -> None:
        self._own: list[bytes | None] = []  # None: in the stretch of its segment
        self._stretches: dict[int, _Stretch] = {}

    def of(self, row: int, segment: int) -> bytes:
        """Those of a row of a segment."""
        own = self._own[row]
        return self._stretches[segment].cut(row) if own is None else own

    def put(self, row: int, digests: bytes) -> None:
        """A row has these from now on; it is the next one, or gone."""
        if row == len(self._own):
            self._own.append(digests)
        else:
            self._own[row] = digests

    def reserve(self, row_count: int) -> None:
        """So many rows come, each by `take`, in any order."""
        self._own = [None] * row_count

    def take(
        self, segment: int, first_row: int, content: memoryview, blocks: "array[int]"
    ) -> None:
        """Rows from this one on are those of a segment, which have so many blocks each."""
        self._stretches[segment] = _Stretch(content, first_row, blocks, len(blocks))

    def drop(self, row: int, segment: int) -> None:
        """A row is gone."""
        is_own = self._own[row] is not None
        self._own[row] = b""
        if is_own:
            return
        stretch = self._stretches[segment]
        stretch.live -= 1
        if stretch.live < (1 - GONE_RATIO_MAX) * len(stretch.blocks):
            for other in range(stretch.first_row, stretch.first_row + len(stretch.blocks)):
                if self._own[other] is None:
                    self._own[other] = stretch.cut(other)
            del self._stretches[segment]
