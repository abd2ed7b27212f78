"""What the directory's files take and may take: room is set aside before a byte is written.

    cap ≥ measured bytes of all files        as the file system counts them, after each operation
        + reserved                           for operations that have not ended
        + index of the active segment        so that it can always be sealed
        + STANDING                           rows and extents of two removals at a time

A drive may have less than the cap: others fill it, or a quota ends before. What is free above the
floor bounds what is set aside; where that is too little our own records make room, down to what
keeps the floor, and so they do for a while where a write was refused for want of room.

Invariant: reserved is the sum of what operations under way have set aside; a segment is dropped
only when nothing of it is live. Ownership: the node's owner thread.
"""

from dataclasses import dataclass, field

from kvtide.tiers.disk import columns, rows
from kvtide.tiers.disk.catalog import Place
from kvtide.tiers.disk.directory import SEGMENT, SEGMENT_NUMBER_MAX, Ours
from kvtide.tiers.disk.ops import FreeOp, UnlinkOp
from kvtide.tiers.kinds import Kind
from kvtide.tiers.scope import Scope
from kvtide.units import GiB, KiB, MiB, round_up

SEGMENTS_WANTED = 16
"""A cap is at least so many segments: one that is unlinked is a small part of it."""
SEGMENT_BYTES_MIN, SEGMENT_BYTES_MAX = 16 * MiB, GiB
PAGE = 4 * KiB
EXTENTS_BYTES = 2 * PAGE
"""What a file system may add for its own map of a file when it grows or gets a hole."""
STANDING_BYTES = 64 * KiB
PORTION_RATIO, PORTION_BYTES_MAX = 1 / 64, 64 * MiB
"""Eviction goes on for so much of the cap: neighbours that go together are one row and one hole.
"""
FLOOR_BYTES, FLOOR_RATIO = GiB, 0.02
"""Free space of the file system that is never touched."""


@dataclass(slots=True, eq=False)
class Segment:
    """One segment file and what is beside it.

    Attributes:
        number: its name.
        end_bytes: where the next record goes.
        live: records that are there, being written, or gone and not yet given back.
        allocated: what its files take, by suffix, as measured last.
        doomed: records gone whose space is still to be given back.
        is_sealed: nothing is appended to it any more, and the writing thread has done with it.
        writer_ops: removals that the writing thread has; while there are any, all go to it.
        is_rewriting: its index is being written anew.
        is_stale: this failed, and has not worked since.
        is_going: it is being unlinked.
        indexed: rows of its index.
        kinds: of the records written to it, which take `kinds_bytes` in its index; `row_count` and
            `digest_count` are theirs.
    """

    number: int
    end_bytes: int = 0
    live: int = 0
    allocated: dict[str, int] = field(default_factory=dict)
    doomed: list[Place] = field(default_factory=list)
    is_sealed: bool = False
    writer_ops: set[FreeOp | UnlinkOp] = field(default_factory=set)
    is_rewriting: bool = False
    is_stale: bool = False
    is_going: bool = False
    indexed: int = 0
    kinds: set[Kind] = field(default_factory=set)
    kinds_bytes: int = 0
    row_count: int = 0
    digest_count: int = 0

    def add_kind(self, kind: Kind) -> None:
        """Its index will have this definition."""
        if kind not in self.kinds:
            self.kinds.add(kind)
            self.kinds_bytes += rows.kind_row_bytes(kind)

    @property
    def allocated_bytes(self) -> int:
        """Of all its files."""
        return sum(self.allocated.values())

    @property
    def index_bytes_max(self) -> int:
        """What writing its index takes at most."""
        exact = columns.index_bytes_max(self.kinds_bytes, self.row_count, self.digest_count)
        return round_up(exact, PAGE) + EXTENTS_BYTES


