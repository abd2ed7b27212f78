"""A start: what the directory holds becomes the catalog; each leftover is adopted or removed.

    index, no rows log     taken in as it is
    index and rows log     the same, without what is gone since
    rows log only          the node was killed: its index is written now
    damaged                what the headers of the segment's records say
    no segment file        a leftover of its removal: removed
    of another version     left alone; it counts against the cap

Usage is what the file system says of each file, so it is right before the first write.
"""

import errno
import gc
import logging
import os
import stat
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from kvtide.codec import record as codec
from kvtide.core.keys import INNER_DIGEST_BYTES
from kvtide.core.layout import CELL_ALIGN_BYTES
from kvtide.errors import ConfigError, CorruptRecord, UnknownFormat
from kvtide.tiers.disk import recency, scan, sealing
from kvtide.tiers.disk.catalog import Place
from kvtide.tiers.disk.cleared import Clears, parsed
from kvtide.tiers.disk.columns import Columns
from kvtide.tiers.disk.directory import (
    INDEX,
    ROWS,
    SEGMENT,
    SUFFIXES,
    TEMPORARY,
    USED,
    Directory,
)
from kvtide.tiers.disk.intake import LazyCatalog
from kvtide.tiers.disk.rows import Rows
from kvtide.tiers.disk.sealing import Scratch
from kvtide.tiers.disk.space import FLOOR_BYTES, FLOOR_RATIO, PAGE, Segment, Space
from kvtide.tiers.disk_names import LOCK, parsed_name
from kvtide.tiers.files import FileSize
from kvtide.units import format_bytes

logger = logging.getLogger("kvtide.disk")

AHEAD = 64
"""Of so many segments the kernel reads logs and indexes ahead. (Threads that read ahead were
slower: they and the owner wait for one another at the interpreter's lock.)"""


_TEMPORARIES = (f"probe{TEMPORARY}", f"{USED}{TEMPORARY}")


@dataclass(slots=True)
class _Read:
    """What the files of a segment say.

    Attributes:
        columns: its records; `gone`: offsets of those that are not there any more; `cut`: those
            of them that the segment file does not hold whole, which no row says yet.
        is_sealed: its index says so, but for what is gone.
        allocated: what its files take, by suffix.
        fault: why it is left alone, and nothing of it known; empty: it is not.
    """

    columns: Columns
    gone: set[int]
    is_sealed: bool
    allocated: dict[str, int] = field(default_factory=dict)
    cut: set[int] = field(default_factory=set)
    fault: str = ""


def open_directory(
    directory: Directory,
    catalog: LazyCatalog,
    space: Space,
    clears: Clears,
    floor_bytes: int | None,
) -> list[Place]:
    """Lock a directory and learn all that is in it; places whose space is to be given back.

    Raises:
        ConfigError: another node has it, or it cannot be used.
    """
    begin = time.monotonic()
    directory.take()
    was_collecting = gc.isenabled()
    gc.disable()  # a million rows are no garbage, and looking for some takes seconds
    try:
        places = _take_all(directory, catalog, space, clears)
        directory.learn()
        drive = directory.files.free_space(directory.path)
    except OSError as error:
        directory.free()
        raise ConfigError(
            f"the disk {directory.path} cannot be read: {error.strerror or error}"
        ) from error
    except BaseException:  # whoever tries again must not meet our own lock
        directory.free()
        raise
    finally:
        if was_collecting:
            gc.enable()
    space.free_bytes = drive.free_bytes
    space.asked_drive()
    ratio_bytes = int(FLOOR_RATIO * drive.total_bytes)
    space.floor_bytes = max(FLOOR_BYTES, ratio_bytes) if floor_bytes is None else floor_bytes
    logger.info(
        "disk %s: %d records in %d segments, %s of %s, read in %.2f s",
        directory.path,
        len(catalog),
        len(space.segments),
        format_bytes(space.used_bytes),
        format_bytes(space.bytes_max),
        time.monotonic() - begin,
    )
    return places


def _names(directory: Directory, clears: Clears) -> dict[int, set[str]]:
    """Suffixes of what is there of each segment; what else is ours is seen to."""
    numbers: dict[int, set[str]] = {}
    others = 0
    names = directory.files.names(directory.path)
    clears.take(names)
    for name in names:
        ours = parsed_name(name)
        if ours is not None:
            numbers.setdefault(ours[0], set()).add(ours[1])
        elif name.endswith(TEMPORARY) and (name in _TEMPORARIES or _is_temporary(name)):
            with suppress(OSError):
                directory.files.unlink(f"{directory.path}/{name}")
        elif name not in (LOCK, USED) and parsed(name) is None:
            others += 1
    if others:
        logger.warning("disk %s: %d files are not kvtide's; left alone", directory.path, others)
    return numbers


