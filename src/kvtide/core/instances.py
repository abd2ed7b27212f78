"""The engines that are connected: an instance is one scheduler and its workers.

    scheduler hello ─┐
    every worker's hello ─┴─► `Workers` (facts) ─► `Identity` ─► serving, or off with a reason

Connections come and go; processes end once. What a process holds (mappings, grants) ends only
with its proven death or its own word, so it hangs on `Worker`, never on a connection.
"""

from typing import TYPE_CHECKING, Any

from kvtide.bounds import T_PUT_MS
from kvtide.core.estimate import Rate
from kvtide.core.messages import Identity, SchedulerHello, WorkerHello

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvtide.core.layout import KVLayout
    from kvtide.core.reasons import Off

ROOTS_MAX = 1 << 16
"""Root keys that an engine may have registered; the one registered longest ago is forgotten."""

GRANT_STEPS_MAX = 4
"""A grant is answered once the step that computes its blocks has ended: it lives T_put, and so
many times as long as the engine's largest steps take."""
GRANT_STEPS_MS_MAX = 120_000
"""The most that a grant lives beyond T_put, and what it does where nothing is known of the steps:
on CPUs one may take a minute."""


class Worker:
    """One worker process of an instance."""

    def __init__(self, number: int, hello: WorkerHello) -> None:
        self.number = number
        """Unique for the process: the number of its first connection."""
        self.connection: int | None = number
        self.engine_id = hello.engine_id
        self.incarnation = hello.incarnation
        self.pid = hello.pid
        self.rank = hello.rank
        self.shard = hello.shard
        self.shard_count = hello.shard_count
        self.is_writer = hello.is_writer
        self.cell_bytes = hello.cell_bytes
        self.facts: dict[str, Any] = hello.facts
        self.old_regions: set[int] = set()
        """Regions of a node that is gone, which it still has mapped."""

    def is_same(self, hello: WorkerHello) -> bool:
        """Whether a hello of this process says of it what the first one said."""
        mine = (self.shard, self.shard_count, self.is_writer, self.cell_bytes)
        return mine == (hello.shard, hello.shard_count, hello.is_writer, hello.cell_bytes)


