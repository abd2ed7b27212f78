"""How regions come, open, move and go: the traffic around `Host`.

    wanted ─► MakeRegion ─► made ─► SendRegion to every worker ─► opened (mapped and populated)
       └─ put off while tiers load, unless it is needed: nothing counts as taken for it then
    advance: leaving ─► nothing lent or leased ─► RegionLeave ─► left ─► FreeRegion

A worker holds a region from the offer on (it may be mapping it) until it says that it has left, or
is proven dead: only then is the memory given back, and never on a deadline.
"""

from collections.abc import Callable, Collection, Iterable, Set

from kvtide.core import messages as m
from kvtide.core.effects import Effect, FreeRegion, MakeRegion, Note, Send, SendRegion
from kvtide.core.host import REFUSED_MS_FIRST, REFUSED_MS_MAX, Host, Refusal, Region
from kvtide.core.index import Index
from kvtide.core.instances import Instance, Worker
from kvtide.core.layout import KVLayout
from kvtide.core.leases import Leases
from kvtide.core.lending import Lending
from kvtide.core.reasons import EvictCause
from kvtide.units import format_bytes

DETAIL_CHARS_MAX = 400
"""Of a reason that somebody gives, as it is kept and shown."""
PUT_OFF_MS_MAX = 1_000
"""So long a region that nobody needs yet is put off: made and mapped, it takes a core from whoever
waits for loads, in the node and in every worker."""
CLOSED_MS_MAX = 120_000
"""A region that a worker could not map and that is open to nobody goes back after so long."""


