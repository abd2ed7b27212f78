"""Stores on their way: taken or refused, written when there is room, found when complete.

    store ─► waiting ─► room is set aside ─► threads have it ─► in the catalog
               │                                     │
               └ too old, no room ──── dropped ──────┘ failed: with all that is behind it

What comes while a start is still taking in what the directory holds waits until that has ended:
whether it is there, or its parent, is not known before, and to find out at once would hold the
owner for the better part of a second.

Ownership: the node's owner thread.
"""

import errno
import logging
import os
from collections import Counter
from collections.abc import Callable

from kvtide.bounds import T_PUT_MS
from kvtide.tiers.base import Stored, StoreJob, StoreOutcome
from kvtide.tiers.disk.catalog import Place
from kvtide.tiers.disk.intake import LazyCatalog
from kvtide.tiers.disk.ops import Ended, StoreOp
from kvtide.tiers.disk.room import Room
from kvtide.tiers.disk.rows import Kept
from kvtide.tiers.disk.space import Space, store_reserve_bytes
from kvtide.tiers.disk.workers import Workers
from kvtide.tiers.kinds import Kind
from kvtide.tiers.pending import Pending, PendingStores
from kvtide.units import MiB, format_bytes

logger = logging.getLogger("kvtide.disk")

PUT_MS_MAX = T_PUT_MS
"""A store that has waited for so long is dropped."""
WRITING_MIN, WRITING_MAX = 4, 64
"""Stores that threads are given ahead: one for each of them, so that none is idle; few to take
back."""
WRITING_BYTES_MAX = 32 * MiB
"""Of these beyond the first: four of the largest calls, a fraction of a second on any drive."""
WRITING_RATIO_MAX = 1 / 32
"""And so much of the cap: until it is measured, what is being written counts twice."""
REFUSED_MS = 60_000
"""So long after a write that found no room it is not tried whether there is more by now."""
VAIN_PORTIONS_MAX = 8
"""Evicted for room that did not come: the drive keeps what we give, in a snapshot, or others take
it. Then stores end, and what is there stays."""
VAIN_MS = 600_000
"""So long after that one more portion shows whether it is still so."""
_FULL = (errno.ENOSPC, errno.EDQUOT)


