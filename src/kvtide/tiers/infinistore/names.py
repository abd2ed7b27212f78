"""What names of a server say, and what small values hold.

    PREFIX:1:n:<digest>            note of a record: which write its parts are of, and its blocks
    PREFIX:1:f:<digest>            family: records that begin with one block behind one parent
    PREFIX:1:c:<digest>            that a key has children
    PREFIX:1:w:<write>:<number>    part of a record, of one write
    PREFIX:1:x:<digest>            of the last clear of a scope
    PREFIX:1:life                  of a server since it was started

A server gives each value 64 KiB at least, so there are few of them; and it lists nothing, so what
is cleared is not removed, but has another name from then on: digests are of what a record belongs
to, with what all clears that concern it have left.
"""

import hashlib
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kvtide.codec.record import WRITE_ID_BYTES, checksum, stored_bytes
from kvtide.core.keys import INNER_DIGEST_BYTES, KEY_BYTES
from kvtide.core.layout import KVLayout
from kvtide.core.records import Record, RootName
from kvtide.tiers.remote.kinds import KIND_BYTES, kind_of
from kvtide.tiers.remote.parts import have_headers
from kvtide.tiers.scope import Scope
from kvtide.units import MiB

VERSION = 1
"""Of names and of what they hold."""
MARK = b"kvtide part 0001"
"""What a part begins with, so that no value could be taken for an ask; also what marks a key that
has children."""
PART_BYTES = 2 * MiB - len(MARK)
"""Of a record in one value, which takes 2 MiB with its mark: whole stretches of a server's memory,
and small enough for several to be under way."""
NONCE_BYTES = 16
FAMILY_MAX = 16
"""Keys of a family, newest first: with so many it fits a packet."""
_DIGEST_BYTES = 16
_NOTE = struct.Struct(f"<8s{KIND_BYTES}s{WRITE_ID_BYTES}s{KEY_BYTES}s{KEY_BYTES}sH")
_SUM = struct.Struct("<Q")
_NOTE_MARK = b"kvtnote1"
_FAMILY_MARK = b"kvtfmly1"


@dataclass(frozen=True, slots=True)
class Note:
    """Of a record that is whole: itself, and the write that its parts are of."""

    record: Record
    write_id: bytes

    def packed(self) -> bytes:
        record = self.record
        fixed = _NOTE.pack(
            _NOTE_MARK,
            kind_of(record.root, record.layout),
            self.write_id,
            record.parent,
            record.key,
            record.blocks,
        )
        return _summed(fixed + record.digests)


def read_note(content: bytes | None, root: RootName, layout: KVLayout) -> Note | None:
    """The note that this is, of a record of this kind; None: it is none."""
    body = _unsummed(content)
    if body is None or len(body) < _NOTE.size:
        return None
    mark, kind, write_id, parent, key, blocks = _NOTE.unpack_from(body)
    digests = body[_NOTE.size :]
    if not (
        (mark, kind) == (_NOTE_MARK, kind_of(root, layout))
        and 0 < blocks <= layout.blocks_per_chunk
        and len(digests) == blocks * INNER_DIGEST_BYTES
        and digests[-INNER_DIGEST_BYTES:] == key[:INNER_DIGEST_BYTES]
    ):
        return None
    return Note(Record(root, parent, key, digests, layout), write_id)


def pack_family(keys: Sequence[bytes]) -> bytes:
    """A family: keys of its records, newest first."""
    return _summed(_FAMILY_MARK + b"".join(keys[:FAMILY_MAX]))


def read_family(content: bytes | None) -> list[bytes]:
    """The keys of a family; none where this is none."""
    body = _unsummed(content)
    if body is None or not body.startswith(_FAMILY_MARK) or len(body) % KEY_BYTES != 8:
        return []
    keys = body[len(_FAMILY_MARK) :]
    return [keys[at : at + KEY_BYTES] for at in range(0, len(keys), KEY_BYTES)][:FAMILY_MAX]


def _summed(body: bytes) -> bytes:
    return body + _SUM.pack(checksum(body))


def _unsummed(content: bytes | None) -> bytes | None:
    """What is in a small value, if it is as it was written."""
    if content is None or len(content) < _SUM.size:
        return None
    body, wanted = content[: -_SUM.size], _SUM.unpack_from(content, len(content) - _SUM.size)[0]
    return body if checksum(body) == wanted else None


class Names:
    """The names of one root's and layout's records below one prefix, between two clears."""

    def __init__(self, prefix: str, root: RootName, layout: KVLayout, cleared: bytes) -> None:
        """`cleared`: what all clears that concern it have left."""
        self._top = f"{prefix}:{VERSION}".encode()
        self._scope = kind_of(root, layout) + cleared

    def note(self, key: bytes) -> bytes:
        """The name of a record's note."""
        return self._name(b"n", key)

    def family(self, parent: bytes, first_block: bytes) -> bytes:
        """The name of the family behind this parent that begins with this block."""
        return self._name(b"f", parent, first_block)

    def children(self, key: bytes) -> bytes:
        """The name of the mark that a key has children."""
        return self._name(b"c", key)

    def _name(self, what: bytes, *of: bytes) -> bytes:
        running = hashlib.sha256(b"kvtide name 1")
        for part in (self._scope, what, *of):
            running.update(struct.pack("<I", len(part)) + part)
        return b":".join((self._top, what, running.hexdigest()[: 2 * _DIGEST_BYTES].encode()))


def part_names(prefix: str, write_id: bytes, count: int) -> list[bytes]:
    """The names of one write's parts, in order."""
    return [f"{prefix}:{VERSION}:w:{write_id.hex()}:{number}".encode() for number in range(count)]


def clears_of(prefix: str, root: RootName) -> list[bytes]:
    """The names of what clears that concern a root have left."""
    fingerprints, salts = (None, root.fingerprint), (None, root.salt_digest)
    scopes = [Scope(salt, fingerprint) for fingerprint in fingerprints for salt in salts]
    return [clear_of(prefix, scope) for scope in scopes]


def clear_of(prefix: str, scope: Scope) -> bytes:
    """The name of what the last clear of just this scope has left."""
    running = hashlib.sha256(b"kvtide scope 1")
    for value in (scope.fingerprint, scope.salt_digest):
        said = b"" if value is None else struct.pack("<I", len(value)) + value
        running.update(struct.pack("<?", value is not None) + said)
    return f"{prefix}:{VERSION}:x:{running.hexdigest()[: 2 * _DIGEST_BYTES]}".encode()


def cleared_by(nonces: Iterable[bytes | None]) -> bytes:
    """What clears have left, as names take it in; that one has left nothing counts, too."""
    return b"".join(struct.pack("<I", len(one)) + one if one else b"\0" * 4 for one in nonces)


def life_of(prefix: str) -> bytes:
    """The name of what tells a server that was started again: it has lost this value."""
    return f"{prefix}:{VERSION}:life".encode()


def lengths_of(record: Record) -> tuple[int, ...]:
    """Bytes of each part of a record, without its mark."""
    length = stored_bytes(record.layout, record.blocks)
    return tuple(min(PART_BYTES, length - at) for at in range(0, length, PART_BYTES))


def oldest_parts(record: Record) -> set[int]:
    """Those that a server evicts first, by number: the first, and the first that is sent, which
    is the first without a header."""
    have = have_headers(record.layout, record.blocks, lengths_of(record))
    return {0, have.index(False) if False in have else 0}