class Space:
    """All segments and the room for more."""

    def __init__(self, bytes_max: int, segment_bytes: int | None) -> None:
        self.bytes_max = bytes_max
        self._segment_bytes = segment_bytes
        self.segments: dict[int, Segment] = {}
        self.active: Segment | None = None
        self.next_number = 1
        self.reserved_bytes = 0
        self.other_bytes = 0  # of our files that belong to no segment
        self.freeing_bytes = 0
        self.measured_bytes = 0
        self.free_bytes = 0
        self.floor_bytes = 0
        self.refused_bytes: int | None = None  # so much was used when a write found no room
        self.refusals = 0  # how often that was learned
        self.vain_bytes = 0
        """Given up since a store had room, and not free above what the drive had before."""
        self._drive_bytes = 0  # used and free, when the drive was asked last
        self._asked_used_bytes = 0  # used then

    @property
    def segment_bytes(self) -> int:
        """Where a segment is full."""
        wanted = min(self.bytes_max // SEGMENTS_WANTED, SEGMENT_BYTES_MAX)
        return self._segment_bytes or max(SEGMENT_BYTES_MIN, wanted)

    @property
    def used_bytes(self) -> int:
        """What all files take."""
        return self.measured_bytes + self.other_bytes

    @property
    def portion_bytes(self) -> int:
        """Of what is evicted at a time."""
        return min(int(PORTION_RATIO * self.bytes_max), PORTION_BYTES_MAX)

    @property
    def promised_bytes(self) -> int:
        """Set aside."""
        index = self.active.index_bytes_max if self.active else 0
        return self.reserved_bytes + index + STANDING_BYTES

    @property
    def committed_bytes(self) -> int:
        """Used, and set aside."""
        return self.used_bytes + self.promised_bytes

    @property
    def held_bytes_max(self) -> int:
        """The cap, or what the drive lets our files take without touching its floor.

        A file system may give space back late (Btrfs does, with its next commit), and others may
        take it as fast as we give it. So the drive has become smaller, by more than half a
        portion, only once it was asked again, which it is each second: no more is evicted before,
        and nothing for a while once that was in vain (`vain_bytes`).
        """
        before_bytes = self._drive_bytes - self.portion_bytes // 2
        drive_bytes = max(before_bytes, self.used_bytes + self.free_bytes)
        return min(self.bytes_max, drive_bytes - self.floor_bytes)

    @property
    def wanted_bytes_max(self) -> int:
        """The same, or what was used when a write found no room: a quota is not seen before."""
        limit = self.held_bytes_max
        return limit if self.refused_bytes is None else min(limit, self.refused_bytes)

    def is_room_for(self, need_bytes: int) -> bool:
        """Whether it fits now."""
        return self.committed_bytes + need_bytes <= self.bytes_max and self.is_above_floor(
            need_bytes
        )

    def could_hold(self, need_bytes: int) -> bool:
        """Whether it would fit if no record were there."""
        return self._least_bytes(need_bytes) <= self.held_bytes_max

    def is_cap_enough(self, need_bytes: int) -> bool:
        """Whether it would, were all of the drive ours."""
        return self._least_bytes(need_bytes) <= self.bytes_max

    def _least_bytes(self, need_bytes: int) -> int:
        """Taken once it is there, whatever is evicted for it."""
        return self.other_bytes + need_bytes + STANDING_BYTES + PAGE + EXTENTS_BYTES

    def is_above_floor(self, need_bytes: int) -> bool:
        """Whether the file system keeps its free space."""
        return self.free_bytes - self.promised_bytes - need_bytes >= self.floor_bytes

    @property
    def is_full(self) -> bool:
        """Whether others have so much of the drive that all of ours would not keep the floor, as
        far as it is known now."""
        return self.used_bytes + self.free_bytes <= self.floor_bytes

    def was_refused(self, need_bytes: int) -> bool:
        """Whether a write found no room when as much was used as would be with this."""
        refused = self.refused_bytes
        return refused is not None and self.committed_bytes + need_bytes > refused

    def asked_drive(self) -> None:
        """`free_bytes` is what the drive says now; see `held_bytes_max`."""
        drive_bytes = self.used_bytes + self.free_bytes
        given_bytes = max(0, self._asked_used_bytes - self.used_bytes)
        lost_bytes = self._drive_bytes - drive_bytes
        self.vain_bytes = max(0, self.vain_bytes + min(lost_bytes, given_bytes))
        self._drive_bytes, self._asked_used_bytes = drive_bytes, self.used_bytes

    def grow(self, ratio: float) -> int:
        """The cap, which is this share of what is free and ours if that is more by now: where a
        drive was full for a while when the node started, it must not stay small for its life."""
        self.bytes_max = max(self.bytes_max, int(ratio * self._drive_bytes))
        return self.bytes_max

    def excess_bytes(self, need_bytes: int, limit_bytes: int) -> int:
        """What is still to be evicted to stay below a limit, beside what is on its way out."""
        return self.committed_bytes + need_bytes - self.freeing_bytes - limit_bytes

    def last_with(self, scope: Scope) -> int:
        """Number of the last segment that something was written to which this means, 0: none."""
        segments = self.segments.items()
        having = (n for n, one in segments if any(scope.has(kind.root) for kind in one.kinds))
        return max(having, default=0)

    def place(self, segment: Segment, kind: Kind, length_bytes: int, blocks: int) -> Place:
        """Where the next record goes; its reserve is the caller's to add."""
        place = Place(segment.number, segment.end_bytes, length_bytes)
        segment.end_bytes += length_bytes
        segment.live += 1
        segment.add_kind(kind)
        segment.row_count += 1
        segment.digest_count += blocks
        return place

    def begin(self) -> Segment:
        """A segment to append to."""
        assert self.active is None, self.active
        assert self.next_number <= SEGMENT_NUMBER_MAX, self.next_number
        self.active = self.segments[self.next_number] = Segment(self.next_number)
        self.next_number += 1
        return self.active

    def measured(self, number: int, allocated: dict[str, int]) -> None:
        """What files of a segment take now."""
        segment = self.segments.get(number)
        if segment is not None:
            self.measured_bytes -= segment.allocated_bytes
            segment.allocated.update(allocated)
            self.measured_bytes += segment.allocated_bytes

    def drop(self, segment: Segment) -> None:
        """It is unlinked."""
        assert segment is not self.active, segment.number
        self.measured_bytes -= segment.allocated_bytes
        del self.segments[segment.number]

    def ours(self) -> Ours:
        """What should be in the directory."""
        segments = self.segments.items()
        there = (n for n, segment in segments if segment.live and SEGMENT in segment.allocated)
        return Ours(frozenset(there), self.next_number)

    def check_integrity(self) -> None:
        """Sums are sums."""
        measured = sum(segment.allocated_bytes for segment in self.segments.values())
        assert measured == self.measured_bytes, (measured, self.measured_bytes)
        assert min(self.reserved_bytes, self.freeing_bytes) >= 0, self.reserved_bytes
        assert all(segment.live >= 0 for segment in self.segments.values())


def store_reserve_bytes(kind: Kind, length_bytes: int, blocks: int) -> int:
    """What writing a record takes at most: itself, its rows, and the maps of both files."""
    added = rows.OPENING_BYTES + rows.kind_row_bytes(kind) + rows.kept_row_bytes(blocks)
    index = columns.index_bytes_max(rows.kind_row_bytes(kind), 1, blocks)
    return length_bytes + round_up(added, PAGE) + round_up(index, PAGE) + 2 * EXTENTS_BYTES
