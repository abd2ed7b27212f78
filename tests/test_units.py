"""Sizes as people write them, and rounding."""

import pytest

from kvtide.units import GiB, KiB, MiB, div_ceil, format_bytes, parse_bytes, round_down, round_up


@pytest.mark.parametrize(
    ("size", "wanted"),
    [
        (4096, 4096),
        (0, 0),
        ("4096", 4096),
        ("16GiB", 16 * GiB),
        ("16 GiB", 16 * GiB),
        (" 16gib ", 16 * GiB),
        ("16 GB", 16 * 10**9),
        ("1.5MiB", 3 * MiB // 2),
        ("512 B", 512),
        ("2TiB", 2048 * GiB),
        ("3kb", 3000),
        ("3KiB", 3 * KiB),
    ],
)
def test_a_size_is_read_as_it_is_written(size: object, wanted: int) -> None:
    assert parse_bytes(size) == wanted


@pytest.mark.parametrize(
    ("size", "hint"),
    [
        (-1, "^not a size"),
        (True, "^not a size"),
        (1.5, "^not a size"),
        (None, "^not a size"),
        ("", "^not a size"),
        ("much", "^not a size"),
        ("-1GiB", "^not a size"),
        ("1e9", "^not a size"),
        ("16G", "GiB .binary. or GB .decimal."),
        ("16 GiBs", "is not a unit"),
        ("0.3B", "whole number"),
        ("1٣GiB", "^not a size"),  # a digit, but not one of ours
    ],
)
def test_what_is_not_a_size_is_refused_with_a_hint(size: object, hint: str) -> None:
    with pytest.raises(ValueError, match=hint):
        parse_bytes(size)


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (KiB, "1 KiB"),
        (16 * GiB, "16 GiB"),
        (3 * GiB // 2, "1.5 GiB"),
        (GiB - 1, "1 GiB"),
        (5000 * GiB, "4.9 TiB"),
        (5000 * 1024 * GiB, "5000 TiB"),
    ],
)
def test_a_size_is_shown_in_its_largest_unit(size: int, text: str) -> None:
    assert format_bytes(size) == text


def test_what_is_shown_can_be_read_back() -> None:
    for size in (0, 1, 512, KiB, 96 * KiB, 3 * MiB // 2, 16 * GiB, 7 * 1024 * GiB):
        assert parse_bytes(format_bytes(size)) == size


def test_rounding_covers_whole_multiples() -> None:
    assert [div_ceil(n, 4) for n in range(6)] == [0, 1, 1, 1, 1, 2]
    assert [round_up(n, 4) for n in range(6)] == [0, 4, 4, 4, 4, 8]
    assert [round_down(n, 4) for n in range(6)] == [0, 0, 0, 0, 4, 4]
