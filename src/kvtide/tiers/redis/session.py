"""A thread's client of one deployment: records as parts and a row of the index.

    store   begin ─► parts, complete       nobody finds it before the last step; the next one's
                                           begin goes with it, so a row of stores waits once each
    load    locate, parts ─► proven        parts are asked for by a hint, which the index confirms

A part's name holds its write's random id, so no two writers ever touch the same one. A record is
there from the one call that puts its row into the index; a kill before it leaves parts that the
index knows as loose, which are removed by whoever stores next, a minute later.
"""

import ssl
from collections import deque
from collections.abc import Callable, Sequence
from typing import TypeAlias, TypeVar

from kvtide.core.records import Record
from kvtide.errors import CorruptRecord, PlaceFailed
from kvtide.redis_address import Address
from kvtide.tiers.base import LoadOutcome, LookupJob, StoreOutcome
from kvtide.tiers.redis.index import Begun, Index, WriteIds
from kvtide.tiers.redis.resp import Connection, ServerError
from kvtide.tiers.redis.routes import REDIRECTS_MAX, Limits, Redirected, Routes
from kvtide.tiers.remote import parts
from kvtide.tiers.remote.census import Census
from kvtide.tiers.remote.session import Put
from kvtide.tiers.scope import Scope

Result = TypeVar("Result")
_Part: TypeAlias = tuple[bytes, list[memoryview]]
_Read: TypeAlias = tuple[bytes, list[memoryview], Connection]

AHEAD_MAX = 4
"""Parts asked for before the first has come: the next is on its way while one is received, and a
server keeps no more than this for a reader that is slow."""
UNLINKED_MAX = 512
"""Keys of one command."""

_WHY = {
    "held": StoreOutcome.HELD,
    "not_anchored": StoreOutcome.NOT_ANCHORED,
    "no_room": StoreOutcome.NO_ROOM,
    "no_parts": StoreOutcome.NO_ROOM,
    "other": StoreOutcome.FAILED,
    "expired": StoreOutcome.FAILED,  # what was set aside is not known any more
    "stored": StoreOutcome.STORED,
}


