"""The brain of the node: events in, effects out, nothing else.

    handle(event, now_ms) -> [effect, …]

No I/O, thread, clock, environment or randomness: a simulator can drive it through any history,
and a failure replays. The runtime feeds it from one thread. What the parts do:

    engines     who is connected, what they are            (instances.py, this file)
    lookups     Lookups: Index.match, Leases
    stores      Lending: grants, eviction
    regions     Regions: growing, opening, moving, leaving
    messages    checks.py: what is refused before anything has changed
"""

from dataclasses import dataclass, field
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
    Send,
    Tick,
)
from kvtide.core.host import Host
from kvtide.core.index import Index, Root
from kvtide.core.instances import Instance, Worker
from kvtide.core.instances import check_integrity as check_engines
from kvtide.core.layout import KVLayout
from kvtide.core.leases import Leases
from kvtide.core.lending import Lending
from kvtide.core.lookups import Lookups
from kvtide.core.reasons import DropReason, Off, OffReason
from kvtide.core.regions import Regions
from kvtide.errors import WireError
from kvtide.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Callable

START_MS_MAX = 10_000
"""T_start: workers that have not come by then are named to the scheduler."""
NOTE_CHARS_MAX = 500

READING = (m.Lookup, m.Probe, m.LeaseRelease, m.LoadBegin, m.LoadEnd, m.Counts)
"""Messages after which no layout needs another region, so that it is not looked for."""


@dataclass(frozen=True, slots=True)
class MachineConfig:
    """What the machine is told once."""

    node: bytes
    """This node's incarnation: random bytes."""
    pid: int
    version: str
    host_bytes: int
    linger_ms: int
    """End so long after the last engine has left; 0: never."""
    first_number: int
    """Regions, grants and leases are numbered from here: random, so no other node gave them."""
    settings: dict[str, str] = field(default_factory=dict)


