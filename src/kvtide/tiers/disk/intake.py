"""How a start fills the catalog: rows are made of a segment when it is first asked for.

    read ──► `take`: known, counted, searched as text (`untaken.py`)
                └──► rows: by a question for one of its keys or first blocks, or by a slice of
                     `sweep`; stores and evictions wait until all are there

Rows are kept for each segment in the order of segments, whenever they are made, so the clock's
hand meets what is oldest first. Parents and children of different segments find each other as both
are there. Where a parent is gone, or has a later twin, its children find the one that is left once
all are there (it may have been copied elsewhere); what has no parent then is taken away.

Ownership: the node's owner thread.
"""

import operator
from array import array
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from functools import reduce

from kvtide.core.keys import KEY_BYTES
from kvtide.core.layout import CELL_ALIGN_BYTES
from kvtide.tiers.disk.catalog import COLD_INNER, COLD_LEAF, DEAD, Catalog, Match, Place
from kvtide.tiers.disk.columns import Columns
from kvtide.tiers.disk.untaken import Untaken, UntakenSegments

EAGER_ROWS = 65_536
"""So few are made at once: a tenth of a second."""
_INNER_OF = bytes((COLD_LEAF, *(COLD_INNER,) * 255))


class LazyCatalog(Catalog):
    """A catalog that answers before all of a start's records have become rows."""

    def __init__(self) -> None:
        super().__init__()
        self._untaken = UntakenSegments()
        self._parentless: dict[bytes, list[int]] = {}  # rows by a parent that has none yet
        self._gone_keys: dict[bytes, int] = {}  # what is gone, and from which segment
        self._left_behind: dict[int, bytes] = {}  # rows that are gone, not so what is below; keys
        self._doomed: list[Place] = []
        self._was_used: Mapping[int, set[int]] = {}
        self._left: list[int] = []  # segments of which no rows were made by the end

    # ---- asking

    def find(self, key: bytes, kind: int) -> int | None:
        if self._untaken and key not in self.index:
            self._take_in(self._untaken.pop_with_key(key))
        return super().find(key, kind)

    def match(self, kind: int | None, parent: bytes, keys: bytes, digests: bytes) -> Match:
        if self._untaken and digests and kind is not None:
            self._take_in(self._untaken.pop_with_first(digests))
        if self._untaken and kind is not None and parent != self.kinds[kind].kind.root.key:
            self.find(parent, kind)  # whose children know it only once it is there
        found = super().match(kind, parent, keys, digests)
        is_all = len(found.rows) * KEY_BYTES >= len(keys)
        if self._untaken and kind is not None and not is_all:
            return Match(found.rows, may_go_on=True)  # who stands below is not known yet
        return found

    def coldest(self) -> int | None:
        self.take_rest()  # who is a leaf is not known before
        return super().coldest()

    def sweep(self) -> list[Place]:
        if self._untaken:
            self._take_in([self._untaken.pop()])
        elif not self._doomed:
            return super().sweep()  # not before all are rows: it would pass by those that come
        places, self._doomed = self._doomed, []
        return places

    @property
    def is_swept(self) -> bool:
        return super().is_swept and not self._untaken and not self._doomed

    def check_integrity(self) -> None:
        self.take_rest()
        super().check_integrity()

    # ---- a start

    def take(self, segment: int, columns: Columns, gone: Collection[int]) -> list[int]:
        """A segment's records, at a start, in the order of segments; `settle` follows once all are
        here. `gone`: offsets of those that are not there any more; their rows are returned, which
        are counted from 0."""
        numbers = [self.kind_number(kind) for kind in columns.kinds]
        rows = columns.rows_at(sorted(offset // CELL_ALIGN_BYTES for offset in gone))
        self._untaken.add(segment, columns, numbers, rows)
        for number in numbers:
            self.use_kind(number)  # until it is taken in
        self._count(numbers, columns, rows)
        return rows

    def _count(self, numbers: list[int], columns: Columns, gone: list[int]) -> None:
        if len(numbers) == 1:
            self.kinds[numbers[0]].records += len(columns) - len(gone)
            self.kinds[numbers[0]].tops += columns.back.count(0)
            return
        tops = [
            number for number, back in zip(columns.kind, columns.back, strict=True) if not back
        ]
        left = Counter(columns.kind)
        left.subtract(columns.kind[row] for row in gone)
        for number, count in left.items():
            self.kinds[numbers[number]].records += count
        for number, count in Counter(tops).items():
            self.kinds[numbers[number]].tops += count

    def remember(self, used: Mapping[int, set[int]]) -> None:
        """These were used before the start, by segment and page."""
        self._was_used = used

    def settle(self) -> list[Place]:
        """All segments are here. Where records are few, they all become rows now; otherwise as
        they are asked for, by and by as `sweep` is called, or at once by `take_rest`. Places of
        what has no parent, as far as that is known."""
        count = self._untaken.row_count
        self.keys = [None] * count
        self.marks = bytearray((DEAD,)) * count
        self._digests.reserve(count)
        for column in self._columns():
            column.frombytes(bytes(column.itemsize * count))
        places: list[Place] = []
        while count <= EAGER_ROWS and not self.is_swept:
            places += self.sweep()
        return places

    @property
    def is_taken_in(self) -> bool:
        """Whether `sweep` and questions have nothing left to take in."""
        return not self._untaken

    def take_rest(self) -> None:
        """Take in all that a start has left for later, at once: the better part of a second."""
        while self._untaken:
            self._take_in([self._untaken.pop()])

    def leave_rest(self) -> None:
        """Nothing is asked for any more but what was `used`."""
        self._left = self._untaken.clear()
        self._parentless.clear()

    def used(self) -> Iterator[Place]:
        """Of what was left as it was, what was used before the start."""
        yield from super().used()
        for segment in self._left:
            for page in sorted(self._was_used.get(segment, ())):
                yield Place(segment, page * CELL_ALIGN_BYTES, 0)

    def _take_in(self, some: list[Untaken]) -> None:
        """Make rows of segments, in any order."""
        for one in some:
            keys = one.columns.cut_keys()
            rows = list(range(one.first_row, one.first_row + len(keys)))  # shared by dictionaries
            self._fill(one, keys)
            self._firsts.take(one.columns.firsts, rows)
            fresh = dict(zip(keys, rows, strict=True))
            self._remove_gone(one, fresh)
            twins = [(key, self.index[key]) for key in fresh.keys() & self.index.keys()]
            self.index.update(fresh)
            for key in self._held.keys() & fresh.keys():
                self._mark(fresh[key])
            for key, row in twins:
                self._part_twins(key, row, fresh[key])
            self._link(one, fresh)
            for number in one.kinds:
                self.leave_kind(number)
        if not self._untaken:
            self._join_left_behind()
            for rows in self._parentless.values():
                self._doomed += [self.remove(row) for row in rows if self.keys[row] is not None]
            self._parentless, self._gone_keys = {}, {}

    def _fill(self, one: Untaken, keys: tuple[bytes, ...]) -> None:
        columns, base = one.columns, one.first_row
        end = base + len(keys)
        self.keys[base:end] = keys
        self._segments[base:end] = array("I", [one.segment]) * len(keys)
        self._pages[base:end] = columns.pages
        if len(one.kinds) == 1:
            self._kind[base:end] = array("I", one.kinds) * len(keys)
        else:
            self._kind[base:end] = array("I", map(one.kinds.__getitem__, columns.kind))
        self._blocks[base:end] = columns.blocks
        self._back[base:end] = columns.back
        self._children[base:end] = columns.children
        self.marks[base:end] = _marks_of(columns.children)
        used = self._was_used.get(one.segment, ())
        for row, page in enumerate(columns.pages, base) if used else ():
            if page in used:
                self.marks[row] |= 1
        self._digests.take(one.segment, base, columns.digests, columns.blocks)

    def _part_twins(self, key: bytes, *rows: int) -> None:
        """Of two records with one key that of the later segment counts."""
        loser, winner = sorted(rows, key=self._segments.__getitem__)
        self.index[key] = winner
        self._doomed.append(self.remove(loser))
        if self._children[loser]:
            self._left_behind[loser] = key

    def _join_left_behind(self) -> None:
        """What stands below rows that are gone stands below those that have their keys now. A step
        for each row there is, but only after a kill while some were copied, or nearly."""
        left, self._left_behind = self._left_behind, {}
        parents = {
            row: self.index[key]
            for row, key in left.items()
            if key in self.index and self._kind[self.index[key]] == self._kind[row]
        }
        for row, back in enumerate(self._back) if parents else ():
            before = row - back
            parent = parents.get(before) if back and self.keys[row] is not None else None
            if parent is not None:
                self._back[row] = row - parent
                self._children[before] -= 1
                self._children[parent] += 1
                self._mark(parent)
                if not self._children[before]:
                    self._free.append(before)

    def _remove_gone(self, one: Untaken, fresh: dict[bytes, int]) -> None:
        """Rows that are not there any more, and earlier twins of those, which nobody could take
        away: of two records with one key the later counts, even if it is gone."""
        for at in one.gone:
            row = one.first_row + at
            key = self.keys[row]
            assert key is not None, row
            del fresh[key]
            self._gone_keys[key] = max(one.segment, self._gone_keys.get(key, 0))
            self.kinds[self._kind[row]].records += 1  # it was not counted as a record
            self.remove(row)  # its place is known
            twin = self.index.get(key)
            if twin is not None and self._segments[twin] < one.segment:
                self._doomed.append(self.remove(twin))
        for at in one.gone:
            if self._children[one.first_row + at]:  # still, now that all that are gone are
                self._left_behind[one.first_row + at] = one.columns.key_of(at)
        for key in self._gone_keys.keys() & fresh.keys():
            if self._gone_keys[key] > one.segment:
                self._doomed.append(self.remove(fresh.pop(key)))

    def _link(self, one: Untaken, fresh: dict[bytes, int]) -> None:
        """Rows and parents in other segments find each other, whichever comes first."""
        for at, key in one.columns.elsewhere:
            self._parentless.setdefault(key, []).append(one.first_row + at)
            fresh.setdefault(key, -1)
        for key in fresh.keys() & self._parentless.keys():
            parent = self.index.get(key)
            if parent is not None:
                left = [row for row in self._parentless[key] if not self._has_joined(row, parent)]
                if left:
                    self._parentless[key] = left
                else:
                    del self._parentless[key]

    def _has_joined(self, row: int, parent: int) -> bool:
        """Whether this row's parent is settled: it has this one now, or is gone."""
        if self.keys[row] is None:
            return True
        if self._kind[row] != self._kind[parent] or parent == row:
            return False
        self._back[row] = row - parent
        self._children[parent] += 1
        self.kinds[self._kind[row]].tops -= 1
        self._mark(parent)
        return True


def _marks_of(children: "array[int]") -> bytes:
    """Of rows at a start, by how many children each has."""
    content, size = children.tobytes(), children.itemsize
    parts = (int.from_bytes(content[part::size], "little") for part in range(size))
    has_some = reduce(operator.or_, parts)  # a byte for each row, without a step for each
    return has_some.to_bytes(len(children), "little").translate(_INNER_OF)
