"""What a segment's files say, and how they are brought into the form that a start reads quickly.

    rows log only          the segment was being written
    index                  it is sealed
    index and rows log     some of its records are gone since; or a kill came between the writing
                           of the index and the end of the log: rows that both hold count once

The index appears by a rename, so it is whole or absent.
"""

import os
from contextlib import suppress
from dataclasses import dataclass

from kvtide.core.keys import KEY_BYTES
from kvtide.core.layout import CELL_ALIGN_BYTES
from kvtide.errors import CorruptRecord
from kvtide.tiers.disk import columns as tables
from kvtide.tiers.disk import rows as logs
from kvtide.tiers.disk.columns import Columns
from kvtide.tiers.disk.directory import INDEX, ROWS, TEMPORARY, Directory
from kvtide.tiers.disk.rows import Kept, Rows
from kvtide.tiers.files import read_fully, write_fully
from kvtide.units import MiB


class Scratch:
    """Memory for one file after another: fresh pages would cost a start as much as reading."""

    def __init__(self) -> None:
        self._memory = bytearray(MiB)

    def of(self, length_bytes: int) -> memoryview:
        """So much of it; what was in it before is overwritten by and by."""
        if len(self._memory) < length_bytes:
            self._memory = bytearray(2 * length_bytes)
        return memoryview(self._memory)[:length_bytes]


def read_rows(directory: Directory, number: int, scratch: Scratch | None = None) -> Rows | None:
    """A segment's rows log; None where there is none.

    Raises:
        OSError, UnknownFormat, CorruptRecord: it cannot be read, or does not even begin as one.
    """
    files = directory.files
    try:
        descriptor = files.open(directory.at(number, ROWS), os.O_RDONLY)
    except FileNotFoundError:
        return None
    try:
        size = files.size(descriptor)
        content = (scratch or Scratch()).of(size.length_bytes)
        content = content[: read_fully(files, descriptor, [content], 0)]
    finally:
        files.close(descriptor)
    if not len(content):
        return None
    rows = logs.read_log(content, number)
    rows.allocated_bytes = size.allocated_bytes
    return rows


def read_index(
    directory: Directory, number: int, scratch: Scratch | None = None
) -> Columns | None:
    """A segment's index; None where there is none.

    Raises:
        OSError, UnknownFormat, CorruptRecord: it cannot be read.
    """
    files, scratch = directory.files, scratch or Scratch()
    try:
        descriptor = files.open(directory.at(number, INDEX), os.O_RDONLY)
    except FileNotFoundError:
        return None
    try:
        opening = scratch.of(tables.OPENING_BYTES)
        extent = tables.extent_of(opening[: read_fully(files, descriptor, [opening], 0)], number)
        size = files.size(descriptor)
        length = size.length_bytes
        if length != extent.columns_bytes + extent.digests_bytes:
            raise CorruptRecord(f"an index has {length} bytes, its opening speaks of others")
        parts = [scratch.of(extent.columns_bytes), memoryview(bytearray(extent.digests_bytes))]
        if read_fully(files, descriptor, parts, 0) != length:
            raise CorruptRecord("an index is cut short")
    finally:
        files.close(descriptor)
    columns = tables.decode(parts[0], parts[1], number)
    columns.allocated_bytes = size.allocated_bytes
    return columns


@dataclass(frozen=True, slots=True)
class Said:
    """What the files beside a segment say of it.

    Attributes:
        index, rows: None where there is none, or it is damaged from its beginning.
        had_index: there is one, be it damaged: whatever was written to the segment was complete.
        faults: what is damaged, one sentence for each file.
    """

    index: Columns | None
    rows: Rows | None
    had_index: bool
    faults: tuple[str, ...]

    @property
    def is_all(self) -> bool:
        """Whether nothing but headers could say more."""
        return not self.faults and not (self.index is None and self.rows is None)


def read_both(
    directory: Directory, number: int, scratch: Scratch | None = None, *, has_rows: bool = True
) -> Said:
    """Read a segment's rows log, if there is one, and its index. The log comes first: where a node
    ends it meanwhile, the index is there.

    Raises:
        OSError, UnknownFormat: they cannot be read.
    """
    index = rows = None
    faults = []
    try:
        rows = read_rows(directory, number, scratch) if has_rows else None
        if rows is not None and not rows.is_whole:
            faults.append(f"{directory.at(number, ROWS)} is damaged at byte {rows.end_bytes}")
    except CorruptRecord as error:
        faults.append(f"{directory.at(number, ROWS)}: {error}")
    is_damaged = False
    try:
        index = read_index(directory, number, scratch)
    except CorruptRecord as error:
        is_damaged = True
        faults.append(f"{directory.at(number, INDEX)}: {error}")
    return Said(index, rows, is_damaged or index is not None, tuple(faults))


def kept_of(columns: Columns) -> list[Kept]:
    """The rows of an index, one by one."""
    elsewhere = dict(columns.elsewhere)
    kept = []
    keys = columns.cut_keys()
    for row, (key, digests) in enumerate(zip(keys, columns.cut_digests(), strict=True)):
        back, kind = columns.back[row], columns.kind[row]
        root_key = columns.kinds[kind].root.key
        parent = keys[row - back] if back else elsewhere.get(row, root_key)
        assert len(parent) == KEY_BYTES, len(parent)
        offset = columns.pages[row] * CELL_ALIGN_BYTES
        kept.append(Kept(offset, kind, key, parent, digests))
    return kept


def joined(columns: Columns | None, rows: Rows | None) -> Columns:
    """What both say together: records of either that are not gone."""
    if columns is None:
        return tables.from_rows(rows.kinds, rows.kept.values()) if rows else Columns()
    if rows is None:
        return columns
    kinds = dict(enumerate(columns.kinds))
    kept = {one.offset_bytes: one for one in kept_of(columns)}
    shift = len(kinds)
    kinds.update({number + shift: kind for number, kind in rows.kinds.items()})
    for offset, one in rows.kept.items():
        if offset not in kept:
            kind = one.kind + shift
            kept[offset] = Kept(offset, kind, one.key, one.parent, one.digests)
    return tables.from_rows(kinds, [one for at, one in kept.items() if at not in rows.gone])


def seal(directory: Directory, number: int) -> None:
    """Write a segment's index from what its files say, and end its rows log.

    Raises:
        OSError, CorruptRecord, UnknownFormat: nothing has changed, or the log is still there.
    """
    rows = read_rows(directory, number)
    if rows is not None and not rows.is_whole:
        raise CorruptRecord(f"{directory.at(number, ROWS)} is damaged")
    write_index(directory, number, joined(read_index(directory, number), rows))


def write_index(directory: Directory, number: int, columns: Columns) -> None:
    """Put an index in place, then remove the rows log. Raises OSError."""
    files, path = directory.files, directory.at(number, INDEX)
    directory.require()
    descriptor = files.open(path + TEMPORARY, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    try:
        write_fully(files, descriptor, [tables.encode(columns, number)], 0)
        if directory.sync != "none":
            files.sync(descriptor)
    except OSError:
        with suppress(OSError):
            files.unlink(path + TEMPORARY)
        raise
    finally:
        files.close(descriptor)
    files.rename(path + TEMPORARY, path)
    if directory.sync != "none":
        files.sync_directory(directory.path)
    with suppress(FileNotFoundError):
        files.unlink(directory.at(number, ROWS))
