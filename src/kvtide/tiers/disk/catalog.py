"""The index in memory: which records are there, where, and which goes next.

    key ──► row ──► segment, page, kind, blocks, digests, parent's row, children, mark

A record is a *row*, a number into columns; rows of records that are gone are used again. A block
digest already stands for all that is before it, the parent included, so one dictionary from the
first digest of a record to its rows finds partial matches without a walk over siblings.

Eviction is a clock over `marks`, one byte a row: a hand looks for the next leaf that was not used
since it last came by. Looking and forgetting are one `find` and one `translate`, so a million
rows cost microseconds; where a leaf goes and leaves a parent that nobody used either, that one is
next, so that a cold chain goes from its end in one round and hot ones keep their marks.

What stood behind a record that was damaged, and what was cleared, is unreachable at once and is
found by `sweep`, a slice at a time, so that a lookup never waits for it.

Invariant: a child's kind is its parent's; `children` counts the rows whose parent's row this is.
Ownership: the node's owner thread.
"""

from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from kvtide.core.keys import KEY_BYTES
from kvtide.core.layout import CELL_ALIGN_BYTES
from kvtide.core.records import Record
from kvtide.tiers.disk.digests import Digests
from kvtide.tiers.disk.kinds import KindState
from kvtide.tiers.disk.rows import Kept
from kvtide.tiers.firsts import Firsts, shared_blocks
from kvtide.tiers.kinds import Kind
from kvtide.tiers.scope import Scope

SWEEP_ROWS, SWEEP_REMOVALS = 8192, 512
"""Rows that one slice of `sweep` looks at and takes away: about two milliseconds."""

COLD_LEAF, USED_LEAF, COLD_INNER, USED_INNER, DEAD = range(5)
"""Marks. Inner: it has children, or is held."""
_COOLED = bytes((COLD_LEAF, COLD_LEAF, COLD_INNER, COLD_INNER, *range(DEAD, 256)))


@dataclass(frozen=True, slots=True)
class Place:
    """Where a record lies."""

    segment: int
    offset_bytes: int
    length_bytes: int


@dataclass(frozen=True, slots=True)
class Match:
    """What is there of a chain.

    Attributes:
        rows: of its records, in order.
        may_go_on: whether the last one has children that were not looked at.
    """

    rows: list[int]
    may_go_on: bool


