"""A node without I/O for tests: the machine, and fake engines that speak its own words to it.

`World` carries effects out in memory and hands the results back at once, as a quick runtime would;
what a test wants to see late, it holds back (`holds_regions`, `Engine.maps`). Blocks are two
tokens, chunks four blocks, cells one page: so a host of 16 slots is full after a few stores.
"""

import hashlib
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

from kvtide.core import keys
from kvtide.core import messages as m
from kvtide.core.effects import (
    Alarm,
    AskTier,
    ClearTiers,
    Close,
    Disconnected,
    Effect,
    End,
    Event,
    FreeRegion,
    LoadFrom,
    MakeRegion,
    Note,
    ProcessDied,
    Received,
    RegionMade,
    RegionNotMade,
    Send,
    SendRegion,
    SetGenerations,
    StoreTo,
    Tick,
)
from kvtide.core.machine import Machine
from kvtide.core.parts import MachineConfig
from kvtide.core.tiering import TierPlan, WritePolicy
from kvtide.units import KiB
from tests.core.fake_tier import FakeTier

BLOCK_TOKENS = 2
CHUNK_BLOCKS = 4
CHUNK_TOKENS = BLOCK_TOKENS * CHUNK_BLOCKS
CELL_BYTES = 4 * KiB
CHUNK_BYTES = CELL_BYTES * CHUNK_BLOCKS
EFFECTS_MAX = 2_000
"""More effects of one event than any history here should have."""
NODE = b"this life of the node"

M = TypeVar("M")


class World:
    """One node and its machine's memory, on a false clock."""

    def __init__(
        self,
        host_bytes: int = 1024 * KiB,
        *,
        linger_ms: int = 0,
        tiers: Sequence[FakeTier] = (),
        policy: WritePolicy = WritePolicy.THROUGH,
        loads_always: bool = False,
    ) -> None:
        self.tiers = tiers
        self.now_ms = 1_000
        self.machine = Machine(
            MachineConfig(
                node=NODE,
                pid=1,
                version="0",
                host_bytes=host_bytes,
                linger_ms=linger_ms,
                first_number=100,
                tiers=tuple(TierPlan(f"tier{n}", policy, loads_always) for n in range(len(tiers))),
            )
        )
        self.inbox: dict[int, list[Any]] = {}
        self.offered: dict[int, list[SendRegion]] = {}
        self.owners: dict[int, Engine] = {}
        self.making: list[int] = []
        self.made: dict[int, MakeRegion] = {}
        self.freed: list[int] = []
        self.generations: dict[tuple[int, int], int] = {}
        self.log: list[Effect] = []
        self.holds_regions = False
        """Regions asked for stay in `making` until the test makes them."""
        self.memory_cells: int | None = None
        """Cells that the machine has memory for; None: any number."""
        self.next_connection = 1

    # ---- in

    def give(self, event: Event) -> list[Effect]:
        """Hand one event in, carry out what follows, check the machine."""
        first = len(self.log)
        waiting = [event]
        while waiting:
            effects = self.machine.handle(waiting.pop(0), self.now_ms)
            self.machine.check_integrity()
            self.log += effects
            assert len(self.log) - first < EFFECTS_MAX, "events and effects chase each other"
            for effect in effects:
                waiting += self._carry_out(effect)
        return self.log[first:]

    def tick(self, after_ms: int = 0) -> list[Effect]:
        """Let time pass."""
        self.now_ms += after_ms
        return self.give(Tick())

    def answer(self, tier: FakeTier) -> None:
        """A tier that held back answers all that waits, in order."""
        waiting, tier.waiting = tier.waiting, []
        for effect in waiting:
            self.give(tier.answer(effect))

    def clear(self, salt_digest: bytes | None) -> int:
        """The command; how many entries it took away."""
        count = self.machine.clear(salt_digest)
        self.machine.check_integrity()
        for effect in self.machine.take_effects():
            for event in self._carry_out(effect):  # engines that may be served again
                self.give(event)
        return count

    def connect(self) -> int:
        """The number of a new connection."""
        self.next_connection += 1
        return self.next_connection - 1

    # ---- out

    def _carry_out(self, effect: Effect) -> list[Event]:
        match effect:
            case Send(connection, message):
                self.inbox.setdefault(connection, []).append(message)
                if isinstance(message, m.RegionLeave):
                    return self._leave(connection, message.region)
            case SendRegion(connection, region):
                self.offered.setdefault(connection, []).append(effect)
                return self._open(connection, region)
            case Close(connection):
                return [Disconnected(connection)]
            case MakeRegion(region):
                self.made[region] = effect
                self.making.append(region)
                return [] if self.holds_regions else self.make_regions()
            case FreeRegion(region):
                assert not self._mapped_anywhere(region), "freed under a worker's feet"
                self.freed.append(region)
                del self.made[region]
            case SetGenerations(run):
                assert run.end_cell <= self.made[run.region].cell_count, run
                for cell in range(run.first_cell, run.end_cell):
                    before = self.generations.get((run.region, cell), 0)
                    assert before < run.generation, "not raised"
                    self.generations[run.region, cell] = run.generation
            case AskTier() | LoadFrom() | StoreTo():
                return self.tiers[effect.tier].carry_out(effect)
            case ClearTiers():
                for tier in self.tiers:
                    tier.clear(effect)
            case Note() | Alarm() | End():
                pass
        return []

    def make_regions(self) -> list[Event]:
        """Answers to all regions asked for."""
        events: list[Event] = []
        for region in self.making:
            cells = sum(self.made[other].cell_count for other in self.made)
            if self.memory_cells is not None and cells > self.memory_cells:
                del self.made[region]
                events.append(RegionNotMade(region, "no more memory"))
            else:
                events.append(RegionMade(region))
        self.making.clear()
        return events

    def _open(self, connection: int, region: int) -> list[Event]:
        engine = self.owners[connection]
        rank = engine.rank_of(connection)
        if not engine.maps:
            engine.to_map[rank].append(region)
            return []
        engine.mapped[rank].add(region)
        return [Received(connection, m.RegionOpen(region))]

    def _leave(self, connection: int, region: int) -> list[Event]:
        engine = self.owners[connection]
        rank = engine.rank_of(connection)
        if not engine.leaves:
            engine.to_leave[rank].append(region)
            return []
        if region in engine.to_map[rank]:
            engine.to_map[rank].remove(region)
        engine.mapped[rank].discard(region)
        return [Received(connection, m.RegionLeft(region))]

    def _mapped_anywhere(self, region: int) -> bool:
        engines = set(self.owners.values())
        return any(region in mapped for engine in engines for mapped in engine.mapped)

    # ---- seen

    def notes(self) -> list[str]:
        """Lines of the node's log so far."""
        return [effect.text for effect in self.log if isinstance(effect, Note)]

    def slots_free(self) -> int:
        """Free slots of all regions."""
        return sum(region.cells.free_slots for region in self.machine.host.regions.values())

    def lent_cells(self) -> int:
        """Cells that are not free."""
        regions = self.machine.host.regions.values()
        return sum(region.cells.cell_count - region.cells.free_cells for region in regions)


