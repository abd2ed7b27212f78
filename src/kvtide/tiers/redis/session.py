"""A thread's client of one deployment: records as parts and a row of the index.

    store   begin ─► parts ─► complete       nobody finds it before the last step
    load    locate ─► parts, proven

A part's name holds its write's random id, so no two writers ever touch the same one. A record is
there from the one call that puts its row into the index; a kill before it leaves parts that the
index knows as loose, which are removed by whoever stores next, a minute later.
"""

import ssl
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from kvtide.core.records import Record
from kvtide.errors import CorruptRecord, PlaceFailed
from kvtide.tiers.base import LoadOutcome, LookupJob, StoreOutcome
from kvtide.redis_address import Address
from kvtide.tiers.redis.index import Index
from kvtide.tiers.redis.resp import Connection, ServerError
from kvtide.tiers.redis.routes import REDIRECTS_MAX, Limits, Redirected, Routes
from kvtide.tiers.remote import parts
from kvtide.tiers.remote.census import Census
from kvtide.tiers.scope import Scope

Result = TypeVar("Result")

AHEAD_MAX = 4
"""Parts asked for before the first has come: the next is on its way while one is received, and a
server keeps no more than this for a reader that is slow."""
UNLINKED_MAX = 512
"""Keys of one command."""

_WHY = {
    "held": StoreOutcome.HELD,
    "not_anchored": StoreOutcome.NOT_ANCHORED,
    "no_room": StoreOutcome.NO_ROOM,
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
        limits: Limits,
    ) -> None:
        """Nothing is connected yet."""
        self._limits = limits
        self._routes = Routes(address, tls, limits)
        self._index = Index(self._routes, census, prefix, bytes_max)

    # ---- the calls of a session

    def find(self, job: LookupJob) -> tuple[list[Record], bool]:
        return self._called(lambda: self._index.find(job), self._limits.call_s)

    def load(self, record: Record, cells: Sequence[memoryview]) -> LoadOutcome:
        return self._called(lambda: self._load(record, cells), self._limits.call_s)

    def store(self, record: Record, cells: Sequence[memoryview]) -> StoreOutcome:
        return self._called(lambda: self._store(record, cells), self._limits.put_s)

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
        write_id = self._index.locate(record)
        if write_id is None:
            return LoadOutcome.ABSENT
        headers = parts.empty_headers(record.layout, record.blocks)
        lengths = parts.lengths_of(record)
        names = self._index.names(write_id, len(lengths))
        outcome = LoadOutcome.LOADED
        try:
            if not self._get(zip(names, parts.cut(headers, cells, lengths), strict=True)):
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

    def _get(self, wanted: Iterable[tuple[bytes, list[memoryview]]]) -> bool:
        """Receive parts, some asked for ahead; whether all were there."""
        under_way: deque[tuple[bytes, list[memoryview], Connection]] = deque()
        is_there = True
        rest = iter(wanted)
        while is_there or under_way:
            while is_there and len(under_way) < AHEAD_MAX:
                part = next(rest, None)
                if part is None:
                    break
                connection = self._routes.of(part[0])
                connection.send(b"GET", part[0])
                under_way.append((*part, connection))
            if not under_way:
                break
            name, pieces, connection = under_way.popleft()
            try:
                is_there &= connection.read_into(pieces)
            except ServerError as error:
                raise self._routes.judge(name, error) from error
        return is_there

    def _store(self, record: Record, cells: Sequence[memoryview]) -> StoreOutcome:
        write_id = parts.random_write_id()
        begun = self._index.begin(record, write_id)
        while begun.why == "more":
            self._remove_victims()
            begun = self._index.begin(record, write_id)
        self._remove_victims()
        if begun.why != "go":
            return _WHY[begun.why]
        headers = parts.headers_of(record, write_id, cells)
        lengths = parts.lengths_of(record)
        names = self._index.names(write_id, len(lengths))
        error = self._put(names, parts.cut(headers, cells, lengths))
        if error is not None:
            self._index.abandon(record, write_id)
            self._remove_victims()
            if error.code == "OOM":
                return StoreOutcome.NO_ROOM
            raise PlaceFailed(str(error))
        why = self._index.complete(record, write_id, begun.life)
        self._remove_victims()
        return _WHY[why]

    def _put(
        self, names: Sequence[bytes], values: Iterable[list[memoryview]]
    ) -> ServerError | None:
        """Send parts, one behind the other; what the first that was refused was refused with."""
        sent = []
        for name, pieces in zip(names, values, strict=True):
            connection = self._routes.of(name)
            connection.send(b"SET", name, pieces)
            sent.append((name, connection))
        return self._refusal(sent)

    def _refusal(self, sent: Sequence[tuple[bytes, Connection]]) -> ServerError | None:
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
        victims = self._index.victims
        sent = []
        for name in victims:
            connection = self._routes.of(name)
            connection.send(b"UNLINK", name)
            sent.append((name, connection))
        refused = self._refusal(sent)
        if refused is not None:
            raise PlaceFailed(str(refused))
        self._index.are_removed()
