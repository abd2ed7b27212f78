"""Stores that have not ended: in order, each behind its parent.

Ownership: the node's owner thread. Invariant: `by_key` holds those that may still become records;
one that is doomed (cleared, or its parent failed) is not in it, and ends when the writing thread
has done with its cells.
"""

from collections import deque
from dataclasses import dataclass, field, replace

from kvtide.tiers.base import StoreJob


@dataclass(slots=True, eq=False)
class Pending:
    """One store.

    Attributes:
        kind: number of its root and layout, where the tier has one.
        since_ms: when it came.
        op: what the writing thread has of it; None while it waits.
        behind: stores of its children.
        twins: numbers of jobs that want the same record.
        is_ended: its job has ended, or will as its twin.
        is_doomed: it will not become a record, whatever the writing thread says.
    """

    job: StoreJob
    kind: int
    since_ms: int
    op: object = None
    behind: "list[Pending]" = field(default_factory=list)
    twins: list[int] = field(default_factory=list)
    is_ended: bool = False
    is_doomed: bool = False

    @property
    def key(self) -> bytes:
        """Of its record."""
        return self.job.record.key


class PendingStores:
    """All of them."""

    def __init__(self) -> None:
        self.waiting: deque[Pending] = deque()
        self.by_key: dict[bytes, Pending] = {}
        self.written: dict[object, Pending] = {}
        self.queued_bytes = 0

    def add(self, pending: Pending, parent: Pending | None) -> None:
        """It waits behind those that came before, and behind its parent's store, if any."""
        self.waiting.append(pending)
        self.by_key[pending.key] = pending
        self.queued_bytes += pending.job.record.payload_bytes
        if parent is not None:
            parent.behind.append(pending)

    def end(self, pending: Pending) -> None:
        """Its job ends, and whoever still knows it has no cells of it."""
        assert not pending.is_ended, pending.job.number
        pending.is_ended = True
        pending.job, pending.op = replace(pending.job, cells=()), None
        self.queued_bytes -= pending.job.record.payload_bytes
        self.forget(pending)

    def forget(self, pending: Pending) -> None:
        """It will not be found by its key any more."""
        if self.by_key.get(pending.key) is pending:
            del self.by_key[pending.key]

    def head(self) -> Pending | None:
        """The next one to write."""
        while self.waiting and self.waiting[0].is_ended:
            self.waiting.popleft()
        return self.waiting[0] if self.waiting else None

    def drop_ended(self) -> None:
        """None that has ended waits: while nothing is written no `head` is asked for."""
        self.waiting = deque(one for one in self.waiting if not one.is_ended)

    def doom(self, first: list[Pending]) -> list[Pending]:
        """These and all behind them will be no records; those whose jobs end with it, now."""
        ending = []
        stack = list(first)
        while stack:
            pending = stack.pop()
            stack += pending.behind
            if pending.is_ended or pending.is_doomed:
                continue
            pending.is_doomed = True
            self.forget(pending)
            if pending.op is None:
                ending.append(pending)
        return ending

    def older_than(self, before_ms: int) -> list[Pending]:
        """Those that wait since then or longer."""
        return [
            one
            for one in self.waiting
            if one.since_ms <= before_ms and one.op is None and not one.is_ended
        ]

    def of_kinds(self, kinds: set[int]) -> list[Pending]:
        """Those of these roots and layouts that have not ended."""
        return [one for one in self.unended() if one.kind in kinds]

    def unended(self) -> list[Pending]:
        """Those that wait, and those that are being written."""
        every = [*self.waiting, *self.written.values()]
        return [one for one in every if not one.is_ended]

    def unwritten(self) -> list[Pending]:
        """Those that wait."""
        return [one for one in self.waiting if not one.is_ended]
