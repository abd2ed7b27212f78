"""A thread's client of one server: each record is some parts, and a note that names them.

    store   parts, of a write of its own ─► family, mark ─► note      nobody finds it before
    lookup  clears ─► notes ─► whether their parts are there
    load    clears ─► note ─► parts, several under way, each proven while the next ones travel

Nothing is mirrored and nothing is listed: a server can do neither. It evicts by itself what nobody
has got for longest. Notes are got by each lookup and parts are not, so notes outlive them:
a record is found while the parts that a server evicts first are there.
"""

import os
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from kvtide.codec.passing import Proof
from kvtide.core.keys import INNER_DIGEST_BYTES, KEY_BYTES
from kvtide.core.layout import KVLayout
from kvtide.core.records import Record, RootName
from kvtide.errors import CorruptRecord, PlaceFailed
from kvtide.server_address import Address
from kvtide.tiers.base import LoadOutcome, LookupJob, StoreOutcome
from kvtide.tiers.infinistore import names
from kvtide.tiers.infinistore.client import Client
from kvtide.tiers.infinistore.loads import Missing, received
from kvtide.tiers.infinistore.names import Names, Note
from kvtide.tiers.infinistore.stores import Stores, family_of, removed, whole
from kvtide.tiers.remote import parts
from kvtide.tiers.remote.census import Census
from kvtide.tiers.remote.kinds import kind_of
from kvtide.tiers.remote.session import CALL_S_MAX, PUT_S_MAX, Put
from kvtide.tiers.scope import Scope

Result = TypeVar("Result")

NOTES_TOGETHER = 32
"""Notes that a lookup asks for before it looks at any: it ends at the first that is not there."""