class Engine:
    """A fake engine: one scheduler and its workers, each with a connection."""

    def __init__(
        self,
        world: World,
        engine_id: str = "engine",
        *,
        workers: int = 1,
        shards: int | None = None,
        model: str = "model",
        cell_bytes: int = CELL_BYTES,
        chunk_blocks: int = CHUNK_BLOCKS,
        step_tokens: int = 10_000,
    ) -> None:
        self.world = world
        self.engine_id = engine_id
        self.fingerprint = hashlib.sha256(model.encode()).digest()
        self.incarnation = f"life of {engine_id} {world.next_connection}".encode()
        self.shards = shards or workers
        """Ranks above hold the same shard as one below, and do not store."""
        self.cell_bytes = [cell_bytes] * self.shards
        self.chunk_tokens = chunk_blocks * BLOCK_TOKENS
        self.step_tokens = step_tokens
        self.scheduler = 0
        self.workers = [0] * workers
        self.mapped: list[set[int]] = [set() for _ in range(workers)]
        self.maps = True
        """Workers map what they are offered at once; else it waits in `to_map`."""
        self.leaves = True
        """Workers unmap what they are told to at once; else it waits in `to_leave`."""
        self.to_map: list[list[int]] = [[] for _ in range(workers)]
        self.to_leave: list[list[int]] = [[] for _ in range(workers)]
        self.root = self.root_of()
        self.number = 0

    # ---- coming and going

    def start(self) -> "Engine":
        """Connect everybody, and serve."""
        self.connect_scheduler()
        for rank in range(len(self.workers)):
            self.connect_worker(rank)
        self.identify()
        self.register(self.root)
        return self

    def scheduler_hello(self, **changes: Any) -> m.SchedulerHello:
        """What the scheduler says first."""
        hello: dict[str, Any] = {
            "wire_version": m.WIRE_VERSION,
            "version": "0",
            "engine_id": self.engine_id,
            "incarnation": self.incarnation,
            "pid": 1000,
            "label": "an engine",
            "worker_count": len(self.workers),
        }
        return m.SchedulerHello(**(hello | changes))

    def connect_scheduler(self, **changes: Any) -> list[Effect]:
        """A new connection of the scheduler."""
        self.scheduler = self.world.connect()
        self.world.owners[self.scheduler] = self
        return self.say(self.scheduler_hello(**changes))

    def worker_hello(self, rank: int, **changes: Any) -> m.WorkerHello:
        """What a worker says first."""
        hello: dict[str, Any] = {
            "wire_version": m.WIRE_VERSION,
            "engine_id": self.engine_id,
            "incarnation": self.incarnation + bytes([rank]),
            "pid": 2000 + rank,
            "rank": rank,
            "shard": rank % self.shards,
            "shard_count": self.shards,
            "is_writer": rank < self.shards,
            "cell_bytes": self.cell_bytes[rank % self.shards],
            "facts": {"rank": rank},
            "grants_held": [],
            "regions_mapped": sorted(self.mapped[rank]),
            "node": NODE,
            "regions_mapping": list(self.to_map[rank]),
        }
        return m.WorkerHello(**(hello | changes))

    def connect_worker(self, rank: int, *, mapping: int = 0, **changes: Any) -> list[Effect]:
        """A new connection of one worker; what was on its way to it is lost.

        `mapping` of the regions offered to it had come already: it is mapping them.
        """
        del self.to_map[rank][mapping:]
        self.to_leave[rank].clear()
        self.workers[rank] = self.world.connect()
        self.world.owners[self.workers[rank]] = self
        return self.tell(rank, self.worker_hello(rank, **changes))

    def identity(self, **changes: Any) -> m.Identity:
        """What the scheduler says it is."""
        fields: dict[str, Any] = {
            "fingerprint": self.fingerprint,
            "weights": b"",
            "fields": {"dtype": "bf16"},
            "block_tokens": BLOCK_TOKENS,
            "chunk_tokens": self.chunk_tokens,
            "cell_bytes": self.cell_bytes,
            "step_tokens": self.step_tokens,
        }
        return m.Identity(**(fields | changes))

    def identify(self, **changes: Any) -> list[Effect]:
        """Say it."""
        return self.say(self.identity(**changes))

    def disconnect(self, connection: int) -> list[Effect]:
        """A connection ends, its process lives."""
        return self.world.give(Disconnected(connection))

    def kill(self, connection: int) -> list[Effect]:
        """A process dies: its connection ends, and its pidfd says so."""
        if connection in self.workers:
            self.mapped[self.rank_of(connection)].clear()
        self.world.give(Disconnected(connection))
        return self.world.give(ProcessDied(connection))

    def kill_all(self) -> None:
        """The whole engine dies."""
        for connection in [self.scheduler, *self.workers]:
            self.kill(connection)

    def map_now(self, rank: int = 0) -> None:
        """A worker maps what it was offered and has not mapped yet."""
        while self.to_map[rank]:
            region = self.to_map[rank].pop(0)
            self.mapped[rank].add(region)
            self.tell(rank, m.RegionOpen(region))

    def refuse_now(self, rank: int = 0) -> None:
        """A worker cannot map what it was offered."""
        while self.to_map[rank]:
            self.tell(rank, m.RegionFailed(self.to_map[rank].pop(0), "no locked memory left"))

    def leave_now(self, rank: int = 0) -> None:
        """A worker unmaps what it was told to leave."""
        while self.to_leave[rank]:
            region = self.to_leave[rank].pop(0)
            if region in self.to_map[rank]:
                self.to_map[rank].remove(region)
            self.mapped[rank].discard(region)
            self.tell(rank, m.RegionLeft(region))

    # ---- talking

    def say(self, message: m.Message) -> list[Effect]:
        """The scheduler sends a message."""
        return self.world.give(Received(self.scheduler, message))

    def tell(self, rank: int, message: m.Message) -> list[Effect]:
        """A worker sends a message."""
        return self.world.give(Received(self.workers[rank], message))

    def heard(self, kind: type[M]) -> list[M]:
        """Messages of one kind that the scheduler got on its present connection."""
        inbox = self.world.inbox.get(self.scheduler, [])
        return [message for message in inbox if isinstance(message, kind)]

    def last(self, kind: type[M]) -> M:
        """The last of them."""
        return self.heard(kind)[-1]

    def rank_of(self, connection: int) -> int:
        """Whose connection this is."""
        return self.workers.index(connection)

    # ---- prefixes

    def root_of(self, salt: str | None = None, epoch: bytes = b"") -> bytes:
        """A root key of this engine."""
        return keys.root_key(self.fingerprint, epoch=epoch, salt=salt, adapter=b"")

    def register(self, root: bytes, salt: str | None = None) -> list[Effect]:
        """Make a root known to the node."""
        return self.say(m.RegisterRoot(root, b"", keys.salt_digest(salt)))

    def chain(
        self, tokens: Sequence[int], root: bytes | None = None
    ) -> tuple[list[bytes], list[bytes]]:
        """Keys and short digests of the chunks of a prompt; the last may be a tail."""
        parent, chunk_keys, chunk_digests = root or self.root, [], []
        for start in range(0, len(tokens), self.chunk_tokens):
            packed = keys.token_bytes(tokens[start : start + self.chunk_tokens])
            digests = keys.block_digests(parent, packed, BLOCK_TOKENS, start)
            if digests:
                parent = digests[-1]
                chunk_keys.append(parent)
                chunk_digests.append(b"".join(digest[:16] for digest in digests))
        return chunk_keys, chunk_digests

    def offer(
        self, tokens: Sequence[int], from_chunk: int = 0, root: bytes | None = None
    ) -> m.StoreAnswer:
        """Ask to store a prompt, from one of its chunks on."""
        chunk_keys, digests = self.chain(tokens, root)
        parents = [root or self.root, *chunk_keys]
        self.number += 1
        self.say(
            m.StoreOffer(
                self.number,
                root or self.root,
                parents[from_chunk],
                chunk_keys[from_chunk:],
                digests[from_chunk:],
            )
        )
        answer = self.last(m.StoreAnswer)
        assert answer.number == self.number
        return answer

    def stored(self, grants: Iterable[int], *, ok: bool = True, ranks: Iterable[int] = ()) -> None:
        """Workers answer grants; all workers where none are named."""
        for grant in grants:
            for rank in ranks or range(len(self.workers)):
                self.tell(rank, m.Stored(grant, ok))

    def store(self, tokens: Sequence[int], root: bytes | None = None) -> m.StoreAnswer:
        """Store a prompt, and have it copied."""
        answer = self.offer(tokens, root=root)
        self.stored(answer.grants)
        return answer

    def lookup(
        self, tokens: Sequence[int], root: bytes | None = None, *, keeps: bool = False
    ) -> m.Match | m.Pending:
        """Ask how much of a prompt is held, as an engine does: in at most two messages.

        The lease is released at once, unless the test keeps it.
        """
        root = root or self.root
        chunk_keys, digests = self.chain(tokens, root)
        whole = len(tokens) // self.chunk_tokens
        tail = digests[whole] if whole < len(digests) else b""
        self.number += 1
        self.say(m.Lookup(self.number, root, b"".join(chunk_keys[:whole]), tail))
        answer: m.Match | m.Pending = self.world.inbox[self.scheduler][-1]
        if isinstance(answer, m.Match) and answer.probe:
            parent = chunk_keys[answer.chunks - 1] if answer.chunks else root
            self.number += 1
            self.say(m.Probe(self.number, root, parent, digests[answer.chunks]))
            more = self.last(m.Match)
            if more.lease:
                self.say(m.LeaseRelease(answer.lease))
                runs = answer.runs + more.runs
                answer = m.Match(more.number, answer.chunks, more.blocks, runs, more.lease)
        assert isinstance(answer, m.Match | m.Pending)
        if isinstance(answer, m.Match) and not keeps:
            self.say(m.LeaseRelease(answer.lease))
        return answer

    def blocks_held(self, tokens: Sequence[int], root: bytes | None = None) -> int:
        """How many blocks of a prompt match."""
        answer = self.lookup(tokens, root)
        assert isinstance(answer, m.Match), answer
        return answer.chunks * (self.chunk_tokens // BLOCK_TOKENS) + answer.blocks


def prompt(*parts: int, blocks: int = CHUNK_BLOCKS) -> list[int]:
    """Token ids of one chunk for each part, the last of them of so many blocks."""
    sizes = [CHUNK_TOKENS] * (len(parts) - 1) + [blocks * BLOCK_TOKENS]
    return [part * 1_000 + i for part, size in zip(parts, sizes, strict=True) for i in range(size)]
