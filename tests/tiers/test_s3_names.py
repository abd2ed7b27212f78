"""Names of objects tell what they name, and nothing else."""

import random
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtide.core.keys import INNER_DIGEST_BYTES, KEY_BYTES
from kvtide.testing.tier_records import chain_of, layout_of, root_of, text
from kvtide.tiers.s3 import names
from kvtide.tiers.s3.names import Claim, Clear, Gone, Note, Used, Written
from kvtide.tiers.scope import Scope
from kvtide.units import MiB

TOP = "kvtide/1"
DIGESTS_MAX = 38
"""Blocks of a chunk whose name fits beside the longest prefix."""


def some(chance: random.Random, blocks: int) -> Written:
    """A write of so many blocks."""
    key = chance.randbytes(KEY_BYTES)
    digests = chance.randbytes((blocks - 1) * INNER_DIGEST_BYTES) + key[:INNER_DIGEST_BYTES]
    stamp = chance.randrange(1 << 48)
    write_id, kind = chance.randbytes(16), chance.randbytes(16)
    return Written(stamp, write_id, kind, chance.randbytes(KEY_BYTES), key, digests)


@given(st.integers(), st.integers(1, DIGESTS_MAX))
def test_a_name_is_read_as_what_it_was_made_of(seed: int, blocks: int) -> None:
    """Whatever the bytes; its order is that of stamps, and no step of its path is long."""
    chance = random.Random(seed)
    written, other = some(chance, blocks), some(chance, blocks)
    name = names.record_name(TOP, written)
    assert names.parse_record(TOP, name) == written
    assert (name < names.record_name(TOP, other)) == (written.stamp < other.stamp)
    assert max(map(len, name.split("/"))) <= names.STEP_CHARS


def test_the_longest_name_fits_beside_the_longest_prefix() -> None:
    """One block more does not; docs/tiers.md promises so much."""
    chance = random.Random(1)
    top = f"{'p' * 64}/{names.VERSION}"
    assert len(names.record_name(top, some(chance, DIGESTS_MAX))) <= names.NAME_BYTES_MAX
    assert len(names.record_name(top, some(chance, DIGESTS_MAX + 1))) > names.NAME_BYTES_MAX


@pytest.mark.parametrize(
    "change",
    [
        lambda name: name + "/",
        lambda name: name + "/QQ",
        lambda name: name[:-1],
        lambda name: name.replace("/r/", "/p/"),
        lambda name: name.replace("kvtide/1", "kvtide/2"),
        lambda name: name.replace("kvtide/1", "other/1"),
        lambda name: name.upper(),
        lambda name: name + "\n",
    ],
)
def test_what_is_no_name_of_ours_is_left_alone(change: Callable[[str], str]) -> None:
    """Files of others, names cut short, names of other versions."""
    name = names.record_name(TOP, some(random.Random(2), 4))
    assert names.parse_record(TOP, change(name)) is None


def test_two_spellings_of_the_same_bytes_are_not_two_names() -> None:
    """The last character of base64 has bits that say nothing."""
    written = some(random.Random(3), 2)
    name = names.record_name(TOP, written)
    alphabet = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_"
    others = [name[:-1] + one for one in alphabet if one != name[-1]]
    assert written not in [names.parse_record(TOP, other) for other in others]


def test_all_objects_of_a_record_have_names_and_lengths() -> None:
    """As many parts as its bytes fill, the first of which is the record's name."""
    record = chain_of(root_of(), layout_of(3 * MiB, 2 * MiB), text(1, 4))[0]
    written = names.written(record, 7, bytes(16))
    lengths = names.part_lengths(record.layout, record.blocks)
    assert sum(lengths) == 2 * 4096 + record.payload_bytes
    assert lengths[:-1] == [names.PART_BYTES] * 2
    first, *others = names.names_of(TOP, written, record.layout)
    assert names.parse_record(TOP, first) == written
    assert len(others) == 2
    for other in others:
        part = names.parse_part(TOP, other)
        assert part is not None
        assert (part.stamp, part.write_id, part.key) == (7, bytes(16), record.key)


@pytest.mark.parametrize(
    "note",
    [
        Claim(5, "0123456789abcdef", 1 << 40),
        Gone(5, "0123456789abcdef"),
        Used(5, "0123456789abcdef"),
        *(
            Clear(5, "0123456789abcdef", Scope(salt, fingerprint))
            for salt in (None, b"", bytes(32))
            for fingerprint in (None, bytes(range(32)))
        ),
    ],
)
def test_what_nodes_tell_is_read_as_it_was_said(note: Note) -> None:
    """No salt is not any salt."""
    assert names.parse_note(TOP, names.note_name(TOP, note)) == note


@pytest.mark.parametrize("words", ["room", "room.x", "clear", "clear.any", "clear.xy.any", "else"])
def test_what_nobody_said_is_no_note(words: str) -> None:
    assert names.parse_note(TOP, f"{TOP}/m/000000000005.0123456789abcdef.{words}") is None


def test_kinds_tell_roots_and_layouts_apart() -> None:
    """The same key below another root is another record's name."""
    record = chain_of(root_of(), layout_of(4096), text(1, 4))[0]
    kinds = {
        names.written(one, 1, bytes(16)).kind_digest
        for one in (
            record,
            replace(record, root=root_of("other")),
            replace(record, root=root_of(epoch=b"1")),
            replace(record, root=root_of(salt="s")),
            replace(record, layout=layout_of(8192)),
            replace(record, layout=layout_of(4096, 4096)),
        )
    }
    assert len(kinds) == 6
