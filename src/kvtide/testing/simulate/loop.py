"""What stands for asyncio in a simulated node: callbacks in turn, as its one thread runs them."""

import contextlib
import select
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from kvtide.testing.simulate.files import File, Table, number_of
from kvtide.testing.simulate.kernel import Kernel, Process


class SimFuture:
    """Something that will have a result; as much of a future as the node uses."""

    def __init__(self) -> None:
        self._calls: list[Callable[[Any], None]] = []
        self._result: Any = None
        self._is_done = False

    def add_done_callback(self, call: Callable[[Any], None]) -> None:
        if self._is_done:
            call(self)
        else:
            self._calls.append(call)

    def result(self) -> Any:
        return self._result

    def done_with(self, result: Any) -> None:
        """It is there."""
        self._result, self._is_done = result, True
        for call in self._calls:
            call(self)


class _Watch:
    """One descriptor that the loop waits for, for reading or for writing."""

    def __init__(self, file: File, wanted: int, call: Callable[[], None]) -> None:
        self.file = file
        self.wanted = wanted
        self.call = call
        self.is_due = False


class SimLoop:
    """The event loop of one node."""

    def __init__(self, kernel: Kernel, table: Table, process: Process) -> None:
        self._kernel = kernel
        self._table = table
        self._process = process
        self._watches: dict[tuple[int, int], tuple[_Watch, Callable[[], None]]] = {}
        self._on_exception: Callable[[Any, dict[str, Any]], None] | None = None
        self.after_call: Callable[[], None] = lambda: None
        """Called after every callback."""

    def set_exception_handler(self, call: Callable[[Any, dict[str, Any]], None]) -> None:
        self._on_exception = call

    def run(self, call: Callable[..., None], *arguments: Any) -> None:
        """A callback, as the loop calls it: what it raises is the handler's."""
        try:
            call(*arguments)
        except Exception as error:
            if self._on_exception is None:
                raise
            self._on_exception(
                self, {"message": f"a callback failed: {error!r}", "exception": error}
            )
        self.after_call()

    def call_soon(self, call: Callable[..., None], *arguments: Any) -> None:
        now_us = self._kernel.now_us
        self._kernel.at(now_us, lambda: self.run(call, *arguments), self._process)

    call_soon_threadsafe = call_soon

    def call_later(self, delay_s: float, call: Callable[..., None], *arguments: Any) -> None:
        at_us = self._kernel.now_us + int(delay_s * 1e6)
        self._kernel.at(at_us, lambda: self.run(call, *arguments), self._process)

    # ---- descriptors

    def add_reader(self, what: Any, call: Callable[..., None], *arguments: Any) -> None:
        self._add(what, select.POLLIN, lambda: self.run(call, *arguments))

    def add_writer(self, what: Any, call: Callable[..., None], *arguments: Any) -> None:
        self._add(what, select.POLLOUT, lambda: self.run(call, *arguments))

    def remove_reader(self, what: Any) -> None:
        self._remove(number_of(what), select.POLLIN)

    def remove_writer(self, what: Any) -> None:
        self._remove(number_of(what), select.POLLOUT)

    def _add(self, what: Any, wanted: int, call: Callable[[], None]) -> None:
        number = number_of(what)
        self._remove(number, wanted)
        watch = _Watch(self._table.file(number), wanted, call)

        def changed() -> None:
            self._look((number, wanted), watch)

        self._watches[number, wanted] = (watch, changed)
        watch.file.watchers.append(changed)
        changed()

    def _remove(self, number: int, wanted: int) -> None:
        found = self._watches.pop((number, wanted), None)
        if found is not None:
            watch, changed = found
            with contextlib.suppress(ValueError):
                watch.file.watchers.remove(changed)

    def _look(self, place: tuple[int, int], watch: _Watch) -> None:
        """Have the callback called, if there is a reason to and it is not called already."""
        if watch.is_due or not watch.file.ready() & watch.wanted:
            return
        watch.is_due = True

        def due() -> None:
            watch.is_due = False
            if self._watches.get(place, (None,))[0] is not watch:
                return
            if watch.file.ready() & watch.wanted:
                watch.call()
            self._look_again(place, watch)

        self._kernel.soon(due, self._process)

    def _look_again(self, place: tuple[int, int], watch: _Watch) -> None:
        if self._watches.get(place, (None,))[0] is watch:
            self._look(place, watch)


class SimFlag:
    """As `asyncio.Event`, as far as the node sets and reads it."""

    def __init__(self) -> None:
        self._is_set = False

    def set(self) -> None:
        self._is_set = True

    def is_set(self) -> bool:
        return self._is_set


def asyncio_of(kernel: Kernel, loops: dict[int, SimLoop]) -> SimpleNamespace:
    """What stands for `asyncio`; `loops` by the number of the process."""

    def running() -> SimLoop:
        assert kernel.current is not None
        return loops[kernel.current.pid]

    return SimpleNamespace(
        get_running_loop=running, Event=SimFlag, wrap_future=lambda future: future
    )
