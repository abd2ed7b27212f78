"""Names of content: fingerprint, root key, block digests, chunk keys.

Every name is a pure function of declared inputs: no environment, no hash seed, no process
state takes part, and golden values are committed with the tests. Every encoding is injective
(tags, lengths, counts), so two different inputs never share a name.

    fingerprint ─┐
    epoch, salt, adapter ─┴─► root key ─► chunk key ─► chunk key ─► … (each the parent of the next)
                                              └ digests of the blocks inside it

Block j of a chunk is named by SHA-256 over the parent key and the chunk's tokens *up to the end
of block j*. So one digest stands for all the blocks before it too, one running hash serves a
whole chunk, and the digest of the last block is the chunk's key.
"""

import hashlib
import struct
import sys
from array import array
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, TypeAlias

FORMAT_VERSION = 1
"""Part of every key; raised when the bytes of an entry or the meaning of a key change."""

KEY_BYTES = 32
INNER_DIGEST_BYTES = 16
"""Digests of blocks inside a chunk are kept this short: 128 bits still name content."""

FieldValue: TypeAlias = (
    str | int | float | bool | bytes | Sequence["FieldValue"] | Mapping[str, "FieldValue"] | None
)
"""What a field of a fingerprint may be: anything else must be turned into one of these first."""

_FINGERPRINT_TAG = b"kvtide fingerprint"
_ROOT_TAG = b"kvtide root"
_BLOCK_TAG = b"kvtide block" + struct.pack("<I", FORMAT_VERSION)
_COUNTS = struct.Struct("<II")
_ITEM = struct.Struct("<iH")
CONTENT_ID_BYTES_MAX = (1 << 16) - 1
"""What the length of a content id has room for; longer ones name nothing here."""


class Item(NamedTuple):
    """One multimodal item of a prompt: where it stands and what it is."""

    first_token: int
    token_count: int
    content_id: bytes


def encode(value: FieldValue) -> bytes:
    """A canonical, self-delimiting encoding: equal values give equal bytes, others never do.

    A list equals a tuple of the same parts; the order of a mapping says nothing. Raises TypeError
    for a value of another type, so that nothing is ever left out, or taken for another, silently.
    """
    match value:
        case None:
            return b"n"
        case bool():
            return b"t" if value else b"f"
        case int():
            return _framed(b"i", str(int(value)).encode())
        case float():
            return _framed(b"d", value.hex().encode())
        case str():
            return _framed(b"s", _text_bytes(value))
        case bytes():
            return _framed(b"b", value)
        case list() | tuple():
            return _framed(b"l", b"".join(encode(part) for part in value))
        case Mapping() if all(isinstance(name, str) for name in value):
            pairs = sorted((encode(name), encode(part)) for name, part in value.items())
            return _framed(b"m", b"".join(name + part for name, part in pairs))
    raise TypeError(f"a fingerprint cannot hold {value!r} of type {type(value).__name__}")


def _text_bytes(text: str) -> bytes:
    """UTF-8; of text that is none (a lone surrogate, as JSON may hold) still some bytes."""
    return text.encode("utf-8", "surrogatepass")


def _framed(tag: bytes, payload: bytes) -> bytes:
    return tag + struct.pack("<I", len(payload)) + payload


def fingerprint(fields: Mapping[str, FieldValue]) -> bytes:
    """The 32 bytes that stand for everything which changes the meaning or format of KV bytes."""
    head = _framed(_FINGERPRINT_TAG, struct.pack("<I", FORMAT_VERSION))
    return hashlib.sha256(head + encode(fields)).digest()


def salt_digest(salt: str | None) -> bytes:
    """What may be said of a salt: its SHA-256; an empty salt equals none and gives no bytes."""
    return hashlib.sha256(_text_bytes(salt)).digest() if salt else b""


