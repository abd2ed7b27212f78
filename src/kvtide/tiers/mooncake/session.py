"""A thread's client of one store: each record is one value, which is asked for by its key.

    store   room ─► cells, headers ─► end ─► small values     nobody finds it before its end
    load    windows, each proven while the next one travels

Nothing is mirrored, and there is no index: the store has one, by name, which answers for five
hundred keys in one question. It evicts by itself, what nobody asked for longest, so a record may
lose its parent: it is not found then, and what was found may be gone when it is loaded.
"""

import logging
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from kvtide.codec.record import header_bytes, read_header, stored_bytes
from kvtide.core.keys import INNER_DIGEST_BYTES, KEY_BYTES
from kvtide.core.records import Record
from kvtide.errors import CorruptRecord, UnknownFormat
from kvtide.tiers.base import LoadOutcome, LookupJob, StoreOutcome
from kvtide.tiers.mooncake import names
from kvtide.tiers.mooncake.client import MEMORY_BYTES, NOT_THERE, Client, Place
from kvtide.tiers.mooncake.loads import loaded
from kvtide.tiers.mooncake.master import NAMES_MAX, Master
from kvtide.tiers.mooncake.names import TARGET_BYTES, Names, Target
from kvtide.tiers.mooncake.stores import Stores
from kvtide.tiers.remote.census import Census
from kvtide.tiers.remote.session import CALL_S_MAX, PUT_S_MAX, Put
from kvtide.tiers.scope import Scope

logger = logging.getLogger("kvtide.tiers")
Result = TypeVar("Result")

DANGLING_MAX = 4
"""Small values whose record is gone, that one lookup goes over."""


class MooncakeSession:
    """See `Session`."""

    knows_names = False

    def __init__(
        self,
        place: Place,
        master: Master,
        prefix: str,
        census: Census,
        call_s: float = CALL_S_MAX,
        put_s: float = PUT_S_MAX,
    ) -> None:
        """Nothing is started yet."""
        self._client = Client(place)
        self._master = master
        self._prefix = prefix
        self._census = census
        self._call_s = call_s
        self._put_s = put_s
        self._stores = Stores(self._client, prefix, census)
        self._is_told = False

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

    def clear(self, scope: Scope) -> int:
        return self._called(lambda: self._clear(scope))

    def sweep(self) -> bool:
        return False  # a clear leaves nothing

    def survey(self) -> None:
        self._called(self._survey)

    def interrupt(self) -> None:
        self._client.interrupt()

    def close(self) -> None:
        self._client.close()

    def _called(self, work: Callable[[], Result], limit_s: float | None = None) -> Result:
        self._client.limit(time.monotonic() + (limit_s or self._call_s))
        try:
            return work()
        except Exception:
            self._client.drop()  # whatever it was, answers may be due
            raise

    # ---- lookups

    def _find(self, job: LookupJob) -> tuple[list[Record], bool]:
        known = Names(self._prefix, job.root, job.layout)
        keys = [job.keys[at : at + KEY_BYTES] for at in range(0, len(job.keys), KEY_BYTES)]
        found = self._chunks(job, known, keys)
        last = found[-1].key if found else job.parent
        if len(found) == len(keys) and job.digests:
            child = self._child(job, known, last)
            return found + ([] if child is None else [child]), False
        return found, self._client.codes("exist", [known.children(last)])[0] == 1

    def _chunks(self, job: LookupJob, known: Names, keys: Sequence[bytes]) -> list[Record]:
        """Those of whole chunks, up to the first that is not there."""
        length = header_bytes(job.layout.shard_count, job.layout.blocks_per_chunk)
        together = MEMORY_BYTES // length
        found: list[Record] = []
        for begin in range(0, len(keys), together):
            asked = [known.record(key) for key in keys[begin : begin + together]]
            codes = self._client.heads(asked, length)
            for number, code in enumerate(codes):
                if code < 0:
                    return found
                parent = found[-1].key if found else job.parent
                record = self._read(job, parent, number * length, length)
                if record is None or record.key != keys[begin + number]:
                    return found
                found.append(record)
        return found

    def _child(self, job: LookupJob, known: Names, parent: bytes) -> Record | None:
        """The one that shares most blocks."""
        asked = known.blocks(job.digests)
        there = self._client.codes("exist", asked)
        held = [number for number, code in enumerate(there) if code == 1]
        for number in held[::-1][:DANGLING_MAX]:
            shared = job.digests[: (number + 1) * INNER_DIGEST_BYTES]
            record = self._target(job, known, parent, asked[number])
            if record is not None and record.digests.startswith(shared):
                return record
            self._client.codes("remove", [asked[number]], but=NOT_THERE)
        return None

    def _target(self, job: LookupJob, known: Names, parent: bytes, name: str) -> Record | None:
        """What a small value names, if it is there."""
        (code,) = self._client.heads([name], TARGET_BYTES)
        if code < 0:
            return None
        target = Target.unpack(self._client.memory[:TARGET_BYTES])
        if not 0 < target.blocks <= job.layout.blocks_per_chunk:
            return None
        length = header_bytes(job.layout.shard_count, target.blocks)
        (code,) = self._client.heads([known.record(target.key)], length)
        if code < 0:
            return None
        return self._read(job, parent, 0, length)

    def _read(self, job: LookupJob, parent: bytes, at: int, length: int) -> Record | None:
        """The record whose header is here, if it is one behind this parent."""
        try:
            record = read_header(self._client.memory[at : at + length]).record
        except (CorruptRecord, UnknownFormat):
            return None
        is_meant = (record.root, record.layout, record.parent) == (job.root, job.layout, parent)
        return record if is_meant else None

    # ---- loads and stores

    def _load(self, record: Record, cells: Sequence[memoryview]) -> LoadOutcome:
        known = names.names_of(self._prefix, record)
        name = known.record(record.key)
        outcome = loaded(self._client, name, record, cells)
        if outcome is LoadOutcome.CORRUPT:
            self._client.codes("remove", [name], but=NOT_THERE)
            self._census.took(known.kind, stored_bytes(record.layout, record.blocks))
        return outcome

    def _stored(self, put: Put) -> StoreOutcome:
        return self._called(lambda: self._stores.store(put), self._put_s)

    # ---- the rest

    def _clear(self, scope: Scope) -> int:
        records = names.pattern_of(self._prefix, scope, "r")
        count = self._client.code("remove_all", records)
        self._stores.say_cleared()
        self._client.code("remove_all", names.pattern_of(self._prefix, scope))
        self._census.cleared(scope)
        return count

    def _survey(self) -> None:
        self._client.codes("exist", [f"{self._prefix}:{names.VERSION}"])
        until_s = time.monotonic() + self._call_s / 2
        try:
            numbers = self._master.numbers(until_s)
            self._census.has(numbers.bytes_used, numbers.bytes_max)
            if numbers.names <= NAMES_MAX:
                self._census.counted(names.kinds_in(self._prefix, self._master.names(until_s)))
        except OSError as error:
            if not self._is_told:
                self._is_told = True
                logger.warning("a Mooncake master does not tell how much there is: %s", error)
