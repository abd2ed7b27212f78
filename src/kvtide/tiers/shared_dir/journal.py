"""What a member says of its records: a file that it alone appends to, and the others read on.

    opening │ row │ row │ …             row: kind u32 │ body bytes u32 │ xxh3_64 │ body

The checksum covers the row's place and the number of this journal too, so what was torn, damaged
or copied ends it; a reader stays there and looks again. A journal that holds more rows of records
that are gone than of others is written anew, under another number, and put in place of the old
one: whoever reads on then begins from the start.

A record is told of once it is whole under its name, and told to be gone before that name is.
Sequence numbers only rise, also across a journal written anew, so that a clear can name what was
stored before it, here and in the journals of others.
"""

import os
import secrets
import struct
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from kvtide.codec import record as codec
from kvtide.core.keys import INNER_DIGEST_BYTES, KEY_BYTES
from kvtide.core.records import Record, RootName
from kvtide.errors import CorruptRecord, UnknownFormat
from kvtide.tiers.disk.files import Files, read_fully, write_fully
from kvtide.tiers.disk.rows import Kind, kind_bytes, read_kind
from kvtide.tiers.scope import EVERYTHING, Scope
from kvtide.units import KiB, MiB

JOURNAL = "journal"
MAGIC = b"kvtidJRN"
VERSION = 1
MEMBER_BYTES = 16
PIECE_BYTES = MiB
"""Read at a time: three thousand rows, so that a look into a large journal comes in steps of
milliseconds."""
BODY_BYTES_MAX = 512 * KiB
GARBAGE_ROWS = 4096
"""So many rows that say nothing any more are no reason to write a journal anew."""

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


@dataclass(frozen=True, slots=True)
class GoneRow:
    """Records are not there any more."""

    keys: list[bytes]


@dataclass(frozen=True, slots=True)
class ClearedRow:
    """What of this scope has a sequence number up to that of its member is not found."""

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
    """The next rows of a journal, a bounded number of bytes.

    Raises:
        OSError: it cannot be read.
        CorruptRecord, UnknownFormat: it is none, or of another version.
    """
    descriptor = files.open(path, os.O_RDONLY)
    try:
        opening = bytearray(OPENING_BYTES)
        count = read_fully(files, descriptor, [memoryview(opening)], 0)
        number, sequence = _opened(opening[:count], path)
        is_anew = number != position.number
        at = OPENING_BYTES if is_anew else position.at_bytes
        content = bytearray(PIECE_BYTES)
        count = read_fully(files, descriptor, [memoryview(content)], at)
        length_bytes = files.size(descriptor).length_bytes
    finally:
        files.close(descriptor)
    rows, end = _rows(memoryview(content)[:count], number, at)
    has_more = bool(rows) and count == PIECE_BYTES
    return Piece(rows, Position(number, end), is_anew, has_more, length_bytes, sequence)


def _opened(opening: bytearray, path: str) -> tuple[int, int]:
    """Number and sequence of a journal."""
    if len(opening) < OPENING_BYTES:
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


def _bodies(row: Row) -> Iterator[tuple[int, bytes]]:
    match row:
        case KindRow(number, kind):
            yield KIND, kind_bytes(number, kind)
        case KeptRow(kind, sequence, key, parent, digests):
            blocks = len(digests) // INNER_DIGEST_BYTES
            yield KEPT, _KEPT.pack(kind, blocks, sequence, key, parent) + digests
        case GoneRow(keys):
            for start in range(0, len(keys), _GONE_MAX):
                yield GONE, b"".join(keys[start : start + _GONE_MAX])
        case ClearedRow(scope, up_to):
            salt, fingerprint = scope.salt_digest, scope.fingerprint
            sizes = (-1 if part is None else len(part) for part in (salt, fingerprint))
            body = _SCOPE.pack(*sizes, salt or b"", fingerprint or b"")
            yield CLEARED, body + b"".join(_UP_TO.pack(*item) for item in up_to.items())


def _encoded(rows: Sequence[Row], number: int, at: int) -> bytes:
    """Rows as they stand at this place."""
    content = bytearray()
    for row in rows:
        for kind, body in _bodies(row):
            seal = _seal(number, at + len(content), kind, body)
            content += _HEAD.pack(kind, len(body), seal) + body
    return bytes(content)


def write_anew(files: Files, path: str, rows: Sequence[Row], sequence: int) -> Position:
    """A journal of these rows in place of what is there; its end. Raises OSError."""
    number = secrets.randbits(64)
    content = _OPENING.pack(MAGIC, VERSION, 0, number, sequence)
    content += _encoded(rows, number, OPENING_BYTES)
    temporary = f"{path}.{secrets.token_hex(8)}.tmp"
    descriptor = files.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    try:
        write_fully(files, descriptor, [content], 0)
        files.sync(descriptor)
    finally:
        files.close(descriptor)
    files.rename(temporary, path)
    return Position(number, len(content))


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
        return any(
            sequence <= self.get(Scope(salt, fingerprint), {}).get(member, -1)
            for salt in (None, root.salt_digest)
            for fingerprint in (None, root.fingerprint)
        )


