"""Chunks on their way down: written behind from the cells that engines stored them in.

    held ─► StoreTo (through) ─┬─ stored: the tier has it
    matched ─► (on_reuse)      └─ anything else: counted; what lies behind it is not written either
    memory short ─► (on_eviction)

An entry being written is pinned: its cells do not change, and come back when the tier has said
how it ended. What waits for one tier is bounded in bytes; beyond that the chunk is dropped, and
offered again when it is matched. A chunk goes down only behind its parent, so a tier never holds
what cannot be reached. Nobody ever waits for a write.
"""

from collections.abc import Callable, Iterable, Sequence

from kvtide.core.effects import Effect, StoreTo
from kvtide.core.host import Host
from kvtide.core.index import Entry, Index, Root
from kvtide.core.lending import QUEUE_RATIO, QUEUE_RATIO_MAX, Lending
from kvtide.core.reasons import DropReason
from kvtide.core.tiering import TierPlan, WritePolicy, record_of

WATERMARK_RATIO = 0.95
"""Fill level of the host from which entries are written on their way to being evicted."""
EVICTING_MAX = 64
"""Leaves looked at in one tick for that."""


class Write:
    """One entry on its way to one tier."""

    __slots__ = ("bytes", "entry", "tier")

    def __init__(self, entry: Entry, tier: int) -> None:
        self.entry = entry
        self.tier = tier
        self.bytes = entry.bytes


class Writes:
    """Everything that is written behind."""

    def __init__(
        self,
        tiers: Sequence[TierPlan],
        index: Index,
        host: Host,
        lending: Lending,
        emit: Callable[[Effect], None],
        count: Callable[[str, int], None],
    ) -> None:
        self._tiers = tiers
        self._index = index
        self._host = host
        self._lending = lending
        self._emit = emit
        self._count = count
        self._running: dict[int, Write] = {}
        self.queued_bytes = [0] * len(tiers)
        """For each tier, bytes that wait for it."""
        self._next_number = 1

    def held(self, entries: Iterable[Entry]) -> None:
        """These have become visible, parents first."""
        self._write(entries, (WritePolicy.THROUGH,))

    def matched(self, entries: Iterable[Entry]) -> None:
        """These were matched, in the order of their chain."""
        self._write(entries, (WritePolicy.THROUGH, WritePolicy.ON_REUSE))

    def _write(self, entries: Iterable[Entry], policies: Sequence[WritePolicy]) -> None:
        tiers = [number for number, tier in enumerate(self._tiers) if tier.policy in policies]
        if not tiers:
            return
        for entry in entries:
            for tier in tiers:
                if not entry.kept >> tier & 1:
                    self._write_to(tier, entry)

    def _write_to(self, tier: int, entry: Entry) -> bool:
        """Hand an entry to a tier; whether that could be done."""
        parent = entry.parent
        if not entry.is_held or parent is None or entry.root.is_cleared:
            return False
        name = self._tiers[tier].name
        if isinstance(parent, Entry) and not parent.kept >> tier & 1:
            self._count(f"tier_stores.{name}.{DropReason.NOT_ANCHORED}", 1)
            return False
        write = Write(entry, tier)
        queued = self.queued_bytes[tier]
        if queued and queued + write.bytes > self.queue_bytes_max:
            self._count(f"tier_stores.{name}.{DropReason.QUEUE_FULL}", 1)
            return False
        number = self._next_number
        self._next_number += 1
        self._running[number] = write
        self.queued_bytes[tier] += write.bytes
        self._lending.pin(entry)
        entry.kept |= 1 << tier
        self._emit(StoreTo(tier, number, record_of(entry), entry.run))
        return True

    @property
    def queue_bytes_max(self) -> int:
        """B_queue of the contract, for each tier; one entry is always allowed."""
        host_bytes = self._host.limit_bytes
        wanted = max(int(host_bytes * QUEUE_RATIO), self._lending.step_bytes)
        return min(wanted, int(host_bytes * QUEUE_RATIO_MAX))

    def ended(self, number: int, outcome: str, *, is_ok: bool) -> None:
        """The tier is through with an entry's cells."""
        write = self._running.pop(number)
        self.queued_bytes[write.tier] -= write.bytes
        name = self._tiers[write.tier].name
        self._count(f"tier_stores.{name}.{outcome}", 1)
        self._count(f"tier_stored_bytes.{name}", write.bytes if outcome == "stored" else 0)
        if not is_ok:
            _forget_in(write.tier, write.entry, with_ancestors=outcome == DropReason.NOT_ANCHORED)
        self._lending.unpin(write.entry)

    @property
    def are_waiting(self) -> bool:
        """Whether a tier writes, or wants what would be evicted next."""
        return bool(self._running) or any(
            tier.policy is WritePolicy.ON_EVICTION for tier in self._tiers
        )

    def write_before_eviction(self) -> None:
        """Memory is short: write what would be evicted next, its chain before it."""
        tiers = [n for n, t in enumerate(self._tiers) if t.policy is WritePolicy.ON_EVICTION]
        if not tiers or not self._is_full():
            return
        for leaf in self._index.oldest_leaves(EVICTING_MAX):
            chain = _chain_of(leaf)
            for tier in tiers:
                for entry in chain:
                    if not entry.kept >> tier & 1 and not self._write_to(tier, entry):
                        break

    def _is_full(self) -> bool:
        regions = self._host.regions.values()
        free = sum(r.cells.free_cells * r.layout.block_bytes for r in regions)
        return self._host.allocated_bytes - free > self._host.reachable_bytes * WATERMARK_RATIO

    def pinned(self) -> list[Entry]:
        """Entries that are being written, each as often as it is pinned."""
        return [write.entry for write in self._running.values()]

    def check_integrity(self) -> None:
        """Assert that the sums agree, and that what is being written cannot go away."""
        queued = [0] * len(self._tiers)
        for write in self._running.values():
            queued[write.tier] += write.bytes
            assert write.entry.pins > 0, write.entry.key
        assert queued == self.queued_bytes, (queued, self.queued_bytes)


def _forget_in(tier: int, entry: Entry, *, with_ancestors: bool) -> None:
    """The entry is not there; nor, where that is why, may what it hangs on be there any more.

    A tier does not see how often memory hits what it evicts: the next match writes it anew.
    """
    node: Entry | Root | None = entry
    while isinstance(node, Entry):
        node.kept &= ~(1 << tier)
        node = node.parent if with_ancestors else None


def _chain_of(leaf: Entry) -> list[Entry]:
    """An entry and all before it, the first of the chain first."""
    chain = [leaf]
    while isinstance(parent := chain[-1].parent, Entry):
        chain.append(parent)
    return chain[::-1]
