"""A plain model of the node's memory, and rules that drive the machine against it.

A few engines with one to three workers, of several layouts, some of them of one model, live on one
tiny host that is full at once. In any order they look up, store, answer, lose answers, connections
and processes, map late and leave late; the host's limit moves, and memory is refused.

The model keeps, for every cell and shard, who wrote what under which generation. It says:

- nobody ever writes into a cell that has been lent to somebody else since;
- a match may forget but never invent: each cell it names has the generation it names, and was
  written, in every shard, with exactly the content asked for, completely and not cleared since;
- a load whose generations have not moved has read that content; under a lease they don't move;
- memory is freed only when no worker has it, and nobody is given cells that it has not mapped.
"""

from collections import defaultdict
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from kvtide.core import messages as m
from kvtide.core.effects import HostLimit, Received
from kvtide.core.keys import salt_digest
from kvtide.core.leases import LEASE_MS
from kvtide.core.reasons import EvictCause
from kvtide.units import KiB
from tests.core.actor import Actor, Content, Load, Plan
from tests.core.world import BLOCK_TOKENS, Engine, World, prompt

HOST_BYTES = 512 * KiB
SHAPES: list[dict[str, Any]] = [
    {"workers": 1, "model": "a"},
    {"workers": 1, "model": "a"},
    {"workers": 2, "model": "b"},
    {"workers": 3, "model": "c", "chunk_blocks": 2},
    {"workers": 2, "shards": 1, "model": "d"},
]
SALTS = (None, None, "salt")

pick = st.integers(0, 10**6)
prompts = st.builds(
    lambda parts, blocks: prompt(*parts, blocks=blocks),
    st.lists(st.integers(1, 2), min_size=1, max_size=3),
    st.integers(1, 4),
)


