"""Whether anything has worked lately, as a tier sees it that asks a server.

Ownership: the node's owner thread.
"""

SILENT_MS = 120_000
"""Failures for so long without a success between them are said, whatever the breaker does."""


class Health:
    """What fails now and then never opens a breaker, and what fails before the first success is
    told apart from what has not been tried."""

    def __init__(self) -> None:
        self.now_ms = 0
        self._has_worked = False
        self._failing_since_ms: int | None = None
        self._error = ""

    def succeeded(self) -> None:
        """The place did what was asked."""
        self._has_worked = True
        self._failing_since_ms = None

    def failed(self, error: str) -> None:
        """It did not."""
        self._error = error
        if self._failing_since_ms is None:
            self._failing_since_ms = self.now_ms

    @property
    def is_failing(self) -> bool:
        """Whether nothing has worked since something failed."""
        return self._failing_since_ms is not None

    @property
    def state(self) -> str:
        """ "on", or what is wrong."""
        if self._failing_since_ms is None:
            return "on" if self._has_worked else "connecting"
        if not self._has_worked:
            return f"it has not worked yet: {self._error}"
        for_ms = self.now_ms - self._failing_since_ms
        if for_ms < SILENT_MS:
            return "on"
        return f"nothing has worked for {for_ms // 1000} s: {self._error}"
