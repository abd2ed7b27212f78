"""One toy engine: a scheduler process and a process for each rank, as vLLM starts them.

    scheduler process   SchedulerSide, EngineSession, Link;  Batches
    rank processes      WorkerSide, MappedRegions, Link, mover threads;  KV memory, toy model

Steps go to all ranks in order, two of them under way where the engine is asynchronous. Within a
step ranks meet once, to make the next token of all their hashes. What a step takes is drawn; a
slow rank takes longer. The model is that of `toy_engine`: a byte that is wrong changes every token
behind it.
"""

import functools
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kvtide import config as settings
from kvtide.core.reasons import Off
from kvtide.engines.vllm.facts import PageFacts, WorkerFacts
from kvtide.engines.vllm.scheduler import SchedulerSide
from kvtide.engines.vllm.session import EngineIdentity, EngineSession
from kvtide.engines.vllm.weights import Hashing, Known
from kvtide.engines.vllm.worker import WorkerSide
from kvtide.testing.simulate.adapters import ToyAdapters
from kvtide.testing.simulate.blocks import Blocks, ToyRequest
from kvtide.testing.simulate.engine_batches import Batches, Step, Work
from kvtide.testing.simulate.kernel import Kernel, Process
from kvtide.testing.simulate.memory import SimMover
from kvtide.testing.simulate.prompts import VOCABULARY, kv_number
from kvtide.testing.simulate.waiting import Condition, SimpleQueue, SimThread
from kvtide.testing.toy_engine import TOKEN_KV_BYTES, PagedMemory, next_token

BLOCK_TOKENS = 4
CHUNK_TOKENS = 16
IDLE_S = 0.01
"""Between two steps that compute nothing."""
STEP_S_MAX = 0.02
SLOW_STEP_S_MAX = 0.6
"""Of a slow rank: connections come and go within a step."""


@dataclass(frozen=True, slots=True)
class EngineShape:
    """What differs between engines of a world."""

    model: str = "model"
    ranks: int = 1
    replicas: int = 1
    """Ranks that hold the same shard."""
    block_count: int = 48
    step_tokens: int = 32
    sequences_max: int = 6
    is_async: bool = False
    has_priorities: bool = False
    prefix_caching: bool = True
    weights: int = 1
    hashing_s: float = 0.0
    """Until its weights' digest is known."""
    canary_rate: float = 0.001

    @property
    def shards(self) -> int:
        """Parts of a chunk."""
        return self.ranks // self.replicas


class ToyWeights:
    """As `WeightsDigest`: known after a while, and read by then."""

    is_verified = True

    def __init__(self, kernel: Kernel, weights: int, hashing_s: float) -> None:
        self._kernel = kernel
        self._known_us = kernel.now_us + int(hashing_s * 1e6)
        self._digest = weights.to_bytes(32, "big")

    def start(self) -> None:
        """Nothing to start."""

    def wait(self, timeout_s: float) -> None:
        """Nobody waits here."""

    def poll(self) -> Known | Hashing | Off:
        if self._kernel.now_us >= self._known_us:
            return Known(self._digest)
        return Hashing(1, 2, None)

    def close(self, timeout_s: float) -> None:
        """Nothing to close."""


@dataclass(slots=True)
class Run:
    """One step on its way through the ranks."""

    step: Step
    ranks: int
    hashes: dict[int, dict[int, bytes]] = field(default_factory=dict)
    """By rank."""
    tokens: dict[int, int] | None = None
    reports: list[tuple[set[int], set[int], dict[str, int]]] = field(default_factory=list)


