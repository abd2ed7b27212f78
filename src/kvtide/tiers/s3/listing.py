"""Looks at names: at new ones with each survey, at all once an hour, a page at a time.

    TOP/m   notes, all of them
    TOP/r   records; what is new begins `LAG_MS` before the last look at it
    TOP/p   their other parts, looked at for what killed writers left

A store takes a moment from its stamp to its object, so a look at what is new begins that far back.
What it misses all the same (written by a node whose clock is far behind, or evicted by the server
itself), the look at everything finds. That is made sooner where there is reason to doubt: the
place works again, a writer was killed, or a load did not find what nobody tells to be gone.
"""

import time
from collections.abc import Sequence
from itertools import chain

from kvtide.tiers.s3 import names
from kvtide.tiers.s3.bucket import LISTED_MAX, Bucket, Listed
from kvtide.tiers.s3.headers import Headers
from kvtide.tiers.s3.mirror import Mirror
from kvtide.tiers.s3.names import Clear
from kvtide.tiers.s3.notes import Notes

LAG_MS = 60_000
"""Several times what a store may take, and what clocks differ by."""
LOOK_S = 3600.0
"""For what clocks and the server's own rules hide: a request an hour for a thousand names."""
AGAIN_S = 600.0
"""After a look that left a kind unknown: what is of it is not found, nor counted in the cap."""
PAUSES_PER_LOOK = 10
"""A bucket that is doubted again and again is looked at for a tenth of the time."""
DELETED_MAX = 250
"""Records whose objects are deleted together."""


class Listing:
    """One session's. Ownership: its thread.

    Attributes:
        has_seen_all: whether all records were looked at.
    """

    def __init__(self, bucket: Bucket, mirror: Mirror, notes: Notes) -> None:
        self.has_seen_all = False
        self._bucket = bucket
        self._mirror = mirror
        self._notes = notes
        self._headers = Headers(bucket, mirror)
        # What is new.
        self._listed_stamp = 0  # what is older was listed
        self._recent: set[str] = set()  # names that the last look at what is new saw
        # The look at everything that is under way.
        self._folder = ""  # "r", then "p"; empty: none is
        self._after = ""  # the last name that it saw
        self._began_stamp = 0  # it judges what is older
        self._began_s = 0.0
        self._is_of_doubt = False
        self._ending: list[str] = []  # clears that end with it
        # The next one.
        self._next_s = 0.0
        self._pause_s = 0.0  # after the last one, at least
        self._ended_s = 0.0

    # ---- what is new

    async def refresh(self) -> None:
        """Read what nodes tell, and the names that are new."""
        if await self._notes.read():
            self.look_again()
        if self._mirror.lacks_untold():
            self._doubt(self._ended_s + self._pause_s)
        began_stamp = self._mirror.next_stamp()
        first = (self._listed_stamp or began_stamp) - LAG_MS
        after = f"{self._mirror.top}/r/{max(0, first):012x}"
        recent: set[str] = set()
        while True:
            page = await self._bucket.listed(f"{self._mirror.top}/r", after)
            await self._headers.take_in([one for one in page if one.name not in self._recent])
            recent.update(one.name for one in page)
            if len(page) < LISTED_MAX:
                break
            after = page[-1].name
        self._listed_stamp, self._recent = began_stamp, recent

    # ---- everything

    def look_again(self) -> None:
        """The place has failed: who knows what it has forgotten."""
        self._doubt(0.0)

    def _doubt(self, next_s: float) -> None:
        self._is_of_doubt = True
        self._next_s = min(self._next_s, next_s)

    def begin_look(self) -> None:
        """Look at all names from now on, if it is time."""
        now_s = time.monotonic()
        if self._folder or now_s < self._next_s:
            return
        self._next_s, self._began_s, self._folder, self._after = float("inf"), now_s, "r", ""
        self._began_stamp = self._mirror.newest - LAG_MS
        clears = self._notes.clears.items()
        self._ending = [name for name, clear in clears if self._is_over(clear)]
        self._headers.try_all()
        self._mirror.begin_look()

    def _is_over(self, clear: Clear) -> bool:
        return clear.stamp < self._began_stamp

    async def look(self) -> bool:
        """At the next page; whether there is more. Nothing waits to be deleted."""
        if not self._folder:
            return False
        page = await self._bucket.listed(f"{self._mirror.top}/{self._folder}", self._after)
        if self._folder == "r":
            await self._headers.take_in(page)
        else:
            await self._delete_lost(page)
        if len(page) == LISTED_MAX:
            self._after = page[-1].name
        elif self._folder == "r":
            self._mirror.end_look(self._began_stamp)
            self._folder, self._after, self.has_seen_all = "p", "", True
            if self._headers.is_any_unknown:
                # Its parts look like left ones; what was cleared may be of it.
                self._end_look(AGAIN_S)
        else:
            # All that was cleared before this look began was seen by it, and deleted since.
            await self._bucket.delete(self._ending)
            self._end_look(LOOK_S)
        return bool(self._folder)

    def _end_look(self, next_in_s: float) -> None:
        self._folder, self._ended_s = "", time.monotonic()
        self._pause_s = PAUSES_PER_LOOK * (self._ended_s - self._began_s)
        if self._is_of_doubt:  # what was young then was not judged
            next_in_s = min(next_in_s, max(LAG_MS / 1000, self._pause_s))
        self._is_of_doubt = False
        self._next_s = min(self._next_s, self._ended_s + next_in_s)

    async def _delete_lost(self, page: Sequence[Listed]) -> None:
        """Parts that a killed writer left."""
        lost = []
        for one in page:
            part = names.parse_part(self._mirror.top, one.name)
            if part is None or part.stamp >= self._began_stamp:
                continue
            if not self._mirror.is_known(part.write_id, part.key):
                lost.append(one.name)
        await self._bucket.delete(lost)

    # ---- what goes

    async def delete_given_up(self) -> bool:
        """Some of them; whether there were any. Others are told."""
        given_up = self._mirror.take_given_up(DELETED_MAX)
        if not given_up:
            return False
        top = self._mirror.top
        objects = [names.names_of(top, one.written, one.trunk.layout) for one in given_up]
        try:
            await self._bucket.delete([*chain.from_iterable(objects), *self._notes.gone_names])
        except BaseException:
            self._mirror.not_deleted(given_up)
            raise
        self._mirror.deleted(given_up)
        await self._notes.tell_gone([one.written for one in given_up])
        return True