class NodeModel(RuleBasedStateMachine):
    """One node, its engines, and what is truly in its memory."""

    lately = 8
    """So many of the last prompts are looked up again."""

    def __init__(self) -> None:
        super().__init__()
        self.world = self.make_world()
        self.actors: dict[str, Actor] = {}
        self.memory: dict[tuple[int, int, int], tuple[int, Content]] = {}
        """(region, cell, shard) -> generation under which it was written, and what."""
        self.complete: set[Content] = set()
        """Blocks that were stored in every shard and not cleared since."""
        self.offered: dict[bytes, list[tuple[list[int], str | None]]] = defaultdict(list)
        """For each model, what was offered."""
        self.moved = 0
        self.matches = 0

    def make_world(self) -> World:
        return World(HOST_BYTES)

    # ---- picking

    def some(self, which: int) -> Actor | None:
        actors = sorted(self.actors.items())
        return actors[which % len(actors)][1] if actors else None

    def serving(self, which: int) -> Actor | None:
        actors = [actor for _, actor in sorted(self.actors.items()) if actor.serves]
        return actors[which % len(actors)] if actors else None

    def root(self, actor: Actor, salt: str | None) -> bytes:
        root = actor.root_of(salt)
        actor.register(root, salt)
        return root

    # ---- coming and going

    @initialize(
        shapes=st.lists(st.integers(0, len(SHAPES) - 1), min_size=2, max_size=3),
        words=st.lists(prompts, max_size=12),
    )
    def begin(self, shapes: list[int], words: list[list[int]]) -> None:
        """Two or three engines serve, and have stored something."""
        for slot, shape in enumerate(shapes):
            self.start(slot, shape, is_quick=True)
        for which, tokens in enumerate(words):
            self.store(which, tokens, None)

    @rule(slot=st.integers(0, 2), shape=st.integers(0, len(SHAPES) - 1), is_quick=st.booleans())
    def start(self, slot: int, shape: int, is_quick: bool) -> None:
        """A new engine, where none is under this name."""
        engine_id = f"engine {slot}"
        if engine_id not in self.actors:
            actor = self.actors[engine_id] = Actor(self.world, engine_id, SHAPES[shape])
            actor.maps = is_quick
            self.connect_scheduler(actor)
            for rank in range(len(actor.workers)):
                self.connect_worker(actor, rank)
            self.settle()

    def connect_scheduler(self, actor: Actor) -> None:
        self.leases_end(actor)
        actor.connect_scheduler(last_grant=actor.last_grant)
        actor.is_connected = True
        actor.read = 0
        actor.asked.clear()

    def connect_worker(self, actor: Actor, rank: int) -> None:
        actor.worker_is_connected[rank] = True
        mapping = len(actor.to_map[rank]) // 2
        actor.connect_worker(rank, mapping=mapping, grants_held=actor.held_by(rank))

    @rule(which=pick, who=pick, what=st.sampled_from(["break", "break", "replace", "kill"]))
    def trouble(self, which: int, who: int, what: str) -> None:
        """A connection ends; or a new one comes while the old one still looks alive; or death."""
        actor = self.some(which)
        if actor is None:
            return
        rank = who % (len(actor.workers) + 1) - 1
        if what == "kill":
            self.kill(actor, who)
        elif rank < 0:
            if what == "replace" and actor.is_scheduler_alive:
                self.connect_scheduler(actor)
            elif actor.is_connected:
                actor.is_connected = False
                actor.disconnect(actor.scheduler)
        elif what == "replace" and actor.worker_is_alive[rank]:
            self.connect_worker(actor, rank)
        elif actor.worker_is_connected[rank]:
            actor.worker_is_connected[rank] = False
            actor.disconnect(actor.workers[rank])
        self.settle()

    @rule(which=pick)
    def mend(self, which: int) -> None:
        """Everybody of an engine who lives is connected again."""
        actor = self.some(which)
        if actor is None:
            return
        for rank, is_connected in enumerate(actor.worker_is_connected):
            if actor.worker_is_alive[rank] and not is_connected:
                self.connect_worker(actor, rank)
        if actor.is_scheduler_alive and not actor.is_connected:
            self.connect_scheduler(actor)
        self.settle()

    def kill(self, actor: Actor, who: int) -> None:
        """One process, or all of the engine, as usual."""
        who %= len(actor.workers) + 4
        for rank in range(len(actor.workers)):
            if who == rank or who > len(actor.workers):
                self.kill_worker(actor, rank)
        if who >= len(actor.workers):
            self.kill_scheduler(actor)
        if not actor.is_scheduler_alive and not any(actor.worker_is_alive):
            del self.actors[actor.engine_id]

    def kill_worker(self, actor: Actor, rank: int) -> None:
        if actor.worker_is_alive[rank]:
            actor.worker_is_alive[rank] = actor.worker_is_connected[rank] = False
            for plan in actor.plans.values():
                plan.to_write.discard(rank)
            actor.kill(actor.workers[rank])

    def kill_scheduler(self, actor: Actor) -> None:
        if actor.is_scheduler_alive:
            actor.is_scheduler_alive = actor.is_connected = False
            actor.loads.clear()
            actor.kill(actor.scheduler)

    # ---- storing

    @rule(
        which=pick, tokens=prompts, salt=st.sampled_from(SALTS), slow=st.sampled_from([0, 0, 1, 2])
    )
    def store(self, which: int, tokens: list[int], salt: str | None, slow: int = 0) -> None:
        """Granted and planned at once, and copied by all workers but the first few, if any."""
        actor = self.serving(which)
        if actor is None:
            return
        self.offer(which, tokens, salt, is_lost=False)
        for plan in [plan for plan in actor.plans.values() if not plan.is_planned]:
            self.plan_one(actor, plan)
            for rank in sorted(plan.to_write)[slow:]:
                self.write_one(actor, plan, rank, is_ok=True)

    @rule(which=pick)
    def write_all(self, which: int) -> None:
        """A step has ended: the workers of an engine answer all they hold, the last one first."""
        actor = self.some(which)
        while actor and (held := [p for p in actor.plans.values() if p.to_write]):
            before = [len(plan.to_write) for plan in held]
            for plan in reversed(held):
                for rank in sorted(plan.to_write):
                    self.write_one(actor, plan, rank, is_ok=True)
            if before == [len(plan.to_write) for plan in held]:
                break  # nobody who holds them is connected

    @rule(which=pick, tokens=prompts, salt=st.sampled_from(SALTS), is_lost=st.booleans())
    def offer(self, which: int, tokens: list[int], salt: str | None, is_lost: bool) -> None:
        """Now and then the connection ends before the answer is received."""
        actor = self.serving(which)
        if actor is None:
            return
        root = self.root(actor, salt)
        self.offered[actor.fingerprint].append((tokens, salt))
        answer = actor.offer(tokens, root=root)
        granted = [chunk for chunk, outcome in enumerate(answer.outcomes) if not outcome]
        for number, run, chunk in zip(answer.grants, answer.runs, granted, strict=True):
            assert all(run.region in mapped for mapped in actor.mapped), "granted, but not mapped"
            contents = actor.blocks(root, tokens, chunk)
            assert len(contents) == run.cell_count
            if not is_lost or which % 4:
                actor.plans[number] = Plan(number, run, contents, answer.connections)
                actor.last_grant = number
        if is_lost and which % 4 == 0:
            actor.is_connected = False
            actor.disconnect(actor.scheduler)
        self.settle()

    @rule(which=pick, number=pick)
    def plan(self, which: int, number: int) -> None:
        """A step's metadata: each worker takes the grant if it is for its present connection."""
        plan, actor = self.some_plan(which, number, is_planned=False)
        if plan and actor and actor.is_scheduler_alive:
            self.plan_one(actor, plan)

    def plan_one(self, actor: Actor, plan: Plan) -> None:
        plan.is_planned = True
        for rank in range(actor.shards):
            is_mine = plan.connections[rank] == actor.workers[rank]
            if is_mine and actor.worker_is_alive[rank]:
                plan.to_write.add(rank)

    @rule(which=pick, number=pick)
    def give_back(self, which: int, number: int) -> None:
        plan, actor = self.some_plan(which, number, is_planned=False)
        if plan and actor and actor.is_connected:
            del actor.plans[plan.number]
            actor.say(m.GrantReturn([plan.number]))
            self.settle()

    @rule(which=pick, number=pick, rank=pick, is_ok=st.sampled_from([True, True, True, False]))
    def write(self, which: int, number: int, rank: int, is_ok: bool) -> None:
        """A worker copies its shard and answers; a copy that fails has spoilt the cells."""
        plan, actor = self.some_plan(which, number, is_planned=True)
        if plan is None or actor is None or not plan.to_write:
            return
        self.write_one(actor, plan, sorted(plan.to_write)[rank % len(plan.to_write)], is_ok=is_ok)

    def write_one(self, actor: Actor, plan: Plan, rank: int, *, is_ok: bool) -> None:
        run = plan.run
        assert run.region in actor.mapped[rank], "written into memory that is not mapped"
        cells = range(run.first_cell, run.end_cell)
        for cell, content in zip(cells, plan.contents, strict=True):
            found = self.world.generations[run.region, cell]
            assert found == run.generation, "written into another's cell"
            spoilt = (content[0], ()) if not is_ok else content
            self.memory[run.region, cell, rank] = (run.generation, spoilt)
        if actor.worker_is_connected[rank]:
            plan.to_write.discard(rank)
            if is_ok:
                plan.written.add(rank)
            if len(plan.written) == actor.shards and not plan.is_cleared:
                self.complete.update(plan.contents)
            actor.tell(rank, m.Stored(plan.number, is_ok))
            self.settle()

    def some_plan(
        self, which: int, number: int, *, is_planned: bool
    ) -> tuple[Plan | None, Actor | None]:
        actor = self.some(which)
        plans = [] if actor is None else list(actor.plans.values())
        plans = [plan for plan in plans if plan.is_planned == is_planned]
        return (plans[number % len(plans)], actor) if plans else (None, None)

    # ---- retrieving

    @rule(which=pick, backs=st.lists(pick, min_size=1, max_size=4), cut=st.integers(-3, 3))
    def look_up(self, which: int, backs: list[int], cut: int) -> None:
        """What was offered lately for this model, or a little less of it, or a little more."""
        for back in backs:
            actor = self.serving(which)
            if actor is None or not self.offered[actor.fingerprint]:
                return
            lately = self.offered[actor.fingerprint][-self.lately :]
            tokens, salt = lately[back % len(lately)]
            more = [9] * (BLOCK_TOKENS * cut)
            self.ask(actor, (tokens + more)[: len(tokens) + BLOCK_TOKENS * cut], salt)

    @rule(which=pick, tokens=prompts, salt=st.sampled_from(SALTS))
    def look_up_any(self, which: int, tokens: list[int], salt: str | None) -> None:
        """Whatever it may be."""
        if (actor := self.serving(which)) is not None:
            self.ask(actor, tokens, salt)

    def ask(self, actor: Actor, tokens: list[int], salt: str | None) -> None:
        root = self.root(actor, salt)
        keys, digests = actor.chain(tokens, root)
        whole = len(tokens) // actor.chunk_tokens
        actor.number += 1
        actor.asked[actor.number] = (root, tokens, 0)
        tail = digests[whole] if whole < len(digests) else b""
        actor.say(m.Lookup(actor.number, root, b"".join(keys[:whole]), tail))
        self.settle()

    def matched(self, actor: Actor, match: m.Match) -> None:
        """Judge one answer; then probe, or keep it to be loaded."""
        self.matches += bool(match.runs)
        root, tokens, first_chunk = actor.asked.pop(match.number)
        whole = match.chunks
        contents = [
            actor.blocks(root, tokens, first_chunk + chunk)[: run.cell_count]
            for chunk, run in enumerate(match.runs)
        ]
        per_chunk = actor.chunk_tokens // BLOCK_TOKENS
        assert len(match.runs) == whole + (match.blocks > 0)
        assert [run.cell_count for run in match.runs[:whole]] == [per_chunk] * whole
        if match.blocks:
            assert match.runs[-1].cell_count == match.blocks
        for run, blocks in zip(match.runs, contents, strict=True):
            assert len(blocks) == run.cell_count, "more blocks than were asked for"
            assert set(blocks) <= self.complete, "never stored, or cleared"
            assert all(run.region in mapped for mapped in actor.mapped), "matched, but not mapped"
            assert self.is_true(actor, run, blocks)
        if match.lease:
            actor.loads.append(Load(match.lease, match.runs, contents, self.world.now_ms))
        if match.probe:
            keys, digests = actor.chain(tokens, root)
            parent = keys[whole - 1] if whole else root
            actor.number += 1
            actor.asked[actor.number] = (root, tokens, whole)
            actor.say(m.Probe(actor.number, root, parent, digests[whole]))

    def is_true(self, actor: Actor, run: m.Run, blocks: list[Content]) -> bool:
        """Whether the cells have the run's generation; then they must hold these blocks."""
        cells = range(run.first_cell, run.end_cell)
        if any(self.world.generations[run.region, cell] != run.generation for cell in cells):
            return False
        for cell, block in zip(cells, blocks, strict=True):
            for shard in range(actor.shards):
                found = self.memory[run.region, cell, shard]
                assert found == (run.generation, block), "wrong bytes"
        return True

    @rule(which=pick, load=pick, how=st.sampled_from(["release", "begin", "end"]))
    def use_match(self, which: int, load: int, how: str) -> None:
        actor = self.some(which)
        if actor is None or not actor.loads:
            return
        chosen = actor.loads[load % len(actor.loads)]
        if how == "begin":
            if actor.is_connected and not chosen.has_begun:
                chosen.has_begun = True
                if self.world.now_ms - chosen.taken_ms >= LEASE_MS:
                    chosen.is_disturbed = True
                actor.say(m.LoadBegin(chosen.lease))
            return
        actor.loads.remove(chosen)
        was_true = all(
            self.is_true(actor, run, blocks)
            for run, blocks in zip(chosen.runs, chosen.contents, strict=True)
        )
        is_young = chosen.has_begun or self.world.now_ms - chosen.taken_ms < LEASE_MS
        assert was_true or chosen.is_disturbed or not is_young, "evicted under a lease"
        if actor.is_connected:
            words: dict[str, m.Message] = {
                "release": m.LeaseRelease(chosen.lease),
                "end": m.LoadEnd(chosen.lease, len(chosen.runs)),
            }
            actor.say(words[how])
        self.settle()

    # ---- memory

    @rule(which=pick, is_quick=st.booleans())
    def dawdle(self, which: int, is_quick: bool) -> None:
        """Workers map and leave at once, or when they get round to it."""
        actor = self.some(which)
        if actor:
            actor.maps = actor.leaves = is_quick

    @rule(which=pick, rank=pick, is_able=st.booleans())
    def get_round_to_it(self, which: int, rank: int, is_able: bool) -> None:
        """Between two steps a worker maps what it was offered, or fails to, then leaves."""
        actor = self.some(which)
        if actor is None or not actor.worker_is_connected[rank % len(actor.workers)]:
            return
        if is_able:
            actor.map_now(rank % len(actor.workers))
        else:
            actor.refuse_now(rank % len(actor.workers))
        actor.leave_now(rank % len(actor.workers))
        self.settle()

    @rule(parts=st.integers(3, 8), cells=st.none() | st.integers(16, 128), is_kept=st.booleans())
    def press(self, parts: int, cells: int | None, is_kept: bool) -> None:
        """The machine wants memory back, or gives no more; often it has plenty again."""
        self.world.memory_cells = cells
        self.world.give(HostLimit(parts * HOST_BYTES // 8))
        self.settle()
        if not is_kept:
            self.world.memory_cells = None
            self.world.give(HostLimit(HOST_BYTES))
            self.settle()

    @rule(after_ms=st.sampled_from([1, 10, 500, 2_000, 11_000, 150_000]))
    def tick(self, after_ms: int) -> None:
        self.world.tick(after_ms)
        self.settle()

    @rule(salt=st.sampled_from(SALTS), is_all=st.booleans())
    @precondition(lambda self: self.complete)
    def clear(self, salt: str | None, is_all: bool) -> None:
        """By salt, or all; also what engines stored that are gone."""
        self.world.clear(None if is_all else salt_digest(salt))
        engines = [Engine(self.world, "of the shape", **shape) for shape in SHAPES]
        roots = {engine.root_of(s) for engine in engines for s in (SALTS if is_all else [salt])}
        self.complete = {block for block in self.complete if block[0] not in roots}
        for actor in self.actors.values():
            for plan in actor.plans.values():
                plan.is_cleared |= plan.contents[0][0] in roots
        self.disturb()

    def disturb(self) -> None:
        for actor in self.actors.values():
            for load in actor.loads:
                load.is_disturbed = True

    def leases_end(self, actor: Actor) -> None:
        """With the scheduler's connection; loads that run go on, unprotected."""
        actor.loads = [load for load in actor.loads if load.has_begun]
        for load in actor.loads:
            load.is_disturbed = True

    # ---- after each rule

    def settle(self) -> None:
        """Take in what the node has said since."""
        if self.world.machine.lending.evicted[EvictCause.MOVED] != self.moved:
            self.moved = self.world.machine.lending.evicted[EvictCause.MOVED]
            self.disturb()
        for actor in list(self.actors.values()):
            if not actor.is_connected:
                self.leases_end(actor)
                continue
            inbox = self.world.inbox.get(actor.scheduler, [])
            while actor.read < len(inbox) and actor.is_connected:
                message = inbox[actor.read]
                actor.read += 1
                if isinstance(message, m.Workers):
                    actor.identify()
                elif isinstance(message, m.Match):
                    self.matched(actor, message)

    def teardown(self) -> None:
        """At idle, nothing is held, and what is not free can be evicted."""
        for actor in list(self.actors.values()):
            for rank in range(len(actor.workers)):
                self.kill_worker(actor, rank)
            self.kill_scheduler(actor)
        self.world.tick()
        machine = self.world.machine
        assert machine.leases.counts() == (0, 0)
        assert machine.leases.pinned_bytes == 0
        assert (machine.lending.grants, machine.lending.granted_bytes) == ({}, 0)
        assert machine.lending.loose == set()
        assert (machine.instances, machine.peers) == ({}, {})
        evictable = 0
        while (entry := machine.index.next_to_evict(machine.host.regions)) is not None:
            evictable += entry.blocks
            machine.lending.evict(entry, EvictCause.ROOM)
        machine.check_integrity()
        assert not machine.index.entries
        assert self.world.lent_cells() == 0, evictable
        self.world.give(HostLimit(0))
        self.world.give(Received(0, m.LeaseRelease(0)))
        for _ in range(2 * len(machine.host.regions)):
            self.world.tick()
        assert machine.host.allocated_bytes == 0
