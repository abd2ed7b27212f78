"""The one writing thread's part: rows, holes, indexes. What makes records of bytes is here.

One thread, because order is the promise: a row follows its record, a hole follows its row, an
index follows all of them. The bytes themselves are written ahead of it, by `RecordBytes`.

Ownership: everything here belongs to one thread; it is told by `Op`, and says by `Ended`. The
freeing thread has a `Writer` of its own, which never has a segment open.
"""

import errno
import os
from contextlib import suppress
from dataclasses import dataclass, field

from kvtide.core.layout import CELL_ALIGN_BYTES
from kvtide.errors import KVTideError, bare
from kvtide.tiers.disk import rows as logs
from kvtide.tiers.disk import sealing
from kvtide.tiers.disk.catalog import Place
from kvtide.tiers.disk.directory import INDEX, ROWS, SEGMENT, SUFFIXES, Directory
from kvtide.tiers.disk.ops import (
    ClearOp,
    Ended,
    FreeOp,
    MeasureOp,
    OtherOp,
    ProbeOp,
    ReadProbeOp,
    SealOp,
    StoreOp,
    UnlinkOp,
    WriteOp,
    Written,
)
from kvtide.tiers.disk.rows import Kept
from kvtide.tiers.files import REFUSED, page_memory, write_fully

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
    is_named: bool = False  # so that a loss of power leaves its files' names


def kept_of(op: StoreOp) -> Kept:
    """The row of a store's record."""
    record = op.job.record
    return Kept(op.place.offset_bytes, op.kind_number, record.key, record.parent, record.digests)


