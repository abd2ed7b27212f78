"""Records at rest: what is written is read, and nothing else is taken for it."""

import hashlib
import os
import struct
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtide.codec import record as codec
from kvtide.codec.record import Header
from kvtide.core.keys import INNER_DIGEST_BYTES
from kvtide.core.layout import KVLayout
from kvtide.core.records import Record, RootName
from kvtide.errors import CorruptRecord, UnknownFormat

PAGE = 4096


@st.composite
def records(draw: st.DrawFn) -> Record:
    """Any record that there can be, with small cells."""
    blocks_per_chunk = draw(st.integers(1, 40))
    blocks = draw(st.integers(1, blocks_per_chunk))
    block_tokens = draw(st.integers(1, 64))
    sizes = draw(st.lists(st.integers(1, 3), min_size=1, max_size=5))
    layout = KVLayout(
        block_tokens, block_tokens * blocks_per_chunk, tuple(PAGE * size for size in sizes)
    )
    name = st.binary(min_size=32, max_size=32)
    root = RootName(
        draw(name),
        draw(name),
        draw(st.binary(max_size=codec.EPOCH_BYTES_MAX)),
        draw(st.one_of(st.just(b""), name)),
    )
    key = draw(name)
    count = (blocks - 1) * INNER_DIGEST_BYTES
    digests = draw(st.binary(min_size=count, max_size=count)) + key[:INNER_DIGEST_BYTES]
    return Record(root, draw(name), key, digests, layout)


def payload_of(record: Record, shard: int) -> memoryview:
    length = record.blocks * record.layout.cell_bytes[shard]
    return memoryview(bytearray(hashlib.shake_128(record.key + bytes([shard])).digest(length)))


def written(
    record: Record, write_id: bytes = b"w" * 16
) -> tuple[list[memoryview], list[memoryview]]:
    """Headers and payloads of all shards."""
    headers, payloads = [], []
    length = codec.header_bytes(record.layout.shard_count, record.blocks)
    for shard in range(record.layout.shard_count):
        payload = payload_of(record, shard)
        header = Header(record, shard, write_id, codec.checksums_of(payload, record.blocks))
        content = memoryview(bytearray(os.urandom(length)))  # memory that was used before
        codec.write_header(content, header)
        headers.append(content)
        payloads.append(payload)
    return headers, payloads


def example(blocks: int = 3, *, shards: int = 2, name: bytes = b"key") -> Record:
    key = hashlib.sha256(name).digest()
    inner = hashlib.shake_128(name).digest((blocks - 1) * INNER_DIGEST_BYTES)
    root = RootName(b"r" * 32, b"f" * 32, b"epoch", b"s" * 32)
    layout = KVLayout(16, 16 * 4, (PAGE, 2 * PAGE, PAGE)[:shards])
    return Record(root, b"p" * 32, key, inner + key[:INNER_DIGEST_BYTES], layout)


@given(records())
def test_what_is_written_is_read(record: Record) -> None:
    """All fields, aligned, whatever was in the memory before."""
    headers, payloads = written(record)
    codec.verify(headers, payloads, record)
    for shard, content in enumerate(headers):
        header = codec.read_header(content)
        assert (header.record, header.shard, header.write_id) == (record, shard, b"w" * 16)
        assert len(content) % PAGE == 0
    total = sum(map(len, headers)) + sum(map(len, payloads))
    assert codec.stored_bytes(record.layout, record.blocks) == total


def test_the_bytes_of_a_header_are_these() -> None:
    """Golden: who reads them in ten years finds them so."""
    header = written(example())[0][0]
    assert header[:16] == b"kvtidREC" + struct.pack("<II", 1, PAGE)
    golden = "21c58298d4e1cc37614352c1237ab8f931f6a1ce7b740b56ec70939988f7b7e0"
    assert hashlib.sha256(header).hexdigest() == golden


