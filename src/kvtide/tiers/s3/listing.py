"""Looks at names: at new ones with each survey, at all once an hour, a page at a time.

    TOP/m   what nodes tell: room that they take, what is gone, was used, or cleared
    TOP/r   records; what is new begins `LAG_MS` before the last look at it
    TOP/p   their other parts, looked at for what killed writers left

A store takes a moment from its stamp to its object, so a look at what is new begins that far back.
What it misses all the same (written by a node whose clock is far behind, or evicted by the server
itself), the look at everything finds, which is made when a place works again, too.
"""

import asyncio
import enum
import time
from collections import Counter, deque
from collections.abc import Sequence
from itertools import chain

from kvtide.codec.record import HEADER_BYTES_MAX, WRITE_ID_BYTES, read_header
from kvtide.core.keys import KEY_BYTES
from kvtide.errors import CorruptRecord, PlaceFailed, UnknownFormat
from kvtide.tiers.remote.kinds import kind_of
from kvtide.tiers.s3 import names
from kvtide.tiers.s3.client import LISTED_MAX, Client, Listed, gathered
from kvtide.tiers.s3.mirror import USED_MAX, Mirror
from kvtide.tiers.s3.names import Message, Written

LAG_MS = 60_000
"""Several times what a store may take, and what clocks differ by."""
LOOK_S = 3600.0
ROOM_S_MAX = 120.0
"""A claim of room counts for so long: twice what its owner believes in it."""
GONE_S_MAX = 600.0
"""So long a list of what is gone stays: each node has seen it by then, or looks at everything."""
GONE_ID_BYTES = KEY_BYTES + WRITE_ID_BYTES
TOLD_MAX = 2048
"""Latest records that a list of what is gone names: more than a node deletes between two looks."""
TRIES_MAX = 8
"""Headers of one kind that are read between two looks at everything, where none can be read."""
KINDS_MAX = 16
"""Kinds whose headers are read at once: there is one for each salt."""
HEADER_S = 1.0
"""Less than a call may take, so that one object that never comes does not stop each look."""
AGAIN_S = 600.0
"""After a look that left a kind unknown: what is of it is not found, nor counted in the cap."""
DELETED_MAX = 250
"""Records whose objects are deleted together."""


class Header(enum.Enum):
    """What came of asking for one."""

    READ, GONE, UNREADABLE = range(3)


