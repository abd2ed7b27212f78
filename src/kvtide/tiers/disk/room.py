"""Making room: what is taken out of the catalog, and how its space comes back.

    catalog.remove ─► doomed (of its segment) ─► FreeOp: rows, then holes ─► free
                   └► parked, while it is being loaded ┘
    nothing live in a segment ─► UnlinkOp: its files ─► free

Space counts as free once the file system says so, never before. Ownership: the owner thread.
"""

import logging

from kvtide.tiers.disk.catalog import Catalog, Place
from kvtide.tiers.disk.ops import Ended, FreeOp, SealOp, UnlinkOp
from kvtide.tiers.disk.space import Segment, Space
from kvtide.tiers.disk.workers import Workers
from kvtide.tiers.scope import Scope

logger = logging.getLogger("kvtide.disk")

WATERMARK_RATIO = 0.95
"""Eviction starts here, so that a store seldom waits for one."""
EVICTIONS_MAX = 256
"""Of one call: the owner has other things to do; the rest comes with the next."""
RETRY_MS_FIRST, RETRY_MS_MAX = 100, 10_000
"""What cannot be given back is tried again after a pause that doubles from the first to this."""
REWRITE_ROWS_MIN, REWRITE_RATIO = 32, 0.125
"""An index is written anew once more than so many of its rows are gone: a start takes in what is
gone one by one, and what is there at once."""


