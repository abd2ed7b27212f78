"""The disk tier: what was computed survives, bounded and crash-safe. Its files: docs/formats.md.

    lookup  answered at once from the catalog
    load    read and proven by a loading thread, straight into the cells
    store   queue ─► room is set aside ─► bytes, then a row ─► in the catalog

A store becomes a record in three steps that a kill may come between: its bytes are written whole,
its row is written, the catalog learns of it. Before the row nobody finds it, after the row every
start does. A record goes the other way round: out of the catalog, its row, its bytes.

Ownership: all state is the node's owner's; threads (`Workers`) get operations and say how they
ended by a queue that `poll` empties.
"""

import errno
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path

from kvtide.bounds import T_LOAD_MS
from kvtide.errors import ConfigError, CorruptRecord
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
from kvtide.tiers.breaker import Breaker
from kvtide.tiers.disk import recency, start
from kvtide.tiers.disk.catalog import Match
from kvtide.tiers.disk.cleared import CLEARS_MAX, Clears
from kvtide.tiers.disk.directory import Directory
from kvtide.tiers.disk.intake import LazyCatalog
from kvtide.tiers.disk.merging import Merging
from kvtide.tiers.disk.ops import (
    ClearOp,
    Ended,
    FreeOp,
    LoadOp,
    MeasureOp,
    ProbeOp,
    ReadProbeOp,
    SealOp,
    StoreOp,
    UnlinkOp,
    WriteOp,
)
from kvtide.tiers.disk.room import WATERMARK_RATIO, Room
from kvtide.tiers.disk.space import Space
from kvtide.tiers.disk.stores import Stores
from kvtide.tiers.disk.unreadable import Unreadable
from kvtide.tiers.disk.workers import LOAD_THREADS, Workers
from kvtide.tiers.files import Files, SystemFiles
from kvtide.tiers.hung import Hung
from kvtide.tiers.kinds import Kind
from kvtide.tiers.scope import EVERYTHING, Scope
from kvtide.units import MiB

logger = logging.getLogger("kvtide.disk")

QUEUE_BYTES_MAX = 512 * MiB
SHRINK_S_MAX = 1.0
"""So long a start evicts down to a cap that was lowered; the rest comes while it serves."""
CHANGE_MS_MAX = 30_000
"""A write, or a hole, that takes longer hangs: stores behind it were dropped long ago."""
MEASURE_MS = 1_000
"""The file system's free space is asked for so often, and with every write: others use it too."""


