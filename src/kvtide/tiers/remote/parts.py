"""A record as values of a server: its headers and cells in a row, cut into parts.

    header 0 │ cells 0 │ header 1 │ cells 1 │ …        as docs/formats.md has it
    ├─ part 0 ─┼─ part 1 ─┼─ … ─┤                      each a value of its own

Both who writes and who reads know the lengths from the record's layout, so nothing says them. A
part is as long as fits a size that allocators give out whole: a power of two, or 1.25, 1.5 or 1.75
times one, less what the server keeps beside a value. So a cap in bytes is nearly what is taken,
where a value of exactly 4 MiB takes 5. None is longer than `PART_BYTES_MAX`: from 8 MiB on
jemalloc maps and gives back each value by itself, at a third of the speed.
"""

from collections.abc import Iterator, Sequence
from functools import lru_cache

from kvtide.codec.record import header_bytes, stored_bytes
from kvtide.core.layout import KVLayout
from kvtide.core.records import Record
from kvtide.units import KiB, MiB

PART_BYTES_MAX = 2 * MiB
"""Of what a part takes: the quickest size of Redis 7 and Valkey 9, both ways."""
BESIDE_BYTES = 256
"""Of this, what a server keeps with a value: its header, and the key that it may stand with."""
WHOLE_BYTES_MIN = 16 * KiB
"""What is shorter is not cut again: another key would take more than is wasted."""
WASTE_RATIO_MAX = 1 / 16
KEY_BYTES_TAKEN = 192
"""What a key and its place in the server's table take, beside its value."""


def size_class(length_bytes: int) -> int:
    """The bytes that an allocator takes for so many: four sizes between two powers of two."""
    power = max(6, (length_bytes - 1).bit_length() - 1)
    step = 1 << (power - 2)
    return -(-length_bytes // step) * step


def part_lengths(length_bytes: int) -> tuple[int, ...]:
    """Into what a record of this length is cut, in order."""
    lengths = []
    left = length_bytes
    while left:
        length = _next_length(left)
        lengths.append(length)
        left -= length
    return tuple(lengths)


def _next_length(left_bytes: int) -> int:
    if left_bytes > PART_BYTES_MAX - BESIDE_BYTES:
        return PART_BYTES_MAX - BESIDE_BYTES
    taken = size_class(left_bytes + BESIDE_BYTES)
    is_tight = taken - left_bytes - BESIDE_BYTES <= WASTE_RATIO_MAX * left_bytes
    if is_tight or left_bytes < WHOLE_BYTES_MIN:
        return left_bytes
    below = size_class(left_bytes // 2 + 1)
    while size_class(below + 1) <= left_bytes + BESIDE_BYTES:
        below = size_class(below + 1)
    return below - BESIDE_BYTES


def lengths_of(record: Record) -> tuple[int, ...]:
    """The lengths of all parts of a record."""
    return _lengths_of(record.layout, record.blocks)


@lru_cache(maxsize=256)
def _lengths_of(layout: KVLayout, blocks: int) -> tuple[int, ...]:
    return part_lengths(stored_bytes(layout, blocks))


def taken_bytes(lengths: Sequence[int]) -> int:
    """What parts of these lengths take of a server's memory."""
    return sum(size_class(length + BESIDE_BYTES) + KEY_BYTES_TAKEN for length in lengths)


def empty_headers(record: Record) -> list[memoryview]:
    """Memory for the headers of all shards."""
    shard_count = record.layout.shard_count
    length = header_bytes(shard_count, record.blocks)
    return [memoryview(bytearray(length)) for _ in range(shard_count)]


@lru_cache(maxsize=256)
def have_headers(
    layout: KVLayout, blocks: int, lengths: tuple[int, ...] | None = None
) -> tuple[bool, ...]:
    """Of each part, whether any of a header is in it; of parts of these lengths, if not ours."""
    header = header_bytes(layout.shard_count, blocks)
    found, start = [], 0
    for length in _lengths_of(layout, blocks) if lengths is None else lengths:
        end, at, has_header = start + length, 0, False
        for cell_bytes in layout.cell_bytes:
            has_header |= at < end and start < at + header
            at += header + blocks * cell_bytes
        found.append(has_header)
        start = end
    return tuple(found)


def cut(
    headers: Sequence[memoryview], cells: Sequence[memoryview], lengths: Sequence[int]
) -> Iterator[list[memoryview]]:
    """The memory of each part in turn: headers and cells in a row, cut to these lengths."""
    row = [view for pair in zip(headers, cells, strict=True) for view in pair]
    at, begun = 0, 0
    for length in lengths:
        part: list[memoryview] = []
        while length:
            piece = row[at][begun : begun + length]
            part.append(piece)
            length -= len(piece)
            begun += len(piece)
            if begun == len(row[at]):
                at, begun = at + 1, 0
        yield part
    assert (at, begun) == (len(row), 0), (at, begun, lengths)
