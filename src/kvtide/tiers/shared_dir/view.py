"""What is there, as far as the members' journals were read: of all members, in one tree.

    kind (root, layout) ──► row ──► row …      `index`: by key; `firsts`: by the first digest
                             └───── its siblings

A record may be in several members' folders, and may stand below one that is in another's. A row is
in the tree only behind its parent; what a journal tells before it, or keeps when its parent goes,
waits aside by its parent's key and comes in with it.

Own rows that nothing of our own stands below are *leaves*, least recently used first: what is
evicted next. One that others have something below is left for as long as a few others will do,
since that would be lost with it.

A row of 16 blocks costs 670 bytes, near half of them its digests: the bytes of a large model's
chunk are ten thousand times that and more. Rows and their children name each other, so that ends
when one goes: the node does not collect cycles.

Ownership: the node's owner thread.
"""

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TypeAlias

from kvtide.codec.record import stored_bytes
from kvtide.core.keys import INNER_DIGEST_BYTES, KEY_BYTES
from kvtide.core.records import Record
from kvtide.tiers.firsts import Firsts, shared_blocks
from kvtide.tiers.kinds import Kind
from kvtide.tiers.scope import EVERYTHING, Scope
from kvtide.tiers.shared_dir.journal import KeptRow

Gone: TypeAlias = tuple[bytes, int]
"""Key and length of a record whose file is to go."""

LEAVES_TRIED = 32
"""Leaves that a search for one without children of others looks at."""


class KindState:
    """A root and a layout. `child`: the latest of the rows that stand right below the root."""

    __slots__ = ("child", "kind")

    def __init__(self, kind: Kind) -> None:
        self.kind = kind
        self.child: Row | None = None

    @property
    def key(self) -> bytes:
        """Of the root."""
        return self.kind.root.key


class Row:
    """One record.

    Attributes:
        child: the latest of the rows that stand right below it.
        after, before: the next and the last one that stands below the same.
        members: those who have it.
        own_children: how many of our own stand right below it.
        holds: loads and stores that need it, by which it is not evicted.
        used: greater than that of what was used before it.
    """

    __slots__ = (
        "after",
        "before",
        "child",
        "digests",
        "holds",
        "key",
        "kind",
        "members",
        "own_children",
        "parent",
        "used",
    )

    def __init__(self, kind: KindState, parent: "Row | KindState", kept: KeptRow) -> None:
        """The latest of what stands there."""
        self.kind = kind
        self.parent: Row | KindState | None = parent
        self.key = kept.key
        self.digests = kept.digests
        self.members: tuple[bytes, ...] = ()
        self.child: Row | None = None
        self.before: Row | None = None
        self.after = parent.child
        if self.after is not None:
            self.after.before = self
        parent.child = self
        self.own_children = 0
        self.holds = 0
        self.used = 0

    def leave(self) -> None:
        """It stands there no more."""
        assert self.parent is not None, self.key.hex()
        if self.before is None:
            self.parent.child = self.after
        else:
            self.before.after = self.after
        if self.after is not None:
            self.after.before = self.before
        self.parent = self.before = self.after = None

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


def _below(above: Row | KindState) -> Iterator[Row]:
    """All rows that stand right below it."""
    row = above.child
    while row is not None:
        yield row
        row = row.after


