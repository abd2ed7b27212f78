"""The index of a sealed segment (`NNNNNNNN.index`): columns that a start takes in as they are.

A node that starts reads these instead of a million rows one by one: keys are cut by one call of
`struct`, the other columns become arrays by one copy. A row's parent is told as *how many rows
ahead of it* it stands, which holds wherever the rows land; parents of other segments are listed
by key. docs/formats.md has the layout.
"""

import operator
import struct
import sys
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from kvtide.codec import record as codec
from kvtide.core.keys import INNER_DIGEST_BYTES, KEY_BYTES
from kvtide.core.layout import CELL_ALIGN_BYTES
from kvtide.errors import CorruptRecord, UnknownFormat
from kvtide.tiers.disk.rows import Kept, Kind, kind_bytes, read_kind

MAGIC = b"kvtidIDX"
VERSION = 1

_OPENING = struct.Struct("<8sIIQIIIIQ")
"""Magic, version, segment, checksum of all that follows it, rows, kinds, their bytes, parents
elsewhere, digests."""
_PROVEN_AT = 24
FIRST_BYTES = 8
ROW_BYTES = KEY_BYTES + FIRST_BYTES + 4 + 4 + 4 + 4 + 2
"""Of all columns together."""
ELSEWHERE_BYTES = 4 + KEY_BYTES


@dataclass(slots=True)
class Columns:
    """The records of one segment, each column in the order of the rows.

    Attributes:
        kinds: definitions; `kind` numbers them from 0.
        keys: 32 bytes each.
        firsts: the first 8 bytes of a record's first digest.
        pages: where a record begins in its segment, in units of 4096 bytes.
        kind: number of its definition.
        back: how many rows ahead its parent stands; 0: it is the root or elsewhere.
        children: rows of the same segment that stand below it.
        blocks: how many it holds.
        elsewhere: rows whose parents lie in other segments, and their keys.
        digests: of all blocks of all rows, 16 bytes each, one behind the other.
    """

    kinds: list[Kind] = field(default_factory=list)
    keys: tuple[bytes, ...] = ()
    firsts: bytes = b""
    pages: "array[int]" = field(default_factory=lambda: array("I"))
    kind: "array[int]" = field(default_factory=lambda: array("I"))
    back: "array[int]" = field(default_factory=lambda: array("i"))
    children: "array[int]" = field(default_factory=lambda: array("I"))
    blocks: "array[int]" = field(default_factory=lambda: array("H"))
    elsewhere: list[tuple[int, bytes]] = field(default_factory=list)
    digests: bytes = b""

    def __len__(self) -> int:
        return len(self.keys)

    def cut(self) -> Iterator[bytes]:
        """The digests of each row."""
        begin = 0
        for blocks in self.blocks:
            end = begin + blocks * INNER_DIGEST_BYTES
            yield self.digests[begin:end]
            begin = end


