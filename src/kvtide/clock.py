"""Time as a value that is handed in, so that tests need not wait for it."""

import time
from typing import Protocol


class Clock(Protocol):
    """Tells the time in whole milliseconds from an arbitrary start; never goes back."""

    def now_ms(self) -> int:
        """Milliseconds since the clock's start."""
        ...


class MonotonicClock:
    """The machine's monotonic clock."""

    def now_ms(self) -> int:
        """Milliseconds since some fixed moment before this process began."""
        return time.monotonic_ns() // 1_000_000


class ManualClock:
    """A clock that stands still until it is moved: for tests."""

    def __init__(self, now_ms: int = 0) -> None:
        self._now_ms = now_ms

    def now_ms(self) -> int:
        """The moment it was moved to last."""
        return self._now_ms

    def advance(self, by_ms: int) -> None:
        """Move on; a negative step is a mistake of the test."""
        assert by_ms >= 0, by_ms
        self._now_ms += by_ms
