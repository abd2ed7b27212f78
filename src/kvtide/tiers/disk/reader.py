"""One thread's part of loading: bytes straight into the cells, then the proof of each of them."""

import os
from contextlib import suppress

from kvtide.core.layout import CELL_ALIGN_BYTES
from kvtide.errors import CorruptRecord, bare
from kvtide.tiers.disk.directory import SEGMENT, Directory
from kvtide.tiers.disk.ops import Ended, LoadOp
from kvtide.tiers.files import page_memory
from kvtide.tiers.record_io import headers_bytes, read_proven


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
        directory, files, place = self._directory, self._directory.files, op.place
        length = headers_bytes(op.job.record)
        if len(self._headers) < length:
            self._headers = page_memory(length)
        where = f"{directory.at(place.segment, SEGMENT)} at byte {place.offset_bytes}"
        descriptor = directory.open_segment(place.segment, os.O_RDONLY)
        try:
            read_proven(files, descriptor, place.offset_bytes, op.job, self._headers, where)
            if not directory.is_direct:
                with suppress(OSError):  # advice
                    files.drop_cached(descriptor, place.offset_bytes, place.length_bytes)
        finally:
            files.close(descriptor)
