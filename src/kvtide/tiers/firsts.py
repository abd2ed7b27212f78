"""Which records begin with a block: how partial matches are found.

A block's digest stands for all that is before it, so records that begin with one block have one
parent. Most first blocks are of one record, so a number is enough for them: the first eight bytes
of the digest lead to a row, and only what shares them costs a dictionary of its own.

Ownership: the node's owner thread, as part of its index.
"""

import sys
from array import array
from collections.abc import Iterator
from typing import Generic, TypeVar

from kvtide.core.keys import INNER_DIGEST_BYTES

FIRST_BYTES = 8
"""Of a digest: enough to tell most apart."""
CANDIDATES_MAX = 128
"""Records with one first block that a partial match looks at, latest first: bounds a lookup."""


Row = TypeVar("Row")
"""A number, or what stands for a record elsewhere."""


class Firsts(Generic[Row]):
    """Rows by the first digest of their records."""

    def __init__(self) -> None:
        self._rows: dict[int, Row] = {}
        self._others: dict[int, dict[Row, None]] = {}

    def __len__(self) -> int:
        return len(self._rows) + sum(len(rows) for rows in self._others.values())

    def add(self, digests: bytes, row: Row) -> None:
        """A record with these digests has this row."""
        first = first_of(digests)
        if self._rows.setdefault(first, row) != row:
            self._others.setdefault(first, {})[row] = None

    def take(self, firsts: bytes, rows: list[Row]) -> None:
        """The same of many, by the first bytes of each one's first digest."""
        numbers = array("Q", firsts)
        if sys.byteorder == "big":
            numbers.byteswap()
        winners = list(map(self._rows.setdefault, numbers, rows))
        if winners == rows:
            return  # nearly always, and without a step for each row
        for first, row, winner in zip(numbers, rows, winners, strict=True):
            if winner != row:
                self._others.setdefault(first, {})[row] = None

    def remove(self, digests: bytes, row: Row) -> None:
        """It is gone."""
        first = first_of(digests)
        others = self._others.get(first)
        if self._rows.get(first) == row:
            del self._rows[first]
            if others:
                heir = next(iter(others))
                del others[heir]
                self._rows[first] = heir
        elif others is not None:
            others.pop(row, None)
        if others is not None and not others:
            del self._others[first]

    def beginning(self, digests: bytes) -> Iterator[Row]:
        """Rows whose first digest begins like this one, latest first, a bounded number."""
        first = first_of(digests)
        others = self._others.get(first)
        if others:
            for _, row in zip(range(CANDIDATES_MAX), reversed(others), strict=False):
                yield row
        if first in self._rows:
            yield self._rows[first]


def first_of(digests: bytes) -> int:
    """The first eight bytes as a number."""
    return int.from_bytes(digests[:FIRST_BYTES], "little")


def shared_blocks(mine: bytes, theirs: bytes) -> int:
    """Blocks that two runs of digests begin with alike."""
    if mine.startswith(theirs):
        return len(theirs) // INNER_DIGEST_BYTES
    count = 0
    for start in range(0, min(len(mine), len(theirs)), INNER_DIGEST_BYTES):
        end = start + INNER_DIGEST_BYTES
        if mine[start:end] != theirs[start:end]:
            break
        count += 1
    return count
