"""An engine without a model: it speaks the real protocol to a real node, over the real socket.

One scheduler and as many workers as there are shards, in this process or, where one is to be
killed, each in its own. It stores the content that its token ids name, finds it again, copies it
and verifies every byte and generation:

    engine = FakeEngine(places, "one").start()
    engine.store(tokens)                      # offered, granted, copied, answered: once
    engine.keep(tokens)                       # the same, until all of it is held
    engine.load(tokens) == Loaded(4, 4)       # looked up, protected, copied, verified, released

    python -m kvtide.testing.fake_engine RUNTIME_DIR ENGINE_ID [TOKENS SEED]

stores that many tokens, if any, says "ready" and stays until its input ends or it is killed.

Rejected: the machine's `World` of the core's tests, which has no socket, memory or processes.
"""

import hashlib
import itertools
import os
import random
import secrets
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import kvtide
from kvtide.core import keys
from kvtide.core import messages as m
from kvtide.core.chain import Chain
from kvtide.core.lending import HELD
from kvtide.core.messages import Run
from kvtide.core.reasons import DropReason
from kvtide.testing.fake_worker import CLOSE_S_MAX, WAIT_S_MAX, FakeWorker, WorkerProcess
from kvtide.units import KiB
from kvtide.wire.link import Link
from kvtide.wire.places import Places

POLL_S = 0.01

A = TypeVar("A")


@dataclass(frozen=True, slots=True)
class Shape:
    """What the engine's model would be."""

    model: str = "model"
    shard_count: int = 1
    block_tokens: int = 16
    chunk_tokens: int = 64
    cell_bytes: int = 64 * KiB
    step_tokens: int = 8192
    fields: dict[str, str] = field(default_factory=lambda: {"dtype": "bf16"})
    weights: bytes = b""

    @property
    def fingerprint(self) -> bytes:
        """Equal for engines that share."""
        return hashlib.sha256(repr(self).encode()).digest()

    @property
    def chunk_blocks(self) -> int:
        """Blocks of a chunk."""
        return self.chunk_tokens // self.block_tokens


@dataclass(frozen=True, slots=True)
class Loaded:
    """What became of a retrieve: blocks matched, and of those verified in every shard."""

    blocks: int
    verified: int


@dataclass(frozen=True, slots=True)
class Stored:
    """What became of a store: the node's word on each chunk, and how many grants were written."""

    outcomes: list[str]
    written: int


class FakeScheduler:
    """The deciding half; a `LinkOwner`."""

    def __init__(self, places: Places, engine_id: str, shape: Shape) -> None:
        self.shape = shape
        self.engine_id = engine_id
        self.wire_version = m.WIRE_VERSION
        self.welcome: m.Welcome | None = None
        self.serving: m.Serving | None = None
        self.workers: m.Workers | None = None
        self.refused: list[m.Refused] = []
        self.downs: list[bool] = []
        """For each time that it was told of an end: whether the node is dead."""
        self.absences = 0
        self._incarnation = secrets.token_bytes(16)
        self._changed = threading.Condition()
        self._answers: dict[int, m.Match | m.Pending | m.StoreAnswer] = {}
        self._numbers = itertools.count(1)
        self._last_grant = 0
        self.link = Link(places.socket, self, "fake-scheduler")

    # ---- the test's thread

    def ask(self, make: Callable[[int], m.Message]) -> Any:
        """Send a question and wait for its answer; a pending one is waited for."""
        number, downs = next(self._numbers), len(self.downs)
        assert self.link.send(make(number)), "the link takes nothing"
        with self._changed:
            self._changed.wait_for(
                lambda: number in self._answers or len(self.downs) > downs, WAIT_S_MAX
            )
            assert number in self._answers, f"question {number} was not answered"
            answer = self._answers.pop(number)
        if isinstance(answer, m.StoreAnswer) and answer.grants:
            self._last_grant = max(answer.grants)
        return answer

    def wait_for(self, is_so: Callable[[], bool], timeout_s: float = WAIT_S_MAX) -> bool:
        """Wait until something that the link's thread notes is so."""
        with self._changed:
            return self._changed.wait_for(is_so, timeout_s)

    # ---- the link, on its thread

    def hello(self) -> m.Message:
        """Who we are."""
        return m.SchedulerHello(
            wire_version=self.wire_version,
            version=kvtide.__version__,
            engine_id=self.engine_id,
            incarnation=self._incarnation,
            pid=os.getpid(),
            label=f"fake engine {self.engine_id}",
            worker_count=self.shape.shard_count,
            last_grant=self._last_grant,
        )

    def on_up(self, welcome: m.Welcome) -> None:
        """The node has taken us; its word on the workers follows."""
        self._note(welcome=welcome)

    def on_message(self, message: m.Message, descriptors: list[int]) -> None:
        """Say who we are once the workers are there; keep answers."""
        match message:
            case m.Workers():
                self._note(workers=message)
                self.link.send(self._identity(message))
                root = self.root()
                self.link.send(m.RegisterRoot(root, b"", b""))
            case m.Serving():
                self._note(serving=message)
            case m.Match() | m.StoreAnswer():
                with self._changed:
                    self._answers[message.number] = message
                    self._changed.notify_all()

    def on_down(self, *, node_is_dead: bool) -> None:
        """Everything asked is void."""
        with self._changed:
            self.downs.append(node_is_dead)
            self._answers.clear()
        self._note(welcome=None, serving=None, workers=None)

    def on_refused(self, refused: m.Refused) -> None:
        """Kept for the test."""
        self.refused.append(refused)
        self._note()

    def on_absent(self) -> None:
        """It starts no node."""
        self.absences += 1
        self._note()

    def on_pulse(self) -> None:
        """Nothing to do."""

    def root(self, salt: str | None = None) -> bytes:
        """The root key of a prompt."""
        fingerprint = self.shape.fingerprint
        return keys.root_key(fingerprint, epoch=b"", salt=salt, adapter=b"")

    def _identity(self, workers: m.Workers) -> m.Identity:
        shape = self.shape
        return m.Identity(
            fingerprint=shape.fingerprint,
            weights=shape.weights,
            fields=shape.fields,
            block_tokens=shape.block_tokens,
            chunk_tokens=shape.chunk_tokens,
            cell_bytes=workers.cell_bytes,
            step_tokens=shape.step_tokens,
        )

    def _note(self, **changes: Any) -> None:
        with self._changed:
            for name, value in changes.items():
                setattr(self, name, value)
            self._changed.notify_all()


