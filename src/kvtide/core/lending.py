"""Grants: permission to write named cells, answered once by every writing worker.

    offered ─► granted ─► (planned by the engine) ─► answered by each writer ─► copied ─► held
                  └ returned, never planned              └ failed: the entry and all behind it

A cell comes back when nobody can write it any more: every writer has answered, or is proven dead,
or the grant was returned before it was planned. Cells that wait for a silent writer are in
quarantine; they count against their own engine's queue, so a hung worker bounds what it can take
and what its engine may store, not what others may. So does what was copied behind a chunk that is
not: it cannot be found yet, nor evicted. A grant that nobody answers for long fails, but for its
cells, so that others may store the same.

Invariant: a lent cell belongs to exactly one attached entry, or one *loose* entry (detached, but
still written or read).
"""

from collections.abc import Callable, Mapping
from itertools import chain

from kvtide.bounds import T_PUT_MS
from kvtide.core import radix
from kvtide.core.effects import Effect, SetGenerations
from kvtide.core.host import MAP_MS_MAX, Host, Region
from kvtide.core.index import Entry, Index, Root
from kvtide.core.instances import Instance, Worker
from kvtide.core.layout import KVLayout
from kvtide.core.messages import Run, StoreAnswer, StoreOffer
from kvtide.core.reasons import DropReason, EvictCause

HELD = "held"
"""Outcome of an offered chunk that the node has already: neither stored nor dropped."""

PUT_MS_MAX = T_PUT_MS
"""So long a tier's grant may go unanswered before others may store the same."""
NO_ENGINE = ""
"""Whose grants are those that tiers fill; an engine's id is never empty."""

QUEUE_RATIO = 0.10
"""B_queue: the part of the host that one engine's grants, or one tier's writes, may take."""
QUEUE_RATIO_MAX = 0.25
"""B_queue at most, where a step of the engine is larger than `QUEUE_RATIO` of the host."""
QUEUES_RATIO_MAX = 0.50
"""What all engines together may be granted: each gets at most half of what the others leave of it,
so one engine may have its quarter, and any number of hung ones leave something to the next."""
CLEARED_VISITS_MAX = 10_000
"""Visits at once to what is cleared, two for each entry that is taken away: 15 ms, so that nobody
waits long for an answer."""
EVICTIONS_MAX = 64
"""Entries evicted for one run at most, so that an offer ends in bounded time."""


class Grant:
    """One lent run and the workers that have not answered for it; or the tier that fills it."""

    def __init__(
        self, number: int, entry: Entry, engine_id: str, waiting: set[Worker], since_ms: int
    ) -> None:
        self.number = number
        self.since_ms = since_ms
        self.entry = entry
        self.engine_id = engine_id
        self.waiting = waiting  # writers that have not answered
        self.is_loading = False
        """A tier is filling it; then it is of no engine, and waits for no worker."""
        self.has_failed = False  # its entry is detached, and will never be held

    @property
    def bytes(self) -> int:
        """Bytes lent, over all shards."""
        return self.entry.bytes