class Rank:
    """One rank's process."""

    def __init__(self, engine: "Engine", rank: int) -> None:
        self.engine = engine
        self.rank = rank
        self.process = engine.make_process(f"{engine.name}.rank{rank}")
        shape = engine.shape
        block_bytes = BLOCK_TOKENS * TOKEN_KV_BYTES
        bytes_total = shape.block_count * block_bytes
        self.raw = bytearray(engine.kernel.draw.randbytes(bytes_total))
        view = np.frombuffer(self.raw, np.uint8)
        view = view.reshape(1, shape.block_count, BLOCK_TOKENS, TOKEN_KV_BYTES)
        self.memory = PagedMemory(view, rank // shape.replicas)
        self.mover = SimMover(
            engine.kernel, self.raw, block_bytes, lambda: self.process.name in engine.slow
        )
        self.work = SimpleQueue(engine.kernel)
        self.known: dict[int, list[int]] = {}
        self.side: WorkerSide | None = None

    def main(self) -> None:
        """Its main thread."""
        engine, shape = self.engine, self.engine.shape
        shard = self.rank // shape.replicas
        self.side = WorkerSide(
            engine.engine_id,
            engine.places,
            self._facts(shard),
            self.rank % shape.replicas == 0,
            self.mover,
        )
        self.side.start()
        while (run := self.work.get()) is not None:
            self._execute(self.side, run)
        self.side.close(1.0)

    def _facts(self, shard: int) -> WorkerFacts:
        shape = self.engine.shape
        page_bytes = BLOCK_TOKENS * TOKEN_KV_BYTES
        page = PageFacts(
            "layer", "FullAttentionSpec", "toy", "bfloat16", page_bytes, 1, (1, 1, 1), (1, 1, 1)
        )
        return WorkerFacts(
            self.rank, shard, shape.shards, shape.block_count, "toy", "toy", (page,)
        )

    def _execute(self, side: WorkerSide, run: Run) -> None:
        """One step, hooks in the order of vLLM's model runner."""
        kernel, step = self.engine.kernel, run.step
        side.handle_preemptions(step.plan)
        for request_id in step.ended:
            self.known.pop(request_id, None)
        hashes = {one.request_id: self._forward(one) for one in step.work}
        if step.work:
            most_s = SLOW_STEP_S_MAX if self.process.name in self.engine.slow else STEP_S_MAX
            kernel.sleep(kernel.draw.random() * most_s)
            self._meet(run, hashes)
        for job in step.plan.loads:
            self.memory.scribble(job.block_ids)
        side.start_loads(step.plan)
        side.wait_for_save(step.plan)
        ended = side.take_ended()
        errors, counts = side.take_load_errors(), side.counters.take()
        run.reports.append((ended, errors, counts))  # type: ignore[arg-type]
        if len(run.reports) == run.ranks:
            self.engine.done.put(run)

    def _forward(self, work: Work) -> bytes:
        known = self.known.setdefault(work.request_id, [])
        if len(work.tokens) > len(known):
            known[:] = work.tokens
        tokens = known[work.start : work.start + work.count]
        assert len(tokens) == work.count, "a token that nobody has sampled"
        self.memory.weights = work.weights
        return self.memory.forward(work.table, work.start, tokens)[-1]

    def _meet(self, run: Run, hashes: dict[int, bytes]) -> None:
        """With the other ranks: the next tokens are made of everybody's hashes."""
        meeting = self.engine.meeting
        with meeting:
            run.hashes[self.rank] = hashes
            if len(run.hashes) == run.ranks:
                run.tokens = self.engine.sampled(run)
                meeting.notify_all()
            else:
                meeting.wait_for(lambda: run.tokens is not None)
        assert run.tokens is not None
        for request_id, token in run.tokens.items():
            self.known[request_id].append(token)


class Engine:
    """An engine's processes, from its start to its end."""

    def __init__(
        self, world: Any, name: str, engine_id: str, home: str, shape: EngineShape
    ) -> None:
        self.kernel: Kernel = world.kernel
        self.world = world
        self.name = name
        self.engine_id = engine_id
        self.shape = shape
        self.places = world.places(home)
        self.home = home
        self.weights = shape.weights
        """What it computes with now: a trainer may have changed them."""
        self.adapters = ToyAdapters(self.kernel, world.adapters)
        self.slow: set[str] = set()
        """Processes that take longer."""
        self.process = self.make_process(f"{name}.scheduler")
        self.inbox: deque[Callable[[Batches], None]] = deque()
        self.wish = Condition(self.kernel)
        self.done = SimpleQueue(self.kernel)
        self.meeting = Condition(self.kernel)
        self.batches: Batches | None = None
        self.session: EngineSession | None = None
        self.is_closing = False
        self.is_over = False
        self.is_awaited = False
        """Another is to be started in its place."""
        self.ranks = [Rank(self, rank) for rank in range(shape.ranks)]
        self._running: deque[Run] = deque()
        self._missing: dict[int, int] = {}
        self.thread(self.process, self._main)
        for rank in self.ranks:
            self.thread(rank.process, rank.main)

    def make_process(self, name: str) -> Process:
        """A process of this engine; its death is everybody's."""
        process: Process = self.world.make_process(name)
        process.on_death.append(self._member_died)
        return process

    def thread(self, process: Process, target: Callable[[], None]) -> None:
        """The main thread of a process."""
        kernel = self.kernel
        before, kernel.current = kernel.current, process
        SimThread(kernel, target, process.name, True).start()
        kernel.current = before

    @property
    def processes(self) -> list[Process]:
        """All of them."""
        return [self.process, *(rank.process for rank in self.ranks)]

    @property
    def is_alive(self) -> bool:
        """Whether none of its processes has died."""
        return all(process.is_alive for process in self.processes)

    @property
    def has_left(self) -> bool:
        """Whether nothing of it runs any more."""
        if not any(process.is_alive for process in self.processes):
            return True
        threads = [thread for process in self.processes for thread in process.threads]
        return self.is_over and all(thread.is_over for thread in threads)

    @property
    def may_hit(self) -> bool:
        """Whether it is served, as far as anybody told."""
        return self.session is not None and self.session.off is None

    def _member_died(self) -> None:
        """vLLM ends what is left of an engine within moments."""
        kernel = self.kernel
        for process in self.processes:
            delay_us = kernel.draw.randrange(50_000)
            kernel.at(kernel.now_us + delay_us, functools.partial(kernel.kill, process))

    # ---- from outside

    def ask(self, wish: Callable[[Batches], None]) -> None:
        """Have the scheduler's thread do something before its next step."""
        self.inbox.append(wish)
        self.wish.notify_all()

    def close(self) -> None:
        """End in order."""
        self.is_closing = True
        self.wish.notify_all()

    def replace_weights(self) -> None:
        """A trainer gives it others, and resets its caches."""

        def replace(batches: Batches) -> None:
            self.weights += 1000
            self._begin_again(batches, lambda request: True)
            batches.reset_cache()

        self.ask(replace)

    def replace_adapter(self, path: str) -> None:
        """Other files are there: it loads them, and notices later."""
        self.adapters.told(path)

        def replace(batches: Batches) -> None:
            self.adapters.reload(path)
            self._begin_again(batches, lambda request: request.adapter_path == path)
            self.thread(self.process, functools.partial(self.adapters.look, path))

        self.ask(replace)

    def owes_no_clear(self, path: str) -> bool:
        """Whether nodes have cleared what it stored while this adapter had a wrong name."""
        session = self.session
        is_cleared = session is None or not (session._uncleared or session._clearing)
        return self.adapters.has_noticed(path) and is_cleared

    def compute_with(self, request: ToyRequest) -> None:
        """The weights and the adapter that there are now, whatever is being loaded for it."""
        path, adapter = request.adapter_path, request.lora_request
        version = self.adapters.version(path)
        request.weights = kv_number(self.weights, adapter, version, request.cache_salt)
        request.is_doubtful = self.adapters.is_behind(path)

    def _begin_again(self, batches: Batches, is_meant: Callable[[ToyRequest], bool]) -> None:
        """Requests that have computed with what there was end here."""
        for request in filter(is_meant, list(batches.requests.values())):
            if request.was_scheduled or request.has_old_bytes:
                batches.finish(request)
                self.world.request_ended(self, request)
            else:
                self.compute_with(request)

    # ---- the scheduler's main thread

    def _main(self) -> None:
        environ = {"KVTIDE_RUNTIME_DIR": self.home, "HOME": self.home}
        environ["KVTIDE_CANARY_RATE"] = f"{self.shape.canary_rate}"
        config = settings.read(environ=environ)
        identity = self._identity()
        clock = self.world.clock
        self.session = EngineSession(identity, config, self.places)
        self.session.start()
        self.adapters.clear = self.session.clear
        adapters: Any = self.adapters
        side = SchedulerSide(identity, config.engine, self.session, adapters, clock)
        shape = self.shape
        self.batches = Batches(
            side,
            Blocks(shape.block_count, BLOCK_TOKENS, is_cached=shape.prefix_caching),
            step_tokens=shape.step_tokens,
            sequences_max=shape.sequences_max,
            is_async=shape.is_async,
            has_priorities=shape.has_priorities,
        )
        while not self.is_closing:
            self._turn(self.batches)
        while self._running:
            self._take(self.batches)
        for rank in self.ranks:
            rank.work.put(None)
        side.close(1.0)
        self.is_over = True

    def _identity(self) -> EngineIdentity:
        shape = self.shape
        weights: Any = ToyWeights(self.kernel, shape.weights, shape.hashing_s)
        return EngineIdentity(
            engine_id=self.engine_id,
            label=self.name,
            fields={"model": shape.model, "ranks": shape.ranks},
            weights=(weights,),
            worker_count=shape.ranks,
            block_tokens=BLOCK_TOKENS,
            chunk_tokens=CHUNK_TOKENS,
            step_tokens=shape.step_tokens,
            may_load=True,
            may_store=True,
            failed_loads="recompute",
            drops_last_block=False,
            off=None,
        )

    def _turn(self, batches: Batches) -> None:
        """As vLLM's engine core: take wishes in, schedule a step, take the oldest's output."""
        while self.inbox:
            self.inbox.popleft()(batches)
        if batches.has_work:
            step = batches.schedule()
            run = Run(step, self.shape.ranks)
            self._running.append(run)
            for rank in self.ranks:
                rank.work.put(run)
            if self.shape.is_async and len(self._running) < 2 and step.work:
                return
        if self._running:
            run = self._take(batches)
            if not run.step.work:
                self.kernel.sleep(IDLE_S)
            return
        with self.wish:
            if not self.inbox and not self.is_closing:
                self.wish.wait(1.0)

    def _take(self, batches: Batches) -> Run:
        """Wait for the oldest step, and take in what ranks say of it."""
        run: Run = self.done.get()
        assert run is self._running.popleft(), "ranks end steps in order"
        ended: set[int] = set()
        failed: set[int] = set()
        for ended_here, failed_here, counts in run.reports:
            failed |= failed_here
            batches.side.worker_counts(counts)
            for request_id in ended_here:
                left = self._missing.get(request_id, self.shape.ranks) - 1
                self._missing[request_id] = left
                if not left:
                    del self._missing[request_id]
                    ended.add(request_id)
        for request in batches.take_output(run.step, run.tokens or {}, ended, failed):
            self.world.request_ended(self, request)
        return run

    def sampled(self, run: Run) -> dict[int, int]:
        """The next tokens of a step."""
        kernel, replicas = self.kernel, self.shape.replicas
        tokens = {}
        for work in run.step.work:
            hashes = [run.hashes[rank][work.request_id] for rank in range(self.shape.ranks)]
            shards = hashes[::replicas]
            if [one for one in shards for _ in range(replicas)] != hashes:
                raise kernel.broken(f"ranks of one shard differ in request {work.request_id}")
            if work.is_last:
                tokens[work.request_id] = next_token(shards, VOCABULARY)
        return tokens