class InfiniStoreSession:
    """See `Session`."""

    knows_names = False

    def __init__(
        self,
        address: Address,
        prefix: str,
        census: Census,
        call_s: float = CALL_S_MAX,
        put_s: float = PUT_S_MAX,
    ) -> None:
        """Nothing is connected yet."""
        self._client = Client(address)
        self._prefix = prefix
        self._census = census
        self._call_s = call_s
        self._put_s = put_s
        self._stores = Stores(self._client, prefix, census, self._names)

    # ---- the calls of a session

    def find(self, job: LookupJob) -> tuple[list[Record], bool]:
        return self._called(lambda: self._find(job))

    def load(self, record: Record, cells: Sequence[memoryview]) -> LoadOutcome:
        return self._called(lambda: self._load(record, cells))

    def store(
        self, next_put: Callable[[], Put | None], ended: Callable[[Put, StoreOutcome], None]
    ) -> None:
        while (put := next_put()) is not None:
            ended(put, self._stored(put))

    def clear(self, scope: Scope) -> None:
        self._called(lambda: self._clear(scope))

    def sweep(self) -> bool:
        return self._called(self._stores.sweep)

    def survey(self) -> None:
        self._called(self._survey)

    def interrupt(self) -> None:
        self._client.interrupt()

    def close(self) -> None:
        self._client.close()

    def _called(self, work: Callable[[], Result], limit_s: float | None = None) -> Result:
        try:
            self._client.begin(time.monotonic() + (limit_s or self._call_s))
            return work()
        except Exception:
            self._client.give_up()  # whatever it was, answers may be due
            raise

    def _names(self, record: Record) -> Names:
        """Of its kind, as of now."""
        return self._names_of(record.root, record.layout)

    def _names_of(self, root: RootName, layout: KVLayout) -> Names:
        nonces = self._client.read(names.clears_of(self._prefix, root))
        return Names(self._prefix, root, layout, names.cleared_by(nonces))

    # ---- lookups

    def _find(self, job: LookupJob) -> tuple[list[Record], bool]:
        known = self._names_of(job.root, job.layout)
        keys = [job.keys[at : at + KEY_BYTES] for at in range(0, len(job.keys), KEY_BYTES)]
        found = self._chunks(job, known, keys)
        last = found[-1].key if found else job.parent
        if len(found) == len(keys) and job.digests:
            child = self._child(job, known, last)
            return found + ([] if child is None else [child]), False
        return found, self._client.read([known.children(last)]) != [None]

    def _chunks(self, job: LookupJob, known: Names, keys: Sequence[bytes]) -> list[Record]:
        """Those of whole chunks, up to the first that is not there."""
        notes: list[Note] = []
        for begin in range(0, len(keys), NOTES_TOGETHER):
            asked = keys[begin : begin + NOTES_TOGETHER]
            contents = self._client.read([known.note(key) for key in asked])
            for key, content in zip(asked, contents, strict=True):
                note = names.read_note(content, job.root, job.layout)
                parent = notes[-1].record.key if notes else job.parent
                if note is None or (note.record.key, note.record.parent) != (key, parent):
                    return self._there(notes)
                notes.append(note)
        return self._there(notes)

    def _there(self, notes: Sequence[Note]) -> list[Record]:
        """Their records, up to the first of which parts are gone."""
        are_whole = whole(self._client, self._prefix, notes)
        count = [*are_whole, False].index(False)
        return [note.record for note in notes[:count]]

    def _child(self, job: LookupJob, known: Names, parent: bytes) -> Record | None:
        """The one that shares most blocks."""
        first = job.digests[:INNER_DIGEST_BYTES]
        (content,) = self._client.read([known.family(parent, first)])
        notes = family_of(self._client, self._prefix, known, content, (job.root, job.layout))
        children = [note.record for note in notes if note.record.parent == parent]
        return max(
            (one for one in children if _shared_blocks(one.digests, job.digests)),
            key=lambda one: _shared_blocks(one.digests, job.digests),
            default=None,
        )

    # ---- loads and stores

    def _load(self, record: Record, cells: Sequence[memoryview]) -> LoadOutcome:
        known = self._names(record)
        (content,) = self._client.read([known.note(record.key)])
        note = names.read_note(content, record.root, record.layout)
        if note is None or note.record != record:
            return LoadOutcome.ABSENT
        headers = parts.empty_headers(record)
        proof = Proof(record, note.write_id, headers)
        outcome = LoadOutcome.LOADED
        try:
            for pieces in received(self._client, self._prefix, note, headers, cells):
                proof.came(pieces)
        except (CorruptRecord, Missing) as error:
            is_gone = isinstance(error, Missing)
            outcome = LoadOutcome.ABSENT if is_gone else LoadOutcome.CORRUPT
            self._client.settle()
            removed(self._client, self._prefix, known, note)
            self._census.took(kind_of(record.root, record.layout), 0)
        return outcome

    def _stored(self, put: Put) -> StoreOutcome:
        return self._called(lambda: self._stores.store(put), self._put_s)

    # ---- the rest

    def _clear(self, scope: Scope) -> None:
        name = names.clear_of(self._prefix, scope)
        if not self._client.replace([(name, os.urandom(names.NONCE_BYTES))]):
            raise PlaceFailed("it has no room for what tells of a clear")
        self._stores.cleared(scope)
        self._census.cleared(scope)

    def _survey(self) -> None:
        """A server that was started again has lost all: so nothing is counted any more."""
        life = names.life_of(self._prefix)
        if self._client.read([life]) == [None]:
            self._census.counted({})
            self._client.replace([(life, os.urandom(names.NONCE_BYTES))])


def _shared_blocks(one: bytes, other: bytes) -> int:
    """With how many of the same blocks two runs of digests begin."""
    length = min(len(one), len(other))
    for at in range(0, length, INNER_DIGEST_BYTES):
        if one[at : at + INNER_DIGEST_BYTES] != other[at : at + INNER_DIGEST_BYTES]:
            return at // INNER_DIGEST_BYTES
    return length // INNER_DIGEST_BYTES
