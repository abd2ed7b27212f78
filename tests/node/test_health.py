"""A tier that has not done anything for minutes says so, whatever the reason was each time."""

from collections import Counter

from kvtide.node.health import NO_SUCCESS_MS, Health
from kvtide.tiers.base import TierStatistics


def numbers(state: str = "on", **outcomes: int) -> TierStatistics:
    """A moment of a tier: `stored_…` and `loaded_…` outcomes."""
    parts: dict[str, Counter[str]] = {"stored": Counter(), "loaded": Counter()}
    for name, count in outcomes.items():
        part, _, outcome = name.partition("_")
        parts[part][outcome] = count
    return TierStatistics(state, 0, 1, 0, 0, parts["loaded"], parts["stored"])


def test_failures_without_a_success_for_minutes_are_a_state() -> None:
    health = Health()
    health.look(numbers(stored_stored=5), 0)
    for minute in range(1, 4):
        now = numbers(stored_stored=5, stored_no_room=minute)
        health.look(now, minute * 60_000)
        wanted = "no store has worked for 2 min, most of it no_room" if minute == 3 else "on"
        assert health.state(now, minute * 60_000) == wanted
    now = numbers(stored_stored=6, stored_no_room=3)
    health.look(now, 4 * 60_000)
    assert health.state(now, 4 * 60_000) == "on"


def test_loads_that_work_hide_no_stores_that_never_do() -> None:
    """A full place: what lies there is hit, and nothing new is taken."""
    health = Health()
    health.look(numbers(stored_stored=5, stored_broken=500), 0)
    for minute in range(1, 61):
        now = numbers(
            stored_stored=5, stored_broken=500, stored_no_room=minute, loaded_loaded=minute
        )
        health.look(now, minute * 60_000)
    assert health.state(now, 3_600_000) == "no store has worked for 59 min, most of it no_room"


def test_stores_that_work_hide_no_loads_that_never_do() -> None:
    health = Health()
    for minute in range(4):
        now = numbers(stored_stored=minute, loaded_failed=minute)
        health.look(now, minute * 60_000)
    assert health.state(now, 180_000) == "no load has worked for 2 min, most of it failed"
    for minute in range(4, 8):
        now = numbers(stored_stored=3, stored_failed=minute, loaded_failed=minute)
        health.look(now, minute * 60_000)
    state = health.state(now, 480_000)
    assert state.count("has worked for") == 2
    assert "no store has worked for 4 min" in state


def test_one_failure_says_nothing_however_long_ago() -> None:
    """Nobody has asked since."""
    health = Health()
    health.look(numbers(), 0)
    for minute in range(1, 10):
        now = numbers(loaded_corrupt=1, stored_stored=minute)
        health.look(now, minute * 60_000)
        assert health.state(now, minute * 60_000) == "on"


def test_a_tier_that_nobody_asks_is_well() -> None:
    """Nor are misses, stores of what is there, and loads of what is gone failures."""
    health = Health()
    for minute in range(60):
        now = numbers(loaded_absent=minute, stored_not_anchored=minute)
        health.look(now, minute * 60_000)
        assert health.state(now, minute * 60_000) == "on"


def test_a_state_that_lasts_says_for_how_long() -> None:
    health = Health()
    now = numbers("errno 5 (Input/output error)")
    health.look(now, 1_000)
    assert health.state(now, 2_000) == "errno 5 (Input/output error)"
    health.look(now, NO_SUCCESS_MS)
    assert health.state(now, 5 * 60_000 + 1_000) == "errno 5 (Input/output error), for 5 min"
    health.look(numbers(), 6 * 60_000)
    assert health.state(numbers(), 6 * 60_000) == "on"
