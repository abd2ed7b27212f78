"""A record's bytes in passing, summed as they go by: header 0, cells 0, header 1, cells 1, …

Who sends a record, or receives one, has its bytes in the processor's cache then: to sum them at
that moment costs half of what it does before or after.

Ownership: one thread's. Invariant: no cell is believed before the header that names its checksum.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import xxhash

from kvtide.codec.record import Header, header_bytes, header_of, require_checksum, write_header
from kvtide.core.records import Record
from kvtide.errors import CorruptRecord


@dataclass(frozen=True, slots=True)
class _HeaderEnd:
    """All of a shard's header has gone by."""

    shard: int


@dataclass(frozen=True, slots=True)
class _CellEnd:
    """All of a block's cell has gone by: its checksum."""

    shard: int
    block: int
    checksum: int


class _Passing:
    """What goes by: where headers and cells end."""

    def __init__(self, record: Record) -> None:
        self._record = record
        self._header_bytes = header_bytes(record.layout.shard_count, record.blocks)
        self._shard = 0
        self._block: int | None = None  # the header goes by
        self._left_bytes = self._header_bytes
        self._running = xxhash.xxh3_64()

    @property
    def is_whole(self) -> bool:
        """Whether every byte has gone by."""
        return self._shard == self._record.layout.shard_count

    def _ends(self, pieces: Iterable[memoryview]) -> Iterator[_HeaderEnd | _CellEnd]:
        """The next bytes go by: what ends with them, in order."""
        for piece in pieces:
            rest = piece
            while rest:
                now = rest[: self._left_bytes]
                rest = rest[len(now) :]
                self._left_bytes -= len(now)
                if self._block is not None:
                    self._running.update(now)
                if not self._left_bytes:
                    yield self._go_on()

    def _go_on(self) -> _HeaderEnd | _CellEnd:
        """Begin with what is next; what has ended."""
        shard, block = self._shard, self._block
        next_block = 0 if block is None else block + 1
        found = self._running.intdigest()
        if next_block < self._record.blocks:
            self._block = next_block
            self._left_bytes = self._record.layout.cell_bytes[shard]
            self._running = xxhash.xxh3_64()
        else:
            self._shard, self._block, self._left_bytes = shard + 1, None, self._header_bytes
        return _HeaderEnd(shard) if block is None else _CellEnd(shard, block, found)


class HeaderWriter(_Passing):
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
        for end in self._ends(pieces):
            if isinstance(end, _HeaderEnd):
                self._checksums = []
                continue
            self._checksums.append(end.checksum)
            if len(self._checksums) == self._record.blocks:
                header = Header(self._record, end.shard, self._write_id, tuple(self._checksums))
                write_header(self._headers[end.shard], header)


class Proof(_Passing):
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
        for end in self._ends(pieces):
            if isinstance(end, _CellEnd):
                assert self._header is not None, end
                require_checksum(self._header, end.block, end.checksum)
                continue
            self._header = header_of(self._headers[end.shard], self._record, end.shard)
            write_id = self._header.write_id
            if write_id != self._write_id:
                raise CorruptRecord(
                    f"{self._record.key.hex()} is of write {write_id.hex()},"
                    f" not {self._write_id.hex()}"
                )
