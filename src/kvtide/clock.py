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
