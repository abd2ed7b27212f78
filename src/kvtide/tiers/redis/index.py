"""Calls of index.lua: rows and members are packed here as they are cut there.

Ownership: one thread's.
"""

import hashlib
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources

from kvtide.codec.record import WRITE_ID_BYTES
from kvtide.core.keys import INNER_DIGEST_BYTES, KEY_BYTES
from kvtide.core.records import Record
from kvtide.errors import PlaceFailed
from kvtide.tiers.base import LookupJob
from kvtide.tiers.redis.resp import Connection, Reply, ServerError
from kvtide.tiers.redis.routes import Routes
from kvtide.tiers.remote import parts
from kvtide.tiers.remote.census import Census
from kvtide.tiers.remote.kinds import KIND_BYTES, kind_of
from kvtide.tiers.remote.session import Put
from kvtide.tiers.scope import Scope

VERSION = 1
"""Of rows, members, parts and their names; another one has an index of its own."""
SCRIPT = (resources.files(__package__) / "index.lua").read_bytes()
_SHA = hashlib.sha1(SCRIPT, usedforsecurity=False).hexdigest().encode()
WRITE_IDS_MAX = 8192
"""Noted at once: all that is found for one prompt, several times."""
_PARTS_BYTES = 20
_ROW_AT = 92
_HEAD_BYTES = 21


