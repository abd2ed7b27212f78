"""The tier in a directory that several machines mount: each writes its own folder, all read all.

    lookup  answered from the view of all journals; where that lacks something, after a fresh look
    load    by its name from the folder of whoever has it, and proven
    store   in the own folder, behind its parent in anybody's, unless somebody has it

No server, no locks, nothing but files that are made whole, named, and removed. What others do is
learned from what they wrote (`journal.py`), and may be past: a record that its owner has evicted
meanwhile is a miss. The cap is of the own folder; nothing of another's is ever changed.

Ownership: all state is the node's owner's; threads (`Workers`) get operations and say how they
ended by a queue that `poll` empties.
"""

import logging
import time
from collections.abc import Callable
from pathlib import Path

from kvtide.errors import ConfigError, KVTideError
from kvtide.tiers.base import (
    Done,
    LoadJob,
    LookupJob,
    StoreJob,
    StoreOutcome,
    TierStatistics,
)
from kvtide.tiers.breaker import SHARED_RETRY_MS_MAX, Breaker
from kvtide.tiers.files import Files, SystemFiles
from kvtide.tiers.patience import CLEAR_S_MAX, Patience
from kvtide.tiers.scope import EVERYTHING, Scope
from kvtide.tiers.shared_dir.cap import Cap
from kvtide.tiers.shared_dir.members import ALIVE_MS, FolderLost, Place
from kvtide.tiers.shared_dir.ops import (
    AliveOp,
    ClaimOp,
    ClearOp,
    Ended,
    FreeOp,
    Hands,
    LoadOp,
    LookOp,
    Op,
    StoreOp,
    SweepOp,
    claimed,
)
from kvtide.tiers.shared_dir.others import Others
from kvtide.tiers.shared_dir.own import Journal, LiveRows
from kvtide.tiers.shared_dir.reads import Reads
from kvtide.tiers.shared_dir.stores import Stores
from kvtide.tiers.shared_dir.view import View
from kvtide.tiers.shared_dir.workers import Workers

logger = logging.getLogger("kvtide.shared_dir")

START_S_MAX = 2.0
"""So long a start takes in what it reads; the rest comes while it serves."""
CLEARS_MAX = 4096
"""Scopes that are remembered; one more means all records."""


