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
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from kvtide.bounds import T_LOAD_MS
from kvtide.errors import ConfigError, CorruptRecord, KVTideError
from kvtide.tiers.base import (
    Done,
    Found,
    Loaded,
    LoadJob,
    LoadOutcome,
    LookupJob,
    StoreJob,
    StoreOutcome,
    TierStatistics,
)
from kvtide.tiers.breaker import SHARED_RETRY_MS_MAX, Breaker
from kvtide.tiers.files import Files, SystemFiles
from kvtide.tiers.hung import Hung
from kvtide.tiers.kinds import Kind
from kvtide.tiers.scope import EVERYTHING, Scope
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
from kvtide.tiers.shared_dir.stores import Stores
from kvtide.tiers.shared_dir.view import Row, View
from kvtide.tiers.shared_dir.workers import Workers

logger = logging.getLogger("kvtide.shared_dir")

FRESH_MS = 100
"""A lookup that finds less than it asks for makes a look, unless one began within this time: what
others stored is found a tenth of a second later, and their server is asked ten times a second."""
LOOK_MS = 1_000
"""Without lookups too: what hangs on records that others evicted gives its room back."""
START_S_MAX = 2.0
"""So long a start takes in what it reads; the rest comes while it serves."""
CLEAR_S_MAX = 0.2
"""See `Tier.clear`."""
CLEARS_MAX = 4096
"""Scopes that are remembered; one more means all records."""
MEMBER_MS_MAX = 20
"""What a look may take for each member: some three answers of a server that is not near."""


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
        self._loaded: Counter[str] = Counter()
        self._loaded_bytes = 0
        self._is_closed = self._is_sweeping = self._is_lost = False
        self._place = Place(str(path.absolute()), files or SystemFiles())
        place = f"shared_dir {path}"
        self._reads = Breaker("reads", place, logger, SHARED_RETRY_MS_MAX)
        self._writes = Breaker("writes", place, logger, SHARED_RETRY_MS_MAX)
        self._asking: list[LookupJob] = []
        self._look: LookOp | None = None
        self._looked_ms = self._alive_ms = 0
        self._probe: AliveOp | ClaimOp | SweepOp | None = None
        self._alive: AliveOp | None = None
        self._hung: Hung[Op] = Hung(_run_ms_max)
        self._clears: list[ClearOp] = []
        try:
            journal = claimed(self._place)
        except (OSError, KVTideError) as error:
            self._place.free()
            raise ConfigError(f"shared_dir {path} cannot be used: {error}") from error
        self._hands = Hands(self._place, journal)
        self._view = View(self._place.own)
        self._others = Others(self._view)
        self._workers = Workers(self._hands, wake)
        self._stores = Stores(self._view, self._workers, self._end, bytes_max, queue_bytes_max)
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

    # ---- lookups

    def lookup(self, job: LookupJob) -> None:
        if self._reads.is_open or self._is_closed:
            self._end(Found(job.number, [], may_go_on=False))
            return
        found, is_all = self._found(job)
        is_fresh = self._now_ms - self._looked_ms < FRESH_MS or self._others.are_more
        if is_all or is_fresh or self._is_look_late:
            self._end(found)
            return
        self._asking.append(job)
        self._look_around()

    def _found(self, job: LookupJob) -> tuple[Found, bool]:
        """The answer, as far as is known; whether it has all that was asked for."""
        kind = Kind(job.root, job.layout)
        rows, may_go_on = self._view.match(kind, job.parent, job.keys, job.digests)
        last = rows[-1].digests if rows else b""
        is_all = len(rows) * len(job.parent) >= len(job.keys) and last.startswith(job.digests)
        return Found(job.number, [row.record for row in rows], may_go_on), is_all

    def _look_around(self) -> None:
        if self._look is None:
            self._looked_ms = self._now_ms
            self._look = self._others.look()
            self._workers.read(self._look)

    @property
    def _is_look_late(self) -> bool:
        """Whether there is one that nobody waits for any more."""
        return self._look is not None and self._now_ms - self._looked_ms >= T_LOAD_MS

    def _take_look(self, op: LookOp, ended: Ended) -> None:
        self._look = None
        if ended.error is None:
            self._stores.free(self._others.take(ended))
        self._judge_read(ended.error)  # which has answered, if that broke it
        if ended.error is not None or op.own == self._view.own:  # else the next one says more
            self._answer()
        if ended.error is None and self._others.are_more and not self._is_closed:
            self._look_around()

    def _answer(self) -> None:
        """Whoever waits is told what is known."""
        asking, self._asking = self._asking, []
        for job in asking:
            found, _ = self._found(job)
            self._end(found)

    # ---- loads

    def load(self, job: LoadJob) -> None:
        if self._is_closed:
            return self._end_load(job, LoadOutcome.CLOSED)
        if self._reads.is_open:
            return self._end_load(job, LoadOutcome.BROKEN)
        row = self._view.find(job.record)
        if row is None:
            return self._end_load(job, LoadOutcome.ABSENT)
        self._view.touch([row])
        row.holds += 1
        own = self._view.own
        members = sorted(row.members, key=lambda member: member != own)
        return self._workers.read(LoadOp(job, row, tuple(members)))

    def _take_load(self, op: LoadOp, ended: Ended) -> None:
        op.row.holds -= 1
        outcome = LoadOutcome.LOADED
        if isinstance(ended.error, CorruptRecord):
            outcome = LoadOutcome.CORRUPT
        elif ended.error is not None:
            outcome = LoadOutcome.FAILED
        elif len(ended.bad) == len(op.members):
            outcome = LoadOutcome.ABSENT
        if outcome is not LoadOutcome.FAILED:
            self._not_there(op.row, ended.bad)
        self._judge_read(ended.error if outcome is LoadOutcome.FAILED else None)
        self._end_load(op.job, outcome)

    def _not_there(self, row: Row, members: list[bytes]) -> None:
        """None of these members has it, whatever their journals say."""
        for member in members:
            if self._view.index.get(row.key) is not row or member not in row.members:
                continue
            if member == self._view.own:
                self._stores.let_go(row)
            else:
                self._stores.free(self._view.remove(row, member))

    def _end_load(self, job: LoadJob, outcome: LoadOutcome) -> None:
        self._loaded[outcome] += 1
        if outcome is LoadOutcome.LOADED:
            self._loaded_bytes += job.record.payload_bytes
        self._end(Loaded(job.number, outcome))

    # ---- stores and clears

    def store(self, job: StoreJob) -> None:
        if self._is_closed:
            self._stores.end(job.number, StoreOutcome.CLOSED)
        elif self._writes.is_open or self._reads.is_open:
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
            op = ClearOp(scope, self._others.known(), self._stores.sequence)
            self._others.clearing.append(scope)
            self._clears.append(op)
            if not self._writes.is_open:
                self._workers.write(op, CLEAR_S_MAX)
        self._pump()
        return count

    def _take_clear(self, op: ClearOp, ended: Ended) -> None:
        self._judge_write(ended.error)
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
        self._hung.ended(ended.op)
        self._stores.journal_bytes = self._hands.journal_bytes
        match ended.op:
            case LookOp() as op:
                self._take_look(op, ended)
            case LoadOp() as op:
                self._take_load(op, ended)
            case StoreOp() as op:
                self._stores.take(op, ended)
                self._judge_write(ended.error)
            case FreeOp() as op:
                self._stores.take_free(op, ended)
                self._judge_write(ended.error)
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
            self._judge_write(ended.error)
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
        known, last = self._others.known(), self._stores.sequence
        self._clears = [ClearOp(op.scope, known, last) for op in self._clears]
        self._look_around()
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
        self._now_ms = max(self._now_ms, now_ms)
        self._stores.drop_old(self._now_ms)
        if self._is_closed:
            return
        if self._writes.wants_probe(self._now_ms):
            self._probe = self._next_probe()
            self._workers.write(self._probe)
        elif not self._writes.is_open and self._now_ms - self._alive_ms >= ALIVE_MS:
            self._say_alive()
        self._stores.retry()
        hung = self._hung.look(self._workers.running_reads(), self._now_ms)
        if hung and self._reads.hung(max(map(_run_ms_max, hung)), self._now_ms):
            self._break_reads()
        if self._is_look_late:
            self._answer()
        is_due = not self._reads.is_open and self._now_ms - self._looked_ms >= LOOK_MS
        if self._reads.wants_probe(self._now_ms) or is_due:
            self._look_around()
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

    def _judge_read(self, error: Exception | None) -> None:
        if self._reads.is_probing and self._look is None:
            self._reads.probed(error, self._now_ms)
        elif error is None:
            self._reads.worked()
        elif self._reads.failed(error, self._now_ms):
            self._break_reads()

    def _break_reads(self) -> None:
        """Whoever waits is told now."""
        self._take_back_loads(LoadOutcome.BROKEN)
        self._answer_empty()
        self._stores.take_back(StoreOutcome.BROKEN)

    def _answer_empty(self) -> None:
        for job in self._asking:
            self._end(Found(job.number, [], may_go_on=False))
        self._asking.clear()

    def _take_back_loads(self, outcome: LoadOutcome) -> None:
        """Loads that no thread has begun end so."""
        for op in self._workers.take_loads():
            op.row.holds -= 1
            self._end_load(op.job, outcome)

    def _judge_write(self, error: Exception | None) -> None:
        if error is None:
            self._writes.succeeded()
        elif self._writes.failed(error, self._now_ms):
            self._is_lost = isinstance(error, FolderLost)
            self._stores.take_back(StoreOutcome.BROKEN)
        elif isinstance(error, FolderLost) and not self._writes.is_open:
            self._say_alive()  # again, until the breaker opens: waiting mends nothing

    # ---- numbers and the end

    def statistics(self) -> TierStatistics:
        return TierStatistics(
            state=self._writes.reason or self._reads.reason or "on",
            bytes_used=self._stores.used_bytes,
            bytes_max=self.bytes_max,
            records=len(self._view),
            queued_bytes=self._stores.queued_bytes,
            loaded=dict(self._loaded),
            stored=dict(self._stores.outcomes),
            loaded_bytes=self._loaded_bytes,
            stored_bytes=self._stores.stored_bytes,
            evicted=self._stores.evicted,
        )

    def close(self, timeout_s: float) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        self._answer_empty()
        self._take_back_loads(LoadOutcome.CLOSED)
        self._stores.take_back(StoreOutcome.CLOSED)
        self._workers.stop(timeout_s)

    def check_integrity(self) -> None:
        """Assert that what is known agrees; looks at each record."""
        self._view.check_integrity()
        self._stores.check_integrity()


def _run_ms_max(op: Op) -> int:
    """How long it runs before it hangs."""
    return T_LOAD_MS + (MEMBER_MS_MAX * len(op.positions) if isinstance(op, LookOp) else 0)