class Lending:
    """Lends cells, takes them back, evicts for room."""

    def __init__(
        self, index: Index, host: Host, emit: Callable[[Effect], None], first_number: int = 1
    ) -> None:
        """`first_number` starts the grants' numbers: random for each node, so that a number given
        by one node means nothing to another."""
        self._index = index
        self._host = host
        self._emit = emit
        self.grants: dict[int, Grant] = {}
        self._grant_of: dict[Entry, Grant] = {}
        self.loose: set[Entry] = set()
        self.granted_bytes = 0
        self.step_bytes = 0
        """Of the largest step of any engine that has offered something."""
        self._granted_to: dict[str, int] = {}  # granted bytes by engine; nobody with nothing
        self._behind: dict[Entry, Grant] = {}
        """Copied behind what is not: their bytes still count as granted."""
        self.evicted = dict.fromkeys(EvictCause, 0)
        self.stored_blocks = 0
        self.failed_blocks = 0
        """Blocks whose copy was planned and is not held: it, or one before it, failed."""
        self.cleared: list[Root | Entry | radix.Fork] = []
        """Cleared and not gone yet; a stack of holders, each below all that is known below it."""
        self.on_settled: Callable[[Entry], None] = _nobody_waits
        """Called when nobody writes an entry's cells any more, however that came."""
        self._next_number = first_number
        self._next_generation = 1

    # ---- lending

    def offer(self, instance: Instance, offer: StoreOffer, now_ms: int) -> StoreAnswer:
        """Grant what is wanted and may be had; the rest is dropped, each with its reason."""
        layout = instance.layout
        assert layout is not None, instance.engine_id
        writers = instance.writers()
        connections = [worker.connection or 0 for worker in writers]
        answer = StoreAnswer(offer.number, [], [], [], connections)
        regions = self._open_regions(instance, layout)
        parent = self._anchor(instance, offer.parent, now_ms)
        drop = DropReason.NOT_ANCHORED
        for key, digests in zip(offer.keys, offer.digests, strict=True):
            if parent is None:
                answer.outcomes.append(drop)
                continue
            entry = Entry(key, digests, parent, layout, now_ms)
            known = self._known(entry, parent)
            if known is not None:
                known.used_ms = now_ms
                answer.outcomes.append(HELD if known.is_held else DropReason.IN_FLIGHT)
                parent = known
                continue
            refused = self._lend(entry, parent, instance, regions)
            answer.outcomes.append(refused or "")
            if refused is not None:
                parent, drop = None, refused
                continue
            grant = self._grant(entry, instance.engine_id, set(writers), now_ms)
            answer.grants.append(grant.number)
            answer.runs.append(entry.run)
            parent = entry
        return answer

    def _anchor(self, instance: Instance, key: bytes, now_ms: int) -> Entry | Root | None:
        """What new entries of this engine may be stored behind."""
        if key in instance.roots:
            return self._index.roots[key]
        parent = self._index.reachable(key)
        if not isinstance(parent, Entry) or not parent.is_whole:
            return None
        if parent.layout != instance.layout:
            return None
        parent.used_ms = now_ms
        return parent

    def _known(self, entry: Entry, parent: Entry | Root) -> Entry | None:
        """The entry that makes storing this one superfluous."""
        known = self._index.entries.get(entry.key)
        if known is None and not entry.is_whole:
            known = radix.longest(parent.tree, entry.digests).entry
        if known is None or known.parent is not parent:
            return None
        return known if known.digests.startswith(entry.digests) else None

    def _lend(
        self, entry: Entry, parent: Entry | Root, instance: Instance, regions: list[Region]
    ) -> DropReason | None:
        """Find cells for the entry; a reason where there are none."""
        if self._index.find(entry.key) is not None:
            # One key for two places: the engine errs, or the other is cleared and not gone yet.
            return DropReason.NOT_ANCHORED
        if self.granted_to(instance.engine_id) + entry.bytes > self.queue_bytes_max(instance):
            return DropReason.QUEUE_FULL
        if not regions:
            return DropReason.NOT_MAPPED
        is_found = self._take_behind(entry, parent, instance, regions)
        return None if is_found else DropReason.NO_MEMORY

    def lend_to_tier(self, entry: Entry, parent: Entry | Root, instance: Instance) -> Grant | None:
        """Cells that a tier fills for this instance; None where there are none."""
        regions = self._open_regions(instance, entry.layout)
        if not regions or not self._take_behind(entry, parent, instance, regions):
            return None
        grant = self._grant(entry, NO_ENGINE, set(), entry.used_ms)
        grant.is_loading = True
        return grant

    def _open_regions(self, instance: Instance, layout: KVLayout) -> list[Region]:
        usable = self._host.usable(layout)
        return [region for region in usable if region.number in instance.open_regions]

    def _take_behind(
        self, entry: Entry, parent: Entry | Root, instance: Instance, regions: list[Region]
    ) -> bool:
        """Take cells for an entry without evicting its parent, which may be a leaf itself."""
        if isinstance(parent, Entry):
            self.pin(parent)
        is_found = self._take_cells(entry, instance, regions)
        if isinstance(parent, Entry):
            self.unpin(parent)
        return is_found

    def _take_cells(self, entry: Entry, instance: Instance, regions: list[Region]) -> bool:
        """Take free cells, or those of entries evicted for it; whether there were enough."""
        evictions = 0
        while True:
            for region in regions:
                first_cell = region.cells.take(entry.blocks)
                if first_cell is not None:
                    region.used_ms = entry.used_ms
                    region.entries[first_cell] = entry
                    generation = self._next_generation
                    entry.run = Run(region.number, first_cell, entry.blocks, generation)
                    self._next_generation += 1
                    return True
            if evictions == EVICTIONS_MAX or self.is_growing(entry, instance):
                return False
            if not self._evict_for(instance):
                return False
            evictions += 1

    def is_growing(self, entry: Entry, instance: Instance) -> bool:
        """Whether fresh memory is on its way to this engine: then nothing need be evicted."""
        return self._host.will_grow(entry.layout, entry.used_ms) or any(
            region.number not in instance.open_regions
            and entry.used_ms - region.ready_since_ms < MAP_MS_MAX
            for region in self._host.usable(entry.layout)
        )

    def _evict_for(self, instance: Instance) -> bool:
        """Evict the oldest leaf whose cells this instance can use; whether there was one."""
        entry = self._index.next_to_evict(instance.open_regions)
        if entry is None:
            return False
        self.evict(entry, EvictCause.ROOM)
        return True

    def _grant(self, entry: Entry, engine_id: str, waiting: set[Worker], now_ms: int) -> Grant:
        grant = Grant(self._next_number, entry, engine_id, waiting, now_ms)
        self._next_number += 1
        self.grants[grant.number] = grant
        self._grant_of[entry] = grant
        self._count_granted(grant.engine_id, grant.bytes)
        self._index.attach_storing(entry)
        self._emit(SetGenerations(entry.run))
        return grant

    def granted_to(self, engine_id: str) -> int:
        """Bytes granted to one engine and not yet answered, quarantine included."""
        return self._granted_to.get(engine_id, 0)

    def _count_granted(self, engine_id: str, more_bytes: int) -> None:
        self.granted_bytes += more_bytes
        mine = self._granted_to.pop(engine_id, 0) + more_bytes
        if mine:
            self._granted_to[engine_id] = mine

    def queue_bytes_max(self, instance: Instance) -> int:
        """B_queue of the contract, for one engine's grants, quarantine included.

        It is the engine's own: what others hold, hung or with larger steps, only halves what is
        left of the common bound, and one chunk is always allowed.
        """
        host_bytes = self._host.limit_bytes
        identity, layout = instance.identity, instance.layout
        assert identity is not None, instance.engine_id
        assert layout is not None, instance.engine_id
        step_bytes = identity.step_tokens // layout.block_tokens * layout.block_bytes
        self.step_bytes = max(self.step_bytes, step_bytes)
        wanted = max(int(host_bytes * QUEUE_RATIO), step_bytes)
        others = self.granted_bytes - self.granted_to(instance.engine_id)
        left = (int(host_bytes * QUEUES_RATIO_MAX) - others) // 2
        return max(min(wanted, int(host_bytes * QUEUE_RATIO_MAX), left), layout.chunk_bytes)

    # ---- answers

    def answered(self, number: int, worker: Worker, *, is_ok: bool) -> None:
        """A writer will never write under this grant again."""
        grant = self.grants.get(number)
        if grant is None or worker not in grant.waiting:
            return
        grant.waiting.discard(worker)
        if not is_ok:
            self._fail(grant)
        self._settle(grant)

    def answered_by_tier(self, grant: Grant, *, is_ok: bool) -> None:
        """The tier will never write these cells again."""
        assert grant.is_loading, grant.number
        grant.is_loading = False
        if not is_ok:
            self._fail(grant)
        self._settle(grant)

    def returned(self, number: int, engine_id: str) -> None:
        """The scheduler never planned this grant."""
        grant = self.grants.get(number)
        if grant is None or grant.engine_id != engine_id:
            return
        grant.waiting.clear()
        self._fail(grant)
        self._settle(grant, is_returned=True)

    def worker_holds(self, worker: Worker, held: set[int]) -> None:
        """The worker is back and names what it may still write; it is through with the rest."""
        for number in [n for n, grant in self.grants.items() if worker in grant.waiting]:
            if number not in held:
                self.answered(number, worker, is_ok=False)

    def lost_with_connection(self, engine_id: str, last_grant: int) -> None:
        """Grants above the last one that the scheduler received can never be planned."""
        lost = [
            number
            for number, grant in self.grants.items()
            if number > last_grant and grant.engine_id == engine_id
        ]
        for number in lost:
            self.returned(number, engine_id)

    def _fail(self, grant: Grant) -> None:
        """The entry will never be held, nor what is stored behind it."""
        if grant.has_failed:
            return
        for entry in [*self._index.below(grant.entry), grant.entry]:
            self._detach(entry)

    def _settle(self, grant: Grant, *, is_returned: bool = False) -> None:
        if grant.waiting or grant.is_loading or grant.number not in self.grants:
            return
        del self.grants[grant.number]
        del self._grant_of[grant.entry]
        self._behind[grant.entry] = grant
        if grant.entry.is_attached:
            shown_before = len(self._index.shown)
            for other in self._index.copied(grant.entry):
                if other.is_attached and not other.pins:
                    self.evict_below(other, EvictCause.SUPERSEDED)
                    self.evict(other, EvictCause.SUPERSEDED)
            for entry in self._index.shown[shown_before:]:
                self._no_longer_behind(entry)
        else:
            self._no_longer_behind(grant.entry, was_planned=not is_returned)
        self._free_if_unused(grant.entry)
        self.on_settled(grant.entry)

    def _no_longer_behind(self, entry: Entry, *, was_planned: bool = True) -> None:
        """The entry can be found, or is gone: nobody is charged for it any more."""
        if (grant := self._behind.pop(entry, None)) is None:
            return
        self._count_granted(grant.engine_id, -grant.bytes)
        if grant.engine_id != NO_ENGINE:
            self.stored_blocks += entry.blocks if entry.is_held else 0
            self.failed_blocks += entry.blocks if was_planned and not entry.is_held else 0

    def give_up_silent(self, instances: Mapping[str, Instance], now_ms: int) -> None:
        """Grants that nobody has answered for too long fail; their cells stay lent."""
        for grant in list(self.grants.values()):
            age_ms = now_ms - grant.since_ms
            if age_ms < PUT_MS_MAX:
                break  # they are in the order of their numbers
            instance = instances.get(grant.engine_id)
            if instance is None or age_ms >= instance.grant_ms_max:
                self._fail(grant)

    # ---- taking away

    def evict(self, entry: Entry, cause: EvictCause) -> None:
        """Take a childless entry away; its cells come back now, or when the last user ends."""
        self.evicted[cause] += 1
        self._detach(entry)

    def evict_below(self, holder: Entry | Root, cause: EvictCause) -> None:
        """Take everything below away, leaves first."""
        for entry in self._index.below(holder):
            self.evict(entry, cause)

    def clear(self, salt_digest: bytes | None, fingerprint: bytes | None = None) -> int:
        """Clear all entries, or those of one salt or fingerprint; how many there were.

        None of them is found from now on. A few are taken away at once, the others with time.
        """
        count = 0
        for root in list(self._index.roots.values()):
            is_meant = salt_digest in (None, root.salt_digest)
            if root.children and is_meant and fingerprint in (None, root.fingerprint):
                count += root.entry_count
                self._index.clear(root)
                self.cleared.append(root)
        self.take_cleared_away()
        return count

    def take_cleared_away(self) -> None:
        """Go on with what `clear` left, leaves first, in bounded time."""
        waiting = self.cleared
        for _ in range(CLEARED_VISITS_MAX):
            if not waiting:
                return
            node = waiting[-1]
            if isinstance(node, radix.Fork):
                waiting.pop()
                waiting += node.children.values()
                waiting += [node.ending] if node.ending else []
            elif node.children:
                waiting += [node.tree] if node.tree else []
                waiting += node.storing or []
            else:
                waiting.pop()
                if isinstance(node, Entry) and node.is_attached:
                    self.evict(node, EvictCause.CLEARED)

    def _detach(self, entry: Entry) -> None:
        self._index.detach(entry)
        self.loose.add(entry)
        self._no_longer_behind(entry)
        if (grant := self._grant_of.get(entry)) is not None:
            grant.has_failed = True
        self._free_if_unused(entry)

    def pin(self, entry: Entry) -> None:
        """The entry is not evicted until `unpin`."""
        entry.pins += 1

    def unpin(self, entry: Entry) -> None:
        """One user less."""
        assert entry.pins > 0, "unpinned more often than pinned"
        entry.pins -= 1
        if entry.pins:
            return
        if not entry.is_attached:
            self._free_if_unused(entry)
        elif entry.is_held and not entry.is_whole and self._is_superseded(entry):
            self.evict(entry, EvictCause.SUPERSEDED)
        else:
            self._index.reconsider(entry)

    def _is_superseded(self, entry: Entry) -> bool:
        assert entry.parent is not None
        return radix.is_covered(entry.parent.tree, entry)

    def _free_if_unused(self, entry: Entry) -> None:
        if entry not in self.loose or entry.pins or entry in self._grant_of:
            return
        self.loose.discard(entry)
        run = entry.run
        del self._host.regions[run.region].entries[run.first_cell]
        self._host.regions[run.region].cells.give_back(run.first_cell, run.cell_count)

    def pinned_entries(self) -> set[Entry]:
        """Entries that somebody uses, of all that have cells."""
        return {entry for entry in chain(self._index.entries.values(), self.loose) if entry.pins}

    def check_integrity(self, instances: Mapping[str, Instance]) -> None:
        """Assert that each lent cell has exactly one entry, and that the sums agree."""
        for grant in self.grants.values():
            if grant.engine_id != NO_ENGINE:
                living = set(instances[grant.engine_id].workers.values())
                assert grant.waiting <= living, f"grant {grant.number} waits for the dead"
        entry_count = 0
        for number, region in self._host.regions.items():
            self._check_cells(region)
            entry_count += len(region.entries)
            used = region.cells.cell_count - region.cells.free_cells
            lent = sum(entry.blocks for entry in region.entries.values())
            assert used == lent, (number, used, lent)
        known = len(self._index.entries) + len(self.loose)
        assert entry_count == known, (entry_count, known)
        self._check_grants()

    def _check_cells(self, region: Region) -> None:
        """Assert that the entries of a region are known, and share no cell.

        A byte for each cell of one region: a node that holds much has little to spare for this.
        """
        is_lent = bytearray(region.cells.cell_count)
        for first_cell, entry in region.entries.items():
            run = entry.run
            assert run.region == region.number, (run, region.number)
            assert run.first_cell == first_cell, (run, first_cell)
            assert run.cell_count == entry.blocks, (run, entry.blocks)
            is_known = self._index.entries.get(entry.key) is entry or entry in self.loose
            assert is_known, f"the cells of {run} are nobody's"
            assert is_lent.find(1, first_cell, run.end_cell) < 0, f"lent twice: {run}"
            is_lent[first_cell : run.end_cell] = b"\1" * run.cell_count

    def _check_grants(self) -> None:
        assert len(self._grant_of) == len(self.grants), (len(self._grant_of), len(self.grants))
        granted_to: dict[str, int] = {}
        for grant in chain(self.grants.values(), self._behind.values()):
            granted_to[grant.engine_id] = granted_to.get(grant.engine_id, 0) + grant.bytes
        for entry, grant in self._behind.items():
            assert entry is grant.entry, grant.number
            assert entry.is_attached, f"what grant {grant.number} stored is gone"
            assert entry.is_copied, f"what grant {grant.number} stored is not copied"
            assert not entry.is_held, f"what grant {grant.number} stored can be found"
        assert granted_to == self._granted_to, (granted_to, self._granted_to)
        assert self.granted_bytes == sum(granted_to.values()), self.granted_bytes
        for grant in self.grants.values():
            assert grant.waiting or grant.is_loading, f"grant {grant.number} waits for nobody"
            assert grant.is_loading == (grant.engine_id == NO_ENGINE), grant.number
            assert grant.has_failed != (grant.entry.is_attached), grant.number


def _nobody_waits(entry: Entry) -> None:
    """Until somebody says what is to be done when an entry settles."""
