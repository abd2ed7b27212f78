"""A thread's client of one bucket.

    store   room ─► parts behind the first ─► the first     nobody finds it before that
    load    all parts at once ─► proven in order

Every object is written once, under a name with its write's random id, so there is nothing that two
could write at the same time, and no store has to know conditions. The writing thread lists, too:
with each survey what is new, and now and then all names, a page at a time between stores.
"""

import asyncio
import logging
import os
import traceback
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

from kvtide.codec.passing import HeaderWriter, Proof
from kvtide.core.records import Record
from kvtide.errors import CorruptRecord, PlaceFailed
from kvtide.tiers.base import LoadOutcome, LookupJob, StoreOutcome
from kvtide.tiers.remote import parts
from kvtide.tiers.remote.session import Put
from kvtide.tiers.s3 import names
from kvtide.tiers.s3.client import Client, gathered
from kvtide.tiers.s3.listing import Listing
from kvtide.tiers.s3.mirror import Mirror
from kvtide.tiers.s3.names import Message, Written, message_name
from kvtide.tiers.s3.room import Room
from kvtide.tiers.scope import Scope

logger = logging.getLogger("kvtide.s3")

Result = TypeVar("Result")

UNDER_WAY_MAX = 8
"""Stores of one session: what one connection brings, so often."""
PARTS_MAX = 8
"""Of one record, at once: a thread that loads has so many times `PART_BYTES` beside its cells."""
FIRST_LOOK_S = 0.5
"""So much of the first survey lists what is there: all of a small bucket, before anybody asks."""


@dataclass(frozen=True, slots=True)
class Limits:
    """How long a call may take, and a store."""

    call_s: float
    put_s: float


@dataclass(slots=True, eq=False)
class _UnderWay:
    """A store that has not ended: it ended before it began, or is being sent."""

    put: Put
    written: Written
    outcome: StoreOutcome | None = None
    sending: "asyncio.Task[None] | None" = None
    length_bytes: int = 0


