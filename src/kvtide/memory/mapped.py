"""The regions that one worker has mapped: coming, in use, going.

    offered ─► mapping (populated on a thread of its own) ─► open ─► leaving ─► unmapped
                                                              ▲  users > 0: not unmapped yet

A region is unmapped only when no copy is in it; whoever copies holds a use. So the node may ask
for a region back at any time, and nobody waits for anybody. Once all this is closed, whoever ends
the last copy in a region unmaps it.

Each mapping keeps two descriptors, and a process may have few: the engine's own come first, so a
region is refused where it would take of the last of them.

Ownership: all state under `_lock`; populating and unmapping happen on the `kvtide-map` thread
(what a copy holds when that ends: on the copy's), with the lock free.
"""

import os
import queue
import resource
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from kvtide.errors import KVTideError
from kvtide.memory.region import MappedRegion
from kvtide.processors import leave_binding

DESCRIPTORS_LEFT_MIN = 256
"""So many of those that the process may open are left to its engine."""
DESCRIPTORS_LEFT_RATIO_MIN = 0.25
"""Where it may open fewer than four times as many, only this part is."""


class _Mapping:
    """One region's state."""

    def __init__(self, region: MappedRegion) -> None:
        self.region = region
        self.users = 0
        self.is_open = False
        self.is_leaving = False
        self.is_going = False
        self.stop = threading.Event()


