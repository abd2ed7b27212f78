"""Stores that have not ended, and room for them in the own folder.

    wait ─► its turn: nobody has it, its parent is there, room is made ─► written ─► in the view

A turn comes in order, but for what waits for its parent to be written, or for its own name to be
given back. Room is what the cap leaves beside records, those being written or removed, and twice
the journal, which may be written anew. What is evicted counts until its file is gone.

Ownership: the node's owner thread.
"""

import errno
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice

from kvtide.bounds import T_PUT_MS
from kvtide.codec.record import stored_bytes
from kvtide.core.records import Record
from kvtide.tiers.base import Stored, StoreJob, StoreOutcome
from kvtide.tiers.kinds import Kind
from kvtide.tiers.scope import Scope
from kvtide.tiers.shared_dir.journal import KeptRow
from kvtide.tiers.shared_dir.ops import Ended, FreeOp, StoreOp
from kvtide.tiers.shared_dir.own import Journal
from kvtide.tiers.shared_dir.view import Gone, Row, View
from kvtide.tiers.shared_dir.workers import Workers
from kvtide.units import GiB, KiB

PUT_MS_MAX = T_PUT_MS
"""T_put of the contract."""
WRITING_MAX = 4
"""Stores that the writing threads have: one more for each than it works on."""
LOOKED_AT_MAX = 64
"""Stores that wait, from the first on, among which one is looked for whose turn it is."""
FREED_MAX = 64
"""Records that are removed together, by one row."""
SLACK_RATIO = 0.02
"""Of the cap: so much more is evicted when room is short, so that the next store finds some."""
SLACK_BYTES_MAX = GiB
"""Of a cap of terabytes it would be tens of thousands of files, and stores would wait for them."""
OWNER_BYTES = 8 * KiB
KEPT_BYTES, KIND_BYTES, BESIDE_BYTES = 96, 256, 4 * KiB
FULL = (errno.ENOSPC, errno.EDQUOT)


@dataclass(slots=True, eq=False)
class _Turn:
    job: StoreJob
    since_ms: int
    above: Row | None = None
    is_cleared: bool = False

    @property
    def length_bytes(self) -> int:
        return _length_of(self.job.record)


def rows_bytes(record: Record) -> int:
    """So much is left beside a record for rows, which count twice: its own and those of others
    being written, with what each shares, and some that say what goes or was cleared."""
    row = KEPT_BYTES + KIND_BYTES + 8 * record.layout.shard_count + len(record.digests)
    return 2 * WRITING_MAX * row + BESIDE_BYTES


def _length_of(record: Record) -> int:
    return stored_bytes(record.layout, record.blocks)


