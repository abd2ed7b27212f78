"""What keys of a store say, and what small values hold.

    <prefix>:1:<fingerprint>:<salt digest>:<kind>:r:<key>       a record, its header first
    <prefix>:1:<fingerprint>:<salt digest>:<kind>:d:<digest>    which record has this block
    <prefix>:1:<fingerprint>:<salt digest>:<kind>:c:<parent>    that it has children
    <prefix>:1:cleared                                          of the last clear

So whoever knows a chunk's key asks for it by name, and a clear names what it means by a pattern.
Digests are hexadecimal. A block's digest tells all that is before it, so one small value for each
block finds what a prompt shares with a record, however far. Where a value of these is gone, the
record is found by its key alone, until it is stored again.
"""

import re
import struct
from collections.abc import Iterable
from dataclasses import dataclass

from kvtide.core.keys import INNER_DIGEST_BYTES, KEY_BYTES
from kvtide.core.layout import KVLayout
from kvtide.core.records import Record, RootName
from kvtide.tiers.remote.kinds import kind_of
from kvtide.tiers.scope import Scope

VERSION = 1
"""Of names and of what they hold."""
_TARGET = struct.Struct(f"<{KEY_BYTES}sH")
TARGET_BYTES = _TARGET.size


@dataclass(frozen=True, slots=True)
class Target:
    """Which record has a block: its key, and how many blocks it has."""

    key: bytes
    blocks: int

    def packed(self) -> bytes:
        return _TARGET.pack(self.key, self.blocks)

    @classmethod
    def unpack(cls, content: bytes | memoryview) -> "Target":
        return cls(*_TARGET.unpack(content))


class Names:
    """Of one root and layout below one prefix."""

    def __init__(self, prefix: str, root: RootName, layout: KVLayout) -> None:
        self.kind = kind_of(root, layout)
        scope = f"{root.fingerprint.hex()}:{root.salt_digest.hex()}"
        self._top = f"{prefix}:{VERSION}:{scope}:{self.kind.hex()}"

    def record(self, key: bytes) -> str:
        """Of a record."""
        return f"{self._top}:r:{key.hex()}"

    def blocks(self, digests: bytes) -> list[str]:
        """Of what has each of these blocks."""
        size = INNER_DIGEST_BYTES
        cut = (digests[at : at + size] for at in range(0, len(digests), size))
        return [f"{self._top}:d:{digest.hex()}" for digest in cut]

    def children(self, key: bytes) -> str:
        """Of the mark that a key has children."""
        return f"{self._top}:c:{key.hex()}"


def cleared_of(prefix: str) -> str:
    """Of what each clear writes anew."""
    return f"{prefix}:{VERSION}:cleared"


def names_of(prefix: str, record: Record) -> Names:
    """Those of a record's kind."""
    return Names(prefix, record.root, record.layout)


def pattern_of(prefix: str, scope: Scope, what: str = "[rdc]") -> str:
    """A regular expression that the names of a scope have in them, and no other."""
    anything = "[0-9a-f]*"
    fingerprint = anything if scope.fingerprint is None else scope.fingerprint.hex()
    salt = anything if scope.salt_digest is None else scope.salt_digest.hex()
    word = prefix.replace(".", "[.]")
    return f"^{word}:{VERSION}:{fingerprint}:{salt}:{anything}:{what}:{anything}$"


def kinds_in(prefix: str, names: Iterable[str]) -> dict[bytes, tuple[bytes, bytes, int]]:
    """Of each kind among these names of a store: its fingerprint, salt digest and records."""
    parts = re.compile(pattern_of(prefix, Scope(None, None), "r").replace(":[0-9a-f]*", ":(.*)"))
    kinds: dict[bytes, tuple[bytes, bytes, int]] = {}
    for name in names:
        found = parts.match(name)
        if found is None:
            continue
        fingerprint, salt, kind = (bytes.fromhex(part) for part in found.groups()[:3])
        *_, count = kinds.get(kind, (b"", b"", 0))
        kinds[kind] = (fingerprint, salt, count + 1)
    return kinds
