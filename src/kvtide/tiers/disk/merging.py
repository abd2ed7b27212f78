"""Keeps segments few: the records of those that hold least are copied behind those of the active.

    segment that holds least ─► a record is read and proven ─► written as a store is, and synced
        ─► the catalog says where it lies now ─► its old place is given back

Each life begins a segment, a clear may end one, and each stays as long as its longest-lived
record; a start reads what stands beside all of them. So, when nothing else is asked of the drive
and there are many, small ones go: beyond the bound the smallest holds at most half of a full one,
and as a rule next to nothing.

A kill between the copy's row and that of the old place leaves both, which hold the same: a start
takes the later one. A copy only ever goes to a later segment than any clear means.

Invariant: a record's place changes only once its copy is complete, and only if it is still where
it was read. Ownership: the node's owner thread.
"""

import errno
import heapq
import logging
from collections import deque
from collections.abc import Callable, Sequence

from kvtide.tiers.base import LoadJob, LoadOutcome, StoreJob
from kvtide.tiers.breaker import Breaker
from kvtide.tiers.disk.catalog import Catalog, Place
from kvtide.tiers.disk.directory import SEGMENT
from kvtide.tiers.disk.ops import Ended, StoreOp
from kvtide.tiers.disk.room import Room
from kvtide.tiers.disk.space import Space, store_reserve_bytes
from kvtide.tiers.disk.workers import Workers
from kvtide.tiers.files import page_memory
from kvtide.units import MiB

logger = logging.getLogger("kvtide.disk")

SEGMENTS_SPARE, SEGMENTS_RATIO = 64, 2
"""So many, and as many times those that a cap of full ones has, may be there: a start reads what
stands beside a segment in some 0.1 ms."""
COPIES_MAX, COPIES_BYTES_MAX = 4, 32 * MiB
"""Under way at a time: what an engine asks for waits for no more than these."""
FOUND_MAX = 4096
"""Of the smallest segments, looked for at a time: a few milliseconds."""
PAUSE_MS = 10_000
"""After a copy that found no room, or failed."""


