"""The brain of the node: events in, effects out, nothing else.

    handle(event, now_ms) -> [effect, …]

No I/O, thread, clock, environment or randomness: a simulator can drive it through any history,
and a failure replays. The runtime feeds it from one thread. What the parts do:

    engines     Presence: who is connected, what they are
    lookups     Lookups: Index.match, Leases
    stores      Lending: grants, eviction
    tiers       Promotions: loads from below; Writes: stores to below
    regions     Regions: growing, opening, moving, leaving
    canaries    Quarantine: fingerprints that nobody is served under (not the quarantine of cells)
    messages    checks.py: what is refused before anything has changed
"""

from collections import Counter
from typing import TYPE_CHECKING, Any

from kvtide.core import checks
from kvtide.core import messages as m
from kvtide.core.effects import (
    Close,
    Disconnected,
    Effect,
    End,
    Event,
    HostLimit,
    Note,
    ProcessDied,
    Received,
    RegionMade,
    RegionNotMade,
    Tick,
    TierFound,
    TierLoaded,
    TierStored,
)
from kvtide.core.instances import Instance
from kvtide.core.instances import check_integrity as check_engines
from kvtide.core.lending import PUT_MS_MAX
from kvtide.core.parts import MachineConfig, Parts
from kvtide.core.presence import Presence
from kvtide.core.quarantine import Quarantine
from kvtide.core.reasons import DropReason
from kvtide.errors import WireError

if TYPE_CHECKING:
    from collections.abc import Callable

NOTE_CHARS_MAX = 500
"""Of a line about what a peer has said: no peer fills the log."""

READING = (m.Lookup, m.Probe, m.LeaseRelease, m.LoadBegin, m.LoadEnd, m.Counts)
"""Messages after which no layout needs another region, so that it is not looked for."""


