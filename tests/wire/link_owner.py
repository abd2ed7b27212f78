"""A `LinkOwner` that writes down what it is told."""

import os
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from kvtide.core import messages as m
from kvtide.wire.link import Link
from kvtide.wire.places import Places
from tests.wire.raw import scheduler_hello

WAIT_S_MAX = 20.0


class Owner:
    """Notes of all calls, in order, as (name, value)."""

    def __init__(self, **hello: Any) -> None:
        self.calls: list[tuple[str, Any]] = []
        self.raises_in: set[str] = set()
        self._hello = hello
        self._changed = threading.Condition()

    def link(self, places: Places) -> Link:
        """A link of this owner, started."""
        link = Link(places.socket, self, "test")
        link.start()
        return link

    def wait(self, name: str, count: int = 1, timeout_s: float = WAIT_S_MAX) -> list[Any]:
        """What came by that name, once it has come so often."""
        with self._changed:
            is_so = self._changed.wait_for(lambda: len(self.of(name)) >= count, timeout_s)
            assert is_so, f"no {name}; there was {[name for name, _ in self.calls]}"
            return self.of(name)

    def of(self, name: str) -> list[Any]:
        """What came by that name so far."""
        return [value for called, value in self.calls if called == name]

    def _note(self, name: str, value: Any = None) -> None:
        with self._changed:
            self.calls.append((name, value))
            self._changed.notify_all()
        if name in self.raises_in:
            raise RuntimeError(f"a fault of the owner in {name}")

    def hello(self) -> m.Message:
        self._note("hello")
        return scheduler_hello("owner", **self._hello)

    def on_up(self, welcome: m.Welcome) -> None:
        self._note("up", welcome)

    def on_message(self, message: m.Message, descriptors: list[int]) -> None:
        for descriptor in descriptors:
            os.close(descriptor)
        self._note("message", message)

    def on_down(self, *, node_is_dead: bool) -> None:
        self._note("down", node_is_dead)

    def on_refused(self, refused: m.Refused) -> None:
        self._note("refused", refused)

    def on_absent(self) -> None:
        self._note("absent")

    def on_pulse(self) -> None:
        self._note("pulse", time.monotonic())


MakeLink = Callable[[Owner, Places], Link]


@pytest.fixture
def make_link() -> Iterator[MakeLink]:
    """Makes started links; all are closed at the end."""
    made: list[Link] = []

    def make(owner: Owner, places: Places) -> Link:
        made.append(owner.link(places))
        return made[-1]

    yield make
    for link in made:
        link.close(5)


def wait_until(is_so: Callable[[], bool], what: str, timeout_s: float = WAIT_S_MAX) -> None:
    """Wait for a state."""
    until_s = time.monotonic() + timeout_s
    while not is_so():
        assert time.monotonic() < until_s, what
        time.sleep(0.005)
