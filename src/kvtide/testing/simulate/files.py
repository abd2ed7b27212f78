"""Descriptors of simulated processes: events, pidfds, memory files, sockets; `poll`, `os`, paths.

File ◄─ a number in the process that opened it, or was sent it;  closed with the last number
   └─ watchers: polls and loops that are told when it may have become ready
"""

import errno
import math
import os
import select
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

from kvtide.testing.simulate.kernel import Kernel, Killed, Process

FD_FIRST = 10_000
"""No number of a real descriptor: one that is mistaken for another is not closed for real."""


class File:
    """What a descriptor stands for."""

    def __init__(self) -> None:
        self.references = 0
        self.watchers: list[Callable[[], None]] = []

    def ready(self) -> int:
        """What poll says of it."""
        return 0

    def told(self, wanted: int) -> int:
        """What of this `poll` says to whoever wants so much; that it is hung up, to everybody."""
        return self.ready() & (wanted | select.POLLHUP)

    def changed(self) -> None:
        """It may be ready now."""
        for watcher in tuple(self.watchers):
            watcher()

    def closed(self) -> None:
        """No number stands for it any more."""


def number_of(what: Any) -> int:
    """A descriptor, given as such or as what has one."""
    return what if isinstance(what, int) else int(what.fileno())


class Table:
    """All descriptors of all processes; numbers are never used twice."""

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel
        self._next = FD_FIRST

    def process(self) -> Process:
        """Whose call this is."""
        assert self.kernel.current is not None
        return self.kernel.current

    def add(self, file: File, process: Process | None = None) -> int:
        """A number for a file, in this process or another."""
        owner = process or self.process()
        self._next += 1
        owner.files[self._next] = file
        file.references += 1
        return self._next

    def file(self, number: int) -> File:
        """What a number stands for in this process."""
        found = self.process().files.get(number)
        if found is None:
            raise OSError(errno.EBADF, f"descriptor {number} is not open")
        assert isinstance(found, File)
        return found

    def close(self, number: int) -> None:
        """As `os.close`."""
        self.kernel.edge()
        file = self.process().files.pop(number, None)
        if file is None:
            raise OSError(errno.EBADF, f"descriptor {number} is closed twice")
        self.let_go(file)

    def let_go(self, file: File) -> None:
        """One that had it has it no more."""
        file.references -= 1
        if not file.references:
            file.closed()

    def bury(self, process: Process) -> None:
        """All that a dead process had is closed."""
        files, process.files = process.files, {}
        for file in files.values():
            self.let_go(file)


class EventFile(File):
    """An eventfd."""

    def __init__(self) -> None:
        super().__init__()
        self._count = 0

    def ready(self) -> int:
        return select.POLLIN if self._count else 0

    def add(self, value: int) -> None:
        """As `os.eventfd_write`."""
        self._count += value
        self.changed()

    def take(self) -> int:
        """As `os.eventfd_read`."""
        if not self._count:
            raise BlockingIOError
        count, self._count = self._count, 0
        return count


class PidFile(File):
    """A pidfd."""

    def __init__(self, process: Process) -> None:
        super().__init__()
        self.process = process
        process.on_proof.append(self.changed)

    def ready(self) -> int:
        return select.POLLIN if self.process.is_proven_dead else 0


def wait_ready(
    kernel: Kernel, files: Sequence[tuple[File, int]], timeout_s: float | None
) -> list[int]:
    """On a thread: wait until one of these is ready as wanted, or hung up; which of them are."""
    kernel.edge()
    end_us = None if timeout_s is None else kernel.now_us + int(timeout_s * 1e6)
    while True:
        found = [i for i, (file, wanted) in enumerate(files) if file.told(wanted)]
        left_s = None if end_us is None else (end_us - kernel.now_us) / 1e6
        if found or (left_s is not None and left_s <= 0):
            return found
        waiter = kernel.waiter()
        wake = waiter.wake
        for file, _ in files:
            file.watchers.append(wake)
        try:
            kernel.wait(waiter, left_s)
        finally:
            for file, _ in files:
                file.watchers.remove(wake)


class Poll:
    """As `select.poll`."""

    def __init__(self, table: Table) -> None:
        self._table = table
        self._wanted: dict[int, tuple[File, int]] = {}

    def register(self, what: Any, wanted: int) -> None:
        number = number_of(what)
        self._wanted[number] = (self._table.file(number), wanted)

    def poll(self, timeout_ms: float) -> list[tuple[int, int]]:
        numbers, files = list(self._wanted), list(self._wanted.values())
        # Never too short, as the real one: whoever is a moment early would come again and again.
        ready = wait_ready(self._table.kernel, files, math.ceil(timeout_ms) / 1000)
        return [(numbers[i], files[i][0].told(files[i][1])) for i in ready]


