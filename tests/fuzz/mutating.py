"""Bytes that are nearly right: what a fuzzer sends, by seed."""

import random
from collections.abc import Callable, Sequence

INTERESTING = (0, 1, 2, 7, 8, 0x7F, 0x80, 0xFF, 0x100, 0x7FFF, 0xFFFF, 0x10000, 2**31, 2**32 - 1)
EDITS_MAX = 6
PIECE_BYTES_MAX = 64


class Mutator:
    """Changes inputs; the same ones for the same seed.

    Args:
        seed: of all that is drawn.
        words: what the readers of the input look for.
        bytes_max: no input becomes longer.
    """

    def __init__(self, seed: int, words: Sequence[bytes] = (), bytes_max: int = 1 << 16) -> None:
        self.draw = random.Random(seed)
        self._words = words
        self._bytes_max = bytes_max
        self._edits: Sequence[Callable[[bytearray, bytes], None]] = (
            self._flip,
            self._set,
            self._number,
            self._cut,
            self._remove,
            self._repeat,
            self._insert,
            self._splice,
        )

    def changed(self, data: bytes, other: bytes) -> bytes:
        """An input like this one, with something of another one perhaps."""
        content = bytearray(data)
        for _ in range(self.draw.randint(1, EDITS_MAX)):
            self.draw.choice(self._edits)(content, other)
        return bytes(content[: self._bytes_max])

    def _at(self, content: bytearray) -> int:
        return self.draw.randrange(len(content) + 1)

    def _span(self, content: bytes | bytearray) -> tuple[int, int]:
        first = self.draw.randrange(len(content) + 1)
        return first, min(len(content), first + self.draw.randint(1, PIECE_BYTES_MAX))

    def _flip(self, content: bytearray, other: bytes) -> None:
        if content:
            content[self.draw.randrange(len(content))] ^= 1 << self.draw.randrange(8)

    def _set(self, content: bytearray, other: bytes) -> None:
        if content:
            content[self.draw.randrange(len(content))] = self.draw.randrange(256)

    def _number(self, content: bytearray, other: bytes) -> None:
        """As four or eight bytes, or as digits."""
        value, at = self.draw.choice(INTERESTING), self._at(content)
        kind = self.draw.randrange(4)
        if kind == 0:
            content[at:at] = b"%d" % (value * self.draw.choice((1, -1, 2**32)))
        else:
            size = 4 * (1 + kind // 2)
            order = "little" if kind != 3 else "big"
            content[at : at + size] = value.to_bytes(size, order)  # type: ignore[arg-type]

    def _cut(self, content: bytearray, other: bytes) -> None:
        del content[self._at(content) :]

    def _remove(self, content: bytearray, other: bytes) -> None:
        first, end = self._span(content)
        del content[first:end]

    def _repeat(self, content: bytearray, other: bytes) -> None:
        first, end = self._span(content)
        content[first:first] = content[first:end] * self.draw.choice((1, 1, 2, 50))

    def _insert(self, content: bytearray, other: bytes) -> None:
        """A word, or noise."""
        noise = self.draw.randbytes(self.draw.randint(1, 8))
        at = self._at(content)
        content[at:at] = self.draw.choice(self._words) if self._words else noise

    def _splice(self, content: bytearray, other: bytes) -> None:
        first, end = self._span(other)
        at = self._at(content)
        content[at : at + self.draw.choice((0, end - first))] = other[first:end]
