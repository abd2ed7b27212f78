"""The bytes of one shard of a record, as it rests below the host. docs/formats.md.

    0        24                                        header_bytes       + blocks × cell_bytes
    ┌────────┬───────┬────────────┬─────────┬───────────┬─────────┬────────┬─────┬──────────┐
    │ opening│ fixed │ cell_bytes │ digests │ checksums │ zeros   │ cell 0 │ …   │ cell n-1 │
    └────────┴───────┴────────────┴─────────┴───────────┴─────────┴────────┴─────┴──────────┘

Header and cells are multiples of 4096 bytes, so that each is aligned for direct I/O. All numbers
are little-endian. The opening holds the magic, the version, the header's length, and a checksum
of all the rest of the header: what is read after it is what was written. A length is believed
only where it is in its range and the bytes are there.
"""

import struct
from collections.abc import Sequence
from dataclasses import dataclass

import xxhash

from kvtide.core.keys import INNER_DIGEST_BYTES
from kvtide.core.layout import BLOCKS_PER_CHUNK_MAX, CELL_ALIGN_BYTES, KVLayout
from kvtide.core.records import Record, RootName
from kvtide.errors import CorruptRecord, UnknownFormat
from kvtide.units import round_up

MAGIC = b"kvtidREC"
VERSION = 1
WRITE_ID_BYTES = 16
SHARDS_MAX = 1024
EPOCH_BYTES_MAX = 64
BLOCK_TOKENS_MAX = 1 << 20
CELL_BYTES_MAX = 1 << 40

_OPENING = struct.Struct("<8sIIQ")
_FIXED = struct.Struct("<32s32s32s32s16sB32sB64s6IQ")
_VARIABLE_AT = _OPENING.size + _FIXED.size
HEADER_BYTES_MAX = round_up(
    _VARIABLE_AT + 8 * SHARDS_MAX + (INNER_DIGEST_BYTES + 8) * BLOCKS_PER_CHUNK_MAX,
    CELL_ALIGN_BYTES,
)


@dataclass(frozen=True, slots=True)
class Header:
    """What a shard says of itself.

    Attributes:
        record: the chunk that it is of.
        shard: which of its shards; there are as many as the layout has.
        write_id: 16 random bytes, the same in all shards of one write.
        checksums: xxh3_64 of each cell, in order.
    """

    record: Record
    shard: int
    write_id: bytes
    checksums: tuple[int, ...]


def checksum(content: memoryview | bytearray | bytes, seed: int = 0) -> int:
    """xxh3_64: what tells damage, not forgery."""
    return xxhash.xxh3_64_intdigest(content, seed)


def header_bytes(shard_count: int, blocks: int) -> int:
    """Length of the header of each shard of such a record; a multiple of 4096."""
    variable = 8 * shard_count + (INNER_DIGEST_BYTES + 8) * blocks
    return round_up(_VARIABLE_AT + variable, CELL_ALIGN_BYTES)


def stored_bytes(layout: KVLayout, blocks: int) -> int:
    """Length of all shards of a record with so many blocks, headers included."""
    shard_count = layout.shard_count
    return shard_count * header_bytes(shard_count, blocks) + blocks * layout.block_bytes


def checksums_of(cells: memoryview, blocks: int) -> tuple[int, ...]:
    """The checksum of each of so many equal cells."""
    assert len(cells) % blocks == 0, (len(cells), blocks)
    size = len(cells) // blocks
    return tuple(checksum(cells[at : at + size]) for at in range(0, len(cells), size))


def write_header(into: memoryview, header: Header) -> None:
    """Fill exactly `header_bytes` of memory."""
    record, layout = header.record, header.record.layout
    length = header_bytes(layout.shard_count, record.blocks)
    assert len(into) == length, (len(into), length)
    assert len(header.checksums) == record.blocks, (len(header.checksums), record.blocks)
    assert len(header.write_id) == WRITE_ID_BYTES, header.write_id
    assert layout.shard_count <= SHARDS_MAX, layout.shard_count
    root = record.root
    assert len(root.epoch) <= EPOCH_BYTES_MAX, root.epoch
    _FIXED.pack_into(
        into,
        _OPENING.size,
        root.key,
        root.fingerprint,
        record.key,
        record.parent,
        header.write_id,
        len(root.salt_digest),
        root.salt_digest,
        len(root.epoch),
        root.epoch,
        header.shard,
        layout.shard_count,
        layout.block_tokens,
        layout.blocks_per_chunk,
        record.blocks,
        0,
        record.blocks * layout.cell_bytes[header.shard],
    )
    variable = struct.pack(f"<{layout.shard_count}Q", *layout.cell_bytes)
    variable += record.digests
    variable += struct.pack(f"<{record.blocks}Q", *header.checksums)
    end = _VARIABLE_AT + len(variable)
    into[_VARIABLE_AT:end] = variable
    into[end:] = bytes(length - end)
    found = checksum(into[_OPENING.size :], length)
    _OPENING.pack_into(into, 0, MAGIC, VERSION, length, found)


