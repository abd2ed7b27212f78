"""Records that names told of, as a tree: what is found, what hangs on what, and what goes next.

    kind (root, layout) ──► row ──► row …      children by their first block
                             └───── its siblings

A row stands only behind its parent; one that is heard of before it waits by its parent's key, and
comes in with it. Rows that nothing stands below are *leaves*, least recently used first: what is
evicted next.

A row of 16 blocks costs 1.1 KB, a quarter of that its digests. Rows and their
children name each other, so that ends when one goes: the node does not collect cycles.

Ownership: the mirror's, under its lock.
"""

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from itertools import islice

from kvtide.codec.record import stored_bytes
from kvtide.core.keys import INNER_DIGEST_BYTES, KEY_BYTES
from kvtide.core.layout import KVLayout
from kvtide.core.records import Record, RootName
from kvtide.tiers.base import LookupJob
from kvtide.tiers.firsts import CANDIDATES_MAX, shared_blocks
from kvtide.tiers.remote.kinds import kind_of
from kvtide.tiers.s3.names import Written


class Kind:
    """A root and a layout; `row_count` records are of it, also those that wait."""

    __slots__ = ("children", "layout", "name", "root", "row_count")

    def __init__(self, root: RootName, layout: KVLayout) -> None:
        self.name = kind_of(root, layout)
        self.root = root
        self.layout = layout
        self.children: dict[bytes, list[Row]] = {}
        self.row_count = 0

    @property
    def key(self) -> bytes:
        """Of the root."""
        return self.root.key


class Row:
    """One record.

    Attributes:
        written: the write of it that is there.
        above: what it stands right below; None: it waits for that, or is gone.
        children: rows right below it, by their first digests.
        holds: loads and stores that need it, by which it is not evicted.
        used: greater than that of what was used before it.
        seen: the last look at everything that found it.
    """

    __slots__ = ("above", "children", "holds", "kind", "seen", "used", "written")

    def __init__(self, kind: Kind, written: Written, seen: int) -> None:
        self.kind = kind
        self.written = written
        self.above: Row | Kind | None = None
        self.children: dict[bytes, list[Row]] = {}
        self.holds = 0
        self.used = 0
        self.seen = seen

    @property
    def key(self) -> bytes:
        """Of its chunk."""
        return self.written.key

    @property
    def blocks(self) -> int:
        """Blocks that it holds."""
        return len(self.written.digests) // INNER_DIGEST_BYTES

    @property
    def is_whole(self) -> bool:
        """Whether it may have children."""
        return self.blocks == self.kind.layout.blocks_per_chunk

    @property
    def length_bytes(self) -> int:
        """Of all its objects."""
        return stored_bytes(self.kind.layout, self.blocks)

    @property
    def record(self) -> Record:
        """All that is known of it."""
        of = self.written
        return Record(self.kind.root, of.parent, of.key, of.digests, self.kind.layout)


