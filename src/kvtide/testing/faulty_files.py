"""A file system that lets a tier down, as and when a test says.

    tier ─► FaultyFiles ─► SystemFiles
              └ stall, then fail, then shorten: in this order, for every call

Faults are switched while the tier runs, and `heal` ends them all. What was done to whom is counted
in `injected`, so that a test knows that its fault was met. `close` works whatever happens, as the
kernel's does: descriptors are never lost.

Ownership: `_change` guards all fields; calls wait at it while they are stalled, and make their
real call without it.
"""

import enum
import errno
import os
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from kvtide.tiers.files import Buffer, Files, FileSize, FreeSpace, SystemFiles


class Call(enum.StrEnum):
    """A kind of call; `close` is none, since it never fails."""

    OPEN = "open"
    WRITE = "write"
    READ = "read"
    TRUNCATE = "truncate"
    PUNCH = "punch"
    SYNC = "sync"
    DROP_CACHED = "drop_cached"
    WANT_CACHED = "want_cached"
    SIZE = "size"
    SIZE_AT = "size_at"
    NAMES = "names"
    MAKE_DIRECTORY = "make_directory"
    SYNC_DIRECTORY = "sync_directory"
    UNLINK = "unlink"
    RENAME = "rename"
    FREE_SPACE = "free_space"
    LOCK = "lock"


BY_PATH = frozenset(
    {
        Call.OPEN,
        Call.SIZE_AT,
        Call.NAMES,
        Call.MAKE_DIRECTORY,
        Call.SYNC_DIRECTORY,
        Call.UNLINK,
        Call.RENAME,
        Call.FREE_SPACE,
    }
)
"""Where a mount has vanished these find nothing; the others have a descriptor of what is gone."""
CHANGING = frozenset(
    {
        Call.WRITE,
        Call.TRUNCATE,
        Call.PUNCH,
        Call.MAKE_DIRECTORY,
        Call.UNLINK,
        Call.RENAME,
    }
)
"""Refused by a file system that is mounted read-only, with `OPEN` for writing."""

PAGE = 4096
_FOR_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC


@dataclass(slots=True)
class _Fault:
    """Some calls of one kind fail."""

    call: Call
    code: int
    path_part: str
    skip: int
    left: int | None
    bytes_over: int