class S3Session:
    """See `Session`."""

    knows_names = True

    def __init__(self, client: Client, mirror: Mirror, bytes_max: int, limits: Limits) -> None:
        """Nothing is asked yet."""
        self._client = client
        self._mirror = mirror
        self._limits = limits
        self._runner = asyncio.Runner(loop_factory=asyncio.SelectorEventLoop)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._call: asyncio.Task[Any] | None = None
        self._is_interrupted = False
        self._writer = os.urandom(8).hex()
        self._listing = Listing(client, mirror, self._writer)
        self._room = Room(client, mirror, self._writer, bytes_max, self._listing)
        self._under_way: deque[_UnderWay] = deque()

    # ---- the calls of a session

    def find(self, job: LookupJob) -> tuple[list[Record], bool]:
        return self._mirror.find(job)

    def load(self, record: Record, cells: Sequence[memoryview]) -> LoadOutcome:
        return self._called(self._load(record, cells), self._limits.call_s)

    def store(
        self, next_put: Callable[[], Put | None], ended: Callable[[Put, StoreOutcome], None]
    ) -> None:
        self._called(self._store_all(next_put, ended), None)

    def clear(self, scope: Scope) -> int:
        return self._called(self._clear(scope), self._limits.call_s)

    def sweep(self) -> bool:
        return self._called(self._sweep(), self._limits.call_s)

    def survey(self) -> None:
        self._called(self._survey(), self._limits.call_s)

    def interrupt(self) -> None:
        self._is_interrupted = True
        if self._loop is not None:
            with suppress(RuntimeError):  # it was closed just now
                self._loop.call_soon_threadsafe(self._break_off)

    def _break_off(self) -> None:
        if self._call is not None:
            self._call.cancel()

    def close(self) -> None:
        self._runner.close()

    def _called(self, work: Coroutine[Any, Any, Result], limit_s: float | None) -> Result:
        async def bounded() -> Result:
            self._call = asyncio.current_task()
            if self._is_interrupted:
                work.close()
                raise PlaceFailed("it is being closed")
            async with asyncio.timeout(limit_s):
                return await work

        self._loop = self._runner.get_loop()
        try:
            return self._runner.run(bounded())
        except PlaceFailed as error:
            reason = str(error)
            _let_go(error)
        except TimeoutError as error:
            reason = "it did not answer in time"
            _let_go(error)
        except asyncio.CancelledError as error:
            reason = "it is being closed"
            _let_go(error)
        finally:
            self._call = None
        raise PlaceFailed(reason)

    # ---- loads

    async def _load(self, record: Record, cells: Sequence[memoryview]) -> LoadOutcome:
        loading = self._mirror.begin_load(record)
        if loading is None:
            return LoadOutcome.ABSENT
        try:
            outcome = await self._got(record, loading.written, cells)
        finally:
            self._mirror.end_load(loading)
        if outcome is not LoadOutcome.LOADED:
            self._mirror.remove(loading.written)
            await self._delete_given_up()
        return outcome

    async def _got(
        self, record: Record, written: Written, cells: Sequence[memoryview]
    ) -> LoadOutcome:
        headers = parts.empty_headers(record)
        lengths = names.part_lengths(record.layout, record.blocks)
        rows = list(parts.cut(headers, cells, lengths))
        proof = Proof(record, written.write_id, headers)
        ahead = asyncio.Semaphore(PARTS_MAX)
        each = zip(names.names_of(self._mirror.top, written, record.layout), rows, strict=True)

        async def got(name: str, pieces: list[memoryview]) -> bool:
            async with ahead:
                return await self._client.get_into(name, pieces)

        calls = [asyncio.ensure_future(got(name, pieces)) for name, pieces in each]
        try:
            for call, pieces in zip(calls, rows, strict=True):
                if not await call:
                    return LoadOutcome.ABSENT
                proof.came(pieces)
        except CorruptRecord as error:
            place, key = f"{self._client.bucket}/{self._mirror.top}", record.key.hex()
            # Its words alone: who keeps what was logged would keep the cells by its frames.
            logger.warning("s3 %s: record %s: %s; it is removed", place, key, str(error))
            return LoadOutcome.CORRUPT
        finally:
            await gathered(calls, are_needed=False)
        return LoadOutcome.LOADED

    # ---- stores

    async def _store_all(
        self, next_put: Callable[[], Put | None], ended: Callable[[Put, StoreOutcome], None]
    ) -> None:
        under_way = self._under_way
        try:
            while True:
                while len(under_way) < UNDER_WAY_MAX and (put := next_put()) is not None:
                    under_way.append(one := self._taken(put))
                    if one.outcome is None:
                        await self._begin(one)
                if not under_way:
                    break
                await self._end(ended)
            await self._delete_given_up()
        finally:
            begun = [one for one in under_way if one.sending is not None]
            under_way.clear()
            await gathered([one.sending for one in begun if one.sending], are_needed=False)
            for one in begun:
                self._mirror.failed(one.put.record, one.written)

    def _taken(self, put: Put) -> _UnderWay:
        record = put.record
        written = names.written(record, self._mirror.next_stamp(), put.write_id)
        outcome = self._mirror.before(record, is_behind=record.parent in self._keys_on_their_way())
        if len(names.record_name(self._mirror.top, written)) > names.NAME_BYTES_MAX:
            outcome = StoreOutcome.NO_ROOM
        return _UnderWay(put, written, outcome)

    def _keys_on_their_way(self) -> set[bytes]:
        return {one.put.record.key for one in self._under_way if one.outcome is None}

    async def _begin(self, one: _UnderWay) -> None:
        record = one.put.record
        lengths = names.part_lengths(record.layout, record.blocks)
        one.length_bytes = sum(lengths)
        on_their_way = sum(other.length_bytes for other in self._under_way if other is not one)
        keep = [other.put.record.parent for other in self._under_way]
        async with asyncio.timeout(self._limits.call_s):
            has_room = await self._room.take(one.length_bytes, on_their_way, keep)
        if not has_room:
            one.outcome, one.length_bytes = StoreOutcome.NO_ROOM, 0
            return
        headers = parts.empty_headers(record)
        rows = list(parts.cut(headers, one.put.cells, lengths))
        writer = HeaderWriter(record, one.put.write_id, headers)
        for pieces in rows:
            writer.passed(pieces)
        one.sending = asyncio.ensure_future(self._send(one.written, record, rows))

    async def _send(self, written: Written, record: Record, rows: list[list[memoryview]]) -> None:
        first, *others = names.names_of(self._mirror.top, written, record.layout)
        ahead = asyncio.Semaphore(PARTS_MAX)

        async def put(name: str, pieces: list[memoryview]) -> None:
            async with ahead:
                await self._client.put(name, pieces)

        each = zip(others, rows[1:], strict=True)
        async with asyncio.timeout(self._limits.put_s):
            await gathered([asyncio.ensure_future(put(name, pieces)) for name, pieces in each])
            await self._client.put(first, rows[0])

    async def _end(self, ended: Callable[[Put, StoreOutcome], None]) -> None:
        """The first that is under way."""
        one = self._under_way[0]
        if one.outcome is None:
            assert one.sending is not None, one
            await one.sending
            is_found = self._mirror.stored(one.put.record, one.written)
            one.outcome = StoreOutcome.STORED if is_found else StoreOutcome.NOT_ANCHORED
        self._under_way.popleft()
        ended(one.put, one.outcome)

    # ---- the rest

    async def _delete_given_up(self) -> bool:
        """Whether there were any."""
        return await self._listing.delete_given_up()

    async def _clear(self, scope: Scope) -> int:
        await self._listing.refresh()  # later than all that is there
        message = Message(self._mirror.next_stamp(), self._writer, "clear", scope=scope)
        await self._client.put(message_name(self._mirror.top, message), [b""])
        count = self._mirror.clear(message)
        await self._delete_given_up()  # all of a small one; the others are swept
        return count

    async def _survey(self) -> None:
        try:
            await self._listing.refresh()
            await self._room.end_old()
            await self._listing.tell_used()
        except BaseException:
            self._listing.look_again()
            raise
        is_first = self._listing.is_first
        self._listing.begin_look()
        with suppress(TimeoutError):  # what was learned is kept: sweeps go on
            async with asyncio.timeout(FIRST_LOOK_S):
                while is_first and await self._sweep():
                    pass
        self._mirror.tell_all()

    async def _sweep(self) -> bool:
        if await self._delete_given_up():
            return True
        return await self._listing.look()


def _let_go(error: BaseException | None) -> None:
    """Of all frames that it came through: they have cells, and calls that have this error, and
    nobody collects cycles."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.with_traceback(None).__context__