class WriteIds:
    """Those of records that were found or stored lately: a hint, by which their parts are asked
    for before the index has said that it is so.

    Ownership: under a lock; all sessions of a tier share it.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._by_key: dict[bytes, bytes] = {}

    def note(self, key: bytes, write_id: bytes) -> None:
        """It is, or was a moment ago, of this write."""
        with self._lock:
            self._by_key[key] = write_id
            if len(self._by_key) > WRITE_IDS_MAX:
                del self._by_key[next(iter(self._by_key))]

    def take(self, key: bytes) -> bytes | None:
        """What was noted, once."""
        with self._lock:
            return self._by_key.pop(key, None)


@dataclass(frozen=True, slots=True)
class Sent:
    """A call that was sent: its answer is the next on its connection."""

    command: list[bytes]
    connection: Connection


@dataclass(frozen=True, slots=True)
class Begun:
    """What a store needs to go on: `why` not, or the life of its kind."""

    why: str
    life: bytes


class Index:
    """The index of one deployment below one prefix."""

    def __init__(
        self, routes: Routes, census: Census, known: WriteIds, prefix: str, bytes_max: int
    ) -> None:
        tag = f"{prefix}:{{{prefix}:{VERSION}}}:"
        names = ("index", "tree", "leaves", "inner", "numbers", "loose")
        self._routes = routes
        self._census = census
        self._known = known
        self._keys = [f"{tag}{name}".encode() for name in names]
        self._prefix = f"{prefix}:{VERSION}:"
        self._bytes_max = bytes_max
        self._removed = bytearray()
        self._cursor = b"0"
        self._victims: list[bytes] = []
        self._taught: Connection | None = None

    def names(self, write_id: bytes, count: int) -> list[bytes]:
        """Keys of the parts of one write."""
        return [f"{self._prefix}{write_id.hex()}:{number}".encode() for number in range(count)]

    def take_victims(self) -> list[bytes]:
        """Writes whose parts nobody needs any more, since this was asked."""
        victims, self._victims = self._victims, []
        return victims

    def names_of_victim(self, victim: bytes) -> list[bytes]:
        """Keys of its parts."""
        return self.names(victim[:WRITE_ID_BYTES], int(victim[WRITE_ID_BYTES:]))

    def is_removed(self, victim: bytes) -> None:
        """Its parts are gone; the next call says so."""
        self._removed += victim

    # ---- calls

    def find(self, job: LookupJob) -> tuple[list[Record], bool]:
        """See `Session.find`."""
        kind = kind_of(job.root, job.layout)
        reply = self._call(b"find", kind, job.parent, job.digests, job.keys)
        match reply:
            case [list() as rows, bytes() as key, bytes() as row, int(may_go_on)]:
                records: list[Record] = []
                parent = job.parent
                for number, one in enumerate(rows):
                    at = number * KEY_BYTES
                    records.append(self._found(job, parent, job.keys[at : at + KEY_BYTES], one))
                    parent = records[-1].key
                if key:
                    records.append(self._found(job, parent, key, row))
                return records, bool(may_go_on)
        raise _nonsense(reply)

    def _found(self, job: LookupJob, parent: bytes, key: bytes, row: Reply) -> Record:
        record = _record(job, parent, key, row)
        assert isinstance(row, bytes), row
        self._known.note(key, row[:WRITE_ID_BYTES])
        return record

    def locate(self, record: Record) -> Sent:
        """Ask for the write id of a record."""
        kind = kind_of(record.root, record.layout)
        return self._sent(b"locate", kind, record.key, record.parent, record.digests)

    def located(self, sent: Sent) -> bytes | None:
        """What `locate` has asked for; None: it is not there."""
        reply = self._answered(sent)
        if not isinstance(reply, bytes):
            raise _nonsense(reply)
        return reply or None

    def begin(self, put: Put, parents: set[bytes], *, is_behind: bool, is_full: bool) -> Sent:
        """Set room aside for a record.

        Args:
            put: its store.
            parents: of all that are being stored now; these are not evicted for it.
            is_behind: its own is being stored, too.
            is_full: the server itself has no more room than what is taken.
        """
        record = put.record
        bytes_max = self._bytes_max
        if is_full:
            bytes_max = min(bytes_max, max(self._census.bytes_used, taken_bytes(record)))
        kind, root = kind_of(record.root, record.layout), record.root
        ids, taken = _parts_of(record, put.write_id)
        return self._sent(
            b"begin",
            kind,
            root.fingerprint + root.salt_digest,
            root.key,
            record.key,
            record.parent,
            record.digests,
            b"%d" % (record.layout.blocks_per_chunk * INNER_DIGEST_BYTES),
            ids,
            taken,
            b"%d" % bytes_max,
            b"%d" % is_behind,
            b"".join(parents),
        )

    def begun(self, sent: Sent) -> Begun:
        """What `begin` came to."""
        reply = self._answered(sent)
        match reply:
            case [bytes() as why, bytes() as life, int(evicted)]:
                self._census.evicted_more(evicted)
                return Begun(why.decode(), life)
        raise _nonsense(reply)

    def complete(
        self, record: Record, write_id: bytes, life: bytes, names: Sequence[bytes]
    ) -> Sent:
        """All its parts are there, or have been sent ahead of this call: these are looked for."""
        kind = kind_of(record.root, record.layout)
        ids, taken = _parts_of(record, write_id)
        row = write_id + kind + life + record.parent + taken + ids[16:] + record.digests
        whole = b"%d" % (record.layout.blocks_per_chunk * INNER_DIGEST_BYTES)
        return self._sent(b"complete", record.root.key, record.key, whole, row, *names)

    def completed(self, sent: Sent, record: Record, write_id: bytes) -> str:
        """How `complete` ended: "stored", or why it is no record."""
        reply = self._answered(sent)
        match reply:
            case [b"stored"]:
                self._census.stored(kind_of(record.root, record.layout), record.root)
                self._known.note(record.key, write_id)
                return "stored"
            case [bytes() as why]:
                return why.decode()
        raise _nonsense(reply)

    def abandon(self, record: Record, write_id: bytes) -> Sent:
        """What was begun will not be completed."""
        kind = kind_of(record.root, record.layout)
        return self._sent(b"abandon", *_parts_of(record, write_id), kind)

    def abandoned(self, sent: Sent) -> None:
        """It is not any more."""
        self._answered(sent)

    def remove(self, record: Record, write_id: bytes) -> None:
        """It is not there as it should be: take it away, with what lies behind it."""
        self._call(b"remove", record.key, write_id)

    def clear(self, scope: Scope) -> int:
        """See `Session.clear`."""
        fingerprint, salt = scope.fingerprint, scope.salt_digest
        reply = self._call(
            b"clear",
            b"*" if fingerprint is None else fingerprint,
            b"*" if salt is None else salt,
        )
        self._census.cleared(scope)
        match reply:
            case [int(count)]:
                return count
        raise _nonsense(reply)

    def sweep(self) -> bool:
        """See `Session.sweep`."""
        reply = self._call(b"sweep", self._cursor)
        match reply:
            case [bytes() as cursor]:
                self._cursor = cursor
                return cursor != b"0"
        raise _nonsense(reply)

    def survey(self) -> None:
        """Tell the census all there is."""
        reply = self._call(b"survey")
        if not isinstance(reply, list):
            raise _nonsense(reply)
        said = dict(zip(reply[::2], reply[1::2], strict=False))
        kinds = {}
        for name, whose in said.items():
            if isinstance(name, bytes) and name[:1] == b"k" and isinstance(whose, bytes):
                count = said.get(b"n" + name[1:])
                records = int(count) if isinstance(count, bytes) else 0
                if records:
                    kinds[name[1:]] = (whose[:KEY_BYTES], whose[KEY_BYTES:], records)
        self._census.counted(kinds)

    # ---- the call

    def _call(self, *arguments: bytes) -> Reply:
        return self._answered(self._sent(*arguments))

    def _sent(self, *arguments: bytes) -> Sent:
        op, *rest = arguments
        removed = bytes(self._removed)  # if this call fails, they stay loose for a minute
        self._removed.clear()
        command = [b"%d" % len(self._keys), *self._keys, op, removed, *rest]
        connection = self._routes.of(self._keys[0])
        if connection is self._taught:
            connection.send(b"EVALSHA", _SHA, *command)
        else:
            connection.send(b"EVAL", SCRIPT, *command)
            self._taught = connection
        return Sent(command, connection)

    def _answered(self, sent: Sent) -> Reply:
        reply = sent.connection.read()
        if isinstance(reply, ServerError) and reply.code == "NOSCRIPT":
            if sent.connection.unread:
                raise PlaceFailed("it has lost its script while it was used")
            connection = self._routes.of(self._keys[0])
            connection.send(b"EVAL", SCRIPT, *sent.command)
            reply = connection.read()
        if isinstance(reply, ServerError):
            raise self._routes.judge(self._keys[0], reply)
        match reply:
            case [bytes() as told, result] if (
                told[:_HEAD_BYTES].isdigit() and len(told) >= _HEAD_BYTES
            ):
                if told[:1] != b"1":  # it was not whole, and began anew
                    self._census.counted({})
                kinds_at = _HEAD_BYTES + _PARTS_BYTES * int(told[17:_HEAD_BYTES])
                self._census.said(int(told[1:17]), _cut(told[kinds_at:], KIND_BYTES))
                self._victims += _cut(told[_HEAD_BYTES:kinds_at], _PARTS_BYTES)
                return result
        raise _nonsense(reply)


def _cut(joined: bytes, size: int) -> list[bytes]:
    return [joined[at : at + size] for at in range(0, len(joined), size)]


def _parts_of(record: Record, write_id: bytes) -> tuple[bytes, bytes]:
    """Write id and number of parts, and the bytes that they take, as index.lua has them."""
    lengths = parts.lengths_of(record)
    return write_id + b"%04d" % len(lengths), b"%016d" % taken_bytes(record)


def taken_bytes(record: Record) -> int:
    """What a record takes, with its row of the index, about."""
    row_bytes = 1024 + 3 * INNER_DIGEST_BYTES * record.blocks
    return parts.taken_bytes(parts.lengths_of(record)) + row_bytes


def _record(job: LookupJob, parent: bytes, key: bytes, row: Reply) -> Record:
    """A row as a record of the chain that was asked for."""
    digests = row[_ROW_AT:] if isinstance(row, bytes) else b""
    blocks, rest = divmod(len(digests), INNER_DIGEST_BYTES)
    is_ours = not rest and 0 < blocks <= job.layout.blocks_per_chunk and len(key) == KEY_BYTES
    if not is_ours or digests[-INNER_DIGEST_BYTES:] != key[:INNER_DIGEST_BYTES]:
        raise _nonsense(row)
    return Record(job.root, parent, key, digests, job.layout)


def _nonsense(reply: Reply) -> PlaceFailed:
    return PlaceFailed(f"its index answered what is no answer: {str(reply)[:80]}")
