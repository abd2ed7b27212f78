"""Asks of an InfiniStore server are packed as the format of their tables says."""

import pytest

from kvtide.testing.tier_records import chain_of, layout_of, root_of, text
from kvtide.tiers.infinistore import frames, names
from kvtide.tiers.infinistore.names import Note
from kvtide.units import GiB
from tests.tiers.infinistore_edge import HEAD, read_names, read_payload

NAMES = [b"", b"a", b"abc", b"four", b"kvtide:1:w:" + b"0" * 32 + b":12"]


@pytest.mark.parametrize("name", NAMES)
def test_a_put_or_get_is_read_as_it_was_meant(name: bytes) -> None:
    """By offsets, whatever shape a table has."""
    for ask, length, operation in (
        (frames.put(name, 2 * GiB - 1), 2 * GiB - 1, b"P"),
        (frames.get(name), 0, b"G"),
    ):
        magic, kind, body_bytes = HEAD.unpack_from(ask)
        body = ask[HEAD.size :]
        assert (magic, kind, body_bytes) == (frames.MAGIC, b"L", len(body))
        assert read_payload(body) == (name, length, operation)


@pytest.mark.parametrize("count", range(len(NAMES) + 1))
def test_names_to_remove_are_read_as_they_were_meant(count: int) -> None:
    ask = frames.delete(NAMES[:count])
    assert ask[4:5] == b"X"
    assert read_names(ask[HEAD.size :]) == NAMES[:count]


def test_small_values_are_believed_only_as_they_were_written() -> None:
    """Each bit of a note and of a family; and a note of one kind is none of another."""
    record = chain_of(root_of(), layout_of(4096, 8192), text(1, 4))[0]
    packed = Note(record, bytes(16)).packed()
    assert names.read_note(packed, record.root, record.layout) == Note(record, bytes(16))
    assert names.read_note(packed, root_of("other"), record.layout) is None
    assert names.read_note(None, record.root, record.layout) is None
    family = names.pack_family([record.key, record.parent])
    assert names.read_family(family) == [record.key, record.parent]
    assert names.read_family(packed) == names.read_family(None) == []
    for bit in range(8 * len(packed)):
        damaged = bytearray(packed)
        damaged[bit // 8] ^= 1 << bit % 8
        assert names.read_note(bytes(damaged), record.root, record.layout) is None
    for bit in range(8 * len(family)):
        damaged = bytearray(family)
        damaged[bit // 8] ^= 1 << bit % 8
        assert names.read_family(bytes(damaged)) == []
