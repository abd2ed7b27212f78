"""How far pages are apart: rounding is near, another order is far, integers are equal or not."""

import math

import numpy as np
import pytest

from kvtide.movers.compare import DIFFERENCE_MAX, PageNumbers, difference

TOKENS, HEADS, SIZE = 16, 4, 32
LOUD = 20.0
"""Keys are so many times as large as values, as in some models."""


def page(dtype: str, seed: int = 1, noise: float = 0.0) -> np.ndarray:
    """Keys of a head, then its values, head after head; the same numbers but for some noise."""
    draw = np.random.default_rng(seed)
    numbers = draw.normal(size=(HEADS, 2, TOKENS * SIZE))
    numbers[:, 0] *= LOUD
    numbers *= 1 + noise * np.random.default_rng(99).normal(size=numbers.shape)
    single = numbers.astype(np.float32)
    if dtype == "bfloat16":
        return (single.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8).ravel()
    return single.astype(dtype).view(np.uint8).ravel()


def of(dtype: str) -> PageNumbers:
    item_bytes = 4 if dtype == "float32" else 2
    return PageNumbers(dtype, TOKENS * SIZE * item_bytes)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_rounding_is_near_and_another_page_is_far(dtype: str) -> None:
    same, near, other = page(dtype), page(dtype, noise=0.01), page(dtype, seed=2)
    assert difference(same, page(dtype), of(dtype)) == 0
    assert 0.005 < difference(same, near, of(dtype)) < 0.02
    assert difference(same, other, of(dtype)) == pytest.approx(math.sqrt(2), rel=0.1)


def test_swapped_halves_of_a_page_are_far() -> None:
    same = page("bfloat16")
    assert difference(same, np.roll(same, len(same) // 2), of("bfloat16")) > 4 * DIFFERENCE_MAX


def test_wrong_values_are_seen_beside_keys_that_are_much_larger() -> None:
    """Of the whole page they would be a twentieth."""
    same, other = page("float32"), page("float32", seed=2)
    plane = of("float32").plane_bytes
    is_value = np.arange(len(same)) // plane % 2 == 1
    mixed = np.where(is_value, other, same)
    assert difference(same, mixed, of("float32")) > 4 * DIFFERENCE_MAX
    assert difference(same, mixed, PageNumbers("float32")) < DIFFERENCE_MAX


def test_integers_are_equal_or_infinitely_far() -> None:
    same = page("float32")
    off_by_one = same.copy()
    off_by_one[17] ^= 1
    for dtype in ("int8", "uint8", "float8_e4m3fn"):
        assert difference(same, same.copy(), PageNumbers(dtype)) == 0
        assert difference(same, off_by_one, PageNumbers(dtype)) == math.inf


@pytest.mark.parametrize("wrong", [math.nan, math.inf])
def test_what_is_no_number_is_infinitely_far(wrong: float) -> None:
    """On whichever side; equal bytes are equal all the same."""
    same = page("float32")
    strange = same.copy()
    strange.view(np.float32)[3] = wrong
    assert difference(same, strange, of("float32")) == math.inf
    assert difference(strange, same, of("float32")) == math.inf
    assert difference(strange, strange.copy(), of("float32")) == 0


@pytest.mark.parametrize("both", [math.nan, math.inf, -math.inf])
def test_where_both_are_no_number_the_others_count(both: float) -> None:
    """A model may overflow: the same in each computation of it."""
    same, near, other = (
        page("float32", seed, noise) for seed, noise in ((1, 0), (1, 0.01), (2, 0))
    )
    for one in (same, near, other):
        one.view(np.float32)[5] = both
    assert 0.005 < difference(same, near, of("float32")) < 0.02
    assert difference(same, other, of("float32")) > 4 * DIFFERENCE_MAX


@pytest.mark.parametrize("size", [1e-30, 1e30])
def test_how_large_numbers_are_does_not_matter(size: float) -> None:
    same, near = (np.float32(size) * page("float32", noise=n).view(np.float32) for n in (0, 0.01))
    assert 0.005 < difference(same.view(np.uint8), near.view(np.uint8), of("float32")) < 0.02


def test_against_zeros_everything_is_far() -> None:
    zeros = np.zeros(64, np.uint8)
    ones = np.ones(16, np.float32).view(np.uint8)
    assert difference(zeros, ones, PageNumbers("float32")) == math.inf
    assert difference(ones, zeros, PageNumbers("float32")) == 1
