"""A record from cells to a server, and the small values by which it is found.

Parts have names of their own write, which nobody knows until its note is there: so nobody asks for
what has not all come, two nodes that store the same never write to one name, and what a store that
failed has left is found by nobody. A part that was left in the middle takes room in the server for
ever, unless it is overwritten and removed: that is done ahead of the next store (`_free`).
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from kvtide.codec.passing import HeaderWriter
from kvtide.core.keys import INNER_DIGEST_BYTES
from kvtide.core.layout import KVLayout
from kvtide.core.records import Record, RootName
from kvtide.tiers.base import StoreOutcome
from kvtide.tiers.infinistore import names
from kvtide.tiers.infinistore.client import Client
from kvtide.tiers.infinistore.names import MARK, Names, Note
from kvtide.tiers.remote import parts
from kvtide.tiers.remote.census import Census
from kvtide.tiers.remote.kinds import kind_of
from kvtide.tiers.remote.session import Put
from kvtide.tiers.scope import Scope

PACKET_BYTES = 1300
"""What reaches a server at once over any network: a note has to fit, with the asks that put it."""
ASKS_BYTES = 192
"""Of these two asks, beside the note and twice its name."""
UNFREED_MAX = 256
"""Names of parts left off in the middle; the oldest are forgotten."""
OWN_MAX = 16_384
"""Records stored by this session, which removes them once they are cleared; others the server
evicts."""
SWEPT_TOGETHER = 8
"""Records that one sweep removes: it holds up its thread."""


@dataclass(frozen=True, slots=True)
class _Own:
    """A record that this session has stored: root, names of its small values, and its parts."""

    root: RootName
    told: tuple[bytes, ...]
    write_id: bytes
    part_count: int


@dataclass(slots=True)
class _Around:
    """What is there of a record before it is stored.

    Attributes:
        is_there: itself, whole.
        is_covered: a longer one begins with all its blocks.
        family: keys of those that begin with its first block, as they should be from now on.
        is_family_told: whether the family says so already.
        is_marked: whether its parent is known to have children.
        shorter: notes of tails that it begins with.
    """

    is_there: bool
    is_covered: bool
    family: list[bytes]
    is_family_told: bool
    is_marked: bool
    shorter: list[Note]


class Stores:
    """Of one session."""

    def __init__(
        self, client: Client, prefix: str, census: Census, names_now: Callable[[Record], Names]
    ) -> None:
        """`names_now`: of a record's kind, as of this moment."""
        self._client = client
        self._prefix = prefix
        self._census = census
        self._names_now = names_now
        self._unfreed: deque[bytes] = deque(maxlen=UNFREED_MAX)
        self._own: deque[_Own] = deque(maxlen=OWN_MAX)
        self._cleared: deque[_Own] = deque(maxlen=OWN_MAX)

    def cleared(self, scope: Scope) -> None:
        """These are not found any more."""
        own = list(self._own)
        self._cleared.extend(one for one in own if scope.has(one.root))
        self._own = deque((one for one in own if not scope.has(one.root)), maxlen=OWN_MAX)

    def sweep(self) -> bool:
        """Take away some of what was cleared; whether there is more."""
        gone = [self._cleared.popleft() for _ in range(min(SWEPT_TOGETHER, len(self._cleared)))]
        self._client.remove(
            [
                name
                for one in gone
                for name in (
                    *one.told,
                    *names.part_names(self._prefix, one.write_id, one.part_count),
                )
            ]
        )
        return bool(self._cleared)

    def store(self, put: Put) -> StoreOutcome:
        """See `Session.store`, of one."""
        self._free()
        record, note = put.record, Note(put.record, put.write_id)
        known = self._names_now(record)
        if not self._is_anchored(record, known):
            return StoreOutcome.NOT_ANCHORED
        name = known.note(record.key)
        if len(note.packed()) + 2 * len(name) + ASKS_BYTES > PACKET_BYTES:
            return StoreOutcome.NO_ROOM
        around = self._around(record, known)
        if around.is_covered:
            return StoreOutcome.HELD
        if not around.is_there and not self._sent(put):
            return StoreOutcome.NO_ROOM
        if not self._client.replace(self._to_tell(known, note, around)):
            if not around.is_there:
                removed(self._client, self._prefix, known, note)
            return StoreOutcome.NO_ROOM
        if around.is_there:
            return StoreOutcome.HELD
        if self._names_now(record).note(record.key) != name:  # cleared meanwhile
            removed(self._client, self._prefix, known, note)
            return StoreOutcome.NOT_ANCHORED
        kind = kind_of(record.root, record.layout)
        self._census.stored(kind, record.root)
        family = known.family(record.parent, record.digests[:INNER_DIGEST_BYTES])
        told = (name, family, known.children(record.parent))
        count = len(names.lengths_of(record))
        self._own.append(_Own(record.root, told, put.write_id, count))
        for tail in around.shorter:
            removed(self._client, self._prefix, known, tail)
            self._census.took(kind, 0)
        return StoreOutcome.STORED

    # ---- what is there

    def _is_anchored(self, record: Record, known: Names) -> bool:
        if record.parent == record.root.key:
            return True
        return self._client.exist([known.note(record.parent)]) == [True]

    def _around(self, record: Record, known: Names) -> _Around:
        first = record.digests[:INNER_DIGEST_BYTES]
        asked = [known.note(record.key), known.family(record.parent, first)]
        asked.append(known.children(record.parent))
        itself, told, mark = self._client.read(asked)
        note = names.read_note(itself, record.root, record.layout)
        is_there = (
            note is not None
            and note.record == record
            and whole(self._client, self._prefix, [note]) == [True]
        )
        kin = family_of(self._client, self._prefix, known, told, (record.root, record.layout))
        kin = [one for one in kin if one.record.parent == record.parent]
        shorter = [
            one
            for one in kin
            if one.record.blocks < record.blocks and record.digests.startswith(one.record.digests)
        ]
        is_covered = not is_there and any(
            one.record.blocks > record.blocks and one.record.digests.startswith(record.digests)
            for one in kin
        )
        gone = {record.key, *(one.record.key for one in shorter)}
        family = [one.record.key for one in kin if one.record.key not in gone]
        is_told = record.key in names.read_family(told)
        family = [record.key, *family]
        return _Around(is_there, is_covered, family, is_told, mark is not None, shorter)

    def _to_tell(self, known: Names, note: Note, around: _Around) -> list[tuple[bytes, bytes]]:
        """Small values that are missing; last the one by which it is there."""
        record, told = note.record, []
        if not around.is_family_told or around.shorter:
            first = record.digests[:INNER_DIGEST_BYTES]
            family = names.pack_family(around.family)
            told.append((known.family(record.parent, first), family))
        if not around.is_marked:
            told.append((known.children(record.parent), MARK))
        if not around.is_there:
            told.append((known.note(record.key), note.packed()))
        return told

    # ---- sending

    def _sent(self, put: Put) -> bool:
        """Send its parts; False: there is no room, and none of them is there."""
        written = names.part_names(self._prefix, put.write_id, len(names.lengths_of(put.record)))
        begun: list[bytes] = []
        try:
            if self._client.write(self._parts(put, written, begun)):
                return True
        except BaseException:
            self._unfreed.extend(begun)
            raise
        self._unfreed.extend(begun)
        self._free()
        return False

    def _parts(
        self, put: Put, written: Sequence[bytes], begun: list[bytes]
    ) -> Iterator[tuple[bytes, list[bytes | memoryview]]]:
        """What is to be written, summed as it goes; so parts with headers in them are last."""
        record = put.record
        headers = parts.empty_headers(record)
        writer = HeaderWriter(record, put.write_id, headers)
        lengths = names.lengths_of(record)
        have_headers = parts.have_headers(record.layout, record.blocks, lengths)
        last: list[tuple[bytes, list[bytes | memoryview]]] = []
        cut = parts.cut(headers, put.cells, lengths)
        for name, pieces, has_header in zip(written, cut, have_headers, strict=True):
            writer.passed(pieces)
            if has_header:
                last.append((name, [MARK, *pieces]))
            else:
                begun.append(name)
                yield name, [MARK, *pieces]
        for name, content in last:
            begun.append(name)
            yield name, content

    def _free(self) -> None:
        """Have the server give back what stores that failed have left."""
        while self._unfreed:
            name = self._unfreed[0]
            # What is not whole must be overwritten before it is removed, or the server ends.
            if not self._client.replace([(name, MARK)], is_whole=False):
                return
            self._client.remove([name])
            self._unfreed.popleft()