@dataclass(slots=True)
class Live:
    """What of a journal's rows still says something."""

    kinds: dict[int, Kind] = field(default_factory=dict)
    kept: dict[bytes, KeptRow] = field(default_factory=dict)
    cleared: Cleared = field(default_factory=Cleared)
    rows: int = 0
    sequence: int = 0

    def take(self, row: Row, member: bytes) -> None:
        """The next row, of this member's journal."""
        self.rows += 1
        match row:
            case KindRow(number, kind):
                self.kinds[number] = kind
            case KeptRow():
                self.sequence = max(self.sequence, row.sequence)
                if not self.hides(member, row):
                    self.kept[row.key] = row
            case GoneRow(keys):
                for key in keys:
                    self.kept.pop(key, None)
            case ClearedRow(scope, up_to):
                self.cleared.note(scope, up_to)
                last = up_to.get(member, -1)
                for kept in list(self.kept.values()):
                    if kept.sequence <= last and scope.has(self.kinds[kept.kind].root):
                        del self.kept[kept.key]

    def hides(self, member: bytes, row: KeptRow) -> bool:
        """Whether it was cleared before it was told of."""
        kind = self.kinds.get(row.kind)
        return kind is None or self.cleared.means(member, kind.root, row.sequence)

    def to_write(self) -> list[Row]:
        """The rows that say the same."""
        kinds = {kept.kind for kept in self.kept.values()}
        rows: list[Row] = [KindRow(number, self.kinds[number]) for number in sorted(kinds)]
        rows += self.kept.values()
        return [*rows, *(ClearedRow(scope, up_to) for scope, up_to in self.cleared.items())]


class Journal:
    """The own one, which is written.

    Ownership: all under `_lock`; any writing thread appends.
    """

    def __init__(self, files: Files, directory: str, member: bytes) -> None:
        """Read what is there: `live`; a journal that is torn, mostly garbage or none is written
        anew. Raises OSError, CorruptRecord, UnknownFormat."""
        self._files = files
        self._path = f"{directory}/{JOURNAL}"
        self._member = member
        self._lock = threading.Lock()
        self._descriptor = -1
        self._position = Position()
        self._kind_numbers: dict[Kind, int] = {}
        self._live_count = self._row_count = 0
        self.live = self._taken()

    @property
    def size_bytes(self) -> int:
        """What it takes."""
        return self._position.at_bytes

    def _taken(self) -> Live:
        live, piece = Live(), None
        position = Position()
        while piece is None or piece.has_more:
            try:
                piece = read_on(self._files, self._path, position)
            except (FileNotFoundError, CorruptRecord):
                break
            position = piece.position
            live.sequence = max(live.sequence, piece.sequence)
            for row in piece.rows:
                live.take(row, self._member)
        is_whole = piece is not None and piece.length_bytes == position.at_bytes
        if not is_whole or _is_mostly_garbage(live.rows, len(live.kept)):
            rows = live.to_write()
            position = write_anew(self._files, self._path, rows, live.sequence)
            live.rows = len(rows)
            live.kinds = {row.number: row.kind for row in rows if isinstance(row, KindRow)}
        self._position = position
        self._kind_numbers = {kind: number for number, kind in live.kinds.items()}
        self._live_count, self._row_count = len(live.kept), live.rows
        return live

    def keep(self, record: Record, sequence: int) -> None:
        """A record is there. Raises OSError: nobody will find it."""
        with self._lock:
            rows: list[Row] = []
            kind = Kind(record.root, record.layout)
            number = self._kind_numbers.get(kind)
            if number is None:
                number = max(self._kind_numbers.values(), default=0) + 1
                rows.append(KindRow(number, kind))
            rows.append(KeptRow(number, sequence, record.key, record.parent, record.digests))
            self._append(rows)
            self._kind_numbers[kind] = number
            self._live_count += 1

    def take_away(self, keys: list[bytes]) -> None:
        """Records will not be there any more. Raises OSError."""
        with self._lock:
            self._append([GoneRow(keys)])
            self._live_count -= len(keys)
            if _is_mostly_garbage(self._row_count, self._live_count):
                self._close()
                self._taken()

    def clear(self, row: ClearedRow) -> None:
        """See `ClearedRow`. Raises OSError."""
        with self._lock:
            self._append([row])

    def _append(self, rows: Sequence[Row]) -> None:
        """At the end of what is good: a write that failed half-way leaves no trace."""
        files, position = self._files, self._position
        content = _encoded(rows, position.number, position.at_bytes)
        try:
            if self._descriptor < 0:
                self._descriptor = files.open(self._path, os.O_RDWR)
                files.truncate(self._descriptor, position.at_bytes)
            write_fully(files, self._descriptor, [content], position.at_bytes)
            files.sync(self._descriptor)
        except OSError:
            self._close()
            raise
        self._position = Position(position.number, position.at_bytes + len(content))
        self._row_count += len(rows)

    def _close(self) -> None:
        if self._descriptor >= 0:
            descriptor, self._descriptor = self._descriptor, -1
            try:
                self._files.close(descriptor)
            except OSError:
                return  # what it would say was said by the sync

    def close(self) -> None:
        """Give the descriptor back."""
        with self._lock:
            self._close()


def _is_mostly_garbage(rows: int, live: int) -> bool:
    return rows > 2 * live + GARBAGE_ROWS
