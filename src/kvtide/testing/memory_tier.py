"""A tier in a dictionary: what the suite means, in the fewest lines; also for tests of the node.

    owner: store ─► _stores ─┐                    ┌─► _results ─► poll: keep, evict, count
    owner: load ──► _loads ──┴─► one at a time ───┘   (the worker only copies and verifies)

Whatever is decided is decided on the owner's thread: when the turn of a job comes, and again when
it has been copied. So there is nothing to lock. A turn comes when the one before it has been
polled: slow, and obviously right.

Ownership: the worker has `_results` and the job that it was given; all else is the owner's. The
worker ends in `close`; where it is stalled it ends when it is let go.

`answers` and `fails` make a place of it that stands still or fails.
"""

import queue
import threading
import zlib
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvtide.bounds import T_PUT_MS
from kvtide.core.keys import INNER_DIGEST_BYTES, KEY_BYTES
from kvtide.core.records import Record, RootName
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
from kvtide.units import MiB

QUEUE_BYTES_MAX = 64 * MiB
PUT_MS_MAX = T_PUT_MS
"""A store that has waited for so long is dropped."""
FAILURES_MAX = 5
"""So many in a row open the breaker."""
RETRY_MS = 1_000
"""After so long one job is tried again."""


@dataclass(slots=True)
class Held:
    """A record and its bytes."""

    record: Record
    shards: list[bytes]
    checksums: list[int]
    children: int = 0


@dataclass(slots=True)
class Turn:
    """A job, since when it waits, and what came of it."""

    job: LoadJob | StoreJob
    since_ms: int
    held: Held | None = None
    """What is to be loaded; what was copied for a store."""
    is_cleared: bool = False
    outcome: LoadOutcome | StoreOutcome | None = None


@dataclass(slots=True)
class Counts:
    """Of all jobs so far."""

    loaded: Counter[str] = field(default_factory=Counter)
    stored: Counter[str] = field(default_factory=Counter)
    loaded_bytes: int = 0
    stored_bytes: int = 0
    evicted: int = 0