def whole(client: Client, prefix: str, notes: Sequence[Note]) -> list[bool]:
    """Of each, whether the parts that a server evicts first are there."""
    asked: list[bytes] = []
    counts = []
    for note in notes:
        written = names.part_names(prefix, note.write_id, len(names.lengths_of(note.record)))
        oldest = names.oldest_parts(note.record)
        asked += [written[number] for number in oldest]
        counts.append(len(oldest))
    there = iter(client.exist(asked))
    return [all(next(there) for _ in range(count)) for count in counts]


def family_of(
    client: Client,
    prefix: str,
    known: Names,
    content: bytes | None,
    kind: tuple[RootName, KVLayout],
) -> list[Note]:
    """Of a family, newest first, the notes of those that are there."""
    keys = names.read_family(content)
    contents = client.read([known.note(key) for key in keys])
    notes = [names.read_note(one, *kind) for one in contents]
    found = [note for note in notes if note is not None]
    are_whole = whole(client, prefix, found)
    return [note for note, is_whole in zip(found, are_whole, strict=True) if is_whole]


def removed(client: Client, prefix: str, known: Names, note: Note) -> None:
    """Take a record away that is whole, or was."""
    count = len(names.lengths_of(note.record))
    client.remove([known.note(note.record.key), *names.part_names(prefix, note.write_id, count)])
