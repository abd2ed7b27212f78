"""Answers to lookups: what is held, where it lies, and a lease on it.

    lookup ─► match ─┬─ part lies in closed regions ► Pending … asked again as regions open; or,
                     │                                once T_load has passed, Match up to there
                     └─ all open ─┬─ tiers may have more ► Pending …, then Match (promotions.py)
                                  └─ else ► Match, with a lease

A lookup is at most two messages: chunk keys first, then, where `Match.probe` says that it is
worth it, the block digests of the one chunk behind.
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple

from kvtide.core import messages as m
from kvtide.core.host import MAP_MS_MAX, Host
from kvtide.core.index import Index, Matched
from kvtide.core.instances import Instance
from kvtide.core.keys import KEY_BYTES
from kvtide.core.leases import LEASE_MS, Lease, Leases
from kvtide.core.promotion import Promotion
from kvtide.core.promotions import Promotions
from kvtide.core.writes import Writes

WAITING_MAX = 1024
"""Lookups of one engine that may be pending; those above get what is open at once."""


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
        promotions: Promotions,
        writes: Writes,
        send: Callable[[int | None, m.Message], None],
        count: Callable[[str, int], None],
        now: Callable[[], int],
    ) -> None:
        """`now` tells the time of the event that is being handled, in ms."""
        self._now = now
        self._index = index
        self._host = host
        self._leases = leases
        self._promotions = promotions
        self._writes = writes
        self._send = send
        self._count = count
        self._waiting: dict[str, dict[int, Waiting]] = {}

    @property
    def are_waiting(self) -> bool:
        """Whether a lookup is pending for regions to open."""
        return bool(self._waiting)

    def ask(self, instance: Instance, lookup: m.Lookup) -> None:
        """Answer; or wait, where part of the match is still being mapped, or lies in a tier."""
        if self._promotions.is_waiting(instance, lookup.number):
            return
        matched = self._match(instance, lookup)
        closed = self._closed_region(instance, matched)
        waiting = self._waiting.get(instance.engine_id, {})
        if closed is not None:
            is_mapping = self._now() - instance.since_ms < MAP_MS_MAX
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
        root = self._index.roots.get(lookup.root)
        if closed is None and self._promotions.begin(instance, lookup, root, matched):
            return
        self._answer(instance, lookup.number, matched)

    def probe(self, instance: Instance, probe: m.Probe) -> None:
        """Answer for the blocks of the one chunk behind a match."""
        if self._promotions.is_waiting(instance, probe.number):
            return
        parent = self._index.reachable(probe.parent)
        matched = self._match(instance, probe)
        if self._promotions.begin(instance, probe, parent, matched):
            return
        self._answer_open(instance, probe.number, matched)

    def promoted(self, promotion: Promotion) -> None:
        """Answer a lookup that waited for tiers with what is held now."""
        instance, question = promotion.instance, promotion.question
        matched = self._match(instance, question)
        keys = question.keys if isinstance(question, m.Lookup) else b""
        ends_early = matched.chunks * KEY_BYTES < len(keys)
        matched.may_go_on = ends_early and (matched.may_go_on or promotion.may_go_on)
        self._answer_open(instance, question.number, matched)

    def _match(self, instance: Instance, question: m.Lookup | m.Probe) -> Matched:
        """What is held of what a question names."""
        if instance.layout is None:
            return Matched([], 0, may_go_on=False)
        if isinstance(question, m.Lookup):
            root = self._index.roots.get(question.root)
            if root is not None:
                return self._index.match(root, question.keys, question.digests, self._now())
        else:
            parent = self._index.reachable(question.parent)
            if parent is not None:
                return self._index.match_blocks(parent, question.digests, self._now())
        return Matched([], 0, may_go_on=False)

    def _answer_open(self, instance: Instance, number: int, matched: Matched) -> None:
        """Answer with what lies in memory that the engine has mapped."""
        if self._closed_region(instance, matched) is not None:
            self._count("lookups.not_mapped", 1)
            matched = matched.within(instance.open_regions)
        self._answer(instance, number, matched)

    def regions_opened(self, instance: Instance) -> None:
        """Try again the lookups that waited for a region which is open now."""
        for waiting in list(self._waiting.get(instance.engine_id, {}).values()):
            if waiting.region in instance.open_regions:
                self.ask(instance, waiting.lookup)

    def expire(self, instance: Instance) -> None:
        """Answer what has waited for as long as it may."""
        if self._now() - instance.since_ms >= MAP_MS_MAX:
            for waiting in list(self._waiting.get(instance.engine_id, {}).values()):
                self.ask(instance, waiting.lookup)

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

    def _closed_region(self, instance: Instance, matched: Matched) -> int | None:
        """The region of the first entry that this instance cannot read yet."""
        open_regions = instance.open_regions
        regions = matched.regions
        for number in regions:
            self._host.regions[number].used_ms = self._now()
        if regions <= open_regions:
            return None
        return next(run.region for run in matched.runs if run.region not in open_regions)

    def _answer(self, instance: Instance, number: int, matched: Matched) -> None:
        lease = 0
        if matched.entries:
            deepest = matched.entries[-1]
            ends_ms = self._now() + LEASE_MS
            wanted = Lease(deepest, matched.regions, instance.engine_id, ends_ms)
            lease = self._leases.take(wanted, self._host.limit_bytes)
            self._writes.matched(matched.entries)
        self._count("lookups.answered", 1)
        answer = m.Match(
            number, matched.chunks, matched.blocks, matched.runs, lease, matched.may_go_on
        )
        self._send(instance.connection, answer)