class FakeEngine:
    """A scheduler and its workers."""

    def __init__(
        self,
        places: Places,
        engine_id: str,
        shape: Shape | None = None,
        *,
        worker_processes: bool = False,
    ) -> None:
        self.shape = shape or Shape()
        self.scheduler = FakeScheduler(places, engine_id, self.shape)
        kind = WorkerProcess if worker_processes else FakeWorker
        self.workers: list[FakeWorker | WorkerProcess] = [
            kind(places, engine_id, rank, self.shape.shard_count, self.shape.cell_bytes)
            for rank in range(self.shape.shard_count)
        ]

    def start(self) -> "FakeEngine":
        """Connect, and wait until stores are granted."""
        self.scheduler.link.start()
        for worker in self.workers:
            worker.start()
        self.wait_serving()
        return self

    def __enter__(self) -> "FakeEngine":
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.close()

    def wait_serving(self) -> None:
        """Wait until the node has said that we are on, and memory is open."""
        scheduler = self.scheduler
        is_told = scheduler.wait_for(lambda: scheduler.serving is not None)
        assert is_told, "no word on whether it is served"
        assert scheduler.serving is not None
        assert not scheduler.serving.off_reason, scheduler.serving
        probe = make_tokens(self.shape.block_tokens, seed=secrets.randbits(40))
        until_s = time.monotonic() + WAIT_S_MAX
        while time.monotonic() < until_s:
            answer = self.offer(probe)
            if answer.grants:
                scheduler.link.send(m.GrantReturn(answer.grants))
                return
            time.sleep(POLL_S)
        raise AssertionError(f"nothing is granted: {answer.outcomes}")

    def close(self) -> None:
        """Leave in order."""
        self.scheduler.link.close(CLOSE_S_MAX)
        for worker in self.workers:
            worker.close()

    # ---- storing

    def chain(self, tokens: Sequence[int]) -> Chain:
        """The keys of a prompt."""
        chain = Chain(self.scheduler.root(), self.shape.block_tokens, self.shape.chunk_tokens)
        chain.extend(tokens)
        return chain

    def digests(self, tokens: Sequence[int]) -> list[list[bytes]]:
        """For each chunk, a tail included, the full digests of its whole blocks."""
        chain = self.chain(tokens)
        blocks, whole = len(tokens) // self.shape.block_tokens, self.shape.chunk_blocks
        return [
            chain.digests(first // whole, min(whole, blocks - first))
            for first in range(0, blocks, whole)
        ]

    def offer(self, tokens: Sequence[int]) -> m.StoreAnswer:
        """Ask to store a prompt."""
        chunks = self.digests(tokens)
        root = self.scheduler.root()
        answer: m.StoreAnswer = self.scheduler.ask(
            lambda number: m.StoreOffer(
                number,
                root,
                root,
                [digests[-1] for digests in chunks],
                [_short(digests) for digests in chunks],
            )
        )
        return answer

    def store(self, tokens: Sequence[int]) -> Stored:
        """Ask, copy what is granted, answer; on return nothing of it is on its way any more.

        The workers' answers travel on their own connections, so they may come behind a lookup.
        """
        answer = self.offer(tokens)
        written = self.write(answer, tokens)
        if written:
            self.wait_stored(tokens)
        return Stored(answer.outcomes, written)

    def keep(self, tokens: Sequence[int]) -> None:
        """Store until all of it is held: what found no room is offered again."""
        until_s = time.monotonic() + WAIT_S_MAX
        while (outcomes := set(self.store(tokens).outcomes)) != {HELD}:
            assert time.monotonic() < until_s, f"it is never held: {sorted(outcomes)}"

    def wait_stored(self, tokens: Sequence[int]) -> None:
        """Wait until no chunk of the prompt is being stored."""
        until_s = time.monotonic() + WAIT_S_MAX
        while time.monotonic() < until_s:
            answer = self.offer(tokens)
            if answer.grants:
                self.scheduler.link.send(m.GrantReturn(answer.grants))
            if DropReason.IN_FLIGHT not in answer.outcomes:
                return
            time.sleep(POLL_S / 10)
        raise AssertionError(f"still on its way: {answer.outcomes}")

    def write(self, answer: m.StoreAnswer, tokens: Sequence[int]) -> int:
        """Copy and answer all grants of an offer; how many every worker has written."""
        written = 0
        for job in self.jobs(answer, tokens):
            of_workers = [
                worker.write(*job) for worker in self.workers
            ]  # each, whatever others do
            written += all(of_workers)
        return written

    def jobs(
        self, answer: m.StoreAnswer, tokens: Sequence[int]
    ) -> list[tuple[int, Run, list[bytes], list[int]]]:
        """The granted chunks as workers are told: grant, run, digests, connections."""
        chunks = self.digests(tokens)
        granted = [n for n, outcome in enumerate(answer.outcomes) if not outcome]
        return [
            (grant, run, chunks[chunk], answer.connections)
            for grant, run, chunk in zip(answer.grants, answer.runs, granted, strict=True)
        ]

    # ---- loading

    def match(self, tokens: Sequence[int]) -> m.Match:
        """What is held of a prompt, protected by a lease; in at most two questions."""
        chain, chunks, root = self.chain(tokens), self.digests(tokens), self.scheduler.root()
        whole = len(chain.keys)
        behind = _short(chunks[whole]) if whole < len(chunks) else b""
        first: m.Match = self.scheduler.ask(
            lambda number: m.Lookup(number, root, b"".join(chain.keys), behind)
        )
        if not first.probe or first.chunks >= len(chunks):
            return first
        second: m.Match = self.scheduler.ask(
            lambda number: m.Probe(
                number, root, chain.parent(first.chunks), _short(chunks[first.chunks])
            )
        )
        if not second.lease:
            return first
        self.scheduler.link.send(m.LeaseRelease(first.lease))
        runs = first.runs + second.runs
        return m.Match(second.number, first.chunks, second.blocks, runs, second.lease)

    def load(self, tokens: Sequence[int]) -> Loaded:
        """Look up, protect, copy in every worker, verify, release."""
        match = self.match(tokens)
        self.scheduler.link.send(m.LoadBegin(match.lease))
        found = self.read(match.runs, tokens)
        verified = sum(found)
        self.scheduler.link.send(m.LoadEnd(match.lease, verified))
        return Loaded(len(found), verified)

    def read(self, runs: Sequence[Run], tokens: Sequence[int]) -> list[bool]:
        """Copy and verify: for each block whether it is good in every worker."""
        count = sum(run.cell_count for run in runs)
        digests = [digest for chunk in self.digests(tokens) for digest in chunk][:count]
        of_workers = [worker.read(runs, digests) for worker in self.workers]
        return [all(found) for found in zip(*of_workers, strict=True)]


def _short(digests: Sequence[bytes]) -> bytes:
    return b"".join(digest[: keys.INNER_DIGEST_BYTES] for digest in digests)


def make_tokens(count: int, seed: int) -> list[int]:
    """A prompt of random words; other seeds give prompts that have nothing in common."""
    draw = random.Random(seed)
    return [draw.randrange(50_000) for _ in range(count)]


def main(arguments: Sequence[str]) -> int:
    """An engine that can be killed as a whole."""
    runtime_dir, engine_id, *content = arguments
    with FakeEngine(Places(Path(runtime_dir)), engine_id) as engine:
        if content:
            token_count, seed = map(int, content)
            engine.keep(make_tokens(token_count, seed))
            engine.scheduler.link.send(m.Counts({"tokens.computed": token_count}))
        print("ready", flush=True)
        sys.stdin.read()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