def _take_all(
    directory: Directory, catalog: LazyCatalog, space: Space, clears: Clears
) -> list[Place]:
    numbers = _names(directory, clears)
    space.other_bytes = directory.files.size_at(directory.lock_path).allocated_bytes
    places: list[Place] = []
    faults: list[str] = []
    ordered = sorted(numbers)
    scratch = Scratch()
    _want(directory, ordered[:AHEAD], numbers)
    for at, number in enumerate(ordered):
        if at % AHEAD == 0:
            _want(directory, ordered[at + AHEAD : at + 2 * AHEAD], numbers)
        space.next_number = number + 1
        read = _read_one(directory, number, numbers[number], scratch)
        if read is not None:
            places += _take_one(catalog, space, clears, number, read)
            faults += [read.fault] if read.fault else []
    if faults:
        logger.warning(
            "disk %s: %d of %d segments are left alone, and count against the cap with %s; %s",
            directory.path,
            len(faults),
            len(ordered),
            format_bytes(space.other_bytes),
            faults[0],
        )
    space.next_number = max(space.next_number, clears.last + 1)
    clears.forget(space.segments)
    catalog.remember(recency.take(directory))
    places += catalog.settle()
    return places


def _want(directory: Directory, numbers: Sequence[int], suffixes: Mapping[int, set[str]]) -> None:
    """Let the kernel read what stands beside these segments ahead: logs first, which are small,
    and are read first."""
    for suffix in (ROWS, INDEX):
        for number in numbers:
            if suffix not in suffixes[number]:
                continue
            with suppress(OSError):
                descriptor = directory.files.open(directory.at(number, suffix), os.O_RDONLY)
                try:
                    directory.files.want_cached(descriptor)
                finally:
                    directory.files.close(descriptor)


def _is_temporary(name: str) -> bool:
    return parsed_name(name.removesuffix(TEMPORARY)) is not None


def _read_one(
    directory: Directory, number: int, suffixes: set[str], scratch: Scratch
) -> _Read | None:
    """One segment; what is wrong with it is its own affair. None: nothing of it is left."""
    try:
        if SEGMENT not in suffixes:
            _unlink(directory, number)
            return None
        read = _read(directory, number, suffixes, scratch)
        segment = _size_of(directory, number)
        read.cut = _beyond(read.columns, segment.length_bytes) - read.gone
        read.gone |= read.cut
        read.allocated[SEGMENT] = segment.allocated_bytes
        if len(read.columns) <= len(read.gone) and not _live(read):
            _unlink(directory, number)
            return None
    except (OSError, UnknownFormat, CorruptRecord) as error:
        read = _Read(Columns(), set(), is_sealed=False, fault=f"segment {number}: {error}")
    for suffix in SUFFIXES:
        if suffix in read.allocated or suffix not in (*suffixes, INDEX):
            continue
        with suppress(OSError):
            found = directory.files.size_at(directory.at(number, suffix))
            read.allocated[suffix] = found.allocated_bytes
    return read


def _take_one(
    catalog: LazyCatalog, space: Space, clears: Clears, number: int, read: _Read
) -> list[Place]:
    if read.fault:
        clears.leave_alone(number)
        space.other_bytes += sum(read.allocated.values())
        return []
    segment = space.segments[number] = Segment(number, is_sealed=read.is_sealed)
    segment.row_count = segment.indexed = len(read.columns)
    segment.digest_count = len(read.columns.digests) // INNER_DIGEST_BYTES
    for kind in read.columns.kinds:
        segment.add_kind(kind)
    space.measured(number, read.allocated)
    gone = catalog.take(number, read.columns, read.gone)
    cleared = (catalog.kind_numbers.get(k) for k in segment.kinds if clears.means(k, number))
    catalog.retire([kind for kind in cleared if kind is not None])
    segment.live = len(read.columns) - len(gone)
    return _still_there(segment, read, gone)


def _size_of(directory: Directory, number: int) -> FileSize:
    """Of a segment; raises OSError, also where it is a link or a pipe: no load would open it."""
    found = directory.files.link_at(directory.at(number, SEGMENT))
    if not stat.S_ISREG(found.mode):
        raise OSError(errno.EINVAL, "not a regular file")
    return found


def _live(read: _Read) -> bool:
    return any(page * CELL_ALIGN_BYTES not in read.gone for page in read.columns.pages)


def _still_there(segment: Segment, read: _Read, gone: list[int]) -> list[Place]:
    """Places of these rows, which are gone, where a kill came before their holes; else of those
    that no log says yet."""
    if not gone:
        return []
    columns = read.columns
    if read.allocated[SEGMENT] <= _others_and_one_bytes(columns, gone) - PAGE:
        cut = read.cut
        gone = [row for row in gone if columns.pages[row] * CELL_ALIGN_BYTES in cut] if cut else []
    segment.live += len(gone)  # until it is given back
    return [
        Place(segment.number, columns.pages[row] * CELL_ALIGN_BYTES, _length_bytes(columns, row))
        for row in gone
    ]


def _length_bytes(columns: Columns, row: int) -> int:
    return codec.stored_bytes(columns.kinds[columns.kind[row]].layout, columns.blocks[row])


