"""The breaker: whether a node that does not answer is still asked.

After five questions, or three pings, without an answer it opens: nothing is sent then but one ping
after 1 s, doubling to 30 s; anything heard closes it.

Ownership: plain integers, written by any thread; a count that is lost costs a heartbeat.
"""

from kvtide.bounds import HEARTBEAT_S

SILENT_QUESTIONS_MAX = 5
"""Each has cost a request T_answer; so few are bad luck no more."""
SILENT_PINGS_MAX = 3
"""An idle engine notices within as many heartbeats, before a request has to."""
BREAKER_S_FIRST, BREAKER_S_MAX = 1.0, 30.0
"""Between pings while the breaker is open: a short silence costs little, a long one no work."""


class Breaker:
    """What has been asked of one node, and not been answered."""

    def __init__(self) -> None:
        self._silent_questions = 0
        self._silent_pings = 0
        self._pause_s = BREAKER_S_FIRST

    @property
    def is_open(self) -> bool:
        """The node has been silent for too long."""
        return (
            self._silent_questions >= SILENT_QUESTIONS_MAX
            or self._silent_pings >= SILENT_PINGS_MAX
        )

    def heard(self) -> None:
        """The node has said something."""
        self._silent_questions = 0
        self._silent_pings = 0
        self._pause_s = BREAKER_S_FIRST

    def question_is_silent(self) -> None:
        """A question was not answered in time."""
        self._silent_questions += 1

    def pinged(self) -> float:
        """A ping is on its way; seconds until the next one."""
        self._silent_pings += 1
        if not self.is_open:
            return HEARTBEAT_S
        pause_s, self._pause_s = self._pause_s, min(self._pause_s * 2, BREAKER_S_MAX)
        return pause_s
