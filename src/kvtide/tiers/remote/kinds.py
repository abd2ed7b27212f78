"""A root and a layout in few bytes, as names and rows at a server say them."""

import hashlib
import struct
from functools import lru_cache

from kvtide.core.layout import KVLayout
from kvtide.core.records import RootName

KIND_BYTES = 16


@lru_cache(maxsize=1024)
def kind_of(root: RootName, layout: KVLayout) -> bytes:
    """16 bytes that stand for a root and a layout."""
    running = hashlib.sha256(b"kvtide kind 1")
    for value in (root.key, root.fingerprint, root.epoch, root.salt_digest):
        running.update(struct.pack("<H", len(value)) + value)
    sizes = layout.cell_bytes
    running.update(struct.pack("<II", layout.block_tokens, layout.chunk_tokens))
    running.update(struct.pack(f"<I{len(sizes)}Q", len(sizes), *sizes))
    return running.digest()[:KIND_BYTES]