def _others_and_one_bytes(columns: Columns, gone: list[int]) -> int:
    """What all rows but these take, and the smallest of these."""
    layouts = {kind.layout for kind in columns.kinds}
    if len(layouts) == 1:
        layout = layouts.pop()
        one, most = (codec.stored_bytes(layout, n) for n in (1, layout.blocks_per_chunk))
        per_block = layout.block_bytes
        if most - one == (layout.blocks_per_chunk - 1) * per_block:
            # All headers are equally long, as of most layouts: no step is needed for each row.
            blocks = list(map(columns.blocks.__getitem__, gone))
            block_count = len(columns.digests) // INNER_DIGEST_BYTES - sum(blocks) + min(blocks)
            row_count = len(columns) - len(gone) + 1
            return block_count * per_block + row_count * (one - per_block)
    shapes = list(zip(columns.kind, columns.blocks, strict=True))
    lengths = {
        (kind, blocks): codec.stored_bytes(columns.kinds[kind].layout, blocks)
        for kind, blocks in set(shapes)
    }
    of_gone = [lengths[shapes[row]] for row in gone]
    return sum(map(lengths.__getitem__, shapes)) - sum(of_gone) + min(of_gone)


def _read(directory: Directory, number: int, suffixes: set[str], scratch: Scratch) -> _Read:
    """What a segment's files say, its index written if it has none.

    Raises:
        OSError, UnknownFormat: it cannot be read.
    """
    said = sealing.read_both(directory, number, scratch, has_rows=ROWS in suffixes)
    for fault in said.faults:
        logger.warning("disk %s", fault)
    if said.is_all and said.index is not None and not (said.rows and said.rows.kept):
        return _as_said(said.index, said.rows)
    columns = sealing.joined(said.index, said.rows)
    if not said.is_all:
        count = len(columns)
        columns = scan.with_headers(directory, number, said)
        logger.log(
            logging.WARNING if said.faults else logging.INFO,
            "disk %s: segment %d %s; %d records are back by their headers",
            directory.path,
            number,
            "is told of by what is damaged" if said.faults else "has no rows, as after a kill",
            len(columns) - count,
        )
    is_sealed = _sealed(directory, number, columns)
    _give_back(directory, number, columns)
    return _Read(columns, set(), is_sealed)


def _as_said(index: Columns, rows: Rows | None) -> _Read:
    """What both say as they are; neither file is changed, nor asked about again."""
    read = _Read(index, set(), is_sealed=True, allocated={INDEX: index.allocated_bytes})
    if rows is not None:
        read.gone, read.allocated[ROWS] = rows.gone, rows.allocated_bytes
    return read


def _sealed(directory: Directory, number: int, columns: Columns) -> bool:
    """Write its index, of records that outlive a loss of power as those of any sealed segment do;
    where that fails the rows log goes on to say the same."""
    if not len(columns):
        return False
    try:
        if directory.sync != "none":
            _sync(directory, number)
        sealing.write_index(directory, number, columns)
    except OSError as error:
        logger.warning("disk %s: no index of segment %d: %s", directory.path, number, error)
        return False
    return True


def _sync(directory: Directory, number: int) -> None:
    """Let the drive have the records of a segment; raises OSError."""
    descriptor = directory.files.open(directory.at(number, SEGMENT), os.O_RDONLY)
    try:
        directory.files.sync(descriptor)
    finally:
        directory.files.close(descriptor)


def _give_back(directory: Directory, number: int, columns: Columns) -> None:
    """Leave a segment nothing but its records: what was being written at the kill goes, and what
    had its row by then and not its hole, which nobody would know of any more."""
    if not len(columns):
        return
    gaps, end = [], 0
    for page, kind, blocks in zip(columns.pages, columns.kind, columns.blocks, strict=True):
        begin = page * CELL_ALIGN_BYTES
        if begin > end:
            gaps.append((end, begin - end))
        end = begin + codec.stored_bytes(columns.kinds[kind].layout, blocks)
    files, path = directory.files, directory.at(number, SEGMENT)
    try:
        is_longer = files.size_at(path).length_bytes > end
        if not (gaps or is_longer):
            return
        descriptor = files.open(path, os.O_RDWR)
        try:
            if is_longer:
                files.truncate(descriptor, end)
            for begin, length in gaps:
                files.punch(descriptor, begin, length)
        finally:
            files.close(descriptor)
    except OSError as error:
        logger.warning("disk %s: segment %d keeps its gaps: %s", directory.path, number, error)


def _beyond(columns: Columns, length_bytes: int) -> set[int]:
    """Offsets of records that the segment file does not hold whole."""
    if not len(columns):
        return set()
    kind, blocks = columns.kind[-1], columns.blocks[-1]
    last = columns.pages[-1] * CELL_ALIGN_BYTES
    if last + codec.stored_bytes(columns.kinds[kind].layout, blocks) <= length_bytes:
        return set()
    return {
        page * CELL_ALIGN_BYTES
        for page, kind, blocks in zip(columns.pages, columns.kind, columns.blocks, strict=True)
        if page * CELL_ALIGN_BYTES + codec.stored_bytes(columns.kinds[kind].layout, blocks)
        > length_bytes
    }


def _unlink(directory: Directory, number: int) -> None:
    """The records first, as always."""
    for suffix in (SEGMENT, INDEX, ROWS):
        with suppress(FileNotFoundError):
            directory.files.unlink(directory.at(number, suffix))