class Instance:
    """One engine: its processes, what it is, and what it asked for."""

    def __init__(self, engine_id: str, now_ms: int) -> None:
        self.engine_id = engine_id
        self.since_ms = now_ms
        """When its scheduler, or before that the first of its workers, came last."""
        self.connection: int | None = None
        """Its scheduler's."""
        self.hello: SchedulerHello | None = None
        self.is_scheduler_alive = False
        """Its process has come, and is not proven dead, whether it is connected or not."""
        self.workers: dict[int, Worker] = {}  # by rank
        self.missing_since_ms: int | None = None
        """Since when the scheduler has been here, and not all of its workers."""
        self.are_facts_sent = False
        """The scheduler knows the facts of the workers that are here now."""
        self.identity: Identity | None = None
        self.is_identified = False
        """Whether `identity` is about the workers that are here now."""
        self.layout: KVLayout | None = None
        """What it stores; None where it is off, or not known yet."""
        self.off: Off | None = None
        self.roots: dict[bytes, None] = {}
        """Keys that it may name, the one named last behind the others."""
        self.open_regions: set[int] = set()
        """Those that all of its workers have mapped: nothing else is lent to it or matched."""
        self.prefill = Rate()
        """Tokens that its steps compute."""
        self.counts: dict[str, int] = {}

    @property
    def is_serving(self) -> bool:
        """Identified, not off, every process connected, nothing of an older node in use."""
        return (
            self.layout is not None
            and self.off is None
            and self.is_identified
            and not self.missing_ranks()
            and not any(worker.old_regions for worker in self.workers.values())
        )

    @property
    def grant_ms_max(self) -> int:
        """How long a grant may go unanswered before others may store the same."""
        step_tokens = self.identity.step_tokens if self.identity is not None else 0
        step_ms = self.prefill.ms_for(step_tokens) if step_tokens else None
        if step_ms is None:
            return T_PUT_MS + GRANT_STEPS_MS_MAX
        return T_PUT_MS + int(min(GRANT_STEPS_MAX * step_ms, GRANT_STEPS_MS_MAX))

    @property
    def is_gone(self) -> bool:
        """No process of it lives."""
        return not self.is_scheduler_alive and not self.workers

    def missing_ranks(self) -> list[int]:
        """Ranks without a connected worker; none where the scheduler has not said how many."""
        if self.hello is None:
            return []
        return [
            rank
            for rank in range(self.hello.worker_count)
            if rank not in self.workers or self.workers[rank].connection is None
        ]

    def writers(self) -> list[Worker]:
        """For each shard the worker that stores it."""
        return sorted(
            (worker for worker in self.workers.values() if worker.is_writer),
            key=lambda worker: worker.shard,
        )

    def shard_cell_bytes(self) -> list[int]:
        """For each shard the bytes of its cells, as its writer says."""
        return [worker.cell_bytes for worker in self.writers()]

    def shard_fault(self, cell_bytes: list[int]) -> str:
        """Why the workers are not those of an identity with these shards; empty where they are."""
        assert self.hello is not None, self.engine_id
        if len(self.workers) != self.hello.worker_count:
            return f"{len(self.workers)} of {self.hello.worker_count} workers have come"
        written = [worker.shard for worker in self.writers()]
        if written != list(range(len(cell_bytes))):
            return f"workers store the shards {written[:8]} of {len(cell_bytes)}"
        for rank, worker in self.workers.items():
            if worker.shard_count != len(cell_bytes):
                return f"rank {rank} knows of {worker.shard_count} shards, not {len(cell_bytes)}"
            if worker.cell_bytes != cell_bytes[worker.shard]:
                wanted = cell_bytes[worker.shard]
                return f"rank {rank} has cells of {worker.cell_bytes} bytes, not {wanted}"
        return ""

    def names_root(self, key: bytes) -> bool:
        """Whether the engine may name this root; the one named last is forgotten last."""
        if key not in self.roots:
            return False
        del self.roots[key]
        self.roots[key] = None
        return True

    def register_root(self, key: bytes) -> None:
        """The engine may name this root from now on."""
        self.roots.pop(key, None)
        self.roots[key] = None
        if len(self.roots) > ROOTS_MAX:
            del self.roots[next(iter(self.roots))]


def check_integrity(
    instances: "Mapping[str, Instance]", peers: "Mapping[int, Instance | Worker]"
) -> None:
    """Assert that connections, processes and engines agree about one another."""
    known: dict[Instance | Worker, int] = {}
    for number, peer in peers.items():
        known[peer] = known.get(peer, 0) + 1
        assert known[peer] <= 2, f"connection {number} is the third of one process"
        instance = instances.get(peer.engine_id)
        own = [instance, *instance.workers.values()] if instance else []
        assert peer in own, f"connection {number} belongs to no process of an engine"
    for engine_id, instance in instances.items():
        assert instance.engine_id == engine_id, (instance.engine_id, engine_id)
        assert not instance.is_gone, engine_id
        assert (instance.hello is not None) == instance.is_scheduler_alive, engine_id
        assert instance.is_scheduler_alive == (instance in known), engine_id
        if instance.connection is None:
            assert instance.layout is None, engine_id
            assert not instance.roots, engine_id
        processes: list[Instance | Worker] = [instance, *instance.workers.values()]
        for one in processes:
            is_known = one.connection is None or peers.get(one.connection) is one
            assert is_known, (engine_id, one.connection)
        for rank, worker in instance.workers.items():
            assert worker.rank == rank, (worker.rank, rank)
            assert worker in known, f"rank {rank} of {engine_id} has no connection to die by"
