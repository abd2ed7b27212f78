"""Segments that a start has read and not yet made rows of.

To make an object and an entry of a dictionary for each of a million keys takes the better part of
a second. A hit does not wait for that: until a segment is taken in, its columns are searched as
text, and those that hold what a question asks for are taken in first. One question that finds
nothing costs ten milliseconds among a million rows, for the first second or two.

Ownership: the node's owner thread, as part of the catalog.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass

from kvtide.core.keys import KEY_BYTES
from kvtide.tiers.disk.columns import Columns
from kvtide.tiers.firsts import FIRST_BYTES


@dataclass(frozen=True, slots=True)
class Untaken:
    """One segment.

    Attributes:
        first_row: of the rows that are kept for it.
        columns: what it holds.
        kinds: numbers in the catalog of its kinds, in order.
        gone: rows, counted from 0, that are not there any more.
    """

    segment: int
    first_row: int
    columns: Columns
    kinds: list[int]
    gone: Collection[int]


class UntakenSegments:
    """All of them, in the order of their rows."""

    def __init__(self) -> None:
        self.row_count = 0
        """Rows of all that ever came."""
        self._segments: dict[int, Untaken] = {}

    def __len__(self) -> int:
        return len(self._segments)

    def add(self, segment: int, columns: Columns, kinds: list[int], gone: Collection[int]) -> None:
        """One more; its rows follow those of the one before."""
        self._segments[segment] = Untaken(segment, self.row_count, columns, kinds, gone)
        self.row_count += len(columns)

    def pop(self) -> Untaken:
        """The first one."""
        return self._segments.pop(next(iter(self._segments)))

    def pop_with_key(self, key: bytes) -> list[Untaken]:
        """Those with a record of this key."""
        return self._pop(lambda columns: _has(columns.keys, key, KEY_BYTES))

    def pop_with_first(self, digests: bytes) -> list[Untaken]:
        """Those with a record that begins like this."""
        first = digests[:FIRST_BYTES]
        return self._pop(lambda columns: _has(columns.firsts, first, FIRST_BYTES))

    def clear(self) -> list[int]:
        """Nobody asks any more; the numbers of all that were left."""
        left = list(self._segments)
        self._segments.clear()
        return left

    def _pop(self, is_wanted: Callable[[Columns], bool]) -> list[Untaken]:
        wanted = [one for one in self._segments.values() if is_wanted(one.columns)]
        for one in wanted:
            del self._segments[one.segment]
        return wanted


def _has(column: bytes, value: bytes, size: int) -> bool:
    """Whether a column of values of this size has this one."""
    at = column.find(value)
    while at >= 0 and at % size:
        at = column.find(value, at + 1)
    return at >= 0
