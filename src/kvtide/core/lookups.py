"""Answers to lookups: what is held, where it lies, and a lease on it.

    lookup ─► match ─┬─ all in open regions ─────────► Match, with a lease
                     ├─ else, while the engine maps ─► Pending … asked again as regions open
                     └─ else, once T_load has passed ► Match up to there (`not_mapped`)

A lookup is at most two messages: chunk keys first, then, where `Match.probe` says that it is
worth it, the block digests of the one chunk behind.
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple

from kvtide.core import messages as m
from kvtide.core.host import MAP_MS_MAX, Host
from kvtide.core.index import Index, Matched
from kvtide.core.instances import Instance
from kvtide.core.leases import LEASE_MS, Lease, Leases

WAITING_MAX = 1024
"""Lookups of one engine that may be pending; those above get what is open at once."""

NOTHING = Matched([], 0, may_go_on=False)


class Waiting(NamedTuple):
    """A lookup that is pending, and the region it waits for."""

    lookup: m.Lookup
    region: int


class Lookups:
    """Answers lookups and probes; keeps those that are pending."""

    def __init__(
        self,
        index: Index,
        host: Host,
        leases: Leases,
        send: Callable[[int | None, m.Message], None],
        count: Callable[[str, int], None],
    ) -> None:
        self._index = index
        self._host = host
        self._leases = leases
        self._send = send
        self._count = count
        self._waiting: dict[str, dict[int, Waiting]] = {}

    def ask(self, instance: Instance, lookup: m.Lookup, now_ms: int) -> None:
        """Answer; or wait, where part of the match lies in memory that is still being mapped."""
        root = self._index.roots.get(lookup.root)
        matched = NOTHING
        if root is not None and instance.layout is not None:
            matched = self._index.match(root, lookup.keys, lookup.digests, now_ms)
        closed = self._closed_region(instance, matched, now_ms)
        waiting = self._waiting.get(instance.engine_id, {})
        if closed is not None:
            is_mapping = now_ms - instance.since_ms < MAP_MS_MAX
            if is_mapping and (lookup.number in waiting or len(waiting) < WAITING_MAX):
                if lookup.number not in waiting:
                    self._send(instance.connection, m.Pending(lookup.number))
                waiting[lookup.number] = Waiting(lookup, closed)
                self._waiting[instance.engine_id] = waiting
                return
            self._count("lookups.not_mapped", 1)
            matched = matched.within(instance.open_regions)
        if waiting.pop(lookup.number, None) is not None and not waiting:
            del self._waiting[instance.engine_id]
        self._answer(instance, lookup.number, matched, now_ms)

    def probe(self, instance: Instance, probe: m.Probe, now_ms: int) -> None:
        """Answer for the blocks of the one chunk behind a match."""
        parent = self._index.reachable(probe.parent)
        matched = NOTHING
        if parent is not None and instance.layout is not None:
            matched = self._index.match_blocks(parent, probe.digests, now_ms)
        if self._closed_region(instance, matched, now_ms) is not None:
            self._count("lookups.not_mapped", 1)
            matched = matched.within(instance.open_regions)
        self._answer(instance, probe.number, matched, now_ms)

    def regions_opened(self, instance: Instance, now_ms: int) -> None:
        """Try again the lookups that waited for a region which is open now."""
        for waiting in list(self._waiting.get(instance.engine_id, {}).values()):
            if waiting.region in instance.open_regions:
                self.ask(instance, waiting.lookup, now_ms)

    def expire(self, instance: Instance, now_ms: int) -> None:
        """Answer what has waited for as long as it may."""
        if now_ms - instance.since_ms >= MAP_MS_MAX:
            for waiting in list(self._waiting.get(instance.engine_id, {}).values()):
                self.ask(instance, waiting.lookup, now_ms)

    def forget(self, engine_id: str) -> None:
        """The scheduler's connection has ended: nobody waits any more."""
        self._waiting.pop(engine_id, None)

    def check_integrity(self, instances: Mapping[str, Instance]) -> None:
        """Assert that whoever waits is there to be answered, and waits for something."""
        for engine_id, waiting in self._waiting.items():
            assert waiting, engine_id
            assert len(waiting) <= WAITING_MAX, (engine_id, len(waiting))
            instance = instances[engine_id]
            assert instance.connection is not None, f"{engine_id} waits, and is not connected"
            for number, one in waiting.items():
                assert one.lookup.number == number, (one.lookup.number, number)
                assert one.region not in instance.open_regions, (engine_id, one.region)

    def _closed_region(self, instance: Instance, matched: Matched, now_ms: int) -> int | None:
        """The region of the first entry that this instance cannot read yet."""
        open_regions = instance.open_regions
        regions = matched.regions
        for number in regions:
            self._host.regions[number].used_ms = now_ms
        if regions <= open_regions:
            return None
        return next(run[0] for run in matched.runs if run[0] not in open_regions)

    def _answer(self, instance: Instance, number: int, matched: Matched, now_ms: int) -> None:
        lease = 0
        if matched.entries:
            deepest = matched.entries[-1]
            wanted = Lease(deepest, matched.regions, instance.engine_id, now_ms + LEASE_MS)
            lease = self._leases.take(wanted, self._host.limit_bytes)
        self._count("lookups.answered", 1)
        chunks = len(matched.entries) - (matched.blocks > 0)
        answer = m.Match(number, chunks, matched.blocks, matched.runs, lease, matched.may_go_on)
        self._send(instance.connection, answer)
