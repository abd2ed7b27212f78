"""Between the machine and the tiers: effects become jobs, and what has ended becomes events.

A tier may be anybody's code. What one raises, or says of jobs that it does not have, costs that
tier: it is off until the node's next start. Lookups that it owes are answered as if it had
nothing. Loads and stores that it has stay open, and with them their cells: it may still write the
ones and read the others, and what it keeps must be what was there.

Ownership: everything here belongs to the owner's thread until `close`, which is the last call and
comes from a thread of its own; a tier's `wake`, which may come from any thread, only asks the loop
to poll.
"""

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TypeAlias, assert_never

from kvtide.core import effects as fx
from kvtide.core.keys import KEY_BYTES
from kvtide.core.messages import Run
from kvtide.core.records import Record
from kvtide.errors import HostMemoryError
from kvtide.node.health import ON, Health
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

JobEffect: TypeAlias = fx.AskTier | fx.LoadFrom | fx.StoreTo
TierEffect: TypeAlias = JobEffect | fx.ClearTiers
Job: TypeAlias = LookupJob | LoadJob | StoreJob

HEALTH_MS = 5_000
CLOSE_S_MAX = 3.0
"""Of T_stop: so long the node waits, at its end, for what is being written."""


class _Place:
    """One tier, what it owes, and how it is."""

    def __init__(self, tier: Tier) -> None:
        self.tier = tier
        self.health = Health()
        self.numbers = TierStatistics(ON, 0, 0, 0, 0)
        """The last that it told."""
        self.is_off = False
        self.lookups: dict[int, LookupJob] = {}
        self.loads: set[int] = set()
        self.stores: set[int] = set()

    def submit(self, job: Job) -> None:
        """Hand a job over."""
        match job:
            case LookupJob():
                self.lookups[job.number] = job
                self.tier.lookup(job)
            case LoadJob():
                self.loads.add(job.number)
                self.tier.load(job)
            case StoreJob():
                self.stores.add(job.number)
                self.tier.store(job)

    def ended(self, done: Done) -> fx.Event:
        """What the machine is told; raises where the tier has no such job, or no such answer."""
        match done:
            case Found(number, records, may_go_on):
                _check_answer(self.lookups[number], records)
                del self.lookups[number]
                return fx.TierFound(number, list(records), bool(may_go_on))
            case Loaded(number):
                loaded = LoadOutcome(done.outcome)
                self.loads.remove(number)
                return fx.TierLoaded(number, loaded, loaded is LoadOutcome.LOADED)
            case Stored(number):
                stored = StoreOutcome(done.outcome)
                self.stores.remove(number)
                return fx.TierStored(number, stored, stored.is_kept)
            case _:
                assert_never(done)


class Tiers:
    """All tiers of the node, in the order in which the machine numbers them."""

    def __init__(
        self,
        tiers: Sequence[Tier],
        cells: Callable[[Run], list[memoryview]],
        feed: Callable[[fx.Event], None],
    ) -> None:
        """`cells` gives the memory of a run, shard by shard."""
        self._places = [_Place(tier) for tier in tiers]
        self._cells = cells
        self._feed = feed
        self._now_ms = self._looked_ms = 0

    def __len__(self) -> int:
        return len(self._places)

    @contextlib.contextmanager
    def _calling(self, place: _Place) -> Iterator[None]:
        """Call a tier in here: what it raises is the last that is heard of it."""
        try:
            yield
        except Exception as error:
            name = place.tier.name
            logger.exception("a fault in tier %s: the node goes on without it", name)
            place.is_off = True
            state = f"off until the node's next start, for a fault of its own: {error!r}"
            place.numbers = replace(place.numbers, state=state)
            lookups, place.lookups = place.lookups, {}
            for number in lookups:
                self._feed(fx.TierFound(number, [], may_go_on=False))

    def _on(self) -> Iterator[_Place]:
        return (place for place in self._places if not place.is_off)

    def carry_out(self, effect: TierEffect) -> None:
        """Hand a job over; its end comes by `poll`."""
        if isinstance(effect, fx.ClearTiers):
            for place in self._places:  # those that are off too: their next start finds the rest
                with self._calling(place):
                    place.tier.clear(effect.salt_digest, effect.fingerprint)
            return
        place = self._places[effect.tier]
        if place.is_off:
            self._feed(_failed(effect))
            return
        try:
            job = self._job(effect)
        except HostMemoryError as error:  # no place in this process for the cells
            logger.warning("%s", error)
            self._feed(_failed(effect))
            return
        with self._calling(place):
            place.submit(job)

    def _job(self, effect: JobEffect) -> Job:
        match effect:
            case fx.AskTier(_, number, root, parent, keys, digests, layout):
                return LookupJob(number, root, parent, keys, digests, layout)
            case fx.LoadFrom(_, number, record, run):
                return LoadJob(number, record, self._cells(run))
            case fx.StoreTo(_, number, record, run):
                return StoreJob(number, record, self._cells(run))

    def poll(self) -> None:
        """Tell the machine what has ended."""
        for place in self._on():
            events = []
            with self._calling(place):
                for done in place.tier.poll():
                    events.append(place.ended(done))  # noqa: PERF401 - a fault ends it half-way
            for event in events:
                self._feed(event)

    def tick(self, now_ms: int) -> None:
        """Time has passed."""
        self._now_ms = now_ms
        for place in self._on():
            with self._calling(place):
                place.tier.tick(now_ms)
        self.poll()
        if now_ms - self._looked_ms >= HEALTH_MS:
            self._looked_ms = now_ms
            for place in self._places:
                self._look(place)

    def _look(self, place: _Place) -> None:
        if place.is_off:
            place.health.look(place.numbers, self._now_ms)
            return
        with self._calling(place):
            numbers = replace(place.tier.statistics())
            place.health.look(numbers, self._now_ms)
            place.numbers = numbers

    def statistics(self) -> dict[str, TierStatistics]:
        """Of each tier, by its name; the states are those of `Health`."""
        found = {}
        for place in self._places:
            self._look(place)
            state = place.health.state(place.numbers, self._now_ms)
            found[place.tier.name] = replace(place.numbers, state=state)
        return found

    def close(self) -> None:
        """End all jobs in bounded time; blocks. What the machine wanted to know is over.

        All tiers at the same time: several that hang cost no more than one.
        """
        threads = [
            threading.Thread(target=_close, args=(place.tier,), name="kvtide-close", daemon=True)
            for place in self._places
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


def _check_answer(job: LookupJob, records: Sequence[Record]) -> None:
    """Raise ValueError where these are no chain as it was asked for."""
    parent, whole = job.parent, len(job.keys) // KEY_BYTES
    for position, record in enumerate(records):
        key = job.keys[position * KEY_BYTES :][:KEY_BYTES] or record.key
        found = (record.root, record.layout, record.parent, record.key)
        is_whole = record.is_whole or position == whole
        if found != (job.root, job.layout, parent, key) or not is_whole or position > whole:
            raise ValueError(f"record {position} of {len(records)} is not what was asked for")
        parent = key


def _failed(effect: JobEffect) -> fx.Event:
    match effect:
        case fx.AskTier(_, number):
            return fx.TierFound(number, [], may_go_on=False)
        case fx.StoreTo(_, number):
            return fx.TierStored(number, StoreOutcome.FAILED, is_ok=False)
        case fx.LoadFrom(_, number):
            return fx.TierLoaded(number, LoadOutcome.FAILED, is_ok=False)
