"""A place that takes longer to open than a node waits for: it is taken in when it has opened.

    opening: has nothing, keeps nothing ──opened──► the tier itself, for the rest of its life
                     └── cannot be opened: stays as it is, and says why

What is cleared meanwhile is not known to the place, so it is cleared as soon as it is open, before
anybody finds something in it.

Ownership: the node's owner's thread, as every tier; what the opening thread has to say it asks of
`Opening`.
"""

import logging
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


class Coming(Protocol):
    """What is being opened."""

    def opened(self) -> Tier | None:
        """The tier, None while it is not open; what kept it from being opened is raised."""

    def take_back(self) -> Tier | None:
        """The tier, if it is open: the caller's to close. Else it is closed as soon as it is."""


class LateTier:
    """Stands for a tier until it is open, and hands all on to it from then on."""

    def __init__(self, name: str, coming: Coming, wake: Callable[[], None]) -> None:
        self.name = name
        self._coming: Coming | None = coming  # None: nothing comes any more
        self._wake = wake
        self._tier: Tier | None = None
        self._state = "being opened"
        self._now_ms = 0
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
        self._look()
        done, self._done = self._done, []
        return done if self._tier is None else done + self._tier.poll()

    def tick(self, now_ms: int) -> None:
        self._now_ms = now_ms
        self._look()
        if self._tier is not None:
            self._tier.tick(now_ms)

    def _look(self) -> None:
        """Take the tier in, if it is open by now."""
        if self._coming is None:
            return
        try:
            tier = self._coming.opened()
        except (KVTideError, OSError) as error:
            self._coming = None
            self._state = f"cannot be opened: {error}"
            logger.warning("the node goes without the tier %s: %s", self.name, error)
            return
        if tier is None:
            return
        self._coming, self._tier = None, tier
        tier.tick(self._now_ms)
        self._clear(tier)
        logger.info("the tier %s is open", self.name)

    # ---- numbers and the end

    def statistics(self) -> TierStatistics:
        if self._tier is not None:
            return self._tier.statistics()
        return TierStatistics(self._state, 0, 0, 0, 0)

    def close(self, timeout_s: float) -> None:
        tier = self._tier if self._coming is None else self._coming.take_back()
        if tier is not None:
            self._clear(tier)
            tier.close(timeout_s)

    def _clear(self, tier: Tier) -> None:
        """What was cleared while it was not open is found by nobody."""
        for salt_digest, fingerprint in self._clears:
            tier.clear(salt_digest, fingerprint)
        self._clears.clear()
