"""The host tier's memory: regions of each layout, how they grow, move and go back.

    planned ─MakeRegion─► making ─RegionMade─► ready ─(told to leave)─► leaving ─► freed

A region has one memory file for each shard, all cut alike, so one (region, cell) names the same
cell in every shard: an entry is lent in all shards or in none, by construction. A region is *open*
to an instance when every worker of it has mapped it; nothing else is lent to that instance.

Rejected: one region for one shard with free lists of its own. Every entry has all its shards
here, so those lists could never differ, except by a fault.
"""

from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvtide.bounds import T_LOAD_MS
from kvtide.core.layout import KVLayout
from kvtide.core.slots import RegionCells
from kvtide.units import GiB, div_ceil

if TYPE_CHECKING:
    from kvtide.core.index import Entry

REGIONS_PER_HOST = 32
"""A region is this part of the host: small enough to move, large enough to be few."""
REGION_SLOTS_MIN = 4
"""However large its chunks: a region of fewer would be lent whole to one prompt."""
REGION_BYTES_MAX = 1 * GiB
"""However large the host: a worker maps one in tenths of a second, and it can be moved."""
LAYOUT_REGIONS_MIN = 4
"""A layout of which the host cannot hold this many regions is off."""
MAP_MS_MAX = T_LOAD_MS
"""T_load: so long memory that an engine has not mapped yet counts as on its way to it."""
LEAVE_MS_MAX = 10_000
"""A region that has been leaving for longer holds up no other: a worker or a load hangs."""
REFUSED_MS_FIRST = 10_000
REFUSED_MS_MAX = 320_000
"""What the machine refused is asked for again after a pause that doubles from the first to this,
until it gives something: memory that was short for a moment is not lost for the node's life."""
REFUSED_REGIONS_MAX = 2
"""So many empty regions that a worker could not map are kept of a layout: it would hardly map
more, and until it is offered them again they are of use to its engine's neighbours only."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """A worker could not map a region; it is offered again later."""

    text: str
    pause_ms: int
    until_ms: int


class Region:
    """One region: its cells, and which workers have it."""

    def __init__(self, number: int, layout: KVLayout, slot_count: int) -> None:
        self.number = number
        self.layout = layout
        self.cells = RegionCells(slot_count, layout.blocks_per_chunk)
        self.bytes = slot_count * layout.chunk_bytes
        """Bytes over all shards."""
        self.entries: dict[int, Entry] = {}
        """Whose cells they are, by the first of them: attached entries and loose ones."""
        self.planned_since_ms = 0
        self.is_ready = False
        self.ready_since_ms = 0
        self.is_leaving = False
        self.leaving_since_ms = 0
        self.used_ms = 0
        self.offered: set[int] = set()  # workers told to map it, not answered
        self.mapped: set[int] = set()  # workers that have it mapped
        self.refused: dict[int, Refusal] = {}  # living workers that could not map it
        self.closed_since_ms: int | None = None
        """Since when it is refused by somebody and open to nobody."""
        self.leave_asked: set[int] = set()  # workers told to unmap it, not answered

    @property
    def holders(self) -> set[int]:
        """Workers that have it mapped, or may be about to."""
        return self.mapped | self.offered

    @property
    def is_unused(self) -> bool:
        """No cell is lent."""
        return self.cells.free_cells == self.cells.cell_count

    @property
    def is_empty(self) -> bool:
        """No cell is lent and nobody holds a mapping."""
        return self.is_unused and not self.holders


class Host:
    """All regions of the node."""

    def __init__(self, host_bytes: int, first_region: int) -> None:
        """`first_region` starts the numbers, random for each node, so that none comes twice."""
        self.size_bytes = host_bytes
        self.limit_bytes = host_bytes
        self.regions: dict[int, Region] = {}
        self.allocated_bytes = 0
        """Bytes of all regions, those being made included."""
        self._of: dict[KVLayout, dict[int, Region]] = {}
        self._next_region = first_region
        self.refusal = ""
        """Why the machine gave no more when it was last asked; empty where it did."""
        self._refused_at_bytes: int | None = None
        self._refused_until_ms = 0
        self._refused_pause_ms = 0

    @property
    def reachable_bytes(self) -> int:
        """What all regions may add up to: the limit, or as much as the machine gave."""
        if self._refused_at_bytes is None:
            return self.limit_bytes
        return min(self.limit_bytes, self._refused_at_bytes)

    def of(self, layout: KVLayout) -> Collection[Region]:
        """The regions of one layout, oldest first."""
        return self._of.get(layout, {}).values()

    def usable(self, layout: KVLayout) -> list[Region]:
        """Regions of one layout that may be lent from."""
        return [region for region in self.of(layout) if region.is_ready and not region.is_leaving]

    def held_bytes(self, layout: KVLayout) -> int:
        """Memory of one layout, used or free, but for what is leaving."""
        return sum(region.bytes for region in self.of(layout) if not region.is_leaving)

    def free_bytes(self, layout: KVLayout) -> int:
        """Free cells of one layout in bytes, those of regions being made included.

        What a worker could not map is not free: its engine is lent nothing there.
        """
        free_cells = sum(
            region.cells.free_cells
            for region in self.of(layout)
            if not region.is_leaving and not region.refused
        )
        return free_cells * layout.block_bytes

    def free_chunks(self, layout: KVLayout) -> int:
        """Whole chunks that there are cells for in regions that may be lent from.

        What a worker could not map is not free: its engine is lent nothing there.
        """
        usable = (region for region in self.usable(layout) if not region.refused)
        return sum(region.cells.free_slots for region in usable)

    def region_slots(self, layout: KVLayout) -> int:
        """Slots of a new region of this layout."""
        part = self.size_bytes // REGIONS_PER_HOST // layout.chunk_bytes
        most = REGION_BYTES_MAX // layout.chunk_bytes
        return max(REGION_SLOTS_MIN, min(part, most))

    def region_bytes(self, layout: KVLayout) -> int:
        """Bytes of a new region of this layout."""
        return self.region_slots(layout) * layout.chunk_bytes

    def needed_bytes(self, layout: KVLayout) -> int:
        """The least host that can serve this layout."""
        return LAYOUT_REGIONS_MIN * self.region_bytes(layout)

    def is_growing(self, layout: KVLayout) -> bool:
        """Whether a region of this layout is being made."""
        return any(not region.is_ready for region in self.of(layout))

    def wants_region(self, layout: KVLayout) -> bool:
        """Whether the layout has less than half a region free, and none is being made."""
        refused = [
            region
            for region in self.of(layout)
            if region.refused and not region.is_leaving and region.is_unused
        ]
        if self.is_growing(layout) or len(refused) >= REFUSED_REGIONS_MAX:
            return False
        return self.free_bytes(layout) < div_ceil(self.region_bytes(layout), 2)

    def will_grow(self, layout: KVLayout, now_ms: int) -> bool:
        """Whether a region of this layout is made next, or being made.

        While room is made for one layout, others wait.
        """
        if self.is_growing(layout):
            return True
        is_free = self.has_room(layout) and not self.is_making_room(now_ms)
        return is_free and self.wants_region(layout)

    def has_room(self, layout: KVLayout) -> bool:
        """Whether one more region of this layout fits below the limit."""
        return self.allocated_bytes + self.region_bytes(layout) <= self.reachable_bytes

    def make(self, layout: KVLayout, now_ms: int) -> Region:
        """A new region, not ready yet."""
        region = Region(self._next_region, layout, self.region_slots(layout))
        region.planned_since_ms = now_ms
        self._next_region += 1
        self.regions[region.number] = region
        self._of.setdefault(layout, {})[region.number] = region
        self.allocated_bytes += region.bytes
        return region

    def remove(self, region: Region) -> None:
        """The region's memory goes back to the machine, or never came."""
        assert region.is_empty, f"region {region.number} is in use"
        del self.regions[region.number]
        del self._of[region.layout][region.number]
        if not self._of[region.layout]:
            del self._of[region.layout]
        self.allocated_bytes -= region.bytes

    def made(self, region: Region, now_ms: int) -> None:
        """The region's memory is there: whatever was refused before, the machine has some."""
        region.is_ready = True
        region.ready_since_ms = now_ms
        self.refusal = ""
        self._refused_pause_ms = 0

    def not_made(self, region: Region, now_ms: int, why: str) -> None:
        """The machine refused the memory: stay at the present size for a while."""
        self.remove(region)
        self.refusal = why
        self._refused_at_bytes = self.allocated_bytes
        pause_ms = min(2 * self._refused_pause_ms, REFUSED_MS_MAX) or REFUSED_MS_FIRST
        self._refused_pause_ms = pause_ms
        self._refused_until_ms = now_ms + pause_ms

    def forget_refusal(self, now_ms: int) -> None:
        """Once the pause is over, the machine may be asked again."""
        if now_ms >= self._refused_until_ms:
            self._refused_at_bytes = None

    def limit(self, host_bytes: int) -> None:
        """Hold at most this much; a region refused before may be asked for again."""
        self.limit_bytes = min(host_bytes, self.size_bytes)
        self._refused_at_bytes = None

    def is_making_room(self, now_ms: int) -> bool:
        """Whether a region is on its way out, and not stuck there."""
        return any(
            region.is_leaving and now_ms - region.leaving_since_ms < LEAVE_MS_MAX
            for region in self.regions.values()
        )

    def surplus(self, wanted_by: KVLayout | None, now_ms: int) -> Region | None:
        """The region to give up so that another layout may have one, or to come below the limit.

        It is the one least recently used of the layouts that have more than their fair share, and
        keep that much. Room moves only to a layout that stays within its share, and only where
        enough of it can be had: so it never moves to and fro. None where it may not move, or a
        region is on its way out already; one that is stuck there holds up only regions that the
        same workers have.
        """
        is_alone = wanted_by is not None and self._of.keys() <= {wanted_by}
        if is_alone or self.is_making_room(now_ms):
            return None
        leaving = [region for region in self.regions.values() if region.is_leaving]
        stuck: set[int] = set().union(*(region.holders for region in leaving))
        candidates = [
            region
            for region in self.regions.values()
            if region.is_ready and not region.is_leaving and not region.holders & stuck
        ]
        if wanted_by is not None:
            candidates = self._spare(candidates, wanted_by)
        return min(candidates, key=lambda region: region.used_ms, default=None)

    def _spare(self, candidates: list[Region], wanted_by: KVLayout) -> list[Region]:
        """Those that their layouts can do without for the sake of another; all or none of use."""
        fair_bytes = self.reachable_bytes // len(self._of.keys() | {wanted_by})
        held_bytes, region_bytes = self.held_bytes(wanted_by), self.region_bytes(wanted_by)
        if held_bytes and held_bytes + region_bytes > fair_bytes:
            return []
        spare: list[Region] = []
        spare_bytes = 0
        for layout in self._of:
            if layout == wanted_by:
                continue
            mine = [region for region in candidates if region.layout == layout]
            more_bytes = self.held_bytes(layout) - fair_bytes
            count = min(len(mine), max(0, more_bytes) // self.region_bytes(layout))
            spare_bytes += count * self.region_bytes(layout)
            spare += mine if count else []
        missing_bytes = self.allocated_bytes + region_bytes - self.reachable_bytes
        return spare if spare_bytes >= missing_bytes else []

    def check_integrity(self) -> None:
        """Assert that every region agrees with itself, and the sums with the regions."""
        for number, region in self.regions.items():
            assert region.number == number, (region.number, number)
            assert self._of[region.layout][number] is region, number
            assert not region.mapped & region.offered, (number, region.mapped, region.offered)
            assert not region.mapped & region.refused.keys(), (number, region.mapped)
            assert region.is_ready or not region.holders, f"region {number} is not made yet"
            region.cells.check_integrity()
        assert sum(len(regions) for regions in self._of.values()) == len(self.regions)
        allocated = sum(region.bytes for region in self.regions.values())
        assert allocated == self.allocated_bytes, (allocated, self.allocated_bytes)
        assert self.allocated_bytes <= self.size_bytes, (self.allocated_bytes, self.size_bytes)