class Catalog:
    """All records of one directory."""

    def __init__(self) -> None:
        self.index: dict[bytes, int] = {}
        self.kinds: dict[int, KindState] = {}
        self.kind_numbers: dict[Kind, int] = {}
        self.keys: list[bytes | None] = []
        self.marks = bytearray()
        self.hand = 0
        self._next_kind = 0
        self._segments = array("I")
        self._pages = array("I")
        self._kind = array("I")
        self._blocks = array("H")
        self._back = array("i")  # how many rows ahead the parent stands; 0: it is the root
        self._children = array("I")
        self._digests = Digests()
        self._free: list[int] = []
        self._firsts: Firsts[int] = Firsts()
        self._held: dict[bytes, int] = {}
        self._next_leaf: tuple[int, bytes] | None = None  # row and key of a parent left childless
        self._sweep_at = -1
        self._orphans = False

    # ---- asking

    def __len__(self) -> int:
        """Records that can be found."""
        return sum(kind.records for kind in self.kinds.values() if not kind.is_retired)

    def kind_number(self, kind: Kind) -> int:
        """The number of a kind, given now if need be; one that was cleared has lost its own."""
        number = self.kind_numbers.get(kind)
        if number is None:
            number = self.kind_numbers[kind] = self._next_kind
            self.kinds[number] = KindState(kind)
            self._next_kind += 1
        return number

    def use_kind(self, number: int) -> None:
        """A store of this kind is on its way: its number means it until `leave_kind`."""
        self.kinds[number].users += 1

    def leave_kind(self, number: int) -> None:
        """One store fewer."""
        self.kinds[number].users -= 1
        self._forget_kind(number)

    def _forget_kind(self, number: int) -> None:
        """Salts come and go by the million: what has no record and no store is not kept."""
        state = self.kinds[number]
        if not state.records and not state.users:
            del self.kinds[number]
            if self.kind_numbers.get(state.kind) == number:
                del self.kind_numbers[state.kind]

    def find(self, key: bytes, kind: int) -> int | None:
        """The row of a record of this kind, whatever it stands below."""
        row = self.index.get(key)
        return row if row is not None and self._kind[row] == kind else None

    def kind_of(self, key: bytes) -> int:
        """The number of the kind of a record that is there."""
        return self._kind[self.index[key]]

    def kinds_of(self, scope: Scope) -> set[int]:
        """Numbers of the kinds that a scope means and that can be found."""
        kinds = self.kinds.items()
        return {n for n, state in kinds if not state.is_retired and scope.has(state.kind.root)}

    def row_of(self, key: bytes) -> int | None:
        """The row of a record that can be found, of any kind."""
        row = self.index.get(key)
        if row is None or self.kinds[self._kind[row]].is_retired or self.parent_key(row) is None:
            return None
        return row

    def parent_key(self, row: int) -> bytes | None:
        """Of a row; None if its parent is not there any more."""
        back = self._back[row]
        return self.keys[row - back] if back else self.kinds[self._kind[row]].kind.root.key

    def place(self, row: int) -> Place:
        """Where it lies."""
        length = self.kinds[self._kind[row]].length_bytes(self._blocks[row])
        return Place(self._segments[row], self._pages[row] * CELL_ALIGN_BYTES, length)

    def digests(self, row: int) -> bytes:
        """Of its blocks."""
        return self._digests.of(row, self._segments[row])

    def record(self, row: int) -> Record:
        """All that is known of it."""
        kind = self.kinds[self._kind[row]].kind
        key, parent = self.keys[row], self.parent_key(row)
        assert key is not None, row
        assert parent is not None, row
        return Record(kind.root, parent, key, self.digests(row), kind.layout)

    def is_whole(self, row: int) -> bool:
        """Whether it may have children."""
        return self._blocks[row] == self.kinds[self._kind[row]].kind.layout.blocks_per_chunk

    def match(self, kind: int | None, parent: bytes, keys: bytes, digests: bytes) -> Match:
        """What is there of a chain: see `Found`."""
        rows: list[int] = []
        if kind is None or self.kinds[kind].is_retired:
            return Match(rows, may_go_on=False)
        for start in range(0, len(keys), KEY_BYTES):
            key = keys[start : start + KEY_BYTES]
            row = self.find(key, kind)
            if row is None or not self.is_whole(row) or self.parent_key(row) != parent:
                break
            rows.append(row)
            parent = key
        is_all = len(rows) * KEY_BYTES == len(keys)
        below = self._has_children(kind, rows[-1] if rows else None, parent)
        if is_all and digests and below:
            best = self._longest(kind, parent, digests)
            if best is not None:
                rows.append(best)
        self.touch(rows)
        return Match(rows, may_go_on=below and not is_all)

    def _has_children(self, kind: int, row: int | None, parent: bytes) -> bool:
        if row is None:
            if parent == self.kinds[kind].kind.root.key:
                return self.kinds[kind].tops > 0
            row = self.find(parent, kind)
        return row is not None and self._children[row] > 0

    def _longest(self, kind: int, parent: bytes, digests: bytes) -> int | None:
        """Of the records that begin with the same block, the one that shares most of them."""
        best, most = None, 0
        for row in self._firsts.beginning(digests):
            if self._kind[row] == kind and self.parent_key(row) == parent:
                blocks = shared_blocks(self.digests(row), digests)
                if blocks > most:
                    best, most = row, blocks
        return best

    def covers(self, kind: int, parent: bytes, digests: bytes) -> bool:
        """Whether a record below this parent begins with all these blocks."""
        return any(
            self._kind[row] == kind
            and self.digests(row).startswith(digests)
            and self.parent_key(row) == parent
            for row in self._firsts.beginning(digests)
        )

    def shorter(self, row: int) -> list[int]:
        """Tails that this record holds too: below the same parent, their blocks its first."""
        mine, kind, parent = self.digests(row), self._kind[row], self.parent_key(row)
        return [
            other
            for other in self._firsts.beginning(mine)
            if other != row
            and self._kind[other] == kind
            and self._blocks[other] < self._blocks[row]
            and self.parent_key(other) == parent
            and mine.startswith(self.digests(other))
            and self.marks[other] in (COLD_LEAF, USED_LEAF)
        ]

    # ---- changing

    def add(self, kind: int, segment: int, kept: Kept) -> int:
        """A record is complete; its parent is there. Its row."""
        assert kept.key not in self.index, kept.key.hex()
        state = self.kinds[kind]
        parent = None if kept.parent == state.kind.root.key else self.index[kept.parent]
        row = self._free.pop() if self._free else self._grown()
        self.keys[row] = kept.key
        self._digests.put(row, kept.digests)
        self._segments[row] = segment
        self._pages[row] = kept.offset_bytes // CELL_ALIGN_BYTES
        self._kind[row] = kind
        self._blocks[row] = kept.blocks
        self._back[row] = 0 if parent is None else row - parent
        self._children[row] = 0
        self.index[kept.key] = row
        state.records += 1
        if parent is None:
            state.tops += 1
        else:
            assert self._kind[parent] == kind, (parent, kind)
            self._children[parent] += 1
            self._mark(parent)
        self.marks[row] = COLD_LEAF  # the hand is far: its place, if used before, is behind it
        self._mark(row)
        self._firsts.add(kept.digests, row)
        return row

    def _grown(self) -> int:
        row = len(self.keys)
        self.keys.append(None)
        self.marks.append(DEAD)
        for column in self._columns():
            column.append(0)
        return row

    def _columns(self) -> "list[array[int]]":
        few = [self._segments, self._pages, self._kind, self._blocks]
        return [*few, self._back, self._children]

    def remove(self, row: int) -> Place:
        """It is not there any more, nor is what stood below it, which `sweep` will find."""
        key, place, state = self.keys[row], self.place(row), self.kinds[self._kind[row]]
        assert key is not None, row
        self._firsts.remove(self.digests(row), row)
        self._digests.drop(row, place.segment)
        if self.index.get(key) == row:
            del self.index[key]
        self.keys[row] = None
        self.marks[row] = DEAD
        state.records -= 1
        back = self._back[row]
        if not back:
            state.tops -= 1
        else:
            parent = row - back
            self._children[parent] -= 1
            above = self.keys[parent]
            if above is None:
                if not self._children[parent]:
                    self._free.append(parent)
            else:
                self._mark(parent)
                self._next_leaf = (parent, above)
        self._forget_kind(self._kind[row])
        if self._children[row]:
            self._orphans = True  # the row is kept until the last of them is gone
        else:
            self._free.append(row)
        return place

    def rows_in(self, segment: int) -> list[int]:
        """Rows of what lies in a segment, without a step for each row that does not."""
        column = self._segments
        content, wanted, size = column.tobytes(), array("I", [segment]).tobytes(), column.itemsize
        rows, at = [], content.find(wanted)
        while at >= 0:
            row, past = divmod(at, size)
            if not past and self.keys[row] is not None:
                rows.append(row)
            at = content.find(wanted, at + 1)
        return rows

    def move(self, key: bytes, place: Place) -> Place:
        """A record lies there from now on; where it lay."""
        row = self.index[key]
        before, digests = self.place(row), self.digests(row)
        assert place.length_bytes == before.length_bytes, (place, before)
        self._digests.drop(row, before.segment)
        self._digests.put(row, digests)
        self._segments[row] = place.segment
        self._pages[row] = place.offset_bytes // CELL_ALIGN_BYTES
        return before

    def _mark(self, row: int) -> None:
        is_used = self.marks[row] in (USED_LEAF, USED_INNER)
        if self._children[row] or self.keys[row] in self._held:
            self.marks[row] = USED_INNER if is_used else COLD_INNER
        else:
            self.marks[row] = USED_LEAF if is_used else COLD_LEAF

    def touch(self, rows: Sequence[int]) -> None:
        """They were used."""
        for row in rows:
            self.marks[row] |= 1

    def used(self) -> Iterator[Place]:
        """Where those lie that were used since the hand came by, in the order of rows."""
        for row, mark in enumerate(self.marks):
            if mark in (USED_LEAF, USED_INNER):
                yield self.place(row)

    def hold(self, key: bytes) -> None:
        """Keep a record from eviction until as many `let_go` have come; it may be cleared."""
        self._held[key] = self._held.get(key, 0) + 1
        if key in self.index:
            self._mark(self.index[key])

    def let_go(self, key: bytes) -> None:
        """The end of a `hold`."""
        count = self._held.pop(key) - 1
        if count:
            self._held[key] = count
        elif key in self.index:
            self._mark(self.index[key])

    def coldest(self) -> int | None:
        """The leaf to evict next; None where there is none."""
        left, self._next_leaf = self._next_leaf, None
        if left and self.keys[left[0]] == left[1] and self.marks[left[0]] == COLD_LEAF:
            return left[0]
        for _ in range(3):  # to the end, from the start, and again: all marks are cold by then
            found = self.marks.find(COLD_LEAF, self.hand)
            end = len(self.marks) if found < 0 else found
            self.marks[self.hand : end] = self.marks[self.hand : end].translate(_COOLED)
            if found >= 0:
                self.hand = found + 1
                return found
            self.hand = 0
        return None

    def retire(self, kinds: Iterable[int]) -> int:
        """Nothing of these kinds, by number, is found from now on; how many there were."""
        count = 0
        for number in kinds:
            state = self.kinds[number]
            count += state.records
            state.is_retired = True
            del self.kind_numbers[state.kind]
            self._orphans = self._orphans or state.records > 0
        return count

    def sweep(self) -> list[Place]:
        """Take away what nobody can reach, of one slice of the rows; `is_swept` tells the end."""
        if self._sweep_at < 0:
            self._sweep_at, self._orphans = 0, False
        places: list[Place] = []
        row = self._sweep_at
        end = min(row + SWEEP_ROWS, len(self.keys))
        while row < end and len(places) < SWEEP_REMOVALS:
            if self.keys[row] is not None and (
                self.kinds[self._kind[row]].is_retired or self.parent_key(row) is None
            ):
                places.append(self.remove(row))
            row += 1
        self._sweep_at = row if row < len(self.keys) else -1
        return places

    @property
    def is_swept(self) -> bool:
        """Whether nothing waits for `sweep`."""
        return self._sweep_at < 0 and not self._orphans

    def check_integrity(self) -> None:
        """Every belief that costs a walk over all rows."""
        children = [0] * len(self.keys)
        tops, records = dict.fromkeys(self.kinds, 0), dict.fromkeys(self.kinds, 0)
        for row, key in enumerate(self.keys):
            if key is None:
                assert self.marks[row] == DEAD, row
                continue
            assert self.index.get(key) == row, (key.hex(), row)
            records[self._kind[row]] += 1
            back = self._back[row]
            if back:
                children[row - back] += 1
            else:
                tops[self._kind[row]] += 1
            is_inner = self._children[row] > 0 or key in self._held
            assert (self.marks[row] in (COLD_INNER, USED_INNER)) == is_inner, row
        assert children == list(self._children), "children"
        states = self.kinds.items()
        assert records == {number: state.records for number, state in states}, records
        assert tops == {number: state.tops for number, state in states}, tops
        assert all(state.records or state.users for state in self.kinds.values())
        assert len(self.index) == sum(records.values()), (len(self.index), records)
        assert len(self._firsts) == len(self.index), (len(self._firsts), len(self.index))
