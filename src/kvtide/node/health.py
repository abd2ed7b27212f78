"""Whether a tier is of use, in words: an error that is a miss each time must not look like peace.

A tier says of itself whether its breaker is open. What it does not see is that each job ends badly
for a reason of its own (a password, a full server, a limit on sizes) with a success nowhere. So
outcomes are looked at from outside, loads and stores apart, since either may work without the
other: where bad ones came for two minutes and no good one between, the state says so, until one is
good. A state that lasts says for how long.

Ownership: the node's owner thread.
"""

from kvtide.tiers.base import LoadOutcome, StoreOutcome, TierStatistics

NO_SUCCESS_MS = 120_000
"""Bad outcomes alone for so long are no bad luck."""
LASTS_MS = 60_000
"""A state is told with its age from then on."""
ON = "on"
"""The state of a tier with which all is well, here and in its own `TierStatistics`."""

_GOOD_LOADS = (LoadOutcome.LOADED,)
_GOOD_STORES = (StoreOutcome.STORED, StoreOutcome.HELD)
_BAD_LOADS = (LoadOutcome.CORRUPT, LoadOutcome.FAILED, LoadOutcome.BROKEN)
_BAD_STORES = (
    StoreOutcome.QUEUE_FULL,
    StoreOutcome.TOO_OLD,
    StoreOutcome.NO_ROOM,
    StoreOutcome.FAILED,
    StoreOutcome.BROKEN,
)


class _Jobs:
    """Of all loads of a tier, or of all its stores: whether any has been good lately."""

    def __init__(self, noun: str, good: tuple[str, ...], bad: tuple[str, ...]) -> None:
        self._noun = noun
        self._good_names = good
        self._bad_names = bad
        self._good = 0
        self._bad = self._bad_before = dict.fromkeys(bad, 0)
        """By outcome, now and when the last good one was seen."""
        self._since_ms = self._last_ms = 0
        """When the first bad one since then was seen, and the last."""

    def look(self, outcomes: dict[str, int], now_ms: int) -> None:
        """All outcomes so far, at this time."""
        good = sum(outcomes.get(name, 0) for name in self._good_names)
        bad = {name: outcomes.get(name, 0) for name in self._bad_names}
        if good > self._good:
            self._bad_before, self._since_ms, self._last_ms = bad, now_ms, now_ms
        elif bad != self._bad:
            if self._bad == self._bad_before:
                self._since_ms = now_ms
            self._last_ms = now_ms
        self._good, self._bad = good, bad

    def fault(self, now_ms: int) -> str:
        """What is wrong, for people; empty where nothing is known to be."""
        if self._last_ms - self._since_ms < NO_SUCCESS_MS:
            return ""
        counts = {name: count - self._bad_before[name] for name, count in self._bad.items()}
        worst = max(counts, key=lambda name: counts[name])
        lasts = _minutes(now_ms - self._since_ms)
        return f"no {self._noun} has worked for {lasts}, most of it {worst}"


class Health:
    """Of one tier."""

    def __init__(self) -> None:
        self._loads = _Jobs("load", _GOOD_LOADS, _BAD_LOADS)
        self._stores = _Jobs("store", _GOOD_STORES, _BAD_STORES)
        self._off_since_ms: int | None = None

    def look(self, numbers: TierStatistics, now_ms: int) -> None:
        """Its numbers, at this time."""
        self._loads.look(numbers.loaded, now_ms)
        self._stores.look(numbers.stored, now_ms)
        if numbers.state == ON:
            self._off_since_ms = None
        elif self._off_since_ms is None:
            self._off_since_ms = now_ms

    def state(self, numbers: TierStatistics, now_ms: int) -> str:
        """The tier's state, for people; `on` where all is well."""
        if numbers.state != ON:
            lasts_ms = 0 if self._off_since_ms is None else now_ms - self._off_since_ms
            return numbers.state + (f", for {_minutes(lasts_ms)}" if lasts_ms >= LASTS_MS else "")
        faults = (self._loads.fault(now_ms), self._stores.fault(now_ms))
        return "; ".join(fault for fault in faults if fault) or ON


def _minutes(ms: int) -> str:
    return f"{ms // 60_000} min"
