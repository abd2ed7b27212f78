"""The I/O threads of a disk tier, and the queues to and from them.

    owner ── load ops ──► 2 × kvtide-disk-load ───────────────────────┐
    owner ── write ops ───────────────────► 1 × kvtide-disk-write ────┼─► results ── wake ──► owner
               └ stores ─► 1 × kvtide-disk-sums        ▲ written      │
                               └ summed ─► 2 × kvtide-disk-bytes      │
    owner ── free ops ──► 1 × kvtide-disk-free ───────────────────────┘

The writing thread has all that is done to a segment until it is sealed, in order. What takes time
is done ahead of it: checksums of stores that wait, by one thread; their bytes, by two, which have
nothing else to do, so that the drive is never idle while rows are appended. What is done later to
a segment is the freeing thread's: a hole takes milliseconds on some drives, and a store must not
wait for it. Loads go before stores: no bytes are begun while a load waits for a thread.

Ownership: all queues are under `_lock`, with a condition for each kind of thread, so that an
operation wakes one and not all; results are a deque, whose ends are safe by themselves. Threads
are started by `start`, and joined by `stop`.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable

from kvtide.errors import bare, no_thread
from kvtide.tiers.disk.directory import Directory
from kvtide.tiers.disk.ops import (
    ClearOp,
    Ended,
    LoadOp,
    OtherOp,
    StoreOp,
    Summed,
    WriteOp,
    Written,
)
from kvtide.tiers.disk.reader import Reader
from kvtide.tiers.disk.record_bytes import RecordBytes
from kvtide.tiers.disk.writer import Writer
from kvtide.tiers.record_io import to_write
from kvtide.units import MiB

logger = logging.getLogger("kvtide.disk")

LOAD_THREADS = 2
"""One reads while another proves what it has read; calls of a megabyte and more fill a drive."""
BYTES_THREADS = 2
"""While one comes back from a call and looks for the next, the other's call is there already: the
kernel goes on with it at once, on whatever core, whoever has the interpreter."""
TOGETHER_BYTES = 8 * MiB
"""Stores that lie next to one another are written by one call until it has so much: small chunks
at the speed of large ones, and a load that comes meanwhile finds the drive soon."""
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
        self._for_sums = threading.Condition(self._lock)
        self._for_bytes = threading.Condition(self._lock)
        self._for_writes = threading.Condition(self._lock)
        self._for_frees = threading.Condition(self._lock)
        self._for_results = threading.Condition(self._lock)
        self._loads: deque[LoadOp] = deque()
        self._running: set[LoadOp] = set()
        self._changing: set[WriteOp] = set()
        self._writes: deque[WriteOp] = deque()
        self._frees: deque[OtherOp] = deque()
        # Stores of `_writes` by how far they have come; those in work are in none of these.
        self._unsummed: deque[StoreOp] = deque()
        self._is_summing = False
        self._summed: deque[Summed] = deque()
        self._written: dict[StoreOp, Written] = {}
        self._is_ending = False
        self._threads: list[threading.Thread] = []

    def start(self) -> None:
        """Start the threads.

        Raises:
            ConfigError: the machine grants none; none runs then.
        """
        runs = [(f"kvtide-disk-load-{n}", self._run_loads) for n in range(LOAD_THREADS)]
        runs += [(f"kvtide-disk-bytes-{n}", self._run_bytes) for n in range(BYTES_THREADS)]
        runs += [("kvtide-disk-sums", self._run_sums)]
        runs += [("kvtide-disk-write", self._run_writes), ("kvtide-disk-free", self._run_frees)]
        for name, run in runs:
            thread = threading.Thread(target=run, name=name, daemon=True)
            try:
                thread.start()
            except RuntimeError as error:
                self.stop(START_S_MAX)
                raise no_thread(f"disk {self._directory.path}", error) from error
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
            if isinstance(op, StoreOp):
                self._unsummed.append(op)
                self._for_sums.notify()
            else:
                self._for_writes.notify()

    def clear(self, op: ClearOp, wait_s: float) -> None:
        """Have it done ahead of all else that is queued, and wait for so long at most."""
        with self._lock:
            ahead = sum(isinstance(one, ClearOp) for one in self._writes)
            self._writes.insert(ahead, op)
            self._for_writes.notify()
        if wait_s:
            op.is_done.wait(wait_s)

    def free(self, op: OtherOp) -> None:
        """Queue a change of a sealed segment; these happen in the order of these calls."""
        with self._lock:
            self._frees.append(op)
            self._for_frees.notify()

    def running_loads(self) -> set[LoadOp]:
        """Loads that a thread has begun and not ended."""
        with self._lock:
            return set(self._running)

    def running_changes(self) -> set[WriteOp]:
        """The same of what changes the directory; the first of stores that go together."""
        with self._lock:
            return set(self._changing)

    def take_loads(self) -> list[LoadOp]:
        """Loads that no thread has begun; they are the caller's again."""
        with self._lock:
            taken = list(self._loads)
            self._loads.clear()
            self._for_bytes.notify_all()
            return taken

    def take_stores(self) -> list[StoreOp]:
        """The same of stores."""
        with self._lock:
            taken = [*(one.op for one in self._summed), *self._unsummed]
            self._summed.clear()
            self._unsummed.clear()
            gone = set(taken)
            self._writes = deque(op for op in self._writes if op not in gone)
            self._for_writes.notify()
            return taken

    def wait_result(self, timeout_s: float) -> bool:
        """Wait until an operation has ended; whether one has within this time."""
        with self._lock:
            return self._for_results.wait_for(lambda: bool(self.results), timeout_s)

    def stop(self, timeout_s: float) -> bool:
        """Carry out what is queued, end the threads; whether all ended within this time."""
        with self._lock:
            self._is_ending = True
            for condition in (
                self._for_loads,
                self._for_sums,
                self._for_bytes,
                self._for_writes,
                self._for_frees,
            ):
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

    def _say(self, ends: list[Ended], change: WriteOp | None = None) -> None:
        with self._lock:
            if change is not None:
                self._changing.discard(change)
            self.results.extend(ends)
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
            self._for_bytes.notify_all()
        try:
            ended = reader.run(op)
        except Exception as error:
            logger.exception("a load ended by a bug")
            ended = Ended(op, bare(error))
        with self._lock:
            self._running.discard(op)
        self._say([ended])
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
            self._changing.add(op)
        ended = _ended(writer, op)
        self._say([ended], op)
        return True

    def _run_sums(self) -> None:
        while self._sum_one():
            pass

    def _sum_one(self) -> bool:
        with self._lock:
            self._for_sums.wait_for(lambda: self._unsummed or self._is_ending)
            if not self._unsummed:
                return False
            op = self._unsummed.popleft()
            self._is_summing = True
        done: Summed | Written
        try:
            done = Summed(op, to_write(op.job))
        except Exception as error:
            logger.exception("checksums ended by a bug")
            done = Written(op, bare(error))
        with self._lock:
            self._is_summing = False
            if isinstance(done, Summed):
                self._summed.append(done)
            else:
                self._written[op] = done
                self._for_writes.notify()
            self._for_bytes.notify_all()
        return True

    def _run_bytes(self) -> None:
        record_bytes = RecordBytes(self._directory)
        while self._write_bytes(record_bytes):
            pass

    def _write_bytes(self, record_bytes: RecordBytes) -> bool:
        stores = self._next_summed(is_waiting=False)
        if not stores:
            record_bytes.rest()
            stores = self._next_summed(is_waiting=True)
        if not stores:
            return not self._is_all_summed()
        written = _written(record_bytes, stores)
        with self._lock:
            self._changing.discard(stores[0].op)
            self._written.update((one.op, one) for one in written)
            self._for_writes.notify()
        return True

    def _next_summed(self, *, is_waiting: bool) -> list[Summed]:
        with self._lock:
            if is_waiting:
                self._for_bytes.wait_for(lambda: self._summed or self._is_all_summed())
            self._for_bytes.wait_for(lambda: not (self._loads and self._summed), YIELD_S_MAX)
            found = self._neighbours()
            self._changing.update(one.op for one in found[:1])
            return found

    def _is_all_summed(self) -> bool:
        return self._is_ending and not (self._unsummed or self._is_summing)

    def _neighbours(self) -> list[Summed]:
        """The next store, and what lies behind it in the segment, as far as that is summed."""
        found: list[Summed] = []
        total, end = 0, (0, 0)
        while self._summed and total < TOGETHER_BYTES:
            place = self._summed[0].op.place
            if found and (place.segment, place.offset_bytes) != end:
                break
            found.append(self._summed.popleft())
            total += place.length_bytes
            end = place.segment, place.offset_bytes + place.length_bytes
        return found

    def _run_writes(self) -> None:
        writer = Writer(self._directory)
        try:
            while self._write_one(writer):
                pass
        finally:
            writer.close()

    def _write_one(self, writer: Writer) -> bool:
        with self._lock:
            self._for_writes.wait_for(self._is_write_ready)
            if not self._writes:
                return False
            stores = self._stores_ready()
            op = None if stores else self._writes.popleft()
            self._changing.add(op or stores[0].op)
        if op is None:
            self._say(_kept(writer, stores), stores[0].op)
            return True
        assert not isinstance(op, StoreOp), op.job.number
        ended = _ended(writer, op)
        if isinstance(op, ClearOp):
            op.is_done.set()
        self._say([ended], op)
        return True

    def _is_write_ready(self) -> bool:
        """Whether there is something to do: a store is ready once its bytes are written."""
        if not self._writes:
            return self._is_ending
        op = self._writes[0]
        return op in self._written if isinstance(op, StoreOp) else True

    def _stores_ready(self) -> list[Written]:
        """Those at the head of the queue whose bytes are written, of one segment."""
        found: list[Written] = []
        while self._writes:
            op = self._writes[0]
            if not isinstance(op, StoreOp) or op not in self._written:
                break
            if found and op.place.segment != found[0].op.place.segment:
                break
            self._writes.popleft()
            found.append(self._written.pop(op))
        return found


def _ended(writer: Writer, op: OtherOp) -> Ended:
    try:
        return writer.run(op)
    except Exception as error:
        logger.exception("a write ended by a bug")
        return Ended(op, bare(error))


def _written(record_bytes: RecordBytes, stores: list[Summed]) -> list[Written]:
    try:
        return record_bytes.write(stores)
    except Exception as error:
        logger.exception("writes ended by a bug")
        return [Written(one.op, bare(error)) for one in stores]


def _kept(writer: Writer, stores: list[Written]) -> list[Ended]:
    try:
        return writer.keep(stores)
    except Exception as error:
        logger.exception("writes ended by a bug")
        return [Ended(one.op, bare(error), is_left=True) for one in stores]
