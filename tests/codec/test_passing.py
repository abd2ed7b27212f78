"""Records that are given headers and proven while their bytes go by, in pieces of any length."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtide.codec.passing import HeaderWriter, Proof
from kvtide.codec.record import Header, checksums_of, header_bytes, write_header
from kvtide.core.layout import KVLayout
from kvtide.core.records import Record
from kvtide.errors import CorruptRecord
from kvtide.testing.tier_records import Cells, chain_of, layout_of, root_of, text

WRITE_ID = bytes(range(16))
LAYOUTS = (layout_of(4096), layout_of(8192, 4096, 12288))


def pieces_of(views: list[memoryview], lengths: list[int]) -> list[memoryview]:
    """Views cut to these lengths, again and again; none goes over an end."""
    pieces, at = [], 0
    for view in views:
        rest = view
        while rest:
            length = lengths[at % len(lengths)]
            at += 1
            pieces.append(rest[:length])
            rest = rest[length:]
    return pieces


def headers_and_cells(record: Record) -> tuple[list[memoryview], list[memoryview]]:
    """Headers that are not made, and cells."""
    shard_count = record.layout.shard_count
    length = header_bytes(shard_count, record.blocks)
    headers = [memoryview(bytearray(length)) for _ in range(shard_count)]
    return headers, [memoryview(bytearray(view)) for view in Cells(record).fill().views]


def in_order(headers: list[memoryview], cells: list[memoryview]) -> list[memoryview]:
    return [view for pair in zip(headers, cells, strict=True) for view in pair]


lengths = st.lists(st.integers(300, 70_000), min_size=1, max_size=6)


@given(st.sampled_from(LAYOUTS), st.integers(1, 4), lengths, lengths)
def test_a_record_in_pieces_gets_the_headers_of_one_at_once_and_is_proven(
    layout: KVLayout, blocks: int, sent: list[int], received: list[int]
) -> None:
    record = chain_of(root_of(), layout, text(1, blocks))[0]
    headers, cells = headers_and_cells(record)
    writer = HeaderWriter(record, WRITE_ID, headers)
    for piece in pieces_of(in_order(headers, cells), sent):
        assert not writer.is_whole
        writer.passed([piece])
    assert writer.is_whole
    for shard, (header, payload) in enumerate(zip(headers, cells, strict=True)):
        wanted = memoryview(bytearray(len(header)))
        write_header(wanted, Header(record, shard, WRITE_ID, checksums_of(payload, record.blocks)))
        assert header == wanted
    proof = Proof(record, WRITE_ID, headers)
    proof.came(pieces_of(in_order(headers, cells), received))
    assert proof.is_whole


@pytest.mark.parametrize("layout", LAYOUTS, ids=["one shard", "three"])
def test_one_byte_that_differs_anywhere_is_not_proven(layout: KVLayout) -> None:
    """Of each header and of each cell, first and last; nor is another record or write."""
    record, other = chain_of(root_of(), layout, text(1, 7))
    headers, cells = headers_and_cells(record)
    passing = in_order(headers, cells)
    HeaderWriter(record, WRITE_ID, headers).passed(passing)
    for view in passing:
        for at in (0, len(view) // 2, len(view) - 1):
            view[at] ^= 1
            with pytest.raises(CorruptRecord):
                Proof(record, WRITE_ID, headers).came(passing)
            view[at] ^= 1
    with pytest.raises(CorruptRecord):
        Proof(record, bytes(16), headers).came(passing)
    with pytest.raises(CorruptRecord):
        Proof(other, WRITE_ID, headers).came(passing)
    Proof(record, WRITE_ID, headers).came(passing)
