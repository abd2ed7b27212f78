"""The worker role: maps regions, copies, verifies, reports. Decides nothing.

    start_load_kv        hands loads to mover threads
    wait_for_save        copies this step's stores and compares its canaries, on the main thread
    handle_preemptions   copies blocks whose owner is gone, before the forward overwrites them
    get_transfer_results what has ended since, each load exactly once

A load is good when every generation is still the planned one *after* the copy; else its blocks are
reported as failed and the engine computes them.

Ownership
    grants held, connection number   under `_lock`: a hello, a copy's start and its answer exclude
                                     each other
    verdicts not said                a deque, each taken by one thread
    pieces of loads, loads ended     through queues: main thread to mover threads, and back
    regions                          `MappedRegions`
"""

import contextlib
import logging
import os
import queue
import secrets
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from kvtide.bounds import T_LOAD_MS
from kvtide.core import messages as m
from kvtide.core.messages import Run
from kvtide.core.reasons import Verdict
from kvtide.engines.vllm.facts import WorkerFacts
from kvtide.engines.vllm.metadata import CanaryJob, LoadJob, StepPlan, StoreJob
from kvtide.memory.mapped import MappedRegions
from kvtide.memory.region import MappedRegion
from kvtide.metrics import Counters
from kvtide.movers.base import CellPlace, Mover
from kvtide.movers.compare import DIFFERENCE_MAX
from kvtide.processors import processors_of_process, use_processors
from kvtide.wire.frames import close_all
from kvtide.wire.link import Link
from kvtide.wire.places import Places

logger = logging.getLogger("vllm.kvtide")

LOAD_S_MAX = T_LOAD_MS / 1000
"""T_load: a load that waits while no piece of any load ends for so long is given up."""
IDLE_WAIT_S = 0.005
"""In a step without a forward, how long to wait for a running load instead of spinning."""
PREFILL_TOKENS_MIN = 128
"""A step of so many tokens is taken for a prefill, and its time tells how quick those are."""
LEAVE_S_MAX = 5.0
"""How long the link waits until regions of a node that is gone are unmapped: copies end first."""
MOVERS_MAX = 2
"""Two reach what memory gives (`movers.host`); more would only take processors from the engine."""
VERDICTS_MAX = 64
"""Kept for a node that cannot be reached; of more, those that came last."""
SPLIT_BYTES = 4 << 20
"""A load of more than twice this is copied in halves, by two threads. More pieces would each wake
the engine's thread, which then wants the interpreter: with 8 MiB at a time a load has 0.93 of the
speed that it has in halves."""


class _Load:
    """One load on its way; pieces count down."""

    def __init__(self, job: LoadJob, piece_count: int) -> None:
        self.job = job
        self.piece_count = piece_count
        self.failed: set[int] = set()
        self.started_s = time.monotonic()


@dataclass(frozen=True, slots=True)
class _Piece:
    """Blocks of a load that one thread copies."""

    load: _Load
    block_ids: list[int]
    runs: list[Run]


