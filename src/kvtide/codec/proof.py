"""Proves a record while its bytes come, in the order in which they rest: header, cells, header, …

Each piece is summed when it has just been received, so nothing is left to read again at the end.
"""

from collections.abc import Iterable, Sequence

import xxhash

from kvtide.codec.record import Header, header_of, require_checksum
from kvtide.core.records import Record
from kvtide.errors import CorruptRecord


class Proof:
    """Of one record.

    Args:
        asked: what the bytes must be.
        write_id: of which write they must be.
        headers: for each shard, where its header will have come to.
    """

    def __init__(self, asked: Record, write_id: bytes, headers: Sequence[memoryview]) -> None:
        """Nothing has come yet."""
        self._asked = asked
        self._write_id = write_id
        self._headers = headers
        self._shard = 0
        self._header: Header | None = None
        self._left = len(headers[0])  # bytes until the end of this header or cell
        self._block = 0
        self._running = xxhash.xxh3_64()

    @property
    def is_whole(self) -> bool:
        """Whether every byte has come and is proven."""
        return self._shard == len(self._headers)

    def came(self, pieces: Iterable[memoryview]) -> None:
        """The next bytes are there; a piece is of a header or of cells, never of both.

        Raises:
            CorruptRecord: says what differs; nothing may be added then.
        """
        for piece in pieces:
            rest = piece
            while rest:
                now = rest[: self._left]
                rest = rest[len(now) :]
                self._left -= len(now)
                if self._header is not None:
                    self._running.update(now)
                if not self._left:
                    self._next()

    def _next(self) -> None:
        """A header or a cell is complete."""
        if self._header is None:
            header = header_of(self._headers[self._shard], self._asked, self._shard)
            if header.write_id != self._write_id:
                raise CorruptRecord(
                    f"{self._asked.key.hex()} is of write {header.write_id.hex()},"
                    f" not {self._write_id.hex()}"
                )
            self._header, self._block = header, 0
        else:
            require_checksum(self._header, self._block, self._running.intdigest())
            self._block += 1
        if self._block < self._asked.blocks:
            self._running = xxhash.xxh3_64()
            self._left = self._asked.layout.cell_bytes[self._shard]
            return
        self._shard, self._header = self._shard + 1, None
        if not self.is_whole:
            self._left = len(self._headers[self._shard])
