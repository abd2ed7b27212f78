"""Calls of index.lua: rows and members are packed here as they are cut there.

Ownership: one thread's.
"""

import enum
import hashlib
import re
import threading
from collections.abc import Iterator, Sequence
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
from kvtide.tiers.remote.kinds import kind_of
from kvtide.tiers.remote.session import Put
from kvtide.tiers.scope import Scope

VERSION = 2
"""Of rows, members, parts and their names; another one has an index of its own."""
SCRIPT = (resources.files(__package__) / "index.lua").read_bytes()
_SHA = hashlib.sha1(SCRIPT, usedforsecurity=False).hexdigest().encode()
WRITE_IDS_MAX = 8192
"""Noted at once: all that is found for one prompt, several times."""
_KIND_BYTES = 16
_GIVEN_UP_BYTES = 20
_DIGESTS_AT = 92
_HEAD = re.compile(rb"([01])(\d{16})(\d{4})")
"""Of an answer: whether the index was whole, all bytes, how many writes were given up."""


class IndexAnswer(enum.StrEnum):
    """What the index says to a store that begins, or whose parts are there."""

    GO = "go"  # room is set aside for it
    MORE = "more"  # as much as one call evicts was not enough
    STORED = "stored"  # it is a record now
    HELD = "held"  # it was there already, or a longer one that begins with it
    NOT_ANCHORED = "not_anchored"  # its parent is not there, or it was cleared meanwhile
    NO_ROOM = "no_room"  # nothing can be evicted for it
    NO_PARTS = "no_parts"  # its parts are not where they should be
    OTHER = "other"  # its name has other content
    EXPIRED = "expired"  # what was set aside is not known any more


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
    """What the index says to a store that begins: to GO on, with the life of its kind; or not."""

    answer: IndexAnswer
    life: bytes


@dataclass(frozen=True, slots=True)
class GivenUp:
    """A write whose parts nobody needs any more."""

    write_id: bytes
    part_count: int


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
        self._given_up: list[GivenUp] = []
        self._taught: Connection | None = None

    def names(self, write_id: bytes, count: int) -> list[bytes]:
        """Keys of the parts of one write."""
        return [f"{self._prefix}{write_id.hex()}:{number}".encode() for number in range(count)]

    def take_given_up(self) -> list[GivenUp]:
        """Those that were told of since this was asked."""
        given_up, self._given_up = self._given_up, []
        return given_up

    def note_removed(self, given_up: GivenUp) -> None:
        """Its parts are gone; the next call says so."""
        self._removed += given_up.write_id + b"%04d" % given_up.part_count

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
                    if not records[-1].is_whole:
                        raise _nonsense(one)
                    parent = records[-1].key
                if key:
                    if len(rows) * KEY_BYTES != len(job.keys):
                        raise _nonsense(reply)
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
            case [bytes() as answer, bytes() as life, int(evicted)]:
                self._census.evicted_more(evicted)
                return Begun(_answer(answer), life)
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

    def completed(self, sent: Sent, record: Record, write_id: bytes) -> IndexAnswer:
        """How `complete` ended: STORED, or why it is no record."""
        reply = self._answered(sent)
        match reply:
            case [bytes() as said]:
                answer = _answer(said)
                if answer is IndexAnswer.STORED:
                    self._census.stored(kind_of(record.root, record.layout), record.root)
                    self._known.note(record.key, write_id)
                return answer
        raise _nonsense(reply)

    def abandon(self, record: Record, write_id: bytes, life: bytes) -> Sent:
        """What was begun will not be completed."""
        name = kind_of(record.root, record.layout) + life
        return self._sent(b"abandon", *_parts_of(record, write_id), name)

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
        match reply:
            case [int(records), list() as numbers]:
                kinds = dict(_kinds(numbers))
                self._census.counted(kinds, records - sum(kind[2] for kind in kinds.values()))
                return
        raise _nonsense(reply)

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
            case [bytes() as told, result] if head := _HEAD.match(told):
                is_whole, bytes_used, count = map(int, head.groups())
                if not is_whole:  # it began anew
                    self._census.counted({})
                kinds_at = head.end() + _GIVEN_UP_BYTES * count
                self._census.said(bytes_used, _cut(told[kinds_at:], _KIND_BYTES))
                for one in _cut(told[head.end() : kinds_at], _GIVEN_UP_BYTES):
                    self._given_up.append(_given_up(one))
                return result
        raise _nonsense(reply)


def _cut(joined: bytes, size: int) -> list[bytes]:
    return [joined[at : at + size] for at in range(0, len(joined), size)]


def _given_up(one: bytes) -> GivenUp:
    count = one[WRITE_ID_BYTES:]
    if not count.isdigit():
        raise _nonsense(one)
    return GivenUp(one[:WRITE_ID_BYTES], int(count))


def _answer(said: bytes) -> IndexAnswer:
    try:
        return IndexAnswer(said.decode())
    except ValueError:
        raise _nonsense(said) from None


def _kinds(numbers: list[Reply]) -> Iterator[tuple[bytes, tuple[bytes, bytes, int]]]:
    """Of each kind that has records its fingerprint, salt digest, and how many."""
    said = dict(zip(numbers[::2], numbers[1::2], strict=False))
    for name, whose in said.items():
        if isinstance(name, bytes) and name[:1] == b"k" and isinstance(whose, bytes):
            count = said.get(b"n" + name[1:])
            if isinstance(count, bytes) and count.isdigit() and int(count):
                yield name[1:], (whose[:KEY_BYTES], whose[KEY_BYTES:], int(count))


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
    digests = row[_DIGESTS_AT:] if isinstance(row, bytes) else b""
    blocks, rest = divmod(len(digests), INNER_DIGEST_BYTES)
    is_ours = not rest and 0 < blocks <= job.layout.blocks_per_chunk and len(key) == KEY_BYTES
    if not is_ours or digests[-INNER_DIGEST_BYTES:] != key[:INNER_DIGEST_BYTES]:
        raise _nonsense(row)
    return Record(job.root, parent, key, digests, job.layout)


def _nonsense(reply: Reply) -> PlaceFailed:
    return PlaceFailed(f"its index answered what is no answer: {str(reply)[:80]}")
