"""A toy model over real paged KV memory: whatever is wrong with one byte shows in its output.

    KV of token p    =  H(all KV bytes of the request before p, token p)     64 bytes
    token p + 1      =  a number made of H(the same, and the KV of p)

So a byte that is wrong, stale, missing or in the wrong place changes every token behind it, and a
token that is right proves that all KV bytes before it were right: the oracle of contract N_diff
without a model. A real forward reads its KV through a block table just so; attention adds up over
all positions, and may hide a swapped block behind rounding. This one can't.

Tensor parallelism: every shard has bytes of its own, and a token is made of all shards' hashes.
Weights are a number that goes into every hash: KV of other weights makes other tokens.
"""

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np

TOKEN_KV_BYTES = 64
"""KV bytes of one token in one worker, all layers."""


class PagedMemory:
    """One worker's KV memory: layers × blocks × tokens × bytes, a view of the engine's own."""

    def __init__(self, memory: Any, shard: int) -> None:
        """`memory` is an array of uint8 with these four dimensions."""
        layers, self.block_count, self.block_tokens, layer_bytes = memory.shape
        assert layers * layer_bytes == TOKEN_KV_BYTES, memory.shape
        self.weights = 0
        self._memory = memory
        self._shard = shard
        self._layer_shape = (layers, layer_bytes)

    def forward(self, table: Sequence[int], start: int, tokens: Sequence[int]) -> list[bytes]:
        """Compute `tokens` at positions from `start` on; for each what the next token hangs on.

        Args:
            table: the request's blocks, in order.
            start: tokens of the request whose KV lies in those blocks already.
            tokens: the tokens to compute.
        """
        running = _hash_of(self._shard, self.weights)
        running.update(self.read(table, start))
        token_kvs, hashes = [], []
        for token in tokens:
            token_kvs.append(_token_kv(running, token))
            running.update(token_kvs[-1])
            hashes.append(running.digest())
        self._write(table, start, token_kvs)
        return hashes

    def read(self, table: Sequence[int], token_count: int) -> bytes:
        """The KV bytes of a request's first tokens, token after token."""
        used = list(table[: -(-token_count // self.block_tokens)])
        by_token = self._memory[:, used].transpose(1, 2, 0, 3).reshape(-1, TOKEN_KV_BYTES)
        return bytes(by_token[:token_count].tobytes())

    def _write(self, table: Sequence[int], start: int, token_kvs: Sequence[bytes]) -> None:
        positions = np.arange(start, start + len(token_kvs))
        blocks = np.asarray(table)[positions // self.block_tokens]
        values = np.frombuffer(b"".join(token_kvs), np.uint8).reshape(-1, *self._layer_shape)
        self._memory[:, blocks, positions % self.block_tokens] = values.transpose(1, 0, 2)

    def scribble(self, block_ids: Sequence[int]) -> None:
        """Make what these blocks held unusable, so that a copy that never happened shows."""
        self._memory[:, list(block_ids)] ^= 0xA5


class ToySequence:
    """What a worker remembers of a request.

    Attributes:
        tokens: those that are known, by position.
        table: its blocks, in order.
        drafts: guesses that are computed in this step behind the known tokens.
        is_sampled: whether this step computes the last known token, so that the next can be told.
    """

    def __init__(self, tokens: Sequence[int], table: Sequence[int]) -> None:
        self.tokens = list(tokens)
        self.table = list(table)
        self.drafts: list[int] = []
        self.is_sampled = False


def next_token(hashes: Sequence[bytes], vocabulary: int) -> int:
    """The token that all shards together make."""
    whole = hashlib.blake2b(b"".join(hashes), digest_size=8).digest()
    return int.from_bytes(whole, "big") % vocabulary


def generated(
    prompt: Sequence[int], count: int, vocabulary: int, *, shard_count: int = 1, weights: int = 0
) -> list[int]:
    """What every engine must generate from a prompt: without blocks, steps or caches."""
    tokens = list(prompt)
    shards = [_hash_of(shard, weights) for shard in range(shard_count)]
    for position in range(len(prompt) + count - 1):
        for running in shards:
            running.update(_token_kv(running, tokens[position]))
        if position >= len(prompt) - 1:
            tokens.append(next_token([running.digest() for running in shards], vocabulary))
    return tokens[len(prompt) :]


def _hash_of(shard: int, weights: int) -> Any:
    return hashlib.blake2b(salt=shard.to_bytes(2, "big") + weights.to_bytes(8, "big"))


def _token_kv(running: Any, token: int) -> bytes:
    own = running.copy()
    own.update(token.to_bytes(4, "big"))
    return bytes(own.digest())
