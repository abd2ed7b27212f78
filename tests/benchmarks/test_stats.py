"""The numbers that decide whether a budget is met."""

import math
import random

import pytest

from benchmarks.stats import differences, median_interval, ratios, rotated, spread


def test_a_spread_is_the_median_and_the_quartiles() -> None:
    found = spread([4.0, 1.0, 3.0, 2.0, 100.0])
    assert (found.low, found.median, found.high, found.count) == (2.0, 3.0, 4.0, 5)
    assert str(found) == "3.0 (2.0 to 4.0)"


def test_one_value_is_its_own_spread() -> None:
    assert spread([7.0]).high == 7.0


@pytest.mark.parametrize(("count", "rank"), [(6, 1), (20, 6), (25, 8), (40, 14)])
def test_the_interval_has_the_ranks_of_the_tables_of_the_sign_test(count: int, rank: int) -> None:
    values = [float(value) for value in range(1, count + 1)]
    random.Random(1).shuffle(values)
    found = median_interval(values)
    assert (found.low, found.high) == (rank, count + 1 - rank)


def test_too_few_values_have_an_interval_without_end() -> None:
    found = median_interval([1.0] * 5)
    assert (found.low, found.high) == (-math.inf, math.inf)


def test_the_interval_holds_the_median_as_often_as_it_says() -> None:
    generator = random.Random(2)
    hits = 0
    for _ in range(2000):
        found = median_interval([generator.expovariate(1) for _ in range(20)])
        hits += found.low <= math.log(2) <= found.high
    assert hits / 2000 >= 0.94


def test_comparisons_are_made_pair_by_pair() -> None:
    ours = [10.0 * number + 2 for number in range(1, 21)]
    theirs = [10.0 * number for number in range(1, 21)]
    compared = differences(ours, theirs)
    assert (compared.spread.median, compared.interval.half_width) == (2.0, 0.0)
    assert compared.difference() == "+2.0 (+2.0 to +2.0)"
    assert ratios(theirs, theirs).percent() == "+0.0 % (+0.0 to +0.0)"


def test_pairs_must_be_pairs() -> None:
    with pytest.raises(ValueError, match="argument 2"):
        differences([1.0], [1.0, 2.0])


def test_every_arm_has_every_place_equally_often() -> None:
    orders = [rotated("abc", number) for number in range(6)]
    for place in range(3):
        assert sorted(order[place] for order in orders) == ["a", "a", "b", "b", "c", "c"]
    assert rotated("ab", 0) == ["a", "b"]
    assert rotated("ab", 1) == ["b", "a"]
