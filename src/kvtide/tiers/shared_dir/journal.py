"""What a member says of its records: a file that it alone appends to, and the others read on.

    opening │ row │ row │ …             row: kind u32 │ body bytes u32 │ xxh3_64 │ body

The checksum covers the row's place and the number of this journal too, so what was torn, damaged
or copied ends it; a reader stays there and looks again. One that is written anew (`own.py`) has
another number: whoever reads on then begins from the start.

A record is told of once it is whole under its name, and told to be gone before that name is.
Sequence numbers only rise, also across a journal written anew, so that a clear can name what was
stored before it, here and in the journals of others.
"""

import os
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from kvtide.codec import record as codec
from kvtide.core.keys import INNER_DIGEST_BYTES, KEY_BYTES
from kvtide.core.records import RootName
from kvtide.errors import CorruptRecord, UnknownFormat
from kvtide.tiers import shared_names
from kvtide.tiers.files import Files, read_fully
from kvtide.tiers.kinds import Kind, kind_bytes, read_kind
from kvtide.tiers.scope import EVERYTHING, Scope
from kvtide.units import KiB, MiB

JOURNAL = shared_names.JOURNAL
MAGIC = b"kvtidJRN"
VERSION = 1
MEMBER_BYTES = 16
PIECE_BYTES = MiB
"""Read at a time: three thousand rows, so that a look into a large journal comes in steps of
milliseconds."""
BODY_BYTES_MAX = 512 * KiB

KIND, KEPT, GONE, CLEARED = 1, 2, 3, 4

_OPENING = struct.Struct("<8sIIQQ")
_HEAD = struct.Struct("<IIQ")
_LABEL = struct.Struct("<II")
_KEPT = struct.Struct("<IIQ32s32s")
_SCOPE = struct.Struct("<bb32s32s")
_UP_TO = struct.Struct("<16sQ")
_GONE_MAX = BODY_BYTES_MAX // KEY_BYTES
OPENING_BYTES = _OPENING.size


@dataclass(frozen=True, slots=True)
class KindRow:
    """From here on this number stands for this root and layout."""

    number: int
    kind: Kind


@dataclass(frozen=True, slots=True)
class KeptRow:
    """A record is there. `kind` is the number of its root and layout in this journal."""

    kind: int
    sequence: int
    key: bytes
    parent: bytes
    digests: bytes

    @property
    def blocks(self) -> int:
        """Blocks that it holds."""
        return len(self.digests) // INNER_DIGEST_BYTES

    def is_of(self, kind: Kind) -> bool:
        """Whether such a record can be of this kind."""
        return 0 < self.blocks <= kind.layout.blocks_per_chunk and self.key.startswith(
            self.digests[-INNER_DIGEST_BYTES:]
        )


@dataclass(frozen=True, slots=True)
class GoneRow:
    """Records are not there any more."""

    keys: list[bytes]


@dataclass(frozen=True, slots=True)
class ClearedRow:
    """What of this scope has a sequence number up to that of its member is not found. Of its own
    records the member says besides that they are gone, as they go."""

    scope: Scope
    up_to: dict[bytes, int]


Row: TypeAlias = KindRow | KeptRow | GoneRow | ClearedRow


@dataclass(frozen=True, slots=True)
class Position:
    """How far a journal was read: its number, and the first byte that was not."""

    number: int = 0
    at_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Piece:
    """What was read of a journal.

    Attributes:
        rows: good ones, in order.
        position: behind the last of them.
        is_anew: these are the first ones of another journal than the one read before.
        has_more: good rows may follow.
        length_bytes: of the file.
        sequence: numbers up to this one were given before this journal.
    """

    rows: list[Row]
    position: Position
    is_anew: bool
    has_more: bool
    length_bytes: int
    sequence: int


# ---- reading


def read_on(files: Files, path: str, position: Position) -> Piece:
    """The next rows of a journal, a bounded number of bytes. One that is shorter than what was
    read of it is another: an older one that was put back, say.

    Raises:
        OSError: it cannot be read.
        CorruptRecord, UnknownFormat: it is none, or of another version.
    """
    descriptor = files.open(path, os.O_RDONLY)
    try:
        number, sequence = read_opening(files, descriptor, path)
        length_bytes = files.size(descriptor).length_bytes
        is_anew = number != position.number or length_bytes < position.at_bytes
        at = OPENING_BYTES if is_anew else position.at_bytes
        content = bytearray(PIECE_BYTES)
        count = read_fully(files, descriptor, [memoryview(content)], at)
    finally:
        files.close(descriptor)
    rows, end = _rows(memoryview(content)[:count], number, at)
    has_more = bool(rows) and count == PIECE_BYTES
    return Piece(rows, Position(number, end), is_anew, has_more, length_bytes, sequence)


def read_opening(files: Files, descriptor: int, path: str) -> tuple[int, int]:
    """What `opening_of` was given.

    Raises:
        OSError: it cannot be read.
        CorruptRecord, UnknownFormat: it begins no journal that we know.
    """
    opening = bytearray(OPENING_BYTES)
    if read_fully(files, descriptor, [memoryview(opening)], 0) < OPENING_BYTES:
        raise CorruptRecord(f"{path} is cut short")
    magic, version, _, number, sequence = _OPENING.unpack(opening)
    if magic != MAGIC:
        raise CorruptRecord(f"{path} begins with {magic.hex()}, not as a journal")
    if version != VERSION:
        raise UnknownFormat(f"{path} has format version {version}; this kvtide knows {VERSION}")
    return number, sequence


