"""Stores of one session, several under way: a server that takes bytes never waits for us.

    begin 1, begin 2 │ parts 1, complete 1, begin 3 │ parts 2, complete 2, begin 4 │ …   sent
                     ▲ begin 1                      ▲ begin 2                      ▲      read

Room is set aside for a record while the parts of the one before it are sent, and what the server
says to those is read when it is needed. So a record may begin while its parent is not there yet;
whether it is, its own `complete` finds out. On several servers a record is completed only when all
have its parts, since no order holds between them.

Ownership: one thread's. Invariant: `_due` reads answers in the order in which they were asked for.
"""

import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeAlias

from kvtide.codec.passing import HeaderWriter
from kvtide.codec.record import WRITE_ID_BYTES
from kvtide.errors import PlaceFailed
from kvtide.tiers.base import StoreOutcome
from kvtide.tiers.redis.index import Begun, GivenUp, Index, IndexAnswer, Sent
from kvtide.tiers.redis.resp import Connection, ServerError
from kvtide.tiers.redis.routes import Redirected, Routes
from kvtide.tiers.remote import parts
from kvtide.tiers.remote.session import Put

_Asked: TypeAlias = tuple[bytes, Connection]

UNDER_WAY_MAX = 3
"""One whose answers are to come, one that is sent, one for which room is set aside."""
_OUTCOMES = {
    IndexAnswer.STORED: StoreOutcome.STORED,
    IndexAnswer.HELD: StoreOutcome.HELD,
    IndexAnswer.NOT_ANCHORED: StoreOutcome.NOT_ANCHORED,
    IndexAnswer.NO_ROOM: StoreOutcome.NO_ROOM,
    IndexAnswer.NO_PARTS: StoreOutcome.NO_ROOM,  # its server had none for them
    IndexAnswer.OTHER: StoreOutcome.FAILED,
    IndexAnswer.EXPIRED: StoreOutcome.FAILED,
}
"""Of the answers that end a store."""


@dataclass(slots=True, eq=False)
class _UnderWay:
    """A store that has not ended.

    Attributes:
        put: what is sent; each time that it begins again by another write id.
        asked: what was to be stored, as its caller knows it.
        parent: that of its parent, as long as it has not ended, either.
        is_orphan: its parent has ended, and is not kept.
        until_s: it has ended by then.
        begun: what the index said to it; None: that is to come.
        is_sent: its parts are, too.
        refusal: what a server would not take a part for.
        answer: how it ended, as the index says it; None: it has not.
        is_full: its server had no memory for it, and it is tried with less than the cap.
    """

    put: Put
    asked: Put
    parent: "_UnderWay | None"
    until_s: float
    begun: Begun | None = None
    is_sent: bool = False
    refusal: ServerError | None = None
    answer: IndexAnswer | None = None
    is_full: bool = False
    is_orphan: bool = False

    @property
    def is_to_be_sent(self) -> bool:
        """Whether its parts are still to be sent, as far as is known."""
        return not self.is_sent and self.answer is None

    @property
    def is_lost(self) -> bool:
        """Whether nothing can be kept behind it."""
        return self.answer is not None and not _OUTCOMES[self.answer].is_kept