class Stores:
    """All stores of a disk tier."""

    def __init__(
        self,
        disk: str,
        catalog: LazyCatalog,
        space: Space,
        room: Room,
        workers: Workers,
        end: Callable[[Stored], None],
        queue_bytes_max: int,
    ) -> None:
        """`disk` is what warnings name it; `end` is told of each job that has ended."""
        self.outcomes: Counter[str] = Counter()
        self.stored_bytes = 0
        self.now_ms = 0
        self._pending = PendingStores()
        self._refused_ms = 0
        self._hoped_ms = 0  # when evicting was last expected to make room
        self._is_told = False
        self._lacking_bytes = 0  # what a store needed that found the drive full; 0: none since
        self._early: list[Pending] = []  # those that the catalog was not asked about yet
        self._disk = disk
        self._catalog = catalog
        self._space = space
        self._room = room
        self._workers = workers
        self._end = end
        self._queue_bytes_max = queue_bytes_max

    @property
    def queued_bytes(self) -> int:
        """Payload of those that have not ended."""
        return self._pending.queued_bytes

    @property
    def is_writing(self) -> bool:
        """Whether threads have some."""
        return bool(self._pending.written)

    # ---- coming

    def add(self, job: StoreJob) -> None:
        """Take a store, or end it at once."""
        record = job.record
        twin = self._pending.by_key.get(record.key)
        if twin is not None and twin.job.record == record:
            twin.twins.append(job.number)
            return
        is_early = not self._catalog.is_taken_in
        refusal = None if is_early else self._refusal(job)
        if refusal is None and record.key in self._pending.by_key:
            refusal = StoreOutcome.FAILED  # one name for two contents: it cannot be
        if refusal is None and self.queued_bytes + record.payload_bytes > self._queue_bytes_max:
            refusal = StoreOutcome.QUEUE_FULL
        if refusal is not None:
            self.end(job.number, refusal)
            return
        kind = self._catalog.kind_number(Kind(record.root, record.layout))
        self._catalog.use_kind(kind)
        pending = Pending(job, kind, self.now_ms)
        self._pending.add(pending, self._pending.by_key.get(record.parent))
        if is_early:
            self._early.append(pending)
        if record.parent != record.root.key:
            self._catalog.hold(record.parent)

    def _refusal(self, job: StoreJob) -> StoreOutcome | None:
        """Why the catalog says that a store ends; None: it does not."""
        record = job.record
        row = self._catalog.row_of(record.key)
        if row is not None:
            is_same = self._catalog.record(row) == record
            return StoreOutcome.HELD if is_same else StoreOutcome.FAILED
        if not self._is_anchored(job):
            return StoreOutcome.NOT_ANCHORED
        kind = self._catalog.kind_numbers.get(Kind(record.root, record.layout))
        if kind is not None and self._catalog.covers(kind, record.parent, record.digests):
            return StoreOutcome.HELD  # a longer one has all its blocks
        return None

    def _ask_for_early(self) -> None:
        """The catalog has all its rows: what came before is a store like others, or ends."""
        early, self._early = self._early, []
        for pending in early:
            if pending.is_ended or pending.is_doomed:
                continue
            refusal = self._refusal(pending.job)
            if refusal is StoreOutcome.HELD:
                self._end_pending(pending, refusal)  # those behind it have a parent all the same
            elif refusal is not None:
                self._drop([pending], refusal)

    def _is_anchored(self, job: StoreJob) -> bool:
        """Whether its parent is the root, there, or queued ahead of it."""
        record = job.record
        if record.parent == record.root.key:
            return True
        queued = self._pending.by_key.get(record.parent)
        if queued is not None:
            parent = queued.job.record
        else:
            row = self._catalog.row_of(record.parent)
            if row is None:
                return False
            parent = self._catalog.record(row)
        return parent.is_whole and (parent.root, parent.layout) == (record.root, record.layout)

    # ---- ends

    def end(self, number: int, outcome: StoreOutcome) -> None:
        """A job ends so."""
        self.outcomes[outcome] += 1
        self._end(Stored(number, outcome))

    def _end_pending(self, pending: Pending, outcome: StoreOutcome) -> None:
        record = pending.job.record
        self._pending.end(pending)
        if record.parent != record.root.key:
            self._catalog.let_go(record.parent)
        self._catalog.leave_kind(pending.kind)
        if outcome is StoreOutcome.STORED:
            self.stored_bytes += record.payload_bytes
        self.end(pending.job.number, outcome)
        twins = StoreOutcome.HELD if outcome is StoreOutcome.STORED else outcome
        for number in pending.twins:
            self.end(number, twins)

    def _drop(
        self, dropped: list[Pending], outcome: StoreOutcome, behind: StoreOutcome | None = None
    ) -> None:
        """These end so, and those behind them as `behind` (not anchored, unless it is said);
        what the writing thread has ends when that has done with its cells."""
        first = {id(one) for one in dropped}
        for pending in self._pending.doom(dropped):
            is_first = id(pending) in first
            self._end_pending(
                pending, outcome if is_first else behind or StoreOutcome.NOT_ANCHORED
            )

    # ---- written

    def take(self, op: StoreOp, ended: Ended) -> bool:
        """What the writing thread says of one; whether it tells how well the place works: that it
        has room for less than was known does not."""
        pending = self._pending.written.pop(op)
        self._space.reserved_bytes -= op.reserve_bytes
        if ended.error is not None:
            self._room.unwritten(op.place, ended)
            code = ended.error.errno if isinstance(ended.error, OSError) else None
            self._end_failed(pending, is_full=code in _FULL)
            return code not in _FULL or self._was_refused_again(op, code)
        if pending.is_doomed:
            self._room.give_back(op.place)
            self._end_pending(pending, StoreOutcome.NOT_ANCHORED)
        else:
            self._appear(pending, op.place)
        return True

    def _was_refused_again(self, op: StoreOp, code: int) -> bool:
        """A write found no room, though more seemed to be free: our records make some, for so long
        that a drive that others have filled, or a quota, is not tried with each store. Whether it
        was begun after all that was known of that; of those that were begun together, one is."""
        space = self._space
        used, known = space.used_bytes, space.refused_bytes
        if op.refusals != space.refusals:
            return False
        space.refusals += 1
        space.refused_bytes = used if known is None else min(known, used)
        self._refused_ms = self.now_ms
        reason = f"errno {code} ({os.strerror(code)})"
        if not space.is_full:  # else that is told
            self._tell(f"a write beyond {format_bytes(used)} was refused by {reason}")
        return known is not None

    def _tell(self, story: str) -> None:
        """Once, that the cap is not what bounds the tier."""
        if not self._is_told:
            self._is_told = True
            logger.warning(
                "%s: the drive has no room for the cap of %s: %s; what was used least makes"
                " room for what is new, as far as need be",
                self._disk,
                format_bytes(self._space.bytes_max),
                story,
            )

    def _end_failed(self, pending: Pending, *, is_full: bool) -> None:
        outcome = StoreOutcome.NO_ROOM if is_full else StoreOutcome.FAILED
        if pending.is_doomed:
            outcome = StoreOutcome.NOT_ANCHORED
        self._end_pending(pending, outcome)
        self._drop(pending.behind, StoreOutcome.NOT_ANCHORED)

    def _appear(self, pending: Pending, place: Place) -> None:
        """A record is complete: it is found from now on, if its parent is there."""
        record = pending.job.record
        before = self._catalog.index.get(record.key)
        if before is not None:  # it was cleared, or lost its parent, and is not swept yet
            self._room.take_away(before)
        if record.parent != record.root.key:
            parent = self._catalog.find(record.parent, pending.kind)
            if parent is None:  # damaged meanwhile
                self._room.give_back(place)
                self._end_pending(pending, StoreOutcome.NOT_ANCHORED)
                self._drop(pending.behind, StoreOutcome.NOT_ANCHORED)
                return
        kept = Kept(place.offset_bytes, pending.kind, record.key, record.parent, record.digests)
        row = self._catalog.add(pending.kind, place.segment, kept)
        for shorter in self._catalog.shorter(row):
            self._room.take_away(shorter)
        self._end_pending(pending, StoreOutcome.STORED)

    def _begin(self, pending: Pending) -> bool:
        """Write it, or end it; False: it has to wait."""
        space, record = self._space, pending.job.record
        state = self._catalog.kinds[pending.kind]
        length = state.length_bytes(record.blocks)
        reserve = store_reserve_bytes(state.kind, length, record.blocks)
        self._room.roll_for(length)
        is_counted_twice = bool(self._pending.written)  # what is being written, until measured
        is_short = not space.is_above_floor(reserve) or space.was_refused(reserve)
        if is_short and is_counted_twice:
            return False
        if not space.could_hold(reserve) or (is_short and self._is_vain()):
            self._found_full(reserve)
            self._drop([pending], StoreOutcome.NO_ROOM)
            return True
        if is_short or not space.is_room_for(reserve):
            will_be = self._make_room(reserve)
            if will_be or self._room.is_busy or self._pending.written:
                return False
            if not space.is_room_for(reserve):
                self._drop([pending], StoreOutcome.NO_ROOM)
                return True
        segment = space.active or space.begin()
        space.vain_bytes = 0
        self._found_room(reserve)
        place = space.place(segment, state.kind, length, record.blocks)
        space.reserved_bytes += reserve
        pending.op = StoreOp(pending.job, place, state.kind, pending.kind, reserve, space.refusals)
        self._pending.waiting.popleft()
        self._pending.written[pending.op] = pending
        self._workers.write(pending.op)
        return True

    def _is_vain(self) -> bool:
        """Whether what is evicted makes no room on the drive."""
        space = self._space
        limit = VAIN_PORTIONS_MAX * space.portion_bytes
        if space.vain_bytes >= limit:
            if self.now_ms - self._hoped_ms < VAIN_MS:
                return True
            space.vain_bytes = limit - space.portion_bytes
        self._hoped_ms = self.now_ms
        return False

    @property
    def reason(self) -> str:
        """Why nothing is stored though the place works, in words; empty: it is."""
        return self._full_story(self._lacking_bytes) if self._lacking_bytes else ""

    def _full_story(self, need_bytes: int) -> str:
        """Why there is no room for so much, whatever is evicted; empty: there may be."""
        space = self._space
        if not space.is_above_floor(need_bytes):
            free, floor = format_bytes(space.free_bytes), format_bytes(space.floor_bytes)
            return f"the drive is full: {free} are free, and {floor} are left to others"
        cap, left = format_bytes(space.bytes_max), format_bytes(space.other_bytes)
        if not space.is_cap_enough(need_bytes - space.other_bytes):
            return f"the cap of {cap} is too small for a chunk of {format_bytes(need_bytes)}"
        if not space.is_cap_enough(need_bytes):
            return f"{left} of the cap of {cap} are taken by segments that are left alone"
        return ""

    def _found_full(self, need_bytes: int) -> None:
        """A store ends for want of room; say so once, if evicting does not help."""
        space, story = self._space, self._full_story(need_bytes)
        is_cap_held = space.held_bytes_max >= space.bytes_max and space.is_cap_enough(need_bytes)
        if not story or is_cap_held:
            return
        if not self._lacking_bytes:
            logger.warning(
                "%s: %s; what finds no room is not stored, what is there is still found",
                self._disk,
                story,
            )
        self._lacking_bytes = need_bytes

    def _found_room(self, need_bytes: int) -> None:
        """There is room for so much: for what was lacking too, if that was no more."""
        if 0 < self._lacking_bytes <= need_bytes:
            self._lacking_bytes = 0
            logger.warning("%s: the drive has room again", self._disk)

    def _make_room(self, need_bytes: int) -> bool:
        """Evict for a store; whether there will be room."""
        space, before = self._space, self._room.evicted
        will_be = self._room.evict(need_bytes, space.wanted_bytes_max)
        is_short = not space.is_above_floor(need_bytes) and not space.is_full
        if self._room.evicted > before and is_short:
            free, floor = format_bytes(space.free_bytes), format_bytes(space.floor_bytes)
            self._tell(f"{free} are free, and {floor} are left to others")
        return will_be

    # ---- all at once

    def drop_old(self) -> None:
        """Those that wait for too long end; and what was refused is tried again."""
        if self.now_ms - self._refused_ms >= REFUSED_MS:
            self._space.refused_bytes = None
        old = self._pending.older_than(self.now_ms - PUT_MS_MAX)
        if old:
            self._drop(old, StoreOutcome.TOO_OLD)
            self._pending.drop_ended()

    def clear(self, kinds: set[int]) -> None:
        """Those of these roots and layouts will be no records."""
        self._drop(self._pending.of_kinds(kinds), StoreOutcome.NOT_ANCHORED)
        self._pending.drop_ended()

    def write_on(self) -> None:
        """Give the threads what there is room for, as far ahead as is good; nothing while a start
        is still taking in what the directory holds."""
        if not self._catalog.is_taken_in:
            return
        self._ask_for_early()
        while self._wants_more():
            pending = self._pending.head()
            if pending is None or not self._begin(pending):
                break

    def _wants_more(self) -> bool:
        count = len(self._pending.written)
        if count < WRITING_MIN:
            return True
        limit = min(WRITING_BYTES_MAX, int(WRITING_RATIO_MAX * self._space.bytes_max))
        ahead = sum(one.job.record.payload_bytes for one in self._pending.written.values())
        return count < WRITING_MAX and ahead < limit

    def take_back(self, outcome: StoreOutcome) -> list[StoreOp]:
        """Stores that no thread has begun end so; copies of what is there are returned."""
        taken = self._workers.take_stores()
        for op in taken:
            if op.is_copy:
                continue
            pending = self._pending.written.pop(op)
            self._space.reserved_bytes -= op.reserve_bytes
            self._room.never_written(op.place)
            self._end_pending(pending, outcome)
            self._drop(pending.behind, outcome, outcome)
        self._drop(self._pending.unwritten(), outcome, outcome)
        self._pending.drop_ended()
        return [op for op in taken if op.is_copy]