def test_each_byte_of_a_header_counts() -> None:
    """One flipped bit anywhere in it, the padding included."""
    header = written(example())[0][0]
    for at in range(len(header)):
        header[at] ^= 1 << at % 8
        with pytest.raises((CorruptRecord, UnknownFormat)):
            codec.read_header(header)
        header[at] ^= 1 << at % 8
    codec.read_header(header)


def test_each_cell_counts() -> None:
    """The first and last byte of each block of each shard."""
    record = example()
    headers, payloads = written(record)
    for shard, payload in enumerate(payloads):
        size = record.layout.cell_bytes[shard]
        for at in range(0, len(payload), size):
            for spot in (at, at + size - 1):
                payload[spot] ^= 0x80
                with pytest.raises(CorruptRecord, match=f"block {at // size} of"):
                    codec.verify(headers, payloads, record)
                payload[spot] ^= 0x80
    codec.verify(headers, payloads, record)


def test_only_what_was_asked_for_is_taken() -> None:
    """Any other name of the same bytes is refused, and shards that changed places are."""
    record = example(shards=3)
    headers, payloads = written(record)
    others = [
        replace(record, root=replace(record.root, epoch=b"other")),
        replace(record, root=replace(record.root, salt_digest=b"")),
        replace(record, root=replace(record.root, key=b"x" * 32)),
        replace(record, parent=b"q" * 32),
        replace(record, key=record.key[:-1] + b"?"),
        replace(record, layout=replace(record.layout, block_tokens=8, chunk_tokens=32)),
        replace(record, layout=replace(record.layout, chunk_tokens=16 * 5)),
    ]
    for other in others:
        with pytest.raises(CorruptRecord):
            codec.verify(headers, payloads, other)
    with pytest.raises(CorruptRecord, match="shard 2 of"):
        codec.verify(headers[::-1], payloads[::-1], record)


def test_shards_of_two_writes_are_no_record() -> None:
    """Each is well by itself; together they are half of either."""
    record = example()
    headers, payloads = written(record)
    again, _ = written(record, b"v" * 16)
    with pytest.raises(CorruptRecord, match="several writes"):
        codec.verify([headers[0], again[1]], payloads, record)


def test_an_unknown_version_is_said_to_be_unknown() -> None:
    """It may be perfectly well; it is not ours to judge."""
    header = written(example())[0][0]
    struct.pack_into("<I", header, 8, codec.VERSION + 1)
    with pytest.raises(UnknownFormat, match="version 2"):
        codec.read_header(header)


def test_lengths_are_checked_where_a_checksum_vouches_for_them() -> None:
    """A header that was made to be wrong, with the right checksum: nothing follows but a no."""
    header = written(example())[0][0]
    refused: set[int] = set()
    for at in range(24, 400):
        header[at] ^= 0xFF
        struct.pack_into("<Q", header, 16, codec.checksum(header[24:], len(header)))
        try:
            codec.read_header(header)
        except CorruptRecord:
            refused.add(at)
        header[at] ^= 0xFF
    assert len(refused) > 50
    blocks_spare_and_payload = range(282, 298)
    assert refused.issuperset(blocks_spare_and_payload)


@given(st.binary(max_size=3 * PAGE))
def test_anything_else_is_refused(content: bytes) -> None:
    """Bytes from nowhere, also behind a good beginning."""
    for start in (b"", b"kvtidREC", b"kvtidREC" + struct.pack("<II", 1, PAGE)):
        with pytest.raises((CorruptRecord, UnknownFormat)):
            codec.read_header(memoryview(start + content))


def test_a_header_cut_short_is_refused() -> None:
    """At every sixteenth of it."""
    record = replace(example(), layout=KVLayout(16, 16 * 512, (PAGE,) * 2))
    header = written(record)[0][0]
    for part in range(16):
        with pytest.raises(CorruptRecord):
            codec.read_header(header[: len(header) * part // 16])


def test_the_largest_header_fits() -> None:
    """Most shards and most blocks."""
    assert codec.header_bytes(codec.SHARDS_MAX, 512) == codec.HEADER_BYTES_MAX
