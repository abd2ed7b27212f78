"""Loads that do not come back: a drive that hangs says nothing, so only time can tell.

A load that runs for longer than a request waits for it helps nobody any more, and those behind it
would only wait too. Such a load is told of once; as long as all loading threads have one, nothing
shows that reads work again, since whatever is queued would stand behind them.

Ownership: the node's owner thread.
"""

import errno

from kvtide.bounds import T_LOAD_MS
from kvtide.tiers.disk.ops import LoadOp
from kvtide.tiers.disk.workers import LOAD_THREADS, Workers

RUN_MS_MAX = T_LOAD_MS


class Hung:
    """Since when loads run, as the owner's ticks see it."""

    def __init__(self, workers: Workers) -> None:
        self._workers = workers
        self._since_ms: dict[LoadOp, int] = {}
        self._told: set[LoadOp] = set()

    def look(self, now_ms: int) -> bool:
        """Whether one more load has run for too long."""
        running = self._workers.running_loads()
        self._since_ms = {op: self._since_ms.get(op, now_ms) for op in running}
        hung = {op for op, since_ms in self._since_ms.items() if now_ms - since_ms > RUN_MS_MAX}
        is_more = not hung <= self._told
        self._told = hung
        return is_more

    def ended(self, op: LoadOp) -> None:
        """It came back."""
        self._since_ms.pop(op, None)
        self._told.discard(op)

    @property
    def are_all(self) -> bool:
        """Whether no loading thread is free."""
        return len(self._told) >= LOAD_THREADS

    @property
    def reason(self) -> OSError | None:
        """Why loads would not work, whatever a probe says."""
        return OSError(errno.ETIMEDOUT, "loads have not come back") if self.are_all else None
