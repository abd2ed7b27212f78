"""Bytes and counts: rounding on purpose, and sizes as people write them.

GiB is binary and GB is decimal, as everywhere; a bare "16G" is refused, because container tools
disagree on which of the two it means.
"""

import re
from decimal import Decimal

KiB = 1024
MiB = 1024 * KiB
GiB = 1024 * MiB

_UNITS = {
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "kib": KiB,
    "mib": MiB,
    "gib": GiB,
    "tib": 1024 * GiB,
}
_SIZE = re.compile(r"(?P<number>[0-9]+(?:\.[0-9]+)?)\s*(?P<unit>[A-Za-z]*)", re.ASCII)


def div_ceil(dividend: int, divisor: int) -> int:
    """How many times `divisor` is needed to cover `dividend`."""
    assert divisor > 0, divisor
    return -(-dividend // divisor)


def round_up(value: int, multiple: int) -> int:
    """The smallest multiple of `multiple` that is not below `value`."""
    return div_ceil(value, multiple) * multiple


def round_down(value: int, multiple: int) -> int:
    """The largest multiple of `multiple` that is not above `value`."""
    assert multiple > 0, multiple
    return value // multiple * multiple


def parse_bytes(size: object) -> int:
    """Bytes from "16GiB", "16 GB", "4096" or 4096.

    Raises:
        ValueError: says what is wrong; the caller knows the value, and what it accepts.
    """
    is_text = isinstance(size, int | str) and not isinstance(size, bool)
    match = _SIZE.fullmatch(str(size).strip()) if is_text else None
    if match is None:
        raise ValueError("not a size")
    unit = match["unit"].lower()
    if unit in ("k", "m", "g", "t"):
        either = f"{unit.upper()}iB (binary) or {unit.upper()}B (decimal)"
        raise ValueError(f"ambiguous; write {either}")
    if unit and unit not in _UNITS:
        raise ValueError(f"{match['unit']!r} is not a unit; use B, KiB, MiB, GiB, TiB, KB … TB")
    exact = Decimal(match["number"]) * _UNITS[unit or "b"]
    if exact != int(exact):
        raise ValueError("not a whole number of bytes")
    return int(exact)


def format_bytes(size: int) -> str:
    """A size for people: `format_bytes(16 * GiB)` is "16 GiB"; rounded to a tenth of its unit."""
    assert size >= 0, size
    value = float(size)
    unit, *larger = ("B", "KiB", "MiB", "GiB", "TiB")
    while round(value, 1) >= 1024 and larger:
        value /= 1024
        unit = larger.pop(0)
    return f"{value:.1f}".removesuffix(".0") + f" {unit}"
