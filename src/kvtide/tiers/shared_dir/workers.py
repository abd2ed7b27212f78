"""The I/O threads of a shared directory, and the queues to and from them.

    owner ── looks, loads ──► 4 × kvtide-shared-read ──┐
    owner ── changes ───────► 2 × kvtide-shared-write ─┴─► results ── wake ──► owner

A server answers several calls at once, so threads are what fills the way to it. Loads and stores
have threads of their own: neither waits for the other here.

Ownership: the queues are under `_lock`; results are a deque, whose ends are safe by themselves.
Threads are started by `start`, and joined by `stop`. The last of them leaves the place: who stops
them does not wait for a server that hangs then.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable

from kvtide.errors import bare, no_thread
from kvtide.tiers.shared_dir.ops import (
    ClearOp,
    Ended,
    Hands,
    LoadOp,
    LookOp,
    Op,
    ReadOp,
    StoreOp,
    WriteOp,
)

logger = logging.getLogger("kvtide.shared_dir")

READ_THREADS = 4
WRITE_THREADS = 2
START_S_MAX = 1.0


class Workers:
    """Runs operations; `results` has how they ended."""

    def __init__(self, hands: Hands, wake: Callable[[], None]) -> None:
        self.results: deque[Ended] = deque()
        self._hands = hands
        self._wake = wake
        self._lock = threading.Lock()
        self._to_read = threading.Condition(self._lock)
        self._to_write = threading.Condition(self._lock)
        self._reads: deque[Op] = deque()
        self._writes: deque[Op] = deque()
        self._running: set[Op] = set()
        self._thread_count = 0
        self._is_ending = False
        self._threads: list[threading.Thread] = []

    def start(self) -> None:
        """Start the threads.

        Raises:
            ConfigError: the machine grants none; none runs then.
        """
        for n in range(READ_THREADS + WRITE_THREADS):
            what = "read" if n < READ_THREADS else "write"
            condition = self._to_read if n < READ_THREADS else self._to_write
            queue = self._reads if n < READ_THREADS else self._writes
            name = f"kvtide-shared-{what}-{n}"
            thread = threading.Thread(
                target=self._run, args=(condition, queue), name=name, daemon=True
            )
            with self._lock:
                self._thread_count += 1
            try:
                thread.start()
            except RuntimeError as error:
                self._end_thread()
                self.stop(START_S_MAX)
                raise no_thread("a shared_dir", error) from error
            self._threads.append(thread)

    # ---- for the owner

    def read(self, op: ReadOp) -> None:
        """Queue a look, ahead of loads that wait, or a load."""
        with self._lock:
            if isinstance(op, LoadOp):
                self._reads.append(op)
            else:
                self._reads.appendleft(op)
            self._to_read.notify()

    def write(self, op: WriteOp) -> None:
        """Queue a change; a clear is done next."""
        with self._lock:
            if isinstance(op, ClearOp):
                self._writes.appendleft(op)
            else:
                self._writes.append(op)
            self._to_write.notify()

    def take_loads(self) -> list[LoadOp]:
        """Loads that no thread has begun; they are the caller's again."""
        with self._lock:
            taken = [op for op in self._reads if isinstance(op, LoadOp)]
            for op in taken:
                self._reads.remove(op)
            return taken

    def take_stores(self) -> list[StoreOp]:
        """The same of stores."""
        with self._lock:
            taken = [op for op in self._writes if isinstance(op, StoreOp)]
            for op in taken:
                self._writes.remove(op)
            return taken

    def running_reads(self) -> set[ReadOp]:
        """Looks and loads that threads have begun and not ended."""
        with self._lock:
            return {op for op in self._running if isinstance(op, LookOp | LoadOp)}

    @property
    def are_writing(self) -> bool:
        """Whether changes are queued, or begun and not ended."""
        with self._lock:
            reads = LookOp | LoadOp
            return bool(self._writes) or any(not isinstance(op, reads) for op in self._running)

    def stop(self, timeout_s: float) -> bool:
        """Carry out what is queued, end the threads, leave the place; whether all that was done
        within this time."""
        with self._lock:
            self._is_ending = True
            self._to_read.notify_all()
            self._to_write.notify_all()
        until = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))
        return self.are_done

    @property
    def are_done(self) -> bool:
        """Whether no thread runs any more."""
        return not any(thread.is_alive() for thread in self._threads)

    # ---- the threads

    def _run(self, waiting: threading.Condition, queue: "deque[Op]") -> None:
        while self._run_one(waiting, queue):
            pass  # a thread that waits must hold no cells: what it knows of one ends with the call
        self._end_thread()

    def _end_thread(self) -> None:
        with self._lock:
            self._thread_count -= 1
            is_last = not self._thread_count
        if is_last:
            self._hands.leave()

    def _run_one(self, waiting: threading.Condition, queue: "deque[Op]") -> bool:
        with self._lock:
            waiting.wait_for(lambda: queue or self._is_ending)
            if not queue:
                return False
            op = queue.popleft()
            self._running.add(op)
        try:
            ended = self._hands.run(op)
        except Exception as error:
            logger.exception("an operation ended by a bug")
            ended = Ended(op, bare(error))
        if isinstance(op, ClearOp):
            op.is_done.set()
        with self._lock:
            self._running.discard(op)
            self.results.append(ended)
        self._wake()
        return True