def _all_below(above: Row | KindState) -> list[Row]:
    """All rows that stand below it, parents first."""
    rows = list(_below(above))
    for row in rows:  # which grows
        rows += _below(row)
    return rows


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
        self._firsts: Firsts[Row] = Firsts()
        self._members: dict[tuple[bytes, ...], tuple[bytes, ...]] = {}  # one for all rows
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
        below = above.child is not None
        if is_all and digests and below:
            best = self._longest(above, digests)
            if best is not None:
                rows.append(best)
        self.touch(rows)
        return rows, below and not is_all

    def _beginning(self, above: Row | KindState, digests: bytes) -> list[Row]:
        """Children that begin with the same block, latest first, a bounded number."""
        return [row for row in self._firsts.beginning(digests) if row.parent is above]

    def _longest(self, above: Row | KindState, digests: bytes) -> Row | None:
        def shared(row: Row) -> int:
            return shared_blocks(row.digests, digests)

        best = max(self._beginning(above, digests), key=shared, default=None)
        return best if best is not None and shared(best) else None

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
            and other.child is None
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
            if row.child is None:
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
            state = self._kinds.get(aside.kind)
            if state is None:
                state = self._kinds[aside.kind] = KindState(aside.kind)
            above: Row | KindState | None = state
            if kept.parent != state.key:
                above = self.index.get(kept.parent)
            if above is None or (above is not state and not _is_whole_of(above, state)):
                self._put_aside(aside)
                self._forget_kind(state)
                continue
            row = Row(state, above, kept)
            self.index[kept.key] = row
            self._firsts.add(kept.digests, row)
            row.used = self._stamp
            self._set_members(row, aside.members)
            rows.append(row)
            for key in self._aside.get(kept.key, {}).copy():
                behind = self._take_aside(key)
                assert behind is not None, key.hex()
                todo.append(behind)
        return rows

    def _put_aside(self, aside: _Aside) -> None:
        key, parent = aside.row.key, aside.row.parent
        self._aside.setdefault(parent, {})[key] = aside
        self._aside_parent[key] = parent

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
        row.members = self._members.setdefault(members, members)
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
        orphans: list[Gone] = []
        below = _all_below(top)
        for row in below:
            assert row.parent is not None, row.key.hex()
            others = tuple(one for one in row.members if one != self.own)
            if others:
                kept = KeptRow(0, 0, row.key, row.parent.key, row.digests)
                self._put_aside(_Aside(others, row.kind.kind, kept))
            if self.own in row.members:
                orphans.append((row.key, row.length_bytes))
        self._set_members(top, ())
        for row in (top, *below):
            self._drop(row)
        self._forget_kind(top.kind)
        return orphans

    def _drop(self, row: Row) -> None:
        del self.index[row.key]
        self._leaves.pop(row.key, None)
        self._firsts.remove(row.digests, row)
        row.leave()

    def _forget_kind(self, state: KindState) -> None:
        """Salts come and go by the million."""
        if state.child is None:
            self._kinds.pop(state.kind, None)

    def clear(self, scope: Scope) -> tuple[int, list[Gone]]:
        """Nothing of this scope is there any more, in anybody's folder; how many were, and our own
        of them."""
        gone = self._rows_of(scope)
        own = [(row.key, row.length_bytes) for row in gone if self.own in row.members]
        if len(gone) == len(self.index):  # one by one they would take four times as long
            self.index.clear()
            self._leaves.clear()
            self._firsts = Firsts()
            for row in gone:
                row.parent = row.child = row.before = row.after = None
        else:
            for row in gone:
                self._drop(row)
        for key, parent in list(self._aside_parent.items()):
            if scope.has(self._aside[parent][key].kind.root):
                self._take_aside(key)
        for kind in [kind for kind in self._kinds if scope.has(kind.root)]:
            del self._kinds[kind]
        return len(gone), own

    def _rows_of(self, scope: Scope) -> list[Row]:
        kinds = [state for kind, state in self._kinds.items() if scope.has(kind.root)]
        return [row for state in kinds for row in _all_below(state)]

    def take_own_aside(self) -> list[Gone]:
        """Own records whose parents are nowhere: they are forgotten."""
        gone = []
        for key, parent in list(self._aside_parent.items()):
            aside = self._aside[parent][key]
            if self.own in aside.members:
                layout = aside.kind.layout
                gone.append((key, stored_bytes(layout, aside.row.blocks)))
                self.forget(self.own, key)
        return gone

    def keys_of(self, member: bytes, scope: Scope = EVERYTHING) -> list[bytes]:
        """Keys of all that a member has of this scope."""
        keys = [row.key for row in self._rows_of(scope) if member in row.members]
        aside = (one for waiting in self._aside.values() for one in waiting.values())
        asides = (one for one in aside if member in one.members)
        return keys + [one.row.key for one in asides if scope.has(one.kind.root)]

    def check_integrity(self) -> None:
        """Assert that tree, index and leaves agree; looks at each row."""
        linked = 0
        every: list[Row | KindState] = [*self._kinds.values(), *self.index.values()]
        for above in every:
            before, own_children = None, 0
            for row in _below(above):
                linked += 1
                own_children += self.own in row.members
                assert self.index.get(row.key) is row, row.key.hex()
                assert row.parent is above, row.key.hex()
                assert row.before is before, row.key.hex()
                assert row.members, row.key.hex()
                before = row
            if isinstance(above, Row):
                assert above.own_children == own_children, above.key.hex()
                is_leaf = self.own in above.members and not own_children
                assert is_leaf == (above.key in self._leaves), above.key.hex()
        counts = (linked, len(self._firsts), len(self.index))
        assert len(set(counts)) == 1, counts
        assert len(self._aside_parent) == sum(len(rows) for rows in self._aside.values())


def _is_whole_of(above: Row | KindState, state: KindState) -> bool:
    return isinstance(above, Row) and above.kind is state and above.is_whole
