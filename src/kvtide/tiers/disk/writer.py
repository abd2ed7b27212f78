"""The one writing thread's part: records, rows, holes, indexes. All that changes files is here.

One thread, because order is the promise: a row follows its record, a hole follows its row, an
index follows all of them. A record's bytes go in one call from where they lie; a large call keeps
a drive busy by itself.

Ownership: everything here belongs to one thread; it is told by `Op`, and says by `Ended`. The
freeing thread has a `Writer` of its own, which never has a segment open.
"""

import errno
import os
from contextlib import suppress
from dataclasses import dataclass, field

from kvtide.codec import record as codec
from kvtide.codec.record import Header
from kvtide.core.layout import CELL_ALIGN_BYTES
from kvtide.errors import KVTideError
from kvtide.tiers.disk import rows as logs
from kvtide.tiers.disk import sealing
from kvtide.tiers.disk.catalog import Place
from kvtide.tiers.disk.directory import INDEX, REFUSED, ROWS, SEGMENT, SUFFIXES, Directory
from kvtide.tiers.disk.files import page_memory, write_fully
from kvtide.tiers.disk.ops import (
    ClearOp,
    Ended,
    FreeOp,
    MeasureOp,
    ProbeOp,
    ReadProbeOp,
    SealOp,
    StoreOp,
    UnlinkOp,
    WriteOp,
    bare,
)
from kvtide.tiers.disk.rows import Kept

GONE_PER_ROW = 4096
"""Records that one row takes away: its body stays small."""


@dataclass(slots=True)
class _OpenSegment:
    """The segment that is appended to."""

    number: int
    descriptor: int
    rows_descriptor: int
    rows_end_bytes: int
    kinds: set[int] = field(default_factory=set)
    is_spoiled: bool = False


def parts_of(op: StoreOp) -> list[memoryview]:
    """Header, cells, header, cells: the bytes of all shards in order, checksums taken."""
    record, layout = op.job.record, op.job.record.layout
    length = codec.header_bytes(layout.shard_count, record.blocks)
    headers = page_memory(length * layout.shard_count)
    write_id = os.urandom(codec.WRITE_ID_BYTES)
    parts = []
    for shard, cells in enumerate(op.job.cells):
        into = headers[shard * length : (shard + 1) * length]
        content = memoryview(cells).cast("B")
        checksums = codec.checksums_of(content, record.blocks)
        codec.write_header(into, Header(record, shard, write_id, checksums))
        parts += [into, content]
    return parts


def kept_of(op: StoreOp) -> Kept:
    """The row of a store's record."""
    record = op.job.record
    return Kept(op.place.offset_bytes, op.kind_number, record.key, record.parent, record.digests)