class WorkerSide:
    """One worker's half of the connector."""

    def __init__(
        self, engine_id: str, places: Places, facts: WorkerFacts, is_writer: bool, mover: Mover
    ) -> None:
        self._engine_id = engine_id
        self._incarnation = secrets.token_bytes(16)
        self._facts = facts
        self._is_writer = is_writer
        self._mover = mover
        self._lock = threading.Lock()
        self._connection: int | None = None
        self._node = b""
        self._held: set[int] = set()
        self._unsent: list[m.Stored] = []
        """Answers of held grants that no connection has taken."""
        self._verdicts: deque[m.Compared] = deque(maxlen=VERDICTS_MAX)
        self._plan = StepPlan()
        self._loads: dict[str, _Load] = {}
        self._ended: queue.SimpleQueue[_Load] = queue.SimpleQueue()
        self._load_errors: set[int] = set()
        self.counters = Counters()
        self._processors = processors_of_process()
        self._pieces: queue.SimpleQueue[_Piece | None] = queue.SimpleQueue()
        self._is_closed = False
        self._forward_began_s = time.monotonic()
        self._progress_s = 0.0  # when a piece ended last
        self._movers = [
            threading.Thread(target=self._move, name=f"kvtide-mover-{number}", daemon=True)
            for number in range(min(MOVERS_MAX, len(self._processors)))
        ]
        self._regions = MappedRegions(self._region_open, self._region_failed, self._region_left)
        self._link = Link(places.socket, self, "kvtide-worker")

    def start(self) -> None:
        """Start all threads, and look for the node; where one cannot be had, none is left."""
        with contextlib.ExitStack() as failed:
            failed.callback(self.close, 0.0)
            for mover_thread in self._movers:
                mover_thread.start()
            self._regions.start()
            self._link.start()
            failed.pop_all()

    # ---- the step, on the main thread

    def handle_preemptions(self, plan: StepPlan) -> None:
        """Before the forward: copy what it may overwrite."""
        self._store_all(plan.rescues)
        self._forward_began_s = time.monotonic()

    def start_loads(self, plan: StepPlan) -> None:
        """Hand loads to the mover threads; each will be reported once, whatever happens."""
        self._plan = plan
        for job in plan.loads:
            self._start_load(job)
        if self._facts.rank == 0 and plan.token_count >= PREFILL_TOKENS_MIN:
            # vLLM calls this right after a forward, which on a CPU has ended by then.
            took_s = time.monotonic() - self._forward_began_s
            self.counters.add("prefill_tokens", plan.token_count)
            self.counters.add("prefill_us", int(took_s * 1e6))

    def _start_load(self, job: LoadJob) -> None:
        try:
            parts = self._cut(job)
        except Exception:
            logger.exception("kvtide: a load failed; the engine computes its blocks")
            parts = [(job.block_ids, [])]
        load = self._loads[job.request_id] = _Load(job, len(parts))
        for block_ids, runs in parts:
            if self._is_closed:
                load.failed.update(block_ids)
                self._ended.put(load)
            else:
                self._pieces.put(_Piece(load, block_ids, runs))

    def wait_for_save(self, plan: StepPlan) -> None:
        """After the forward: copy this step's stores, compare its canaries."""
        self._store_all(plan.stores)
        for job in plan.canaries:
            self._verdicts.append(self._compare(job))
        self._say_verdicts()

    def take_ended(self) -> set[str]:
        """The requests whose loads have ended since the last call, each exactly once."""
        ended: set[str] = set()
        until_s = time.monotonic() + (0.0 if self._plan.has_forward else IDLE_WAIT_S)
        while self._loads:
            wait_s = 0.0 if ended else max(0.0, until_s - time.monotonic())
            try:
                load = self._ended.get(timeout=wait_s) if wait_s else self._ended.get_nowait()
            except queue.Empty:
                break
            load.piece_count -= 1
            if load.piece_count:
                continue
            del self._loads[load.job.request_id]
            ended.add(load.job.request_id)
            self._load_errors |= load.failed
            good = len(load.job.block_ids) - len(load.failed)
            self.counters.add("loaded_bytes", good * self._mover.payload_bytes)
            self.counters.observe_s("load", time.monotonic() - load.started_s)
        return ended

    def take_load_errors(self) -> set[int]:
        """Blocks whose load failed, of the loads just reported."""
        errors, self._load_errors = self._load_errors, set()
        return errors

    # ---- loads, on mover threads

    def _cut(self, job: LoadJob) -> list[tuple[list[int], list[Run]]]:
        """One piece, or two halves where the copy is worth two threads."""
        size_bytes = len(job.block_ids) * self._mover.payload_bytes
        if size_bytes <= 2 * SPLIT_BYTES or len(self._processors) < 2:
            return [(job.block_ids, job.runs)]
        half = len(job.block_ids) // 2
        first: list[Run] = []
        second: list[Run] = []
        position = 0
        for run in job.runs:
            low = min(run.cell_count, max(0, half - position))
            if low:
                first.append(run.part(0, low))
            if low < run.cell_count:
                second.append(run.part(low, run.cell_count))
            position += run.cell_count
        return [(job.block_ids[:half], first), (job.block_ids[half:], second)]

    def _move(self) -> None:
        """Copy and verify one piece after the other; each is reported, whatever happens."""
        use_processors(self._processors)
        while (piece := self._pieces.get()) is not None:
            try:
                failed = self._copy_in(piece.load, piece.block_ids, piece.runs)
            except Exception:
                logger.exception("kvtide: a load failed; the engine computes its blocks")
                failed = set(piece.block_ids)
            self._progress_s = time.monotonic()
            piece.load.failed |= failed
            self._ended.put(piece.load)

    def _copy_in(self, load: _Load, block_ids: list[int], runs: list[Run]) -> set[int]:
        waited_s = time.monotonic() - max(load.started_s, self._progress_s)
        if self._is_closed or waited_s > LOAD_S_MAX:
            return set(block_ids)
        with self._regions.using({run.region for run in runs}) as regions:
            known, failed = _split(block_ids, runs, regions)
            self._mover.load([block_id for block_id, _ in known], [cell for _, cell in known])
            return failed | _moved(block_ids, runs, regions)

    # ---- canaries, on the main thread

    def _compare(self, job: CanaryJob) -> m.Compared:
        """How blocks that were computed compare with the cells that might have been loaded."""
        verdict, difference = Verdict.NO_VERDICT, 0.0
        try:
            with self._regions.using({run.region for run in job.runs}) as regions:
                known, failed = _split(job.block_ids, job.runs, regions)
                if not failed:
                    blocks, cells = zip(*known, strict=True)
                    found = self._mover.compare(blocks, cells, self._facts.numbers)
                    del cells
                    if not _moved(job.block_ids, job.runs, regions):
                        verdict, difference = _verdict(found), found
                del known
        except Exception:
            logger.exception("kvtide: a canary was not compared; the engine goes on")
        if verdict is Verdict.DIFFERS:
            logger.error(
                "kvtide: a chunk was computed that differs by %.3g from what is kept"
                " for it: what was generated after hits may be wrong",
                difference,
            )
        return m.Compared(job.fingerprint, verdict, difference)

    def _say_verdicts(self) -> None:
        """Tell the node what canaries have shown, as soon as it can be told; any thread."""
        while self._verdicts:
            with contextlib.suppress(IndexError):  # another thread has said it
                verdict = self._verdicts.popleft()
                if self._connection is None or not self._link.send(verdict):
                    self._verdicts.appendleft(verdict)
                    return

    # ---- stores, on the main thread

    def _store_all(self, jobs: Sequence[StoreJob]) -> None:
        if not jobs or not self._is_writer:
            return
        started_s = time.monotonic()
        self._answer([m.Stored(job.grant, self._store(job)) for job in jobs])
        self.counters.observe_s("store", time.monotonic() - started_s)

    def _store(self, job: StoreJob) -> bool:
        """Copy the blocks of a grant; whether all of it is there."""
        with self._lock:
            self._held.add(job.grant)
            is_ours = self._connection == job.connections[self._facts.shard_index]
        if not is_ours:
            # A connection before ours: the node has taken it back, and ignores this. One that the
            # node has taken, and our link's thread not yet: only our word ends the grant.
            return False
        try:
            with self._regions.using({job.run.region}) as regions:
                known, failed = _split(job.block_ids, [job.run], regions)
                if not failed:
                    self._mover.store([block for block, _ in known], [cell for _, cell in known])
                del known
        except Exception:
            logger.exception("kvtide: a store failed; the engine goes on")
            return False
        if not failed:
            self.counters.add("stored_bytes", len(job.block_ids) * self._mover.payload_bytes)
        return not failed

    def _answer(self, answers: Sequence[m.Stored] = ()) -> None:
        """Say that grants are answered, those before that could not be sent as well.

        Until that is sent they stay held, for hellos to name.
        """
        with self._lock:
            self._unsent += answers
            sent = self._link.send_all(self._unsent) if self._connection is not None else 0
            self._held.difference_update(answer.grant for answer in self._unsent[:sent])
            del self._unsent[:sent]

    # ---- the link, on its thread

    def hello(self) -> m.Message:
        """Name what this process may still write and read, and forget the old connection."""
        with self._lock:
            self._connection = None
            held = sorted(self._held)
        mapped, mapping = self._regions.named()
        facts = self._facts
        return m.WorkerHello(
            wire_version=m.WIRE_VERSION,
            engine_id=self._engine_id,
            incarnation=self._incarnation,
            pid=os.getpid(),
            rank=facts.rank,
            shard=facts.shard_index,
            shard_count=facts.shard_count,
            is_writer=self._is_writer,
            cell_bytes=self._mover.cell_bytes,
            facts=msgspec.to_builtins(facts),
            grants_held=held,
            regions_mapped=mapped,
            node=self._node,
            regions_mapping=mapping,
        )

    def on_up(self, welcome: m.Welcome) -> None:
        """The node has taken us: grants of this connection count."""
        self._regions.say_changes()
        is_another = welcome.node != self._node
        if is_another:
            self._regions.leave_all()
            self._regions.wait_empty(LEAVE_S_MAX)
        self._node = welcome.node
        with self._lock:
            self._connection = welcome.connection
            if is_another:  # a node takes nothing from the grants of one before it
                self._held.difference_update(answer.grant for answer in self._unsent)
                self._unsent.clear()
        self._answer()

    def on_message(self, message: m.Message, descriptors: list[int]) -> None:
        """Regions come and go."""
        try:
            if isinstance(message, m.RegionOffer) and len(descriptors) == 2:
                self._regions.offer(
                    message.region, message.cell_count, message.cell_bytes, descriptors
                )
            elif isinstance(message, m.RegionLeave):
                self._regions.leave(message.region)
        finally:
            close_all(descriptors)

    def on_down(self, *, node_is_dead: bool) -> None:
        """Mappings outlive a connection, not a node."""
        with self._lock:
            self._connection = None
        if node_is_dead:
            self._regions.leave_all()
            self._regions.wait_empty(LEAVE_S_MAX)

    def on_refused(self, refused: m.Refused) -> None:
        """The scheduler role says why in the engine's log."""

    def on_absent(self) -> None:
        """The scheduler role starts nodes."""

    def on_pulse(self) -> None:
        """Say what there was no room for."""
        self._answer()
        self._say_verdicts()

    def _region_open(self, number: int) -> None:
        self._link.send(m.RegionOpen(number))

    def _region_failed(self, number: int, detail: str) -> None:
        self._link.send(m.RegionFailed(number, detail[:400]))

    def _region_left(self, number: int) -> None:
        self._link.send(m.RegionLeft(number))

    def close(self, timeout_s: float) -> None:
        """End threads and mappings in bounded time; nothing is written from now on."""
        with self._lock:
            self._connection = None
        deadline_s = time.monotonic() + timeout_s
        self._is_closed = True  # what waits still fails and is reported
        for _ in self._movers:
            self._pieces.put(None)
        with contextlib.ExitStack() as parts:  # each, whatever becomes of those before it
            parts.callback(lambda: self._regions.close(max(0.0, deadline_s - time.monotonic())))
            parts.callback(self._link.close, timeout_s / 2)