class Regions:
    """Carries regions through their states."""

    def __init__(
        self,
        host: Host,
        index: Index,
        lending: Lending,
        leases: Leases,
        emit: Callable[[Effect], None],
    ) -> None:
        self._host = host
        self._index = index
        self._lending = lending
        self._leases = leases
        self._emit = emit
        self._wanted_since_ms: dict[KVLayout, int] = {}  # by layouts that want a region
        self._workers: dict[int, Worker] = {}  # every worker that may hold a region

    # ---- growing and shrinking

    def keep_ahead(
        self,
        layouts: Iterable[KVLayout],
        now_ms: int,
        chunks_to_load: Callable[[KVLayout], int] | None,
    ) -> None:
        """Have half a region free in every layout in use, as far as the host allows.

        Who has least comes first, and what is given up for it goes to nobody who has more.

        Args:
            layouts: those in use.
            now_ms: the time.
            chunks_to_load: of a layout, from tiers; None where no load runs.
        """
        host = self._host
        host.forget_refusal(now_ms)
        wanting = [layout for layout in layouts if host.wants_region(layout)]
        before_ms = self._wanted_since_ms
        self._wanted_since_ms = {layout: before_ms.get(layout, now_ms) for layout in wanting}
        for layout in sorted(wanting, key=host.held_bytes):
            if self._is_put_off(layout, now_ms, chunks_to_load):
                continue
            # An empty region is gone at once, and the next may go; for another surplus() waits.
            while not host.has_room(layout) and (region := host.surplus(layout, now_ms)):
                self._give_up(region, now_ms)
            if host.has_room(layout):
                region = host.make(layout)
                self._emit(MakeRegion(region.number, layout, region.cells.cell_count))
            elif host.is_making_room(now_ms):
                break
        while host.allocated_bytes > host.limit_bytes and (region := host.surplus(None, now_ms)):
            self._give_up(region, now_ms)

    def _is_put_off(
        self, layout: KVLayout, now_ms: int, chunks_to_load: Callable[[KVLayout], int] | None
    ) -> bool:
        """Whether a region that the layout wants is for later."""
        return (
            chunks_to_load is not None
            and self._host.free_chunks(layout) > chunks_to_load(layout)
            and now_ms - self._wanted_since_ms[layout] < PUT_OFF_MS_MAX
        )

    def made(self, number: int, now_ms: int) -> None:
        """The memory is there; workers are offered it next."""
        self._host.made(self._host.regions[number], now_ms)

    def not_made(self, number: int, now_ms: int, detail: str) -> None:
        """The machine has no more: stay at this size for a while, and evict."""
        self._host.not_made(self._host.regions[number], now_ms, detail[:DETAIL_CHARS_MAX])
        held = format_bytes(self._host.allocated_bytes)
        self._emit(Note(f"host memory stays at {held}: {detail}", is_warning=True))

    def limit(self, host_bytes: int) -> None:
        """Hold at most this much from now on; one region after the other goes back."""
        self._host.limit(host_bytes)

    def _give_up(self, region: Region, now_ms: int) -> None:
        region.is_leaving = True
        region.leaving_since_ms = now_ms
        for entry in list(region.entries.values()):
            if entry.is_attached:
                self._lending.evict_below(entry, EvictCause.MOVED)
                self._lending.evict(entry, EvictCause.MOVED)
        self._advance(region)

    @property
    def are_leaving(self) -> bool:
        """Whether a region is on its way out."""
        return any(region.is_leaving for region in self._host.regions.values())

    def advance(self) -> None:
        """Move every region that is leaving one step on, if it can."""
        for region in [region for region in self._host.regions.values() if region.is_leaving]:
            self._advance(region)

    def _advance(self, region: Region) -> None:
        if not region.is_unused:
            return
        if self._leases.holds_region(region.number):
            return
        for number in sorted(region.holders - region.leave_asked):
            worker = self._workers[number]
            if worker.connection is not None:
                region.leave_asked.add(number)
                self._emit(Send(worker.connection, m.RegionLeave(region.number)))
        if region.is_empty:
            self._host.remove(region)
            self._emit(FreeRegion(region.number))

    # ---- workers

    def offer(self, instance: Instance, now_ms: int) -> None:
        """Offer each worker the regions of its layout that it lacks, last used first."""
        layout = instance.layout
        assert layout is not None, instance.engine_id
        regions = sorted(self._host.usable(layout), key=lambda r: r.used_ms, reverse=True)
        for worker in instance.workers.values():
            if worker.connection is None:
                continue
            self._workers[worker.number] = worker
            for region in regions:
                refusal = region.refused.get(worker.number)
                if worker.number in region.holders or (refusal and now_ms < refusal.until_ms):
                    continue
                region.offered.add(worker.number)
                self._emit(
                    SendRegion(
                        worker.connection,
                        region.number,
                        worker.shard,
                        region.cells.cell_count,
                        layout.cell_bytes[worker.shard],
                    )
                )

    def is_offer_due(self, now_ms: int) -> bool:
        """Whether a region may be offered again to a worker that could not map it."""
        return any(
            now_ms >= refusal.until_ms and number not in region.holders
            for region in self._host.regions.values()
            for number, refusal in region.refused.items()
        )

    def give_back_closed(self, open_regions: Set[int], now_ms: int) -> None:
        """Give up what a worker could not map, once it has been open to nobody for long."""
        for region in list(self._host.regions.values()):
            if not region.refused or region.number in open_regions:
                region.closed_since_ms = None
            elif region.closed_since_ms is None:
                region.closed_since_ms = now_ms
            elif now_ms - region.closed_since_ms >= CLOSED_MS_MAX and not region.is_leaving:
                self._give_up(region, now_ms)

    def open_to(self, instance: Instance) -> set[int]:
        """The regions that every worker of the instance has mapped."""
        assert instance.layout is not None, instance.engine_id
        holders = {worker.number for worker in instance.workers.values()}
        return {
            region.number
            for region in self._host.usable(instance.layout)
            if holders <= region.mapped
        }

    def opened(self, worker: Worker, number: int) -> None:
        """The worker has the region mapped and populated."""
        region = self._host.regions.get(number)
        if region is not None and worker.number in region.offered:
            region.offered.discard(worker.number)
            region.mapped.add(worker.number)
            region.refused.pop(worker.number, None)

    def failed(self, worker: Worker, number: int, detail: str, now_ms: int) -> None:
        """The worker could not map the region; it is asked again after a pause that doubles."""
        region = self._host.regions.get(number)
        if region is None or worker.number not in region.holders:
            return
        self._forget(region, worker)
        before = region.refused.get(worker.number)
        pause_ms = min(2 * before.pause_ms, REFUSED_MS_MAX) if before else REFUSED_MS_FIRST
        text = f"process {worker.pid} (rank {worker.rank}) cannot map region {number}: {detail}"
        text = text[:DETAIL_CHARS_MAX]
        region.refused[worker.number] = Refusal(text, pause_ms, now_ms + pause_ms)
        if before is None:
            self._emit(Note(text, is_warning=True))
        self.advance()

    def left(self, worker: Worker, number: int) -> None:
        """The worker has no mapping of the region any more, whether it was told so or not."""
        region = self._host.regions.get(number)
        if region is not None:
            self._forget(region, worker)
            self.advance()

    def worker_is_away(self, worker: Worker) -> None:
        """Its connection ended; what it was asked then is asked again when it is back."""
        for region in self._host.regions.values():
            region.leave_asked.discard(worker.number)

    def worker_is_back(self, worker: Worker, mapped: Set[int], mapping: Set[int]) -> None:
        """The worker names what it has mapped, and what it is mapping; it has nothing else.

        What is being mapped may still fail: it counts as offered until the worker says more. What
        it could not map before it is offered again.
        """
        self._workers[worker.number] = worker
        for region in self._host.regions.values():
            region.refused.pop(worker.number, None)
            is_holder = worker.number in region.holders
            self._forget(region, worker)
            if is_holder and region.number in mapped:
                region.mapped.add(worker.number)
            elif is_holder and region.number in mapping:
                region.offered.add(worker.number)
        self.advance()

    def worker_died(self, worker: Worker) -> None:
        """Its mappings ended with it."""
        for region in self._host.regions.values():
            self._forget(region, worker)
            region.refused.pop(worker.number, None)
        self._workers.pop(worker.number, None)
        self.advance()

    def _forget(self, region: Region, worker: Worker) -> None:
        for holders in (region.offered, region.mapped, region.leave_asked):
            holders.discard(worker.number)

    def check_integrity(self, instances: Collection[Instance]) -> None:
        """Assert that only living workers have regions, and that what is open is mapped by all."""
        living = {w.number: w for instance in instances for w in instance.workers.values()}
        for number, worker in self._workers.items():
            assert living.get(number) is worker, f"worker {number} has died"
        for number, region in self._host.regions.items():
            have = region.holders | region.refused.keys()
            assert have <= self._workers.keys(), (number, have - self._workers.keys())
            assert region.leave_asked <= region.holders, (number, region.leave_asked)
            assert region.is_leaving or not region.leave_asked, (number, region.leave_asked)
        for instance in instances:
            wanted = self.open_to(instance) if instance.is_serving else set()
            is_open = {
                number
                for number in instance.open_regions & self._host.regions.keys()
                if not self._host.regions[number].is_leaving
            }
            assert is_open == wanted, (instance.engine_id, is_open, wanted)