class MemoryTier:
    """Records in memory, behind one worker thread."""

    name = "memory"

    def __init__(
        self,
        bytes_max: int,
        wake: Callable[[], None],
        *,
        queue_bytes_max: int = QUEUE_BYTES_MAX,
        put_ms_max: int = PUT_MS_MAX,
        held: "dict[bytes, Held] | None" = None,
    ) -> None:
        """`wake` is called from both threads; `held` is what another one left when it closed."""
        self.answers = threading.Event()
        """While it is not set, the place does not answer."""
        self.answers.set()
        self.fails = False
        self.held: dict[bytes, Held] = {} if held is None else held
        """By key, least recently used first."""
        self._bytes_max = bytes_max
        self._wake = wake
        self._queue_bytes_max = queue_bytes_max
        self._put_ms_max = put_ms_max
        self._now_ms = 0
        self._loads: deque[Turn] = deque()
        self._stores: deque[Turn] = deque()
        self._running: Turn | None = None
        self._ended: list[Done] = []
        self._counts = Counts()
        self._failures = 0
        self._retry_ms = 0
        self._is_closed = False
        self._work: queue.SimpleQueue[Turn | None] = queue.SimpleQueue()
        self._results: queue.SimpleQueue[Turn] = queue.SimpleQueue()
        self._worker = threading.Thread(target=self._copy_all, name="memory-tier", daemon=True)
        self._worker.start()

    # ---- lookups

    def lookup(self, job: LookupJob) -> None:
        """Answer at once."""
        if self._is_closed or self.is_broken:
            self._end(Found(job.number, [], may_go_on=False))
            return
        found: list[Record] = []
        parent = job.parent
        for start in range(0, len(job.keys), KEY_BYTES):
            held = self.held.get(job.keys[start : start + KEY_BYTES])
            if held is None or not self._belongs(held.record, job, parent):
                break
            found.append(held.record)
            parent = held.record.key
        is_all = len(found) * KEY_BYTES == len(job.keys)
        children = [
            held.record for held in self.held.values() if self._belongs(held.record, job, parent)
        ]
        if is_all and (best := self._longest(children, job.digests)) is not None:
            found.append(best)
        for record in found:
            self._touch(record.key)
        may_go_on = bool(children) and not (is_all and job.digests)
        self._end(Found(job.number, found, may_go_on))

    @staticmethod
    def _belongs(record: Record, job: LookupJob, parent: bytes) -> bool:
        return (record.parent, record.root, record.layout) == (parent, job.root, job.layout)

    @staticmethod
    def _longest(records: Sequence[Record], digests: bytes) -> Record | None:
        """The one that shares most blocks with these digests; None if none shares any."""
        best = max(records, key=lambda one: _shared(one.digests, digests), default=None)
        return best if best is not None and _shared(best.digests, digests) else None

    # ---- loads and stores

    @property
    def is_broken(self) -> bool:
        """Whether the breaker is open."""
        return self._failures >= FAILURES_MAX

    def load(self, job: LoadJob) -> None:
        """Before all stores that wait."""
        self._loads.append(Turn(job, self._now_ms))
        self._begin_next()

    def store(self, job: StoreJob) -> None:
        """Behind all that wait, if it may."""
        queued_bytes = self._queued_bytes() + job.record.payload_bytes
        if queued_bytes > self._queue_bytes_max:
            self._end_store(job, StoreOutcome.QUEUE_FULL)
            return
        self._stores.append(Turn(job, self._now_ms))
        self._begin_next()

    def _begin_next(self) -> None:
        """Give the worker the next job that is not over at once."""
        while self._running is None and (self._loads or self._stores):
            turn = (self._loads or self._stores).popleft()
            if isinstance(turn.job, LoadJob):
                turn.held = self.held.get(turn.job.record.key)
                refusal = self._refuse_load(turn)
                if refusal is not None:
                    self._end_load(turn.job, refusal)
                    continue
                self._touch(turn.job.record.key)
            else:
                outcome = self._refuse_store(turn)
                if outcome is not None:
                    self._end_store(turn.job, outcome)
                    continue
            self._running = turn
            self._work.put(turn)

    def _refuse_load(self, turn: Turn) -> LoadOutcome | None:
        if self._is_closed:
            return LoadOutcome.CLOSED
        if self.is_broken:
            return LoadOutcome.BROKEN
        if turn.held is None or turn.held.record != turn.job.record:
            return LoadOutcome.ABSENT
        return None

    def _refuse_store(self, turn: Turn) -> StoreOutcome | None:
        """Why it cannot be kept, looked at when its turn comes and again when it is copied."""
        record = turn.job.record
        if turn.is_cleared:
            return StoreOutcome.NOT_ANCHORED
        if self._is_closed and turn is not self._running:
            return StoreOutcome.CLOSED
        if self.is_broken and turn is not self._running:
            return StoreOutcome.BROKEN
        held = self.held.get(record.key)
        if held is not None and held.record != record:
            return StoreOutcome.FAILED  # two contents of one name: the first is kept
        if any(other.digests.startswith(record.digests) for other in self._siblings(record)):
            return StoreOutcome.HELD
        parent = self.held.get(record.parent)
        is_behind = parent is not None and parent.record.root == record.root
        if record.parent != record.root.key and not is_behind:
            return StoreOutcome.NOT_ANCHORED
        if record.payload_bytes > self._bytes_max:
            return StoreOutcome.NO_ROOM
        return None

    def _siblings(self, record: Record) -> list[Record]:
        """Those behind the same parent, itself included."""
        return [
            held.record
            for held in self.held.values()
            if (held.record.parent, held.record.root, held.record.layout)
            == (record.parent, record.root, record.layout)
        ]

    def _copied(self, turn: Turn) -> None:
        """The worker is through with a job."""
        job, outcome = turn.job, turn.outcome
        if outcome in (LoadOutcome.FAILED, StoreOutcome.FAILED):
            self._failures += 1
            self._retry_ms = self._now_ms + RETRY_MS
        else:
            self._failures = 0
        if isinstance(job, LoadJob):
            assert isinstance(outcome, LoadOutcome), outcome
            if outcome is LoadOutcome.CORRUPT and self.held.get(job.record.key) is turn.held:
                self._remove(job.record.key)
            self._end_load(job, outcome)
            return
        assert isinstance(outcome, StoreOutcome), outcome
        if outcome is StoreOutcome.STORED:
            assert turn.held is not None, job.number
            outcome = self._refuse_store(turn) or self._keep(turn.held)
        self._end_store(job, outcome)

    def _keep(self, held: Held) -> StoreOutcome:
        """Make a record visible, with room made for it."""
        record = held.record
        for tail in self._siblings(record):
            if record.digests.startswith(tail.digests):
                self._remove(tail.key)  # superseded
        while self._used_bytes() + record.payload_bytes > self._bytes_max:
            leaves = (one.record.key for one in self.held.values() if not one.children)
            leaf = next((key for key in leaves if key != record.parent), None)
            if leaf is None:
                return StoreOutcome.NO_ROOM
            self._remove(leaf)
            self._counts.evicted += 1
        if record.parent in self.held:
            self.held[record.parent].children += 1
            self._touch(record.parent)
        self.held[record.key] = held
        return StoreOutcome.STORED

    def _remove(self, key: bytes) -> None:
        """Take a record away, and what can no longer be reached."""
        removed = self.held.pop(key).record
        if removed.parent in self.held:
            self.held[removed.parent].children -= 1
        for child in [one for one in self.held.values() if one.record.parent == key]:
            self._remove(child.record.key)

    def _touch(self, key: bytes) -> None:
        self.held[key] = self.held.pop(key)

    # ---- ends

    def _end_load(self, job: LoadJob, outcome: LoadOutcome) -> None:
        self._counts.loaded[outcome] += 1
        if outcome is LoadOutcome.LOADED:
            self._counts.loaded_bytes += job.record.payload_bytes
        self._end(Loaded(job.number, outcome))

    def _end_store(self, job: StoreJob, outcome: StoreOutcome) -> None:
        self._counts.stored[outcome] += 1
        if outcome is StoreOutcome.STORED:
            self._counts.stored_bytes += job.record.payload_bytes
        self._end(Stored(job.number, outcome))

    def _end(self, done: Done) -> None:
        self._ended.append(done)
        self._wake()

    def poll(self) -> list[Done]:
        """What has ended; then it is the next one's turn."""
        while not self._results.empty():
            turn = self._results.get()
            assert turn is self._running, turn
            self._copied(turn)
            self._running = None
            self._begin_next()
        ended, self._ended = self._ended, []
        return ended

    # ---- the rest of the protocol

    def clear(self, salt_digest: bytes | None, fingerprint: bytes | None = None) -> int:
        """At once; what is queued of it ends as not anchored."""

        def is_meant(root: RootName) -> bool:
            is_salt = salt_digest in (None, root.salt_digest)
            return is_salt and fingerprint in (None, root.fingerprint)

        gone = [key for key, held in self.held.items() if is_meant(held.record.root)]
        for key in gone:
            if key in self.held:
                self._remove(key)
        for turn in (*self._stores, *([self._running] if self._running else ())):
            if is_meant(turn.job.record.root):
                turn.is_cleared = True
        return len(gone)

    def tick(self, now_ms: int) -> None:
        """Drop what is too old; try a broken place again."""
        self._now_ms = now_ms
        old = [turn for turn in self._stores if now_ms - turn.since_ms >= self._put_ms_max]
        for turn in old:
            self._stores.remove(turn)
            self._end_store(_store_of(turn), StoreOutcome.TOO_OLD)
        if self.is_broken and now_ms >= self._retry_ms:
            self._failures = FAILURES_MAX - 1

    def statistics(self) -> TierStatistics:
        """Its numbers now."""
        return TierStatistics(
            state="failing" if self.is_broken else "on",
            bytes_used=self._used_bytes(),
            bytes_max=self._bytes_max,
            records=len(self.held),
            queued_bytes=self._queued_bytes(),
            loaded={str(name): count for name, count in self._counts.loaded.items()},
            stored={str(name): count for name, count in self._counts.stored.items()},
            loaded_bytes=self._counts.loaded_bytes,
            stored_bytes=self._counts.stored_bytes,
            evicted=self._counts.evicted,
        )

    def _used_bytes(self) -> int:
        return sum(held.record.payload_bytes for held in self.held.values())

    def _queued_bytes(self) -> int:
        turns = [*self._stores, *([self._running] if self._running else ())]
        return sum(t.job.record.payload_bytes for t in turns if isinstance(t.job, StoreJob))

    def close(self, timeout_s: float) -> None:
        """What waits ends as closed; what is being copied, when it is."""
        self._is_closed = True
        for turn in self._loads:
            assert isinstance(turn.job, LoadJob), turn
            self._end_load(turn.job, LoadOutcome.CLOSED)
        for turn in self._stores:
            self._end_store(_store_of(turn), StoreOutcome.CLOSED)
        self._loads.clear()
        self._stores.clear()
        self._work.put(None)
        self._worker.join(timeout_s)

    # ---- the worker's thread

    def _copy_all(self) -> None:
        while (turn := self._work.get()) is not None:
            self.answers.wait()
            if isinstance(turn.job, LoadJob):
                turn.outcome = self._copy_out(turn)
            else:
                turn.outcome = self._copy_in(turn)
            self._results.put(turn)
            self._wake()

    def _copy_out(self, turn: Turn) -> LoadOutcome:
        assert turn.held is not None, turn.job.number
        if self.fails:
            return LoadOutcome.FAILED
        if [zlib.crc32(shard) for shard in turn.held.shards] != turn.held.checksums:
            return LoadOutcome.CORRUPT
        for cells, shard in zip(turn.job.cells, turn.held.shards, strict=True):
            cells[:] = shard
        return LoadOutcome.LOADED

    def _copy_in(self, turn: Turn) -> StoreOutcome:
        if self.fails:
            return StoreOutcome.FAILED
        shards = [bytes(cells) for cells in turn.job.cells]
        turn.held = Held(turn.job.record, shards, [zlib.crc32(shard) for shard in shards])
        return StoreOutcome.STORED


def _store_of(turn: Turn) -> StoreJob:
    assert isinstance(turn.job, StoreJob), turn
    return turn.job


def _shared(mine: bytes, theirs: bytes) -> int:
    """Blocks that two runs of digests begin with alike."""
    count = 0
    for start in range(0, min(len(mine), len(theirs)), INNER_DIGEST_BYTES):
        end = start + INNER_DIGEST_BYTES
        if mine[start:end] != theirs[start:end]:
            break
        count += 1
    return count
