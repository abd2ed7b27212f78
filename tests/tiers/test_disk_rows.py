"""Rows logs and indexes: their bytes, and what is believed of damaged ones."""

import hashlib
import os
from dataclasses import replace

import pytest

from kvtide.core.keys import INNER_DIGEST_BYTES
from kvtide.core.layout import CELL_ALIGN_BYTES, KVLayout
from kvtide.core.records import RootName
from kvtide.errors import CorruptRecord, UnknownFormat
from kvtide.tiers.disk import columns as tables
from kvtide.tiers.disk import rows as logs
from kvtide.tiers.disk import sealing
from kvtide.tiers.disk.rows import Kept
from kvtide.tiers.kinds import Kind

SEGMENT = 7
KIND = Kind(RootName(b"r" * 32, b"f" * 32, b"epoch", b"s" * 32), KVLayout(16, 64, (4096, 8192)))
PLAIN = Kind(RootName(b"q" * 32, b"f" * 32, b"", b""), KVLayout(16, 64, (4096,)))


def kept(number: int, parent: bytes, kind: int = 0, blocks: int = 4) -> Kept:
    key = hashlib.sha256(bytes([number])).digest()
    inner = hashlib.shake_128(key).digest((blocks - 1) * INNER_DIGEST_BYTES)
    return Kept(number * 1 << 16, kind, key, parent, inner + key[:INNER_DIGEST_BYTES])


def some() -> list[Kept]:
    """A chain of three, one of another kind, one whose parent is elsewhere."""
    first = kept(1, KIND.root.key)
    second = kept(2, first.key)
    tail = kept(3, second.key, blocks=2)
    return [first, second, tail, kept(4, PLAIN.root.key, kind=1), kept(5, b"e" * 32)]


def log_of(records: list[Kept]) -> bytes:
    content = logs.opening(SEGMENT)
    content += logs.kind_row(SEGMENT, len(content), 0, KIND)
    content += logs.kind_row(SEGMENT, len(content), 1, PLAIN)
    for record in records:
        content += logs.kept_row(SEGMENT, len(content), record)
    return content + logs.gone_row(SEGMENT, len(content), [records[2].offset_bytes])


def test_a_log_says_what_is_there_and_what_is_gone() -> None:
    """And that it is whole."""
    records = some()
    rows = logs.read_log(memoryview(log_of(records)), SEGMENT)
    assert rows.kinds == {0: KIND, 1: PLAIN}
    assert list(rows.kept.values()) == [*records[:2], *records[3:]]
    assert rows.gone == {records[2].offset_bytes}
    assert rows.is_whole


def test_the_bytes_of_logs_and_indexes_are_these() -> None:
    """Golden: whoever reads them in ten years finds them so."""
    log = hashlib.sha256(log_of(some())).hexdigest()
    index = tables.encode(tables.from_rows({0: KIND, 1: PLAIN}, some()), SEGMENT)
    assert log == "b55bf36030ba6d278d98e4f36327b0e78816a6ea78a681cbe3718dd841c78b57"
    assert (
        hashlib.sha256(index).hexdigest()
        == "b3fb415b141101603f7e41092749de957f05570ec8dd6aeda87dd040a38f0e81"
    )


def test_a_log_ends_at_its_first_damage() -> None:
    """Each byte: what is before it stays, and it is said that something follows."""
    records = some()
    content = bytearray(log_of(records))
    good = logs.read_log(memoryview(content), SEGMENT)
    for at in range(logs.OPENING_BYTES, len(content)):
        content[at] ^= 1 << at % 8
        rows = logs.read_log(memoryview(content), SEGMENT)
        assert not rows.is_whole
        assert rows.end_bytes <= at
        assert rows.kept.items() <= {**good.kept, records[2].offset_bytes: records[2]}.items()
        content[at] ^= 1 << at % 8
    for end in range(logs.OPENING_BYTES, len(content)):
        rows = logs.read_log(memoryview(content)[:end], SEGMENT)
        assert rows.is_whole == (rows.end_bytes == end)