def _verdict(difference: float) -> Verdict:
    return Verdict.EQUAL if difference <= DIFFERENCE_MAX else Verdict.DIFFERS


def _moved(
    block_ids: Sequence[int], runs: Sequence[Run], regions: dict[int, MappedRegion]
) -> set[int]:
    """The blocks whose cells were lent to somebody else since, or that no run names."""
    moved: set[int] = set()
    position = 0
    for run in runs:
        own = block_ids[position : position + run.cell_count]
        mapped = regions.get(run.region)
        if mapped is not None:
            seen = mapped.generations[run.first_cell : run.end_cell].tolist()
            moved.update(
                block_id
                for block_id, found in zip(own, seen, strict=True)
                if found != run.generation
            )
        position += run.cell_count
    return moved.union(block_ids[position:])


def _split(
    block_ids: Sequence[int], runs: Sequence[Run], regions: dict[int, MappedRegion]
) -> tuple[list[tuple[int, CellPlace]], set[int]]:
    """Blocks with their cells, as far as their regions are mapped; and the other blocks."""
    known: list[tuple[int, CellPlace]] = []
    failed: set[int] = set()
    blocks = iter(block_ids)
    for run in runs:
        region = regions.get(run.region)
        for cell in range(run.first_cell, run.end_cell):
            block_id = next(blocks)
            if region is None or cell >= region.cell_count:
                failed.add(block_id)
            else:
                known.append((block_id, CellPlace(region.cells, cell)))
    return known, failed
