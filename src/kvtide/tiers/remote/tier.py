"""A tier on a server that others may use too. What differs between stores is their `Session`.

    lookup, load   to a thread, which asks the place; at once, where the breaker is open
    store          queue ─► to the one writing thread, in order ─► there, or not

Nothing of what the place holds is mirrored here: others write to it, and it evicts as it likes. So
each job asks it, and what it says is believed only once it is proven.

Ownership: all state is the node's owner's; threads (`Workers`) get operations and say how they
ended by a queue that `poll` empties. What is there by number (`Census`) they tell as they hear it.
"""

import logging
from collections import Counter
from collections.abc import Callable

from kvtide.bounds import T_LOAD_MS, T_PUT_MS
from kvtide.core.records import RootName
from kvtide.errors import PlaceFailed
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
    TierStatistics,
)
from kvtide.tiers.breaker import RETRY_MS_MIN, SHARED_RETRY_MS_MAX, Breaker
from kvtide.tiers.hung import Hung
from kvtide.tiers.patience import CLEAR_S_MAX, Patience
from kvtide.tiers.pending import Pending, PendingStores
from kvtide.tiers.remote.census import Census
from kvtide.tiers.remote.health import Health
from kvtide.tiers.remote.session import Session
from kvtide.tiers.remote.workers import (
    LOAD_THREADS,
    AskOp,
    ClearOp,
    Ended,
    LoadOp,
    Op,
    ProbeOp,
    StoreOp,
    Workers,
)
from kvtide.tiers.scope import EVERYTHING, Scope

logger = logging.getLogger("kvtide.tiers")

PUT_MS_MAX = T_PUT_MS
"""A store that has waited for so long is dropped."""
SURVEY_MS = 10_000
"""So often the place is asked for its numbers: an idle tier knows whether it works, too. Where
nothing works that is seen soon, by RETRY_MS_MIN."""
HANDED_MAX = 16
"""Stores that the threads are given ahead: as many small ones as are sent until the owner looks
again. Those that were not begun are taken back where the place fails."""
CLEARS_MAX = 64
"""That may wait for a place that does not answer; one more means everything."""
ASKED_MAX = 256
"""Lookups that may wait: what is above finds nothing."""
LATE_MS = 1_000
"""A call bounds itself; one that runs for so much longer than it may does not come back."""


