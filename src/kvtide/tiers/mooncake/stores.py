"""A record from cells into its store, and the small values by which its blocks are found.

A name is written by one client at a time, and read by nobody before its end: the store sees to
that. What a client that was killed has begun is given up by the store half a minute later.
"""

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvtide.codec.passing import HeaderWriter
from kvtide.codec.record import stored_bytes
from kvtide.core.records import Record
from kvtide.tiers.base import StoreOutcome
from kvtide.tiers.mooncake.client import (
    NO_ROOM,
    NOT_GIVEN,
    NOT_THERE,
    THERE_ALREADY,
    WINDOW_BYTES,
    WINDOWS,
    Client,
)
from kvtide.tiers.mooncake.loads import window_lengths
from kvtide.tiers.mooncake.names import TARGET_BYTES, Names, Target, cleared_of, names_of
from kvtide.tiers.remote import parts
from kvtide.tiers.remote.census import Census
from kvtide.tiers.remote.session import Put

ROOM_TRIES = 50
ROOM_S = 0.02
"""A store that is full evicts once it has refused something: soon after, there is room. Where
there was none for all that time, the next ones are tried once each."""


@dataclass(slots=True)
class _Around:
    """What is there of a record before it is stored.

    Attributes:
        is_there: itself, whole.
        is_covered: by a longer one.
        to_set: names of small values that are missing, or name what is gone or is shorter.
        shorter: names of tails that it begins with.
    """

    is_there: bool
    is_covered: bool
    to_set: list[str]
    shorter: list[Target]