def test_rows_of_another_place_are_none() -> None:
    """A row that was copied to the end, and a log of another segment."""
    content = log_of(some())
    row = logs.kept_row(SEGMENT, 0, some()[0])
    assert not logs.read_log(memoryview(content + row), SEGMENT).is_whole
    with pytest.raises(CorruptRecord):
        logs.read_log(memoryview(content), SEGMENT + 1)


def decoded(content: bytes | bytearray | memoryview, segment: int = SEGMENT) -> tables.Columns:
    """As a start reads it."""
    view = memoryview(content)
    extent = tables.extent_of(view, segment)
    if extent.columns_bytes + extent.digests_bytes != len(view):
        raise CorruptRecord("its length")
    parts = view[: extent.columns_bytes], view[extent.columns_bytes :]
    return tables.decode(*parts, segment)


def test_of_two_records_with_one_key_the_later_counts_and_has_its_place() -> None:
    """Rows stay in the order of the segment: its end is where the last of them ends."""
    first, second, tail, other, _ = some()
    again = replace(first, offset_bytes=other.offset_bytes + (1 << 16))
    columns = tables.from_rows({0: KIND, 1: PLAIN}, [first, second, tail, other, again])
    wanted = [second, tail, other, again]
    assert columns.cut_keys() == tuple(one.key for one in wanted)
    assert list(columns.pages) == [one.offset_bytes // CELL_ALIGN_BYTES for one in wanted]
    assert list(columns.back) == [0, 1, 0, 0]
    assert columns.elsewhere == [(0, first.key)], "it lies behind its child"
    assert sealing.kept_of(decoded(tables.encode(columns, SEGMENT))) == [
        second,
        tail,
        replace(other, kind=1),
        again,
    ]


def test_an_index_is_what_was_written_or_nothing() -> None:
    """Each byte, each length, another segment, another version."""
    columns = tables.from_rows({0: KIND, 1: PLAIN}, some())
    content = bytearray(tables.encode(columns, SEGMENT))
    assert decoded(content) == columns
    for at in range(len(content)):
        content[at] ^= 1 << at % 8
        with pytest.raises((CorruptRecord, UnknownFormat)):
            decoded(content)
        content[at] ^= 1 << at % 8
    for end in range(len(content)):
        with pytest.raises(CorruptRecord):
            decoded(content[:end])
    with pytest.raises(CorruptRecord):
        decoded(content, SEGMENT + 1)


@pytest.mark.parametrize(("row", "told"), [(0, 1), (2, 3), (2, -1), (4, 1 << 30)])
def test_a_parent_ahead_of_all_rows_is_refused(row: int, told: int) -> None:
    """A checksum vouches for what cannot be."""
    columns = tables.from_rows({0: KIND, 1: PLAIN}, some())
    assert decoded(tables.encode(columns, SEGMENT)) == columns
    columns.back[row] = told
    with pytest.raises(CorruptRecord):
        decoded(tables.encode(columns, SEGMENT))


def test_room_for_an_index_is_reckoned_high_enough() -> None:
    """It is set aside before a record is written."""
    columns = tables.from_rows({0: KIND, 1: PLAIN}, some())
    kinds_bytes = logs.kind_row_bytes(KIND) + logs.kind_row_bytes(PLAIN)
    most = tables.index_bytes_max(kinds_bytes, len(columns), sum(columns.blocks))
    assert len(tables.encode(columns, SEGMENT)) <= most


def test_bytes_from_nowhere_are_neither() -> None:
    for size in (0, 1, 15, 16, 48, 500):
        for start in (b"", logs.LOG_MAGIC, tables.MAGIC):
            content = memoryview(start + os.urandom(size))
            with pytest.raises((CorruptRecord, UnknownFormat)):
                logs.read_log(content, SEGMENT)
            with pytest.raises((CorruptRecord, UnknownFormat)):
                decoded(content)
