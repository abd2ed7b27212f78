"""What is there, as far as the members' journals were read: of all members, in one tree.

    kind (root, layout) ──► row ──► row …      by the first digest of each; `index`: by key

A record may be in several members' folders, and may stand below one that is in another's. A row is
in the tree only behind its parent; what a journal tells before it, or keeps when its parent goes,
waits aside by its parent's key and comes in with it.

Own rows that nothing of our own stands below are *leaves*, least recently used first: what is
evicted next. One that others have something below is left for as long as a few others will do,
since that would be lost with it.

A row costs about a kilobyte: the bytes of a large model's chunk are tens of thousands of times
that. Rows and their children name each other, so `_cut` ends that when one goes: the node does not
collect cycles.

Ownership: the node's owner thread.
"""

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TypeAlias

from kvtide.codec.record import stored_bytes
from kvtide.core.keys import INNER_DIGEST_BYTES, KEY_BYTES
from kvtide.core.records import Record
from kvtide.tiers.disk.catalog import shared_blocks
from kvtide.tiers.disk.rows import Kind
from kvtide.tiers.scope import EVERYTHING, Scope
from kvtide.tiers.shared_dir.journal import KeptRow

Gone: TypeAlias = tuple[bytes, int]
"""Key and length of a record whose file is to go."""

CANDIDATES_MAX = 128
"""Records with one first block that a partial match looks at, latest first: bounds a lookup."""
LEAVES_TRIED = 32
"""Leaves that a search for one without children of others looks at."""


class KindState:
    """A root and a layout, and what stands below the root."""

    __slots__ = ("children", "kind")

    def __init__(self, kind: Kind) -> None:
        self.kind = kind
        self.children: dict[bytes, list[Row]] = {}

    @property
    def key(self) -> bytes:
        """Of the root."""
        return self.kind.root.key


class Row:
    """One record. `own_children`: how many of our own stand below it; `holds`: loads and stores
    that need it, by which it is not evicted."""

    __slots__ = (
        "children",
        "digests",
        "holds",
        "key",
        "kind",
        "members",
        "own_children",
        "parent",
        "used",
    )

    def __init__(
        self, kind: KindState, parent: "Row | KindState", key: bytes, digests: bytes
    ) -> None:
        self.kind = kind
        self.parent: Row | KindState | None = parent
        self.key = key
        self.digests = digests
        self.members: tuple[bytes, ...] = ()
        self.children: dict[bytes, list[Row]] | None = None
        self.own_children = 0
        self.holds = 0
        self.used = 0

    @property
    def blocks(self) -> int:
        """Blocks that it holds."""
        return len(self.digests) // INNER_DIGEST_BYTES

    @property
    def is_whole(self) -> bool:
        """Whether it may have children."""
        return self.blocks == self.kind.kind.layout.blocks_per_chunk

    @property
    def length_bytes(self) -> int:
        """Of its file."""
        return stored_bytes(self.kind.kind.layout, self.blocks)

    @property
    def record(self) -> Record:
        """All that is known of it."""
        assert self.parent is not None, self.key.hex()
        kind = self.kind.kind
        return Record(kind.root, self.parent.key, self.key, self.digests, kind.layout)


@dataclass(frozen=True, slots=True)
class _Aside:
    """A record whose parent is not there."""

    members: tuple[bytes, ...]
    kind: Kind
    row: KeptRow