class Tree:
    """All rows."""

    def __init__(self) -> None:
        self.index: dict[bytes, Row] = {}
        """By key, also those that wait."""
        self.kinds: dict[bytes, Kind] = {}
        self._waiting: dict[bytes, dict[bytes, Row]] = {}  # by the parent's key, then by key
        self._leaves: OrderedDict[bytes, Row] = OrderedDict()
        self._uses = 0

    # ---- asking

    def find(self, record: Record) -> Row | None:
        """The row of exactly this record, if it can be reached."""
        row = self.index.get(record.key)
        return row if row is not None and row.above is not None and row.record == record else None

    def match(self, job: LookupJob) -> tuple[list[Row], bool]:
        """Rows of the chain that are there, and whether it may go on: see `Found`."""
        kind = self.kinds.get(kind_of(job.root, job.layout))
        above: Row | Kind | None = kind
        if kind is not None and job.parent != kind.key:
            above = self.index.get(job.parent)
        if above is None or (isinstance(above, Row) and above.kind is not kind):
            return [], False
        rows: list[Row] = []
        for start in range(0, len(job.keys), KEY_BYTES):
            row = self.index.get(job.keys[start : start + KEY_BYTES])
            if row is None or row.above is not above or not row.is_whole:
                break
            rows.append(row)
            above = row
        is_all = len(rows) * KEY_BYTES == len(job.keys)
        may_go_on = bool(above.children) and not is_all
        if is_all and job.digests:
            best = _longest(above, job.digests)
            if best is not None:
                rows.append(best)
        self.touch(rows)
        return rows, may_go_on

    def above(self, record: Record) -> Row | Kind | None:
        """What a record stands below; None: it is not there."""
        kind = self.kinds.get(kind_of(record.root, record.layout))
        if record.parent == record.root.key:
            return kind or Kind(record.root, record.layout)
        row = self.index.get(record.parent)
        is_there = row is not None and row.above is not None and row.kind is kind and row.is_whole
        return row if is_there else None

    def covers(self, record: Record) -> bool:
        """Whether a record below the same parent begins with all its blocks."""
        above = self.above(record)
        return above is not None and any(
            row.written.digests.startswith(record.digests)
            for row in _beginning(above, record.digests)
        )

    def shorter(self, row: Row) -> list[Row]:
        """Tails that this record holds too, and nobody needs."""
        assert row.above is not None, row.key.hex()
        return [
            other
            for other in _beginning(row.above, row.written.digests)
            if other is not row
            and not other.holds
            and not other.children
            and row.written.digests.startswith(other.written.digests)
        ]

    def touch(self, rows: Iterable[Row]) -> None:
        """They were used, together."""
        self._uses += 1
        for row in rows:
            row.used = self._uses
            if row.key in self._leaves:
                self._leaves.move_to_end(row.key)

    def evictable(self) -> Row | None:
        """The leaf to go next; None where all are held."""
        return next((row for row in self._leaves.values() if not row.holds), None)

    # ---- changing

    def add(self, row: Row) -> list[Row]:
        """A record is there; rows that can be reached from now on: it, and what waited for it."""
        assert row.key not in self.index, row.key.hex()
        self.index[row.key] = row
        self.kinds[row.kind.name] = row.kind
        row.kind.row_count += 1
        placed = []
        todo = [row]
        while todo:
            row = todo.pop()
            above: Row | Kind | None = row.kind
            if row.written.parent != row.kind.key:
                above = self.index.get(row.written.parent)
            if not _may_stand_below(row, above):
                self._waiting.setdefault(row.written.parent, {})[row.key] = row
                continue
            assert above is not None, row.key.hex()
            row.above = above
            row.used = self._uses
            above.children.setdefault(_first(row.written.digests), []).append(row)
            if isinstance(above, Row):
                self._leaves.pop(above.key, None)
            self._leaves[row.key] = row
            placed.append(row)
            todo += self._waiting.pop(row.key, {}).values()
        return placed

    def cut(self, top: Row) -> list[Row]:
        """Take a row and all below it out; these, it first."""
        above = top.above
        if above is None:
            self._wait_no_more(top)
        else:
            siblings = above.children[_first(top.written.digests)]
            siblings.remove(top)
            if not siblings:
                del above.children[_first(top.written.digests)]
            if isinstance(above, Row) and not above.children:
                self._leaves[above.key] = above
                if above.used <= top.used:  # its end goes: it is next
                    self._leaves.move_to_end(above.key, last=False)
        gone = [top]
        for row in gone:  # it grows meanwhile
            gone += _below(row)
            row.above, row.children = None, {}
            del self.index[row.key]
            self._leaves.pop(row.key, None)
            row.kind.row_count -= 1
        self.forget_kind(top.kind)
        return gone

    def _wait_no_more(self, row: Row) -> None:
        waiting = self._waiting[row.written.parent]
        del waiting[row.key]
        if not waiting:
            del self._waiting[row.written.parent]

    def forget_kind(self, kind: Kind) -> None:
        """If nothing is of it: salts come and go by the million."""
        if not kind.row_count:
            self.kinds.pop(kind.name, None)

    def check_integrity(self) -> None:
        """Assert that tree, index, leaves and those that wait agree; looks at each row."""
        linked = 0
        every: list[Row | Kind] = [*self.kinds.values(), *self.index.values()]
        for above in every:
            for row in _below(above):
                linked += 1
                assert row.above is above, row.key.hex()
                assert self.index.get(row.key) is row, row.key.hex()
            if isinstance(above, Row):
                is_leaf = above.above is not None and not above.children
                assert is_leaf == (above.key in self._leaves), above.key.hex()
                assert (above.above is None) == (
                    above.key in self._waiting.get(above.written.parent, ())
                ), above.key.hex()
        waiting = sum(map(len, self._waiting.values()))
        assert linked + waiting == len(self.index), (linked, waiting, len(self.index))
        counted = sum(kind.row_count for kind in self.kinds.values())
        assert counted == len(self.index), (counted, len(self.index))


def _first(digests: bytes) -> bytes:
    return digests[:INNER_DIGEST_BYTES]


def _below(above: Row | Kind) -> Iterator[Row]:
    return (row for rows in above.children.values() for row in rows)


def _may_stand_below(row: Row, above: Row | Kind | None) -> bool:
    if isinstance(above, Row):
        return above.above is not None and above.kind is row.kind and above.is_whole
    return above is not None


def _beginning(above: Row | Kind, digests: bytes) -> Iterator[Row]:
    """Children that begin with the same block, latest first, a bounded number."""
    return islice(reversed(above.children.get(_first(digests), ())), CANDIDATES_MAX)


def _longest(above: Row | Kind, digests: bytes) -> Row | None:
    """The child that shares most blocks."""
    return max(
        _beginning(above, digests),
        key=lambda row: shared_blocks(row.written.digests, digests),
        default=None,
    )
