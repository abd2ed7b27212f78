"""Records to try tiers with: chains as engines make them, and cells that say whose they are.

    guard page │ cell 0 │ cell 1 │ … │ guard page         one anonymous mapping for each shard

Every byte of a cell follows from its record's key, its shard and its position, so a swap of two
records, shards, cells or pages is seen, and so is a byte written beside the cells.
"""

import hashlib
import mmap
from collections.abc import Sequence

from kvtide.core.chain import Chain
from kvtide.core.keys import fingerprint, root_key, salt_digest
from kvtide.core.layout import CELL_ALIGN_BYTES, KVLayout
from kvtide.core.records import Record, RootName

BLOCK_TOKENS = 4
BLOCKS_PER_CHUNK = 4
CHUNK_TOKENS = BLOCK_TOKENS * BLOCKS_PER_CHUNK

GUARD = b"\xa5" * CELL_ALIGN_BYTES


def layout_of(*cell_bytes: int) -> KVLayout:
    """Chunks of four blocks of four tokens; one shard for each size."""
    return KVLayout(BLOCK_TOKENS, CHUNK_TOKENS, cell_bytes)


def root_of(engine: str = "engine", *, epoch: bytes = b"", salt: str | None = None) -> RootName:
    """The root of an engine's chains."""
    name = fingerprint({"engine": engine})
    key = root_key(name, epoch=epoch, salt=salt, adapter=b"")
    return RootName(key, name, epoch, salt_digest(salt))


def text(number: int, blocks: int) -> list[int]:
    """The tokens of a prompt: no two numbers share a block."""
    return [number * 10_000 + index for index in range(blocks * BLOCK_TOKENS)]


def chain_of(root: RootName, layout: KVLayout, tokens: Sequence[int]) -> list[Record]:
    """The records of a prompt, in order: whole chunks, then its tail if it has one."""
    chain = Chain(root.key, layout.block_tokens, layout.chunk_tokens)
    chain.extend(tokens)
    blocks = len(tokens) // layout.block_tokens
    records = []
    for start in range(0, blocks, layout.blocks_per_chunk):
        chunk = start // layout.blocks_per_chunk
        count = min(layout.blocks_per_chunk, blocks - start)
        key = chain.digests(chunk, count)[-1]
        digests = chain.short_digests(chunk, count)
        records.append(Record(root, chain.parent(chunk), key, digests, layout))
    return records


def keys_of(records: Sequence[Record]) -> bytes:
    """Their keys as a lookup takes them."""
    return b"".join(record.key for record in records)


class Cells:
    """Memory of one record, shard by shard."""

    def __init__(self, record: Record) -> None:
        """Zeroes, between guards."""
        self._record = record
        self._maps: list[memoryview] = []
        for cell_bytes in record.layout.cell_bytes:
            shard_bytes = record.blocks * cell_bytes
            view = memoryview(mmap.mmap(-1, shard_bytes + 2 * len(GUARD)))
            view[: len(GUARD)] = GUARD
            view[-len(GUARD) :] = GUARD
            self._maps.append(view)
        self.views = [view[len(GUARD) : -len(GUARD)] for view in self._maps]
        """As a job takes them."""

    def fill(self) -> "Cells":
        """The record's bytes."""
        for shard, view in enumerate(self.views):
            view[:] = _pattern(self._record, shard)
        return self

    def scramble(self) -> None:
        """They belong to somebody else now."""
        for view in self.views:
            view[:] = b"\xff" * len(view)

    def assert_filled(self) -> None:
        """Every byte is the record's."""
        for shard, view in enumerate(self.views):
            assert view == _pattern(self._record, shard), (
                f"shard {shard} of {_name(self._record)} does not hold its bytes"
            )

    def assert_scrambled(self) -> None:
        """Nobody has written to them since."""
        for shard, view in enumerate(self.views):
            assert bytes(view).count(b"\xff") == len(view), (
                f"shard {shard} of {_name(self._record)} was written to after the load had ended"
            )

    def assert_guarded(self) -> None:
        """Nothing was written beside them."""
        for view in self._maps:
            assert view[: len(GUARD)] == GUARD, f"bytes before {_name(self._record)} changed"
            assert view[-len(GUARD) :] == GUARD, f"bytes behind {_name(self._record)} changed"


def _pattern(record: Record, shard: int) -> bytes:
    shard_bytes = record.blocks * record.layout.cell_bytes[shard]
    return hashlib.shake_128(record.key + bytes([shard])).digest(shard_bytes)


def _name(record: Record) -> str:
    return f"record {record.key.hex()[:8]}"
