"""Stores of one session, several under way: a server that takes bytes never waits for us.

    begin 1, begin 2 │ parts 1, complete 1, begin 3 │ parts 2, complete 2, begin 4 │ …   sent
                     ▲ begin 1                      ▲ begin 2                      ▲      read

Room is set aside for a record while the parts of the one before it are sent, and what the server
says to those is read when it is needed. So a record may begin while its parent is not there yet;
whether it is, its own `complete` finds out. On several servers a record is completed only when all
have its parts, since no order holds between them.

Ownership: one thread's. Invariant: `_due` reads answers in the order in which they were asked for.
"""

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from kvtide.codec.passing import HeaderWriter
from kvtide.errors import PlaceFailed
from kvtide.tiers.base import StoreOutcome
from kvtide.tiers.redis.index import Begun, Index, Sent
from kvtide.tiers.redis.resp import Connection, ServerError
from kvtide.tiers.redis.routes import Redirected, Routes
from kvtide.tiers.remote import parts
from kvtide.tiers.remote.session import Put

UNDER_WAY_MAX = 3
"""One whose answers are to come, one that is sent, one for which room is set aside."""
_WHY = {
    "held": StoreOutcome.HELD,
    "not_anchored": StoreOutcome.NOT_ANCHORED,
    "no_room": StoreOutcome.NO_ROOM,
    "no_parts": StoreOutcome.NO_ROOM,
    "other": StoreOutcome.FAILED,
    "expired": StoreOutcome.FAILED,  # what was set aside is not known any more
    "stored": StoreOutcome.STORED,
}


@dataclass(slots=True, eq=False)
class _UnderWay:
    """A store that has not ended.

    Attributes:
        parent: that of its parent, as long as it has not ended, either.
        is_orphan: its parent has ended, and is not kept.
        until_s: it has ended by then.
        begun: what the index said to it; None: that is to come.
        is_sent: its parts are, too.
        refusal: what a server would not take a part for.
        why: how it ended, as the index says it; empty: it has not.
        is_full: its server had no memory for it, and it is tried with less than the cap.
    """

    put: Put
    parent: "_UnderWay | None"
    until_s: float
    begun: Begun | None = None
    is_sent: bool = False
    refusal: ServerError | None = None
    why: str = ""
    is_full: bool = False
    is_orphan: bool = False

    @property
    def is_lost(self) -> bool:
        """Whether nothing can be kept behind it."""
        return bool(self.why) and not _WHY[self.why].is_kept