class Listing:
    """One session's. Ownership: its thread."""

    def __init__(self, client: Client, mirror: Mirror, writer: str) -> None:
        self.is_first = True
        """Whether not all records were looked at yet."""
        self.others_bytes = 0
        """Room that others have claimed."""
        self._client = client
        self._mirror = mirror
        self._writer = writer
        self._seen: set[str] = set()
        self._unread: set[str] = set()
        self._tries: Counter[bytes] = Counter()
        self._is_any_unknown = False
        self._told: deque[bytes] = deque(maxlen=TOLD_MAX)
        self._told_names: list[str] = []
        self._used_names: list[str] = []
        self._recent: set[str] = set()
        self._folder = ""
        self._after = ""
        self._began_at = 0
        self._listed_to = 0
        self._look_s = -LOOK_S
        self._clears: list[tuple[str, Message]] = []
        self._ending: list[tuple[str, Message]] = []

    # ---- what is new

    async def refresh(self) -> None:
        """Read what nodes tell, and the names that are new."""
        await self._read_messages()
        began_at = self._mirror.next_stamp()
        first = (self._listed_to or began_at) - LAG_MS
        after = f"{self._mirror.top}/r/{max(0, first):012x}"
        recent: set[str] = set()
        while True:
            page = await self._client.listed(f"{self._mirror.top}/r", after)
            await self._take_in([one for one in page if one.name not in self._recent])
            recent.update(one.name for one in page)
            if len(page) < LISTED_MAX:
                break
            after = page[-1].name
        self._listed_to, self._recent = began_at, recent

    async def _read_messages(self) -> None:
        top, after = self._mirror.top, ""
        listed: list[Listed] = []
        while True:
            page = await self._client.listed(f"{top}/m", after)
            listed += page
            if len(page) < LISTED_MAX:
                break
            after = page[-1].name
        now_s = max((one.at_s for one in listed), default=0.0)  # by the server's own clock
        told = [(one, names.parse_message(top, one.name)) for one in listed]
        others_bytes = 0
        old: list[str] = []
        clears: list[tuple[str, Message]] = []
        for one, message in told:
            age_s = now_s - one.at_s
            if message is None or (message.writer == self._writer and message.what != "clear"):
                continue
            if message.what == "clear":
                clears.append((one.name, message))
            elif age_s > (ROOM_S_MAX if message.what == "room" else GONE_S_MAX):
                old.append(one.name)
                if message.what == "room":
                    self.look_again()  # it may have been killed while it stored
            elif message.what == "room":
                others_bytes += message.room_bytes
            elif one.name not in self._seen and message.what == "gone":
                await self._read_gone(one.name)
            elif one.name not in self._seen:
                await self._read_used(one.name)
        self.others_bytes, self._clears = others_bytes, clears
        self._seen = {one.name for one in listed} - self._unread
        self._unread.clear()
        self._mirror.heed([message for _, message in clears])
        await self._client.delete(old)

    async def _read_gone(self, name: str) -> None:
        gone = await self._said_in(name, TOLD_MAX * GONE_ID_BYTES)
        for at in range(0, len(gone), GONE_ID_BYTES):
            key_ends = at + KEY_BYTES
            self._mirror.removed_by_others(gone[at:key_ends], gone[key_ends : at + GONE_ID_BYTES])

    async def _read_used(self, name: str) -> None:
        used = await self._said_in(name, USED_MAX * KEY_BYTES)
        keys = [used[at : at + KEY_BYTES] for at in range(0, len(used), KEY_BYTES)]
        self._mirror.used_by_others(keys)

    async def _said_in(self, name: str, bytes_max: int) -> bytes:
        try:
            content = await self._client.get(name, bytes_max)
        except CorruptRecord:  # none of us wrote it
            return b""
        except PlaceFailed:  # some servers break off what is deleted meanwhile, as it is replaced
            self._unread.add(name)
            return b""
        return b"" if content is None else bytes(content)

    async def tell_used(self) -> None:
        """What was found here, so that others do not evict it."""
        used = self._mirror.take_used()
        if not used:
            return
        old = self._used_names
        message = Message(self._mirror.next_stamp(), self._writer, "used")
        self._used_names = [names.message_name(self._mirror.top, message)]
        await self._client.put(self._used_names[0], [b"".join(used)])
        await self._client.delete(old)

    async def _take_in(self, page: Sequence[Listed]) -> None:
        unknown: dict[bytes, list[tuple[str, Written]]] = {}
        for one in page:
            written = names.parse_record(self._mirror.top, one.name)
            if written is not None and not self._mirror.take_in(written):
                unknown.setdefault(written.kind, []).append((one.name, written))
        ahead = asyncio.Semaphore(KINDS_MAX)

        async def take_in(listed: Sequence[tuple[str, Written]]) -> None:
            async with ahead:
                await self._take_in_unknown(listed)

        await gathered([asyncio.ensure_future(take_in(of)) for of in unknown.values()])

    async def _take_in_unknown(self, listed: Sequence[tuple[str, Written]]) -> None:
        """Names of one kind; a header of its records says what that stands for."""
        is_unknown = False
        for name, written in listed:
            header = await self._learn(name, written.kind)
            is_unknown = header is Header.UNREADABLE or (is_unknown and header is Header.GONE)
            if header is Header.READ:
                break
        self._is_any_unknown |= is_unknown
        for _, written in listed:
            self._mirror.take_in(written)

    async def _learn(self, name: str, kind: bytes) -> Header:
        """What a kind stands for. Neither a call that was given up nor a header that is gone is a
        try: they say nothing of it."""
        if self._tries[kind] >= TRIES_MAX:
            return Header.UNREADABLE
        try:
            async with asyncio.timeout(HEADER_S):
                start = await self._client.get_start(name, HEADER_BYTES_MAX)
        except TimeoutError as error:
            self._tries[kind] += 1
            raise PlaceFailed(f"a header did not come within {HEADER_S} s") from error
        except PlaceFailed:  # counts: one object that is always refused would stop each look
            self._tries[kind] += 1
            raise
        if start is None:
            return Header.GONE
        try:
            record = read_header(start).record
        except (CorruptRecord, UnknownFormat):
            record = None
        if record is None or kind_of(record.root, record.layout) != kind:
            self._tries[kind] += 1
            return Header.UNREADABLE
        self._mirror.learned(record.root, record.layout)
        del self._tries[kind]
        return Header.READ

    # ---- everything

    def look_again(self) -> None:
        """The place has failed: who knows what it has forgotten."""
        self._look_s = -LOOK_S

    def begin_look(self) -> None:
        """Look at all names from now on, if it is time."""
        now_s = time.monotonic()
        if not self._folder and now_s - self._look_s >= LOOK_S:
            self._look_s, self._folder, self._after = now_s, "r", ""
            self._began_at = self._mirror.newest - LAG_MS
            self._ending = [one for one in self._clears if one[1].stamp < self._began_at]
            self._tries.clear()
            self._is_any_unknown = False
            self._mirror.begin_look()

    async def look(self) -> bool:
        """At the next page; whether there is more. Nothing waits to be deleted."""
        if not self._folder:
            return False
        page = await self._client.listed(f"{self._mirror.top}/{self._folder}", self._after)
        if self._folder == "r":
            await self._take_in(page)
        else:
            await self._delete_lost(page)
        if len(page) == LISTED_MAX:
            self._after = page[-1].name
        elif self._folder == "r":
            self._mirror.end_look(self._began_at)
            self._folder, self._after, self.is_first = "p", "", False
            if (
                self._is_any_unknown
            ):  # its parts look like left ones; what was cleared may be of it
                self._folder = ""
                self._look_s = min(self._look_s, time.monotonic() - LOOK_S + AGAIN_S)
        else:
            # All that was cleared before this look began was seen by it, and deleted since.
            await self._client.delete([name for name, _ in self._ending])
            self._folder = ""
        return bool(self._folder)

    async def _delete_lost(self, page: Sequence[Listed]) -> None:
        """Parts that a killed writer left."""
        lost = []
        for one in page:
            part = names.parse_part(self._mirror.top, one.name)
            if part is None or part.stamp >= self._began_at:
                continue
            if not self._mirror.is_known(part.write_id, part.key):
                lost.append(one.name)
        await self._client.delete(lost)

    # ---- what goes

    async def delete_given_up(self) -> bool:
        """Some of them; whether there were any. Others are told."""
        given_up = self._mirror.take_given_up(DELETED_MAX)
        if not given_up:
            return False
        top = self._mirror.top
        objects = [names.names_of(top, one.written, one.kind.layout) for one in given_up]
        try:
            await self._client.delete([*chain.from_iterable(objects), *self._told_names])
        except BaseException:
            self._mirror.not_deleted(given_up)
            raise
        self._mirror.deleted(given_up)
        self._told.extend(one.written.key + one.written.write_id for one in given_up)
        message = Message(self._mirror.next_stamp(), self._writer, "gone")
        self._told_names = [names.message_name(top, message)]
        await self._client.put(self._told_names[0], [b"".join(self._told)])
        return True
