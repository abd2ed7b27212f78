"""The simulated machine: time that jumps, events in order, processes, and threads in turn.

    heap of events ─► the earliest: a callback, or a thread that goes on until it waits again

Threads of production code are real threads, of which one runs at any moment: the one that has
the turn. When it waits for something (see `waiting`), it lets events happen until one gives the
turn to another, or back to it. So there is no race that the seed does not decide. Every call from
production code into what is simulated is an *edge*: there a process may be killed, or another
thread may go first.

A process that is killed loses its turn for good: each of its threads finds `Killed` where it
waits. One that stands still (SIGSTOP) keeps its events until it goes on.
"""

import hashlib
import heapq
import random
import threading
from collections.abc import Callable
from typing import Any

LATENCY_US_MAX = 60
"""From a reason to go on until a thread does: so others may come first."""
DEATH_US_MAX = 8_000
"""From the closing of a dead process's descriptors until its pidfd tells."""
PID_FIRST = 1_000
EDGES_A_MOMENT = 500
"""So many calls of one thread take a moment, in which others go on, as real ones do."""
MOMENT_S = 50e-6
EDGES_MAX = 100_000
"""More than any thread should make without waiting: of 10 ms, by these numbers."""


class Killed(BaseException):
    """The process is dead: not an `Exception`, which production code may catch."""


class SimulationError(AssertionError):
    """A law that must hold does not; the seed makes it happen again."""


class Process:
    """One process: alive or dead, running or standing still."""

    def __init__(self, kernel: "Kernel", name: str) -> None:
        self.name = name
        self.pid = kernel.next_pid()
        self.is_alive = True
        self.stalled_until_us = 0
        self.fuse = 0
        """Edges left until it is killed; 0: it is not."""
        self.threads: list[Thread] = []
        self.files: dict[int, Any] = {}
        """Its descriptors."""
        self.on_death: list[Callable[[], None]] = []
        """What closes with it at once."""
        self.on_proof: list[Callable[[], None]] = []
        """Called when its pidfd tells."""
        self.is_proven_dead = False


class Thread:
    """A thread of a simulated process."""

    def __init__(self, kernel: "Kernel", target: Callable[[], None], name: str) -> None:
        assert kernel.current is not None, "a thread belongs to a process"
        self.process = kernel.current
        self.name = name
        self.is_started = False
        self.is_over = False
        self.joiners: list[Waiter] = []
        self._kernel = kernel
        self._target = target
        self.turn = threading.Lock()
        self.turn.acquire()

    def start(self) -> None:
        """It runs as soon as the kernel lets it."""
        self.is_started = True
        self.process.threads.append(self)
        self._kernel.threads.append(self)
        threading.Thread(target=self._main, name=self.name, daemon=True).start()
        self._kernel.soon(self.resume, self.process)

    def _main(self) -> None:
        self.turn.acquire()
        try:
            if self.process.is_alive:
                self._target()
        except Killed:
            pass
        except BaseException as error:
            self._kernel.failed(error)
        self.is_over = True
        for joiner in self.joiners:
            joiner.wake()
        self._kernel.drive(self)

    def resume(self) -> None:
        """By an event: it is this thread's turn next."""
        self._kernel.next_thread = self

    def stop(self) -> None:
        """On this thread: let others go on, until it is resumed."""
        self._kernel.drive(self)
        if not self.process.is_alive:
            raise Killed


class Waiter:
    """One wait of one thread: woken once, or out of time."""

    __slots__ = ("_kernel", "is_gone", "is_over", "is_woken", "thread")

    def __init__(self, kernel: "Kernel", thread: Thread) -> None:
        self._kernel = kernel
        self.thread = thread
        self.is_over = False
        self.is_woken = False
        self.is_gone = False

    def wake(self) -> None:
        """There is a reason to go on; a second one changes nothing."""
        if not self.is_over:
            self.is_over = self.is_woken = True
            self._kernel.soon(self.go, self.thread.process)

    def go(self) -> None:
        """It has its turn, if it has not had it."""
        if not self.is_gone:
            self.is_gone = True
            self.thread.resume()

    def expire(self) -> None:
        """The time is over."""
        if not self.is_over:
            self.is_over = True
            self.go()