class FaultyFiles:
    """The calls of a file system, and what shall go wrong with them."""

    def __init__(self, files: Files | None = None) -> None:
        """In front of these files; of the kernel's by default."""
        self.calls: Counter[Call] = Counter()
        """Of each kind, made so far; those that failed too."""
        self.injected: Counter[str] = Counter()
        """What was done to calls: "write EIO", "read short", "sync stalled", …"""
        self._files = files or SystemFiles()
        self._change = threading.Condition()
        self._faults: list[_Fault] = []
        self._stalled: frozenset[Call] = frozenset()
        self._waiting = 0
        self._bytes_max: dict[Call, int] = {}
        self._room_bytes: int | None = None
        self._full_code, self._is_room_told = errno.ENOSPC, True
        self._is_read_only = False
        self._is_vanished = False
        self._all_code = 0
        self._paths: dict[int, str] = {}

    # ---- what shall go wrong

    def fail(
        self,
        call: Call,
        code: int,
        *,
        nth: int = 1,
        count: int | None = None,
        path_part: str = "",
        bytes_over: int = 0,
    ) -> None:
        """From the `nth` such call from now on, `count` of them fail, or all until `heal`.

        Only those whose path has `path_part` in it are meant, and counted; and of reads and writes
        only those of more than `bytes_over`.
        """
        assert nth > 0, nth
        with self._change:
            self._faults.append(_Fault(call, code, path_part, nth - 1, count, bytes_over))

    def fail_all(self, code: int = errno.EIO) -> None:
        """Every call fails from now on."""
        with self._change:
            self._all_code = code

    def vanish(self) -> None:
        """The mount is gone: nothing is found by its path, and what is open fails."""
        with self._change:
            self._is_vanished = True

    def make_read_only(self) -> None:
        """As the kernel remounts a file system that it has found damaged."""
        with self._change:
            self._is_read_only = True

    def fill_after(
        self, room_bytes: int, code: int = errno.ENOSPC, *, is_told: bool = True
    ) -> None:
        """So many more bytes may be written, the last ones by a short write; then it is full.

        What is punched or unlinked makes room again. Not told, as a quota is not: `free_space`
        says what the drive has.
        """
        with self._change:
            self._room_bytes = room_bytes
            self._full_code = code
            self._is_room_told = is_told

    def shorten(self, call: Call, bytes_max: int) -> None:
        """A read or write moves at most so many bytes (whole pages, where I/O is direct)."""
        assert call in (Call.READ, Call.WRITE), call
        assert bytes_max > 0, bytes_max
        with self._change:
            self._bytes_max[call] = bytes_max

    def stall(self, *calls: Call) -> None:
        """Calls of these kinds (of all, if none is named) do not return until `release`; those of
        others that stood still go on."""
        with self._change:
            self._stalled = frozenset(calls or Call)
            self._change.notify_all()

    def release(self, *calls: Call) -> None:
        """What is stalled goes on: of these kinds, or all if none is named."""
        with self._change:
            self._stalled -= frozenset(calls or Call)
            self._change.notify_all()

    def release_but_waiting(self) -> None:
        """What stands still goes on doing so until `release`; other calls are made again."""
        with self._change:
            self._stalled = frozenset()

    @contextmanager
    def stalled(self, *calls: Call) -> Iterator[None]:
        """Stall within this block, however it ends."""
        self.stall(*calls)
        try:
            yield
        finally:
            self.release()

    @contextmanager
    def failing(self, code: int = errno.EIO) -> Iterator[None]:
        """Let all fail within this block; then all is well."""
        self.fail_all(code)
        try:
            yield
        finally:
            self.heal()

    @property
    def stalled_count(self) -> int:
        """Calls that stand still."""
        with self._change:
            return self._waiting

    def wait_stalled(self, count: int, timeout_s: float = 30.0) -> None:
        """Until so many calls stand still.

        Raises:
            TimeoutError: they did not come.
        """
        with self._change:
            if not self._change.wait_for(lambda: self._waiting >= count, timeout_s):
                raise TimeoutError(f"{self._waiting} calls are stalled, {count} were expected")

    def heal(self) -> None:
        """All is well from now on, and what is stalled goes on."""
        with self._change:
            self._faults.clear()
            self._bytes_max.clear()
            self._room_bytes = None
            self._is_read_only = self._is_vanished = False
            self._all_code = 0
        self.release()

    # ---- how it goes wrong

    def _enter(
        self, call: Call, path: str, *, is_changing: bool = False, length_bytes: int = 1
    ) -> None:
        """Count a call; stall it; raise what it fails with."""
        with self._change:
            self.calls[call] += 1
            if call in self._stalled:
                self.injected[f"{call} stalled"] += 1
                self._waiting += 1
                self._change.notify_all()
                self._change.wait_for(lambda: call not in self._stalled)
                self._waiting -= 1
            is_changing = is_changing or call in CHANGING
            code = self._code_of(call, path, is_changing, length_bytes)
            if code:
                self.injected[f"{call} {errno.errorcode[code]}"] += 1
                raise OSError(code, os.strerror(code), path)

    def _code_of(self, call: Call, path: str, is_changing: bool, length_bytes: int) -> int:
        """What a call fails with; 0: it does not."""
        for fault in self._faults:
            if fault.call is not call or fault.path_part not in path or fault.left == 0:
                continue
            if length_bytes <= fault.bytes_over:
                continue
            if fault.skip:
                fault.skip -= 1
                continue
            if fault.left is not None:
                fault.left -= 1
            return fault.code
        if self._all_code:
            return self._all_code
        if self._is_vanished:
            return errno.ENOENT if call in BY_PATH else errno.EIO
        return errno.EROFS if self._is_read_only and is_changing else 0

    def _limit(self, call: Call, wanted_bytes: int, room_bytes: int | None = None) -> int:
        """How many bytes a read or write may move."""
        limits = [wanted_bytes, self._bytes_max.get(call, wanted_bytes)]
        allowed = min(limits if room_bytes is None else [*limits, room_bytes])
        if allowed < wanted_bytes:
            self.injected[f"{call} short"] += 1
        return allowed

    def _make_room(self, freed_bytes: int) -> None:
        with self._change:
            if self._room_bytes is not None:
                self._room_bytes += freed_bytes

    def _path(self, descriptor: int) -> str:
        return self._paths.get(descriptor, "")

    # ---- the calls

    def open(self, path: str, flags: int) -> int:
        self._enter(Call.OPEN, path, is_changing=bool(flags & _FOR_WRITING))
        descriptor = self._files.open(path, flags)
        self._paths[descriptor] = path
        return descriptor

    def close(self, descriptor: int) -> None:
        self._paths.pop(descriptor, None)
        self._files.close(descriptor)

    def write_at(self, descriptor: int, parts: Sequence[Buffer], offset_bytes: int) -> int:
        path = self._path(descriptor)
        views = [memoryview(part) for part in parts]
        wanted_bytes = sum(len(view) for view in views)
        self._enter(Call.WRITE, path, length_bytes=wanted_bytes)
        with self._change:
            room_bytes = self._room_bytes
            if room_bytes is not None and wanted_bytes % PAGE == 0:
                room_bytes -= room_bytes % PAGE  # direct I/O moves whole ones
            if room_bytes == 0 and wanted_bytes:
                self.injected[f"write {errno.errorcode[self._full_code]}"] += 1
                raise OSError(self._full_code, os.strerror(self._full_code), path)
            allowed = self._limit(Call.WRITE, wanted_bytes, room_bytes)
            if self._room_bytes is not None:
                self._room_bytes -= allowed  # ahead of the call: another may run beside it
        done = 0
        try:
            done = self._files.write_at(descriptor, _first(views, allowed), offset_bytes)
        finally:
            self._make_room(allowed - done)
        return done

    def read_at(self, descriptor: int, parts: Sequence[memoryview], offset_bytes: int) -> int:
        wanted_bytes = sum(len(part) for part in parts)
        self._enter(Call.READ, self._path(descriptor), length_bytes=wanted_bytes)
        with self._change:
            allowed = self._limit(Call.READ, wanted_bytes)
        return self._files.read_at(descriptor, _first(parts, allowed), offset_bytes)

    def truncate(self, descriptor: int, length_bytes: int) -> None:
        self._enter(Call.TRUNCATE, self._path(descriptor))
        self._files.truncate(descriptor, length_bytes)

    def punch(self, descriptor: int, offset_bytes: int, length_bytes: int) -> None:
        self._enter(Call.PUNCH, self._path(descriptor))
        self._files.punch(descriptor, offset_bytes, length_bytes)
        self._make_room(length_bytes)

    def sync(self, descriptor: int) -> None:
        self._enter(Call.SYNC, self._path(descriptor))
        self._files.sync(descriptor)

    def drop_cached(self, descriptor: int, offset_bytes: int, length_bytes: int) -> None:
        self._enter(Call.DROP_CACHED, self._path(descriptor))
        self._files.drop_cached(descriptor, offset_bytes, length_bytes)

    def want_cached(self, descriptor: int) -> None:
        self._enter(Call.WANT_CACHED, self._path(descriptor))
        self._files.want_cached(descriptor)

    def size(self, descriptor: int) -> FileSize:
        self._enter(Call.SIZE, self._path(descriptor))
        return self._files.size(descriptor)

    def size_at(self, path: str) -> FileSize:
        self._enter(Call.SIZE_AT, path)
        return self._files.size_at(path)

    def link_at(self, path: str) -> FileSize:
        self._enter(Call.SIZE_AT, path)
        return self._files.link_at(path)

    def names(self, directory: str) -> list[str]:
        self._enter(Call.NAMES, directory)
        return self._files.names(directory)

    def make_directory(self, directory: str) -> None:
        self._enter(Call.MAKE_DIRECTORY, directory)
        self._files.make_directory(directory)

    def sync_directory(self, directory: str) -> None:
        self._enter(Call.SYNC_DIRECTORY, directory)
        self._files.sync_directory(directory)

    def unlink(self, path: str) -> None:
        self._enter(Call.UNLINK, path)
        freed_bytes = self._files.size_at(path).allocated_bytes
        self._files.unlink(path)
        self._make_room(freed_bytes)

    def rename(self, path: str, to: str) -> None:
        self._enter(Call.RENAME, path)
        self._files.rename(path, to)

    def free_space(self, directory: str) -> FreeSpace:
        """What `fill_after` leaves is what is free."""
        self._enter(Call.FREE_SPACE, directory)
        space = self._files.free_space(directory)
        if self._room_bytes is None or not self._is_room_told:
            return space
        return replace(space, free_bytes=min(space.free_bytes, self._room_bytes))

    def lock(self, descriptor: int) -> bool:
        self._enter(Call.LOCK, self._path(descriptor))
        return self._files.lock(descriptor)


def _first(parts: Sequence[memoryview], bytes_max: int) -> list[memoryview]:
    """The first bytes of parts."""
    first = []
    for part in parts:
        if bytes_max <= 0:
            break
        first.append(part[:bytes_max])
        bytes_max -= len(first[-1])
    return first