class Merging:
    """Moves records out of segments that hold little."""

    def __init__(
        self,
        disk: str,
        catalog: Catalog,
        space: Space,
        room: Room,
        workers: Workers,
        writes: Breaker,
        load: Callable[[LoadJob, int], None],
    ) -> None:
        """`load` reads a row's record into a job's cells; `loaded` is told of its end."""
        self.is_closed = False
        self.now_ms = 0
        self._disk = disk
        self._catalog = catalog
        self._space = space
        self._room = room
        self._workers = workers
        self._writes = writes
        self._load = load
        self._is_told = False
        self._pause_until_ms = 0
        self._segments: deque[int] = deque()  # to be emptied
        self._rows: deque[tuple[int, Place]] = deque()  # of the one that is
        self._left: set[int] = set()  # were to be emptied: what stays of them could not be copied
        self._loading: dict[int, tuple[LoadJob, Place]] = {}  # by the identity of the job
        self._writing: dict[StoreOp, Place] = {}

    @property
    def loading_count(self) -> int:
        """Loads that are under way for this."""
        return len(self._loading)

    @property
    def is_writing(self) -> bool:
        """Whether threads have copies to write."""
        return bool(self._writing)

    @property
    def is_busy(self) -> bool:
        """Whether anything is under way."""
        return bool(self._loading or self._writing)

    @property
    def _is_many(self) -> bool:
        """Whether there are more segments than need be."""
        space = self._space
        full = -(-space.bytes_max // space.segment_bytes)
        return len(space.segments) > SEGMENTS_SPARE + SEGMENTS_RATIO * full

    def go_on(self) -> None:
        """Begin what may be under way; called while nobody else asks for anything."""
        if self.is_closed or self.now_ms < self._pause_until_ms:
            return
        while self._is_ready():
            row, place = self._rows.popleft()
            key = self._catalog.keys[row]
            if key is None or self._catalog.row_of(key) != row or self._is_elsewhere(row, place):
                continue
            record = self._catalog.record(row)
            cells = [page_memory(record.blocks * size) for size in record.layout.cell_bytes]
            job = LoadJob(-1, record, cells)
            self._loading[id(job)] = job, place
            self._load(job, row)

    def _is_ready(self) -> bool:
        """Whether there is a record to copy, and no more under way than is good."""
        under_way = [place for _, place in self._loading.values()] + list(self._writing.values())
        count, total_bytes = len(under_way), sum(one.length_bytes for one in under_way)
        if count >= COPIES_MAX or not (self._rows or self._found_rows(is_idle=not count)):
            return False
        return not count or total_bytes + self._rows[0][1].length_bytes <= COPIES_BYTES_MAX

    def _found_rows(self, *, is_idle: bool) -> bool:
        """Look for the next segment to empty; `is_idle`: nothing is under way."""
        if not self._is_many:
            self._segments.clear()
            return False
        if not self._segments and is_idle and not self._room.is_removing:
            self._segments.extend(self._smallest())
        while self._segments and not self._rows:
            number = self._segments.popleft()
            if self._may_go(number):
                rows = self._catalog.rows_in(number)
                self._rows.extend((row, self._catalog.place(row)) for row in rows)
                self._left.add(number)
        return bool(self._rows)

    def _smallest(self) -> list[int]:
        """Segments that hold least, by what the file system says."""
        segments = self._space.segments
        self._left.intersection_update(segments)
        sizes = {
            number: segment.allocated.get(SEGMENT, 0)
            for number, segment in segments.items()
            if segment.is_sealed and number not in self._left
        }
        found = heapq.nsmallest(FOUND_MAX, sizes, key=sizes.__getitem__)
        if found and not self._is_told:
            self._is_told = True
            logger.info(
                "%s: %d segments; records of those that hold least are put together",
                self._disk,
                len(segments),
            )
        return found

    def _may_go(self, number: int) -> bool:
        segment = self._space.segments.get(number)
        return (
            segment is not None
            and segment.is_sealed
            and not (segment.is_going or segment.is_rewriting or segment.writer_ops)
            and number not in self._left
            and segment.allocated.get(SEGMENT, 0) <= self._space.segment_bytes // 2
        )

    def _is_elsewhere(self, row: int, place: Place) -> bool:
        return self._catalog.place(row) != place

    def _is_there(self, key: bytes, place: Place) -> bool:
        """Whether a record can still be found where it was."""
        row = self._catalog.row_of(key)
        return row is not None and not self._is_elsewhere(row, place)

    # ---- what threads say

    def loaded(self, job: LoadJob, outcome: LoadOutcome) -> bool:
        """The end of a load; whether it was one of these."""
        mine = self._loading.pop(id(job), None)
        if mine is None:
            return False
        if outcome is LoadOutcome.LOADED and not self.is_closed:
            self._write(job, mine[1])
        elif outcome in (LoadOutcome.FAILED, LoadOutcome.BROKEN):
            self._pause()
        return True

    def _pause(self) -> None:
        self._pause_until_ms = self.now_ms + PAUSE_MS
        self._rows.clear()

    def _write(self, job: LoadJob, place: Place) -> None:
        """Have a record written that was read well, if there is room: none is made for it."""
        space, record = self._space, job.record
        if self._writes.is_open or not self._is_there(record.key, place):
            return
        self._room.roll_for(place.length_bytes)
        kind_number = self._catalog.kind_of(record.key)
        kind = self._catalog.kinds[kind_number].kind
        reserve = store_reserve_bytes(kind, place.length_bytes, record.blocks)
        if not space.is_room_for(reserve) or space.was_refused(reserve):
            self._left.clear()
            self._pause()
            return
        at = space.place(space.active or space.begin(), kind, place.length_bytes, record.blocks)
        space.reserved_bytes += reserve
        copy = StoreJob(-1, record, job.cells)
        op = StoreOp(copy, at, kind, kind_number, reserve, space.refusals, is_copy=True)
        self._writing[op] = place
        self._workers.write(op)

    def take(self, op: StoreOp, ended: Ended) -> bool:
        """The end of a copy; whether it tells how well the place works."""
        place = self._writing.pop(op)
        self._space.reserved_bytes -= op.reserve_bytes
        if ended.error is not None:
            self._room.unwritten(op.place, ended)
            self._left.clear()
            self._pause()
            code = ended.error.errno if isinstance(ended.error, OSError) else None
            return code not in (errno.ENOSPC, errno.EDQUOT)
        key = op.job.record.key
        is_there = self._is_there(key, place)
        self._room.give_back(self._catalog.move(key, op.place) if is_there else op.place)
        return True

    def taken_back(self, ops: Sequence[StoreOp]) -> None:
        """Copies that no thread has begun, and will not."""
        for op in ops:
            del self._writing[op]
            self._space.reserved_bytes -= op.reserve_bytes
            self._room.never_written(op.place)