class Stores:
    """All of them."""

    def __init__(
        self,
        view: View,
        workers: Workers,
        end: Callable[[Stored], None],
        bytes_max: int,
        queue_bytes_max: int,
    ) -> None:
        self.outcomes: Counter[str] = Counter()
        self.stored_bytes = 0
        self.queued_bytes = 0
        self.evicted = 0
        self.sequence = 0
        """Of the last record."""
        self.journal_bytes = 0
        """What the own journal takes."""
        self._view = view
        self._workers = workers
        self._end = end
        self._bytes_max = bytes_max
        self._queue_bytes_max = queue_bytes_max
        self._records_bytes = 0
        self._left_bytes = 0  # at most, of stores that failed: until the next sweep
        self._is_swept = False
        self._waiting: dict[_Turn, None] = {}
        self._running: dict[StoreOp, _Turn] = {}
        self._freeing: dict[bytes, int] = {}
        self._to_free: list[bytes] = []
        self._not_freed: list[bytes] = []

    @property
    def used_bytes(self) -> int:
        """As the cap counts them."""
        return self._records_bytes + self._left_bytes + 2 * self.journal_bytes + OWNER_BYTES

    def take_own(self, journal: Journal) -> None:
        """The folder as it is when it is taken; what was known of another is forgotten."""
        assert not self._running, len(self._running)
        self._freeing.clear()
        self._to_free.clear()
        self._not_freed.clear()
        self._is_swept = False
        self._records_bytes = self._left_bytes = 0
        self.sequence = journal.live.sequence
        self.journal_bytes = journal.size_bytes
        live = journal.live
        lengths = Counter((row.kind, row.blocks) for row in live.kept.values())
        for (kind, blocks), count in lengths.items():
            self._records_bytes += count * stored_bytes(live.kinds[kind].layout, blocks)

    def take_sweep(self, ended: Ended) -> None:
        """What nothing tells of has been removed: the cap is what is known, from now on. Where
        that failed, so has the store that waited for it longest."""
        self._is_swept = ended.error is None
        turn = next(iter(self._waiting), None)
        if self._is_swept:
            self._left_bytes = 0
        elif turn is not None:
            self._end_turn(turn, self._refusal(turn.job.record) or StoreOutcome.FAILED)

    @property
    def are_waiting(self) -> bool:
        """Whether there are some that were not given to the writing threads."""
        return bool(self._waiting)

    @property
    def may_sweep(self) -> bool:
        """Whether that has not been done, and none is written that it would take for left."""
        return not self._is_swept and not self._running

    # ---- coming and ending

    def add(self, job: StoreJob, now_ms: int) -> None:
        """Take a store, or end it at once."""
        if self.queued_bytes + job.record.payload_bytes > self._queue_bytes_max:
            self.end(job.number, StoreOutcome.QUEUE_FULL)
            return
        self.queued_bytes += job.record.payload_bytes
        self._waiting[_Turn(job, now_ms)] = None

    def end(self, number: int, outcome: StoreOutcome) -> None:
        """A job ends so."""
        self.outcomes[outcome] += 1
        self._end(Stored(number, outcome))

    def _end_turn(self, turn: _Turn, outcome: StoreOutcome) -> None:
        self._waiting.pop(turn, None)
        if turn.above is not None:
            turn.above.holds -= 1
        payload = turn.job.record.payload_bytes
        self.queued_bytes -= payload
        if outcome is StoreOutcome.STORED:
            self.stored_bytes += payload
        self.end(turn.job.number, outcome)

    def drop_old(self, now_ms: int) -> None:
        """Those that wait for too long end."""
        for turn in [turn for turn in self._waiting if now_ms - turn.since_ms >= PUT_MS_MAX]:
            self._end_turn(turn, StoreOutcome.TOO_OLD)

    def retry(self) -> None:
        """What could not be removed is tried again."""
        self._to_free += self._not_freed
        self._not_freed.clear()

    def take_back(self, outcome: StoreOutcome) -> None:
        """Those that no thread has begun end so."""
        for op in self._workers.take_stores():
            turn = self._running.pop(op)
            self._records_bytes -= turn.length_bytes
            self._end_turn(turn, outcome)
        for turn in list(self._waiting):
            self._end_turn(turn, outcome)

    def clear(self, scope: Scope, gone: Iterable[Gone]) -> None:
        """Nothing of this scope will be there; own records that were go."""
        for turn in self._running.values():
            turn.is_cleared = turn.is_cleared or scope.has(turn.job.record.root)
        for turn in [turn for turn in self._waiting if scope.has(turn.job.record.root)]:
            self._end_turn(turn, StoreOutcome.NOT_ANCHORED)
        self.free(gone)

    # ---- turns

    def write_on(self) -> None:
        """Give the writing threads what they may begin."""
        if self._is_swept:
            self._begin_turns()
        for op in self.free_ops():
            self._workers.write(op)

    def _begin_turns(self) -> None:
        busy = {op.job.record.key for op in self._running} | self._freeing.keys()
        for turn in list(islice(self._waiting, LOOKED_AT_MAX)):
            if len(self._running) >= WRITING_MAX:
                break
            record = turn.job.record
            if record.key not in busy and record.parent not in busy:
                refusal = self._refusal(record)
                if refusal is not None:
                    self._end_turn(turn, refusal)
                    continue
                if not self._begin(turn):
                    break
            busy.add(record.key)

    def _refusal(self, record: Record) -> StoreOutcome | None:
        """Why it is not written."""
        known = self._view.index.get(record.key)
        if known is not None:
            return StoreOutcome.HELD if known.record == record else StoreOutcome.FAILED
        if self._view.above(record) is None:
            return StoreOutcome.NOT_ANCHORED
        return StoreOutcome.HELD if self._view.covers(record) else None

    def _begin(self, turn: _Turn) -> bool:
        """Write it, or end it for want of room; False: it has to wait for that."""
        above = self._view.above(turn.job.record)
        if isinstance(above, Row):
            turn.above = above
            above.holds += 1
        if not self._made_room_for(turn.length_bytes + rows_bytes(turn.job.record)):
            if self._freeing or self._running:
                if turn.above is not None:
                    turn.above.holds -= 1
                    turn.above = None
                return False
            self._end_turn(turn, StoreOutcome.NO_ROOM)
            return True
        del self._waiting[turn]
        self.sequence += 1
        self._records_bytes += turn.length_bytes
        op = StoreOp(turn.job, self.sequence)
        self._running[op] = turn
        self._workers.write(op)
        return True

    def take(self, op: StoreOp, ended: Ended) -> None:
        """What a writing thread says of one."""
        turn = self._running.pop(op)
        record = turn.job.record
        if ended.error is not None:
            self._records_bytes -= turn.length_bytes
            if ended.is_left:
                self._left_bytes += turn.length_bytes
                self._is_swept = False
            is_full = isinstance(ended.error, OSError) and ended.error.errno in FULL
            outcome = StoreOutcome.NO_ROOM if is_full else StoreOutcome.FAILED
            self._end_turn(turn, StoreOutcome.NOT_ANCHORED if turn.is_cleared else outcome)
            return
        if turn.is_cleared or self._view.above(record) is None:
            self.free([(record.key, turn.length_bytes)])
            self._end_turn(turn, StoreOutcome.NOT_ANCHORED)
            return
        kept = KeptRow(0, op.sequence, record.key, record.parent, record.digests)
        for row in self._view.add(self._view.own, Kind(record.root, record.layout), kept):
            if row.parent is None:
                continue  # it came in with this one, and went as a shorter one just now
            for shorter in self._view.shorter(row):
                self.let_go(shorter)
        self._end_turn(turn, StoreOutcome.STORED)

    # ---- room

    def _made_room_for(self, length_bytes: int) -> bool:
        """Evict, where that helps, for so much to be written; whether it may be now."""
        over = self.used_bytes + length_bytes - self._bytes_max
        if over <= 0:
            return True
        wanted = over + min(int(SLACK_RATIO * self._bytes_max), SLACK_BYTES_MAX)
        if 2 * self.journal_bytes + OWNER_BYTES + length_bytes <= self._bytes_max:
            freeing = sum(self._freeing.values())
            while freeing < wanted and (row := self._view.evictable()) is not None:
                freeing += row.length_bytes
                self.evicted += 1
                self.let_go(row)
        return False

    def shrink(self) -> None:
        """Evict down to the cap, all own records being taken in."""
        self._made_room_for(0)

    def let_go(self, row: Row) -> None:
        """Our copy of a record goes, and own ones that nobody reaches without it."""
        length_bytes = row.length_bytes
        orphans = self._view.remove(row, self._view.own)
        self.free([(row.key, length_bytes), *orphans])

    def free(self, gone: Iterable[Gone]) -> None:
        """Files of own records that are in the view no more."""
        for key, length_bytes in gone:
            self._freeing[key] = length_bytes
            self._to_free.append(key)

    def free_ops(self) -> Iterator[FreeOp]:
        """What is to be done for the files that go."""
        while self._to_free:
            keys, self._to_free = self._to_free[:FREED_MAX], self._to_free[FREED_MAX:]
            yield FreeOp(keys)

    def take_free(self, op: FreeOp, ended: Ended) -> None:
        """They are gone; else it is tried again, not at once."""
        if ended.error is not None:
            self._not_freed += op.keys
            return
        for key in op.keys:
            self._records_bytes -= self._freeing.pop(key)

    def check_integrity(self) -> None:
        """Assert that the sum of bytes is right; looks at each record."""
        own = sum(row.length_bytes for row in self._view.own_rows())
        running = sum(turn.length_bytes for turn in self._running.values())
        freeing = sum(self._freeing.values())
        assert self._records_bytes == own + running + freeing, (
            self._records_bytes,
            own,
            running,
            freeing,
        )
