"""The index of a sealed segment (`NNNNNNNN.index`): columns that a start takes in as they are.

A node that starts reads these instead of a million rows one by one: each column is one copy, and
none is cut into rows before they are asked for. A row's parent is told as *how many rows ahead of
it* it stands, which holds wherever the rows land; parents of other segments are listed by key.
docs/formats.md has the layout.
"""

import struct
import sys
from array import array
from bisect import bisect_left
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache

from kvtide.codec import record as codec
from kvtide.core.keys import INNER_DIGEST_BYTES, KEY_BYTES
from kvtide.core.layout import CELL_ALIGN_BYTES
from kvtide.errors import CorruptRecord, UnknownFormat
from kvtide.tiers.disk.rows import Kept
from kvtide.tiers.firsts import FIRST_BYTES
from kvtide.tiers.kinds import Kind, kind_bytes, read_kind

MAGIC = b"kvtidIDX"
VERSION = 1

_OPENING = struct.Struct("<8sIIQQIIIIQ")
"""Magic, version, segment, checksum of all that follows up to the digests, checksum of these,
rows, kinds, their bytes, parents elsewhere, digests."""
OPENING_BYTES = _OPENING.size
_PROVEN_AT = 24
ROW_BYTES = KEY_BYTES + FIRST_BYTES + 4 + 4 + 4 + 4 + 2
"""Of all columns together."""
ELSEWHERE_BYTES = 4 + KEY_BYTES


@dataclass(slots=True)
class Columns:
    """The records of one segment, each column in the order of the rows.

    Attributes:
        kinds: definitions; `kind` numbers them from 0.
        keys: 32 bytes each, one behind the other.
        firsts: the first 8 bytes of a record's first digest.
        pages: where a record begins in its segment, in units of 4096 bytes; ascending.
        kind: number of its definition.
        back: how many rows ahead its parent stands; 0: it is the root or elsewhere.
        children: rows of the same segment that stand below it.
        blocks: how many it holds.
        elsewhere: rows whose parents lie in other segments, and their keys.
        digests: of all blocks of all rows, 16 bytes each, one behind the other.
        allocated_bytes: what the file takes that they were read from; 0: none was.
    """

    kinds: list[Kind] = field(default_factory=list)
    keys: bytes = b""
    firsts: bytes = b""
    pages: "array[int]" = field(default_factory=lambda: array("I"))
    kind: "array[int]" = field(default_factory=lambda: array("I"))
    back: "array[int]" = field(default_factory=lambda: array("i"))
    children: "array[int]" = field(default_factory=lambda: array("I"))
    blocks: "array[int]" = field(default_factory=lambda: array("H"))
    elsewhere: list[tuple[int, bytes]] = field(default_factory=list)
    digests: memoryview = field(default_factory=lambda: memoryview(b""))
    allocated_bytes: int = 0

    def __len__(self) -> int:
        return len(self.blocks)

    def rows_at(self, pages: Iterable[int]) -> list[int]:
        """Of these pages, the rows of those at which a record begins. Neighbours, in order, cost
        least."""
        mine, count = self.pages, len(self)
        rows, row = [], -1
        for page in pages:
            row += 1
            if row >= count or mine[row] != page:
                row = bisect_left(mine, page)
                if row >= count or mine[row] != page:
                    continue
            rows.append(row)
        return rows

    def cut_keys(self) -> tuple[bytes, ...]:
        """The key of each row."""
        return struct.Struct(f"{KEY_BYTES}s" * len(self)).unpack(self.keys)

    def key_of(self, row: int) -> bytes:
        """The key of one row."""
        return self.keys[row * KEY_BYTES : (row + 1) * KEY_BYTES]

    def cut_digests(self) -> Iterator[bytes]:
        """The digests of each row."""
        begin = 0
        for blocks in self.blocks:
            end = begin + blocks * INNER_DIGEST_BYTES
            yield bytes(self.digests[begin:end])
            begin = end


@dataclass(frozen=True, slots=True)
class Extent:
    """Lengths of the two parts of an index.

    Attributes:
        columns_bytes: its opening and all columns but the last.
        digests_bytes: the last one.
    """

    columns_bytes: int
    digests_bytes: int


def from_rows(kinds: dict[int, Kind], kept: Iterable[Kept]) -> Columns:
    """Columns of records; of two with one key the later one counts."""
    ordered: dict[bytes, Kept] = {}
    for one in sorted(kept, key=lambda one: one.offset_bytes):
        ordered.pop(one.key, None)  # or it would stand where its earlier twin lay
        ordered[one.key] = one
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
    columns.keys = b"".join(rows)
    columns.firsts = b"".join(record.digests[:FIRST_BYTES] for record in ordered.values())
    columns.digests = memoryview(b"".join(record.digests for record in ordered.values()))
    return columns


