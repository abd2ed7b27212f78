"""The shape of a chunk in bytes: what a slot must hold, for each shard.

    chunk  = blocks_per_chunk blocks                (one slot in each shard's region)
    block  = one cell per shard                     (the engine's pages of that block, padded)

Two engines whose layouts are equal share regions, whatever their fingerprints: only keys tell
their chunks apart.
"""

import hashlib
import struct
from dataclasses import dataclass

CELL_ALIGN_BYTES = 4096
"""Cells are padded to this, so that direct I/O and page-wise tools can work on them."""
BLOCKS_PER_CHUNK_MAX = 512
"""As deep as a tree of children of one key may grow."""


@dataclass(frozen=True, slots=True)
class KVLayout:
    """Geometry of the chunks of one engine.

    Attributes:
        block_tokens: tokens of a block, the engine's unit.
        chunk_tokens: tokens of a chunk: whole blocks.
        cell_bytes: for each shard, the padded bytes of one block.
    """

    block_tokens: int
    chunk_tokens: int
    cell_bytes: tuple[int, ...]

    def __post_init__(self) -> None:
        assert self.block_tokens > 0, self.block_tokens
        assert self.chunk_tokens % self.block_tokens == 0, (self.chunk_tokens, self.block_tokens)
        assert 0 < self.blocks_per_chunk <= BLOCKS_PER_CHUNK_MAX, self.blocks_per_chunk
        assert self.cell_bytes, "a layout has at least one shard"
        assert all(size > 0 and size % CELL_ALIGN_BYTES == 0 for size in self.cell_bytes), (
            self.cell_bytes
        )

    @property
    def blocks_per_chunk(self) -> int:
        """Cells of a slot."""
        return self.chunk_tokens // self.block_tokens

    @property
    def shard_count(self) -> int:
        """Parts of a chunk that different workers hold."""
        return len(self.cell_bytes)

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all shards."""
        return sum(self.cell_bytes)

    @property
    def chunk_bytes(self) -> int:
        """Bytes of one slot over all shards."""
        return self.block_bytes * self.blocks_per_chunk

    @property
    def name(self) -> str:
        """Eight hex digits that tell layouts apart in status and logs."""
        packed = struct.pack(
            f"<III{len(self.cell_bytes)}Q",
            self.block_tokens,
            self.chunk_tokens,
            len(self.cell_bytes),
            *self.cell_bytes,
        )
        return hashlib.sha256(packed).hexdigest()[:8]
