"""The bytes of records, written ahead of their rows: one call for those that lie side by side.

Threads do nothing else, so the drive has the next bytes while the rows of the last are appended
and files are measured. What they have written is no record until its row says so.

Ownership: each thread of the bytes has its own. Its descriptor is open only while more is to be
written: what is unlinked must give its space back.
"""

import os
from contextlib import suppress

from kvtide.errors import bare
from kvtide.tiers.disk.directory import Directory
from kvtide.tiers.disk.ops import Summed, Written
from kvtide.tiers.files import write_fully


class RecordBytes:
    """Writes them where the owner has said."""

    def __init__(self, directory: Directory) -> None:
        self._directory = directory
        self._files = directory.files
        self._number = 0
        self._descriptor = -1

    def write(self, stores: list[Summed]) -> list[Written]:
        """Neighbours of one segment, by one call; one by one where that fails, so that each ends
        as it would have by itself. No byte is left of one that failed, or it says so."""
        try:
            self._open(stores[0].op.place.segment)
        except OSError as error:
            return [Written(one.op, bare(error)) for one in stores]
        return self._write(stores)

    def _write(self, stores: list[Summed]) -> list[Written]:
        start = stores[0].op.place.offset_bytes
        parts = [part for one in stores for part in one.parts]
        try:
            write_fully(self._files, self._descriptor, parts, start)
        except OSError as error:
            is_left = not self._is_taken_back(stores)  # at once: it is room for those that fit
            if len(stores) == 1:
                return [Written(stores[0].op, bare(error), is_left)]
        else:
            return [Written(one.op) for one in stores]
        return [written for one in stores for written in self._write([one])]

    def _is_taken_back(self, stores: list[Summed]) -> bool:
        """Whether a hole is where their bytes were."""
        start = stores[0].op.place.offset_bytes
        try:
            self._files.punch(
                self._descriptor, start, sum(one.op.place.length_bytes for one in stores)
            )
        except OSError:
            return False
        return True

    def _open(self, number: int) -> None:
        if self._descriptor >= 0 and self._number == number:
            return
        self.rest()
        self._directory.require()  # a file must not be made where nobody finds it
        self._descriptor = self._directory.open_segment(number, os.O_RDWR | os.O_CREAT)
        self._number = number

    def rest(self) -> None:
        """Nothing more is to be written for now: give the descriptor back."""
        if self._descriptor >= 0:
            with suppress(OSError):
                self._files.close(self._descriptor)
            self._descriptor = -1
