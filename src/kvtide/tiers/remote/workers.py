"""The threads of a tier on a server, and the queues to and from them.

    owner ── lookups ────────► 1 × ask ───┐
    owner ── loads ──────────► 2 × load ──┼─► results ── wake ──► owner
    owner ── stores, clears ─► 1 × write ─┘      1 × sums

Each thread has a session of its own. Small questions do not stand behind large values, and stores
are sent one after the other: so a parent is there before its child is sent, and a clear lies
between what was stored before and what is stored after it, without anybody having to see to it.
What clears have left is given back between stores. The thread of the sums makes the headers of
stores that wait, with their checksums, while another is sent.

Ownership: all queues are under `_lock`, with a condition for each kind of thread. Threads are
started by `start` and joined by `stop`; a thread that waits holds no cells.
"""

import functools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from kvtide.core.records import Record
from kvtide.errors import ConfigError, PlaceFailed
from kvtide.tiers.base import LoadJob, LoadOutcome, LookupJob, StoreJob, StoreOutcome
from kvtide.tiers.pending import Pending
from kvtide.tiers.remote import parts
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
    """A load."""

    job: LoadJob


@dataclass(slots=True, eq=False)
class StoreOp:
    """A store. `headers` are there once they are made; one that `is_doomed` is not carried out."""

    job: StoreJob
    pending: Pending
    write_id: bytes = field(default_factory=parts.random_write_id)
    headers: list[memoryview] | None = None

    @property
    def is_doomed(self) -> bool:
        """Whether its owner has dropped it."""
        return self.pending.is_doomed


@dataclass(slots=True, eq=False)
class ClearOp:
    """A clear; `count` is how many records there were, once it `is_done`."""

    scope: Scope
    is_done: threading.Event = field(default_factory=threading.Event)
    count: int = 0


@dataclass(slots=True, eq=False)
class ProbeOp:
    """Does the place work? Asks for its numbers."""


@dataclass(slots=True, eq=False)
class SweepOp:
    """Give back some of what clears have left."""


Op: TypeAlias = AskOp | LoadOp | StoreOp | ClearOp | ProbeOp | SweepOp