def root_key(fingerprint: bytes, *, epoch: bytes, salt: str | None, adapter: bytes) -> bytes:
    """The first key of a chain.

    Args:
        fingerprint: 32 bytes of this engine.
        epoch: random bytes since the last reset; empty at start.
        salt: the caller's secret, which isolates tenants; None and "" are the same.
        adapter: content digest of the adapter (LoRA); empty for the base model.
    """
    assert len(fingerprint) == KEY_BYTES, len(fingerprint)
    running = hashlib.sha256(_framed(_ROOT_TAG, struct.pack("<I", FORMAT_VERSION)) + fingerprint)
    for part in (epoch, _text_bytes(salt or ""), adapter):
        running.update(struct.pack("<I", len(part)) + part)
    return running.digest()


def token_bytes(token_ids: Iterable[int]) -> bytes:
    """Token ids as uint32, little-endian: what the digests are made of."""
    return packed_tokens(array("I", token_ids))


def packed_tokens(token_ids: "array[int]") -> bytes:
    """The same of an array that is kept and grown, which spares the slow walk over a list."""
    if sys.byteorder == "little":
        return token_ids.tobytes()
    swapped = array("I", token_ids)
    swapped.byteswap()
    return swapped.tobytes()


def block_digests(
    parent: bytes, tokens: bytes, block_tokens: int, first_token: int, items: Sequence[Item] = ()
) -> list[bytes]:
    """The digest at the end of each whole block of one chunk.

    Args:
        parent: key of the chunk before, or the root key; 32 bytes.
        tokens: the chunk's token ids (at most one chunk of them), packed.
        block_tokens: tokens of a block.
        first_token: position of the chunk's first token in the prompt, for `items`.
        items: multimodal items of the whole prompt, in order.

    Returns:
        32 bytes for each whole block; what follows the last whole block has no digest.
    """
    assert len(parent) == KEY_BYTES, len(parent)
    block_bytes = 4 * block_tokens
    running = hashlib.sha256(_BLOCK_TAG + parent)
    digests = []
    for end in range(block_bytes, len(tokens) + 1, block_bytes):
        running.update(tokens[end - block_bytes : end])
        closing = running.copy()
        closing.update(_closing(first_token, end // 4, items))
        digests.append(closing.digest())
    return digests


def chunk_key(parent: bytes, tokens: bytes, first_token: int, items: Sequence[Item] = ()) -> bytes:
    """The key of one whole chunk: the digest of its last block, without those in between."""
    closing = _closing(first_token, len(tokens) // 4, items)
    return hashlib.sha256(_BLOCK_TAG + parent + tokens + closing).digest()


def _closing(first_token: int, token_count: int, items: Sequence[Item]) -> bytes:
    """What follows the tokens: the items that overlap them, and both counts last."""
    if not items:
        return _COUNTS.pack(0, token_count)
    end = first_token + token_count
    parts = [
        _ITEM.pack(item.first_token - first_token, len(item.content_id)) + item.content_id
        for item in items
        if item.first_token < end and item.first_token + item.token_count > first_token
    ]
    return b"".join(parts) + _COUNTS.pack(len(parts), token_count)


def chunk_keys(
    parent: bytes, tokens: bytes, chunk_tokens: int, first_token: int, items: Sequence[Item] = ()
) -> list[bytes]:
    """The keys of all whole chunks in `tokens`, which begin at `first_token` under `parent`."""
    chunk_bytes = 4 * chunk_tokens
    keys = []
    if not items:
        # The common case in one tight loop: 128k tokens must cost less than 4 ms.
        closing = _COUNTS.pack(0, chunk_tokens)
        sha256 = hashlib.sha256
        for end in range(chunk_bytes, len(tokens) + 1, chunk_bytes):
            parent = sha256(
                b"".join((_BLOCK_TAG, parent, tokens[end - chunk_bytes : end], closing))
            ).digest()
            keys.append(parent)
        return keys
    for end in range(chunk_bytes, len(tokens) + 1, chunk_bytes):
        start = end - chunk_bytes
        parent = chunk_key(parent, tokens[start:end], first_token + start // 4, items)
        keys.append(parent)
    return keys
