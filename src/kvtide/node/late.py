"""A place that is not open when its node starts, for it is slow or cannot be used: it is taken in
when it has opened.

    opening: has nothing, keeps nothing ──opened──► the tier itself, for the rest of its life
         ▲        └── cannot be opened: says why
         └── again, after 1 s, then twice as long each time, up to a minute ──┘

What is cleared meanwhile is not known to the place, so it is cleared as soon as it is open, before
anybody finds something in it: also where the node ends before, which waits for it as for a store.

Ownership: the node's owner's thread, as every tier; what the opening thread has to say it asks of
`Opening`. After `close` the clears are the opening thread's.
"""

import logging
import time
from collections.abc import Callable
from typing import Protocol

from kvtide.errors import KVTideError
from kvtide.tiers.base import (
    Done,
    Found,
    Loaded,
    LoadJob,
    LoadOutcome,
    LookupJob,
    Stored,
    StoreJob,
    StoreOutcome,
    Tier,
    TierStatistics,
)

logger = logging.getLogger("kvtide.node")

CLEARS_MAX = 8
"""Clears that wait for the place; of more, all is cleared: each may hold up the owner's loop."""
EVERYTHING = (None, None)
PAUSE_MS = 1_000
PAUSE_MS_MAX = 60_000
"""Until a place that could not be opened is tried again: a mount comes, another node ends."""


class Coming(Protocol):
    """What is being opened."""

    def opened(self) -> Tier | None:
        """The tier, None while it is not open; what kept it from being opened is raised."""

    def take_back(self, timeout_s: float, at_last: Callable[[Tier], None]) -> Tier | None:
        """The tier, if it is open within this time: the caller's to close.

        Else it is closed as soon as it is, after `at_last`.
        """


class LateTier:
    """Stands for a tier until it is open, and hands all on to it from then on."""

    def __init__(
        self, name: str, coming: Coming, again: Callable[[], Coming], wake: Callable[[], None]
    ) -> None:
        """`again` begins to open it anew, once `coming` has failed."""
        self.name = name
        self._coming: Coming | None = coming  # None: it is open, or could not be opened
        self._again = again
        self._wake = wake
        self._tier: Tier | None = None
        self._state = "being opened"
        self._now_ms = 0
        self._pause_ms = PAUSE_MS
        self._again_ms = 0
        self._done: list[Done] = []
        self._clears: dict[tuple[bytes | None, bytes | None], None] = {}

    # ---- jobs

    def lookup(self, job: LookupJob) -> None:
        if self._tier is not None:
            self._tier.lookup(job)
        else:
            self._end(Found(job.number, [], may_go_on=False))

    def load(self, job: LoadJob) -> None:
        if self._tier is not None:
            self._tier.load(job)
        else:
            self._end(Loaded(job.number, LoadOutcome.NOT_OPEN))

    def store(self, job: StoreJob) -> None:
        if self._tier is not None:
            self._tier.store(job)
        else:
            self._end(Stored(job.number, StoreOutcome.NOT_OPEN))

    def clear(self, salt_digest: bytes | None, fingerprint: bytes | None = None) -> int:
        if self._tier is not None:
            return self._tier.clear(salt_digest, fingerprint)
        self._clears[salt_digest, fingerprint] = None
        if len(self._clears) > CLEARS_MAX or EVERYTHING in self._clears:
            self._clears = {EVERYTHING: None}
        return 0

    def _end(self, done: Done) -> None:
        self._done.append(done)
        self._wake()

    # ---- the owner's loop

    def poll(self) -> list[Done]:
        done, self._done = self._done, []
        if done:  # first, whatever becomes of the tier's own calls
            self._wake()
            return done
        self._look()
        return [] if self._tier is None else self._tier.poll()

    def tick(self, now_ms: int) -> None:
        self._now_ms = now_ms
        self._look()
        if self._tier is not None:
            self._tier.tick(now_ms)

    def _look(self) -> None:
        """Take the tier in, if it is open by now; try again, if it is time to."""
        if self._tier is not None:
            return
        if self._coming is None:
            if self._now_ms < self._again_ms:
                return
            self._coming = self._again()
        try:
            tier = self._coming.opened()
        except (KVTideError, OSError) as error:
            self._failed(error)
            return
        if tier is None:
            return
        self._coming, self._tier = None, tier
        tier.tick(self._now_ms)
        self._clear(tier)
        logger.info("the tier %s is open", self.name)

    def _failed(self, error: Exception) -> None:
        """Say why, once, and wait before the next try."""
        self._coming = None
        self._again_ms = self._now_ms + self._pause_ms
        self._pause_ms = min(self._pause_ms * 2, PAUSE_MS_MAX)
        state = f"cannot be opened: {error}"
        if state != self._state:
            self._state = state
            logger.warning(
                "the node goes without the tier %s until it can be opened: %s", self.name, error
            )

    # ---- numbers and the end

    def statistics(self) -> TierStatistics:
        if self._tier is not None:
            return self._tier.statistics()
        return TierStatistics(self._state, 0, 0, 0, 0)

    def close(self, timeout_s: float) -> None:
        until_s = time.monotonic() + timeout_s
        tier = self._tier
        if self._coming is not None:
            wait_s = timeout_s / 2 if self._clears else 0.0  # the rest is for doing it
            tier = self._coming.take_back(wait_s, self._clear)
        if tier is not None:
            self._clear(tier)
            tier.close(max(0.0, until_s - time.monotonic()))
        elif self._clears:
            logger.warning(
                "the tier %s was not open when it was cleared, nor at the end: clear again once"
                " it is, else what was to be cleared may be found there",
                self.name,
            )

    def _clear(self, tier: Tier) -> None:
        """What was cleared while it was not open is found by nobody."""
        for salt_digest, fingerprint in self._clears:
            tier.clear(salt_digest, fingerprint)
        self._clears.clear()