class Writer:
    """Carries out what changes the directory."""

    def __init__(self, directory: Directory) -> None:
        self._directory = directory
        self._files = directory.files
        self._open: _OpenSegment | None = None

    def run(self, op: WriteOp, parts: list[memoryview]) -> Ended:
        """Do it, with the `parts_of` a store (else none); raises nothing but bugs."""
        ended = Ended(op)
        try:
            self._do(op, parts, ended)
        except (OSError, KVTideError) as error:
            ended.error = bare(error)
        self._measure(op, ended)
        return ended

    def run_together(self, stores: list[tuple[StoreOp, list[memoryview]]]) -> list[Ended]:
        """Stores that lie next to one another, by one call each for bytes and rows; one by one
        where that fails, so that each ends as it would have by itself."""
        ops = [op for op, _ in stores]
        try:
            self._store_together(ops, [part for _, parts in stores for part in parts])
        except OSError:
            return [self.run(op, parts) for op, parts in stores]
        first = Ended(ops[0])
        self._measure(ops[0], first)
        rest = [Ended(op, first.error, first.allocated, first.free_bytes) for op in ops[1:]]
        return [first, *rest]

    def _store_together(self, ops: list[StoreOp], parts: list[memoryview]) -> None:
        segment = self._opened(ops[0].place.segment)
        if segment.is_spoiled:
            raise OSError(errno.EIO, "its rows log could not be repaired")
        try:
            write_fully(self._files, segment.descriptor, parts, ops[0].place.offset_bytes)
        except OSError:
            with suppress(OSError):  # room for those that fit
                self._punch(segment.descriptor, [op.place for op in ops])
            raise
        if self._directory.sync == "each":
            self._files.sync(segment.descriptor)
        for op in ops:
            self._append_kinds(segment, op)
        content = b""
        for op in ops:
            at = segment.rows_end_bytes + len(content)
            content += logs.kept_row(segment.number, at, kept_of(op))
        self._append(segment, content)
        if self._directory.sync == "each":
            self._files.sync(segment.rows_descriptor)
        self._drop_cached(segment, ops[0].place)

    def _do(self, op: WriteOp, parts: list[memoryview], ended: Ended) -> None:
        match op:
            case StoreOp():
                self._store(op, parts, ended)
            case FreeOp():
                self._free(op)
            case UnlinkOp():
                self._unlink(op)
            case SealOp():
                self._seal(op)
            case ProbeOp():
                self._probe()
            case ReadProbeOp():
                self._read_probe(op)
            case ClearOp():
                self._clear(op)
            case MeasureOp():
                pass

    def _measure(self, op: WriteOp, ended: Ended) -> None:
        """What the files take now, by path: a file that is gone shows itself."""
        with suppress(OSError):
            ended.free_bytes = self._files.free_space(self._directory.path).free_bytes
        match op:
            case StoreOp(place=place):
                number, suffixes = place.segment, [SEGMENT, ROWS]
            case FreeOp(number, _):
                suffixes = [SEGMENT, ROWS]
            case UnlinkOp(number, _) | SealOp(number, _):
                suffixes = list(SUFFIXES)
            case _:
                return
        for suffix in suffixes:
            try:
                size = self._files.size_at(self._directory.at(number, suffix))
            except FileNotFoundError as error:
                if self._directory.is_there():
                    ended.allocated[suffix] = 0
                if isinstance(op, StoreOp) and ended.error is None:
                    ended.error = bare(error)  # it was written to what nobody will find
            except OSError:
                pass
            else:
                ended.allocated[suffix] = size.allocated_bytes

    # ---- records

    def _store(self, op: StoreOp, parts: list[memoryview], ended: Ended) -> None:
        segment = self._opened(op.place.segment)
        if segment.is_spoiled:
            ended.is_spoiled = True
            raise OSError(errno.EIO, "its rows log could not be repaired")
        try:
            write_fully(self._files, segment.descriptor, parts, op.place.offset_bytes)
            if self._directory.sync == "each":
                self._files.sync(segment.descriptor)
            self._append_kinds(segment, op)
            end = segment.rows_end_bytes
            self._append(segment, logs.kept_row(segment.number, end, kept_of(op)))
            if self._directory.sync == "each":
                self._files.sync(segment.rows_descriptor)
        except OSError:
            ended.is_spoiled = segment.is_spoiled
            with suppress(OSError):
                self._punch(segment.descriptor, [op.place])
            raise
        self._drop_cached(segment, op.place)

    def _drop_cached(self, segment: _OpenSegment, place: Place) -> None:
        """Plain I/O leaves its pages in memory: those that the drive has by now are let go of."""
        if not self._directory.is_direct:
            with suppress(OSError):  # advice
                self._files.drop_cached(segment.descriptor, 0, place.offset_bytes)

    def _opened(self, number: int) -> _OpenSegment:
        """The segment that is appended to, made if need be."""
        self._directory.require()  # what is open may lie where nobody finds it any more
        if self._open is not None and self._open.number == number:
            return self._open
        self._close_segment()
        flags = os.O_RDWR | os.O_CREAT
        descriptor = self._directory.open_segment(number, flags)
        try:
            rows_descriptor, end = self._opened_rows(number)
        except OSError:
            self._files.close(descriptor)
            raise
        self._open = _OpenSegment(number, descriptor, rows_descriptor, end)
        return self._open

    def _opened_rows(self, number: int) -> tuple[int, int]:
        """A rows log to append to, begun if need be, and where it ends."""
        path = self._directory.at(number, ROWS)
        descriptor = self._files.open(path, os.O_RDWR | os.O_CREAT)
        try:
            end = self._files.size(descriptor).length_bytes
            if end < logs.OPENING_BYTES:
                write_fully(self._files, descriptor, [logs.opening(number)], 0)
                end = logs.OPENING_BYTES
        except OSError:
            self._files.close(descriptor)
            raise
        return descriptor, end

    def _append_kinds(self, segment: _OpenSegment, op: StoreOp) -> None:
        if op.kind_number not in segment.kinds:
            end = segment.rows_end_bytes
            row = logs.kind_row(segment.number, end, op.kind_number, op.kind)
            self._append(segment, row)
            segment.kinds.add(op.kind_number)

    def _append(self, segment: _OpenSegment, row: bytes) -> None:
        """Append a row, or leave the log as it was; where even that fails it is spoiled."""
        try:
            write_fully(self._files, segment.rows_descriptor, [row], segment.rows_end_bytes)
        except OSError:
            try:
                self._files.truncate(segment.rows_descriptor, segment.rows_end_bytes)
            except OSError:
                segment.is_spoiled = True
            raise
        segment.rows_end_bytes += len(row)

    def _close_segment(self) -> None:
        segment, self._open = self._open, None
        if segment is not None:
            for descriptor in (segment.descriptor, segment.rows_descriptor):
                with suppress(OSError):
                    self._files.close(descriptor)

    # ---- space

    def _free(self, op: FreeOp) -> None:
        """Rows first, then holes. Where there is no room for rows, holes make some."""
        try:
            self._append_gone(op)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            self._punch_all(op)
            self._append_gone(op)
        else:
            self._punch_all(op)

    def _punch_all(self, op: FreeOp) -> None:
        if self._open is not None and self._open.number == op.segment:
            self._punch(self._open.descriptor, op.places)
            return
        try:
            descriptor = self._directory.open_segment(op.segment, os.O_RDWR)
        except FileNotFoundError:
            self._directory.require()
            return  # somebody removed it: its space is free
        try:
            self._punch(descriptor, op.places)
        finally:
            self._files.close(descriptor)

    def _append_gone(self, op: FreeOp) -> None:
        offsets = [place.offset_bytes for place in op.places]
        segment = self._open
        if segment is None or segment.number != op.segment:
            self._directory.require()
            descriptor, end = self._opened_rows(op.segment)
            segment = _OpenSegment(op.segment, -1, descriptor, end)
        elif segment.is_spoiled:
            return
        try:
            for start in range(0, len(offsets), GONE_PER_ROW):
                some = offsets[start : start + GONE_PER_ROW]
                self._append(segment, logs.gone_row(op.segment, segment.rows_end_bytes, some))
        finally:
            if segment is not self._open:
                self._files.close(segment.rows_descriptor)

    def _punch(self, descriptor: int, places: list[Place]) -> None:
        """One hole for each run of neighbours."""
        start = end = -1
        for place in sorted(places, key=lambda one: one.offset_bytes):
            if place.offset_bytes != end:
                if end > start:
                    self._files.punch(descriptor, start, end - start)
                start = place.offset_bytes
            end = place.offset_bytes + place.length_bytes
        if end > start:
            self._files.punch(descriptor, start, end - start)

    def _unlink(self, op: UnlinkOp) -> None:
        """The records first: rows without a segment are a leftover, a segment without rows would
        be read again."""
        if self._open is not None and self._open.number == op.segment:
            self._close_segment()
        self._directory.require()
        for suffix in (SEGMENT, INDEX, ROWS):
            with suppress(FileNotFoundError):
                self._files.unlink(self._directory.at(op.segment, suffix))

    def _clear(self, op: ClearOp) -> None:
        files, path = self._files, self._directory.path
        self._directory.require()
        for name in op.names:
            files.close(files.open(f"{path}/{name}", os.O_WRONLY | os.O_CREAT))
        try:
            files.sync_directory(path)  # ahead of the removals too: what they said is done with
        except OSError as error:
            if error.errno not in REFUSED:  # some file systems have no such call
                raise
        for name in op.old_names:
            with suppress(FileNotFoundError):
                files.unlink(f"{path}/{name}")

    def _seal(self, op: SealOp) -> None:
        segment = self._open
        if segment is not None and segment.number == op.segment:
            try:
                if self._directory.sync != "none":
                    self._files.sync(segment.descriptor)
            finally:
                self._close_segment()
        sealing.seal(self._directory, op.segment)

    # ---- healing

    def _probe(self) -> None:
        self._close_segment()  # it may lie where nobody finds it any more
        if not self._directory.is_there():
            self._directory.renew()
        self._directory.probe()

    def _read_probe(self, op: ReadProbeOp) -> None:
        if not self._directory.is_there():
            self._directory.renew()
        if op.place is None:
            return
        try:
            descriptor = self._directory.open_segment(op.place.segment, os.O_RDONLY)
        except FileNotFoundError:
            return  # a load will find out, and remove the record
        try:
            page = page_memory(CELL_ALIGN_BYTES)
            self._files.read_at(descriptor, [page], op.place.offset_bytes)
        finally:
            self._files.close(descriptor)

    def close(self) -> None:
        """Give the descriptors back."""
        self._close_segment()
