"""What a breaker lets through, how often it tries, and how little it says."""

import errno
import logging
from itertools import pairwise

import pytest

from kvtide.tiers.breaker import FAILURES_MAX, RETRY_MS_MIN, Breaker

ERROR = OSError(errno.EDQUOT, "over quota")
RETRY_MS_MAX = 16_000


@pytest.fixture
def breaker() -> Breaker:
    """Opened by as many failures as it takes, at zero."""
    made = Breaker("writes", "the place", logging.getLogger("kvtide.test"), RETRY_MS_MAX)
    assert [made.failed(ERROR, 0) for _ in range(FAILURES_MAX)] == [False] * 4 + [True]
    return made


def try_again(breaker: Breaker, now_ms: int) -> int:
    """A probe goes well as soon as it may; when that is."""
    while not breaker.wants_probe(now_ms):
        now_ms += RETRY_MS_MIN
    breaker.probed(None, now_ms)
    assert not breaker.is_open
    return now_ms


def test_a_probe_that_works_where_the_work_does_not_ends_no_pause(
    breaker: Breaker, caplog: pytest.LogCaptureFixture
) -> None:
    """One failure is enough after it, and the next pause is longer; nothing more is said."""
    tried_ms = [0]
    for _ in range(6):
        tried_ms.append(try_again(breaker, tried_ms[-1]))
        assert breaker.failed(ERROR, tried_ms[-1]), "it is known to fail"
        assert not breaker.failed(ERROR, tried_ms[-1]), "others that were on their way"
        assert breaker.reason
    pauses = [after - before for before, after in pairwise(tried_ms)]
    assert pauses == [1_000, 2_000, 4_000, 8_000, 16_000, 16_000]
    assert not caplog.records


def test_one_failure_is_enough_where_a_call_hung_before() -> None:
    """A hung call opens it without a failure that counts."""
    made = Breaker("reads", "the place", logging.getLogger("kvtide.test"), RETRY_MS_MAX)
    assert made.hung(5_000, 0)
    now_ms = try_again(made, 0)
    assert made.failed(ERROR, now_ms)
    assert made.stops(now_ms + RETRY_MS_MIN), "the pause is longer"


def test_work_that_is_done_again_ends_the_pauses_and_says_so(
    breaker: Breaker, caplog: pytest.LogCaptureFixture
) -> None:
    """Not the probe; and from then on it takes as many failures as ever, and a line again."""
    now_ms = try_again(breaker, 0)
    assert not caplog.records
    breaker.succeeded()
    assert [one.getMessage() for one in caplog.records] == ["the place: writes work again"]
    for _ in range(FAILURES_MAX):
        assert not breaker.is_open
        breaker.failed(ERROR, now_ms)
    assert breaker.is_open
    assert breaker.wants_probe(now_ms + RETRY_MS_MIN)
    assert len(caplog.records) == 2


def test_what_was_on_its_way_when_it_opened_does_not_close_it(breaker: Breaker) -> None:
    """It may have been done before the place failed."""
    breaker.succeeded()
    assert breaker.is_open
    breaker.worked()
    assert not breaker.is_open
