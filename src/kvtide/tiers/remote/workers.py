"""The threads of a tier on a server, and the queues to and from them.

    owner ── lookups ────────► 1 × ask ───┐
    owner ── loads ──────────► 2 × load ──┼─► results ── wake ──► owner
    owner ── stores, clears ─► 1 × write ─┘

Each thread has a session of its own. Small questions do not stand behind large values, and stores
are sent one after the other: so a parent is there before its child is complete, and a clear lies
between what was stored before and what is stored after it, without anybody having to see to it.
What clears have left is given back between stores.

Ownership: all queues are under `_lock`, with a condition for each kind of thread. Threads are
started by `start` and joined by `stop`; a thread that waits holds no cells.
"""

import functools
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeAlias, TypeVar

from kvtide.codec.record import WRITE_ID_BYTES
from kvtide.core.records import Record
from kvtide.errors import PlaceFailed, no_thread
from kvtide.tiers.base import LoadJob, LoadOutcome, LookupJob, StoreJob, StoreOutcome
from kvtide.tiers.pending import Pending
from kvtide.tiers.remote.session import Put, Session
from kvtide.tiers.scope import Scope

logger = logging.getLogger("kvtide.tiers")

LOAD_THREADS = 2
"""One proves what it has received while another receives."""


@dataclass(slots=True, eq=False)
class AskOp:
    """A lookup."""

    job: LookupJob


@dataclass(slots=True, eq=False)
class LoadOp:
    """A load; one that `is_probe` is the only one until it has ended."""

    job: LoadJob
    is_probe: bool = False


@dataclass(slots=True, eq=False)
class StoreOp:
    """A store; one that `is_doomed` is not begun."""

    job: StoreJob
    pending: Pending
    write_id: bytes = field(default_factory=lambda: os.urandom(WRITE_ID_BYTES))

    @property
    def is_doomed(self) -> bool:
        """Whether its owner has dropped it."""
        return self.pending.is_doomed


@dataclass(slots=True, eq=False)
class ClearOp:
    """A clear; `count` is how many records there were, once it `is_done`, as the place has it."""

    scope: Scope
    is_done: threading.Event = field(default_factory=threading.Event)
    count: int | None = 0


@dataclass(slots=True, eq=False)
class ProbeOp:
    """Does the place work? Asks for its numbers."""


@dataclass(slots=True, eq=False)
class SweepOp:
    """Give back some of what clears have left."""


AnyOp = TypeVar("AnyOp", AskOp, LoadOp, StoreOp)
Op: TypeAlias = AskOp | LoadOp | StoreOp | ClearOp | ProbeOp | SweepOp


@dataclass(slots=True)
class Ended:
    """How an operation ended: with `error`, or as it says.

    Attributes:
        tells_of_place: whether the place works; not where it was not asked, or where another
            operation tells of the same error.
    """

    op: Op
    error: PlaceFailed | None = None
    tells_of_place: bool = True
    outcome: LoadOutcome | StoreOutcome | None = None
    found: list[Record] = field(default_factory=list)
    may_go_on: bool = False


