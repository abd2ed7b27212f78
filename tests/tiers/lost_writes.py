"""A file system that remembers what was written and what was synced, so that a loss of power can
be played after the fact: what was not synced before it survives or not, in any order.

    LostWrites      in front of the kernel's: each change of a page, a length or a name is noted
    `cut`           makes a directory as a drive may hold it that lost power after so many changes

Each sector of a page, each length and each name is as it was at some moment between what a sync
made sure of and the cut, whatever its neighbours are.
"""

import os
import random
import threading
from bisect import bisect_right
from collections.abc import Sequence
from pathlib import Path
from typing import Generic, NamedTuple, TypeVar

from kvtide.tiers.files import Buffer, SystemFiles

PAGE, SECTOR = 4096, 512
KEEPING = (0.0, 0.5, 0.9, 1.0)
"""How likely it is that the last of what was written is there, of one kind of file."""

Value = TypeVar("Value")


class _Sync(NamedTuple):
    """After `done` changes all of the first `begun` were sure to stay."""

    done: int
    begun: int


class _Told(Generic[Value]):
    """What something was, one after the other: at first `before`."""

    def __init__(self, before: Value) -> None:
        self.moments = [-1]
        self.values = [before]

    def add(self, moment: int, value: Value) -> None:
        self.moments.append(moment)
        self.values.append(value)

    @property
    def last(self) -> Value:
        return self.values[-1]

    def survivors(self, synced: int, cut: int) -> list[Value]:
        """What it may be after a loss of power."""
        first = bisect_right(self.moments, synced) - 1
        return self.values[first : bisect_right(self.moments, cut)]


class _File:
    """One file, whatever its name."""

    def __init__(self, suffix: str) -> None:
        self.suffix = suffix
        self.pages: dict[int, _Told[bytes]] = {}  # empty: nothing is there
        self.length = _Told(0)
        self.syncs: list[_Sync] = []


class LostWrites(SystemFiles):
    """The kernel's files below one directory, and their history."""

    def __init__(self, directory: Path) -> None:
        self.now = 0
        """Changes so far."""
        self._directory = str(directory)
        self._change = threading.Lock()
        self._names: dict[str, _Told[_File | None]] = {}
        self._name_syncs: list[_Sync] = []
        self._open: dict[int, _File] = {}

    # ---- the calls

    def open(self, path: str, flags: int) -> int:
        with self._change:
            descriptor = super().open(path, flags)
            file = self._file_at(path)
            if flags & os.O_CREAT and file is None:
                file = _File(path.rpartition(".")[2])
                self._named(path, file)
            assert file is not None, path
            if flags & os.O_TRUNC:
                self._end_at(file, 0)
            self._open[descriptor] = file
        return descriptor

    def close(self, descriptor: int) -> None:
        with self._change:
            del self._open[descriptor]
            super().close(descriptor)

    def write_at(self, descriptor: int, parts: Sequence[Buffer], offset_bytes: int) -> int:
        done = super().write_at(descriptor, parts, offset_bytes)
        content = b"".join(bytes(part) for part in parts)[:done]
        with self._change:
            file = self._open[descriptor]
            self.now += 1
            self._write(file, content, offset_bytes)
            end = offset_bytes + done
            if end > file.length.last:
                file.length.add(self.now, end)
        return done

    def _write(self, file: _File, content: bytes, at: int) -> None:
        while content:
            page, begin = divmod(at, PAGE)
            piece = content[: PAGE - begin]
            told = file.pages.setdefault(page, _Told(b""))
            before = told.last or bytes(PAGE)
            told.add(self.now, before[:begin] + piece + before[begin + len(piece) :])
            content, at = content[len(piece) :], at + len(piece)

    def truncate(self, descriptor: int, length_bytes: int) -> None:
        super().truncate(descriptor, length_bytes)
        with self._change:
            self._end_at(self._open[descriptor], length_bytes)

    def _end_at(self, file: _File, length_bytes: int) -> None:
        self.now += 1
        file.length.add(self.now, length_bytes)
        for page, told in file.pages.items():
            kept = told.last[: max(0, length_bytes - page * PAGE)]
            if len(kept) < len(told.last):
                told.add(self.now, kept + bytes(PAGE - len(kept)) if kept else b"")

    def punch(self, descriptor: int, offset_bytes: int, length_bytes: int) -> None:
        super().punch(descriptor, offset_bytes, length_bytes)
        with self._change:
            self.now += 1
            end = (offset_bytes + length_bytes) // PAGE
            for page, told in self._open[descriptor].pages.items():
                if offset_bytes // PAGE <= page < end:
                    told.add(self.now, b"")

    def sync(self, descriptor: int) -> None:
        begun = self.now
        super().sync(descriptor)
        with self._change:
            self._open[descriptor].syncs.append(self._synced(begun))

    def sync_directory(self, directory: str) -> None:
        begun = self.now
        super().sync_directory(directory)
        with self._change:
            self._name_syncs.append(self._synced(begun))

    def _synced(self, begun: int) -> _Sync:
        self.now += 1
        return _Sync(self.now, begun)

    def unlink(self, path: str) -> None:
        with self._change:
            super().unlink(path)
            self._named(path, None)

    def rename(self, path: str, to: str) -> None:
        with self._change:
            super().rename(path, to)
            self._named(to, self._file_at(path))
            self._names[path].add(self.now, None)

    def _file_at(self, path: str) -> _File | None:
        told = self._names.get(path)
        return None if told is None else told.last

    def _named(self, path: str, file: _File | None) -> None:
        self.now += 1
        self._names.setdefault(path, _Told(None)).add(self.now, file)

    # ---- what was sure when

    def sure_names(self, suffix: str) -> dict[str, int]:
        """Names that end so, and after how many changes no loss of power could take the first of
        each any more."""
        sure = {}
        for path, told in self._names.items():
            done = [sync.done for sync in self._name_syncs if sync.begun >= told.moments[1]]
            if path.endswith(suffix) and done:
                sure[os.path.basename(path)] = min(done)
        return sure

    # ---- a loss of power

    def cut(self, into: Path, after: int, draw: random.Random) -> None:
        """Make this directory what is left if the power goes after so many changes."""
        into.mkdir(mode=0o700)
        synced = _latest(self._name_syncs, after)
        keeping: dict[str, float] = {}
        torn = draw.choice([0.0, 0.1])

        def survivor(kind: str, told: _Told[Value], synced: int) -> Value:
            some = told.survivors(synced, after)
            keep = keeping.setdefault(kind, draw.choice(KEEPING))
            return some[-1] if len(some) == 1 or draw.random() < keep else draw.choice(some)

        for path, names in self._names.items():
            file = survivor("names", names, synced)
            if file is None:
                continue
            known = _latest(file.syncs, after)
            length = survivor(file.suffix, file.length, known)
            descriptor = os.open(into / os.path.basename(path), os.O_RDWR | os.O_CREAT, 0o600)
            os.ftruncate(descriptor, length)
            for page, pages in file.pages.items():
                content = survivor(file.suffix, pages, known)
                if draw.random() < torn:
                    other = survivor(file.suffix, pages, known) or bytes(PAGE)
                    begin = draw.randrange(0, PAGE, SECTOR)
                    content = (content or bytes(PAGE))[:begin] + other[begin:]
                fits = content[: max(0, length - page * PAGE)]
                if fits:
                    os.pwrite(descriptor, fits, page * PAGE)
            os.close(descriptor)


def _latest(syncs: list[_Sync], cut: int) -> int:
    """So many changes were sure to stay by then."""
    return max((sync.begun for sync in syncs if sync.done <= cut), default=-1)
