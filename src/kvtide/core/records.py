"""What a chunk is below the host: everything that tells it apart, without its bytes.

A *record* is a chunk at rest. Its name is the chunk's key; the rest is what a tier needs to keep
it in its chain, to take it away by salt, and to refuse it where anything differs from what is
asked.
"""

from dataclasses import dataclass

from kvtide.core.keys import INNER_DIGEST_BYTES, KEY_BYTES
from kvtide.core.layout import KVLayout


@dataclass(frozen=True, slots=True)
class RootName:
    """What a chain starts from.

    Attributes:
        key: the root key, 32 bytes.
        fingerprint: of the engine whose bytes these are, 32 bytes.
        epoch: of the weights; empty at an engine's start, at most 64 bytes.
        salt_digest: SHA-256 of the salt; empty where there is none.
    """

    key: bytes
    fingerprint: bytes
    epoch: bytes
    salt_digest: bytes


@dataclass(frozen=True, slots=True)
class Record:
    """One chunk or tail, as tiers know it.

    Attributes:
        root: where its chain starts.
        parent: key of the chunk before it, or the root key; 32 bytes.
        key: its own, 32 bytes.
        digests: the shortened digests of its blocks, 16 bytes each; the last begins its key.
        layout: its geometry when whole, and its shards.
    """

    root: RootName
    parent: bytes
    key: bytes
    digests: bytes
    layout: KVLayout

    def __post_init__(self) -> None:
        assert len(self.key) == KEY_BYTES, len(self.key)
        assert len(self.parent) == KEY_BYTES, len(self.parent)
        assert 0 < self.blocks <= self.layout.blocks_per_chunk, self.blocks
        assert len(self.digests) == self.blocks * INNER_DIGEST_BYTES, len(self.digests)

    @property
    def blocks(self) -> int:
        """Blocks that it holds."""
        return len(self.digests) // INNER_DIGEST_BYTES

    @property
    def is_whole(self) -> bool:
        """A whole chunk, not a tail: only these have children."""
        return self.blocks == self.layout.blocks_per_chunk

    @property
    def payload_bytes(self) -> int:
        """Bytes of all its shards."""
        return self.blocks * self.layout.block_bytes