@dataclass(slots=True)
class Ended:
    """How an operation ended: with `error`, or as it says."""

    op: Op
    error: PlaceFailed | None = None
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
        self._for_sums = threading.Condition(self._lock)
        self._for_quiet = threading.Condition(self._lock)
        self._asks: deque[AskOp] = deque()
        self._loads: deque[LoadOp] = deque()
        self._stores: deque[StoreOp] = deque()
        self._clears: deque[ClearOp] = deque()
        self._probes: deque[ProbeOp] = deque()
        self._summing: StoreOp | None = None
        self._is_storing = False
        self._is_clear_due = False
        self._is_dirty = False
        self._is_stopping = False
        self._busy = 0
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
        targets: list[tuple[str, Callable[[], None]]] = [("sums", self._run_sums)]
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
                raise ConfigError(
                    f"{self._name}: no thread could be started ({error}); raise the limit of"
                    " processes (ulimit -u, pids.max)"
                ) from error
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
            self._for_sums.notify()

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

    def take_back(self) -> tuple[list[AskOp], list[LoadOp], list[StoreOp]]:
        """What no thread has begun is the caller's again."""
        with self._lock:
            taken = list(self._asks), list(self._loads), self._taken_stores()
            self._asks.clear()
            self._loads.clear()
            return taken

    def take_back_stores(self) -> list[StoreOp]:
        """The same of stores alone."""
        with self._lock:
            return self._taken_stores()

    def _taken_stores(self) -> list[StoreOp]:
        taken = [op for op in self._stores if op is not self._summing]
        for op in taken:
            self._stores.remove(op)
        return taken

    def stop(self, timeout_s: float) -> None:
        """Let what runs end, for so long; then break it off, and end the threads."""
        until = time.monotonic() + timeout_s
        with self._lock:
            self._is_stopping, self._is_dirty = True, False
            self._for_quiet.wait_for(lambda: not self._busy, timeout_s / 2)
            self._is_ending = True
            self._for_asks.notify_all()
            self._for_loads.notify_all()
            self._for_writes.notify_all()
            self._for_sums.notify_all()
        for session in self._sessions:
            session.interrupt()
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))

    # ---- the threads

    def _run(self, session: Session, next_op: Callable[[], Op | None]) -> None:
        while self._run_one(session, next_op):
            pass
        session.close()

    def _run_one(self, session: Session, next_op: Callable[[], Op | None]) -> bool:
        op = next_op()
        if op is None:
            return False
        ended = self._ended(session, op)
        with self._lock:
            self._busy -= 1
            self._is_storing &= not isinstance(op, StoreOp)
            self._for_quiet.notify_all()
        if ended is not None:
            self.results.append(ended)
            self._wake()
        return True

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
            if self._clears and self._is_clear_due:
                self._is_clear_due = False
                self._busy += 1
                return self._clears[0]
            if self._stores or self._probes or self._is_ending:
                return self._begun(self._probes or self._stores)
            self._busy += 1
            return SweepOp()

    def _has_writes(self) -> bool:
        if self._is_ending or self._stores or self._probes:
            return True
        return bool(self._clears and self._is_clear_due) or self._is_dirty

    def _begun(self, queue: deque[Any]) -> Op | None:
        if self._is_ending or not queue:
            return None
        self._busy += 1
        op: Op = queue.popleft()
        if isinstance(op, StoreOp):
            self._is_storing = True
            self._for_sums.notify()
        return op

    def _ended(self, session: Session, op: Op) -> Ended | None:
        try:
            return self._carried_out(session, op)
        except PlaceFailed as error:
            fault = error
        except Exception as error:
            logger.exception("an operation of %s ended by a bug", self._name)
            fault = PlaceFailed(f"{type(error).__name__}: {error}")
        if isinstance(op, SweepOp | StoreOp):
            self._is_dirty = False  # until a probe has shown that the place works
        return Ended(op, PlaceFailed(str(fault)))  # without a traceback, which would hold cells

    def _carried_out(self, session: Session, op: Op) -> Ended | None:
        match op:
            case AskOp(job):
                found, may_go_on = session.find(job)
                return Ended(op, found=found, may_go_on=may_go_on)
            case LoadOp(job):
                return Ended(op, outcome=session.load(job.record, job.cells))
            case StoreOp() as op:
                self._clear_all(session)
                self._sweep(session)
                if op.is_doomed:
                    return Ended(op, outcome=StoreOutcome.NOT_ANCHORED)
                with self._lock:
                    after = self._stores[0] if self._stores and not self._clears else None
                following = None if after is None or after.is_doomed else self._put(after)
                return Ended(op, outcome=session.store(self._put(op), following))
            case ProbeOp():
                self._clear_all(session)
                session.survey()
                self._is_dirty = not self._is_stopping
                return Ended(op)
            case ClearOp():
                self._clear_all(session)
                return Ended(op)
            case SweepOp():
                self._sweep(session)
        return None

    # ---- headers

    def _put(self, op: StoreOp) -> Put:
        headers = functools.partial(self._headers, op)
        return Put(op.job.record, op.write_id, op.job.cells, headers)

    def _headers(self, op: StoreOp) -> list[memoryview]:
        """Of a store that is being sent; another thread may be making them."""
        with self._lock:
            self._for_quiet.wait_for(lambda: self._summing is not op)
        if op.headers is None:
            op.headers = parts.headers_of(op.job.record, op.write_id, op.job.cells)
        return op.headers

    def _run_sums(self) -> None:
        while self._sum_one():
            pass

    def _sum_one(self) -> bool:
        with self._lock:
            self._for_sums.wait_for(lambda: self._unsummed() or self._is_ending)
            op = self._summing = None if self._is_ending else self._unsummed()
        if op is None:
            return False
        try:
            op.headers = parts.headers_of(op.job.record, op.write_id, op.job.cells)
        except Exception:
            logger.exception("checksums ended by a bug")  # the writing thread meets it too
        with self._lock:
            self._summing = None
            self._for_quiet.notify_all()
        return True

    def _unsummed(self) -> StoreOp | None:
        """The next one without; while nothing is sent, the first is about to be."""
        waiting = self._stores if self._is_storing else ()
        return next((op for op in waiting if op.headers is None), None)

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
