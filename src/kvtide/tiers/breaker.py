"""Stops asking a place that fails, and tries again by itself."""

import logging

FAILURES_MAX = 5
"""In a row; then the breaker opens."""
RETRY_MS_MIN, RETRY_MS_MAX = 1_000, 60_000
SHARED_RETRY_MS_MAX = 4_000
"""The longest pause where others mend the place: with a call of it, hits resume within T_heal."""


class Breaker:
    """Of one kind of work: "reads" or "writes". Ownership: the node's owner thread.

    It is closed while the place works; open, it lets nothing through but a probe, after a second,
    then after two, and so on up to `retry_ms_max`. A probe that goes well lets work through again,
    on trial: what a probe does may work where the work itself does not. The first that fails opens
    it again, with the next longer pause; only what works says so, and ends the pauses.
    """

    def __init__(
        self, work: str, place: str, logger: logging.Logger, retry_ms_max: int = RETRY_MS_MAX
    ) -> None:
        self.is_open = False
        self.is_probing = False
        self.reason = ""
        self._is_on_trial = False
        self._work = work
        self._place = place
        self._logger = logger
        self._retry_ms_max = retry_ms_max
        self._failures = 0
        self._retry_ms = RETRY_MS_MIN
        self._retry_at_ms = 0

    def failed(self, error: Exception, now_ms: int) -> bool:
        """The place failed; whether the breaker opens by it. Says so in one line, if it was not
        on trial."""
        self._failures += 1
        if self.is_open or (self._failures < FAILURES_MAX and not self._is_on_trial):
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
        self.is_open = True
        self.reason = reason
        if self._is_on_trial:
            self._pause_longer(now_ms)
            return
        self._retry_ms = RETRY_MS_MIN
        self._retry_at_ms = now_ms + self._retry_ms
        self._logger.error(
            "%s: %s stop %s; engines go on without, and it is tried again by itself",
            self._place,
            self._work,
            story,
        )

    def _pause_longer(self, now_ms: int) -> None:
        self._is_on_trial = False
        self._retry_ms = min(2 * self._retry_ms, self._retry_ms_max)
        self._retry_at_ms = now_ms + self._retry_ms

    def succeeded(self) -> None:
        """The place did what was asked. While it is open that is no more than a straggler."""
        if self._is_on_trial:
            self.worked()
        elif not self.is_open:
            self._failures = 0

    def worked(self) -> None:
        """The place did again what it did not: the breaker closes."""
        self._failures = 0
        if self.is_open or self._is_on_trial:
            self.is_open = self._is_on_trial = False
            self.reason = ""
            self._logger.warning("%s: %s work again", self._place, self._work)

    def stops(self, now_ms: int) -> bool:
        """Whether nothing goes through now, not even a probe."""
        return self.is_open and (self.is_probing or now_ms < self._retry_at_ms)

    def wants_probe(self, now_ms: int) -> bool:
        """Whether it is time to try; then `is_probing` until `probed`, or `unproven`."""
        if not self.is_open or self.stops(now_ms):
            return False
        self.is_probing = True
        return True

    def unproven(self) -> None:
        """The probe does not tell anything: another one may."""
        self.is_probing = False

    def probed(self, error: Exception | None, now_ms: int) -> None:
        """How the probe went: well, and work is let through on trial."""
        self.is_probing = False
        if not self.is_open:
            return
        if error is None:
            self.is_open, self._is_on_trial = False, True
            self.reason = ""
            return
        self.reason = _said(error)
        self._pause_longer(now_ms)


def _said(error: Exception) -> str:
    if isinstance(error, OSError) and error.errno is not None:
        return f"errno {error.errno} ({error.strerror})"
    return str(error)