class Workers:
    """Runs operations; `results` has how they ended."""

    def __init__(
        self, name: str, open_session: Callable[[], Session], wake: Callable[[], None]
    ) -> None:
        self.results: deque[Ended] = deque()
        self._name = name
        self._open_session = open_session
        self._wake = wake
        self._lock = threading.Lock()
        self._for_asks = threading.Condition(self._lock)
        self._for_loads = threading.Condition(self._lock)
        self._for_writes = threading.Condition(self._lock)
        self._for_quiet = threading.Condition(self._lock)
        self._asks: deque[AskOp] = deque()
        self._loads: deque[LoadOp] = deque()
        self._stores: deque[StoreOp] = deque()
        self._clears: deque[ClearOp] = deque()
        self._probes: deque[ProbeOp] = deque()
        self._running: set[Op] = set()
        self._is_clear_due = False
        self._is_dirty = False
        self._is_stopping = False
        self._is_ending = False
        self._sessions: list[Session] = []
        self._threads: list[threading.Thread] = []

    def start(self) -> None:
        """Start the threads.

        Raises:
            ConfigError: the machine grants none; none runs then.
        """
        runs = [("ask", self._next_ask), ("write", self._next_write)]
        runs += [(f"load-{n}", self._next_load) for n in range(LOAD_THREADS)]
        targets: list[tuple[str, Callable[[], None]]] = []
        for kind, next_op in runs:
            session = self._open_session()
            self._sessions.append(session)
            targets.append((kind, functools.partial(self._run, session, next_op)))
        for kind, target in targets:
            name = f"kvtide-{self._name}-{kind}"
            thread = threading.Thread(target=target, name=name, daemon=True)
            try:
                thread.start()
            except RuntimeError as error:
                self.stop(1.0)
                raise no_thread(self._name, error) from error
            self._threads.append(thread)

    # ---- for the owner

    def ask(self, op: AskOp) -> None:
        """Queue a lookup."""
        with self._lock:
            self._asks.append(op)
            self._for_asks.notify()

    def load(self, op: LoadOp) -> None:
        """Queue a load."""
        with self._lock:
            self._loads.append(op)
            self._for_loads.notify()

    def store(self, op: StoreOp) -> None:
        """Queue a store; stores happen in the order of these calls."""
        with self._lock:
            self._stores.append(op)
            self._for_writes.notify()

    def clear(self, op: ClearOp) -> None:
        """Have it done before any store that has not begun; again and again until it is done."""
        with self._lock:
            self._clears.append(op)
            self._is_clear_due = True
            self._for_writes.notify()

    def probe(self) -> None:
        """Ask whether the place works, and its numbers."""
        with self._lock:
            self._probes.append(ProbeOp())
            self._for_writes.notify()

    def take_back_asks(self) -> list[AskOp]:
        """Lookups that no thread has begun are the caller's again."""
        return self._taken(self._asks)

    def take_back_loads(self) -> list[LoadOp]:
        """The same of loads."""
        return self._taken(self._loads)

    def take_back_stores(self) -> list[StoreOp]:
        """The same of stores."""
        return self._taken(self._stores)

    def _taken(self, queue: deque[AnyOp]) -> list[AnyOp]:
        with self._lock:
            taken = list(queue)
            queue.clear()
            return taken

    def next_store(self) -> StoreOp | None:
        """What the writing thread will begin next."""
        with self._lock:
            return self._stores[0] if self._stores else None

    def running(self) -> set[Op]:
        """What threads have begun and not ended."""
        with self._lock:
            return set(self._running)

    def stop(self, timeout_s: float) -> None:
        """Let what runs end, for so long; then break it off, and end the threads."""
        until = time.monotonic() + timeout_s
        with self._lock:
            self._is_stopping, self._is_dirty = True, False
            self._for_quiet.wait_for(self._is_quiet, timeout_s / 2)
            self._is_ending = True
            self._for_asks.notify_all()
            self._for_loads.notify_all()
            self._for_writes.notify_all()
        for session in self._sessions:
            session.interrupt()
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))

    def _is_quiet(self) -> bool:
        """Whether nothing runs, nor a clear that has waited for what ran."""
        return not self._running and not (self._clears and self._is_clear_due)

    # ---- the threads

    def _run(self, session: Session, next_op: Callable[[], Op | None]) -> None:
        while self._run_one(session, next_op):
            pass
        session.close()

    def _run_one(self, session: Session, next_op: Callable[[], Op | None]) -> bool:
        op = next_op()
        if op is None:
            return False
        if isinstance(op, StoreOp):
            waiting = [op]
            del op  # it may end long before the call that begins with it
            self._store(session, waiting)
        else:
            self._say(self._ended(session, op))
        return True

    def _say(self, ended: Ended) -> None:
        with self._lock:
            self._running.discard(ended.op)
            self._for_quiet.notify_all()
        if not isinstance(ended.op, SweepOp) or ended.error is not None:
            self.results.append(ended)
            self._wake()

    def _next_ask(self) -> Op | None:
        with self._lock:
            self._for_asks.wait_for(lambda: self._asks or self._is_ending)
            return self._begun(self._asks)

    def _next_load(self) -> Op | None:
        with self._lock:
            self._for_loads.wait_for(lambda: self._loads or self._is_ending)
            return self._begun(self._loads)

    def _next_write(self) -> Op | None:
        with self._lock:
            self._for_writes.wait_for(self._has_writes)
            op: Op
            if self._clears and self._is_clear_due:
                self._is_clear_due = False
                op = self._clears[0]
            elif self._stores or self._probes or self._is_ending:
                return self._begun(self._probes or self._stores)
            else:
                op = SweepOp()
            self._running.add(op)
            return op

    def _has_writes(self) -> bool:
        if self._is_ending or self._stores or self._probes:
            return True
        return bool(self._clears and self._is_clear_due) or self._is_dirty

    def _begun(self, queue: deque[Any]) -> Op | None:
        if self._is_ending or not queue:
            return None
        op: Op = queue.popleft()
        self._running.add(op)
        return op

    def _ended(self, session: Session, op: Op) -> Ended:
        try:
            return self._carried_out(session, op)
        except Exception as error:
            if isinstance(op, SweepOp):
                self._is_dirty = False  # until a probe has shown that the place works
            return Ended(op, self._fault(error))

    def _fault(self, error: Exception) -> PlaceFailed:
        """What it tells, without a traceback, which would hold cells."""
        if isinstance(error, PlaceFailed):
            return PlaceFailed(str(error))
        logger.error("an operation of %s ended by a bug", self._name, exc_info=error)
        return PlaceFailed(f"{type(error).__name__}: {error}")

    def _carried_out(self, session: Session, op: Op) -> Ended:
        match op:
            case AskOp(job):
                found, may_go_on = session.find(job)
                tells = not session.knows_names
                return Ended(op, tells_of_place=tells, found=found, may_go_on=may_go_on)
            case LoadOp(job):
                outcome = session.load(job.record, job.cells)
                tells = not session.knows_names or outcome is LoadOutcome.LOADED
                return Ended(op, outcome=outcome, tells_of_place=tells)
            case ProbeOp():
                self._clear_all(session)
                session.survey()
                self._is_dirty = not self._is_stopping
            case ClearOp():
                self._clear_all(session)
            case SweepOp():
                self._sweep(session)
        return Ended(op)

    def _sweep(self, session: Session) -> None:
        if self._is_dirty:
            self._is_dirty = session.sweep() and not self._is_stopping

    def _clear_all(self, session: Session) -> None:
        while self._clears:
            op = self._clears[0]
            op.count = session.clear(op.scope)
            with self._lock:
                self._clears.popleft()
            self._is_dirty = not self._is_stopping
            op.is_done.set()

    # ---- stores

    def _store(self, session: Session, waiting: list[StoreOp]) -> None:
        """This one, and those behind it as long as nothing else is to be done."""
        begun = {op.write_id: op for op in waiting}
        fault = None

        def next_put() -> Put | None:
            op = waiting.pop() if waiting else self._next_store()
            while op is not None and op.is_doomed:
                outcome = StoreOutcome.NOT_ANCHORED
                self._say(Ended(op, tells_of_place=False, outcome=outcome))
                begun.pop(op.write_id, None)
                op = self._next_store()
            if op is None:
                return None
            begun[op.write_id] = op
            return Put(op.job.record, op.write_id, op.job.cells)

        def ended(put: Put, outcome: StoreOutcome) -> None:
            tells = not session.knows_names or outcome is StoreOutcome.STORED
            op = begun.pop(put.write_id)
            self._say(Ended(op, outcome=outcome, tells_of_place=tells))

        try:
            self._clear_all(session)
            self._sweep(session)
            session.store(next_put, ended)
        except Exception as error:
            self._is_dirty = False
            fault = self._fault(error)
        for number, op in enumerate(begun.values()):
            assert fault is not None, op.job.number
            self._say(Ended(op, fault, tells_of_place=number == 0))

    def _next_store(self) -> StoreOp | None:
        with self._lock:
            if self._clears or self._probes or self._is_dirty or self._is_stopping:
                return None
            op = self._begun(self._stores)
        assert op is None or isinstance(op, StoreOp), op
        return op
