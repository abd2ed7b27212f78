"""What the node answers to the scheduler role, from the question until somebody has taken it.

    asked ─► open ─┬─► arrived, waiting ─► taken by the scheduler's thread
                   └─► given up ─► arrived: what it grants and leases goes back at once

A question is given up by whoever asked it, or with the session that it was asked in; its answer
comes all the same, as long as its connection lasts. The engine may take no step for a long time,
so whoever reads such an answer gives back what is in it.

Ownership: everything here under `_lock`. The scheduler's thread asks and takes; any thread reads.
"""

import threading
from collections import deque

from kvtide.core import messages as m

Answer = m.Match | m.Pending | m.StoreAnswer


class Answers:
    """All questions of one engine."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: dict[int, bool] = {}  # asked on this connection: whether it was given up
        self._waiting: deque[Answer] = deque()
        self.last_grant = 0
        """The highest grant of this node that was taken."""

    @property
    def are_waiting(self) -> bool:
        """Some have arrived, and were not taken."""
        return bool(self._waiting)

    def asked(self, number: int) -> None:
        """A question is about to be sent."""
        with self._lock:
            self._open[number] = False

    def not_sent(self, number: int) -> None:
        """It could not be sent: no answer will come."""
        with self._lock:
            self._open.pop(number, None)

    def arrived(self, answer: Answer) -> bool:
        """Keep an answer for who takes it; False where nobody waits for it any more."""
        with self._lock:
            is_wanted = self._open.get(answer.number) is False
            if is_wanted:
                self._waiting.append(answer)
            if not isinstance(answer, m.Pending):
                self._open.pop(answer.number, None)
        return is_wanted

    def take(self) -> list[Answer]:
        """All that have arrived, in order."""
        with self._lock:
            answers = list(self._waiting)
            self._waiting.clear()
            for answer in answers:
                if isinstance(answer, m.StoreAnswer):
                    self.last_grant = max(self.last_grant, *answer.grants, 0)
        return answers

    def give_up(self, number: int) -> list[Answer]:
        """Nobody waits for this answer any more; what has arrived of it is the caller's."""
        with self._lock:
            early = [answer for answer in self._waiting if answer.number == number]
            self._waiting = deque(one for one in self._waiting if one.number != number)
            if number in self._open:
                self._open[number] = True
        return early

    def give_up_all(self) -> list[Answer]:
        """Nor for any other."""
        with self._lock:
            early = list(self._waiting)
            self._waiting.clear()
            self._open = dict.fromkeys(self._open, True)
        return early

    def lost(self) -> None:
        """The connection has ended: nothing comes, and the node takes back what was not taken."""
        with self._lock:
            self._waiting.clear()
            self._open.clear()
