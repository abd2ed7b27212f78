"""What is written beside a segment file: which of its records are complete, and which are gone.

A *rows log* (`NNNNNNNN.rows`) grows by one write for each record that is complete, and for each
run of records taken away. It begins with an opening; each row is

    type u32 │ body bytes u32 │ xxh3_64 of all that, of its segment and of its place │ body

so a row that was torn, damaged, moved or copied ends the log. Rows speak of roots and layouts by
the number of a definition ahead of them in the same log. docs/formats.md has the bodies.
"""

import struct
from dataclasses import dataclass, field

from kvtide.codec import record as codec
from kvtide.core.keys import INNER_DIGEST_BYTES, KEY_BYTES
from kvtide.core.layout import CELL_ALIGN_BYTES
from kvtide.errors import CorruptRecord, UnknownFormat
from kvtide.tiers.kinds import Kind, kind_bytes, kind_length_bytes, read_kind

LOG_MAGIC = b"kvtidROW"
VERSION = 1

KIND, KEPT, GONE = 1, 2, 3
"""Types of rows: a root and a layout; a record that is complete; records that are not there any
more."""

_OPENING = struct.Struct("<8sII")
OPENING_BYTES = _OPENING.size
_HEAD = struct.Struct("<IIQ")
_LABEL = struct.Struct("<II")
_KEPT = struct.Struct("<QII32s32s")
BODY_BYTES_MAX = 1 << 20
_PLACE_BITS = 40


@dataclass(frozen=True, slots=True)
class Kept:
    """One record that is complete.

    Attributes:
        offset_bytes: where it begins in its segment.
        kind: number of its definition.
        key, parent, digests: as in `Record`.
    """

    offset_bytes: int
    kind: int
    key: bytes
    parent: bytes
    digests: bytes

    @property
    def blocks(self) -> int:
        """Blocks that it holds."""
        return len(self.digests) // INNER_DIGEST_BYTES


@dataclass(slots=True)
class Rows:
    """What a log says.

    Attributes:
        kinds: definitions by number.
        kept: records by offset, without those that are gone.
        gone: offsets of those.
        end_bytes: where the last good row ends.
        is_whole: whether nothing follows it.
        allocated_bytes: what the file takes that they were read from; 0: none was.
    """

    kinds: dict[int, Kind] = field(default_factory=dict)
    kept: dict[int, Kept] = field(default_factory=dict)
    gone: set[int] = field(default_factory=set)
    end_bytes: int = 0
    is_whole: bool = False
    allocated_bytes: int = 0


def opening(segment: int) -> bytes:
    """How the log of a segment begins."""
    return _OPENING.pack(LOG_MAGIC, VERSION, segment)


def _row(segment: int, at_bytes: int, row_type: int, body: bytes) -> bytes:
    label = _LABEL.pack(row_type, len(body))
    checksum = codec.checksum(label + body, segment << _PLACE_BITS ^ at_bytes)
    return _HEAD.pack(row_type, len(body), checksum) + body


def kept_row(segment: int, at_bytes: int, kept: Kept) -> bytes:
    """The row of a complete record, for this place in the log."""
    body = _KEPT.pack(kept.offset_bytes, kept.kind, kept.blocks, kept.key, kept.parent)
    return _row(segment, at_bytes, KEPT, body + kept.digests)


def gone_row(segment: int, at_bytes: int, offsets: list[int]) -> bytes:
    """The row that takes records away."""
    assert 8 * len(offsets) <= BODY_BYTES_MAX, len(offsets)
    return _row(segment, at_bytes, GONE, struct.pack(f"<{len(offsets)}Q", *offsets))


def kind_row(segment: int, at_bytes: int, number: int, kind: Kind) -> bytes:
    """The row of a definition."""
    return _row(segment, at_bytes, KIND, kind_bytes(number, kind))


def read_log(content: memoryview, segment: int) -> Rows:
    """All that a log says up to its end, or to what is no row of it.

    Raises:
        UnknownFormat: the log is of a version that is not ours.
        CorruptRecord: it does not even begin as one of this segment.
    """
    if len(content) < OPENING_BYTES:
        raise CorruptRecord("a rows log is cut short")
    magic, version, number = _OPENING.unpack_from(content)
    if magic == LOG_MAGIC and version != VERSION:
        raise UnknownFormat(f"a rows log has format version {version}; known is {VERSION}")
    if (magic, number) != (LOG_MAGIC, segment):
        raise CorruptRecord(f"a rows log begins with {magic.hex()} of segment {number}")
    rows = Rows()
    at, end, seed = OPENING_BYTES, len(content), segment << _PLACE_BITS
    try:
        while at + _HEAD.size <= end:
            row_type, length, wanted = _HEAD.unpack_from(content, at)
            body_at = at + _HEAD.size
            next_at = body_at + length
            if length > BODY_BYTES_MAX or next_at > end:
                break
            body = content[body_at:next_at]
            label = bytes(content[at : at + _LABEL.size])
            if codec.checksum(label + body, seed ^ at) != wanted:
                break
            _take(rows, row_type, body)
            at = next_at
    except CorruptRecord:
        pass  # it is whole, and says what cannot be: the end, like one that is not
    rows.end_bytes, rows.is_whole = at, at == end
    return rows


def _take(rows: Rows, row_type: int, body: memoryview) -> None:
    match row_type:
        case 1:  # KIND
            definition = read_kind(body)
            rows.kinds[definition.number] = definition.kind
        case 2:  # KEPT
            kept = _read_kept(body, rows.kinds)
            rows.kept[kept.offset_bytes] = kept
        case 3:  # GONE
            count = len(body) // 8
            offsets = struct.unpack_from(f"<{count}Q", body)
            rows.gone.update(offsets)
            for offset in offsets if rows.kept else ():  # none beside an index, as a rule
                rows.kept.pop(offset, None)
        case _:
            raise CorruptRecord(f"a row of type {row_type}")


def _read_kept(body: memoryview, kinds: dict[int, Kind]) -> Kept:
    if len(body) < _KEPT.size:
        raise CorruptRecord("a row is cut short")
    offset, kind, blocks, key, parent = _KEPT.unpack_from(body)
    digests = bytes(body[_KEPT.size :])
    if (
        kind not in kinds
        or offset % CELL_ALIGN_BYTES
        or not 0 < blocks <= kinds[kind].layout.blocks_per_chunk
        or len(digests) != blocks * INNER_DIGEST_BYTES
        or digests[-INNER_DIGEST_BYTES:] != key[:INNER_DIGEST_BYTES]
    ):
        raise CorruptRecord(f"a row says what cannot be of {key.hex()}")
    return Kept(offset, kind, key, parent, digests)


def kept_row_bytes(blocks: int) -> int:
    """Length of the row of a record with so many blocks."""
    return _HEAD.size + _KEPT.size + blocks * INNER_DIGEST_BYTES


def kind_row_bytes(kind: Kind) -> int:
    """Length of the row of a definition."""
    return _HEAD.size + kind_length_bytes(kind)


assert _KEPT.size == 16 + 2 * KEY_BYTES