class Epoll(File):
    """As `select.epoll`: what is wanted may change while a thread waits."""

    def __init__(self, table: Table) -> None:
        super().__init__()
        self._table = table
        self._wanted: dict[int, tuple[File, int]] = {}
        self._number = table.add(self)

    def ready(self) -> int:
        told = any(file.told(wanted) for file, wanted in self._wanted.values())
        return select.POLLIN if told else 0

    def changed(self) -> None:
        if self.ready():
            super().changed()

    def register(self, what: Any, wanted: int) -> None:
        number = number_of(what)
        file = self._table.file(number)
        file.watchers.append(self.changed)
        self._wanted[number] = (file, wanted)

    def modify(self, what: Any, wanted: int) -> None:
        number = number_of(what)
        self._wanted[number] = (self._wanted[number][0], wanted)
        self.changed()

    def poll(self, timeout_s: float) -> list[tuple[int, int]]:
        timeout_s = math.ceil(timeout_s * 1000) / 1000
        wait_ready(self._table.kernel, [(self, select.POLLIN)], timeout_s)
        told = [(number, file.told(wanted)) for number, (file, wanted) in self._wanted.items()]
        return [(number, events) for number, events in told if events]

    def closed(self) -> None:
        for file, _ in self._wanted.values():
            file.watchers.remove(self.changed)

    def __enter__(self) -> "Epoll":
        return self

    def __exit__(self, *_: object) -> None:
        self._table.close(self._number)


def select_of(table: Table) -> SimpleNamespace:
    """What stands for `select`."""
    names = {name: getattr(select, name) for name in ("POLLIN", "POLLOUT", "EPOLLIN", "EPOLLOUT")}
    return SimpleNamespace(poll=lambda: Poll(table), epoll=lambda: Epoll(table), **names)


class Names:
    """The runtime directories: each path's number and time. (Nothing is in the files.)"""

    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel
        self._found: dict[str, SimpleNamespace] = {}
        self._next = 1
        self.locks: dict[str, Process] = {}
        """Who holds a lock."""

    def make(self, path: str) -> None:
        """A file of this name is there from now on."""
        self._next += 1
        seconds = self._kernel.now_us / 1e6
        self._found[path] = SimpleNamespace(st_ino=self._next, st_mtime=seconds)

    def remove(self, path: str) -> bool:
        """It is gone; whether it was there."""
        return self._found.pop(path, None) is not None

    def stat(self, path: str) -> SimpleNamespace:
        """Raises as `os.stat`."""
        found = self._found.get(path)
        if found is None:
            raise FileNotFoundError(errno.ENOENT, "no such file", path)
        return found


class NamedFile(File):
    """What a path stood for when it was opened."""

    def __init__(self, path: str, status: SimpleNamespace) -> None:
        super().__init__()
        self.path = path
        self.status = status


class SimPath:
    """A path of the runtime directory: as much of `pathlib.Path` as is asked of it there."""

    def __init__(self, names: Names, path: str) -> None:
        self._names = names
        self._path = path

    def __str__(self) -> str:
        return self._path

    def __fspath__(self) -> str:
        return self._path

    def unlink(self, missing_ok: bool = False) -> None:
        if not self._names.remove(self._path) and not missing_ok:
            raise FileNotFoundError(errno.ENOENT, "no such file", self._path)

    def chmod(self, mode: int) -> None:
        """Others may or may not: nobody is here."""

    def write_text(self, text: str, encoding: str) -> None:
        self._names.make(self._path)

    def stat(self) -> SimpleNamespace:
        return self._names.stat(self._path)


class SimPlaces:
    """As `Places`."""

    def __init__(self, names: Names, directory: str) -> None:
        self.directory = directory
        self.socket = SimPath(names, f"{directory}/node.sock")
        self.lock = SimPath(names, f"{directory}/node.lock")
        self.stopped = SimPath(names, f"{directory}/node.stopped")
        self.log = SimPath(names, f"{directory}/node.log")


def os_of(table: Table, names: Names, pids: dict[int, Process]) -> SimpleNamespace:
    """What stands for `os`: descriptors, processes, names."""
    kernel = table.kernel

    def eventfd_write(number: int, value: int) -> None:
        kernel.edge()
        _event(table, number).add(value)

    def getpid() -> int:
        process = table.process()
        if not process.is_alive:
            raise Killed
        return process.pid

    def opened(path: SimPath, flags: int) -> int:
        return table.add(NamedFile(str(path), names.stat(str(path))))

    def fstat(number: int) -> SimpleNamespace:
        file = table.file(number)
        assert isinstance(file, NamedFile), number
        return file.status

    return SimpleNamespace(
        eventfd=lambda value, flags: table.add(EventFile()),
        eventfd_write=eventfd_write,
        eventfd_read=lambda number: _event(table, number).take(),
        pidfd_open=lambda pid: table.add(PidFile(pids[pid])),
        getpid=getpid,
        getuid=os.getuid,
        urandom=kernel.draw.randbytes,
        close=table.close,
        dup=lambda number: table.add(table.file(number)),
        open=opened,
        fstat=fstat,
        utime=lambda path: names.stat(str(path)),
        path=SimpleNamespace(samestat=lambda one, other: one.st_ino == other.st_ino),
        **{name: getattr(os, name) for name in ("EFD_NONBLOCK", "EFD_CLOEXEC", "O_CLOEXEC")},
        **{name: getattr(os, name) for name in ("O_PATH", "O_RDONLY")},
    )


def _event(table: Table, number: int) -> EventFile:
    file = table.file(number)
    assert isinstance(file, EventFile), number
    return file


def fcntl_of(table: Table, names: Names) -> SimpleNamespace:
    """What stands for `fcntl`, where locks are looked at."""

    def flock(number: int, how: int) -> None:
        file = table.file(number)
        assert isinstance(file, NamedFile), how
        holder = names.locks.get(file.path)
        if holder is not None and holder.is_alive:
            raise BlockingIOError(errno.EAGAIN, "locked")

    return SimpleNamespace(flock=flock, LOCK_SH=1, LOCK_NB=4)
