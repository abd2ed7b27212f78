"""Whether a node that does not answer is still asked, and how often."""

import pytest

from kvtide.bounds import HEARTBEAT_S
from kvtide.wire.breaker import (
    BREAKER_S_MAX,
    SILENT_PINGS_MAX,
    SILENT_QUESTIONS_MAX,
    Breaker,
)

DOUBLING_S = [1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0]


def test_silent_pings_open_it_and_then_come_less_and_less_often() -> None:
    breaker = Breaker()
    for _ in range(SILENT_PINGS_MAX - 1):
        assert breaker.pinged() == HEARTBEAT_S
        assert not breaker.is_open
    assert [breaker.pinged() for _ in DOUBLING_S] == DOUBLING_S
    assert breaker.is_open
    assert max(DOUBLING_S) == BREAKER_S_MAX


@pytest.mark.parametrize("rounds", [1, 2])
def test_silent_questions_open_it_and_what_is_heard_begins_anew(rounds: int) -> None:
    breaker = Breaker()
    for _ in range(rounds):
        for _ in range(SILENT_QUESTIONS_MAX):
            assert not breaker.is_open
            breaker.question_is_silent()
        assert breaker.is_open
        assert [breaker.pinged() for _ in DOUBLING_S] == DOUBLING_S
        breaker.heard()
