"""How records are cut into parts: nothing is lost, little is wasted."""

from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvtide.testing import redis_servers
from kvtide.testing.tier_records import chain_of, layout_of, root_of, text
from kvtide.tiers.remote import parts
from kvtide.units import KiB, MiB


@given(st.integers(1, 64 * MiB))
@example(MiB)
def test_parts_are_all_of_a_record_and_waste_little(length: int) -> None:
    lengths = parts.part_lengths(length)
    assert sum(lengths) == length
    assert all(0 < one <= parts.PART_BYTES_MAX - parts.BESIDE_BYTES for one in lengths)
    assert len(lengths) <= length // (parts.PART_BYTES_MAX - parts.BESIDE_BYTES) + 16
    taken = parts.taken_bytes(lengths)
    assert taken - length <= length / 8 + 8 * KiB, (lengths, taken / length)


@given(st.integers(1, 1 << 40))
def test_a_size_class_is_the_next_of_four_between_powers_of_two(length: int) -> None:
    taken = parts.size_class(length)
    assert length <= taken < max(129, length * 1.25 + 16)
    assert parts.size_class(taken) == taken


@given(
    st.lists(st.integers(1, 5000), min_size=1, max_size=4),
    st.lists(st.floats(0, 1), max_size=6),
)
def test_cut_gives_each_byte_once_and_in_order(shards: list[int], cuts: list[float]) -> None:
    headers = [memoryview(bytes([n % 251]) * n) for n in shards]
    cells = [memoryview(bytes([n % 241]) * n) for n in shards]
    whole = b"".join(bytes(h) + bytes(c) for h, c in zip(headers, cells, strict=True))
    ends = sorted({int(cut * len(whole)) for cut in cuts} | {len(whole)} - {0})
    lengths = [end - start for start, end in zip([0, *ends], ends, strict=False) if end > start]
    got = list(parts.cut(headers, cells, lengths))
    assert [sum(map(len, part)) for part in got] == lengths
    assert b"".join(bytes(piece) for part in got for piece in part) == whole


@pytest.mark.parametrize("blocks", [1, 3, 4])
@pytest.mark.parametrize(
    "cell_bytes",
    [(4096,), (4096, 8192), (256 * KiB,), (2 * MiB, 4096, 600 * KiB), (510 * 4096, 8192)],
    ids=str,
)
def test_which_parts_have_headers_is_known_from_the_layout(
    cell_bytes: tuple[int, ...], blocks: int
) -> None:
    """Also where one begins in the middle of a header."""
    record = chain_of(root_of(), layout_of(*cell_bytes), text(1, blocks))[0]
    headers = parts.empty_headers(record)
    cells = [memoryview(bytes(blocks * one)) for one in cell_bytes]
    ours = {id(header.obj) for header in headers}
    wanted = [
        any(id(piece.obj) in ours for piece in part)
        for part in parts.cut(headers, cells, parts.lengths_of(record))
    ]
    assert list(parts.have_headers(record.layout, record.blocks)) == wanted


@pytest.mark.parametrize("length", [4096, 20_000, 266_240, MiB, MiB + 4096, 5 * MiB + 12_288])
def test_a_server_takes_what_is_counted(tmp_path: Path, length: int) -> None:
    """As Redis with its own allocator counts, and no more than a tenth above."""
    with redis_servers.running("redis", tmp_path / "server") as server:
        lengths = parts.part_lengths(length)
        for number, one in enumerate(lengths):
            server.ask(b"SET", b"kvtide:2:" + b"0" * 32 + b":%d" % number, bytes(one))
        taken = server.bytes_taken()
        assert taken <= parts.taken_bytes(lengths) <= 1.1 * taken + 2 * KiB
