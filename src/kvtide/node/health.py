"""Whether a tier is of use, in words: an error that is a miss each time must not look like peace.

A tier says of itself whether its breaker is open. What it does not see is that each job ends badly
for a reason of its own (a password, a full server, a limit on sizes) with a success nowhere. So
outcomes are looked at from outside: where none has been good for two minutes, though some were
bad, the state says so. A state that lasts says for how long.

Ownership: the node's owner thread.
"""

from kvtide.tiers.base import LoadOutcome, StoreOutcome, TierStatistics

NO_SUCCESS_MS = 120_000
LASTS_MS = 60_000
"""A state is told with its age from then on."""
ON = "on"

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


class Health:
    """Of one tier."""

    def __init__(self) -> None:
        self._good = self._bad = 0
        self._bad_since_ms: int | None = None
        self._off_since_ms: int | None = None

    def look(self, numbers: TierStatistics, now_ms: int) -> None:
        """Its numbers, at this time."""
        good = _sum(numbers.loaded, _GOOD_LOADS) + _sum(numbers.stored, _GOOD_STORES)
        bad = _sum(numbers.loaded, _BAD_LOADS) + _sum(numbers.stored, _BAD_STORES)
        if good > self._good:
            self._bad_since_ms = None
        elif bad > self._bad and self._bad_since_ms is None:
            self._bad_since_ms = now_ms
        self._good, self._bad = good, bad
        if numbers.state == ON:
            self._off_since_ms = None
        elif self._off_since_ms is None:
            self._off_since_ms = now_ms

    def state(self, numbers: TierStatistics, now_ms: int) -> str:
        """The tier's state, for people; `on` where all is well."""
        if numbers.state != ON:
            lasts_ms = 0 if self._off_since_ms is None else now_ms - self._off_since_ms
            return numbers.state + (f", for {_minutes(lasts_ms)}" if lasts_ms >= LASTS_MS else "")
        since_ms = self._bad_since_ms
        if since_ms is None or now_ms - since_ms < NO_SUCCESS_MS:
            return ON
        bad = {str(name): numbers.loaded.get(name, 0) for name in _BAD_LOADS}
        bad |= {str(name): numbers.stored.get(name, 0) for name in _BAD_STORES}
        worst = max(bad, key=lambda name: bad[name])
        return f"nothing has worked for {_minutes(now_ms - since_ms)}, most of it {worst}"


def _sum(outcomes: dict[str, int], names: "tuple[str, ...]") -> int:
    return sum(outcomes.get(name, 0) for name in names)


def _minutes(ms: int) -> str:
    return f"{ms // 60_000} min"
