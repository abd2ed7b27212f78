"""A thread's client of one deployment: records as parts and a row of the index.

    store   begin ─► parts, complete       nobody finds it before the last step; see stores.py
    load    locate, parts ─► proven        parts are asked for by a hint, which the index confirms

A part's name holds its write's random id, so no two writers ever touch the same one. A record is
there from the one call that puts its row into the index; a kill before it leaves parts that the
index knows as loose, which are removed by whoever stores next, a minute later.
"""

import logging
import ssl
from collections import deque
from collections.abc import Callable, Sequence
from typing import TypeAlias, TypeVar

from kvtide.codec.passing import Proof
from kvtide.core.records import Record
from kvtide.errors import CorruptRecord, PlaceFailed
from kvtide.redis_address import Address
from kvtide.tiers.base import LoadOutcome, LookupJob, StoreOutcome
from kvtide.tiers.redis.index import Index, WriteIds
from kvtide.tiers.redis.resp import Connection, ServerError
from kvtide.tiers.redis.routes import REDIRECTS_MAX, Limits, Redirected, Routes, failure_of
from kvtide.tiers.redis.stores import Stores
from kvtide.tiers.remote import parts
from kvtide.tiers.remote.census import Census
from kvtide.tiers.remote.session import Put
from kvtide.tiers.scope import Scope

logger = logging.getLogger("kvtide.tiers")

Result = TypeVar("Result")
_Part: TypeAlias = tuple[bytes, list[memoryview]]
_Read: TypeAlias = tuple[bytes, list[memoryview], Connection]

AHEAD_MAX = 4
"""Parts asked for before the first has come: the next is on its way while one is received, and a
server keeps no more than this for a reader that is slow."""


class RedisSession:
    """See `Session`."""

    knows_names = False

    def __init__(
        self,
        address: Address,
        tls: ssl.SSLContext | None,
        prefix: str,
        bytes_max: int,
        census: Census,
        known: WriteIds,
        limits: Limits,
    ) -> None:
        """Nothing is connected yet."""
        self._shown = f"redis {address}"
        self._limits = limits
        self._routes = Routes(address, tls, limits)
        self._known = known
        self._index = Index(self._routes, census, known, prefix, bytes_max)
        self._stores = Stores(self._routes, self._index, limits.put_s)

    # ---- the calls of a session

    def find(self, job: LookupJob) -> tuple[list[Record], bool]:
        return self._called(lambda: self._index.find(job), self._limits.call_s)

    def load(self, record: Record, cells: Sequence[memoryview]) -> LoadOutcome:
        return self._called(lambda: self._load(record, cells), self._limits.call_s)

    def store(
        self, next_put: Callable[[], Put | None], ended: Callable[[Put, StoreOutcome], None]
    ) -> None:
        try:
            self._called(lambda: self._stores.run(next_put, ended), self._limits.put_s)
        finally:
            self._stores.give_up()

    def clear(self, scope: Scope) -> int:
        return self._called(lambda: self._index.clear(scope), self._limits.call_s)

    def sweep(self) -> bool:
        return self._called(self._sweep, self._limits.call_s)

    def survey(self) -> None:
        self._called(self._index.survey, self._limits.call_s)

    def interrupt(self) -> None:
        self._routes.interrupt()

    def close(self) -> None:
        self._routes.close()

    # ---- what they do

    def _called(self, work: Callable[[], Result], limit_s: float) -> Result:
        try:
            self._routes.begin(limit_s)
            for _ in range(REDIRECTS_MAX):
                try:
                    return work()
                except Redirected as error:
                    self._routes.redirected(error)
            raise PlaceFailed("its servers name one another for the same key")
        except OSError as error:
            raise PlaceFailed(failure_of(error)) from error
        finally:
            self._routes.drop_busy()

    def _sweep(self) -> bool:
        is_more = self._index.sweep()
        self._stores.remove_given_up()
        return is_more

    def _load(self, record: Record, cells: Sequence[memoryview]) -> LoadOutcome:
        hint = self._known.take(record.key)
        locating = self._index.locate(record)
        write_id = hint or self._index.located(locating)
        if write_id is None:
            return LoadOutcome.ABSENT
        headers = parts.empty_headers(record)
        lengths = parts.lengths_of(record)
        names = self._index.names(write_id, len(lengths))
        reading = deque(zip(names, parts.cut(headers, cells, lengths), strict=True))
        under_way: deque[_Read] = deque()
        self._ask_ahead(reading, under_way)
        proof = Proof(record, write_id, headers)
        if hint is not None and self._index.located(locating) != hint:
            self._routes.drop_busy()  # these answers are of another write
            return self._load(record, cells)
        outcome = LoadOutcome.LOADED
        try:
            self._receive(reading, under_way, proof)
            if not proof.is_whole:
                outcome = LoadOutcome.ABSENT  # evicted by the server, or expired
        except CorruptRecord as error:
            key = record.key.hex()
            logger.warning("%s: record %s: %s; the record is removed", self._shown, key, error)
            outcome = LoadOutcome.CORRUPT
        if outcome is LoadOutcome.LOADED:
            self._known.note(record.key, write_id)
        else:
            self._routes.drop_busy()
            self._index.remove(record, write_id)
            self._stores.remove_given_up()
        return outcome

    def _ask_ahead(self, reading: deque[_Part], under_way: deque[_Read]) -> None:
        while reading and len(under_way) < AHEAD_MAX:
            name, pieces = reading.popleft()
            connection = self._routes.of(name)
            connection.send(b"GET", name)
            under_way.append((name, pieces, connection))

    def _receive(self, reading: deque[_Part], under_way: deque[_Read], proof: Proof) -> None:
        """Receive and prove parts, asking for the next meanwhile, up to one that is not there."""
        while under_way:
            name, pieces, connection = under_way.popleft()
            try:
                is_there = connection.read_into(pieces)
            except ServerError as error:
                raise self._routes.judge(name, error) from error
            if not is_there:
                return
            self._ask_ahead(reading, under_way)
            proof.came(pieces)