class RedisSession:
    """See `Session`."""

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
        self._limits = limits
        self._routes = Routes(address, tls, limits)
        self._known = known
        self._index = Index(self._routes, census, known, prefix, bytes_max)
        self._begun: dict[bytes, Begun] = {}

    # ---- the calls of a session

    def find(self, job: LookupJob) -> tuple[list[Record], bool]:
        return self._called(lambda: self._index.find(job), self._limits.call_s)

    def load(self, record: Record, cells: Sequence[memoryview]) -> LoadOutcome:
        return self._called(lambda: self._load(record, cells), self._limits.call_s)

    def store(self, put: Put, following: Put | None) -> StoreOutcome:
        return self._called(lambda: self._store(put, following), self._limits.put_s)

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
        except OSError as error:  # TimeoutError is one, and ssl.SSLError
            said = "it did not answer in time" if isinstance(error, TimeoutError) else str(error)
            raise PlaceFailed(said) from error
        finally:
            self._routes.drop_busy()

    def _sweep(self) -> bool:
        is_more = self._index.sweep()
        self._remove_victims()
        return is_more

    def _load(self, record: Record, cells: Sequence[memoryview]) -> LoadOutcome:
        hint = self._known.take(record.key)
        locating = self._index.locate(record)
        write_id = hint or self._index.located(locating)
        if write_id is None:
            return LoadOutcome.ABSENT
        headers = parts.empty_headers(record.layout, record.blocks)
        lengths = parts.lengths_of(record)
        names = self._index.names(write_id, len(lengths))
        reading = deque(zip(names, parts.cut(headers, cells, lengths), strict=True))
        under_way: deque[_Read] = deque()
        self._ask_ahead(reading, under_way)
        if hint is not None and self._index.located(locating) != hint:
            self._routes.drop_busy()  # these answers are of another write
            return self._load(record, cells)
        outcome = LoadOutcome.LOADED
        try:
            if not self._receive(reading, under_way):
                outcome = LoadOutcome.ABSENT  # evicted by the server, or expired
            else:
                parts.prove(record, write_id, headers, cells)
        except CorruptRecord:
            outcome = LoadOutcome.CORRUPT
        if outcome is not LoadOutcome.LOADED:
            self._routes.drop_busy()
            self._index.remove(record, write_id)
            self._remove_victims()
        return outcome

    def _ask_ahead(self, reading: deque[_Part], under_way: deque[_Read]) -> None:
        while reading and len(under_way) < AHEAD_MAX:
            name, pieces = reading.popleft()
            connection = self._routes.of(name)
            connection.send(b"GET", name)
            under_way.append((name, pieces, connection))

    def _receive(self, reading: deque[_Part], under_way: deque[_Read]) -> bool:
        """Receive parts, asking for the next meanwhile; whether all were there."""
        is_there = True
        while under_way:
            name, pieces, connection = under_way.popleft()
            try:
                is_there &= connection.read_into(pieces)
            except ServerError as error:
                raise self._routes.judge(name, error) from error
            if is_there:
                self._ask_ahead(reading, under_way)
        return is_there

    def _store(self, put: Put, following: Put | None) -> StoreOutcome:
        for write_id in [one for one in self._begun if one != put.write_id]:
            self._index.abandon(self._begun.pop(write_id).record, write_id)
        why = self._tried(put, following, is_full=False)
        if why == "no_parts":  # what the server has room for is less than the cap
            why = self._tried(put, None, is_full=True)
        return _WHY[why]

    def _tried(self, put: Put, following: Put | None, *, is_full: bool) -> str:
        """What the index says to it in the end; "no_parts": the server had no memory for them."""
        record, write_id = put.record, put.write_id
        begun = self._begun.pop(write_id, None) or self._begin(put, is_full=is_full)
        while begun.why == "more":
            self._remove_victims()
            begun = self._begin(put, is_full=is_full)
        if begun.why != "go":
            self._remove_victims()
            return begun.why
        lengths = parts.lengths_of(record)
        names = self._index.names(write_id, len(lengths))
        sent = self._unlink_victims()
        for name, pieces in zip(names, parts.cut(put.headers(), put.cells, lengths), strict=True):
            sent.append((name, self._routes.of(name)))
            sent[-1][1].send(b"SET", name, pieces)
        why = "no_parts"
        if self._routes.are_one:  # in order on one server, which looks for them
            completing = self._index.complete(record, write_id, begun.life, names)
            beginning = None if following is None else self._index.begin(following)
            refused = self._refusal(sent)
            self._index.are_removed()
            why = self._index.completed(completing, record, write_id)
            if following is not None and beginning is not None:
                self._begun[following.write_id] = self._index.begun(beginning, following)
        else:
            refused = self._refusal(sent)
            self._index.are_removed()
            if refused is None:
                completing = self._index.complete(record, write_id, begun.life, ())
                why = self._index.completed(completing, record, write_id)
            else:
                self._index.abandon(record, write_id)
        self._remove_victims()
        if refused is not None and refused.code != "OOM":
            raise PlaceFailed(str(refused))
        return why

    def _begin(self, put: Put, *, is_full: bool) -> Begun:
        return self._index.begun(self._index.begin(put, is_full=is_full), put)

    def _refusal(self, sent: Sequence[tuple[bytes, Connection]]) -> ServerError | None:
        """What the first that was refused was refused with."""
        refused = None
        for name, connection in sent:
            reply = connection.read()
            if isinstance(reply, ServerError):
                error = self._routes.judge(name, reply)
                if isinstance(error, Redirected):
                    raise error
                refused = refused or reply
        return refused

    def _remove_victims(self) -> None:
        """Parts that the index has given up; those that are gone already are no error."""
        refused = self._refusal(self._unlink_victims())
        if refused is not None:
            raise PlaceFailed(str(refused))
        self._index.are_removed()

    def _unlink_victims(self) -> list[tuple[bytes, Connection]]:
        sent = []
        for name in self._index.victims:
            sent.append((name, self._routes.of(name)))
            sent[-1][1].send(b"UNLINK", name)
        return sent