class MappedRegions:
    """All regions of one worker."""

    def __init__(
        self,
        on_open: Callable[[int], None],
        on_failed: Callable[[int, str], None],
        on_left: Callable[[int], None],
    ) -> None:
        """The callbacks say so to the node. They come on the mapping thread or inside a call here,
        and must not wait; what they cannot say is made up for by `named` and `say_changes`."""
        self._on_open = on_open
        self._on_failed = on_failed
        self._on_left = on_left
        self._lock = threading.Condition()
        self._mappings: dict[int, _Mapping] = {}
        self._named: dict[int, bool] = {}  # what a hello named: whether it was open
        self._work: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="kvtide-map", daemon=True)

    def start(self) -> None:
        """Begin to map what is offered."""
        self._thread.start()

    def offer(self, number: int, cell_count: int, cell_bytes: int, descriptors: list[int]) -> None:
        """Map a region and populate it in the background; the descriptors stay the caller's.

        One that is there already is offered again where our word of it crossed with the node's.
        """
        with self._lock:
            known = self._mappings.get(number)
            is_open = known is not None and known.is_open
        if known is not None:
            if is_open:
                self._on_open(number)
            return
        fd, generations_fd = descriptors
        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        if fault := _shortage(_open_count(), limit):
            self._on_failed(number, fault)
            return
        try:
            region = MappedRegion(fd, cell_count * cell_bytes, generations_fd, cell_bytes)
        except KVTideError as error:
            self._on_failed(number, str(error))
            return
        with self._lock:
            assert number not in self._mappings, f"region {number} is offered on two threads"
            is_closed = self._is_closed
            if not is_closed:
                self._mappings[number] = _Mapping(region)
        if is_closed:
            region.close()
            self._on_failed(number, "the engine ends")
        else:
            self._work.put(number)

    def leave(self, number: int) -> None:
        """Unmap a region as soon as no copy is in it; one that is not there has left already."""
        with self._lock:
            mapping = self._mappings.get(number)
            if mapping is not None:
                mapping.is_leaving = True
                mapping.is_open = False
                mapping.stop.set()
        if mapping is None:
            self._on_left(number)
        else:
            self._work.put(number)

    def leave_all(self) -> None:
        """Unmap everything: the node that owns it is gone."""
        for number in self.numbers():
            self.leave(number)

    def numbers(self) -> list[int]:
        """Regions mapped or being mapped."""
        with self._lock:
            return list(self._mappings)

    def named(self) -> tuple[list[int], list[int]]:
        """For a hello: the open regions, and those that are being mapped or leave."""
        with self._lock:
            self._named = {number: mapping.is_open for number, mapping in self._mappings.items()}
            is_open = self._named
            return [n for n in is_open if is_open[n]], [n for n in is_open if not is_open[n]]

    def say_changes(self) -> None:
        """After a welcome: say what has changed since `named`, when nobody could be told."""
        with self._lock:
            is_open = {number: mapping.is_open for number, mapping in self._mappings.items()}
            named, self._named = self._named, {}
        for number, was_open in named.items():
            if number not in is_open:
                self._on_left(number)
            elif is_open[number] and not was_open:
                self._on_open(number)

    def wait_empty(self, timeout_s: float) -> bool:
        """Wait until everything is unmapped."""
        with self._lock:
            return self._lock.wait_for(lambda: not self._mappings, timeout_s)

    @contextmanager
    def using(self, numbers: set[int]) -> Iterator[dict[int, MappedRegion]]:
        """The open ones of these regions, which stay mapped inside the `with`."""
        with self._lock:
            held = {
                number: mapping
                for number in numbers
                if (mapping := self._mappings.get(number)) is not None and mapping.is_open
            }
            for mapping in held.values():
                mapping.users += 1
        try:
            yield {number: mapping.region for number, mapping in held.items()}
        finally:
            with self._lock:
                is_closed = self._is_closed
                for mapping in held.values():
                    mapping.users -= 1
                leaving = {n: one for n, one in held.items() if one.is_leaving and not one.users}
            for number, mapping in leaving.items():
                if is_closed:  # the thread may have ended
                    self._unmap(number, mapping)
                else:
                    self._work.put(number)

    def close(self, timeout_s: float) -> None:
        """Unmap everything and end the thread, in bounded time; a copy that runs keeps its map
        until it has ended."""
        with self._lock:
            self._is_closed = True
        self.leave_all()
        self._work.put(None)
        if self._thread.is_alive():
            self._thread.join(timeout_s)

    def _run(self) -> None:
        leave_binding()
        while (number := self._work.get()) is not None:
            with self._lock:
                mapping = self._mappings.get(number)
            if mapping is None:
                continue
            if mapping.is_leaving:
                self._unmap(number, mapping)
            elif not mapping.is_open:
                self._populate(number, mapping)

    def _populate(self, number: int, mapping: _Mapping) -> None:
        try:
            is_done = mapping.region.populate(mapping.stop)
        except Exception as error:  # no memory, or a fault of ours: it costs this region alone
            with self._lock:
                mapping.is_leaving = True
            self._unmap(number, mapping, failure=str(error) or repr(error))
            return
        with self._lock:
            mapping.is_open = is_done and not mapping.is_leaving
            is_open = mapping.is_open
        if is_open:
            self._on_open(number)

    def _unmap(self, number: int, mapping: _Mapping, failure: str = "") -> None:
        with self._lock:
            if mapping.users or mapping.is_going:
                return
            mapping.is_going = True
        with suppress(BufferError):  # a view that outlives its copy: the memory goes with it
            mapping.region.close()
        with self._lock:
            del self._mappings[number]
            self._lock.notify_all()
        if failure:
            self._on_failed(number, failure)
        else:
            self._on_left(number)


def _open_count() -> int | None:
    """Descriptors of this process; None where there is not even one to look with."""
    try:
        return len(os.listdir("/proc/self/fd"))
    except OSError:
        return None


def _shortage(open_count: int | None, limit: int) -> str:
    """Why a process of so many open files may not have those of a region, too; empty: it may."""
    left_min = int(min(DESCRIPTORS_LEFT_MIN, limit * DESCRIPTORS_LEFT_RATIO_MIN))
    if open_count is None:
        return f"not one of {limit} open files is left: raise `ulimit -n`"
    if limit - open_count >= left_min:
        return ""
    return (
        f"{open_count} of {limit} open files are in use, and {left_min} are left to the engine:"
        " raise `ulimit -n`"
    )
