"""How long clears may hold up the node's owner, one after the other."""

import threading
import time

from kvtide.tiers.patience import Patience

WAIT_S = 0.1


def test_what_comes_in_a_row_waits_no_longer_than_one_and_time_brings_patience_back() -> None:
    patience, never = Patience(WAIT_S), threading.Event()
    for _ in range(2):
        began_s = time.monotonic()
        assert not any(patience.wait(never) for _ in range(20))
        assert WAIT_S <= time.monotonic() - began_s < 10 * WAIT_S
        patience.renew()


def test_what_is_there_needs_no_patience() -> None:
    patience, event = Patience(0.0), threading.Event()
    assert not patience.wait(event)
    event.set()
    assert patience.wait(event)