class Stores:
    """Stores of one session, from what is next to their ends."""

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
            if one.answer is None:
                self._begin_again(one)
        while True:
            self._end(ended)
            self._take(next_put)
            unsent = next((one for one in self._under_way if one.is_to_be_sent), None)
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

    def remove_given_up(self) -> None:
        """Parts of the writes that are; those that are gone already are no error."""
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
            self._under_way.append(_UnderWay(put, put, next(above, None), until_s))
            self._begin(self._under_way[-1])

    def _begin_again(self, one: _UnderWay) -> None:
        """By another write id: parts of the one before may be loose, and are removed in time."""
        one.put = replace(one.put, write_id=os.urandom(WRITE_ID_BYTES))
        self._begin(one)

    def _begin(self, one: _UnderWay) -> None:
        one.begun, one.refusal, one.is_sent, one.answer = None, None, False, None
        self._routes.limit(self._under_way[0].until_s)
        parents = {each.put.record.parent for each in self._under_way}
        is_behind = one.parent is not None
        sent = self._index.begin(one.put, parents, is_behind=is_behind, is_full=one.is_full)
        self._due.append(partial(self._read_begun, one, sent))

    def _read_begun(self, one: _UnderWay, sent: Sent) -> None:
        begun = self._index.begun(sent)
        if begun.answer is IndexAnswer.MORE:
            self._unlink()
            self._begin(one)
            return
        one.begun = begun
        if begun.answer is not IndexAnswer.GO:
            one.answer = begun.answer

    def _send(self, one: _UnderWay, begun: Begun) -> None:
        one.is_sent = True
        if one.is_orphan or (one.parent is not None and one.parent.is_lost):
            self._abandon(one, begun, IndexAnswer.NOT_ANCHORED)
            return
        names, asked = self._send_parts(one.put)
        if self._routes.are_one:  # in order on one server, which looks for the parts
            self._due.append(partial(self._read_parts, one, asked))
            self._complete(one, begun, names)
        else:
            self._due.append(partial(self._read_all_parts, one, begun, asked))

    def _send_parts(self, put: Put) -> tuple[list[bytes], list[_Asked]]:
        """Each is summed as it goes; so those with headers go last, which hold the sums."""
        record = put.record
        lengths = parts.lengths_of(record)
        names = self._index.names(put.write_id, len(lengths))
        headers = parts.empty_headers(record)
        writer = HeaderWriter(record, put.write_id, headers)
        asked, last = [], []
        cut = parts.cut(headers, put.cells, lengths)
        have_headers = parts.have_headers(record.layout, record.blocks)
        for name, pieces, has_header in zip(names, cut, have_headers, strict=True):
            writer.passed(pieces)
            if has_header:
                last.append((name, pieces))
            else:
                asked.append(self._set(name, pieces))
        final = last[-1][0] if self._routes.are_one else None  # `complete` follows it at once
        asked += [self._set(name, pieces, goes_on=name is final) for name, pieces in last]
        return names, asked

    def _abandon(self, one: _UnderWay, begun: Begun, answer: IndexAnswer) -> None:
        sent = self._index.abandon(one.put.record, one.put.write_id, begun.life)
        self._due.append(partial(self._read_abandoned, one, sent, answer))

    def _set(self, name: bytes, pieces: Sequence[memoryview], *, goes_on: bool = False) -> _Asked:
        connection = self._routes.of(name)
        connection.send(b"SET", name, pieces, goes_on=goes_on)
        return name, connection

    def _read_parts(self, one: _UnderWay, asked: list[_Asked]) -> None:
        one.refusal = self._refusal(asked)

    def _read_all_parts(self, one: _UnderWay, begun: Begun, asked: list[_Asked]) -> None:
        one.refusal = self._refusal(asked)
        if one.refusal is None:
            self._complete(one, begun, ())
        else:
            self._abandon(one, begun, IndexAnswer.NO_PARTS)

    def _complete(self, one: _UnderWay, begun: Begun, names: Sequence[bytes]) -> None:
        sent = self._index.complete(one.put.record, one.put.write_id, begun.life, names)
        self._due.append(partial(self._read_completed, one, sent))

    def _read_completed(self, one: _UnderWay, sent: Sent) -> None:
        one.answer = self._index.completed(sent, one.put.record, one.put.write_id)

    def _read_abandoned(self, one: _UnderWay, sent: Sent, answer: IndexAnswer) -> None:
        self._index.abandoned(sent)
        one.answer = answer

    def _end(self, ended: Callable[[Put, StoreOutcome], None]) -> None:
        """Those that have, in order. What a full server had no memory for is tried once more, by
        less than the cap, with all that fell with it."""
        while self._under_way and (answer := self._under_way[0].answer) is not None:
            one = self._under_way[0]
            is_refused = one.refusal is not None and one.refusal.code != "OOM"
            if is_refused or (answer is IndexAnswer.NO_PARTS and not one.is_full):
                while self._due:
                    self._read_next()
                if is_refused:
                    raise PlaceFailed(str(one.refusal))
                for each in self._under_way:
                    if each.is_lost:
                        each.is_full = True
                        self._begin_again(each)
                return
            self._under_way.popleft()
            for each in self._under_way:
                if each.parent is one:  # nothing of what has ended, and no cell, stays known
                    each.parent, each.is_orphan = None, one.is_lost
            ended(one.asked, _OUTCOMES[answer])

    # ---- answers

    def _read_next(self) -> None:
        if self._under_way:
            self._routes.limit(self._under_way[0].until_s)
        self._due.popleft()()
        self._unlink()

    def _unlink(self) -> None:
        """Have the parts of what is given up removed: ahead of whatever is sent from now on."""
        for given_up in self._index.take_given_up():
            names = self._index.names(given_up.write_id, given_up.part_count)
            asked = []
            for together in [names] if self._routes.are_one else [[name] for name in names]:
                connection = self._routes.of(together[0])
                connection.send(b"UNLINK", *together)
                asked.append((together[0], connection))
            self._due.append(partial(self._read_unlinked, given_up, asked))

    def _read_unlinked(self, given_up: GivenUp, asked: list[_Asked]) -> None:
        refused = self._refusal(asked)
        if refused is not None:
            raise PlaceFailed(str(refused))
        self._index.note_removed(given_up)

    def _refusal(self, asked: Sequence[_Asked]) -> ServerError | None:
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
