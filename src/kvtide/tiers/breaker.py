"""Stops asking a place that fails, and tries again by itself."""

import enum
import logging

FAILURES_MAX = 5
"""In a row; then the breaker opens."""
RETRY_MS_MIN, RETRY_MS_MAX = 1_000, 60_000
SHARED_RETRY_MS_MAX = 4_000
"""The longest pause where others mend the place: with a call of it, hits resume within T_heal."""


class State(enum.Enum):
    """Of a breaker; open in the second and the third.

    CLOSED ─ failures ─► OPEN ─ time ─► PROBING ─ well ─► ON_PROBATION ─ work is done ─► CLOSED
                          ▲◄── it fails ──┘                    │
                          └───────── one failure ──────────────┘
    """

    CLOSED = enum.auto()
    OPEN = enum.auto()
    PROBING = enum.auto()
    ON_PROBATION = enum.auto()


class Breaker:
    """Of one kind of work: "reads" or "writes". Ownership: the node's owner thread.

    It is closed while the place works; open, it lets nothing through but a probe, after a second,
    then after two, and so on up to `retry_ms_max`. A probe that goes well lets work through again,
    on probation: what a probe does may work where the work itself does not. The first that fails
    opens it again, with the next longer pause; only what works says so, and ends the pauses.
    """

    def __init__(
        self, work: str, place: str, logger: logging.Logger, retry_ms_max: int = RETRY_MS_MAX
    ) -> None:
        self.reason = ""
        """Why it is open; empty where it is not."""
        self._state = State.CLOSED
        self._work = work
        self._place = place
        self._logger = logger
        self._retry_ms_max = retry_ms_max
        self._failures = 0
        self._retry_ms = RETRY_MS_MIN
        self._retry_at_ms = 0

    @property
    def is_open(self) -> bool:
        """Whether no work goes through."""
        return self._state in (State.OPEN, State.PROBING)

    @property
    def is_probing(self) -> bool:
        """Whether the end of a probe is to come."""
        return self._state is State.PROBING

    def failed(self, error: Exception, now_ms: int) -> bool:
        """The place failed; whether the breaker opens by it. Says so in one line, if it was not
        on probation."""
        self._failures += 1
        is_enough = self._failures >= FAILURES_MAX or self._state is State.ON_PROBATION
        if self.is_open or not is_enough:
            return False
        reason = _said(error)
        self._open(
            reason, f"after {self._failures} failures in a row, the last is {reason}", now_ms
        )
        return True

    def hung(self, for_ms: int, now_ms: int) -> bool:
        """One call has not come back for so long; whether the breaker opens by it."""
        if self.is_open:
            return False
        reason = f"a call has not come back for {for_ms} ms"
        self._open(reason, f"since {reason}", now_ms)
        return True

    def _open(self, reason: str, story: str, now_ms: int) -> None:
        if self._state is State.ON_PROBATION:
            self._pause_longer(reason, now_ms)
            return
        self._pause(reason, RETRY_MS_MIN, now_ms)
        self._logger.error(
            "%s: %s stop %s; engines go on without, and it is tried again by itself",
            self._place,
            self._work,
            story,
        )

    def _pause_longer(self, reason: str, now_ms: int) -> None:
        self._pause(reason, min(2 * self._retry_ms, self._retry_ms_max), now_ms)

    def _pause(self, reason: str, retry_ms: int, now_ms: int) -> None:
        self._state, self.reason = State.OPEN, reason
        self._retry_ms, self._retry_at_ms = retry_ms, now_ms + retry_ms

    def succeeded(self) -> None:
        """The place did what was asked. While it is open that is no more than a straggler."""
        if not self.is_open:
            self.worked()

    def worked(self) -> None:
        """The place did again what it did not: the breaker closes."""
        self._failures = 0
        if self._state is not State.CLOSED:
            self._state, self.reason = State.CLOSED, ""
            self._logger.warning("%s: %s work again", self._place, self._work)

    def stops(self, now_ms: int) -> bool:
        """Whether nothing goes through now, not even a probe."""
        return self.is_probing or (self.is_open and now_ms < self._retry_at_ms)

    def wants_probe(self, now_ms: int) -> bool:
        """Whether it is time to try; then `is_probing` until `probed`, or `unproven`."""
        if not self.is_open or self.stops(now_ms):
            return False
        self._state = State.PROBING
        return True

    def unproven(self) -> None:
        """The probe does not tell anything: another one may."""
        if self.is_probing:
            self._state = State.OPEN

    def probed(self, error: Exception | None, now_ms: int) -> None:
        """How the probe went: well, and work is let through on probation."""
        if not self.is_open:
            return
        if error is None:
            self._state, self.reason = State.ON_PROBATION, ""
        else:
            self._pause_longer(_said(error), now_ms)


def _said(error: Exception) -> str:
    if isinstance(error, OSError) and error.errno is not None:
        return f"errno {error.errno} ({error.strerror})"
    return str(error)