class Writer:
    """Carries out what changes the directory, but for the bytes of records."""

    def __init__(self, directory: Directory) -> None:
        self._directory = directory
        self._files = directory.files
        self._open: _OpenSegment | None = None

    def run(self, op: OtherOp) -> Ended:
        """Do it; raises nothing but bugs."""
        ended = Ended(op)
        try:
            self._do(op, ended)
        except (OSError, KVTideError) as error:
            ended.error = bare(error)
        self._measure(op, ended)
        return ended

    def keep(self, stores: list[Written]) -> list[Ended]:
        """Make records of stores of one segment, in order; raises nothing but bugs.

        One write has the rows of all whose bytes are there; one by one where that fails, so that
        each ends as it would have by itself. No byte is left of one that failed, or it says so.
        """
        good = [one.op for one in stores if one.error is None]
        failed = {ended.op: ended for ended in self._keep(good)} if good else {}
        seen = Ended(stores[0].op)
        self._measure(stores[0].op, seen)
        ends = []
        for one in stores:
            ended = failed.get(one.op) or Ended(
                one.op, one.error or seen.error, is_left=one.is_left
            )
            ended.allocated, ended.free_bytes = seen.allocated, seen.free_bytes
            ended.is_spoiled = ended.error is not None and self._is_spoiled(one.op)
            ends.append(ended)
        return ends

    def _keep(self, ops: list[StoreOp]) -> list[Ended]:
        """Append their rows; the ends of those for which that failed, whose bytes are gone."""
        try:
            self._append_kept(ops)
        except OSError as error:
            if len(ops) == 1:
                is_left = not self._is_taken_back(ops[0])  # at once: it is room for others
                return [Ended(ops[0], bare(error), is_left=is_left)]
        else:
            return []
        return [ended for op in ops for ended in self._keep([op])]

    def _append_kept(self, ops: list[StoreOp]) -> None:
        segment = self._opened(ops[0].place.segment)
        if segment.is_spoiled:
            raise OSError(errno.EIO, "its rows log could not be repaired")
        is_synced = self._is_synced(ops)
        if is_synced:
            self._files.sync(segment.descriptor)
        content, kinds = b"", set(segment.kinds)
        for op in ops:
            if op.kind_number not in kinds:
                kinds.add(op.kind_number)
                at = segment.rows_end_bytes + len(content)
                content += logs.kind_row(segment.number, at, op.kind_number, op.kind)
            at = segment.rows_end_bytes + len(content)
            content += logs.kept_row(segment.number, at, kept_of(op))
        self._append(segment, content, is_synced=is_synced)
        segment.kinds = kinds
        if not self._directory.is_direct:
            # Plain I/O leaves its pages in memory: those that the drive has by now are let go of.
            with suppress(OSError):  # advice
                self._files.drop_cached(segment.descriptor, 0, ops[0].place.offset_bytes)

    def _is_synced(self, ops: list[StoreOp]) -> bool:
        """Whether these outlive a loss of power before anybody hears that they are there: what a
        copy is of goes then, and may have outlived one."""
        sync = self._directory.sync
        return sync == "each" or (sync == "sealed" and any(op.is_copy for op in ops))

    def _is_taken_back(self, op: StoreOp) -> bool:
        """Whether a hole is where the bytes of a store were."""
        try:
            self._punch_all(op.place.segment, [op.place])
        except OSError:
            return False
        return True

    def _is_spoiled(self, op: StoreOp) -> bool:
        segment = self._open
        return segment is not None and segment.number == op.place.segment and segment.is_spoiled

    def _do(self, op: OtherOp, ended: Ended) -> None:
        match op:
            case FreeOp():
                self._free(op, ended)
            case UnlinkOp():
                self._unlink(op)
            case SealOp():
                self._seal(op)
            case ProbeOp():
                self._probe(op)
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
            case FreeOp(segment=number):
                suffixes = [SEGMENT, ROWS]
            case UnlinkOp(segment=number) | SealOp(segment=number):
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

    # ---- the segment that is appended to

    def _opened(self, number: int) -> _OpenSegment:
        """The segment that is appended to: its bytes are there, its log is made if need be."""
        self._directory.require()  # what is open may lie where nobody finds it any more
        if self._open is not None and self._open.number == number:
            return self._open
        self._close_segment()
        descriptor = self._directory.open_segment(number, os.O_RDWR)
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

    def _append(self, segment: _OpenSegment, row: bytes, *, is_synced: bool = False) -> None:
        """Append a row, or leave the log as it was; where even that fails it is spoiled."""
        try:
            write_fully(self._files, segment.rows_descriptor, [row], segment.rows_end_bytes)
            if is_synced:
                self._files.sync(segment.rows_descriptor)
                if not segment.is_named:
                    self._files.sync_directory(self._directory.path)
                    segment.is_named = True
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

    def _free(self, op: FreeOp, ended: Ended) -> None:
        """Rows first, then holes. Where there is no room for rows, holes make some."""
        try:
            self._append_gone(op, ended)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            self._punch_all(op.segment, op.places)
            self._append_gone(op, ended)
        else:
            self._punch_all(op.segment, op.places)

    def _punch_all(self, number: int, places: list[Place]) -> None:
        if self._open is not None and self._open.number == number:
            self._punch(self._open.descriptor, places)
            return
        self._directory.require()  # its number may be another node's by now
        try:
            descriptor = self._directory.open_segment(number, os.O_RDWR)
        except FileNotFoundError:
            return  # somebody removed it: its space is free
        try:
            self._punch(descriptor, places)
        finally:
            self._files.close(descriptor)

    def _append_gone(self, op: FreeOp, ended: Ended) -> None:
        """Once for each place: a log must not grow by what is tried again and again."""
        offsets = [place.offset_bytes for place in op.unsaid[ended.said_count :]]
        if not offsets:
            return
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
                ended.said_count += len(some)
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

    def _probe(self, op: ProbeOp) -> None:
        self._close_segment()  # it may lie where nobody finds it any more
        if not self._directory.is_there():
            self._directory.renew(op.ours)
        self._directory.probe()

    def _read_probe(self, op: ReadProbeOp) -> None:
        if not self._directory.is_there():
            self._directory.renew(op.ours)
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