class View:
    """All rows."""

    def __init__(self, own: bytes) -> None:
        self.own = own
        self.index: dict[bytes, Row] = {}
        self._kinds: dict[Kind, KindState] = {}
        self._aside: dict[bytes, dict[bytes, _Aside]] = {}  # by the parent's key, then by key
        self._aside_parent: dict[bytes, bytes] = {}
        self._leaves: OrderedDict[bytes, Row] = OrderedDict()
        self._stamp = 0

    def __len__(self) -> int:
        return len(self.index)

    # ---- asking

    def find(self, record: Record) -> Row | None:
        """The row of exactly this record."""
        row = self.index.get(record.key)
        return row if row is not None and row.record == record else None

    def match(
        self, kind: Kind, parent: bytes, keys: bytes, digests: bytes
    ) -> tuple[list[Row], bool]:
        """Rows of the chain that are there, and whether it may go on: see `Found`."""
        state = self._kinds.get(kind)
        above: Row | KindState | None = state
        if state is None:
            return [], False
        if parent != state.key:
            above = self.index.get(parent)
            if above is None or above.kind is not state:
                return [], False
        rows: list[Row] = []
        for start in range(0, len(keys), KEY_BYTES):
            row = self.index.get(keys[start : start + KEY_BYTES])
            if row is None or row.parent is not above or not row.is_whole:
                break
            rows.append(row)
            above = row
        assert above is not None, parent.hex()
        is_all = len(rows) * KEY_BYTES == len(keys)
        below = bool(above.children)
        if is_all and digests and below:
            best = self._longest(above, digests)
            if best is not None:
                rows.append(best)
        self.touch(rows)
        return rows, below and not is_all

    @staticmethod
    def _beginning(above: Row | KindState, digests: bytes) -> list[Row]:
        """Children that begin with the same block."""
        return (above.children or {}).get(digests[:INNER_DIGEST_BYTES], [])

    def _longest(self, above: Row | KindState, digests: bytes) -> Row | None:
        latest = self._beginning(above, digests)[: -CANDIDATES_MAX - 1 : -1]
        return max(latest, key=lambda row: shared_blocks(row.digests, digests), default=None)

    def covers(self, record: Record) -> bool:
        """Whether a record below the same parent begins with all its blocks."""
        above = self.above(record)
        return above is not None and any(
            row.digests.startswith(record.digests)
            for row in self._beginning(above, record.digests)
        )

    def above(self, record: Record) -> Row | KindState | None:
        """What a record stands below; None: it is not there."""
        state = self._kinds.get(Kind(record.root, record.layout))
        if record.parent == record.root.key:
            return state or KindState(Kind(record.root, record.layout))
        row = self.index.get(record.parent)
        return row if row is not None and row.kind is state and row.is_whole else None

    def shorter(self, row: Row) -> list[Row]:
        """Own tails that this record holds too."""
        assert row.parent is not None, row.key.hex()
        return [
            other
            for other in self._beginning(row.parent, row.digests)
            if other is not row
            and self.own in other.members
            and not other.holds
            and not other.children
            and row.digests.startswith(other.digests)
        ]

    def touch(self, rows: Iterable[Row]) -> None:
        """They were used, together."""
        self._stamp += 1
        for row in rows:
            row.used = self._stamp
            if row.key in self._leaves:
                self._leaves.move_to_end(row.key)

    def evictable(self) -> Row | None:
        """The own leaf to go next; None where all are held."""
        first = None
        free = (row for row in self._leaves.values() if not row.holds)
        for _, row in zip(range(LEAVES_TRIED), free, strict=False):
            if not row.children:
                return row
            first = first or row
        return first

    def own_rows(self) -> Iterator[Row]:
        """Those that are in our folder."""
        return (row for row in self.index.values() if self.own in row.members)

    # ---- changing

    def add(self, member: bytes, kind: Kind, kept: KeptRow) -> list[Row]:
        """A member has a record; rows that are there from now on, or have one more copy."""
        known = self.index.get(kept.key)
        if known is not None:
            is_same = known.digests == kept.digests and known.kind.kind == kind
            if is_same and member not in known.members:
                self._set_members(known, (*known.members, member))
            return [known] if is_same else []
        aside = _Aside((member,), kind, kept)
        waiting = self._take_aside(kept.key)
        if waiting is not None:
            aside = _Aside((*(m for m in waiting.members if m != member), member), kind, kept)
        return self._placed(aside)

    def _placed(self, first: _Aside) -> list[Row]:
        """Put a record where it belongs, and those behind it that waited for it."""
        rows = []
        todo = [first]
        while todo:
            aside = todo.pop()
            kept = aside.row
            state = self._kinds.setdefault(aside.kind, KindState(aside.kind))
            above: Row | KindState | None = state
            if kept.parent != state.key:
                above = self.index.get(kept.parent)
            if above is None or (above is not state and not _is_whole_of(above, state)):
                self._aside.setdefault(kept.parent, {})[kept.key] = aside
                self._aside_parent[kept.key] = kept.parent
                self._forget_kind(state)
                continue
            row = Row(state, above, kept.key, kept.digests)
            if above.children is None:
                above.children = {}
            above.children.setdefault(kept.digests[:INNER_DIGEST_BYTES], []).append(row)
            self.index[kept.key] = row
            self._stamp += 1
            row.used = self._stamp
            self._set_members(row, aside.members)
            rows.append(row)
            for key in self._aside.get(kept.key, {}).copy():
                behind = self._take_aside(key)
                assert behind is not None, key.hex()
                todo.append(behind)
        return rows

    def _take_aside(self, key: bytes) -> _Aside | None:
        parent = self._aside_parent.pop(key, None)
        if parent is None:
            return None
        waiting = self._aside[parent]
        aside = waiting.pop(key)
        if not waiting:
            del self._aside[parent]
        return aside

    def _set_members(self, row: Row, members: tuple[bytes, ...]) -> None:
        """Who has it; leaves and counts of own children follow."""
        was_own, is_own = self.own in row.members, self.own in members
        row.members = members
        if was_own == is_own:
            return
        if isinstance(row.parent, Row):
            row.parent.own_children += 1 if is_own else -1
            self._set_leaf(row.parent, row)
        self._set_leaf(row, None)

    def _set_leaf(self, row: Row, child: Row | None) -> None:
        """Whether it is a leaf, now that this child of it came or went."""
        if self.own not in row.members or row.own_children:
            self._leaves.pop(row.key, None)
        elif row.key not in self._leaves:
            self._leaves[row.key] = row
            if child is not None and row.used <= child.used:  # its end was evicted: it is next
                self._leaves.move_to_end(row.key, last=False)

    def remove(self, row: Row, member: bytes) -> list[Gone]:
        """A member has it no more. Own rows that are no longer reached by that, itself not."""
        left = tuple(one for one in row.members if one != member)
        if left:
            self._set_members(row, left)
            return []
        return self._cut(row)

    def forget(self, member: bytes, key: bytes) -> list[Gone]:
        """A member says that a record is gone. As `remove`."""
        row = self.index.get(key)
        if row is not None:
            return self.remove(row, member) if member in row.members else []
        aside = self._take_aside(key)
        left = tuple(one for one in aside.members if one != member) if aside else ()
        if aside is not None and left:
            self._placed(_Aside(left, aside.kind, aside.row))
        return []

    def _cut(self, top: Row) -> list[Gone]:
        """Take a row out of the tree; what others have below it waits for it to come back."""
        above = top.parent
        assert above is not None, top.key.hex()
        assert above.children is not None, top.key.hex()
        first = top.digests[:INNER_DIGEST_BYTES]
        above.children[first].remove(top)
        if not above.children[first]:
            del above.children[first]
        self._set_members(top, ())
        orphans: list[Gone] = []
        todo = [top]
        while todo:
            row = todo.pop()
            assert row.parent is not None, row.key.hex()
            below = [child for rows in (row.children or {}).values() for child in rows]
            others = tuple(one for one in row.members if one != self.own)
            if row is not top and others:
                kept = KeptRow(0, 0, row.key, row.parent.key, row.digests)
                self._aside.setdefault(kept.parent, {})[row.key] = _Aside(
                    others, row.kind.kind, kept
                )
                self._aside_parent[row.key] = kept.parent
            if row is not top and self.own in row.members:
                orphans.append((row.key, row.length_bytes))
            del self.index[row.key]
            self._leaves.pop(row.key, None)
            todo += below
            row.children = None
            if row is not top:
                row.parent = None
        top.parent = None
        self._forget_kind(top.kind)
        return orphans

    def _forget_kind(self, state: KindState) -> None:
        """Salts come and go by the million."""
        if not state.children:
            self._kinds.pop(state.kind, None)

    def clear(self, scope: Scope) -> tuple[int, list[Gone]]:
        """Nothing of this scope is there any more, in anybody's folder; how many were, and our own
        of them."""
        gone = [row for row in self.index.values() if scope.has(row.kind.kind.root)]
        own = [(row.key, row.length_bytes) for row in gone if self.own in row.members]
        for row in gone:
            del self.index[row.key]
            self._leaves.pop(row.key, None)
        for key, parent in list(self._aside_parent.items()):
            if scope.has(self._aside[parent][key].kind.root):
                self._take_aside(key)
        for kind in [kind for kind in self._kinds if scope.has(kind.root)]:
            del self._kinds[kind]
        for row in gone:
            row.parent = row.children = None
        return len(gone), own

    def take_own_aside(self) -> list[Gone]:
        """Own records whose parents are nowhere: they are forgotten."""
        gone = []
        for key, parent in list(self._aside_parent.items()):
            aside = self._aside[parent][key]
            if self.own in aside.members:
                layout = aside.kind.layout
                blocks = len(aside.row.digests) // INNER_DIGEST_BYTES
                gone.append((key, stored_bytes(layout, blocks)))
                self.forget(self.own, key)
        return gone

    def keys_of(self, member: bytes, scope: Scope = EVERYTHING) -> list[bytes]:
        """Keys of all that a member has of this scope."""
        rows = (row for row in self.index.values() if member in row.members)
        keys = [row.key for row in rows if scope.has(row.kind.kind.root)]
        aside = (one for waiting in self._aside.values() for one in waiting.values())
        asides = (one for one in aside if member in one.members)
        return keys + [one.row.key for one in asides if scope.has(one.kind.root)]

    def check_integrity(self) -> None:
        """Assert that tree, index and leaves agree; looks at each row."""
        own_children: dict[bytes, int] = {}
        for key, row in self.index.items():
            above = row.parent
            assert row.key == key, (row.key, key)
            assert row.members, key.hex()
            assert above is not None, key.hex()
            assert above.children is not None, key.hex()
            assert row in above.children[row.digests[:INNER_DIGEST_BYTES]], key.hex()
            assert self.index.get(above.key) is above or above is self._kinds[row.kind.kind]
            if self.own in row.members:
                own_children[above.key] = own_children.get(above.key, 0) + 1
        for key, row in self.index.items():
            assert row.own_children == own_children.get(key, 0), key.hex()
            is_leaf = self.own in row.members and not row.own_children
            assert is_leaf == (key in self._leaves), key.hex()
        assert len(self._aside_parent) == sum(len(rows) for rows in self._aside.values())


def _is_whole_of(above: Row | KindState, state: KindState) -> bool:
    return isinstance(above, Row) and above.kind is state and above.is_whole
