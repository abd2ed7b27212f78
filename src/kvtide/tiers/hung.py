"""Calls that do not come back: a drive or a client that hangs says nothing; only time can tell.

A call that runs for longer than anybody waits for it helps nobody any more, and those behind it
would only wait too. Such a call is told of once; as long as all threads for that work have one,
nothing shows that it works again, since whatever is queued would stand behind them.

Ownership: the node's owner thread.
"""

from collections.abc import Callable, Iterable
from typing import Generic, TypeVar

Op = TypeVar("Op")


class Hung(Generic[Op]):
    """Since when calls run, as the owner's ticks see it."""

    def __init__(self, run_ms_max: Callable[[Op], int]) -> None:
        """A call that runs for longer than this hangs."""
        self.told: set[Op] = set()
        """Those that hang."""
        self._run_ms_max = run_ms_max
        self._since_ms: dict[Op, int] = {}

    def look(self, running: Iterable[Op], now_ms: int) -> set[Op]:
        """Those that hang and were not told of."""
        self._since_ms = {op: self._since_ms.get(op, now_ms) for op in running}
        hung = {
            op
            for op, since_ms in self._since_ms.items()
            if now_ms - since_ms > self._run_ms_max(op)
        }
        more = hung - self.told
        self.told = hung
        return more

    def ended(self, op: Op) -> None:
        """It came back."""
        self._since_ms.pop(op, None)
        self.told.discard(op)
