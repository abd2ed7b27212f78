"""Between the machine and the tiers: effects become jobs, and what has ended becomes events.

Ownership: everything here belongs to the owner's thread until `close`, which is the last call and
comes from a thread of its own; a tier's `wake`, which may come from any thread, only asks the loop
to poll.
"""

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, TypeAlias

from kvtide.core import effects as fx
from kvtide.core.messages import Run
from kvtide.errors import HostMemoryError
from kvtide.node.health import Health
from kvtide.tiers.base import (
    Done,
    Found,
    LoadJob,
    LoadOutcome,
    LookupJob,
    Stored,
    StoreJob,
    StoreOutcome,
    Tier,
)

if TYPE_CHECKING:
    from kvtide.tiers.base import TierStatistics

logger = logging.getLogger("kvtide.node")

TierEffect: TypeAlias = fx.AskTier | fx.LoadFrom | fx.StoreTo | fx.ClearTiers

HEALTH_MS = 5_000
CLOSE_S_MAX = 3.0
"""Of T_stop: so long the node waits, at its end, for what is being written."""


class Tiers:
    """All tiers of the node, in the order in which the machine numbers them."""

    def __init__(
        self,
        tiers: Sequence[Tier],
        cells: Callable[[Run], list[memoryview]],
        feed: Callable[[fx.Event], None],
    ) -> None:
        """`cells` gives the memory of a run, shard by shard."""
        self._tiers = tiers
        self._cells = cells
        self._feed = feed
        self._health = [Health() for _ in tiers]
        self._now_ms = self._looked_ms = 0

    def __len__(self) -> int:
        return len(self._tiers)

    def carry_out(self, effect: TierEffect) -> None:
        """Hand a job over; its end comes by `poll`."""
        try:
            self._submit(effect)
        except HostMemoryError as error:  # no place in this process for the cells
            logger.warning("%s", error)
            self._feed(_failed(effect))

    def _submit(self, effect: TierEffect) -> None:
        match effect:
            case fx.AskTier(tier, number, root, parent, keys, digests, layout):
                job = LookupJob(number, root, parent, keys, digests, layout)
                self._tiers[tier].lookup(job)
            case fx.LoadFrom(tier, number, record, run):
                self._tiers[tier].load(LoadJob(number, record, self._cells(run)))
            case fx.StoreTo(tier, number, record, run):
                self._tiers[tier].store(StoreJob(number, record, self._cells(run)))
            case fx.ClearTiers(salt_digest, fingerprint):
                for one in self._tiers:
                    one.clear(salt_digest, fingerprint)

    def poll(self) -> None:
        """Tell the machine what has ended."""
        for tier in self._tiers:
            for done in tier.poll():
                self._feed(_event(done))

    def tick(self, now_ms: int) -> None:
        """Time has passed."""
        self._now_ms = now_ms
        for tier in self._tiers:
            tier.tick(now_ms)
        self.poll()
        if now_ms - self._looked_ms >= HEALTH_MS:
            self._looked_ms = now_ms
            for tier, health in zip(self._tiers, self._health, strict=True):
                health.look(tier.statistics(), now_ms)

    def statistics(self) -> "dict[str, TierStatistics]":
        """Of each tier, by its name; the states are those of `Health`."""
        found = {}
        for tier, health in zip(self._tiers, self._health, strict=True):
            numbers = tier.statistics()
            found[tier.name] = replace(numbers, state=health.state(numbers, self._now_ms))
        return found

    def close(self) -> None:
        """End all jobs in bounded time; blocks. What the machine wanted to know is over.

        All tiers at the same time: several that hang cost no more than one.
        """
        threads = [
            threading.Thread(target=_close, args=(tier,), name="kvtide-close", daemon=True)
            for tier in self._tiers
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


def _close(tier: Tier) -> None:
    try:
        tier.close(CLOSE_S_MAX)
    except Exception:
        name = tier.name
        logger.exception("tier %s could not be closed; its next start mends that", name)


def _event(done: Done) -> fx.Event:
    match done:
        case Found(number, records, may_go_on):
            return fx.TierFound(number, records, may_go_on)
        case Stored(number, stored):
            return fx.TierStored(number, stored, stored.is_kept)
        case _:
            return fx.TierLoaded(done.number, done.outcome, done.outcome is LoadOutcome.LOADED)


def _failed(effect: TierEffect) -> fx.Event:
    if isinstance(effect, fx.StoreTo):
        return fx.TierStored(effect.number, StoreOutcome.FAILED, is_ok=False)
    assert isinstance(effect, fx.LoadFrom), effect
    return fx.TierLoaded(effect.number, LoadOutcome.FAILED, is_ok=False)
