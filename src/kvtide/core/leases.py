"""Leases and load references: what keeps a match from being evicted before it is copied.

Both hang on the deepest entry of a match; eviction takes leaves first, so its ancestors are safe
behind it; what is kept is counted once, however many requests share a prefix. They only keep a
load from failing, never from being wrong: generations do that. So a lease may simply run out, and
everything of an instance ends with its scheduler's connection.
"""

from collections.abc import Mapping, Set
from dataclasses import dataclass
from typing import NamedTuple

from kvtide.core.index import Entry, Index, Root
from kvtide.core.instances import Instance
from kvtide.core.lending import Lending

LEASE_MS = 2_000
"""From an answer to the load that uses it: an engine takes many steps meanwhile."""
PINNED_RATIO_MAX = 0.75
"""B_pin: above this share of the host, answers carry no lease."""
PINNED_BY_ONE_RATIO_MAX = 0.50
"""Of one engine: where it stands still in the middle of its loads, others have room left."""
LEASES_MAX = 1 << 16
"""Leases and loads at once: above, answers carry none, so that an engine which never ends its
loads costs a bounded number of them."""


@dataclass(slots=True)
class Lease:
    """One protected match; without a deadline once its load has begun."""

    entry: Entry
    regions: Set[int]
    engine_id: str
    ends_ms: int | None
    charged_bytes: int = 0
    """What it keeps that nobody kept when it was taken."""


class LeaseCounts(NamedTuple):
    """Leases, and those that have become load references."""

    leases: int
    loads: int


class Leases:
    """All leases of the node."""

    def __init__(self, index: Index, lending: Lending, first_number: int = 1) -> None:
        """`first_number` starts the leases' numbers: random for each node, like the grants'."""
        self._index = index
        self._lending = lending
        self._leases: dict[int, Lease] = {}
        self._charged: dict[str, int] = {}  # bytes by engine; nobody with nothing
        self._next_number = first_number

    @property
    def pinned_bytes(self) -> int:
        """Bytes that leases, loads and lookups that wait for tiers keep, each counted once."""
        return self._index.leased_bytes

    @property
    def are_any(self) -> bool:
        """Whether a match is protected."""
        return bool(self._leases)

    def counts(self, engine_id: str | None = None) -> LeaseCounts:
        """How many leases and load references there are, of all engines or of one."""
        mine = [
            lease
            for lease in self._leases.values()
            if engine_id is None or lease.engine_id == engine_id
        ]
        loads = sum(1 for lease in mine if lease.ends_ms is None)
        return LeaseCounts(len(mine) - loads, loads)

    def take(self, lease: Lease, host_bytes: int) -> int:
        """Protect a match; the lease's number, or 0 where too much is pinned already.

        What others keep already costs nothing more.
        """
        if len(self._leases) >= LEASES_MAX:
            return 0
        more_bytes = self._index.unleased_bytes(lease.entry)
        mine = self._charged.get(lease.engine_id, 0) + more_bytes
        is_much = mine > host_bytes * PINNED_BY_ONE_RATIO_MAX
        is_too_much = self.pinned_bytes + more_bytes > host_bytes * PINNED_RATIO_MAX
        if more_bytes and (is_much or is_too_much):
            return 0
        lease.charged_bytes = more_bytes
        self._charge(lease.engine_id, more_bytes)
        number = self._next_number
        self._next_number += 1
        self._leases[number] = lease
        self._index.lease(lease.entry)
        self._lending.pin(lease.entry)
        return number

    def begin_load(self, number: int, engine_id: str) -> bool:
        """The lease becomes a reference, which has no deadline; whether it had not ended yet."""
        lease = self._leases.get(number)
        if lease is None or lease.engine_id != engine_id:
            return False
        lease.ends_ms = None
        return True

    def end(self, number: int, engine_id: str) -> None:
        """Release a lease or end a load; a number that is gone already changes nothing."""
        lease = self._leases.get(number)
        if lease is not None and lease.engine_id == engine_id:
            self._drop(number)

    def end_all(self, engine_id: str) -> None:
        """The scheduler's connection has ended."""
        for number in [n for n, lease in self._leases.items() if lease.engine_id == engine_id]:
            self._drop(number)

    def expire(self, now_ms: int) -> None:
        """Drop leases past their deadline."""
        for number in [
            number
            for number, lease in self._leases.items()
            if lease.ends_ms is not None and lease.ends_ms <= now_ms
        ]:
            self._drop(number)

    def holds_region(self, region: int) -> bool:
        """Whether a protected match has cells there."""
        return any(region in lease.regions for lease in self._leases.values())

    def _drop(self, number: int) -> None:
        lease = self._leases.pop(number)
        self._charge(lease.engine_id, -lease.charged_bytes)
        self._index.unlease(lease.entry)
        self._lending.unpin(lease.entry)

    def _charge(self, engine_id: str, more_bytes: int) -> None:
        mine = self._charged.pop(engine_id, 0) + more_bytes
        if mine:
            self._charged[engine_id] = mine

    def check_integrity(
        self,
        instances: Mapping[str, Instance],
        looked_for: Mapping[Entry, int],
        written: Mapping[Entry, int],
    ) -> None:
        """Assert that pins and leases agree, and that whose they are is connected.

        How often entries are pinned by others: as leased by lookups that wait, and by writes.
        """
        for number, lease in self._leases.items():
            instance = instances[lease.engine_id]
            assert instance.connection is not None, f"lease {number} outlived a connection"
        charged: dict[str, int] = {}
        for lease in self._leases.values():
            if lease.charged_bytes:
                mine = charged.get(lease.engine_id, 0)
                charged[lease.engine_id] = mine + lease.charged_bytes
        assert charged == self._charged, (charged, self._charged)
        pins = dict(looked_for)
        for lease in self._leases.values():
            pins[lease.entry] = pins.get(lease.entry, 0) + 1
        for entry in pins.keys() | written.keys():
            count = pins.get(entry, 0) + written.get(entry, 0)
            assert entry.pins == count, (entry.pins, count)
        pinned = self._lending.pinned_entries()
        assert pinned == pins.keys() | written.keys(), "pinned by nobody"
        kept = dict(pins)
        for entry in pins:
            node: Entry | Root | None = entry.parent
            while isinstance(node, Entry):
                kept[node] = kept.get(node, 0) + 1
                if kept[node] > 1:
                    break
                node = node.parent
        kept_bytes = sum(entry.bytes for entry in kept)
        assert self.pinned_bytes == kept_bytes, (self.pinned_bytes, kept_bytes)
        for entry, count in kept.items():
            assert entry.leases == count, (entry.leases, count)
        leased = sum(1 for entry in self._index.entries.values() if entry.leases)
        assert leased <= len(kept), "leased, but by no lease"
