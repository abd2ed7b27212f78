"""Names of objects: what is there, its names alone tell. docs/formats.md has them, too.

    TOP/r/STAMP.WRITE_KIND_PARENT_KEY/DIGESTS…   the beginning of a record; with it, all is there
    TOP/p/STAMP.WRITE_KEY.N                      its N-th part behind that
    TOP/m/STAMP.WRITER.WHAT                      what nodes tell one another

TOP is `prefix/version`. A stamp is 12 hex digits of milliseconds, later than any that its writer
had seen: names in order are writes in order, so what is new is listed without what is old. The
rest is base64url of bytes of fixed length, and of the digests of all blocks but the last, whose
digest begins the key. No two writes have one name, since each has a random id; and `parse_record`
takes no name but the one that `record_name` makes.
"""

import base64
import binascii
import re
import struct
from dataclasses import dataclass

from kvtide.codec.record import WRITE_ID_BYTES, stored_bytes
from kvtide.core.keys import INNER_DIGEST_BYTES, KEY_BYTES
from kvtide.core.layout import KVLayout
from kvtide.core.records import Record
from kvtide.tiers.remote.kinds import KIND_BYTES, kind_of
from kvtide.tiers.scope import Scope
from kvtide.units import MiB

VERSION = 1
NAME_BYTES_MAX = 1024
"""Of S3. What has so many blocks that its digests do not fit is not kept."""
STEP_CHARS = 192
"""Of a name between two slashes: what stands on a file system has no more than 255."""
PART_BYTES = 8 * MiB
"""Of one object: as much as one connection brings in a tenth of a second, from far away."""
_FIXED = struct.Struct(f"{WRITE_ID_BYTES}s{KIND_BYTES}s{KEY_BYTES}s{KEY_BYTES}s")
_RECORD = re.compile(r"([0-9a-f]{12})\.([A-Za-z0-9_-]{128})((?:/[A-Za-z0-9_-]+)*)")
_PART = re.compile(r"([0-9a-f]{12})\.([A-Za-z0-9_-]{64})\.(\d{1,4})")
_MESSAGE = re.compile(
    r"([0-9a-f]{12})\.([0-9a-f]{16})\.(room|gone|used|clear)(?:\.(\w+))?(?:\.(\w+))?"
)


@dataclass(frozen=True, slots=True)
class Written:
    """One write of a record, as the name of its first object tells it."""

    stamp: int
    write_id: bytes
    kind: bytes
    parent: bytes
    key: bytes
    digests: bytes


@dataclass(frozen=True, slots=True)
class Part:
    """The write that an object behind the first belongs to."""

    stamp: int
    write_id: bytes
    key: bytes


@dataclass(frozen=True, slots=True)
class Message:
    """What a node tells: `room` that it may take (bytes), records that are `gone` or were `used`
    (they stand in the object), or what it has cleared."""

    stamp: int
    writer: str
    what: str
    room_bytes: int = 0
    scope: Scope | None = None


def written(record: Record, stamp: int, write_id: bytes) -> Written:
    """A write of this record."""
    kind = kind_of(record.root, record.layout)
    return Written(stamp, write_id, kind, record.parent, record.key, record.digests)


def record_name(top: str, of: Written) -> str:
    """Of its first object."""
    fixed = of.write_id + of.kind + of.parent + of.key
    inner = _encoded(of.digests[:-INNER_DIGEST_BYTES])
    steps = [inner[at : at + STEP_CHARS] for at in range(0, len(inner), STEP_CHARS)]
    return "/".join([f"{top}/r/{of.stamp:012x}.{_encoded(fixed)}", *steps])


def parse_record(top: str, name: str) -> Written | None:
    """What `record_name` was given; None: it is no such name."""
    match = _RECORD.fullmatch(name.removeprefix(f"{top}/r/"))
    if match is None:
        return None
    fixed, inner = _decoded(match[2]), _decoded(match[3].replace("/", ""))
    if len(fixed) != _FIXED.size or len(inner) % INNER_DIGEST_BYTES:
        return None
    write_id, kind, parent, key = _FIXED.unpack(fixed)
    digests = inner + key[:INNER_DIGEST_BYTES]
    found = Written(int(match[1], 16), write_id, kind, parent, key, digests)
    return found if record_name(top, found) == name else None


def part_name(top: str, of: Written, number: int) -> str:
    """Of one of the objects behind the first."""
    return f"{top}/p/{of.stamp:012x}.{_encoded(of.write_id + of.key)}.{number}"


def parse_part(top: str, name: str) -> Part | None:
    """Whose part it is; None: it is no such name."""
    match = _PART.fullmatch(name.removeprefix(f"{top}/p/"))
    if match is None:
        return None
    both = _decoded(match[2])
    return Part(int(match[1], 16), both[:WRITE_ID_BYTES], both[WRITE_ID_BYTES:])


def part_lengths(layout: KVLayout, blocks: int) -> list[int]:
    """Lengths of all objects of a record, in order."""
    whole, rest = divmod(stored_bytes(layout, blocks), PART_BYTES)
    return [PART_BYTES] * whole + [rest] * bool(rest)


def names_of(top: str, of: Written, layout: KVLayout) -> list[str]:
    """All its objects."""
    count = len(part_lengths(layout, len(of.digests) // INNER_DIGEST_BYTES))
    return [record_name(top, of), *(part_name(top, of, number) for number in range(1, count))]


def message_name(top: str, message: Message) -> str:
    """See `Message`."""
    words = [f"{message.stamp:012x}", message.writer, message.what]
    if message.what == "room":
        words.append(str(message.room_bytes))
    if message.scope is not None:
        words += [_word(message.scope.fingerprint), _word(message.scope.salt_digest)]
    return f"{top}/m/{'.'.join(words)}"


def parse_message(top: str, name: str) -> Message | None:
    """What `message_name` was given; None: it is no such name."""
    match = _MESSAGE.fullmatch(name.removeprefix(f"{top}/m/"))
    if match is None:
        return None
    stamp, writer, what, first, second = match.groups()
    try:
        scope = Scope(_unword(second), _unword(first)) if what == "clear" else None
        room_bytes = int(first) if what == "room" else 0
    except (TypeError, ValueError):
        return None
    return Message(int(stamp, 16), writer, what, room_bytes, scope)


def _word(digest: bytes | None) -> str:
    return "any" if digest is None else digest.hex() or "none"


def _unword(word: str) -> bytes | None:
    return None if word == "any" else bytes.fromhex("" if word == "none" else word)


def _encoded(content: bytes) -> str:
    return base64.urlsafe_b64encode(content).rstrip(b"=").decode()


def _decoded(text: str) -> bytes:
    try:
        return base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))
    except binascii.Error:
        return b""
