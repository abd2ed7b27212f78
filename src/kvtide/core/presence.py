"""Who is here: hellos, identities, roots, and what ends with whom.

An *instance* is one scheduler's connection and one of each of its workers. What only protects
(leases, waiting lookups) ends with the scheduler's connection; what may still be written ends only
with a worker's answer, or its death.
"""

from kvtide.bounds import T_START_MS
from kvtide.core import checks
from kvtide.core import messages as m
from kvtide.core.effects import Close, Send
from kvtide.core.index import Root
from kvtide.core.instances import Instance, Worker
from kvtide.core.layout import KVLayout
from kvtide.core.parts import Parts
from kvtide.core.reasons import Off, OffReason
from kvtide.errors import WireError
from kvtide.units import format_bytes

START_MS_MAX = T_START_MS
"""Workers that have not come by then are named to the scheduler."""


class Presence:
    """All instances, and who speaks on which connection."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self.instances: dict[str, Instance] = {}
        self.peers: dict[int, Instance | Worker] = {}
        """Who speaks on a connection, and on the one before it, by which the runtime may still
        watch the process; both are kept when they end, until the process has died."""

    def instance(self, connection: int) -> Instance:
        """The instance whose scheduler speaks here; WireError where none does."""
        peer = self.peers.get(connection)
        if not isinstance(peer, Instance) or peer.connection != connection:
            raise WireError("a scheduler's message came before its hello")
        return peer

    def worker(self, connection: int) -> Worker:
        """The worker that speaks here; WireError where none does."""
        peer = self.peers.get(connection)
        if not isinstance(peer, Worker) or peer.connection != connection:
            raise WireError("a worker's message came before its hello")
        return peer

    # ---- engines come

    def scheduler_hello(self, connection: int, hello: m.SchedulerHello) -> None:
        """A scheduler comes, or comes back: welcomed, or refused with the reason and closed.

        Whatever its old connection protected ends, and so do grants that got lost with it. Raises
        WireError for what no engine of ours says.
        """
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
        if self._is_overtaken(connection, instance):
            return
        self._scheduler_left(instance)
        instance.hello = hello
        instance.is_scheduler_alive = True
        instance.connection = connection
        instance.since_ms = self._parts.now_ms
        instance.are_facts_sent = False
        self._note_speaker(connection, instance)
        if is_back:  # another scheduler can't know what the one before it planned
            self._parts.lending.lost_with_connection(instance.engine_id, hello.last_grant)
        self._welcome(connection)
        self.watch_workers(instance)

    def worker_hello(self, connection: int, hello: m.WorkerHello) -> None:
        """A worker comes, or comes back, and names what it still holds and has mapped.

        What it does not name it will never touch again: that is given back. Raises WireError for
        what no worker of ours says.
        """
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
        if worker is not None and self._is_overtaken(connection, worker):
            return
        if worker is None:
            worker = instance.workers[hello.rank] = Worker(connection, hello)
            instance.are_facts_sent = instance.is_identified = False
        worker.connection = connection
        self._note_speaker(connection, worker)
        is_ours = hello.node == self._parts.config.node
        mapped, mapping = set(hello.regions_mapped), set(hello.regions_mapping)
        worker.old_regions = set() if is_ours else mapped | mapping
        self._parts.lending.worker_holds(worker, set(hello.grants_held) if is_ours else set())
        if not is_ours:
            mapped, mapping = set(), set()
        self._parts.regions.worker_is_back(worker, mapped, mapping)
        self._welcome(connection)
        self.watch_workers(instance)
        self.offer_regions()

    def _check_first(self, connection: int) -> None:
        if connection in self.peers:
            raise WireError("a second hello on one connection")

    def _is_overtaken(self, connection: int, peer: Instance | Worker) -> bool:
        """Whether a process has spoken on a newer connection; then this one is over.

        It was given up before that one was made, with a hello in it that is read only now.
        """
        is_over = any(number > connection for number, known in self.peers.items() if known is peer)
        if is_over:
            self._parts.emit(Close(connection))
        return is_over

    def _note_speaker(self, connection: int, peer: Instance | Worker) -> None:
        """Of the connections before this one, the last alone is still known: see `peers`."""
        for number in [number for number, known in self.peers.items() if known is peer][:-1]:
            del self.peers[number]
        self.peers[connection] = peer

    def _instance_of(self, engine_id: str) -> Instance:
        instance = self.instances.get(engine_id)
        if instance is None:
            instance = self.instances[engine_id] = Instance(engine_id, self._parts.now_ms)
        return instance

    def _refuse_version(self, connection: int, wire_version: int, version: str) -> bool:
        fault = checks.version_fault(self._parts.config.version, wire_version, version)
        if fault:
            self._refuse(connection, OffReason.WIRE_VERSION, fault)
        return bool(fault)

    def _refuse(self, connection: int, reason: OffReason, detail: str) -> None:
        self._parts.emit(Send(connection, m.Refused(reason, detail)))
        self._parts.emit(Close(connection))

    def _welcome(self, connection: int) -> None:
        config = self._parts.config
        limit_bytes = self._parts.host.limit_bytes
        welcome = m.Welcome(connection, config.node, config.pid, limit_bytes, config.settings)
        self._parts.send(connection, welcome)

    def watch_workers(self, instance: Instance) -> None:
        """Tell the scheduler about its workers once all are there, and who is missing for long."""
        if instance.hello is None or instance.connection is None:
            return
        missing = instance.missing_ranks()
        if not missing:
            instance.missing_since_ms = None
            if not instance.are_facts_sent:
                instance.are_facts_sent = True
                workers = [instance.workers[rank] for rank in range(instance.hello.worker_count)]
                facts = [worker.facts for worker in workers]
                cell_bytes = instance.shard_cell_bytes()
                self._parts.send(instance.connection, m.Workers(facts, cell_bytes))
        elif instance.missing_since_ms is None:
            instance.missing_since_ms = self._parts.now_ms
        elif self._parts.now_ms - instance.missing_since_ms >= START_MS_MAX and not instance.off:
            instance.are_facts_sent = False  # when they come it is told anew, and may be on again
            detail = f"no word from the workers of ranks {missing[:8]}"
            self._turn_off(instance, OffReason.WORKERS_DIFFER, detail)

    def identity(self, connection: int, identity: m.Identity) -> None:
        """What an engine is by now: served from here on, or off, by its own word or the node's.

        Raises WireError for an identity that cannot be.
        """
        instance = self.instance(connection)
        layout = checks.check_identity(identity)
        instance.identity, instance.layout, instance.off = identity, None, None
        instance.is_identified = True
        if layout is None:
            self._note_off(instance, OffReason(identity.off_reason), identity.off_detail)
        elif fault := instance.shard_fault(identity.cell_bytes):
            self._turn_off(instance, OffReason.WORKERS_DIFFER, fault)
        elif found := self._parts.quarantined.get(identity.fingerprint):
            self._turn_off(instance, OffReason.CANARY, found)
        elif (needed := self._parts.host.needed_bytes(layout)) > self._parts.host.size_bytes:
            detail = (
                f"this model needs {format_bytes(needed)} of host memory at least, the node has "
                f"{format_bytes(self._parts.host.size_bytes)}"
            )
            self._turn_off(instance, OffReason.HOST_TOO_SMALL, detail)
        else:
            instance.layout = layout
            self._parts.send(instance.connection, m.Serving())
        self.offer_regions()

    def _turn_off(self, instance: Instance, reason: OffReason, detail: str) -> None:
        self._note_off(instance, reason, detail)
        self._parts.send(instance.connection, m.Serving(reason, detail))

    def _note_off(self, instance: Instance, reason: OffReason, detail: str) -> None:
        instance.off = Off(reason, detail)
        self._parts.count(f"off.{reason}", 1)

    def clear(self, connection: int, message: m.Clear) -> None:
        """An engine takes back what it may have stored under a wrong name; it is told once that is
        so, and says it again on a new connection where it was not."""
        self.instance(connection)
        checks.check_clear(message)
        self._parts.clear(message.salt_digest, message.fingerprint)
        self._parts.send(connection, message)

    def register_root(self, connection: int, message: m.RegisterRoot) -> None:
        """An engine may name this root from now on. Raises WireError where it means another."""
        instance = self.instance(connection)
        checks.check_root(message)
        identity = instance.identity
        if identity is None or identity.off_reason:
            raise WireError("a root key came from an engine without identity")
        root = Root(message.root, identity.fingerprint, message.epoch, message.salt_digest)
        known = self._parts.index.find(root.key)
        if known is None:
            if len(self._parts.index.roots) >= self._parts.index.roots_max:
                in_use = [instance.roots.keys() for instance in self.instances.values()]
                self._parts.index.forget_idle_roots(set().union(*in_use))
            self._parts.index.roots[root.key] = root
        elif not isinstance(known, Root) or not known.is_same(root):
            raise WireError("a root key that stands for something else already")
        instance.register_root(root.key)

    # ---- engines go

    def disconnected(self, connection: int) -> None:
        """A connection has ended, and what only protects with it; its process may live on."""
        peer = self.peers.get(connection)
        if isinstance(peer, Instance) and peer.connection == connection:
            self._scheduler_left(peer)
        elif isinstance(peer, Worker) and peer.connection == connection:
            peer.connection = None
            self._parts.regions.worker_is_away(peer)
            self.watch_workers(self.instances[peer.engine_id])
            self.reopen(peer.engine_id)

    def _scheduler_left(self, instance: Instance) -> None:
        """Its connection ended: what only protects ends with it."""
        instance.connection = None
        instance.identity, instance.layout, instance.off = None, None, None
        instance.is_identified = False
        instance.missing_since_ms = None
        instance.roots.clear()
        instance.open_regions.clear()
        self._parts.leases.end_all(instance.engine_id)
        self._parts.lookups.forget(instance.engine_id)
        self._parts.promotions.forget(instance.engine_id)

    def process_died(self, connection: int) -> None:
        """A process is dead, or has said good-bye: it holds, maps and writes nothing any more.

        `connection` is the last that the process spoke on, or the one before.
        """
        peer = self.peers.get(connection)
        if peer is None:
            return
        for number in [number for number, known in self.peers.items() if known is peer]:
            del self.peers[number]
        instance = self.instances[peer.engine_id]
        if isinstance(peer, Worker):
            peer.connection = None
            self._parts.lending.worker_holds(peer, set())
            self._parts.regions.worker_died(peer)
            del instance.workers[peer.rank]
            instance.are_facts_sent = instance.is_identified = False
            self.watch_workers(instance)
        else:
            self._scheduler_left(peer)
            peer.is_scheduler_alive = False
            peer.hello = None
        self.reopen(peer.engine_id)
        if instance.is_gone:
            del self.instances[instance.engine_id]

    # ---- what is open to whom

    def offer_regions(self) -> None:
        """Offer every worker what it lacks, and see what is open to whom by now."""
        for instance in self.instances.values():
            if instance.is_serving:
                self._parts.regions.offer(instance, self._parts.now_ms)
            self.reopen(instance.engine_id)

    def reopen(self, engine_id: str) -> None:
        """Work out anew which regions are open to an instance."""
        instance = self.instances[engine_id]
        before = instance.open_regions
        is_serving = instance.is_serving
        instance.open_regions = self._parts.regions.open_to(instance) if is_serving else set()
        if instance.open_regions - before:
            self._parts.lookups.regions_opened(instance)
            self._parts.promotions.regions_opened(instance)

    def layouts_in_use(self) -> list[KVLayout]:
        """The layouts of engines that are not off, each once."""
        in_use = [one.layout for one in self.instances.values() if one.off is None]
        return list(dict.fromkeys(layout for layout in in_use if layout is not None))