class Kernel:
    """Time, events and turns of one world."""

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)
        self.now_us = 1_000_000
        self.current: Process | None = None
        self.thread: Thread | None = None
        self.yield_ratio = 0.0
        """How often another thread goes first at an edge."""
        self.event_count = 0
        self._edges = 0
        """Of whoever goes on without waiting."""
        self.threads: list[Thread] = []
        self.failure: BaseException | None = None
        self.lines: list[str] = []
        """The last lines of the log; all of them are in its hash."""
        self.keeps_lines = False
        self._hash = hashlib.sha256()
        self._heap: list[tuple[int, int, Process | None, Callable[[], None]]] = []
        self._number = 0
        self._pid = PID_FIRST
        self.next_thread: Thread | None = None
        self._limit_us = 0
        self._turn = threading.Lock()
        self._turn.acquire()

    # ---- time and events

    def next_pid(self) -> int:
        """No two processes have the same."""
        self._pid += 1
        return self._pid

    def at(self, time_us: int, call: Callable[[], None], process: Process | None = None) -> None:
        """Have something called at a time, in the name of a process, if that lives then."""
        self._number += 1
        heapq.heappush(self._heap, (max(time_us, self.now_us), self._number, process, call))

    def soon(self, call: Callable[[], None], process: Process | None = None) -> None:
        """As soon as a machine with other things to do gets to it."""
        self.at(self.now_us + int(self.draw.random() * LATENCY_US_MAX), call, process)

    def run_until(self, time_us: int) -> None:
        """Let everything happen that happens until then. Raises what has failed."""
        self._limit_us = time_us
        self.drive(None)
        if self.failure is not None:
            raise self.failure
        self.now_us = max(self.now_us, time_us)

    def drive(self, me: Thread | None) -> None:
        """Let events happen until it is the turn of the thread that calls.

        Whoever waits does this: so the turn goes from thread to thread, and mostly stays where it
        is. None is the thread that called `run_until`, whose turn it is at the end.
        """
        heap = self._heap
        while self.failure is None and heap and heap[0][0] <= self._limit_us:
            event_us, _, process, call = heapq.heappop(heap)
            if event_us > self.now_us:
                self.now_us = event_us
            if process is not None:
                if not process.is_alive:
                    continue
                if process.stalled_until_us > self.now_us:
                    self.at(process.stalled_until_us, call, process)
                    continue
            self.event_count += 1
            self.current, self.thread, self.next_thread = process, None, None
            self._edges = 0
            try:
                call()
            except Killed:
                pass
            except BaseException as error:
                self.failed(error)
            thread = self.next_thread
            if thread is not None and not thread.is_over:
                self.current, self.thread = thread.process, thread
                if thread is not me:
                    self._hand_over(thread.turn, me)
                return
        self.current = self.thread = None
        if me is not None:
            self._hand_over(self._turn, me)

    def _hand_over(self, turn: threading.Lock, me: Thread | None) -> None:
        """Another goes on; and this thread does when it gets its turn, unless it has ended."""
        turn.release()
        if me is None:
            self._turn.acquire()
        elif not me.is_over:
            me.turn.acquire()

    def end(self) -> None:
        """End all threads: nothing else happens any more."""
        failure, self.failure = self.failure, None
        self._heap.clear()
        for thread in self.threads:
            thread.process.is_alive = False
            self.at(self.now_us, thread.resume)
        self._limit_us = self.now_us + LATENCY_US_MAX
        self.drive(None)
        self.failure = failure

    def failed(self, error: BaseException) -> None:
        """Something went wrong where nobody could raise it."""
        self.failure = self.failure or error

    def broken(self, text: str) -> SimulationError:
        """A law does not hold: raise this. It counts, too, where production code catches it."""
        error = SimulationError(text)
        self.failed(error)
        return error

    # ---- turns

    def wait(self, waiter: Waiter, timeout_s: float | None) -> bool:
        """On a simulated thread: wait; whether there was a reason to go on, and not only time."""
        if timeout_s is not None:
            until_us = self.now_us + max(1, int(timeout_s * 1e6))
            self.at(until_us, waiter.expire, waiter.thread.process)
        waiter.thread.stop()
        return waiter.is_woken

    def waiter(self) -> Waiter:
        """For the thread that runs."""
        assert self.thread is not None, "only threads wait"
        return Waiter(self, self.thread)

    def sleep(self, time_s: float) -> None:
        """On a simulated thread."""
        self.wait(self.waiter(), time_s)

    def _count_edge(self) -> None:
        self._edges = edges = self._edges + 1
        if edges > EDGES_MAX:
            name = self.current.name if self.current else "nobody"
            raise self.broken(f"{name} goes round and round, and waits for nothing")
        if edges % EDGES_A_MOMENT == 0 and self.thread is not None:
            self.sleep(MOMENT_S)
            self._edges = edges

    def edge(self) -> None:
        """Production code calls what is simulated: its process may die here, or stand back."""
        self._count_edge()
        process = self.current
        if process is None:
            return
        if process.fuse:
            process.fuse -= 1
            if not process.fuse:
                self.kill(process)
        if not process.is_alive:
            raise Killed
        if self.yield_ratio and self.thread and self.draw.random() < self.yield_ratio:
            waiter = self.waiter()
            waiter.wake()
            self.wait(waiter, None)

    # ---- life and death

    def kill(self, process: Process) -> None:
        """SIGKILL: its threads end where they are, its descriptors close, then its pidfd tells."""
        if not process.is_alive:
            return
        process.is_alive = False
        process.fuse = 0
        self.log("killed", process.name)
        self.at(self.now_us, lambda: self._bury(process))

    def _bury(self, process: Process) -> None:
        for thread in process.threads:
            self.at(self.now_us, thread.resume)
        self.at(self.now_us, lambda: self._close(process))

    def _close(self, process: Process) -> None:
        for call in process.on_death:
            call()
        self.at(self.now_us + self.draw.randrange(DEATH_US_MAX), lambda: self._prove(process))

    def _prove(self, process: Process) -> None:
        process.is_proven_dead = True
        for call in process.on_proof:
            call()

    def stall(self, process: Process, time_us: int) -> None:
        """SIGSTOP, and SIGCONT after a time."""
        process.stalled_until_us = max(process.stalled_until_us, self.now_us + time_us)

    # ---- the log

    def log(self, *words: object) -> None:
        """Note what happened: the same in every run of a seed."""
        line = f"{self.now_us} " + " ".join(map(str, words))
        self._hash.update(line.encode())
        if self.keeps_lines:
            self.lines.append(line)

    def log_bytes(self, data: bytes | memoryview) -> None:
        """Note what was sent."""
        self._hash.update(data)

    @property
    def digest(self) -> str:
        """Of the log so far."""
        return self._hash.hexdigest()
