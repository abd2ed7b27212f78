"""Reading a segment by its records' own headers: what is left where rows and index are damaged.

Headers begin on pages. From a good one the scan goes on behind the record; from anything else (a
hole, a record of another version, damage) by a page.
"""

import os
from collections.abc import Iterator
from contextlib import suppress

from kvtide.codec import record as codec
from kvtide.codec.record import Header
from kvtide.core.layout import CELL_ALIGN_BYTES
from kvtide.errors import CorruptRecord, UnknownFormat
from kvtide.tiers.disk import columns as tables
from kvtide.tiers.disk import sealing
from kvtide.tiers.disk.columns import Columns
from kvtide.tiers.disk.directory import SEGMENT, Directory
from kvtide.tiers.disk.rows import Kept
from kvtide.tiers.disk.sealing import Said
from kvtide.tiers.files import page_memory, read_fully
from kvtide.tiers.kinds import Kind
from kvtide.units import MiB

WINDOW_BYTES = MiB
"""Read at once in search of a header."""


class Scan:
    """One segment, open for reading; what was read does not stay in the page cache. Raises OSError
    as reading does."""

    def __init__(self, directory: Directory, number: int) -> None:
        self._files = directory.files
        self._descriptor = self._files.open(directory.at(number, SEGMENT), os.O_RDONLY)
        self.length_bytes = self._files.size(self._descriptor).length_bytes
        self._window = page_memory(WINDOW_BYTES)
        self._window_at = self._window_end = 0

    def close(self) -> None:
        """Give the descriptor back."""
        self._drop(0, 0)
        self._files.close(self._descriptor)

    def found(self) -> Iterator[tuple[int, list[Header]]]:
        """Records in order: where they begin, and the headers of all their shards."""
        at = 0
        while at < self.length_bytes:
            headers = self.headers_at(at)
            if headers:
                yield at, headers
                record = headers[0].record
                at += codec.stored_bytes(record.layout, record.blocks)
            else:
                at = self._next_candidate(at + CELL_ALIGN_BYTES)

    def headers_at(self, offset_bytes: int) -> list[Header]:
        """Of the record that begins here; empty if none does, or not all of it is there."""
        first = self._header(offset_bytes)
        if first is None or first.shard != 0:
            return []
        record, layout = first.record, first.record.layout
        headers = [first]
        at = offset_bytes
        for shard in range(1, layout.shard_count):
            at += codec.header_bytes(layout.shard_count, record.blocks)
            at += record.blocks * layout.cell_bytes[shard - 1]
            header = self._header(at)
            if header is None or (header.record, header.shard) != (record, shard):
                return []
            if header.write_id != first.write_id:
                return []
            headers.append(header)
        end = offset_bytes + codec.stored_bytes(layout, record.blocks)
        return headers if end <= self.length_bytes else []

    def verify(self, offset_bytes: int, headers: list[Header]) -> None:
        """Prove each block of a record.

        Raises:
            CorruptRecord: says which one differs.
        """
        record, layout = headers[0].record, headers[0].record.layout
        at = offset_bytes
        for header in headers:
            at += codec.header_bytes(layout.shard_count, record.blocks)
            length = record.blocks * layout.cell_bytes[header.shard]
            payload = page_memory(length)
            count = read_fully(self._files, self._descriptor, [payload], at)
            self._drop(at, length)
            codec.verify_cells(header, payload[:count])
            at += length

    def _drop(self, at: int, length_bytes: int) -> None:
        with suppress(OSError):  # advice
            self._files.drop_cached(self._descriptor, at, length_bytes)

    def _header(self, at: int) -> Header | None:
        content = page_memory(codec.HEADER_BYTES_MAX)
        count = read_fully(self._files, self._descriptor, [content], at)
        try:
            return codec.read_header(content[:count])
        except (CorruptRecord, UnknownFormat):
            return None

    def _next_candidate(self, at: int) -> int:
        """The next page that begins like a record."""
        while at < self.length_bytes:
            if not self._window_at <= at < self._window_end:
                count = read_fully(self._files, self._descriptor, [self._window], at)
                if count <= 0:
                    break
                self._drop(at, count)
                self._window_at, self._window_end = at, at + count
            start = at - self._window_at
            if bytes(self._window[start : start + len(codec.MAGIC)]) == codec.MAGIC:
                return at
            at += CELL_ALIGN_BYTES
        return self.length_bytes


def with_headers(
    directory: Directory, number: int, said: Said, *, is_proving: bool = True
) -> Columns:
    """What the headers of a segment tell beside what its rows and index still say. Where it had no
    index, bytes of a record may be missing: then, if `is_proving`, only those records count whose
    every block is as it was written. Raises OSError."""
    joined = sealing.joined(said.index, said.rows)
    kept = sealing.kept_of(joined)
    known = {one.offset_bytes for one in kept} | (said.rows.gone if said.rows else set())
    kinds = dict(enumerate(joined.kinds))
    numbers = {kind: number for number, kind in kinds.items()}
    scan = Scan(directory, number)
    try:
        for offset, headers in scan.found():
            if offset in known:
                continue
            if is_proving and not said.had_index:
                try:
                    scan.verify(offset, headers)
                except CorruptRecord:
                    continue
            record = headers[0].record
            what = Kind(record.root, record.layout)
            at = numbers.setdefault(what, len(kinds))
            kinds[at] = what
            kept.append(Kept(offset, at, record.key, record.parent, record.digests))
    finally:
        scan.close()
    return tables.from_rows(kinds, kept)
