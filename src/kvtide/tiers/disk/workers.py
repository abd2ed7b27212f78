"""The I/O threads of a disk tier, and the queues to and from them.

    owner ── load ops ──► 2 × kvtide-disk-load ───┐
    owner ── write ops ─► 1 × kvtide-disk-write ──┼─► results ── wake ──► owner
                  ▲ 1 × kvtide-disk-sums          │
    owner ── free ops ──► 1 × kvtide-disk-free ───┘

Loads go before stores: the writing thread begins no store while a load waits for a thread. It has
all that is done to a segment until it is sealed; what is done to it later is the freeing thread's:
a hole takes milliseconds on some drives, and a store must not wait for it. The thread of the sums
takes checksums of stores that wait, while another is written.

Ownership: all queues are under `_lock`, with a condition for each kind of thread, so that an
operation wakes one and not all; results are a deque, whose ends are safe by themselves. Threads
are started by `start`, and joined by `stop`.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable

from kvtide.errors import ConfigError
from kvtide.tiers.disk.directory import Directory
from kvtide.tiers.disk.ops import ClearOp, Ended, LoadOp, StoreOp, WriteOp, bare
from kvtide.tiers.disk.reader import Reader
from kvtide.tiers.disk.writer import Writer, parts_of
from kvtide.units import MiB

logger = logging.getLogger("kvtide.disk")

LOAD_THREADS = 2
"""One reads while another proves what it has read; calls of a megabyte and more fill a drive."""
SUMS_AHEAD = 8
"""So many stores have their checksums taken while others are written: the drive never waits."""
TOGETHER_BYTES = 8 * MiB
"""Stores that lie next to one another are written by one call up to this size: small chunks at the
speed of large ones."""
START_S_MAX = 1.0
"""Threads that have nothing to do end in no time."""
YIELD_S_MAX = 1.0
"""So long a store waits for loads that wait, then it goes: a stuck load must not keep all."""


class Workers:
    """Runs operations; `results` has how they ended."""

    def __init__(self, directory: Directory, wake: Callable[[], None]) -> None:
        self.results: deque[Ended] = deque()
        self._wake = wake
        self._directory = directory
        self._lock = threading.Lock()
        self._for_loads = threading.Condition(self._lock)
        self._for_writes = threading.Condition(self._lock)
        self._for_sums = threading.Condition(self._lock)
        self._for_frees = threading.Condition(self._lock)
        self._for_results = threading.Condition(self._lock)
        self._loads: deque[LoadOp] = deque()
        self._running: set[LoadOp] = set()
        self._writes: deque[WriteOp] = deque()
        self._frees: deque[WriteOp] = deque()
        self._parts: dict[WriteOp, list[memoryview]] = {}
        self._summing: WriteOp | None = None
        self._begun: WriteOp | None = None
        self._is_ending = False
        self._threads: list[threading.Thread] = []

    def start(self) -> None:
        """Start the threads.

        Raises:
            ConfigError: the machine grants none; none runs then.
        """
        runs = [(f"kvtide-disk-load-{n}", self._run_loads) for n in range(LOAD_THREADS)]
        runs += [("kvtide-disk-write", self._run_writes), ("kvtide-disk-sums", self._run_sums)]
        runs += [("kvtide-disk-free", self._run_frees)]
        for name, run in runs:
            thread = threading.Thread(target=run, name=name, daemon=True)
            try:
                thread.start()
            except RuntimeError as error:
                self.stop(START_S_MAX)
                raise ConfigError(
                    f"disk {self._directory.path}: no thread could be started ({error}); raise the"
                    " limit of processes (ulimit -u, pids.max)"
                ) from error
            self._threads.append(thread)

    # ---- for the owner

    def load(self, op: LoadOp) -> None:
        """Queue a load."""
        with self._lock:
            self._loads.append(op)
            self._for_loads.notify()

    def write(self, op: WriteOp) -> None:
        """Queue a change; changes happen in the order of these calls."""
        with self._lock:
            self._writes.append(op)
            self._for_writes.notify()
            if isinstance(op, StoreOp):
                self._for_sums.notify()

    def clear(self, op: ClearOp, wait_s: float) -> None:
        """Have it done ahead of all else that is queued, and wait for so long at most."""
        with self._lock:
            ahead = sum(isinstance(one, ClearOp) for one in self._writes)
            self._writes.insert(ahead, op)
            self._for_writes.notify_all()
        if wait_s:
            op.is_done.wait(wait_s)

    def free(self, op: WriteOp) -> None:
        """Queue a change of a sealed segment; these happen in the order of these calls."""
        with self._lock:
            self._frees.append(op)
            self._for_frees.notify()

    def running_loads(self) -> set[LoadOp]:
        """Loads that a thread has begun and not ended."""
        with self._lock:
            return set(self._running)

    def take_loads(self) -> list[LoadOp]:
        """Loads that no thread has begun; they are the caller's again."""
        with self._lock:
            taken = list(self._loads)
            self._loads.clear()
            self._for_writes.notify()
            return taken

    def take_stores(self) -> list[StoreOp]:
        """The same of stores."""
        with self._lock:
            taken = [
                op for op in self._writes if isinstance(op, StoreOp) and op is not self._summing
            ]
            for op in taken:
                self._writes.remove(op)
                self._parts.pop(op, None)
            return taken

    def wait_result(self, timeout_s: float) -> bool:
        """Wait until an operation has ended; whether one has within this time."""
        with self._lock:
            return self._for_results.wait_for(lambda: bool(self.results), timeout_s)

    def stop(self, timeout_s: float) -> bool:
        """Carry out what is queued, end the threads; whether all ended within this time."""
        with self._lock:
            self._is_ending = True
            for condition in (self._for_loads, self._for_writes, self._for_sums, self._for_frees):
                condition.notify_all()
        until = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))
        return self.are_done

    @property
    def are_done(self) -> bool:
        """Whether no thread runs any more."""
        return not any(thread.is_alive() for thread in self._threads)

    # ---- the threads

    def _say(self, ended: Ended) -> None:
        with self._lock:
            self.results.append(ended)
            self._for_results.notify()
        self._wake()

    # A thread that waits must hold no cells: their memory may be wanted back. So each of these
    # functions does one operation, and what it knows of it ends with it.

    def _run_loads(self) -> None:
        reader = Reader(self._directory)
        while self._load_one(reader):
            pass

    def _load_one(self, reader: Reader) -> bool:
        with self._lock:
            self._for_loads.wait_for(lambda: self._loads or self._is_ending)
            if not self._loads:
                return False
            op = self._loads.popleft()
            self._running.add(op)
            self._for_writes.notify()
        try:
            ended = reader.run(op)
        except Exception as error:
            logger.exception("a load ended by a bug")
            ended = Ended(op, bare(error))
        with self._lock:
            self._running.discard(op)
        self._say(ended)
        return True

    def _run_frees(self) -> None:
        writer = Writer(self._directory)
        while self._free_one(writer):
            pass

    def _free_one(self, writer: Writer) -> bool:
        with self._lock:
            self._for_frees.wait_for(lambda: self._frees or self._is_ending)
            if not self._frees:
                return False
            op = self._frees.popleft()
        self._say(_ended(writer, op, []))
        return True

    def _run_writes(self) -> None:
        writer = Writer(self._directory)
        try:
            while self._write_one(writer):
                self._begun = None
        finally:
            writer.close()

    def _write_one(self, writer: Writer) -> bool:
        op = self._next_write()
        if op is None:
            return False
        if not isinstance(op, StoreOp):
            ended = _ended(writer, op, [])
            if isinstance(op, ClearOp):
                op.is_done.set()
            self._say(ended)
            return True
        try:
            parts = self._parts_of(op)
        except Exception as error:
            logger.exception("checksums ended by a bug")
            self._say(Ended(op, bare(error)))
            return True
        for ended in _ended_together(writer, [(op, parts), *self._neighbours(op)]):
            self._say(ended)
        return True

    def _next_write(self) -> WriteOp | None:
        with self._lock:
            self._for_writes.wait_for(lambda: self._writes or self._is_ending)
            if self._is_store_next():
                self._for_writes.wait_for(
                    lambda: not (self._loads and self._is_store_next()), YIELD_S_MAX
                )
            self._begun = self._writes.popleft() if self._writes else None
            return self._begun

    def _is_store_next(self) -> bool:
        return bool(self._writes) and isinstance(self._writes[0], StoreOp)

    def _neighbours(self, op: StoreOp) -> list[tuple[StoreOp, list[memoryview]]]:
        """Stores that follow it in the queue and in the segment, if their checksums are there."""
        found: list[tuple[StoreOp, list[memoryview]]] = []
        place, total = op.place, op.place.length_bytes
        with self._lock:
            while self._writes:
                after = self._writes[0]
                if not isinstance(after, StoreOp) or after not in self._parts:
                    break
                total += after.place.length_bytes
                is_next = after.place.segment == place.segment
                is_next &= after.place.offset_bytes == place.offset_bytes + place.length_bytes
                if not is_next or total > TOGETHER_BYTES:
                    break
                self._writes.popleft()
                found.append((after, self._parts.pop(after)))
                place = after.place
            self._for_sums.notify()
        return found

    def _parts_of(self, op: StoreOp) -> list[memoryview]:
        """With its checksums, which another thread may be taking."""
        with self._lock:
            self._for_writes.wait_for(lambda: self._summing is not op)
            parts = self._parts.pop(op, None)
            self._for_sums.notify()
        return parts_of(op) if parts is None else parts

    def _run_sums(self) -> None:
        while self._sum_one():
            pass

    def _sum_one(self) -> bool:
        with self._lock:
            self._for_sums.wait_for(lambda: self._unsummed() or self._is_ending)
            op = self._summing = self._unsummed()
        if op is None:
            return False  # the writing thread takes what is left by itself
        parts = None
        try:
            parts = parts_of(op)
        except Exception:
            logger.exception("checksums ended by a bug")  # the writing thread meets it too
        with self._lock:
            self._summing = None
            if parts is not None and (op is self._begun or op in self._writes):
                self._parts[op] = parts
            self._for_writes.notify()
        return True

    def _unsummed(self) -> StoreOp | None:
        """The next store whose checksums nobody has; none while enough are ahead."""
        if len(self._parts) < SUMS_AHEAD:
            for op in self._writes:
                if isinstance(op, StoreOp) and op not in self._parts:
                    return op
        return None


def _ended(writer: Writer, op: WriteOp, parts: list[memoryview]) -> Ended:
    try:
        return writer.run(op, parts)
    except Exception as error:
        logger.exception("a write ended by a bug")
        return Ended(op, bare(error))


def _ended_together(writer: Writer, stores: list[tuple[StoreOp, list[memoryview]]]) -> list[Ended]:
    if len(stores) == 1:
        return [_ended(writer, *stores[0])]
    try:
        return writer.run_together(stores)
    except Exception as error:
        logger.exception("writes ended by a bug")
        return [Ended(op, bare(error)) for op, _ in stores]
