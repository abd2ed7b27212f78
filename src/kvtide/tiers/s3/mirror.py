"""What is in the bucket, as far as its names were read: one for all sessions of a tier.

Lookups are answered from here, without a word to the store: asking it by name would be a request
for each chunk of a prompt. What others write or take away is found here when the writing thread
has listed it; until then it is a miss.

    name ──► `Tree`
    gone ──► `given_up`, which are still in the bucket and count, until they are deleted

Ownership: under `lock`; names are taken in and given up by the thread that writes, and given up by
those that load, too.
"""

import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kvtide.core.layout import KVLayout
from kvtide.core.records import Record, RootName
from kvtide.tiers.base import LookupJob, StoreOutcome
from kvtide.tiers.remote.census import Census
from kvtide.tiers.s3.names import Message, Written
from kvtide.tiers.s3.tree import Kind, Row, Tree

GONE_MAX = 65_536
"""Writes that are remembered as gone: a list that was begun before may still name them."""

USED_MAX = 256
"""Ends of chains that a node tells of at once: eight kilobytes."""


@dataclass(frozen=True, slots=True)
class Loading:
    """A write that is being loaded; its row is not evicted meanwhile."""

    written: Written
    row: Row


class Mirror:
    """All that is known to be there."""

    def __init__(self, census: Census, top: str) -> None:
        self.lock = threading.RLock()
        self.top = top
        self.newest = 0
        """The latest stamp that was seen or given."""
        self.used_bytes = 0
        self._tree = Tree()
        self._census = census
        self._clears: dict[Message, None] = {}
        self._gone: dict[bytes, None] = {}
        self._given_up: dict[bytes, Row] = {}  # by write id
        self._looks = 0
        self._used: dict[bytes, None] = {}  # ends of what was found since it was told

    def next_stamp(self) -> int:
        """Later than all that were seen."""
        with self.lock:
            self.newest = max(self.newest + 1, time.time_ns() // 1_000_000)
            return self.newest

    # ---- asking

    def find(self, job: LookupJob) -> tuple[list[Record], bool]:
        """See `Session.find`."""
        with self.lock:
            rows, may_go_on = self._tree.match(job)
            if rows:  # what lies before it is not evicted before it
                self._used.pop(rows[-1].key, None)
                self._used[rows[-1].key] = None
            if len(self._used) > USED_MAX:
                del self._used[next(iter(self._used))]
            return [row.record for row in rows], may_go_on

    def begin_load(self, record: Record) -> Loading | None:
        """Which write to load, until `end_load`; None: it is not there."""
        with self.lock:
            row = self._tree.find(record)
            if row is None:
                return None
            row.holds += 1
            self._tree.touch([row])
            return Loading(row.written, row)

    def end_load(self, loading: Loading) -> None:
        """The end of a `begin_load`."""
        with self.lock:
            loading.row.holds -= 1

    def before(self, record: Record, *, is_behind: bool) -> StoreOutcome | None:
        """How a store ends before it began; None: it may begin. `is_behind`: its parent is on its
        way."""
        with self.lock:
            if self._tree.find(record) is not None or self._tree.covers(record):
                return StoreOutcome.HELD
            held = self._tree.index.get(record.key)
            if held is not None and held.above is not None:
                return StoreOutcome.FAILED
            if not is_behind and self._tree.above(record) is None:
                return StoreOutcome.NOT_ANCHORED
            return None

    def take_used(self) -> list[bytes]:
        """Keys of what was found here since the last call, in order: of each chain the last."""
        with self.lock:
            used, self._used = list(self._used), {}
            return used

    def used_by_others(self, keys: Iterable[bytes]) -> None:
        """Another node has found these, in this order."""
        with self.lock:
            for row in map(self._tree.index.get, keys):
                if row is not None:
                    self._tree.touch([row])

    # ---- what comes

    def learned(self, root: RootName, layout: KVLayout) -> None:
        """What one kind of names stands for."""
        with self.lock:
            kind = Kind(root, layout)
            self._tree.kinds.setdefault(kind.name, kind)

    def stored(self, record: Record, written: Written) -> bool:
        """A record was written; whether it can be found. It takes the place of shorter ones."""
        with self.lock:
            self.learned(record.root, record.layout)
            self.take_in(written)
            row = self._tree.find(record)
            if row is None:
                self._give_up(self._tree.index.get(record.key))
                return False
            for shorter in self._tree.shorter(row):
                self._give_up(shorter)
            return True

    def take_in(self, written: Written) -> bool:
        """A name was seen; False: nothing is done, since what its kind stands for is unknown."""
        with self.lock:
            kind = self._tree.kinds.get(written.kind)
            if kind is None:
                return False
            row = Row(kind, written, self._looks)
            if row.blocks > kind.layout.blocks_per_chunk:
                return True  # none of us made it
            self.newest = max(self.newest, written.stamp)
            held = self._tree.index.get(written.key)
            if held is not None and held.written == written:
                held.seen = self._looks
            elif written.write_id not in self._given_up:
                self._come(row, held)
            return True

    def _come(self, row: Row, held: Row | None) -> None:
        """A write that is not counted yet, beside one of the same key."""
        self.used_bytes += row.length_bytes
        # What is gone and was named again came to be after it was deleted: by a call given up.
        is_gone = row.written.write_id in self._gone
        if is_gone or any(_means(clear, row) for clear in self._clears):
            self._drop(row)
        elif held is None:
            for placed in self._tree.add(row):
                self._census.stored(placed.kind.name, placed.kind.root)
        elif _age(held.written) < _age(row.written) or held.record != row.record:
            self._drop(row)
        else:  # two writes of one record: everybody keeps the earlier
            later = Row(held.kind, held.written, held.seen)
            held.written, held.seen = row.written, row.seen
            self._drop(later)
        self._tell(())

    # ---- what goes

    def remove(self, written: Written) -> None:
        """It is not there as it should be, nor is what lies behind it."""
        with self.lock:
            self._give_up(self._of_write(written.key, written.write_id))

    def failed(self, record: Record, written: Written) -> None:
        """A store ended halfway: what there may be of it is to go."""
        with self.lock:
            held = self._of_write(written.key, written.write_id)
            if held is not None:
                self._give_up(held)
                return
            if written.write_id in self._given_up:  # its name was seen, and is counted
                return
            row = Row(Kind(record.root, record.layout), written, self._looks)
            self.used_bytes += row.length_bytes
            self._drop(row)

    def removed_by_others(self, key: bytes, write_id: bytes) -> None:
        """Somebody has deleted this write; what lay behind it is lost with it."""
        with self.lock:
            self._give_up(self._of_write(key, write_id))
            self._remember_gone(write_id)
            row = self._given_up.pop(write_id, None)
            if row is not None:
                self.deleted([row])

    def _of_write(self, key: bytes, write_id: bytes) -> Row | None:
        held = self._tree.index.get(key)
        return held if held is not None and held.written.write_id == write_id else None

    def _give_up(self, top: Row | None) -> None:
        """A row and all below it."""
        if top is None:
            return
        was_found = top.above is not None
        gone = self._tree.cut(top)
        for row in gone:
            self._drop(row)
        self._tell([row.kind.name for row in gone] if was_found else ())

    def _drop(self, row: Row) -> None:
        self._given_up[row.written.write_id] = row
        self._remember_gone(row.written.write_id)

    def _remember_gone(self, write_id: bytes) -> None:
        self._gone[write_id] = None
        if len(self._gone) > GONE_MAX:
            del self._gone[next(iter(self._gone))]

    def evict(self, needed_bytes: int, keep: Iterable[bytes]) -> int:
        """Give up least recently used leaves, of so many bytes in all, none of these keys; how
        many bytes that made."""
        with self.lock:
            kept = [row for row in map(self._tree.index.get, keep) if row is not None]
            for row in kept:
                row.holds += 1
            freed = 0
            while freed < needed_bytes:
                leaf = self._tree.evictable()
                if leaf is None:
                    break
                freed += leaf.length_bytes
                self._give_up(leaf)
                self._census.evicted_more(1)
            for row in kept:
                row.holds -= 1
            return freed

    def clear(self, message: Message) -> int:
        """Nothing of its scope that was written before it is there any more; how many were."""
        with self.lock:
            self._clears[message] = None
            self.newest = max(self.newest, message.stamp)
            meant = [row for row in self._tree.index.values() if _means(message, row)]
            count = sum(row.above is not None for row in meant)
            for row in meant:
                if self._tree.index.get(row.key) is row:
                    self._give_up(row)
            return count

    def heed(self, clears: Sequence[Message]) -> None:
        """These have been cleared and may not be gone yet, as all are told."""
        for message in clears:
            if message not in self._clears:
                self.clear(message)
        with self.lock:
            self._clears = dict.fromkeys(clears)

    # ---- the bucket

    def take_given_up(self, count: int) -> list[Row]:
        """Some of what is to be deleted: in the end `deleted`, or put back by `not_deleted`."""
        with self.lock:
            taken = list(self._given_up.values())[:count]
            for row in taken:
                del self._given_up[row.written.write_id]
            return taken

    def deleted(self, given_up: Sequence[Row]) -> None:
        """Their objects are gone."""
        with self.lock:
            self.used_bytes -= sum(row.length_bytes for row in given_up)
            self._tell(())

    def not_deleted(self, given_up: Sequence[Row]) -> None:
        """They wait again."""
        with self.lock:
            twice = [row for row in given_up if row.written.write_id in self._given_up]
            self._given_up = {row.written.write_id: row for row in given_up} | self._given_up
            self.deleted(twice)  # they were heard of again meanwhile, and counted again

    @property
    def given_up_bytes(self) -> int:
        """Of what is to be deleted."""
        with self.lock:
            return sum(row.length_bytes for row in self._given_up.values())

    def begin_look(self) -> None:
        """All names are looked at from now on."""
        with self.lock:
            self._looks += 1

    def end_look(self, before: int) -> None:
        """All that were there were seen: what was written before this stamp and was not is gone,
        and what has no parent by now will have none."""
        with self.lock:
            index = self._tree.index
            for row in [row for row in index.values() if row.written.stamp < before]:
                if index.get(row.key) is not row:
                    continue
                if row.seen != self._looks:
                    self.removed_by_others(row.key, row.written.write_id)
                elif row.above is None:
                    self._give_up(row)
            for kind in list(self._tree.kinds.values()):
                self._tree.forget_kind(kind)

    def is_known(self, write_id: bytes, key: bytes) -> bool:
        """Whether a part belongs to a record that is there."""
        with self.lock:
            return self._of_write(key, write_id) is not None

    # ---- numbers

    def tell_all(self) -> None:
        """What there is, to whoever asks."""
        with self.lock:
            self._tell(())

    def _tell(self, removed: Iterable[bytes]) -> None:
        self._census.said(self.used_bytes, removed)

    def check_integrity(self) -> None:
        """Assert that what is counted is what is there, and that the tree fits together."""
        with self.lock:
            self._tree.check_integrity()
            rows = [*self._tree.index.values(), *self._given_up.values()]
            counted = sum(row.length_bytes for row in rows)
            assert counted <= self.used_bytes, (counted, self.used_bytes)


def _means(clear: Message, row: Row) -> bool:
    assert clear.scope is not None, clear
    return row.written.stamp <= clear.stamp and clear.scope.has(row.kind.root)


def _age(written: Written) -> tuple[int, bytes]:
    return written.stamp, written.write_id
