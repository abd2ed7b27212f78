"""The keys of one request, growing as its tokens do."""

import contextlib
from array import array
from collections.abc import Sequence

from kvtide.core.keys import (
    INNER_DIGEST_BYTES,
    Item,
    block_digests,
    chunk_keys,
    packed_tokens,
)

KEPT_CHUNKS_MAX = 8
"""Chunks whose digests a chain keeps for `block_digest`: those that it is compared in."""


class Chain:
    """Chunk keys of a token list from its root on; each token is read and hashed once.

    What the list held when it was read is final: tokens are only ever appended. A token that is no
    uint32 ends the chain: what stands before it has names, what follows has none.
    """

    def __init__(
        self, root: bytes, block_tokens: int, chunk_tokens: int, items: Sequence[Item] = ()
    ) -> None:
        assert chunk_tokens % block_tokens == 0, (chunk_tokens, block_tokens)
        self.root = root
        self.block_tokens = block_tokens
        self.chunk_tokens = chunk_tokens
        self.keys: list[bytes] = []
        self._items = tuple(items)
        self._tokens = array("I")
        self._kept: dict[int, list[bytes]] = {}

    @property
    def token_count(self) -> int:
        """Tokens read so far."""
        return len(self._tokens)

    @property
    def blocks_per_chunk(self) -> int:
        """Blocks of a whole chunk."""
        return self.chunk_tokens // self.block_tokens

    def extend(self, token_ids: Sequence[int]) -> None:
        """Read what the list has grown by; keys of new whole chunks are made."""
        if len(token_ids) > len(self._tokens):
            with contextlib.suppress(OverflowError, TypeError):  # those before it are read
                self._tokens.extend(token_ids[len(self._tokens) :])
        start = len(self.keys) * self.chunk_tokens
        whole = len(self._tokens) // self.chunk_tokens * self.chunk_tokens
        if whole > start:
            tokens = packed_tokens(self._tokens[start:whole])
            parent = self.parent(len(self.keys))
            self.keys += chunk_keys(parent, tokens, self.chunk_tokens, start, self._items)

    def parent(self, chunk: int) -> bytes:
        """The key before this chunk."""
        return self.keys[chunk - 1] if chunk else self.root

    def digests(self, chunk: int, blocks: int) -> list[bytes]:
        """The full digests of the first blocks of a chunk, whole or not."""
        start = chunk * self.chunk_tokens
        end = start + blocks * self.block_tokens
        assert end <= len(self._tokens), (end, len(self._tokens))
        tokens = packed_tokens(self._tokens[start:end])
        return block_digests(self.parent(chunk), tokens, self.block_tokens, start, self._items)

    def block_digest(self, block: int) -> bytes:
        """The full digest at the end of one block, kept: for what is compared again and again."""
        chunk, index = divmod(block, self.blocks_per_chunk)
        digests = self._kept.get(chunk, [])
        if index >= len(digests):
            behind = len(self._tokens) - chunk * self.chunk_tokens
            blocks = min(behind // self.block_tokens, self.blocks_per_chunk)
            assert index < blocks, (block, len(self._tokens))
            if len(self._kept) >= KEPT_CHUNKS_MAX:
                del self._kept[next(iter(self._kept))]
            digests = self._kept[chunk] = self.digests(chunk, blocks)
        return digests[index]

    def short_digests(self, chunk: int, blocks: int) -> bytes:
        """The same, cut to what messages carry, one after another."""
        return short(self.digests(chunk, blocks))


def short(digests: Sequence[bytes]) -> bytes:
    """Full digests, cut to what messages carry, one after another."""
    return b"".join(digest[:INNER_DIGEST_BYTES] for digest in digests)