def _rows(content: memoryview, number: int, at: int) -> tuple[list[Row], int]:
    """Good rows at the start of these bytes, which lie there; where the last of them ends."""
    rows: list[Row] = []
    begin = 0
    while len(content) - begin >= _HEAD.size:
        kind, length, seal = _HEAD.unpack_from(content, begin)
        body = content[begin + _HEAD.size : begin + _HEAD.size + length]
        if length > BODY_BYTES_MAX or len(body) != length:
            break
        if _seal(number, at + begin, kind, body) != seal:
            break
        try:
            rows.append(_row(kind, body))
        except CorruptRecord:
            break
        begin += _HEAD.size + length
    return rows, at + begin


def _seal(number: int, at: int, kind: int, body: memoryview | bytes) -> int:
    return codec.checksum(_LABEL.pack(kind, len(body)) + body, number ^ at)


def _row(kind: int, body: memoryview) -> Row:
    """Raises CorruptRecord."""
    if kind == KIND:
        definition = read_kind(body)
        return KindRow(definition.number, definition.kind)
    if kind == KEPT and len(body) >= _KEPT.size:
        of_kind, blocks, sequence, key, parent = _KEPT.unpack_from(body)
        digests = bytes(body[_KEPT.size :])
        if blocks and len(digests) == blocks * INNER_DIGEST_BYTES:
            return KeptRow(of_kind, sequence, key, parent, digests)
    if kind == GONE and len(body) % KEY_BYTES == 0:
        return GoneRow([bytes(body[at : at + KEY_BYTES]) for at in range(0, len(body), KEY_BYTES)])
    if kind == CLEARED and len(body) >= _SCOPE.size:
        return ClearedRow(*_cleared(body))
    raise CorruptRecord(f"a row of kind {kind} says what cannot be")


def _cleared(body: memoryview) -> tuple[Scope, dict[bytes, int]]:
    salt_bytes, fingerprint_bytes, salt, fingerprint = _SCOPE.unpack_from(body)
    scope = Scope(
        None if salt_bytes < 0 else salt[:salt_bytes],
        None if fingerprint_bytes < 0 else fingerprint[:fingerprint_bytes],
    )
    rest = body[_SCOPE.size :]
    return scope, dict(_UP_TO.iter_unpack(rest[: len(rest) // _UP_TO.size * _UP_TO.size]))


# ---- writing


def opening_of(number: int, sequence: int) -> bytes:
    """How a journal begins: its number, and the last one given before it."""
    return _OPENING.pack(MAGIC, VERSION, 0, number, sequence)


def _bodies(row: Row) -> Iterator[tuple[int, bytes]]:
    match row:
        case KindRow(number, kind):
            yield KIND, kind_bytes(number, kind)
        case KeptRow(kind, sequence, key, parent, digests):
            yield KEPT, _KEPT.pack(kind, row.blocks, sequence, key, parent) + digests
        case GoneRow(keys):
            for start in range(0, len(keys), _GONE_MAX):
                yield GONE, b"".join(keys[start : start + _GONE_MAX])
        case ClearedRow(scope, up_to):
            salt, fingerprint = scope.salt_digest, scope.fingerprint
            sizes = (-1 if part is None else len(part) for part in (salt, fingerprint))
            body = _SCOPE.pack(*sizes, salt or b"", fingerprint or b"")
            yield CLEARED, body + b"".join(_UP_TO.pack(*item) for item in up_to.items())


def encoded(rows: Sequence[Row], number: int, at: int) -> bytes:
    """Rows as they stand at this place of the journal of this number."""
    content = bytearray()
    for row in rows:
        for kind, body in _bodies(row):
            seal = _seal(number, at + len(content), kind, body)
            content += _HEAD.pack(kind, len(body), seal) + body
    return bytes(content)


EVERY_NUMBER = 2**64 - 1
"""Up to which a clear is meant while nobody knows how far a member has come."""


class Cleared(dict[Scope, dict[bytes, int]]):
    """What was cleared: for each scope the members, and the numbers up to which it is meant."""

    def note(self, scope: Scope, up_to: Mapping[bytes, int]) -> None:
        """One more clear; what it says too need not be said any more."""
        mine = self.setdefault(scope, {})
        for member, number in up_to.items():
            mine[member] = max(number, mine.get(member, -1))
        if scope == EVERYTHING:
            for other in self.keys() - {EVERYTHING}:
                left = {m: n for m, n in self[other].items() if n > mine.get(m, -1)}
                if left:
                    self[other] = left
                else:
                    del self[other]

    def means(self, member: bytes, root: RootName, sequence: int) -> bool:
        """Whether a record was cleared."""
        return bool(self) and any(
            sequence <= self.get(Scope(salt, fingerprint), {}).get(member, -1)
            for salt in (None, root.salt_digest)
            for fingerprint in (None, root.fingerprint)
        )
