"""One thread's part of loading: bytes straight into the cells, then the proof of each of them."""

import os
from contextlib import suppress

from kvtide.codec import record as codec
from kvtide.core.layout import CELL_ALIGN_BYTES
from kvtide.errors import CorruptRecord
from kvtide.tiers.disk.directory import SEGMENT, Directory
from kvtide.tiers.disk.files import page_memory, read_fully
from kvtide.tiers.disk.ops import Ended, LoadOp, bare


class Reader:
    """Loads records; each I/O thread has its own.

    A segment is opened for each load: 10 µs beside a transfer of a megabyte, no descriptors that
    add up with terabytes, and a mount that is gone shows itself at once.
    """

    def __init__(self, directory: Directory) -> None:
        self._directory = directory
        self._headers = page_memory(CELL_ALIGN_BYTES)

    def run(self, op: LoadOp) -> Ended:
        """Do it; never raises."""
        try:
            self._load(op)
        except FileNotFoundError as error:
            return Ended(op, bare(error), is_lost=self._directory.is_there())
        except (OSError, CorruptRecord) as error:
            return Ended(op, bare(error))
        return Ended(op)

    def _load(self, op: LoadOp) -> None:
        record = op.job.record
        length = codec.header_bytes(record.layout.shard_count, record.blocks)
        shards = record.layout.shard_count
        if len(self._headers) < length * shards:
            self._headers = page_memory(length * shards)
        headers = [self._headers[shard * length :][:length] for shard in range(shards)]
        cells = [memoryview(part).cast("B") for part in op.job.cells]
        parts = [part for pair in zip(headers, cells, strict=True) for part in pair]
        directory, files = self._directory, self._directory.files
        descriptor = directory.open_segment(op.place.segment, os.O_RDONLY)
        try:
            count = read_fully(files, descriptor, parts, op.place.offset_bytes)
            if not directory.is_direct:
                with suppress(OSError):  # advice
                    files.drop_cached(descriptor, op.place.offset_bytes, op.place.length_bytes)
        finally:
            files.close(descriptor)
        if count != op.place.length_bytes:
            path = directory.at(op.place.segment, SEGMENT)
            raise CorruptRecord(
                f"{path} ends inside the record at byte {op.place.offset_bytes}: {count} bytes"
                f" instead of {op.place.length_bytes}"
            )
        try:
            codec.verify(headers, cells, record)
        except CorruptRecord as error:
            path = directory.at(op.place.segment, SEGMENT)
            raise CorruptRecord(f"{path} at byte {op.place.offset_bytes}: {error}") from error