def read_header(content: memoryview) -> Header:
    """The header at the start of these bytes, which may go on behind it.

    Raises:
        UnknownFormat: it is of a version that is not ours.
        CorruptRecord: it is not a header, is cut short, or not as it was written.
    """
    if len(content) < CELL_ALIGN_BYTES:
        raise CorruptRecord(f"a shard is cut short: {len(content)} bytes")
    magic, version, length, wanted = _OPENING.unpack_from(content)
    if magic != MAGIC:
        raise CorruptRecord(f"a shard begins with {magic.hex()}, not with {MAGIC.hex()}")
    if version != VERSION:
        raise UnknownFormat(f"a shard has format version {version}; this kvtide knows {VERSION}")
    if length % CELL_ALIGN_BYTES or not 0 < length <= min(HEADER_BYTES_MAX, len(content)):
        raise CorruptRecord(f"a shard says that its header has {length} bytes")
    found = checksum(content[_OPENING.size : length], length)
    if found != wanted:
        raise CorruptRecord(f"checksum of a header is {found:#x}, expected {wanted:#x}")
    return _parsed(content[:length])


def _parsed(content: memoryview) -> Header:
    """The fields of a header whose checksum is right; a range is believed only once checked."""
    fixed = _FIXED.unpack_from(content, _OPENING.size)
    root_key, fingerprint, key, parent, write_id, salt_bytes, salt, epoch_bytes, epoch = fixed[:9]
    shard, shard_count, block_tokens, blocks_per_chunk, blocks, spare, payload_bytes = fixed[9:]
    if not (
        shard < shard_count <= SHARDS_MAX
        and 0 < blocks <= blocks_per_chunk <= BLOCKS_PER_CHUNK_MAX
        and 0 < block_tokens <= BLOCK_TOKENS_MAX
        and salt_bytes in (0, len(salt))
        and epoch_bytes <= len(epoch)
        and spare == 0
        and len(content) == header_bytes(shard_count, blocks)
    ):
        raise CorruptRecord(f"a header has numbers that cannot be: {fixed[9:]}")
    cell_bytes = struct.unpack_from(f"<{shard_count}Q", content, _VARIABLE_AT)
    if any(not 0 < size <= CELL_BYTES_MAX or size % CELL_ALIGN_BYTES for size in cell_bytes):
        raise CorruptRecord(f"a header has cells that cannot be: {cell_bytes}")
    if payload_bytes != blocks * cell_bytes[shard]:
        raise CorruptRecord(f"a header speaks of {payload_bytes} bytes of payload")
    digests_at = _VARIABLE_AT + 8 * shard_count
    checksums_at = digests_at + INNER_DIGEST_BYTES * blocks
    digests = bytes(content[digests_at:checksums_at])
    if digests[-INNER_DIGEST_BYTES:] != key[:INNER_DIGEST_BYTES]:
        raise CorruptRecord("the last block of a record does not begin its key")
    root = RootName(root_key, fingerprint, epoch[:epoch_bytes], salt[:salt_bytes])
    layout = KVLayout(block_tokens, block_tokens * blocks_per_chunk, cell_bytes)
    return Header(
        Record(root, parent, key, digests, layout),
        shard,
        write_id,
        struct.unpack_from(f"<{blocks}Q", content, checksums_at),
    )


def verify(headers: Sequence[memoryview], cells: Sequence[memoryview], asked: Record) -> None:
    """Prove that these are all shards of what was asked for, of one write, byte for byte.

    Raises:
        CorruptRecord: they are not; says what differs.
    """
    assert len(headers) == len(cells) == asked.layout.shard_count, len(headers)
    write_ids = set()
    for shard, (content, payload) in enumerate(zip(headers, cells, strict=True)):
        header = header_of(content, asked, shard)
        write_ids.add(header.write_id)
        verify_cells(header, payload)
    if len(write_ids) != 1:
        raise CorruptRecord("shards of one record are of several writes")


def header_of(content: memoryview, asked: Record, shard: int) -> Header:
    """The header at the start of these bytes, which is of this shard of what was asked for.

    Raises:
        CorruptRecord: it is not; says what differs.
    """
    try:
        header = read_header(content)
    except UnknownFormat as error:
        raise CorruptRecord(f"{error}; it was written as version {VERSION}") from error
    if header.record != asked or header.shard != shard:
        raise CorruptRecord(
            f"at rest is shard {header.shard} of {header.record.key.hex()},"
            f" asked for was shard {shard} of {asked.key.hex()}"
        )
    return header


def verify_cells(header: Header, payload: memoryview) -> None:
    """Prove each cell of one shard.

    Raises:
        CorruptRecord: says which block differs.
    """
    size = header.record.layout.cell_bytes[header.shard]
    if len(payload) != size * header.record.blocks:
        raise CorruptRecord(f"the payload of a shard is cut short: {len(payload)} bytes")
    for block in range(header.record.blocks):
        require_checksum(header, block, checksum(payload[block * size : (block + 1) * size]))


def require_checksum(header: Header, block: int, found: int) -> None:
    """Prove one cell, whose checksum this is.

    Raises:
        CorruptRecord: it is another one than was written.
    """
    wanted = header.checksums[block]
    if found != wanted:
        raise CorruptRecord(
            f"checksum of block {block} of {header.record.key.hex()} is {found:#x},"
            f" expected {wanted:#x}"
        )