class Room:
    """Takes records away and gives their space back."""

    def __init__(self, disk: str, catalog: Catalog, space: Space, workers: Workers) -> None:
        """`disk` is what warnings name it."""
        self.evicted = 0
        self.has_more = False
        """Whether the last call ended at its limit, not at its goal."""
        self._disk = disk
        self._catalog = catalog
        self._space = space
        self._workers = workers
        self._readers: dict[tuple[int, int], int] = {}
        self._parked: dict[tuple[int, int], Place] = {}
        self._dirty: set[int] = set()
        self._failed: dict[int, list[Place]] = {}
        self._tried: dict[int, dict[int, bool]] = {}
        """Of segments of which something could not be given back: what, by where it begins, and
        whether a row says that it is gone."""
        self._retried_ms = 0
        self._pause_ms = 0
        self._removals_under_way = 0

    # ---- loads

    def begin_load(self, place: Place) -> None:
        """Its bytes stay where they are until `end_load`."""
        spot = (place.segment, place.offset_bytes)
        self._readers[spot] = self._readers.get(spot, 0) + 1

    def end_load(self, place: Place) -> None:
        """One load fewer."""
        spot = (place.segment, place.offset_bytes)
        count = self._readers.pop(spot) - 1
        if count:
            self._readers[spot] = count
        elif spot in self._parked:
            self._doom(self._parked.pop(spot))

    @property
    def is_busy(self) -> bool:
        """Whether room may come by itself: something is on its way out, or being loaded."""
        return bool(self._removals_under_way or self._readers or self._dirty)

    @property
    def is_removing(self) -> bool:
        """Whether the writing thread still has something to give back."""
        return self._removals_under_way > 0

    # ---- taking away

    def take_away(self, row: int) -> None:
        """A record is not there any more."""
        self.give_back(self._catalog.remove(row))

    def give_back(self, place: Place) -> None:
        """Bytes that no row speaks of are free as soon as nobody loads them."""
        spot = (place.segment, place.offset_bytes)
        if spot in self._readers:
            self._parked[spot] = place
        else:
            self._doom(place)

    def _doom(self, place: Place) -> None:
        segment = self._space.segments[place.segment]
        segment.live -= 1
        segment.doomed.append(place)
        self._space.freeing_bytes += place.length_bytes
        self._dirty.add(segment.number)

    def never_written(self, place: Place) -> None:
        """What was to lie here does not, and no byte of it is left."""
        segment = self._space.segments[place.segment]
        segment.live -= 1
        self._look_at(segment)

    def unwritten(self, place: Place, ended: Ended) -> None:
        """Writing what was to lie here has failed."""
        if ended.is_left:
            self.give_back(place)
        else:
            self.never_written(place)
        active = self._space.active
        if ended.is_spoiled and active is not None and active.number == place.segment:
            self.roll()

    def sweep(self) -> bool:
        """One slice of what nobody can reach; whether there is more."""
        for place in self._catalog.sweep():
            self.give_back(place)
        return not self._catalog.is_swept

    def evict(self, need_bytes: int, limit_bytes: int) -> bool:
        """Take leaves away until this fits below a limit once all is free, a portion at a time;
        whether it will."""
        self.has_more = False
        space = self._space
        if space.excess_bytes(need_bytes, limit_bytes) <= 0:
            return True
        goal_bytes = limit_bytes - space.portion_bytes
        for _ in range(EVICTIONS_MAX):
            if space.excess_bytes(need_bytes, goal_bytes) <= 0:
                return True
            row = self._catalog.coldest()
            if row is None:
                return space.excess_bytes(need_bytes, limit_bytes) <= 0
            self.take_away(row)
            self.evicted += 1
        self.has_more = True
        return True

    def flush(self) -> None:
        """Let the writing thread give back what was taken away."""
        for number in self._dirty:
            segment = self._space.segments.get(number)
            if segment is None or segment.is_going:
                continue
            places, segment.doomed = segment.doomed, []
            tried = self._tried.get(number, {})
            is_again = number in self._tried and all(one.offset_bytes in tried for one in places)
            if segment.live == 0 and segment is not self._space.active:
                segment.is_going = True
                self._submit(segment, UnlinkOp(number, places, is_again))
            elif places:
                unsaid = [one for one in places if not tried.get(one.offset_bytes)]
                self._submit(segment, FreeOp(number, places, unsaid, is_again))
        self._dirty.clear()

    def _submit(self, segment: Segment, op: FreeOp | UnlinkOp) -> None:
        """To the one thread that works on this segment: never two at a time on its rows."""
        self._removals_under_way += 1
        if segment.is_sealed and not segment.writer_ops:
            self._workers.free(op)
        else:
            segment.writer_ops.add(op)
            self._workers.write(op)

    # ---- how it ended

    def ended(self, ended: Ended) -> bool:
        """A removal has ended; one that failed is tried again by `retry`. Whether it tells how
        well the place works: that one file still cannot be changed does not."""
        op = ended.op
        assert isinstance(op, FreeOp | UnlinkOp), op
        self._removals_under_way -= 1
        self._space.freeing_bytes -= sum(place.length_bytes for place in op.places)
        segment = self._space.segments[op.segment]
        segment.writer_ops.discard(op)
        if ended.error is not None:
            self._failed.setdefault(op.segment, []).extend(op.places)
            tried = self._tried.setdefault(op.segment, {})
            for place in op.places:
                tried.setdefault(place.offset_bytes, False)
            if isinstance(op, UnlinkOp):
                segment.is_going = False
            else:
                tried.update((one.offset_bytes, True) for one in op.unsaid[: ended.said_count])
            return not op.is_again
        if isinstance(op, UnlinkOp):
            self._space.freeing_bytes -= sum(place.length_bytes for place in segment.doomed)
            self._failed.pop(op.segment, None)
            self._tried.pop(op.segment, None)
            self._space.drop(segment)
        else:
            tried = self._tried.get(op.segment, {})
            for place in op.places:
                tried.pop(place.offset_bytes, None)
            if op.segment not in self._failed and not tried:
                self._tried.pop(op.segment, None)
            self._look_at(segment)
        return True

    def retry_in_time(self, now_ms: int) -> None:
        """Try again what could not be given back, after a pause."""
        if not self._tried:
            self._pause_ms = 0
        elif self._failed and now_ms - self._retried_ms >= self._pause_ms:
            self._retried_ms = now_ms
            self._pause_ms = min(max(RETRY_MS_FIRST, 2 * self._pause_ms), RETRY_MS_MAX)
            self.retry()

    def retry(self) -> None:
        """Try again what could not be given back, now."""
        for number, places in self._failed.items():
            self._space.segments[number].doomed += places
            self._space.freeing_bytes += sum(place.length_bytes for place in places)
        self._dirty.update(self._failed)
        self._failed.clear()

    @property
    def unsaid_count(self) -> int:
        """Of how many records that were taken away no row says so: a start finds them again."""
        return sum(not is_said for tried in self._tried.values() for is_said in tried.values())

    def last_with(self, scope: Scope) -> int:
        """Number of the last segment that may hold what this means, 0: none does; what is stored
        from now on lies behind."""
        last = self._space.last_with(scope)
        if self._space.active is not None and self._space.active.number == last:
            self.roll()
        return last

    def roll_for(self, length_bytes: int) -> None:
        """Where the active segment is too full for so much, the next one is begun."""
        active = self._space.active
        if active and active.end_bytes + length_bytes > max(
            self._space.segment_bytes, length_bytes
        ):
            self.roll()

    def roll(self) -> None:
        """Nothing is appended to the active segment from now on."""
        segment = self._space.active
        if segment is None:
            return
        reserve = segment.index_bytes_max
        self._space.active = None
        if segment.live == 0:
            self._dirty.add(segment.number)
        else:
            self._space.reserved_bytes += reserve
            self._workers.write(SealOp(segment.number, reserve))

    def sealed(self, ended: Ended) -> None:
        """An index was written, or not: then the rows log stays, and says the same."""
        op, error = ended.op, ended.error
        assert isinstance(op, SealOp), op
        self._space.reserved_bytes -= op.reserve_bytes
        segment = self._space.segments.get(op.segment)
        if segment is None:
            return
        if error is None:
            segment.is_sealed, segment.is_stale = True, False
            segment.indexed = segment.row_count = segment.live
        elif segment.is_rewriting and not segment.is_stale:
            segment.is_stale = True
            logger.warning(
                "%s: the index of segment %d could not be written anew: %s",
                self._disk,
                op.segment,
                error,
            )
        segment.is_rewriting = False
        # One that could not be written is tried again after the next removal, not before: what is
        # wrong with it has not changed.
        if error is None or segment.live == 0:
            self._look_at(segment)

    def _look_at(self, segment: Segment) -> None:
        """Unlink what is empty; write anew the index of what has become less."""
        if segment is self._space.active or segment.is_going:
            return
        if segment.live == 0:
            self._dirty.add(segment.number)
            return
        gone = segment.indexed - segment.live
        is_less = gone > max(REWRITE_ROWS_MIN, REWRITE_RATIO * segment.indexed)
        is_idle = segment.is_sealed and not (segment.is_rewriting or segment.writer_ops)
        reserve = segment.index_bytes_max
        if is_less and is_idle and self._space.is_room_for(reserve):
            segment.is_rewriting = True
            self._space.reserved_bytes += reserve
            self._workers.free(SealOp(segment.number, reserve))