class Machine:
    """The state of one node."""

    def __init__(self, config: MachineConfig) -> None:
        self.config = config
        parts = self._parts = Parts(config)
        presence = self._presence = Presence(parts)
        self.index, self.host, self.lending = parts.index, parts.host, parts.lending
        self.leases, self.regions, self.lookups = parts.leases, parts.regions, parts.lookups
        self.promotions, self.writes, self.counts = parts.promotions, parts.writes, parts.counts
        self.instances, self.peers = presence.instances, presence.peers
        self.quarantine = Quarantine(parts, presence)
        self.quarantined = parts.quarantined
        self._idle_since_ms: int | None = None
        self._takes: dict[type, Callable[[int, Any], None]] = {
            m.SchedulerHello: presence.scheduler_hello,
            m.WorkerHello: presence.worker_hello,
            m.Identity: presence.identity,
            m.RegisterRoot: presence.register_root,
            m.Lookup: self._lookup,
            m.Probe: self._probe,
            m.LeaseRelease: self._lease_end,
            m.LoadBegin: self._load_begin,
            m.LoadEnd: self._load_end,
            m.StoreOffer: self._store_offer,
            m.GrantReturn: self._grant_return,
            m.Clear: presence.clear,
            m.Counts: self._counts,
            m.RegionOpen: self._region_open,
            m.RegionFailed: self._region_failed,
            m.RegionLeft: self._region_left,
            m.Stored: self._stored,
            m.Compared: self.quarantine.compared,
        }

    # ---- the one entrance

    def handle(self, event: Event, now_ms: int) -> list[Effect]:
        """Take one event in; what it makes necessary comes back, in the order to be done."""
        assert now_ms >= self._parts.now_ms, (now_ms, self._parts.now_ms)
        self._parts.now_ms = now_ms
        match event:
            case Received(connection, message):
                self._received(connection, message)
            case Disconnected(connection):
                self._presence.disconnected(connection)
            case ProcessDied(connection):
                self._presence.process_died(connection)
            case RegionMade(region):
                self.regions.made(region, now_ms)
                self._presence.offer_regions()
            case RegionNotMade(region, detail):
                self.regions.not_made(region, now_ms, detail)
            case HostLimit(host_bytes):
                self.regions.limit(host_bytes)
            case TierFound(number, records, may_go_on):
                self.promotions.found(number, records, may_go_on=may_go_on)
            case TierLoaded(number, outcome, is_ok):
                self.promotions.loaded(number, outcome, is_ok=is_ok)
            case TierStored(number, outcome, is_ok):
                self.writes.ended(number, outcome, is_ok=is_ok)
            case Tick():
                self._tick()
        if self.index.shown:
            shown, self.index.shown = self.index.shown, []
            self.writes.held(shown)
        if not (isinstance(event, Received) and isinstance(event.message, READING)):
            layouts, promotions = self._presence.layouts_in_use(), self.promotions
            chunks_to_load = promotions.chunks_to_load if promotions.are_loading else None
            self.regions.keep_ahead(layouts, now_ms, chunks_to_load)
        return self.take_effects()

    def _received(self, connection: int, message: m.Message) -> None:
        take = self._takes.get(type(message), self._take_nothing)
        try:
            take(connection, message)
        except WireError as error:
            text = f"connection {connection} is closed: {error}"
            self._parts.emit(Note(text[:NOTE_CHARS_MAX], is_warning=True))
            self._parts.emit(Close(connection))

    def _take_nothing(self, connection: int, message: m.Message) -> None:
        raise WireError(f"the node takes no {type(message).__name__}")

    # ---- lookups

    def _lookup(self, connection: int, lookup: m.Lookup) -> None:
        instance = self._presence.instance(connection)
        self._check_named(instance, lookup.root)
        checks.check_chain(lookup.keys, lookup.digests, instance.layout)
        self.lookups.ask(instance, lookup)

    def _probe(self, connection: int, probe: m.Probe) -> None:
        instance = self._presence.instance(connection)
        self._check_named(instance, probe.root)
        checks.check_chain(b"", probe.digests, instance.layout)
        self.lookups.probe(instance, probe)

    def _check_named(self, instance: Instance, root: bytes) -> None:
        if not instance.names_root(root):
            raise WireError("a root key that was not registered on this connection")

    def _lease_end(self, connection: int, message: m.LeaseRelease) -> None:
        self.leases.end(message.lease, self._presence.instance(connection).engine_id)

    def _load_begin(self, connection: int, message: m.LoadBegin) -> None:
        engine_id = self._presence.instance(connection).engine_id
        if not self.leases.begin_load(message.lease, engine_id):
            self._parts.count("unprotected_loads", 1)  # it may fail, which costs a recompute

    def _load_end(self, connection: int, message: m.LoadEnd) -> None:
        self.leases.end(message.lease, self._presence.instance(connection).engine_id)
        self._parts.count("loaded_blocks", max(0, message.blocks_verified))

    # ---- stores

    def _store_offer(self, connection: int, offer: m.StoreOffer) -> None:
        instance = self._presence.instance(connection)
        self._check_named(instance, offer.root)
        if instance.layout is None:
            outcomes = [str(DropReason.NOT_MAPPED)] * len(offer.keys)
            self._parts.send(connection, m.StoreAnswer(offer.number, outcomes, [], [], []))
            return
        checks.check_offer(offer, instance.layout)
        self._parts.send(connection, self.lending.offer(instance, offer, self._parts.now_ms))

    def _grant_return(self, connection: int, message: m.GrantReturn) -> None:
        instance = self._presence.instance(connection)
        for number in message.grants:
            self.lending.returned(number, instance.engine_id)

    def _stored(self, connection: int, message: m.Stored) -> None:
        worker = self._presence.worker(connection)
        grant = self.lending.grants.get(message.grant)
        self.lending.answered(message.grant, worker, is_ok=message.ok)
        has_ended = message.grant not in self.lending.grants
        if grant is not None and has_ended and not grant.has_failed:
            self._parts.observe_ms("stored_after", self._parts.now_ms - grant.since_ms)

    def _counts(self, connection: int, message: m.Counts) -> None:
        instance, increments = self._presence.instance(connection), message.increments
        counts = instance.counts
        checks.check_counts(increments, counts)
        for name, increment in increments.items():
            counts[name] = counts.get(name, 0) + increment
        if took_us := increments.get("prefill_us", 0):
            instance.prefill.add(increments.get("prefill_tokens", 0), took_us / 1000)

    # ---- regions

    def _region_open(self, connection: int, message: m.RegionOpen) -> None:
        worker = self._presence.worker(connection)
        self.regions.opened(worker, message.region)
        self._presence.reopen(worker.engine_id)

    def _region_failed(self, connection: int, message: m.RegionFailed) -> None:
        worker = self._presence.worker(connection)
        self.regions.failed(worker, message.region, message.detail, self._parts.now_ms)
        self._presence.reopen(worker.engine_id)

    def _region_left(self, connection: int, message: m.RegionLeft) -> None:
        worker = self._presence.worker(connection)
        worker.old_regions.discard(message.region)
        self.regions.left(worker, message.region)
        self._presence.offer_regions()

    # ---- time and commands

    def _tick(self) -> None:
        self.lending.take_cleared_away()
        self.lending.give_up_silent(self.instances, self._parts.now_ms)
        self.leases.expire(self._parts.now_ms)
        self.promotions.expire()
        self.writes.write_before_eviction()
        for instance in self.instances.values():
            self.lookups.expire(instance)
            self._presence.watch_workers(instance)
        if self.regions.is_offer_due(self._parts.now_ms):
            self._presence.offer_regions()
        open_regions = [instance.open_regions for instance in self.instances.values()]
        self.regions.give_back_closed(set().union(*open_regions), self._parts.now_ms)
        self.regions.advance()
        self.index.freshen()
        self._end_when_idle()

    def is_waiting(self, now_ms: int) -> bool:
        """Whether a tick may do something; else one a second is enough.

        So it is where no engine is, which ticks could disturb.
        """
        oldest = next(iter(self.lending.grants.values()), None)
        return (
            not self.instances
            or self.leases.are_any
            or self.lookups.are_waiting
            or self.promotions.are_waiting
            or self.regions.are_leaving
            or bool(self.lending.cleared)
            or (oldest is not None and now_ms - oldest.since_ms > PUT_MS_MAX // 2)
            or self.writes.are_waiting
            or any(one.missing_since_ms is not None for one in self.instances.values())
        )

    def _end_when_idle(self) -> None:
        if self.instances or not self.config.linger_ms:
            self._idle_since_ms = None
        elif self._idle_since_ms is None:
            self._idle_since_ms = self._parts.now_ms
        elif self._parts.now_ms - self._idle_since_ms >= self.config.linger_ms:
            self._parts.emit(End("no engine has been connected for linger_s", on_purpose=False))

    def clear(self, salt_digest: bytes | None) -> int:
        """Clear all entries, or those of one salt; how many there were."""
        count = self._parts.clear(salt_digest)
        if salt_digest is None:
            self.quarantine.lift()
        return count

    def take_effects(self) -> list[Effect]:
        """What is to be done by now, each effect once; asked for after a call that is no event."""
        effects, self._parts.effects = self._parts.effects, []
        return effects

    def check_integrity(self) -> None:
        """Assert everything that can be asserted. Slow: for tests and `kvtide doctor`."""
        self.index.check_integrity()
        self.host.check_integrity()
        check_engines(self.instances, self.peers)
        self.lending.check_integrity(self.instances)
        looked_for, written = Counter(self.promotions.pinned()), Counter(self.writes.pinned())
        self.leases.check_integrity(self.instances, looked_for, written)
        self.regions.check_integrity(self.instances.values())
        self.lookups.check_integrity(self.instances)
        self.promotions.check_integrity(self.instances)
        self.writes.check_integrity()
