"""Which records begin with a block: how partial matches are found.

A block's digest stands for all that is before it, so records that begin with one block have one
parent. Most first blocks are of one record, so a number is enough for them: the first eight bytes
of the digest lead to a row, and only what shares them costs a dictionary of its own.

A start has no time for a dictionary of a million rows. It takes their first digests in as one
*column*, eight bytes for each row, which is searched as text until `list_some` has listed all of
it: three milliseconds a question then, and less with each call.

Ownership: the node's owner thread, as part of the catalog.
"""

import sys
from array import array
from collections.abc import Iterator

CANDIDATES_MAX = 128
"""Records with one first block that a partial match looks at, latest first: bounds a lookup."""
LIST_ROWS = 4096
"""Rows that one call lists: about a millisecond."""
_BYTES = 8
_GONE = bytes(_BYTES)


class Firsts:
    """Rows by the first digest of their records."""

    def __init__(self) -> None:
        self._rows: dict[int, int] = {}
        self._others: dict[int, dict[int, None]] = {}
        self._column = bytearray()  # of rows from 0; `_listed` of them are in the dictionaries
        self._listed = 0

    def __len__(self) -> int:
        listed = len(self._rows) + sum(len(rows) for rows in self._others.values())
        return listed + sum(map(bool, self._unlisted(len(self._column))))

    def add(self, digests: bytes, row: int) -> None:
        """A record with these digests has this row."""
        first = first_of(digests)
        if self._rows.setdefault(first, row) != row:
            self._others.setdefault(first, {})[row] = None

    def remove(self, digests: bytes, row: int) -> None:
        """It is gone."""
        at = row * _BYTES
        if row >= self._listed and self._column[at : at + _BYTES] == digests[:_BYTES]:
            self._column[at : at + _BYTES] = _GONE
            return
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

    def beginning(self, digests: bytes) -> Iterator[int]:
        """Rows whose first digest begins like this one, latest first, a bounded number."""
        first = first_of(digests)
        others = self._others.get(first)
        if others:
            for _, row in zip(range(CANDIDATES_MAX), reversed(others), strict=False):
                yield row
        if first in self._rows:
            yield self._rows[first]
        yield from self._in_column(digests[:_BYTES])

    # ---- a start

    def take(self, firsts: bytes) -> None:
        """The next rows of a start, by the first eight bytes of each one's first digest."""
        self._column += firsts

    def list_some(self) -> None:
        """List some rows of the column."""
        put = self._rows.setdefault
        firsts = self._unlisted(LIST_ROWS)
        for row, first in enumerate(firsts, self._listed):
            if first and put(first, row) != row:
                self._others.setdefault(first, {})[row] = None
        self._listed += len(firsts)
        if self.is_listed:
            self._column, self._listed = bytearray(), 0

    def _unlisted(self, rows_max: int) -> "array[int]":
        """The next so many of the column, as numbers; 0 for what is gone."""
        start = self._listed * _BYTES
        firsts = array("Q", bytes(self._column[start : start + rows_max * _BYTES]))
        if sys.byteorder == "big":
            firsts.byteswap()
        return firsts

    @property
    def is_listed(self) -> bool:
        """Whether nothing waits for `list_some`."""
        return self._listed * _BYTES == len(self._column)

    def _in_column(self, first: bytes) -> Iterator[int]:
        """Rows that are not listed yet, a bounded number."""
        at = self._listed * _BYTES - 1
        for _ in range(CANDIDATES_MAX):
            at = self._column.find(first, at + 1)
            if at < 0:
                break
            if at % _BYTES == 0:
                yield at // _BYTES


def first_of(digests: bytes) -> int:
    """The first eight bytes as a number."""
    return int.from_bytes(digests[:_BYTES], "little")