class DiskTier:
    """Records in segment files of one directory. See `Tier` for what its calls promise.

    Args:
        path: of the directory; made if need be.
        bytes_max: the cap.
        wake: called from any thread when `poll` has something to give.
        sync: "none", "sealed" or "each": see `Directory`.
        queue_bytes_max: stores beyond these bytes are dropped.
        floor_bytes: free space of the file system that is left alone; by default the larger of
            1 GiB and 2 %.
        segment_bytes: where a segment is full; by default a sixteenth of the cap, between 16 MiB
            and 1 GiB.
        files: the file system, for tests.
        auto_ratio: the cap grows to this share of what the drive has for us.

    Raises:
        ConfigError: another node uses the directory, or it cannot be used.
    """

    name = "disk"

    def __init__(
        self,
        path: Path,
        bytes_max: int,
        wake: Callable[[], None],
        *,
        sync: str = "sealed",
        queue_bytes_max: int = QUEUE_BYTES_MAX,
        floor_bytes: int | None = None,
        segment_bytes: int | None = None,
        files: Files | None = None,
        auto_ratio: float = 0.0,
    ) -> None:
        """Open the directory and read what is there; blocks for as long as that takes."""
        self.path = path
        self.bytes_max = bytes_max
        self._auto_ratio = auto_ratio
        self._wake = wake
        self._now_ms = 0
        self._measured_ms = 0
        self._is_measuring = False
        self._done: list[Done] = []
        self._loaded: Counter[str] = Counter()
        self._loaded_bytes = 0
        self._is_closed = False
        self._loads: set[LoadOp] = set()
        self._unreadable = Unreadable()
        self._catalog = LazyCatalog()
        self._space = Space(bytes_max, segment_bytes)
        self._directory = Directory(str(path.absolute()), files or SystemFiles(), sync)
        self._emptied_count = 0
        disk = f"disk {self._directory.path}"
        self._reads = Breaker("reads", disk, logger)
        self._writes = Breaker("writes", disk, logger)
        self._do_stores_fail = False  # the last one did
        self._workers = Workers(self._directory, wake)
        self._hung: Hung[LoadOp] = Hung(lambda _: T_LOAD_MS)
        self._hung_changes: Hung[WriteOp] = Hung(lambda _: CHANGE_MS_MAX)
        self._room = Room(disk, self._catalog, self._space, self._workers)
        parts = (self._catalog, self._space, self._room, self._workers)
        self._stores = Stores(disk, *parts, self._end, queue_bytes_max)
        self._merging = Merging(disk, *parts, self._writes, self._begin_load)
        self._clears = Clears(disk, self._workers)
        doomed = start.open_directory(
            self._directory, self._catalog, self._space, self._clears, floor_bytes
        )
        for place in doomed:
            self._room.give_back(place)
        self._begin()

    def _begin(self) -> None:
        try:
            self._workers.start()
        except ConfigError:
            self._directory.free()
            raise
        self._shrink(time.monotonic() + SHRINK_S_MAX)
        self._pump()
        if not self._catalog.is_swept:
            self._wake()

    # ---- jobs

    def lookup(self, job: LookupJob) -> None:
        match = Match([], may_go_on=False)
        if not self._reads.is_open and not self._is_closed:
            kind = self._catalog.kind_numbers.get(Kind(job.root, job.layout))
            match = self._catalog.match(kind, job.parent, job.keys, job.digests)
        records = [self._catalog.record(row) for row in match.rows]
        self._end(Found(job.number, records, match.may_go_on))

    def load(self, job: LoadJob) -> None:
        if self._is_closed:
            return self._end_load(job, LoadOutcome.CLOSED)
        if self._reads.is_open:
            return self._end_load(job, LoadOutcome.BROKEN)
        record = job.record
        kind = self._catalog.kind_numbers.get(Kind(record.root, record.layout))
        row = None if kind is None else self._catalog.find(record.key, kind)
        if row is None or self._catalog.parent_key(row) is None:
            return self._end_load(job, LoadOutcome.ABSENT)
        if self._catalog.record(row) != record:
            return self._end_load(job, LoadOutcome.ABSENT)
        self._catalog.touch([row])
        return self._begin_load(job, row)

    def _begin_load(self, job: LoadJob, row: int) -> None:
        self._catalog.hold(job.record.key)
        op = LoadOp(job, self._catalog.place(row))
        self._room.begin_load(op.place)
        self._loads.add(op)
        self._workers.load(op)

    def store(self, job: StoreJob) -> None:
        if self._is_closed:
            self._stores.end(job.number, StoreOutcome.CLOSED)
        elif self._writes.is_open or self._reads.is_open:
            self._stores.end(job.number, StoreOutcome.BROKEN)
        else:
            self._stores.add(job)
            self._pump()

    def clear(self, salt_digest: bytes | None, fingerprint: bytes | None = None) -> int:
        scope = Scope(salt_digest, fingerprint)
        if len(self._clears) >= CLEARS_MAX:
            logger.warning("disk %s: %d clears wait; all is cleared", self.path, CLEARS_MAX)
            scope = EVERYTHING
        kinds = self._catalog.kinds_of(scope)
        if not self._is_closed:
            last = max(self._room.last_with(scope), self._clears.left_alone_last)
            self._clears.add(scope, last, is_waiting=not self._writes.is_open)
        count = self._catalog.retire(kinds)  # first: a kind ends with the last of its stores
        self._stores.clear(kinds)
        self._pump()
        return count

    def remove(self, keys: Iterable[bytes]) -> int:
        """Take these records away, and what lies behind them; how many there were."""
        before = len(self._catalog)
        self._catalog.take_rest()
        for key in keys:
            row = self._catalog.row_of(key)
            if row is not None:
                self._room.take_away(row)
        while not self._catalog.is_swept:
            self._room.sweep()
        self._pump()
        return before - len(self._catalog)

    # ---- ends

    def _end(self, done: Done) -> None:
        self._done.append(done)
        self._wake()

    def _end_load(self, job: LoadJob, outcome: LoadOutcome) -> None:
        if self._merging.loaded(job, outcome):
            return
        self._loaded[outcome] += 1
        if outcome is LoadOutcome.LOADED:
            self._loaded_bytes += job.record.payload_bytes
        self._end(Loaded(job.number, outcome))

    # ---- the owner's loop

    def poll(self) -> list[Done]:
        self._take_results()
        if not self._catalog.is_swept and self._room.sweep():
            self._wake()
        self._pump()
        if self._is_closed and self._workers.are_done:
            self._directory.free()
        done, self._done = self._done, []
        return done

    def tick(self, now_ms: int) -> None:
        self._now_ms = max(self._now_ms, now_ms)
        self._stores.now_ms = self._merging.now_ms = self._now_ms
        self._stores.drop_old()
        if self._is_closed:
            return
        if self._writes.wants_probe(self._now_ms):
            self._workers.write(ProbeOp(self._space.ours()))
            self._clears.retry()  # the first thing that works
        elif not self._writes.is_open:
            self._clears.retry()
            self._room.retry_in_time(self._now_ms)
        real_ms = int(time.monotonic() * 1000)  # ticks may come late, or two at once
        hung_changes = self._hung_changes.look(self._workers.running_changes(), real_ms)
        if hung_changes and self._writes.hung(CHANGE_MS_MAX, self._now_ms):
            self._stop_stores()
        hung = self._hung.look(self._workers.running_loads(), self._now_ms)
        if hung and self._reads.hung(T_LOAD_MS, self._now_ms):
            self._break_reads()
        if not self._are_all_hung and self._reads.wants_probe(self._now_ms):
            place = self._unreadable.place_to_probe(self._catalog)
            self._workers.write(ReadProbeOp(place, self._space.ours()))
        if not (self._writes.is_open or self._is_measuring) and (
            self._now_ms - self._measured_ms >= MEASURE_MS
        ):
            self._is_measuring = True
            self._measured_ms = self._now_ms
            self._workers.write(MeasureOp())
        self._pump()

    def _take_results(self) -> None:
        while self._workers.results:
            self._take(self._workers.results.popleft())

    def _take(self, ended: Ended) -> None:
        """What a thread says."""
        if ended.free_bytes is not None:
            self._space.free_bytes = ended.free_bytes
        match ended.op:
            case LoadOp() as op:
                self._take_load(op, ended)
            case StoreOp() as op:
                self._space.measured(op.place.segment, ended.allocated)
                if (self._merging if op.is_copy else self._stores).take(op, ended):
                    self._judge_write(ended)
            case FreeOp() | UnlinkOp() as op:
                self._space.measured(op.segment, ended.allocated)
                if self._room.ended(ended):
                    self._judge_write(ended)
            case SealOp() as op:
                self._space.measured(op.segment, ended.allocated)
                self._room.sealed(ended)
            case ClearOp():
                if self._clears.ended(ended):
                    self._judge_write(ended)
            case MeasureOp():
                self._is_measuring = False
                self._space.asked_drive()
                self.bytes_max = self._space.grow(self._auto_ratio)
                self._clears.forget(self._space.segments)
            case ProbeOp():
                self._look_at_directory()
                self._writes.probed(ended.error, self._now_ms)
            case ReadProbeOp() as op:
                self._look_at_directory()
                error = ended.error
                if error is not None:
                    self._unreadable.was_probed_badly()
                elif self._are_all_hung:
                    error = OSError(errno.ETIMEDOUT, "loads have not come back")
                elif op.place is not None:
                    self._unreadable.was_read(None)
                self._reads.probed(error, self._now_ms)

    @property
    def _are_all_hung(self) -> bool:
        """Whether no loading thread is free, whatever a probe says."""
        return len(self._hung.told) >= LOAD_THREADS

    def _take_load(self, op: LoadOp, ended: Ended) -> None:
        record = op.job.record
        self._loads.discard(op)
        self._hung.ended(op)
        self._catalog.let_go(record.key)
        outcome = LoadOutcome.LOADED
        error = self._unreadable.judged(op, ended.error)
        if isinstance(error, CorruptRecord):
            logger.warning("disk %s: %s; the record is removed", self.path, error)
            outcome = LoadOutcome.CORRUPT
        elif ended.is_lost:
            outcome = LoadOutcome.ABSENT
        elif ended.error is not None:
            outcome = LoadOutcome.FAILED
        if outcome in (LoadOutcome.CORRUPT, LoadOutcome.ABSENT):
            row = self._catalog.index.get(record.key)
            if row is not None and self._catalog.place(row) == op.place:
                self._room.take_away(row)
        self._room.end_load(op.place)
        if outcome is LoadOutcome.LOADED:
            self._unreadable.was_read(record.key)
        if outcome is LoadOutcome.FAILED:
            assert ended.error is not None
            if self._reads.failed(ended.error, self._now_ms):
                self._break_reads()
        elif outcome is LoadOutcome.LOADED and self._reads.is_open:
            self._reads.worked()
        elif outcome is not LoadOutcome.CORRUPT or isinstance(ended.error, CorruptRecord):
            self._reads.succeeded()  # a record that the drive does not give back is no success
        self._end_load(op.job, outcome)

    # ---- when the place fails

    def _judge_write(self, ended: Ended) -> None:
        """Where stores fail, that something can still be removed says nothing of them."""
        is_store = isinstance(ended.op, StoreOp)
        if ended.error is None:
            self._do_stores_fail = self._do_stores_fail and not is_store
            if not self._do_stores_fail:
                self._writes.succeeded()
            return
        self._do_stores_fail = self._do_stores_fail or is_store
        if self._writes.failed(ended.error, self._now_ms):
            self._stop_stores()

    def _stop_stores(self) -> None:
        self._room.roll()
        self._merging.taken_back(self._stores.take_back(StoreOutcome.BROKEN))

    def _look_at_directory(self) -> None:
        """Where a probe has made an emptied directory ours again, nothing is left of before."""
        emptied_count = self._directory.emptied_count
        if emptied_count != self._emptied_count and not self._is_closed:
            self._emptied_count = emptied_count
            kinds = self._catalog.kinds_of(EVERYTHING)
            self._catalog.retire(kinds)
            self._stores.clear(kinds)
            self._room.roll()
            self._wake()

    def _break_reads(self) -> None:
        self._take_back_loads(LoadOutcome.BROKEN)
        self._merging.taken_back(self._stores.take_back(StoreOutcome.BROKEN))

    def _take_back_loads(self, outcome: LoadOutcome) -> None:
        """Loads that no thread has begun end so."""
        for op in self._workers.take_loads():
            self._loads.discard(op)
            self._catalog.let_go(op.job.record.key)
            self._room.end_load(op.place)
            self._end_load(op.job, outcome)

    # ---- writing

    def _pump(self) -> None:
        """Give the writing thread what there is room for, and see to room."""
        if not self._writes.is_open:
            self._stores.write_on()
            limit = int(WATERMARK_RATIO * self.bytes_max)
            if self._catalog.is_taken_in and not self._is_closed:
                self._room.evict(0, limit)
            self._room.flush()
            if self._room.has_more:
                self._wake()
            elif self._is_idle:
                self._merging.go_on()

    @property
    def _is_idle(self) -> bool:
        """Whether nobody waits for anything that the drive does."""
        is_asked = len(self._loads) > self._merging.loading_count or self._stores.queued_bytes
        return self._catalog.is_swept and not (is_asked or self._reads.is_open)

    # ---- numbers and the end

    def statistics(self) -> TierStatistics:
        reasons = self._writes.reason, self._reads.reason, self._clears.reason, self._stores.reason
        return TierStatistics(
            state=next(filter(None, reasons), "on"),
            bytes_used=self._space.used_bytes,
            bytes_max=self.bytes_max,
            records=len(self._catalog),
            queued_bytes=self._stores.queued_bytes,
            loaded=dict(self._loaded),
            stored=dict(self._stores.outcomes),
            loaded_bytes=self._loaded_bytes,
            stored_bytes=self._stores.stored_bytes,
            evicted=self._room.evicted,
        )

    def close(self, timeout_s: float) -> None:
        if self._is_closed:
            return
        self._is_closed = self._merging.is_closed = True
        self._take_back_loads(LoadOutcome.CLOSED)
        self._merging.taken_back(self._stores.take_back(StoreOutcome.CLOSED))
        self._catalog.leave_rest()
        self._clears.retry()
        self._room.retry()
        until = time.monotonic() + timeout_s
        self._settle(until)
        if not self._writes.is_open:
            self._room.roll()
            self._room.flush()
        if self._workers.stop(max(0.0, until - time.monotonic())):
            self._take_results()
            if not self._writes.is_open:
                used, is_room_for = self._catalog.used(), self._space.is_room_for
                recency.leave(self._directory, used, is_room_for, until)
            self._directory.free()
        self._clears.tell_unmade()

    @property
    def unsaid_count(self) -> int:
        """How many records that were taken away the next start will find again."""
        return self._room.unsaid_count

    def _shrink(self, until: float) -> None:
        """A cap that is lower than it was holds before anybody is served, or nearly."""
        while self._space.used_bytes > self.bytes_max and not self._writes.is_open:
            self._room.evict(0, int(WATERMARK_RATIO * self.bytes_max))
            self._room.flush()
            left_s = until - time.monotonic()
            is_moving = self._room.is_removing and left_s > 0
            if not is_moving or not self._workers.wait_result(left_s):
                break
            self._take_results()

    def _settle(self, until: float) -> None:
        """Let what runs end, and give back what that leaves, as long as there is time. Half of it
        is the threads': what nobody can reach by then the next start takes away."""
        sweep_until = (time.monotonic() + until) / 2
        while True:
            self._take_results()
            while not self._catalog.is_swept and time.monotonic() < sweep_until:
                self._room.sweep()
            if not self._writes.is_open:
                self._room.flush()
            running = self._loads, self._stores.is_writing, self._merging.is_writing
            is_quiet = not (any(running) or self._room.is_removing)
            if is_quiet or not self._workers.wait_result(until - time.monotonic()):
                return

    def check_integrity(self) -> None:
        """Every belief; costs a walk over all rows."""
        self._catalog.check_integrity()
        self._space.check_integrity()