def from_rows(kinds: dict[int, Kind], kept: Iterable[Kept]) -> Columns:
    """Columns of records; of two with one key the later one counts."""
    ordered = {one.key: one for one in sorted(kept, key=lambda one: one.offset_bytes)}
    columns = Columns()
    numbers: dict[int, int] = {}
    rows: dict[bytes, int] = {}
    for row, record in enumerate(ordered.values()):
        if record.kind not in numbers:
            numbers[record.kind] = len(columns.kinds)
            columns.kinds.append(kinds[record.kind])
        parent = rows.get(record.parent)
        if parent is not None:
            columns.children[parent] += 1
        elif record.parent != kinds[record.kind].root.key:
            columns.elsewhere.append((row, record.parent))
        rows[record.key] = row
        columns.pages.append(record.offset_bytes // CELL_ALIGN_BYTES)
        columns.kind.append(numbers[record.kind])
        columns.back.append(0 if parent is None else row - parent)
        columns.children.append(0)
        columns.blocks.append(record.blocks)
    columns.keys = tuple(rows)
    columns.firsts = b"".join(record.digests[:8] for record in ordered.values())
    columns.digests = b"".join(record.digests for record in ordered.values())
    return columns


def encode(columns: Columns, segment: int) -> bytes:
    """The file."""
    kinds = b"".join(kind_bytes(number, kind) for number, kind in enumerate(columns.kinds))
    parts = [kinds, *columns.keys, columns.firsts]
    parts += [_little(column).tobytes() for column in _arrays(columns)]
    parts += [struct.pack("<I", row) + key for row, key in columns.elsewhere]
    content = b"".join([*parts, columns.digests])
    counts = (len(columns), len(columns.kinds), len(kinds), len(columns.elsewhere))
    opening = _OPENING.pack(MAGIC, VERSION, segment, 0, *counts, sum(columns.blocks))
    checksum = struct.pack("<Q", codec.checksum(opening[_PROVEN_AT:] + content, segment))
    return opening[: _PROVEN_AT - 8] + checksum + opening[_PROVEN_AT:] + content


def decode(content: memoryview, segment: int) -> Columns:
    """What `encode` was given.

    Raises:
        UnknownFormat: it is of a version that is not ours.
        CorruptRecord: it is damaged, cut short, or of another segment.
    """
    if len(content) < _OPENING.size:
        raise CorruptRecord("an index is cut short")
    magic, version, number, wanted, *counts = _OPENING.unpack_from(content)
    if magic == MAGIC and version != VERSION:
        raise UnknownFormat(f"an index has format version {version}; this kvtide knows {VERSION}")
    if (magic, number) != (MAGIC, segment):
        raise CorruptRecord(f"an index begins with {magic.hex()} of segment {number}")
    rows, kinds, kinds_bytes, elsewhere, digests = counts
    length = _OPENING.size + kinds_bytes + rows * ROW_BYTES
    length += elsewhere * ELSEWHERE_BYTES + digests * INNER_DIGEST_BYTES
    if len(content) != length:
        raise CorruptRecord(f"an index has {len(content)} bytes, it speaks of {length}")
    if codec.checksum(content[_PROVEN_AT:], segment) != wanted:
        raise CorruptRecord("checksum of an index")
    columns = Columns()
    at = _OPENING.size
    for _ in range(kinds):
        _, kind, kind_length = read_kind(content[at:])
        columns.kinds.append(kind)
        at += kind_length
    columns.keys = struct.Struct("32s" * rows).unpack_from(content, at)
    at += KEY_BYTES * rows
    columns.firsts = bytes(content[at : at + FIRST_BYTES * rows])
    at += FIRST_BYTES * rows
    for column in _arrays(columns):
        end = at + column.itemsize * rows
        column.frombytes(content[at:end])
        _little(column)
        at = end
    for _ in range(elsewhere):
        (row,) = struct.unpack_from("<I", content, at)
        columns.elsewhere.append((row, bytes(content[at + 4 : at + ELSEWHERE_BYTES])))
        at += ELSEWHERE_BYTES
    if not _is_consistent(columns, digests):
        raise CorruptRecord("an index says what cannot be")
    columns.digests = bytes(content[at:])
    return columns


def _is_consistent(columns: Columns, digests: int) -> bool:
    """Whether each number is one that the others allow."""
    rows = len(columns)
    return not rows or (
        max(columns.kind) < len(columns.kinds)
        and min(columns.blocks) > 0
        and sum(columns.blocks) == digests
        and min(columns.back) >= 0
        and max(map(operator.sub, columns.back, range(rows))) <= 0
        and all(row < rows for row, _ in columns.elsewhere)
    )


def index_bytes_max(kinds_bytes: int, rows: int, digests: int) -> int:
    """Most that the index of so many rows takes, with so many digests in all."""
    per_row = ROW_BYTES + ELSEWHERE_BYTES
    return _OPENING.size + kinds_bytes + rows * per_row + digests * INNER_DIGEST_BYTES


def _arrays(columns: Columns) -> "list[array[int]]":
    """The columns that are numbers, in the file's order."""
    named = columns
    return [named.pages, named.kind, named.back, named.children, named.blocks]


def _little(column: "array[int]") -> "array[int]":
    """Turns a column between the machine's order of bytes and the file's, in place."""
    if sys.byteorder == "big":
        column.byteswap()
    return column
