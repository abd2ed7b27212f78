"""A record's bytes in a row, summed as they go by: header 0, cells 0, header 1, cells 1, …

Who sends a record, or receives one, has its bytes in the processor's cache then: to sum them at
that moment costs half of what it does before or after.
"""

from collections.abc import Iterable, Iterator, Sequence

import xxhash

from kvtide.codec.record import Header, header_bytes, header_of, require_checksum, write_header
from kvtide.core.records import Record
from kvtide.errors import CorruptRecord

_HEADER = -1


class _Row:
    """What goes by: where headers and cells end."""

    def __init__(self, record: Record) -> None:
        self._record = record
        self._header_bytes = header_bytes(record.layout.shard_count, record.blocks)
        self._shard, self._block, self._left = 0, _HEADER, self._header_bytes
        self._running = xxhash.xxh3_64()

    @property
    def is_whole(self) -> bool:
        """Whether every byte has gone by."""
        return self._shard == self._record.layout.shard_count

    def ends(self, pieces: Iterable[memoryview]) -> Iterator[tuple[int, int, int]]:
        """The next bytes go by; of what ends with them: shard, block (or that it is the header),
        and checksum."""
        for piece in pieces:
            rest = piece
            while rest:
                now = rest[: self._left]
                rest = rest[len(now) :]
                self._left -= len(now)
                if self._block != _HEADER:
                    self._running.update(now)
                if not self._left:
                    yield self._shard, self._block, self._running.intdigest()
                    self._go_on()

    def _go_on(self) -> None:
        self._block += 1
        if self._block < self._record.blocks:
            self._left = self._record.layout.cell_bytes[self._shard]
            self._running = xxhash.xxh3_64()
        else:
            self._shard, self._block, self._left = self._shard + 1, _HEADER, self._header_bytes


class Seal(_Row):
    """Makes the headers of a record whose bytes go by: that of a shard is there after its cells.

    Args:
        record: what it is.
        write_id: 16 random bytes of this write.
        headers: for each shard, the memory of its header; it goes by, too.
    """

    def __init__(self, record: Record, write_id: bytes, headers: Sequence[memoryview]) -> None:
        super().__init__(record)
        self._write_id = write_id
        self._headers = headers
        self._checksums: list[int] = []

    def passed(self, pieces: Iterable[memoryview]) -> None:
        """The next bytes."""
        for shard, block, found in self.ends(pieces):
            if block == _HEADER:
                self._checksums = []
                continue
            self._checksums.append(found)
            if len(self._checksums) == self._record.blocks:
                header = Header(self._record, shard, self._write_id, tuple(self._checksums))
                write_header(self._headers[shard], header)


class Proof(_Row):
    """Proves that bytes that come are what was asked for.

    Args:
        asked: what they must be.
        write_id: of which write they must be.
        headers: for each shard, where its header comes to.
    """

    def __init__(self, asked: Record, write_id: bytes, headers: Sequence[memoryview]) -> None:
        super().__init__(asked)
        self._write_id = write_id
        self._headers = headers
        self._header: Header | None = None

    def came(self, pieces: Iterable[memoryview]) -> None:
        """The next bytes are there.

        Raises:
            CorruptRecord: says what differs; nothing may come then.
        """
        for shard, block, found in self.ends(pieces):
            if block != _HEADER:
                assert self._header is not None, (shard, block)
                require_checksum(self._header, block, found)
                continue
            self._header = header_of(self._headers[shard], self._record, shard)
            write_id = self._header.write_id
            if write_id != self._write_id:
                raise CorruptRecord(
                    f"{self._record.key.hex()} is of write {write_id.hex()},"
                    f" not {self._write_id.hex()}"
                )