class Machine:
    """The state of one node."""

    def __init__(self, config: MachineConfig) -> None:
        self.config = config
        self._effects: list[Effect] = []
        self._now_ms = 0
        self.index = Index()
        self.host = Host(config.host_bytes, config.first_number)
        self.lending = Lending(self.index, self.host, self._emit, config.first_number)
        self.leases = Leases(self.index, self.lending, config.first_number)
        self.regions = Regions(self.host, self.index, self.lending, self.leases, self._emit)
        self.lookups = Lookups(self.index, self.host, self.leases, self._send, self._count)
        self.instances: dict[str, Instance] = {}
        self.peers: dict[int, Instance | Worker] = {}
        """Who speaks on a connection, and on the one before it, by which the runtime may still
        watch the process; both are kept when they end, until the process has died."""
        self.counts: dict[str, int] = {}
        self._idle_since_ms: int | None = None
        self._takes: dict[type, Callable[[int, Any], None]] = {
            m.SchedulerHello: self._scheduler_hello,
            m.WorkerHello: self._worker_hello,
            m.Identity: self._identity,
            m.RegisterRoot: self._register_root,
            m.Lookup: self._lookup,
            m.Probe: self._probe,
            m.LeaseRelease: self._lease_end,
            m.LoadBegin: self._load_begin,
            m.LoadEnd: self._load_end,
            m.StoreOffer: self._store_offer,
            m.GrantReturn: self._grant_return,
            m.Counts: self._counts,
            m.RegionOpen: self._region_open,
            m.RegionFailed: self._region_failed,
            m.RegionLeft: self._region_left,
            m.Stored: self._stored,
        }

    # ---- the one entrance

    def handle(self, event: Event, now_ms: int) -> list[Effect]:
        """Take one event in; what it makes necessary comes back, in the order to be done."""
        assert now_ms >= self._now_ms, (now_ms, self._now_ms)
        self._now_ms = now_ms
        match event:
            case Received(connection, message):
                self._received(connection, message)
            case Disconnected(connection):
                self._disconnected(connection)
            case ProcessDied(connection):
                self._process_died(connection)
            case RegionMade(region):
                self.regions.made(region, now_ms)
                self._offer_regions()
            case RegionNotMade(region, detail):
                self.regions.not_made(region, now_ms, detail)
            case HostLimit(host_bytes):
                self.regions.limit(host_bytes)
            case Tick():
                self._tick()
        if not (isinstance(event, Received) and isinstance(event.message, READING)):
            self.regions.keep_ahead(self._layouts_in_use(), now_ms)
        return self.take_effects()

    def _emit(self, effect: Effect) -> None:
        self._effects.append(effect)

    def _send(self, connection: int | None, message: m.Message) -> None:
        if connection is not None:
            self._emit(Send(connection, message))

    def _received(self, connection: int, message: m.Message) -> None:
        take = self._takes.get(type(message), self._take_nothing)
        try:
            take(connection, message)
        except WireError as error:
            text = f"connection {connection} is closed: {error}"
            self._emit(Note(text[:NOTE_CHARS_MAX], is_warning=True))
            self._emit(Close(connection))

    def _take_nothing(self, connection: int, message: m.Message) -> None:
        raise WireError(f"the node takes no {type(message).__name__}")

    def _instance(self, connection: int) -> Instance:
        """The instance whose scheduler speaks here."""
        peer = self.peers.get(connection)
        if not isinstance(peer, Instance) or peer.connection != connection:
            raise WireError("a scheduler's message came before its hello")
        return peer

    def _worker(self, connection: int) -> Worker:
        peer = self.peers.get(connection)
        if not isinstance(peer, Worker) or peer.connection != connection:
            raise WireError("a worker's message came before its hello")
        return peer

    # ---- engines come

    def _scheduler_hello(self, connection: int, hello: m.SchedulerHello) -> None:
        if self._refuse_version(connection, hello.wire_version, hello.version):
            return
        self._check_first(connection)
        checks.check_scheduler(hello)
        instance = self._instance_of(hello.engine_id)
        known = instance.hello
        is_back = known is not None and known.incarnation == hello.incarnation
        if instance.is_scheduler_alive and known and not is_back:
            detail = f"engine_id {hello.engine_id} is in use by process {known.pid}"
            self._refuse(connection, OffReason.ENGINE_ID_IN_USE, detail)
            return
        self._scheduler_left(instance)
        instance.hello = hello
        instance.is_scheduler_alive = True
        instance.connection = connection
        instance.since_ms = self._now_ms
        instance.facts_sent = False
        self._speaks(connection, instance)
        if is_back:  # another scheduler can't know what the one before it planned
            self.lending.lost_with_connection(instance.engine_id, hello.last_grant)
        self._welcome(connection)
        self._watch_workers(instance)

    def _worker_hello(self, connection: int, hello: m.WorkerHello) -> None:
        if self._refuse_version(connection, hello.wire_version, ""):
            return
        self._check_first(connection)
        checks.check_worker(hello)
        instance = self._instance_of(hello.engine_id)
        worker = instance.workers.get(hello.rank)
        if worker is not None and worker.incarnation != hello.incarnation:
            detail = f"rank {hello.rank} of {hello.engine_id} is in use by process {worker.pid}"
            self._refuse(connection, OffReason.ENGINE_ID_IN_USE, detail)
            return
        if worker is not None and not worker.is_same(hello):
            raise WireError(f"rank {hello.rank} has become another shard")
        if worker is None:
            worker = instance.workers[hello.rank] = Worker(connection, hello)
            instance.facts_sent = instance.is_identified = False
        worker.connection = connection
        self._speaks(connection, worker)
        is_ours = hello.node == self.config.node
        mapped, mapping = set(hello.regions_mapped), set(hello.regions_mapping)
        worker.old_regions = set() if is_ours else mapped | mapping
        self.lending.worker_holds(worker, set(hello.grants_held) if is_ours else set())
        if not is_ours:
            mapped, mapping = set(), set()
        self.regions.worker_is_back(worker, mapped, mapping)
        self._welcome(connection)
        self._watch_workers(instance)
        self._offer_regions()

    def _check_first(self, connection: int) -> None:
        if connection in self.peers:
            raise WireError("a second hello on one connection")

    def _speaks(self, connection: int, peer: Instance | Worker) -> None:
        for number in [number for number, known in self.peers.items() if known is peer][:-1]:
            del self.peers[number]
        self.peers[connection] = peer

    def _instance_of(self, engine_id: str) -> Instance:
        instance = self.instances.get(engine_id)
        if instance is None:
            instance = self.instances[engine_id] = Instance(engine_id, self._now_ms)
        return instance

    def _refuse_version(self, connection: int, wire_version: int, version: str) -> bool:
        fault = checks.version_fault(self.config.version, wire_version, version)
        if fault:
            self._refuse(connection, OffReason.WIRE_VERSION, fault)
        return bool(fault)

    def _refuse(self, connection: int, reason: OffReason, detail: str) -> None:
        self._emit(Send(connection, m.Refused(reason, detail)))
        self._emit(Close(connection))

    def _welcome(self, connection: int) -> None:
        config = self.config
        self._send(
            connection,
            m.Welcome(connection, config.node, config.pid, self.host.limit_bytes, config.settings),
        )

    def _watch_workers(self, instance: Instance) -> None:
        """Tell the scheduler about its workers once all are there, and who is missing for long."""
        if instance.hello is None or instance.connection is None:
            return
        missing = instance.missing_ranks()
        if not missing:
            instance.missing_since_ms = None
            if not instance.facts_sent:
                instance.facts_sent = True
                workers = [instance.workers[rank] for rank in range(instance.hello.worker_count)]
                facts = [worker.facts for worker in workers]
                cell_bytes = instance.shard_cell_bytes()
                self._send(instance.connection, m.Workers(facts, cell_bytes, []))
        elif instance.missing_since_ms is None:
            instance.missing_since_ms = self._now_ms
        elif self._now_ms - instance.missing_since_ms >= START_MS_MAX and not instance.off:
            instance.facts_sent = False  # when they come it is told anew, and may be on again
            detail = f"no word from the workers of ranks {missing[:8]}"
            self._turn_off(instance, OffReason.WORKERS_DIFFER, detail)

    def _identity(self, connection: int, identity: m.Identity) -> None:
        instance = self._instance(connection)
        layout = checks.check_identity(identity)
        instance.identity, instance.layout, instance.off = identity, None, None
        instance.is_identified = True
        if layout is None:
            instance.off = Off(OffReason(identity.off_reason), identity.off_detail)
        elif fault := instance.shard_fault(identity.cell_bytes):
            self._turn_off(instance, OffReason.WORKERS_DIFFER, fault)
        elif (needed := self.host.needed_bytes(layout)) > self.host.size_bytes:
            detail = (
                f"this model needs {format_bytes(needed)} of host memory at least, the node has "
                f"{format_bytes(self.host.size_bytes)}"
            )
            self._turn_off(instance, OffReason.HOST_TOO_SMALL, detail)
        else:
            instance.layout = layout
            self._send(instance.connection, m.Serving())
        self._offer_regions()

    def _turn_off(self, instance: Instance, reason: OffReason, detail: str) -> None:
        instance.off = Off(reason, detail)
        self._send(instance.connection, m.Serving(reason, detail))

    def _register_root(self, connection: int, message: m.RegisterRoot) -> None:
        instance = self._instance(connection)
        checks.check_root(message)
        identity = instance.identity
        if identity is None or identity.off_reason:
            raise WireError("a root key came from an engine without identity")
        root = Root(message.root, identity.fingerprint, message.epoch, message.salt_digest)
        known = self.index.find(root.key)
        if known is None:
            if len(self.index.roots) >= self.index.roots_max:
                in_use = [instance.roots.keys() for instance in self.instances.values()]
                self.index.forget_idle_roots(set().union(*in_use))
            self.index.roots[root.key] = root
        elif not isinstance(known, Root) or not known.is_same(root):
            raise WireError("a root key that stands for something else already")
        instance.register_root(root.key)

    # ---- engines go

    def _disconnected(self, connection: int) -> None:
        peer = self.peers.get(connection)
        if isinstance(peer, Instance) and peer.connection == connection:
            self._scheduler_left(peer)
        elif isinstance(peer, Worker) and peer.connection == connection:
            peer.connection = None
            self.regions.worker_is_away(peer)
            self._watch_workers(self.instances[peer.engine_id])
            self._reopen(peer.engine_id)

    def _scheduler_left(self, instance: Instance) -> None:
        """Its connection ended: what only protects ends with it."""
        instance.connection = None
        instance.identity, instance.layout, instance.off = None, None, None
        instance.is_identified = False
        instance.missing_since_ms = None
        instance.roots.clear()
        instance.open_regions.clear()
        self.leases.end_all(instance.engine_id)
        self.lookups.forget(instance.engine_id)

    def _process_died(self, connection: int) -> None:
        peer = self.peers.get(connection)
        if peer is None:
            return
        for number in [number for number, known in self.peers.items() if known is peer]:
            del self.peers[number]
        instance = self.instances[peer.engine_id]
        if isinstance(peer, Worker):
            peer.connection = None
            self.lending.worker_holds(peer, set())
            self.regions.worker_died(peer)
            del instance.workers[peer.rank]
            instance.facts_sent = instance.is_identified = False
            self._watch_workers(instance)
        else:
            self._scheduler_left(peer)
            peer.is_scheduler_alive = False
            peer.hello = None
        self._reopen(peer.engine_id)
        if instance.is_gone:
            del self.instances[instance.engine_id]

    # ---- lookups

    def _lookup(self, connection: int, lookup: m.Lookup) -> None:
        instance = self._instance(connection)
        self._check_named(instance, lookup.root)
        checks.check_chain(lookup.keys, lookup.digests, instance.layout)
        self.lookups.ask(instance, lookup, self._now_ms)

    def _probe(self, connection: int, probe: m.Probe) -> None:
        instance = self._instance(connection)
        self._check_named(instance, probe.root)
        checks.check_chain(b"", probe.digests, instance.layout)
        self.lookups.probe(instance, probe, self._now_ms)

    def _check_named(self, instance: Instance, root: bytes) -> None:
        if root not in instance.roots:
            raise WireError("a root key that was not registered on this connection")

    def _lease_end(self, connection: int, message: m.LeaseRelease) -> None:
        self.leases.end(message.lease, self._instance(connection).engine_id)

    def _load_begin(self, connection: int, message: m.LoadBegin) -> None:
        if not self.leases.begin_load(message.lease, self._instance(connection).engine_id):
            self._count("unprotected_loads", 1)  # it may fail, which costs a recompute

    def _load_end(self, connection: int, message: m.LoadEnd) -> None:
        self.leases.end(message.lease, self._instance(connection).engine_id)
        self._count("loaded_blocks", max(0, message.blocks_verified))

    # ---- stores

    def _store_offer(self, connection: int, offer: m.StoreOffer) -> None:
        instance = self._instance(connection)
        self._check_named(instance, offer.root)
        if instance.layout is None:
            outcomes = [str(DropReason.NOT_MAPPED)] * len(offer.keys)
            self._send(connection, m.StoreAnswer(offer.number, outcomes, [], [], []))
            return
        checks.check_offer(offer, instance.layout)
        self._send(connection, self.lending.offer(instance, offer, self._now_ms))

    def _grant_return(self, connection: int, message: m.GrantReturn) -> None:
        instance = self._instance(connection)
        for number in message.grants:
            self.lending.returned(number, instance.engine_id)

    def _stored(self, connection: int, message: m.Stored) -> None:
        self.lending.answered(message.grant, self._worker(connection), message.ok)

    def _counts(self, connection: int, message: m.Counts) -> None:
        counts = self._instance(connection).counts
        checks.check_counts(message.increments, counts)
        for name, increment in message.increments.items():
            counts[name] = counts.get(name, 0) + increment

    def _count(self, name: str, increment: int) -> None:
        self.counts[name] = self.counts.get(name, 0) + increment

    # ---- regions

    def _region_open(self, connection: int, message: m.RegionOpen) -> None:
        worker = self._worker(connection)
        self.regions.opened(worker, message.region)
        self._reopen(worker.engine_id)

    def _region_failed(self, connection: int, message: m.RegionFailed) -> None:
        worker = self._worker(connection)
        self.regions.failed(worker, message.region, message.detail, self._now_ms)
        self._reopen(worker.engine_id)

    def _region_left(self, connection: int, message: m.RegionLeft) -> None:
        worker = self._worker(connection)
        worker.old_regions.discard(message.region)
        self.regions.left(worker, message.region)
        self._offer_regions()

    def _offer_regions(self) -> None:
        for instance in self.instances.values():
            if instance.is_serving:
                self.regions.offer(instance, self._now_ms)
            self._reopen(instance.engine_id)

    def _reopen(self, engine_id: str) -> None:
        """Work out anew which regions are open to an instance."""
        instance = self.instances[engine_id]
        before = instance.open_regions
        instance.open_regions = self.regions.open_to(instance) if instance.is_serving else set()
        if instance.open_regions - before:
            self.lookups.regions_opened(instance, self._now_ms)

    def _layouts_in_use(self) -> list[KVLayout]:
        in_use = [one.layout for one in self.instances.values() if one.off is None]
        return list(dict.fromkeys(layout for layout in in_use if layout is not None))

    # ---- time and commands

    def _tick(self) -> None:
        self.lending.take_cleared_away()
        self.leases.expire(self._now_ms)
        for instance in self.instances.values():
            self.lookups.expire(instance, self._now_ms)
            self._watch_workers(instance)
        if self.regions.is_offer_due(self._now_ms):
            self._offer_regions()
        open_regions = [instance.open_regions for instance in self.instances.values()]
        self.regions.give_back_closed(set().union(*open_regions), self._now_ms)
        self.regions.advance()
        self.index.freshen()
        self._end_when_idle()

    def _end_when_idle(self) -> None:
        if self.instances or not self.config.linger_ms:
            self._idle_since_ms = None
        elif self._idle_since_ms is None:
            self._idle_since_ms = self._now_ms
        elif self._now_ms - self._idle_since_ms >= self.config.linger_ms:
            self._emit(End("no engine has been connected for linger_s", on_purpose=False))

    def clear(self, salt_digest: bytes | None) -> int:
        """Clear all entries, or those of one salt; how many there were."""
        return self.lending.clear(salt_digest)

    def take_effects(self) -> list[Effect]:
        """Effects of a call that is not an event (`clear`)."""
        effects, self._effects = self._effects, []
        return effects

    def check_integrity(self) -> None:
        """Assert everything that can be asserted. Slow: for tests and `kvtide doctor`."""
        self.index.check_integrity()
        self.host.check_integrity()
        check_engines(self.instances, self.peers)
        self.lending.check_integrity(self.instances)
        self.leases.check_integrity(self.instances)
        self.regions.check_integrity(self.instances.values())
        self.lookups.check_integrity(self.instances)