class SharedDirTier:
    """Records as files of one directory. See `Tier` for what its calls promise.

    Args:
        path: of the directory; made if need be.
        bytes_max: the cap of the own folder.
        wake: called from any thread when `poll` has something to give.
        queue_bytes_max: stores beyond these bytes are dropped.
        files: the file system, for tests.

    Raises:
        ConfigError: the directory cannot be used.
    """

    name = "shared_dir"

    def __init__(
        self,
        path: Path,
        bytes_max: int,
        wake: Callable[[], None],
        *,
        queue_bytes_max: int,
        files: Files | None = None,
    ) -> None:
        """Take a folder, and read what is there."""
        self.path = path
        self.bytes_max = bytes_max
        self._wake = wake
        self._now_ms = 0
        self._done: list[Done] = []
        self._is_closed = self._is_sweeping = self._is_lost = False
        self._are_stores_failing = False
        self._place = Place(str(path.absolute()), files or SystemFiles())
        place = f"shared_dir {path}"
        self._writes = Breaker("writes", place, logger, SHARED_RETRY_MS_MAX)
        self._alive_ms = 0
        self._probe: AliveOp | ClaimOp | SweepOp | None = None
        self._alive: AliveOp | None = None
        self._clears: list[ClearOp] = []
        self._patience = Patience(CLEAR_S_MAX)
        try:
            journal = claimed(self._place)
        except (OSError, KVTideError) as error:
            self._place.free()
            raise ConfigError(f"shared_dir {path} cannot be used: {error}") from error
        self._hands = Hands(self._place, journal)
        self._view = View(self._place.own)
        self._others = Others(self._view)
        self._workers = Workers(self._hands, wake)
        cap = Cap(place, bytes_max)
        self._stores = Stores(self._view, self._workers, self._end, cap, queue_bytes_max)
        self._reads = Reads(
            place, self._view, self._others, self._workers, self._stores, self._end
        )
        self._take_own(journal)
        self._begin()

    def _begin(self) -> None:
        """Take in what others have; then begin to work."""
        until_s = time.monotonic() + START_S_MAX
        while self._others.is_taking and time.monotonic() < until_s:
            self._stores.free(self._others.take_more())
        while True:
            ended = self._hands.run(self._others.look())
            if ended.error is not None:
                break
            self._stores.free(self._others.take(ended))
            if not self._others.are_more or time.monotonic() > until_s:
                break
        if not self._others.is_taking:
            self._stores.shrink()  # the cap was lowered
            for op in self._stores.free_ops():
                if time.monotonic() < until_s:
                    self._stores.take_free(op, self._hands.run(op))
                else:
                    self._workers.write(op)
            self._workers.write(self._sweep_op())
        self._stores.journal_bytes = self._hands.journal_bytes
        self._workers.start()
        self._wake()  # for what is not taken in yet
        logger.info(
            "shared_dir %s: %d records in %d folders; ours is %s",
            self.path,
            len(self._view),
            1 + len(self._others),
            self._place.own.hex()[:8],
        )

    def _take_own(self, journal: Journal) -> None:
        """Know what the folder has that was taken."""
        self._stores.take_own(journal)
        self._others.take_own(journal.live)
        journal.live = LiveRows()

    def _take_more(self) -> None:
        """The next own records; once they are all known there may be some to evict."""
        self._stores.free(self._others.take_more())
        if not self._others.is_taking:
            self._stores.shrink()
        self._wake()

    # ---- jobs

    def lookup(self, job: LookupJob) -> None:
        self._reads.lookup(job)

    def load(self, job: LoadJob) -> None:
        self._reads.load(job)

    def store(self, job: StoreJob) -> None:
        if self._is_closed:
            self._stores.end(job.number, StoreOutcome.CLOSED)
        elif self._writes.is_open or self._reads.breaker.is_open:
            self._stores.end(job.number, StoreOutcome.BROKEN)
        else:
            self._stores.add(job, self._now_ms)
            self._pump()

    def clear(self, salt_digest: bytes | None, fingerprint: bytes | None = None) -> int:
        scope = Scope(salt_digest, fingerprint)
        if len(self._others.cleared) + len(self._clears) >= CLEARS_MAX:
            logger.warning("shared_dir %s: %d clears; all is cleared", self.path, CLEARS_MAX)
            scope = EVERYTHING
        if scope == EVERYTHING:  # which means what is still to be noted too
            self._clears.clear()
            self._others.clearing.clear()
        count, own = self._view.clear(scope)
        self._stores.clear(scope, own)
        if not self._is_closed:
            op = self._clear_op(scope)
            self._others.clearing.append(scope)
            self._clears.append(op)
            if not self._writes.is_open:
                self._workers.write(op)
                self._patience.wait(op.is_done)
        self._pump()
        return count

    def _clear_op(self, scope: Scope) -> ClearOp:
        return ClearOp(scope, self._others.known(), self._stores.sequence, self._reads.stuck)

    def _take_clear(self, op: ClearOp, ended: Ended) -> None:
        self._judge_write(op, ended.error)
        if op not in self._clears:  # it was tried twice, or another one means all that it does
            return
        if ended.error is None:
            self._clears.remove(op)
            self._others.noted(op.scope, op.up_to)
        elif not self._writes.is_open:
            self._workers.write(op)

    # ---- the owner's loop

    def poll(self) -> list[Done]:
        while self._workers.results:
            self._take(self._workers.results.popleft())
        if self._others.is_taking and not self._is_closed:
            self._take_more()
        self._pump()
        done, self._done = self._done, []
        return done

    def _end(self, done: Done) -> None:
        self._done.append(done)
        self._wake()

    def _take(self, ended: Ended) -> None:
        """What a thread says."""
        self._stores.journal_bytes = self._hands.journal_bytes
        match ended.op:
            case LookOp() as op:
                self._reads.take_look(op, ended)
            case LoadOp() as op:
                self._reads.take_load(op, ended)
            case StoreOp() as op:
                if self._stores.take(op, ended):
                    self._judge_write(op, ended.error)
            case FreeOp() as op:
                self._stores.take_free(op, ended)
                self._judge_write(op, ended.error)
            case ClearOp() as op:
                self._take_clear(op, ended)
            case SweepOp():
                self._is_sweeping = False
                self._stores.take_sweep(ended)
                self._take_probe(ended)
            case AliveOp() | ClaimOp():
                self._take_probe(ended)

    def _take_probe(self, ended: Ended) -> None:
        """The end of what may have been sent as a probe, or by itself."""
        if ended.op is self._alive:
            self._alive = None
        if ended.op is not self._probe:
            self._judge_write(ended.op, ended.error)
            return
        self._probe = None
        self._is_lost = isinstance(ended.error, FolderLost)
        self._writes.probed(ended.error, self._now_ms)
        if ended.journal is not None:
            self._change_own(ended.journal)
        if ended.error is None:
            for op in self._clears:
                self._workers.write(op)

    def _change_own(self, journal: Journal) -> None:
        """Go on in the folder that was taken in place of one that was lost."""
        self._others.change_own(self._place.own)
        self._take_own(journal)
        self._clears = [self._clear_op(op.scope) for op in self._clears]
        self._reads.look_around()
        logger.warning("shared_dir %s: ours is %s now", self.path, self._place.own.hex()[:8])

    def _pump(self) -> None:
        if self._writes.is_open or self._is_closed:
            return
        if self._stores.are_waiting and self._may_sweep:
            self._workers.write(self._sweep_op())
        self._stores.write_on()

    @property
    def _may_sweep(self) -> bool:
        """Whether there is something to sweep, and all that is not is known."""
        return self._stores.may_sweep and not (self._is_sweeping or self._others.is_taking)

    def _sweep_op(self) -> SweepOp:
        self._is_sweeping = True
        return SweepOp(set(self._view.keys_of(self._view.own)))

    def tick(self, now_ms: int) -> None:
        self._patience.renew()
        self._now_ms = max(self._now_ms, now_ms)
        self._stores.tick(self._now_ms)
        if self._is_closed:
            return
        if self._writes.wants_probe(self._now_ms):
            self._probe = self._next_probe()
            self._workers.write(self._probe)
        elif not self._writes.is_open and self._now_ms - self._alive_ms >= ALIVE_MS:
            self._say_alive()
        self._stores.retry()
        self._reads.tick(self._now_ms)
        self._pump()

    def _next_probe(self) -> AliveOp | ClaimOp | SweepOp:
        """What stores need next: where that fails it would not help that less works."""
        if self._is_lost and not self._workers.are_writing:
            return ClaimOp(self._others.cleared)
        return self._sweep_op() if self._may_sweep else AliveOp()

    def _say_alive(self) -> None:
        if self._alive is None:
            self._alive_ms = self._now_ms
            self._alive = AliveOp()
            self._workers.write(self._alive)

    # ---- when the place fails

    def _judge_write(self, op: Op, error: Exception | None) -> None:
        """What it tells of writes. Where stores fail, only a store shows that they do not: less
        may work all the time."""
        if isinstance(op, StoreOp):
            self._are_stores_failing = error is not None
        if error is None:
            if not self._are_stores_failing:
                self._writes.succeeded()
        elif self._writes.failed(error, self._now_ms):
            self._is_lost = isinstance(error, FolderLost)
            self._stores.take_back(StoreOutcome.BROKEN)
        elif isinstance(error, FolderLost) and not self._writes.is_open:
            self._say_alive()  # again, until the breaker opens: waiting mends nothing

    # ---- numbers and the end

    def statistics(self) -> TierStatistics:
        return TierStatistics(
            state=self._writes.reason or self._reads.breaker.reason or "on",
            bytes_used=self._stores.used_bytes,
            bytes_max=self.bytes_max,
            records=len(self._view),
            queued_bytes=self._stores.queued_bytes,
            loaded=dict(self._reads.loaded),
            stored=dict(self._stores.outcomes),
            loaded_bytes=self._reads.loaded_bytes,
            stored_bytes=self._stores.stored_bytes,
            evicted=self._stores.evicted,
        )

    def close(self, timeout_s: float) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        self._reads.close()
        self._stores.take_back(StoreOutcome.CLOSED)
        self._workers.stop(timeout_s)

    def check_integrity(self) -> None:
        """Assert that what is known agrees; looks at each record."""
        self._view.check_integrity()
        self._stores.check_integrity()
