"""Between the machine and the tiers: effects become jobs, and what has ended becomes events.

A tier may be anybody's code. What one raises, or says of jobs that it does not have, costs that
tier: it is off until the node's next start. What had ended by then counts. Lookups that it owes
are answered as if it had nothing. Loads and stores that it has stay open, and with them their
cells: it may still write the ones and read the others, and what it keeps must be what was there.

Ownership: everything here belongs to the owner's thread until `close`, which is the last call and
comes from a thread of its own; a tier's `wake`, which may come from any thread, only asks the loop
to poll.
"""

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
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
"""Between two looks at what a tier says of itself: `Health` thinks in minutes."""
CLOSE_S_MAX = 3.0
"""Of T_stop: so long a tier may take, at its end, for what is being written."""
CLOSE_LATE_S_MAX = 1.5
"""So much longer than `CLOSE_S_MAX` a tier that does not close is waited for, then left behind."""


class _Account:
    """What one tier owes, and how it is."""

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

    def take_ended(self, events: list[fx.Event]) -> None:
        """Add what has ended to what the machine is to be told.

        Raises what the tier raises, or for what it may not say; `events` keeps what came before.
        """
        for done in self.tier.poll():
            events.append(self._ended(done))  # noqa: PERF401 - what came before a fault is kept

    def _ended(self, done: Done) -> fx.Event:
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


@dataclass(frozen=True, slots=True)
class Cleared:
    """What came of a clear in one tier: how many records it says it had, and its state by then."""

    records: int
    state: str


class Tiers:
    """All tiers of the node, in the order in which the machine numbers them."""

    def __init__(
        self,
        tiers: Sequence[Tier],
        cells: Callable[[Run], list[memoryview]],
        feed: Callable[[fx.Event], None],
    ) -> None:
        """`cells` gives the memory of a run, shard by shard."""
        self._accounts = [_Account(tier) for tier in tiers]
        self._cells = cells
        self._feed = feed
        self._now_ms = self._looked_ms = 0
        self.cleared: dict[str, Cleared] = {}
        """What came of the last clear, by tier."""

    def __len__(self) -> int:
        return len(self._accounts)

    @contextlib.contextmanager
    def _calling(self, account: _Account) -> Iterator[None]:
        """Call a tier in here: what it raises is the last that is heard of it."""
        try:
            yield
        except Exception as error:
            name = account.tier.name
            logger.exception(
                "a fault in tier %s: the node goes on without it until its next start; whoever"
                " wrote the tier should see this",
                name,
            )
            was_off, account.is_off = account.is_off, True
            state = f"off until the node's next start, for a fault of its own: {error!r}"
            account.numbers = replace(account.numbers, state=state)
            events: list[fx.Event] = []
            with contextlib.suppress(Exception):
                if not was_off:
                    account.take_ended(events)  # what had ended by then
            lookups, account.lookups = account.lookups, {}
            events += [fx.TierFound(number, [], may_go_on=False) for number in lookups]
            for event in events:
                self._feed(event)

    def _on(self) -> Iterator[_Account]:
        return (account for account in self._accounts if not account.is_off)

    def carry_out(self, effect: TierEffect) -> None:
        """Hand a job over; its end comes by `poll`."""
        if isinstance(effect, fx.ClearTiers):
            self._clear(effect)
            return
        account = self._accounts[effect.tier]
        if account.is_off:
            self._feed(_failed(effect))
            return
        try:
            job = self._job(effect)
        except HostMemoryError as error:  # no room in this process for the cells
            logger.warning("%s", error)
            self._feed(_failed(effect))
            return
        with self._calling(account):
            account.submit(job)

    def _clear(self, effect: fx.ClearTiers) -> None:
        for account in self._accounts:  # also those that are off: their next start finds all
            records = 0
            with self._calling(account):
                records = int(account.tier.clear(effect.salt_digest, effect.fingerprint))
            self._look(account)
            self.cleared[account.tier.name] = Cleared(records, account.numbers.state)

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
        for account in self._on():
            events: list[fx.Event] = []
            with self._calling(account):
                account.take_ended(events)
            for event in events:
                self._feed(event)

    def tick(self, now_ms: int) -> None:
        """Time has passed."""
        self._now_ms = now_ms
        for account in self._on():
            with self._calling(account):
                account.tier.tick(now_ms)
        self.poll()
        if now_ms - self._looked_ms >= HEALTH_MS:
            self._looked_ms = now_ms
            for account in self._accounts:
                self._look(account)

    def _look(self, account: _Account) -> None:
        if account.is_off:
            account.health.look(account.numbers, self._now_ms)
            return
        with self._calling(account):
            numbers = replace(account.tier.statistics())
            account.health.look(numbers, self._now_ms)
            account.numbers = numbers

    def statistics(self) -> dict[str, TierStatistics]:
        """Of each tier, by its name; the states are those of `Health`."""
        found = {}
        for account in self._accounts:
            self._look(account)
            state = account.health.state(account.numbers, self._now_ms)
            found[account.tier.name] = replace(account.numbers, state=state)
        return found

    def close(self) -> None:
        """End all jobs; see `close_tiers`. What the machine wanted to know is over."""
        close_tiers([account.tier for account in self._accounts])


def close_tiers(tiers: Sequence[Tier]) -> None:
    """Close these; blocks, but in bounded time, whatever they do.

    All at the same time: several that hang cost no more than one. One that does is left behind
    with its thread, which ends with the process.

    Raises:
        RuntimeError: the system gives no thread for it.
    """
    until_s = time.monotonic() + CLOSE_S_MAX + CLOSE_LATE_S_MAX
    threads = [
        threading.Thread(target=_close, args=(tier,), name="kvtide-close", daemon=True)
        for tier in tiers
    ]
    for thread in threads:
        thread.start()
    for tier, thread in zip(tiers, threads, strict=True):
        thread.join(max(0.0, until_s - time.monotonic()))
        if thread.is_alive():
            taken_s = CLOSE_S_MAX + CLOSE_LATE_S_MAX
            logger.warning("tier %s is left behind: not closed in %g s", tier.name, taken_s)


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
        asked = (job.root, job.layout, parent, key)
        if found != asked:
            names = zip(("root", "layout", "parent", "key"), found, asked, strict=True)
            differ = ", ".join(name for name, one, other in names if one != other)
            raise ValueError(f"record {position} of {len(records)} has another {differ}")
        if position > whole or not (record.is_whole or position == whole):
            raise ValueError(
                f"record {position} of {len(records)} is too many, or no whole chunk: asked for"
                f" were {whole} of these, and one record behind them"
            )
        parent = key


def _failed(effect: JobEffect) -> fx.Event:
    match effect:
        case fx.AskTier(_, number):
            return fx.TierFound(number, [], may_go_on=False)
        case fx.StoreTo(_, number):
            return fx.TierStored(number, StoreOutcome.FAILED, is_ok=False)
        case fx.LoadFrom(_, number):
            return fx.TierLoaded(number, LoadOutcome.FAILED, is_ok=False)
