"""Proof of everything that a directory holds, record by record; safe beside a running node.

It only reads, and goes by what a start would: by rows and index, and by the headers of a segment
where these are damaged. Header and blocks of each record are proven. What differs is looked up
once more at the end, since the node goes on meanwhile: a record that is not named any more was
taken away, and a log that ended in half a row was being written. What was cleared is not there,
whether or not its rows have followed.
"""

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from kvtide.codec import record as codec
from kvtide.core.records import Record
from kvtide.errors import CorruptRecord, UnknownFormat
from kvtide.tiers.disk import sealing
from kvtide.tiers.disk.cleared import is_cleared, told_by
from kvtide.tiers.disk.columns import Columns
from kvtide.tiers.disk.directory import Directory
from kvtide.tiers.disk.rows import Kept
from kvtide.tiers.disk.scan import Scan, with_headers
from kvtide.tiers.disk_names import parsed_name
from kvtide.tiers.files import Files, SystemFiles
from kvtide.tiers.scope import Scope


@dataclass(frozen=True, slots=True)
class Checked:
    """One record, or what is wrong with a whole segment or with what lies beside it.

    Attributes:
        segment: number of its file.
        offset_bytes: where it begins; None for a whole segment.
        length_bytes: at rest.
        record: what rows say that it is; None for a whole segment.
        fault: what is wrong; empty where it is proven.
    """

    segment: int
    offset_bytes: int | None
    length_bytes: int
    record: Record | None
    fault: str = ""


def segments_of(path: Path, files: Files | None = None) -> dict[int, int]:
    """Numbers of the segments of a directory, in order, and what each takes: the extent of a
    check. Raises OSError."""
    reading = files or SystemFiles()
    found: dict[int, int] = {}
    for name in reading.names(str(path)):
        ours = parsed_name(name)
        if ours is not None and ours[1] == "segment":
            with suppress(FileNotFoundError):  # the node has unlinked it meanwhile
                found[ours[0]] = reading.size_at(f"{path}/{name}").allocated_bytes
    return dict(sorted(found.items()))


def listed(path: Path, files: Files | None = None) -> Iterator[Checked]:
    """All records as rows and indexes name them, or headers where these are damaged, in order;
    nothing is proven. Raises OSError."""
    directory = Directory(str(path), files or SystemFiles())
    up_to = _cleared_in(directory)
    for number in segments_of(path, files):
        try:
            columns, faults = _named(directory, number, is_proving=False)
        except FileNotFoundError:
            continue  # the node has unlinked it meanwhile
        except (OSError, UnknownFormat) as error:
            yield Checked(number, None, 0, None, str(error))
            continue
        for kept in _left(columns, number, up_to):
            record, length_bytes = _record_of(columns, kept)
            yield Checked(number, kept.offset_bytes, length_bytes, record)
        yield from _lasting(directory, number, faults)


def _record_of(columns: Columns, kept: Kept) -> tuple[Record, int]:
    """A record, and its bytes at rest."""
    kind = columns.kinds[kept.kind]
    record = Record(kind.root, kept.parent, kept.key, kept.digests, kind.layout)
    return record, codec.stored_bytes(kind.layout, record.blocks)


def check(path: Path, first_segment: int = 0, files: Files | None = None) -> Iterator[Checked]:
    """Prove all records from a segment on, in order: who keeps the number of the last one that is
    done can go on from there. Raises OSError where the directory itself cannot be read."""
    directory = Directory(str(path), files or SystemFiles())
    up_to = _cleared_in(directory)
    for number in segments_of(path, files):
        if number >= first_segment:
            yield from _check_segment(directory, number, up_to)


def _check_segment(
    directory: Directory, number: int, up_to: Mapping[Scope, int]
) -> Iterator[Checked]:
    try:
        columns, faults = _named(directory, number)
        scan = Scan(directory, number)
    except FileNotFoundError:
        return  # the node has unlinked it meanwhile
    except (OSError, UnknownFormat) as error:
        yield Checked(number, None, 0, None, str(error))
        return
    try:
        for kept in _left(columns, number, up_to):
            record, length = _record_of(columns, kept)
            fault = _fault(scan, kept.offset_bytes, record)
            if fault and not _is_still_named(directory, number, kept):
                continue
            yield Checked(number, kept.offset_bytes, length, record, fault)
    finally:
        scan.close()
    yield from _lasting(directory, number, faults)


def _named(
    directory: Directory, number: int, *, is_proving: bool = True
) -> tuple[Columns, tuple[str, ...]]:
    """What a start would take in, and what is damaged of that which tells it.

    Raises:
        OSError, UnknownFormat: it cannot be read.
    """
    said = sealing.read_both(directory, number)
    if said.is_all:
        return sealing.joined(said.index, said.rows), ()
    return with_headers(directory, number, said, is_proving=is_proving), said.faults


def _lasting(directory: Directory, number: int, faults: tuple[str, ...]) -> Iterator[Checked]:
    """Those faults that are there still: a log whose last row was being written has grown."""
    if not faults:
        return
    try:
        now = sealing.read_both(directory, number).faults
        lasting = [fault for fault in faults if fault in now]
    except (OSError, UnknownFormat) as error:
        lasting = [str(error)]
    for fault in lasting:
        yield Checked(number, None, 0, None, fault)


def _cleared_in(directory: Directory) -> dict[Scope, int]:
    return told_by(directory.files.names(directory.path))


def _left(columns: Columns, number: int, up_to: Mapping[Scope, int]) -> Iterator[Kept]:
    """Records of a segment that were not cleared."""
    left = [not is_cleared(up_to, kind, number) for kind in columns.kinds]
    return (kept for kept in sealing.kept_of(columns) if left[kept.kind])


def _fault(scan: Scan, offset_bytes: int, record: Record) -> str:
    """What is wrong with the record at a place; empty: nothing."""
    try:
        headers = scan.headers_at(offset_bytes)
        if not headers:
            return f"no record begins at byte {offset_bytes}"
        if headers[0].record != record:
            return f"at byte {offset_bytes} is {headers[0].record.key.hex()}"
        scan.verify(offset_bytes, headers)
    except (CorruptRecord, OSError) as error:
        return str(error)
    return ""


def _is_still_named(directory: Directory, number: int, kept: Kept) -> bool:
    try:
        columns, _ = _named(directory, number, is_proving=False)
        left = _left(columns, number, _cleared_in(directory))
    except (OSError, UnknownFormat):
        return False
    return any((one.key, one.offset_bytes) == (kept.key, kept.offset_bytes) for one in left)
