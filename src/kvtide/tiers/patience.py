"""How long calls may hold up the node's owner, all of them together."""

import threading
import time

CLEAR_S_MAX = 0.2
"""For a place to take note of clears: see `Tier.clear`."""


class Patience:
    """Time to wait for events, until it is renewed.

    What comes in a row (a clear for each salt of an adapter, say) waits no longer than one: who
    needs the owner meanwhile would else wait for all of them.
    """

    def __init__(self, wait_s_max: float) -> None:
        self._wait_s_max = self._left_s = wait_s_max

    def renew(self) -> None:
        """The owner has done other things."""
        self._left_s = self._wait_s_max

    def wait(self, event: threading.Event) -> bool:
        """Wait while there is time; whether the event is there."""
        began_s = time.monotonic()
        is_there = event.wait(self._left_s)
        self._left_s = max(0.0, self._left_s - (time.monotonic() - began_s))
        return is_there