class Stores:
    """See above."""

    def __init__(self, routes: Routes, index: Index, put_s: float) -> None:
        self._routes = routes
        self._index = index
        self._put_s = put_s
        self._under_way: deque[_UnderWay] = deque()
        self._due: deque[Callable[[], None]] = deque()

    def run(
        self, next_put: Callable[[], Put | None], ended: Callable[[Put, StoreOutcome], None]
    ) -> None:
        """Carry out what `next_put` gives, until that is nothing and all has ended. Where a server
        names another one, what has not ended begins again when this is called again."""
        self._due.clear()
        for one in self._under_way:
            if not one.why:
                self._begin(one)
        while True:
            self._end(ended)
            self._take(next_put)
            unsent = next((one for one in self._under_way if not (one.is_sent or one.why)), None)
            if unsent is not None and unsent.begun is not None:
                self._send(unsent, unsent.begun)
            elif self._due:
                self._read_next()
            else:
                assert not self._under_way, self._under_way
                return

    def give_up(self) -> None:
        """What has not ended will not: the call has failed."""
        self._under_way.clear()
        self._due.clear()

    def remove_victims(self) -> None:
        """Parts that the index has given up; those that are gone already are no error."""
        self._due.clear()
        self._unlink()
        while self._due:
            self._read_next()

    # ---- one store

    def _take(self, next_put: Callable[[], Put | None]) -> None:
        """Set room aside for the next, while there is one to send."""
        while len(self._under_way) < UNDER_WAY_MAX:
            if sum(not one.is_sent for one in self._under_way) > 1:
                return
            put = next_put()
            if put is None:
                return
            above = (one for one in self._under_way if one.put.record.key == put.record.parent)
            until_s = time.monotonic() + self._put_s
            self._under_way.append(_UnderWay(put, next(above, None), until_s))
            self._begin(self._under_way[-1])

    def _begin(self, one: _UnderWay) -> None:
        one.begun, one.refusal, one.is_sent, one.why = None, None, False, ""
        self._routes.limit(self._under_way[0].until_s)
        parents = {each.put.record.parent for each in self._under_way}
        is_behind = one.parent is not None
        sent = self._index.begin(one.put, parents, is_behind=is_behind, is_full=one.is_full)
        self._due.append(partial(self._read_begun, one, sent))

    def _read_begun(self, one: _UnderWay, sent: Sent) -> None:
        begun = self._index.begun(sent)
        if begun.why == "more":  # as much as one call evicts was not enough
            self._unlink()
            self._begin(one)
            return
        one.begun = begun
        if begun.why != "go":
            one.why = begun.why

    def _send(self, one: _UnderWay, begun: Begun) -> None:
        """Its parts, summed as they go; so those with headers last."""
        one.is_sent = True
        record, write_id = one.put.record, one.put.write_id
        if one.is_orphan or (one.parent is not None and one.parent.is_lost):
            sent = self._index.abandon(record, write_id)
            self._due.append(partial(self._read_abandoned, one, sent, "not_anchored"))
            return
        lengths = parts.lengths_of(record)
        names = self._index.names(write_id, len(lengths))
        headers = parts.empty_headers(record)
        writer = HeaderWriter(record, write_id, headers)
        memory = {id(header.obj) for header in headers}
        asked, last = [], []
        cut = parts.cut(headers, one.put.cells, lengths)
        for name, pieces in zip(names, cut, strict=True):
            writer.passed(pieces)
            if any(id(piece.obj) in memory for piece in pieces):
                last.append((name, pieces))
            else:
                asked.append(self._set(name, pieces))
        asked += [self._set(name, pieces) for name, pieces in last]
        if self._routes.are_one:  # in order on one server, which looks for the parts
            self._due.append(partial(self._read_parts, one, asked))
            self._complete(one, begun, names)
        else:
            self._due.append(partial(self._read_all_parts, one, begun, asked))

    def _set(self, name: bytes, pieces: Sequence[memoryview]) -> tuple[bytes, Connection]:
        connection = self._routes.of(name)
        connection.send(b"SET", name, pieces)
        return name, connection

    def _read_parts(self, one: _UnderWay, asked: list[tuple[bytes, Connection]]) -> None:
        one.refusal = self._refusal(asked)

    def _read_all_parts(
        self, one: _UnderWay, begun: Begun, asked: list[tuple[bytes, Connection]]
    ) -> None:
        one.refusal = self._refusal(asked)
        if one.refusal is None:
            self._complete(one, begun, ())
            return
        sent = self._index.abandon(one.put.record, one.put.write_id)
        self._due.append(partial(self._read_abandoned, one, sent, "no_parts"))

    def _complete(self, one: _UnderWay, begun: Begun, names: Sequence[bytes]) -> None:
        sent = self._index.complete(one.put.record, one.put.write_id, begun.life, names)
        self._due.append(partial(self._read_completed, one, sent))

    def _read_completed(self, one: _UnderWay, sent: Sent) -> None:
        one.why = self._index.completed(sent, one.put.record, one.put.write_id)

    def _read_abandoned(self, one: _UnderWay, sent: Sent, why: str) -> None:
        self._index.abandoned(sent)
        one.why = why

    def _end(self, ended: Callable[[Put, StoreOutcome], None]) -> None:
        """Those that have, in order. What a full server had no memory for is tried once more, by
        less than the cap, with all that fell with it."""
        while self._under_way and self._under_way[0].why:
            one = self._under_way[0]
            is_refused = one.refusal is not None and one.refusal.code != "OOM"
            if is_refused or (one.why == "no_parts" and not one.is_full):
                while self._due:
                    self._read_next()
                if is_refused:
                    raise PlaceFailed(str(one.refusal))
                for each in self._under_way:
                    if each.is_lost:
                        each.is_full = True
                        self._begin(each)
                return
            self._under_way.popleft()
            for each in self._under_way:
                if each.parent is one:  # nothing of what has ended, and no cell, stays known
                    each.parent, each.is_orphan = None, one.is_lost
            ended(one.put, _WHY[one.why])

    # ---- answers

    def _read_next(self) -> None:
        if self._under_way:
            self._routes.limit(self._under_way[0].until_s)
        self._due.popleft()()
        self._unlink()

    def _unlink(self) -> None:
        """Have the parts of all victims removed: ahead of whatever is sent from now on."""
        for victim in self._index.take_victims():
            names = self._index.names_of_victim(victim)
            asked = []
            for together in [names] if self._routes.are_one else [[name] for name in names]:
                connection = self._routes.of(together[0])
                connection.send(b"UNLINK", *together)
                asked.append((together[0], connection))
            self._due.append(partial(self._read_unlinked, victim, asked))

    def _read_unlinked(self, victim: bytes, asked: list[tuple[bytes, Connection]]) -> None:
        refused = self._refusal(asked)
        if refused is not None:
            raise PlaceFailed(str(refused))
        self._index.is_removed(victim)

    def _refusal(self, asked: Sequence[tuple[bytes, Connection]]) -> ServerError | None:
        """What the first that was refused was refused with."""
        refused = None
        for name, connection in asked:
            reply = connection.read()
            if isinstance(reply, ServerError):
                error = self._routes.judge(name, reply)
                if isinstance(error, Redirected):
                    try:
                        raise error
                    finally:
                        del error  # or it and its frames would keep each other, and cells
                refused = refused or reply
        return refused