class Stores:
    """Of one session."""

    def __init__(self, client: Client, prefix: str, census: Census) -> None:
        self._client = client
        self._prefix = prefix
        self._census = census
        self._is_full = False

    def store(self, put: Put) -> StoreOutcome:
        """See `Session.store`, of one."""
        record = put.record
        before = self._last_clear()
        known, length = names_of(self._prefix, record), stored_bytes(record.layout, record.blocks)
        if not self._is_anchored(record, known):
            return StoreOutcome.NOT_ANCHORED
        around = self._around(record, known)
        if around.is_covered:
            return StoreOutcome.HELD
        outcome = StoreOutcome.HELD if around.is_there else self._sent(put, known)
        if outcome.is_kept and not self._set(record, known, around.to_set):
            self._remove(known, record.key, length, around.to_set)
            return StoreOutcome.NO_ROOM
        if outcome is StoreOutcome.STORED:
            if self._last_clear() != before:
                self._remove(known, record.key, length, around.to_set)
                return StoreOutcome.NOT_ANCHORED
            for tail in around.shorter:
                self._remove(known, tail.key, stored_bytes(record.layout, tail.blocks))
        return outcome

    def say_cleared(self) -> None:
        """Let all who are just storing take that back; where there is no room for it, they do not
        hear of it."""
        self._client.memory[:TARGET_BYTES] = os.urandom(TARGET_BYTES)
        self._with_room(lambda: self._replaced([cleared_of(self._prefix)]))

    def _last_clear(self) -> bytes:
        """What the last one has written: it changes with each, from before it removes anything
        that is whole by then."""
        (code,) = self._client.heads([cleared_of(self._prefix)], TARGET_BYTES, is_hint=True)
        return bytes(self._client.memory[:TARGET_BYTES]) if code >= 0 else b""

    def _remove(self, known: Names, key: bytes, length: int, small: Sequence[str] = ()) -> None:
        self._client.codes("remove", [known.record(key), *small], but=NOT_THERE)
        self._census.took(known.kind, length)

    # ---- what is there

    def _is_anchored(self, record: Record, known: Names) -> bool:
        if record.parent == record.root.key:
            return True
        return self._client.codes("exist", [known.record(record.parent)])[0] == 1

    def _around(self, record: Record, known: Names) -> _Around:
        blocks = known.blocks(record.digests)
        mark = known.children(record.parent)
        itself, has_mark, *there = self._client.codes(
            "exist", [known.record(record.key), mark, *blocks]
        )
        around = _Around(itself == 1, False, [] if has_mark else [mark], [])
        held = [number for number, code in enumerate(there) if code == 1]
        targets = self._targets(known, [blocks[number] for number in held])
        for number, name in enumerate(blocks):
            target = targets.get(name)
            if target is None:
                around.to_set.append(name)
            elif target.blocks < record.blocks:
                around.to_set.append(name)
                if target.blocks == number + 1:
                    around.shorter.append(target)
            elif number + 1 == record.blocks and target.key != record.key:
                around.is_covered = True
        return around

    def _targets(self, known: Names, held: Sequence[str]) -> dict[str, Target]:
        """Of each of these small values what it names, where that is there."""
        if not held:
            return {}
        codes = self._client.heads(held, TARGET_BYTES)
        memory = self._client.memory
        read = {
            name: Target.unpack(memory[number * TARGET_BYTES :][:TARGET_BYTES])
            for number, (name, code) in enumerate(zip(held, codes, strict=True))
            if code == TARGET_BYTES
        }
        there = self._client.codes("exist", [known.record(one.key) for one in read.values()])
        return {
            name: one
            for (name, one), is_there in zip(read.items(), there, strict=True)
            if is_there
        }

    # ---- sending

    def _set(self, record: Record, known: Names, missing: Sequence[str]) -> bool:
        """Have small values say that it has these blocks; False: there is no room for them."""
        if not missing:
            return True
        content = Target(record.key, record.blocks).packed()
        for number in range(len(missing)):
            self._client.memory[number * TARGET_BYTES :][:TARGET_BYTES] = content
        return self._with_room(lambda: self._replaced(missing)) != NO_ROOM

    def _replaced(self, missing: Sequence[str]) -> int:
        codes = self._client.codes("replace", missing, TARGET_BYTES, but=(NO_ROOM, *NOT_GIVEN))
        return NO_ROOM if NO_ROOM in codes else 0

    def _sent(self, put: Put, known: Names) -> StoreOutcome:
        record = put.record
        name, length = known.record(record.key), stored_bytes(record.layout, record.blocks)
        code = self._begun(name, length)
        if code == NO_ROOM:
            return StoreOutcome.NO_ROOM
        if code == THERE_ALREADY:  # somebody else's, by now whole, or on its way
            is_there = self._client.codes("exist", [name])[0] == 1
            return StoreOutcome.HELD if is_there else StoreOutcome.FAILED
        try:
            self._send(put, name)
        except BaseException:
            self._client.give_up("revoke", name)
            raise
        self._client.code("end_put", name)
        self._census.gave(length)
        self._census.stored(known.kind, record.root)
        return StoreOutcome.STORED

    def _begun(self, name: str, length: int) -> int:
        but = (NO_ROOM, THERE_ALREADY)
        return self._with_room(lambda: self._client.code("begin_put", name, length, but=but))

    def _with_room(self, call: Callable[[], int]) -> int:
        """The code of a call that may find none."""
        code = NO_ROOM
        for tries in range(1 if self._is_full else ROOM_TRIES):
            if tries:
                time.sleep(ROOM_S)
            code = call()
            if code != NO_ROOM:
                break
        self._is_full = code == NO_ROOM
        return code

    def _send(self, put: Put, name: str) -> None:
        """Its bytes, summed as they go; so windows with headers in them last."""
        record = put.record
        headers = parts.empty_headers(record)
        writer = HeaderWriter(record, put.write_id, headers)
        memory = {id(header.obj) for header in headers}
        lengths = window_lengths(record)
        last, asked = [], 0
        for number, pieces in enumerate(parts.cut(headers, put.cells, lengths)):
            writer.passed(pieces)
            if any(id(piece.obj) in memory for piece in pieces):
                last.append((number, pieces))
            else:
                self._send_window(name, number, pieces, asked)
                asked += 1
        for number, pieces in last:
            self._send_window(name, number, pieces, asked)
            asked += 1
        while self._client.due:
            self._client.judge(self._client.answer())

    def _send_window(
        self, name: str, number: int, pieces: Sequence[memoryview], asked: int
    ) -> None:
        """`asked`: how many were sent before it."""
        if self._client.due == WINDOWS:
            self._client.judge(self._client.answer())
        begin = at = asked % WINDOWS * WINDOW_BYTES
        for piece in pieces:
            self._client.memory[at : at + len(piece)] = piece
            at += len(piece)
        self._client.ask("put", name, number * WINDOW_BYTES, at - begin, begin)