class RemoteTier:
    """Records on a server. See `Tier` for what its calls promise.

    Args:
        name: as statistics and threads say it.
        place: where it is, in words that hold no secret.
        open_session: makes a thread's session; it tells the census what it hears.
        bytes_max: the cap, which the sessions keep; shared by all that use the place.
        wake: called from any thread when `poll` has something to give.
        queue_bytes_max: stores beyond these bytes are dropped.

    Raises:
        ConfigError: no thread is to be had.
    """

    def __init__(
        self,
        name: str,
        place: str,
        open_session: Callable[[Census], Session],
        bytes_max: int,
        wake: Callable[[], None],
        queue_bytes_max: int,
    ) -> None:
        """Begin; nothing waits for the place, which is asked whether it is there."""
        self.name = name
        self._bytes_max = bytes_max
        self._wake = wake
        self._queue_bytes_max = queue_bytes_max
        self._census = Census()
        self._breaker = Breaker("loads and stores", place, logger, SHARED_RETRY_MS_MAX)
        # Lookups may work where values do not come, or are not taken: only a load tells that loads
        # work, and only a store that stores do.
        self._load_breaker = Breaker("loads", place, logger, SHARED_RETRY_MS_MAX)
        self._store_breaker = Breaker("stores", place, logger, SHARED_RETRY_MS_MAX)
        self._hung: Hung[Op] = Hung(_run_ms_max)
        self._health = Health()
        self._workers = Workers(name, lambda: open_session(self._census), wake)
        self._pending = PendingStores()
        self._clears: list[ClearOp] = []
        self._patience = Patience(CLEAR_S_MAX)
        self._asking: set[AskOp] = set()
        self._loading: set[LoadOp] = set()
        self._done: list[Done] = []
        self._loaded: Counter[str] = Counter()
        self._stored: Counter[str] = Counter()
        self._loaded_bytes = 0
        self._stored_bytes = 0
        self._now_ms = 0
        self._surveyed_ms = 0
        self._is_surveying = True
        self._is_closed = False
        self._workers.start()
        self._workers.probe()

    @property
    def bytes_max(self) -> int:
        """The cap: the place's own, once it has said one."""
        said = self._census.bytes_max
        return self._bytes_max if said is None else said

    # ---- jobs

    def lookup(self, job: LookupJob) -> None:
        is_vain = self._is_closed or self._are_loads_stopped or self._is_cleared(job.root)
        if is_vain or len(self._asking) >= ASKED_MAX:
            self._end(Found(job.number, [], may_go_on=False))
            return
        op = AskOp(job)
        self._asking.add(op)
        self._workers.ask(op)

    def load(self, job: LoadJob) -> None:
        if self._is_closed:
            self._end_load(job, LoadOutcome.CLOSED)
        elif self._are_loads_stopped:
            self._end_load(job, LoadOutcome.BROKEN)
        elif self._is_cleared(job.record.root):
            self._end_load(job, LoadOutcome.ABSENT)
        else:
            op = LoadOp(job, self._load_breaker.wants_probe(self._now_ms))
            self._loading.add(op)
            self._workers.load(op)

    @property
    def _are_loads_stopped(self) -> bool:
        return self._breaker.is_open or self._load_breaker.stops(self._now_ms)

    def store(self, job: StoreJob) -> None:
        record = job.record
        is_stopped = self._breaker.is_open or self._store_breaker.stops(self._now_ms)
        if self._is_closed or is_stopped:
            outcome = StoreOutcome.CLOSED if self._is_closed else StoreOutcome.BROKEN
            self._end_store(job.number, outcome)
            return
        if self._store_breaker.wants_probe(self._now_ms):
            self._store_breaker.probed(None, self._now_ms)  # the first that fails stops them again
        twin = self._pending.by_key.get(record.key)
        if twin is not None and twin.job.record == record:
            twin.twins.append(job.number)
        elif twin is not None:  # one name for two contents: it cannot be
            self._end_store(job.number, StoreOutcome.FAILED)
        elif self._pending.queued_bytes + record.payload_bytes > self._queue_bytes_max:
            self._end_store(job.number, StoreOutcome.QUEUE_FULL)
        else:
            pending = Pending(job, 0, self._now_ms)
            self._pending.add(pending, self._pending.by_key.get(record.parent))
            self._hand_over()

    def clear(self, salt_digest: bytes | None, fingerprint: bytes | None = None) -> int:
        if self._is_closed:
            return 0
        scope = Scope(salt_digest, fingerprint)
        known = self._census.cleared(scope)
        self._forget_done_clears()
        if len(self._clears) >= CLEARS_MAX:
            scope = EVERYTHING
        meant = [one for one in self._pending.unended() if scope.has(one.job.record.root)]
        self._take_back_handed()
        self._drop(meant, StoreOutcome.NOT_ANCHORED)
        if any(op.scope == EVERYTHING for op in self._clears):  # it comes ahead of any store
            self._hand_over()
            return known
        op = ClearOp(scope)
        self._clears.append(op)
        self._workers.clear(op)  # only now: what is doomed and has not begun never does
        self._hand_over()
        if not self._breaker.is_open and self._patience.wait(op.is_done):
            return known if op.count is None else op.count
        return known

    def _is_cleared(self, root: RootName) -> bool:
        """Whether it was cleared and the place has not taken note of it yet."""
        self._forget_done_clears()
        return any(op.scope.has(root) for op in self._clears)

    def _forget_done_clears(self) -> None:
        self._clears = [op for op in self._clears if not op.is_done.is_set()]

    # ---- ends

    def _end(self, done: Done) -> None:
        self._done.append(done)
        self._wake()

    def _end_load(self, job: LoadJob, outcome: LoadOutcome) -> None:
        self._loaded[outcome] += 1
        if outcome is LoadOutcome.LOADED:
            self._loaded_bytes += job.record.payload_bytes
        self._end(Loaded(job.number, outcome))

    def _end_store(self, number: int, outcome: StoreOutcome) -> None:
        self._stored[outcome] += 1
        self._end(Stored(number, outcome))

    def _end_pending(self, pending: Pending, outcome: StoreOutcome) -> None:
        self._pending.end(pending)
        if outcome is StoreOutcome.STORED:
            self._stored_bytes += pending.job.record.payload_bytes
        self._end_store(pending.job.number, outcome)
        twins = StoreOutcome.HELD if outcome is StoreOutcome.STORED else outcome
        for number in pending.twins:
            self._end_store(number, twins)

    def _drop(
        self, dropped: list[Pending], outcome: StoreOutcome, behind: StoreOutcome | None = None
    ) -> None:
        """These end so, and those behind them as `behind` (not anchored, unless it is said); what
        the writing thread has begun ends when that has done with its cells."""
        first = {id(one) for one in dropped}
        for pending in self._pending.doom(dropped):
            is_first = id(pending) in first
            self._end_pending(
                pending, outcome if is_first else behind or StoreOutcome.NOT_ANCHORED
            )
        self._pending.drop_ended()

    # ---- the queue of stores

    def _hand_over(self) -> None:
        while len(self._pending.written) < HANDED_MAX:
            pending = self._pending.head()
            if pending is None:
                break
            self._pending.waiting.popleft()
            op = StoreOp(pending.job, pending)
            pending.op = op
            self._pending.written[op] = pending
            self._workers.store(op)

    def _take_back_handed(self) -> None:
        """What the writing thread has not begun waits again."""
        for op in reversed(self._workers.take_back_stores()):
            pending = self._pending.written.pop(op)
            pending.op = None
            self._pending.waiting.appendleft(pending)

    def _take_store(self, op: StoreOp, ended: Ended) -> None:
        pending = self._pending.written.pop(op)
        outcome = ended.outcome
        if pending.is_doomed:  # cleared meanwhile: a clear follows it that takes it away
            outcome = StoreOutcome.NOT_ANCHORED
        elif ended.error is not None:
            outcome = StoreOutcome.CLOSED if self._is_closed else StoreOutcome.FAILED
        assert isinstance(outcome, StoreOutcome), ended
        behind = list(pending.behind)
        self._end_pending(pending, outcome)
        if not outcome.is_kept:
            self._take_back_handed()
            self._drop(behind, StoreOutcome.NOT_ANCHORED)

    # ---- the owner's loop

    def poll(self) -> list[Done]:
        while self._workers.results:
            self._take(self._workers.results.popleft())
        self._hand_over()
        done, self._done = self._done, []
        return done

    def tick(self, now_ms: int) -> None:
        self._patience.renew()
        self._now_ms = max(self._now_ms, now_ms)
        self._health.now_ms = self._now_ms
        if self._is_closed:
            return
        self._drop_old(self._now_ms - PUT_MS_MAX)
        self._look_for_hung()
        if self._is_blocked:
            return
        if self._breaker.wants_probe(self._now_ms):
            self._workers.probe()
        else:
            survey_ms = RETRY_MS_MIN if self._health.is_failing else SURVEY_MS
            if self._now_ms - self._surveyed_ms >= survey_ms:
                self._survey()

    def _survey(self) -> None:
        """Ask for the numbers, which shows whether the place works; once at a time."""
        if not (self._breaker.is_open or self._is_surveying):
            self._is_surveying = True
            self._workers.probe()

    def _drop_old(self, before_ms: int) -> None:
        """Stores that came by then and have not begun. Only where there are any is the thread's
        queue taken back: it would run dry at each tick."""
        first = self._workers.next_store()
        if first is not None and first.pending.since_ms <= before_ms:
            self._take_back_handed()
        self._drop(self._pending.older_than(before_ms), StoreOutcome.TOO_OLD)
        self._hand_over()

    def _take(self, ended: Ended) -> None:
        """What a thread says."""
        self._hung.ended(ended.op)
        match ended.op:
            case AskOp() as op:
                self._asking.discard(op)
                self._end(Found(op.job.number, ended.found, ended.may_go_on))
            case LoadOp() as op:
                self._take_load(op, ended)
            case StoreOp() as op:
                self._take_store(op, ended)
            case ProbeOp():
                self._is_surveying = False
                self._surveyed_ms = self._now_ms
                if self._breaker.is_probing:
                    self._breaker.probed(ended.error, self._now_ms)
                    if ended.error is None:  # what stopped stores may have been that
                        self._store_breaker.probed(None, self._now_ms)
        if not ended.tells_of_place:
            self._let_probe_again(ended.op)
        elif isinstance(ended.op, StoreOp):
            self._judge_store(ended)
        else:
            self._judge(ended.error)
            if isinstance(ended.op, LoadOp):
                self._judge_load(ended.op, ended)

    def _take_load(self, op: LoadOp, ended: Ended) -> None:
        self._loading.discard(op)
        outcome = ended.outcome
        if ended.error is not None:
            outcome = LoadOutcome.CLOSED if self._is_closed else LoadOutcome.FAILED
        assert isinstance(outcome, LoadOutcome), ended
        self._end_load(op.job, outcome)

    # ---- when the place fails

    def _judge(self, error: PlaceFailed | None) -> None:
        if self._is_closed:
            return
        if error is None:
            self._health.succeeded()
            if not self._is_blocked:
                self._breaker.worked()
            return
        self._health.failed(str(error))
        if self._breaker.failed(error, self._now_ms):
            self._end_what_waits(LoadOutcome.BROKEN, StoreOutcome.BROKEN)

    def _judge_load(self, op: LoadOp, ended: Ended) -> None:
        """What a load tells of loads: where it is absent, nothing. Where all has stopped, nothing
        more is to be said."""
        if self._is_closed:
            return
        if op.is_probe:
            self._load_breaker.probed(ended.error, self._now_ms)
        elif ended.outcome is LoadOutcome.LOADED:
            self._load_breaker.worked()
        elif (
            ended.error is not None
            and not self._breaker.is_open
            and self._load_breaker.failed(ended.error, self._now_ms)
        ):
            self._end_waiting_loads(LoadOutcome.BROKEN)

    def _judge_store(self, ended: Ended) -> None:
        """What a store tells of stores: where nothing was to be sent, nothing. Of all else it
        tells only where it went well, since what a place does not take it may still give; so a
        failure asks whether the place works."""
        if ended.error is None:
            if ended.outcome is StoreOutcome.STORED:
                self._store_breaker.succeeded()
            self._judge(None)
        elif not (self._is_closed or self._breaker.is_open):
            self._health.failed(str(ended.error))
            if self._store_breaker.failed(ended.error, self._now_ms):
                self._end_waiting_stores(StoreOutcome.BROKEN)
            self._survey()

    def _look_for_hung(self) -> None:
        """A call that does not come back, as that of a name's resolver: what waits behind it ends.
        Its own cells are lent until it does come back."""
        for op in self._hung.look(self._workers.running(), self._now_ms):
            self._breaker.hung(_run_ms_max(op), self._now_ms)
            self._let_probe_again(op)
        if self._is_blocked or (self._hung.told and self._breaker.is_open):
            self._end_what_waits(LoadOutcome.BROKEN, StoreOutcome.BROKEN)

    @property
    def _is_blocked(self) -> bool:
        """Whether all threads of a kind have a call that does not come back: whatever others
        show, what they are given would wait."""
        hung = self._hung.told
        hung_loads = sum(isinstance(op, LoadOp) for op in hung)
        is_other_hung = hung_loads < len(hung)  # lookups and writes have one thread each
        return hung_loads >= LOAD_THREADS or is_other_hung

    def _end_what_waits(self, loads: LoadOutcome, stores: StoreOutcome) -> None:
        """All that no thread has begun."""
        for ask in self._workers.take_back_asks():
            self._asking.discard(ask)
            self._end(Found(ask.job.number, [], may_go_on=False))
        self._end_waiting_loads(loads)
        self._end_waiting_stores(stores)

    def _end_waiting_stores(self, outcome: StoreOutcome) -> None:
        self._take_back_handed()
        self._drop(self._pending.unwritten(), outcome, outcome)

    def _end_waiting_loads(self, outcome: LoadOutcome) -> None:
        for load in self._workers.take_back_loads():
            self._let_probe_again(load)
            self._loading.discard(load)
            self._end_load(load.job, outcome)

    def _let_probe_again(self, op: Op) -> None:
        """It was not tried, or does not come back; if it was a probe, another one may be."""
        if isinstance(op, LoadOp) and op.is_probe:
            self._load_breaker.unproven()

    # ---- numbers and the end

    def statistics(self) -> TierStatistics:
        parts = (("loads", self._load_breaker.reason), ("stores", self._store_breaker.reason))
        stopped = "; ".join(f"{work} stop: {reason}" for work, reason in parts if reason)
        return TierStatistics(
            state=self._breaker.reason or stopped or self._health.state,
            bytes_used=min(self._census.bytes_used, self.bytes_max),
            bytes_max=self.bytes_max,
            records=self._census.records,
            queued_bytes=self._pending.queued_bytes,
            loaded=dict(self._loaded),
            stored=dict(self._stored),
            loaded_bytes=self._loaded_bytes,
            stored_bytes=self._stored_bytes,
            evicted=self._census.evicted,
        )

    def close(self, timeout_s: float) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        self._end_what_waits(LoadOutcome.CLOSED, StoreOutcome.CLOSED)
        self._workers.stop(timeout_s)


def _run_ms_max(op: Op) -> int:
    """What one is carried out in: the writing thread may clear and sweep ahead of a store."""
    limit_ms = T_LOAD_MS if isinstance(op, AskOp | LoadOp) else PUT_MS_MAX + 2 * T_LOAD_MS
    return limit_ms + LATE_MS
