"""What records share, and how files of ours define it: a root and a layout under a number.

A rows log, an index and a journal each have definitions of their own, ahead of the rows that speak
of them by number. docs/formats.md has the bytes.
"""

import struct
from dataclasses import dataclass
from functools import lru_cache

from kvtide.codec import record as codec
from kvtide.core.layout import BLOCKS_PER_CHUNK_MAX, CELL_ALIGN_BYTES, KVLayout
from kvtide.core.records import RootName
from kvtide.errors import CorruptRecord

_KIND = struct.Struct("<I32s32sB32sB64sIII")
_SHARD_COUNT = struct.Struct("<I")  # at its end
_NUMBER = struct.Struct("<I")  # at its beginning
_NO_NUMBER = bytes(_NUMBER.size)


@dataclass(frozen=True, slots=True)
class Kind:
    """What most records of a segment share: where their chain starts, and their geometry."""

    root: RootName
    layout: KVLayout

    def __hash__(self) -> int:
        return hash(self.root.key)  # tells nearly all apart, and is not made of a dozen others


def kind_length_bytes(kind: Kind) -> int:
    """Length of its definition."""
    return _KIND.size + 8 * kind.layout.shard_count


def kind_bytes(number: int, kind: Kind) -> bytes:
    """A definition, as logs and indexes hold it."""
    root, layout = kind.root, kind.layout
    return _KIND.pack(
        number,
        root.key,
        root.fingerprint,
        len(root.salt_digest),
        root.salt_digest,
        len(root.epoch),
        root.epoch,
        layout.block_tokens,
        layout.blocks_per_chunk,
        layout.shard_count,
    ) + struct.pack(f"<{layout.shard_count}Q", *layout.cell_bytes)


@dataclass(frozen=True, slots=True)
class Definition:
    """A kind as it stands in logs and indexes, under a number and in so many bytes."""

    number: int
    kind: Kind
    length_bytes: int


def read_kind(body: memoryview) -> Definition:
    """The definition at the start of these bytes.

    Raises:
        CorruptRecord: it is none.
    """
    if len(body) < _KIND.size:
        raise CorruptRecord("a definition is cut short")
    (shard_count,) = _SHARD_COUNT.unpack_from(body, _KIND.size - _SHARD_COUNT.size)
    if shard_count > codec.SHARDS_MAX:
        raise CorruptRecord(f"a definition has {shard_count} shards")
    length_bytes = _KIND.size + 8 * shard_count
    (number,) = _NUMBER.unpack_from(body)
    kind = _kind(bytes(_NO_NUMBER + body[_NUMBER.size : length_bytes]))
    return Definition(number, kind, length_bytes)


@lru_cache(maxsize=16_384)
def _kind(body: bytes) -> Kind:
    """What a definition says, but for its number: thousands of segments say the same of each of
    thousands of salts, under other numbers."""
    _, key, fingerprint, salt_bytes, salt, epoch_bytes, epoch, *sizes = _KIND.unpack_from(body)
    block_tokens, blocks_per_chunk, shard_count = sizes
    if not (
        shard_count > 0
        and 0 < blocks_per_chunk <= BLOCKS_PER_CHUNK_MAX
        and 0 < block_tokens <= codec.BLOCK_TOKENS_MAX
        and salt_bytes in (0, len(salt))
        and epoch_bytes <= len(epoch)
        and len(body) == _KIND.size + 8 * shard_count
    ):
        raise CorruptRecord(f"a definition has numbers that cannot be: {sizes}")
    cell_bytes = struct.unpack_from(f"<{shard_count}Q", body, _KIND.size)
    if any(not 0 < size <= codec.CELL_BYTES_MAX or size % CELL_ALIGN_BYTES for size in cell_bytes):
        raise CorruptRecord(f"a definition has cells that cannot be: {cell_bytes}")
    root = RootName(key, fingerprint, epoch[:epoch_bytes], salt[:salt_bytes])
    layout = KVLayout(block_tokens, block_tokens * blocks_per_chunk, cell_bytes)
    return Kind(root, layout)
