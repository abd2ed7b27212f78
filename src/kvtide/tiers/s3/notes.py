"""What nodes tell one another, by small objects that are read with each look at what is new.

    claim   room that its writer takes      gone   writes that it has deleted
    used    chains that it has found        clear  a scope that is gone

Of a node's notes there is one of each, the last; only clears stay until what they mean is gone.
"""

from collections import deque
from collections.abc import Sequence

from kvtide.codec.record import WRITE_ID_BYTES
from kvtide.core.keys import KEY_BYTES
from kvtide.errors import CorruptRecord, PlaceFailed
from kvtide.tiers.s3.bucket import LISTED_MAX, Bucket, Listed
from kvtide.tiers.s3.mirror import FOUND_ENDS_MAX, Mirror
from kvtide.tiers.s3.names import Claim, Clear, Gone, Note, Used, Written, note_name, parse_note
from kvtide.tiers.scope import Scope

CLAIM_S_MAX = 120.0
"""A claim counts for so long: twice what its owner believes in it."""
GONE_S_MAX = 600.0
"""So long other notes stay: each node has seen them by then, or looks at everything."""
GONE_ID_BYTES = KEY_BYTES + WRITE_ID_BYTES
TOLD_MAX = 2048
"""Latest writes that a note of what is gone names: more than a node deletes between two looks."""


class Notes:
    """One session's. Ownership: its thread.

    Attributes:
        others_bytes: room that others have claimed.
        clears: those that stand in the bucket, by name.
        gone_names: the own note of what is gone, which goes with what the next one tells.
    """

    def __init__(self, bucket: Bucket, mirror: Mirror) -> None:
        self.others_bytes = 0
        self.clears: dict[str, Clear] = {}
        self.gone_names: list[str] = []
        self._bucket = bucket
        self._mirror = mirror
        self._read: set[str] = set()
        self._unread: set[str] = set()
        self._gone: deque[bytes] = deque(maxlen=TOLD_MAX)
        self._used_names: list[str] = []

    # ---- of others

    async def read(self) -> bool:
        """All that are there; whether one is a claim of who may have been killed as it stored."""
        listed = await self._listed()
        now_s = max((one.at_s for one in listed), default=0.0)  # by the server's own clock
        others_bytes = 0
        old: list[str] = []
        clears: dict[str, Clear] = {}
        has_left_claim = False
        for one in listed:
            note = parse_note(self._mirror.top, one.name)
            if isinstance(note, Clear):
                clears[one.name] = note
            elif note is None or note.writer == self._mirror.writer:
                continue
            elif now_s - one.at_s > (CLAIM_S_MAX if isinstance(note, Claim) else GONE_S_MAX):
                old.append(one.name)
                has_left_claim |= isinstance(note, Claim)
            elif isinstance(note, Claim):
                others_bytes += note.claimed_bytes
            elif one.name not in self._read:
                await self._take_in(one.name, note)
        self.others_bytes, self.clears = others_bytes, clears
        self._read = {one.name for one in listed} - self._unread
        self._unread.clear()
        self._mirror.heed(list(clears.values()))
        await self._bucket.delete(old)
        return has_left_claim

    async def _listed(self) -> list[Listed]:
        listed: list[Listed] = []
        after = ""
        while True:
            page = await self._bucket.listed(f"{self._mirror.top}/m", after)
            listed += page
            if len(page) < LISTED_MAX:
                return listed
            after = page[-1].name

    async def _take_in(self, name: str, note: Gone | Used) -> None:
        if isinstance(note, Gone):
            gone = await self._content(name, TOLD_MAX * GONE_ID_BYTES)
            for one in _cut(gone, GONE_ID_BYTES):
                self._mirror.forget_write(one[:KEY_BYTES], one[KEY_BYTES:])
        else:
            used = await self._content(name, FOUND_ENDS_MAX * KEY_BYTES)
            self._mirror.found_by_others(_cut(used, KEY_BYTES))

    async def _content(self, name: str, bytes_max: int) -> bytes:
        try:
            content = await self._bucket.get(name, bytes_max)
        except CorruptRecord:  # none of us wrote it
            return b""
        except PlaceFailed:  # some servers break off what is deleted meanwhile, as it is replaced
            self._unread.add(name)
            return b""
        return b"" if content is None else bytes(content)

    # ---- the own ones

    async def tell_used(self) -> None:
        """What was found here, so that others do not evict it."""
        found_ends = self._mirror.take_found_ends()
        if found_ends:
            old, used = self._used_names, Used(self._mirror.next_stamp(), self._mirror.writer)
            self._used_names = [await self._put(used, b"".join(found_ends))]
            await self._bucket.delete(old)

    async def tell_gone(self, writes: Sequence[Written]) -> None:
        """These are deleted."""
        self._gone.extend(one.key + one.write_id for one in writes)
        gone = Gone(self._mirror.next_stamp(), self._mirror.writer)
        self.gone_names = [await self._put(gone, b"".join(self._gone))]

    async def tell_clear(self, scope: Scope) -> Clear:
        """What is of this scope by now is gone."""
        clear = Clear(self._mirror.next_stamp(), self._mirror.writer, scope)
        await self._put(clear, b"")
        return clear

    async def _put(self, note: Note, content: bytes) -> str:
        name = note_name(self._mirror.top, note)
        await self._bucket.put(name, [content])
        return name


def _cut(content: bytes, length: int) -> list[bytes]:
    return [content[at : at + length] for at in range(0, len(content), length)]
