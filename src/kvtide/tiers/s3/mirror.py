"""What is in the bucket, as far as its names were read: one for all sessions of a tier.

Lookups are answered from here, without a word to the store: asking it by name would be a request
for each chunk of a prompt. What others write or take away is found here when the writing thread
has listed it; until then it is a miss.

    name ──► `Tree`
    gone ──► `given_up`, which are still in the bucket and count, until they are deleted

Ownership: under `lock`; names are taken in and given up by the thread that writes, and given up by
those that load, too.
"""

import os
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kvtide.core.layout import KVLayout
from kvtide.core.records import Record, RootName
from kvtide.tiers.base import LookupJob, StoreOutcome
from kvtide.tiers.remote.census import Census
from kvtide.tiers.s3.names import Clear, Written
from kvtide.tiers.s3.tree import Row, Tree, Trunk

GONE_MAX = 65_536
"""Writes that are remembered as gone: a list that was begun before may still name them."""

FOUND_ENDS_MAX = 256
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
        self.writer = os.urandom(8).hex()
        """The node, in the names of its notes."""
        self.newest = 0
        """The latest stamp that was seen or given."""
        self.taken_bytes = 0
        self._tree = Tree()
        self._census = census
        self._clears: dict[Clear, None] = {}
        self._gone: dict[bytes, None] = {}
        self._given_up: dict[bytes, Row] = {}  # by write id
        self._looks = 0
        self._found_ends: dict[bytes, None] = {}  # of chains, since they were told
        self._missing: set[bytes] = set()  # ids of writes that loads did not find
        self._still_missing: set[bytes] = set()  # the same, before notes were read the last time
        self._has_foreign = False

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
                self._found_ends.pop(rows[-1].key, None)
                self._found_ends[rows[-1].key] = None
            if len(self._found_ends) > FOUND_ENDS_MAX:
                del self._found_ends[next(iter(self._found_ends))]
            return [row.record for row in rows], may_go_on

    def begin_load(self, record: Record) -> Loading | None:
        """Which write to load, until `end_load`; None: it is not there."""
        with self.lock:
            row = self._tree.find(record)
            if row is None or row.is_foreign:
                return None
            row.holds += 1
            self._tree.touch([row])
            return Loading(row.written, row)

    def end_load(self, loading: Loading) -> None:
        """The end of a `begin_load`."""
        with self.lock:
            loading.row.holds -= 1

    def refusal(self, record: Record, *, is_behind: bool) -> StoreOutcome | None:
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

    def take_found_ends(self) -> list[bytes]:
        """Keys of what was found here since the last call, in order: of each chain the last."""
        with self.lock:
            found_ends, self._found_ends = list(self._found_ends), {}
            return found_ends

    def found_by_others(self, keys: Iterable[bytes]) -> None:
        """Another node has found these, in this order."""
        with self.lock:
            for row in map(self._tree.index.get, keys):
                if row is not None:
                    self._tree.touch([row])

    # ---- what comes

    def learned(self, root: RootName, layout: KVLayout) -> None:
        """What one kind of names stands for."""
        with self.lock:
            trunk = Trunk(root, layout)
            self._tree.trunks.setdefault(trunk.kind_digest, trunk)

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
            trunk = self._tree.trunks.get(written.kind_digest)
            if trunk is None:
                return False
            row = Row(trunk, written, self._looks)
            if row.blocks > trunk.layout.blocks_per_chunk:
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
        self.taken_bytes += row.length_bytes
        # What is gone and was named again came to be after it was deleted: by a call given up.
        is_gone = row.written.write_id in self._gone
        if is_gone or any(_means(clear, row) for clear in self._clears):
            self._give_up_write(row)
        elif held is None:
            for placed in self._tree.add(row):
                self._census.stored(placed.trunk.kind_digest, placed.trunk.root)
        elif _age(held.written) < _age(row.written) or held.record != row.record:
            self._give_up_write(row)
        else:  # two writes of one record: everybody keeps the earlier
            later = Row(held.trunk, held.written, held.seen)
            held.written, held.seen, held.is_foreign = row.written, row.seen, False
            self._give_up_write(later)
        self._tell(())

    # ---- what goes

    def remove(self, written: Written) -> None:
        """It is not there as it should be, nor is what lies behind it."""
        with self.lock:
            self._give_up(self._of_write(written.key, written.write_id))

    def missed(self, written: Written) -> None:
        """A load did not find it. Another node may have deleted it, and tells of it afterwards."""
        with self.lock:
            if written.write_id not in self._gone:
                self._missing.add(written.write_id)

    def leave(self, written: Written) -> bool:
        """It is of a format of another version: it stays, and is not found; whether it is the
        first."""
        with self.lock:
            row = self._of_write(written.key, written.write_id)
            if row is not None:
                row.is_foreign = True
            is_first, self._has_foreign = not self._has_foreign, True
            return is_first

    def failed(self, record: Record, written: Written) -> None:
        """A store ended halfway: what there may be of it is to go."""
        with self.lock:
            held = self._of_write(written.key, written.write_id)
            if held is not None:
                self._give_up(held)
                return
            if written.write_id in self._given_up:  # its name was seen, and is counted
                return
            row = Row(Trunk(record.root, record.layout), written, self._looks)
            self.taken_bytes += row.length_bytes
            self._give_up_write(row)

    def forget_write(self, key: bytes, write_id: bytes) -> None:
        """It is not in the bucket any more; what lay behind it is lost with it."""
        with self.lock:
            self._missing.discard(write_id)
            self._still_missing.discard(write_id)
            self._give_up(self._of_write(key, write_id))
            self._remember_gone(write_id)
            row = self._given_up.pop(write_id, None)
            if row is not None:
                self.deleted([row])

    def lacks_untold(self) -> bool:
        """Whether loads did not find what nobody tells to be gone: the store has forgotten it, and
        who knows what else. Asked for each time that all notes were read: who deletes tells it a
        moment later."""
        with self.lock:
            lacks = bool(self._still_missing)
            self._still_missing, self._missing = self._missing, set()
            return lacks

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
            self._give_up_write(row)
        self._tell([row.trunk.kind_digest for row in gone] if was_found else ())

    def _give_up_write(self, row: Row) -> None:
        """What stands in the tree no more, or never did."""
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
            freed_bytes = 0
            while freed_bytes < needed_bytes:
                leaf = self._tree.evictable()
                if leaf is None:
                    break
                freed_bytes += leaf.length_bytes
                self._give_up(leaf)
                self._census.evicted_more(1)
            for row in kept:
                row.holds -= 1
            return freed_bytes

    def clear(self, clear: Clear) -> int:
        """Nothing that it means is there any more; how many were."""
        with self.lock:
            self._clears[clear] = None
            self.newest = max(self.newest, clear.stamp)
            meant = [row for row in self._tree.index.values() if _means(clear, row)]
            count = sum(row.above is not None for row in meant)
            for row in meant:
                if self._tree.index.get(row.key) is row:
                    self._give_up(row)
            return count

    def heed(self, clears: Sequence[Clear]) -> None:
        """These have been made and what they mean may not be gone yet, as all are told."""
        for clear in clears:
            if clear not in self._clears:
                self.clear(clear)
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
            self.taken_bytes -= sum(row.length_bytes for row in given_up)
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

    def end_look(self, before_stamp: int) -> None:
        """All that were there were seen: what was written before this and was not is gone, and
        what has no parent by now will have none."""
        with self.lock:
            index = self._tree.index
            for row in [row for row in index.values() if row.written.stamp < before_stamp]:
                if index.get(row.key) is not row:
                    continue
                if row.seen != self._looks:
                    self.forget_write(row.key, row.written.write_id)
                elif row.above is None:
                    self._give_up(row)
            for trunk in list(self._tree.trunks.values()):
                self._tree.forget_trunk(trunk)

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
        self._census.said(self.taken_bytes, removed)

    def check_integrity(self) -> None:
        """Assert that what is counted is what is there, and that the tree fits together."""
        with self.lock:
            self._tree.check_integrity()
            rows = [*self._tree.index.values(), *self._given_up.values()]
            counted_bytes = sum(row.length_bytes for row in rows)
            assert counted_bytes <= self.taken_bytes, (counted_bytes, self.taken_bytes)


def _means(clear: Clear, row: Row) -> bool:
    return row.written.stamp <= clear.stamp and clear.scope.has(row.trunk.root)


def _age(written: Written) -> tuple[int, bytes]:
    return written.stamp, written.write_id
