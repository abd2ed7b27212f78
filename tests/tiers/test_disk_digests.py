"""Digests of rows, whether cut from a segment's stretch or of their own, against a dictionary."""

import random
from array import array

import pytest

from kvtide.core.keys import INNER_DIGEST_BYTES
from kvtide.tiers.disk.digests import Digests


def some(draw: random.Random) -> bytes:
    """Of a record of a few blocks."""
    return draw.randbytes(draw.randrange(1, 5) * INNER_DIGEST_BYTES)


@pytest.mark.parametrize("seed", range(4))
def test_any_order_of_changes_leaves_each_row_its_own(seed: int) -> None:
    """Stretches first, as at a start; then rows go and come, in their place or at the end."""
    draw = random.Random(seed)
    digests = Digests()
    segments = [[some(draw) for _ in range(draw.randrange(1, 40))] for _ in range(4)]
    digests.reserve(sum(map(len, segments)))
    held: dict[int, tuple[int, bytes]] = {}
    for segment, stretch in enumerate(segments):
        first = len(held)
        blocks = array("H", (len(one) // INNER_DIGEST_BYTES for one in stretch))
        digests.take(segment, first, memoryview(b"".join(stretch)), blocks)
        held.update({first + at: (segment, one) for at, one in enumerate(stretch)})
    free: list[int] = []
    for segment in range(5, 200):
        if draw.random() < 0.6 and held:
            row = draw.choice(list(held))
            digests.drop(row, held.pop(row)[0])
            free.append(row)
        else:
            row = free.pop() if free else len(held)
            held[row] = (segment, some(draw))
            digests.put(row, held[row][1])
        for row, (at, wanted) in held.items():
            assert digests.of(row, at) == wanted


def test_a_stretch_that_is_mostly_gone_keeps_no_memory() -> None:
    """What is left of it has bytes of its own."""
    digests = Digests()
    content = memoryview(bytes(range(100)) * INNER_DIGEST_BYTES)
    digests.reserve(100)
    digests.take(7, 0, content, array("H", [1]) * 100)
    wanted = [digests.of(row, 7) for row in range(100)]
    for row in range(25):
        digests.drop(row, 7)
        assert 7 in digests._stretches
    digests.drop(25, 7)
    assert 7 not in digests._stretches
    assert [digests.of(row, 7) for row in range(26, 100)] == wanted[26:]
