"""How much is there, as last heard: a store that others use too can only be asked.

Ownership: under a lock; sessions tell it, on their threads, before the job that they learned it by
has ended, and the node's owner reads it.
"""

import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from kvtide.core.records import RootName
from kvtide.tiers.scope import Scope


@dataclass(slots=True)
class _Kind:
    """Records of one root and layout."""

    fingerprint: bytes
    salt_digest: bytes
    records: int


class Census:
    """Bytes and records of one place, and what was evicted by this node."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kinds: dict[bytes, _Kind] = {}
        self._other_count = 0
        self._bytes_used = 0
        self._evicted = 0
        self.bytes_max: int | None = None
        """The cap, where the place itself has one and has said it."""

    def said(self, bytes_used: int, removed: Iterable[bytes]) -> None:
        """An answer: all bytes there are, and the kind of each record that went with the call."""
        with self._lock:
            self._bytes_used = bytes_used
            for name in removed:
                kind = self._kinds.get(name)
                if kind is None:
                    self._other_count = max(0, self._other_count - 1)
                else:
                    kind.records -= 1
                    if kind.records <= 0:
                        del self._kinds[name]

    def has(self, bytes_used: int, bytes_max: int) -> None:
        """All bytes there are, and how many there may be: the place's own numbers."""
        with self._lock:
            self._bytes_used, self.bytes_max = bytes_used, bytes_max

    def gave(self, length_bytes: int) -> None:
        """So many more bytes are there."""
        with self._lock:
            self._bytes_used += length_bytes

    def took(self, name: bytes, length_bytes: int) -> None:
        """One record of this kind is gone, of so many bytes."""
        self.said(max(0, self._bytes_used - length_bytes), [name])

    def evicted_more(self, count: int) -> None:
        """So many records went for room."""
        with self._lock:
            self._evicted += count

    def stored(self, name: bytes, root: RootName) -> None:
        """One more record of this kind."""
        with self._lock:
            kind = self._kinds.setdefault(name, _Kind(root.fingerprint, root.salt_digest, 0))
            kind.records += 1

    def counted(
        self, kinds: Mapping[bytes, tuple[bytes, bytes, int]], other_count: int = 0
    ) -> None:
        """All there are: of each kind its fingerprint, salt digest and records; and how many
        records there are of kinds that were not told."""
        with self._lock:
            self._kinds = {name: _Kind(*kind) for name, kind in kinds.items()}
            self._other_count = other_count

    def cleared(self, scope: Scope) -> int:
        """These are gone; how many that was, as far as is known."""
        with self._lock:
            gone = [
                name
                for name, kind in self._kinds.items()
                if scope.covers(kind.fingerprint, kind.salt_digest)
            ]
            return sum(self._kinds.pop(name).records for name in gone)

    @property
    def records(self) -> int:
        """That can be found."""
        with self._lock:
            return self._other_count + sum(kind.records for kind in self._kinds.values())

    @property
    def bytes_used(self) -> int:
        """As the cap counts them."""
        return self._bytes_used

    @property
    def evicted(self) -> int:
        """Records that this node took away for room."""
        return self._evicted