def encode(columns: Columns, segment: int) -> bytes:
    """The file."""
    kinds = b"".join(kind_bytes(number, kind) for number, kind in enumerate(columns.kinds))
    parts = [kinds, columns.keys, columns.firsts]
    parts += [_little(column).tobytes() for column in _arrays(columns)]
    parts += [struct.pack("<I", row) + key for row, key in columns.elsewhere]
    content = b"".join(parts)
    counts = (len(columns), len(columns.kinds), len(kinds), len(columns.elsewhere))
    checksum_of_digests = codec.checksum(columns.digests, segment)
    opening = _OPENING.pack(
        MAGIC, VERSION, segment, 0, checksum_of_digests, *counts, sum(columns.blocks)
    )
    checksum = struct.pack("<Q", codec.checksum(opening[_PROVEN_AT:] + content, segment))
    opening = opening[: _PROVEN_AT - len(checksum)] + checksum + opening[_PROVEN_AT:]
    return b"".join([opening, content, columns.digests])


def extent_of(opening: memoryview, segment: int) -> Extent:
    """How long an index is that begins so.

    Raises:
        UnknownFormat: it is of a version that is not ours.
        CorruptRecord: it is none of this segment.
    """
    if len(opening) < OPENING_BYTES:
        raise CorruptRecord("an index is cut short")
    magic, version, number, _, _, rows, _, kinds_bytes, elsewhere, digests = _OPENING.unpack_from(
        opening
    )
    if magic == MAGIC and version != VERSION:
        raise UnknownFormat(f"an index has format version {version}; this kvtide knows {VERSION}")
    if (magic, number) != (MAGIC, segment):
        raise CorruptRecord(f"an index begins with {magic.hex()} of segment {number}")
    ahead = OPENING_BYTES + kinds_bytes + rows * ROW_BYTES + elsewhere * ELSEWHERE_BYTES
    return Extent(ahead, digests * INNER_DIGEST_BYTES)


def decode(content: memoryview, digests: memoryview, segment: int) -> Columns:
    """What `encode` was given, from both parts of `extent_of`; the second one is kept as it is.

    Raises:
        CorruptRecord: it is damaged.
    """
    _, _, _, wanted, wanted_of_digests, *counts = _OPENING.unpack_from(content)
    rows, kinds, _, elsewhere, digest_count = counts
    if (
        codec.checksum(content[_PROVEN_AT:], segment) != wanted
        or codec.checksum(digests, segment) != wanted_of_digests
    ):
        raise CorruptRecord("checksum of an index")
    columns = Columns()
    at = OPENING_BYTES
    for _ in range(kinds):
        definition = read_kind(content[at:])
        columns.kinds.append(definition.kind)
        at += definition.length_bytes
    columns.keys = bytes(content[at : at + KEY_BYTES * rows])
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
    if not _is_consistent(columns, digest_count):
        raise CorruptRecord("an index says what cannot be")
    columns.digests = digests
    return columns


def _is_consistent(columns: Columns, digests: int) -> bool:
    """Whether each number is one that the others allow."""
    rows = len(columns)
    return not rows or (
        _are_kinds(columns)
        # No two zeros side by side are no zero among these numbers, and found at once.
        and (bytes(2) not in columns.blocks.tobytes() or min(columns.blocks) > 0)
        and sum(columns.blocks) == digests
        and _are_ahead(columns.back)
        and all(row < rows for row, _ in columns.elsewhere)
    )


def _are_kinds(columns: Columns) -> bool:
    """Whether each number is that of a kind."""
    if len(columns.kinds) == 1:  # as in most segments, and without a step for each row
        return columns.kind.tobytes() == bytes(columns.kind.itemsize * len(columns))
    return max(columns.kind) < len(columns.kinds)


def _are_ahead(back: "array[int]") -> bool:
    """Whether each number is at most that of its row, without a step for each: all rows as one
    number, from whose every part, with its highest bit set, one of `back` is taken. Where that
    bit is still set the part was large enough."""
    highest, most = _limits(len(back))
    told = int.from_bytes(back.tobytes(), sys.byteorder)
    return not told & highest and (most - told) & highest == highest


@lru_cache(maxsize=8)  # most segments are full, of equal records
def _limits(rows: int) -> tuple[int, int]:
    """For `_are_ahead`: the highest bit of each part, and with it the largest number."""
    highest = int.from_bytes(array("i", [-1 << 31]).tobytes() * rows, sys.byteorder)
    return highest, highest | int.from_bytes(array("i", range(rows)).tobytes(), sys.byteorder)


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
