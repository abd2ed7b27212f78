"""What stands for `threading`, `queue`, `time` and `secrets` in simulated processes.

As much of each as production code uses, with the meaning of the real one. Nothing waits but here
and in `files`.
"""

import queue
from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from kvtide.testing.simulate.kernel import Kernel, Killed, Thread, Waiter


class Lock:
    """A lock that is not taken twice by one thread.

    The node's own thread, which is none of the kernel's, never has to wait for one: nobody waits
    for anything while he has a lock of a tier.
    """

    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel
        self._is_taken = False
        self._waiters: deque[Waiter] = deque()

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        """As `threading.Lock`."""
        kernel = self._kernel
        kernel.edge()
        end_us = kernel.now_us + int(timeout * 1e6)
        while self._is_taken:
            left_s = None if timeout < 0 else (end_us - kernel.now_us) / 1e6
            if not blocking or (left_s is not None and left_s <= 0):
                return False
            waiter = kernel.waiter()
            self._waiters.append(waiter)
            kernel.wait(waiter, left_s)
        self._is_taken = True
        return True

    def release(self) -> None:
        """As `threading.Lock`."""
        self._is_taken = False
        while self._waiters:
            waiter = self._waiters.popleft()
            if waiter.thread.process.is_alive and not waiter.is_over:
                waiter.wake()
                return

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


class Condition:
    """As `threading.Condition`."""

    def __init__(self, kernel: Kernel, lock: Lock | None = None) -> None:
        self._kernel = kernel
        self._lock = lock or Lock(kernel)
        self.acquire, self.release = self._lock.acquire, self._lock.release
        self._hoping: deque[Waiter] = deque()

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()

    def wait(self, timeout: float | None = None) -> bool:
        if self._kernel.thread is None:
            return False  # the node's thread would have waited in vain
        waiter = self._kernel.waiter()
        self._hoping.append(waiter)
        self.release()
        is_woken = self._kernel.wait(waiter, timeout)
        self.acquire()
        return is_woken

    def wait_for(self, is_so: Callable[[], Any], timeout: float | None = None) -> Any:
        kernel = self._kernel
        end_us = None if timeout is None else kernel.now_us + int(timeout * 1e6)
        while not (found := is_so()):
            left_s = None if end_us is None else (end_us - kernel.now_us) / 1e6
            if kernel.thread is None or (left_s is not None and left_s <= 0):
                break
            self.wait(left_s)
        return found

    def notify(self) -> None:
        while self._hoping:
            waiter = self._hoping.popleft()
            if not waiter.is_over:
                waiter.wake()
                return

    def notify_all(self) -> None:
        hoping, self._hoping = self._hoping, deque()
        for waiter in hoping:
            waiter.wake()


class Event:
    """As `threading.Event`."""

    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel
        self._is_set = False
        self._waiters: list[Waiter] = []

    def is_set(self) -> bool:
        return self._is_set

    def set(self) -> None:
        self._is_set = True
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            waiter.wake()

    def clear(self) -> None:
        self._is_set = False

    def wait(self, timeout: float | None = None) -> bool:
        self._kernel.edge()
        if not self._is_set and self._kernel.thread is not None:
            waiter = self._kernel.waiter()
            self._waiters.append(waiter)
            self._kernel.wait(waiter, timeout)
        return self._is_set


class SimpleQueue:
    """As `queue.SimpleQueue`."""

    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel
        self._items: deque[Any] = deque()
        self._waiters: deque[Waiter] = deque()

    def put(self, item: Any) -> None:
        self._items.append(item)
        while self._waiters:
            waiter = self._waiters.popleft()
            if not waiter.is_over and waiter.thread.process.is_alive:
                waiter.wake()
                return

    def get(self, timeout: float | None = None) -> Any:
        self._kernel.edge()
        end_us = None if timeout is None else self._kernel.now_us + int(timeout * 1e6)
        while not self._items:
            left_s = None if end_us is None else (end_us - self._kernel.now_us) / 1e6
            if left_s is not None and left_s <= 0:
                raise queue.Empty
            waiter = self._kernel.waiter()
            self._waiters.append(waiter)
            self._kernel.wait(waiter, left_s)
        return self._items.popleft()

    def empty(self) -> bool:
        return not self._items

    def get_nowait(self) -> Any:
        self._kernel.edge()
        if not self._items:
            raise queue.Empty
        return self._items.popleft()


class SimThread:
    """As `threading.Thread`."""

    def __init__(
        self, kernel: Kernel, target: Callable[[], None], name: str, daemon: bool
    ) -> None:
        assert daemon, f"{name} would outlive its process"
        self._kernel = kernel
        self._thread = Thread(kernel, target, name)

    def start(self) -> None:
        self._thread.start()

    def is_alive(self) -> bool:
        return self._thread.is_started and not self._thread.is_over

    def join(self, timeout: float | None = None) -> None:
        if not self._thread.is_over and self._kernel.thread is not None:
            waiter = self._kernel.waiter()
            self._thread.joiners.append(waiter)
            self._kernel.wait(waiter, timeout)


def threading_of(kernel: Kernel) -> SimpleNamespace:
    """What stands for `threading`."""

    def thread(*, target: Callable[[], None], name: str = "", daemon: bool = False) -> SimThread:
        return SimThread(kernel, target, name, daemon)

    return SimpleNamespace(
        Lock=lambda: Lock(kernel),
        Condition=lambda lock=None: Condition(kernel, lock),
        Event=lambda: Event(kernel),
        Thread=thread,
    )


def queue_of(kernel: Kernel) -> SimpleNamespace:
    """What stands for `queue`."""
    return SimpleNamespace(SimpleQueue=lambda: SimpleQueue(kernel), Empty=queue.Empty)


def time_of(kernel: Kernel) -> SimpleNamespace:
    """What stands for `time`. Both clocks are read at edges."""

    def monotonic() -> float:
        if kernel.current is not None and not kernel.current.is_alive:
            raise Killed
        return kernel.now_us / 1e6

    return SimpleNamespace(monotonic=monotonic, time=monotonic)


def secrets_of(kernel: Kernel) -> SimpleNamespace:
    """What stands for `secrets`: nobody could guess it, but for the seed."""
    return SimpleNamespace(token_bytes=lambda count: kernel.draw.randbytes(count))


class SimClock:
    """The machine's clock, as parts are handed it."""

    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel

    def now_ms(self) -> int:
        return self._kernel.now_us // 1000
