"""What may be said about two columns of measurements that were taken in turn.

Medians throughout: one stalled measurement must not decide. The interval of a median is the sign
test's: two order statistics between which the true median lies with the confidence asked for,
whatever the distribution, and the same for the same numbers, since nothing is drawn at random.
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

CONFIDENCE = 0.95
PAIRS_MIN = 20  # of a comparison that is to decide something

Item = TypeVar("Item")


@dataclass(frozen=True, slots=True)
class Spread:
    """A median with the middle half around it."""

    median: float
    low: float  # first quartile
    high: float  # third quartile
    count: int

    def __str__(self) -> str:
        return f"{self.median:.1f} ({self.low:.1f} to {self.high:.1f})"


@dataclass(frozen=True, slots=True)
class Interval:
    """Where the true median lies."""

    low: float
    high: float

    @property
    def half_width(self) -> float:
        """How far the truth may lie from the middle of the interval."""
        return (self.high - self.low) / 2


@dataclass(frozen=True, slots=True)
class Comparison:
    """One arm against another, pair by pair; with equal arms it is the noise floor."""

    spread: Spread
    interval: Interval

    def percent(self) -> str:
        """As a table shows a ratio's distance from 1."""
        shown = [(value - 1) * 100 for value in (self.spread.median, *self._ends())]
        return "{:+.1f} % ({:+.1f} to {:+.1f})".format(*shown)

    def difference(self) -> str:
        """As a table shows a difference."""
        return "{:+.1f} ({:+.1f} to {:+.1f})".format(self.spread.median, *self._ends())

    def _ends(self) -> tuple[float, float]:
        return self.interval.low, self.interval.high


def spread(values: Sequence[float]) -> Spread:
    """Median and quartiles of at least one value."""
    if len(values) == 1:
        return Spread(values[0], values[0], values[0], 1)
    low, median, high = statistics.quantiles(values, n=4, method="inclusive")
    return Spread(median, low, high, len(values))


def median_interval(values: Sequence[float], confidence: float = CONFIDENCE) -> Interval:
    """The sign test's interval; with fewer than six values, for 95 %, it has no end."""
    count = len(values)
    # The median lies outside [k-th smallest, k-th largest] with probability 2 P(fewer than k heads
    # in `count` throws): the largest k for which that is small enough.
    outside = 0.0
    rank = 0
    while rank < count // 2:
        outside += 2 * math.comb(count, rank) / 2**count
        if outside > 1 - confidence:
            break
        rank += 1
    if rank == 0:
        return Interval(-math.inf, math.inf)
    ordered = sorted(values)
    return Interval(ordered[rank - 1], ordered[-rank])


def differences(ours: Sequence[float], theirs: Sequence[float]) -> Comparison:
    """ours - theirs, pair by pair."""
    return _compared([our - their for our, their in zip(ours, theirs, strict=True)])


def ratios(ours: Sequence[float], theirs: Sequence[float]) -> Comparison:
    """ours / theirs, pair by pair."""
    return _compared([our / their for our, their in zip(ours, theirs, strict=True)])


def _compared(values: Sequence[float]) -> Comparison:
    return Comparison(spread(values), median_interval(values))


def rotated(items: Sequence[Item], number: int) -> list[Item]:
    """The order of a round: every item stands in every place equally often, in both directions."""
    start = number // 2 % len(items)
    order = [*items[start:], *items[:start]]
    return order if number % 2 == 0 else order[::-1]
