"""What is in the bucket, as far as its names were read: one for all sessions of a tier.

Lookups are answered from here, without a word to the store: asking it by name would be a request
for each chunk of a prompt. What others write or take away is found here when the writing thread
has listed it; until then it is a miss.

    name ──► `held` by key ──► View (tree, least recently used leaves)
    gone ──► `victims`, which are still in the bucket and count, until they are deleted

Ownership: under `lock`; names are taken in and given up by the thread that writes, and given up by
those that load, too.
"""

import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kvtide.codec.record import stored_bytes
from kvtide.core.keys import INNER_DIGEST_BYTES
from kvtide.core.records import Record
from kvtide.tiers.base import LookupJob, StoreOutcome
from kvtide.tiers.disk.rows import Kind
from kvtide.tiers.remote.census import Census
from kvtide.tiers.remote.kinds import kind_of
from kvtide.tiers.s3.names import Message, Written
from kvtide.tiers.shared_dir.journal import KeptRow
from kvtide.tiers.shared_dir.view import Row, View

GONE_MAX = 65_536
"""Writes that are remembered as gone: a list that was begun before may still name them."""
_US = b""
"""A bucket has one member: all that is there is everybody's."""


@dataclass(slots=True)
class Held:
    """One record that is there. `seen`: the last look at everything that found it."""

    written: Written
    kind: Kind
    length_bytes: int
    seen: int


@dataclass(frozen=True, slots=True)
class Loading:
    """A record that is being loaded, and is not evicted meanwhile."""

    written: Written
    row: Row


@dataclass(frozen=True, slots=True)
class Victim:
    """One record whose objects are to be deleted."""

    written: Written
    kind: Kind
    length_bytes: int


class Mirror:
    """All that is known to be there."""

    def __init__(self, census: Census, top: str) -> None:
        self.lock = threading.RLock()
        self.top = top
        self.newest = 0
        """The latest stamp that was seen or given."""
        self.used_bytes = 0
        self.kinds: dict[bytes, Kind] = {}
        self._view = View(_US)
        self._census = census
        self._held: dict[bytes, Held] = {}
        self._clears: dict[Message, None] = {}
        self._gone: dict[bytes, None] = {}
        self._victims: list[Victim] = []
        self._looks = 0

    def next_stamp(self) -> int:
        """Later than all that were seen."""
        with self.lock:
            self.newest = max(self.newest + 1, time.time_ns() // 1_000_000)
            return self.newest

    # ---- asking

    def find(self, job: LookupJob) -> tuple[list[Record], bool]:
        """See `Session.find`."""
        with self.lock:
            kind = Kind(job.root, job.layout)
            rows, may_go_on = self._view.match(kind, job.parent, job.keys, job.digests)
            return [row.record for row in rows], may_go_on

    def begin_load(self, record: Record) -> Loading | None:
        """Which write to load, until `end_load`; None: it is not there."""
        with self.lock:
            row = self._view.find(record)
            if row is None:
                return None
            row.holds += 1
            self._view.touch([row])
            return Loading(self._held[record.key].written, row)

    def end_load(self, loading: Loading) -> None:
        """The end of a `begin_load`."""
        with self.lock:
            loading.row.holds -= 1

    def before(self, record: Record, *, is_behind: bool) -> StoreOutcome | None:
        """How a store ends before it began; None: it may begin. `is_behind`: its parent is on its
        way."""
        with self.lock:
            if self._view.find(record) is not None or self._view.covers(record):
                return StoreOutcome.HELD
            if record.key in self._view.index:
                return StoreOutcome.FAILED
            if not is_behind and self._view.above(record) is None:
                return StoreOutcome.NOT_ANCHORED
            return None

    # ---- what comes

    def stored(self, record: Record, written: Written) -> bool:
        """A record was written; whether it can be found. It takes the place of shorter ones."""
        kind = Kind(record.root, record.layout)
        with self.lock:
            self.kinds[written.kind] = kind
            self.take_in(written)
            row = self._view.find(record)
            if row is None:
                self._give_up(record.key)
                return False
            for shorter in self._view.shorter(row):
                self._cut(shorter)
            return True

    def take_in(self, written: Written) -> None:
        """A name was seen, whose kind is known."""
        kind = self.kinds[written.kind]
        blocks = len(written.digests) // INNER_DIGEST_BYTES
        if blocks > kind.layout.blocks_per_chunk:
            return  # a name that none of us made
        length_bytes = stored_bytes(kind.layout, blocks)
        with self.lock:
            self.newest = max(self.newest, written.stamp)
            held = self._held.get(written.key)
            if written.write_id in self._gone:
                return
            if held is not None and held.written == written:
                held.seen = self._looks
                return
            new = Held(written, kind, length_bytes, self._looks)
            self.used_bytes += length_bytes
            is_cleared = any(_means(clear, new) for clear in self._clears)
            if is_cleared or (held is not None and _age(held.written) < _age(written)):
                self._drop(new)
                return
            if held is not None:  # two writes of one record: everybody keeps the earlier
                self._drop(held)
            self._held[written.key] = new
            self._place(new)
            self._tell(())

    def _place(self, held: Held) -> None:
        of = held.written
        known = of.key in self._view.index
        rows = self._view.add(_US, held.kind, KeptRow(0, 0, of.key, of.parent, of.digests))
        for row in rows if not known else ():
            kind = row.kind.kind
            self._census.stored(kind_of(kind.root, kind.layout), kind.root)

    # ---- what goes

    def remove(self, written: Written) -> None:
        """It is not there as it should be, nor is what lies behind it."""
        with self.lock:
            held = self._held.get(written.key)
            if held is not None and held.written.write_id == written.write_id:
                self._give_up(written.key)

    def failed(self, record: Record, written: Written) -> None:
        """A store ended halfway: what there may be of it is to go."""
        with self.lock:
            held = self._held.get(written.key)
            if held is not None and held.written == written:
                self._give_up(written.key)
                return
            length_bytes = stored_bytes(record.layout, record.blocks)
            self.used_bytes += length_bytes
            kind = Kind(record.root, record.layout)
            self._drop(Held(written, kind, length_bytes, self._looks))

    def removed_by_others(self, key: bytes, write_id: bytes) -> None:
        """Somebody has deleted this write."""
        with self.lock:
            held = self._held.get(key)
            if held is not None and held.written.write_id == write_id:
                self._give_up(key)
            self._remember_gone(write_id)
            self._forget_victims({write_id})

    def _give_up(self, key: bytes) -> None:
        row = self._view.index.get(key)
        if row is not None:
            self._cut(row)
            return
        self._view.forget(_US, key)
        held = self._held.pop(key, None)
        if held is not None:
            self._drop(held)

    def _cut(self, top: Row) -> None:
        """Take a row and all below it out of the tree."""
        rows = [top]
        for row in rows:  # it grows meanwhile
            rows += [below for each in (row.children or {}).values() for below in each]
        gone = [self._held.pop(row.key) for row in rows]
        self._view.remove(top, _US)
        for held in gone:
            self._drop(held)
        self._tell([held.written.kind for held in gone])

    def _drop(self, held: Held) -> None:
        self._victims.append(Victim(held.written, held.kind, held.length_bytes))
        self._remember_gone(held.written.write_id)

    def _remember_gone(self, write_id: bytes) -> None:
        self._gone[write_id] = None
        if len(self._gone) > GONE_MAX:
            del self._gone[next(iter(self._gone))]

    def evict(self, needed_bytes: int, keep: Iterable[bytes]) -> int:
        """Give up least recently used leaves, of so many bytes in all, none of these keys; how
        many bytes that made."""
        with self.lock:
            kept = [row for row in map(self._view.index.get, keep) if row is not None]
            for row in kept:
                row.holds += 1
            freed = 0
            while freed < needed_bytes:
                leaf = self._view.evictable()
                if leaf is None:
                    break
                freed += leaf.length_bytes
                self._cut(leaf)
                self._census.evicted_more(1)
            for row in kept:
                row.holds -= 1
            return freed

    def clear(self, message: Message) -> int:
        """Nothing of its scope that was written before it is there any more; how many were."""
        with self.lock:
            self._clears[message] = None
            self.newest = max(self.newest, message.stamp)
            meant = [held for held in self._held.values() if _means(message, held)]
            count = sum(held.written.key in self._view.index for held in meant)
            for held in meant:
                if held.written.key in self._held:
                    self._give_up(held.written.key)
            return count

    def heed(self, clears: Sequence[Message]) -> None:
        """These have been cleared and may not be gone yet, as all are told."""
        for message in clears:
            if message not in self._clears:
                self.clear(message)
        with self.lock:
            self._clears = dict.fromkeys(clears)

    # ---- the bucket

    def take_victims(self, count: int) -> list[Victim]:
        """Some of what is to be deleted: in the end `deleted`, or put back by `not_deleted`."""
        with self.lock:
            taken, self._victims = self._victims[:count], self._victims[count:]
            return taken

    def deleted(self, victims: Sequence[Victim]) -> None:
        """Their objects are gone."""
        with self.lock:
            self.used_bytes -= sum(victim.length_bytes for victim in victims)
            self._tell(())

    def not_deleted(self, victims: Sequence[Victim]) -> None:
        """They wait again."""
        with self.lock:
            self._victims = [*victims, *self._victims]

    def _forget_victims(self, write_ids: set[bytes]) -> None:
        theirs = [one for one in self._victims if one.written.write_id in write_ids]
        if theirs:
            self._victims = [
                one for one in self._victims if one.written.write_id not in write_ids
            ]
            self.deleted(theirs)

    @property
    def victims_bytes(self) -> int:
        """Of what is to be deleted."""
        with self.lock:
            return sum(victim.length_bytes for victim in self._victims)

    def begin_look(self) -> None:
        """All names are looked at from now on."""
        with self.lock:
            self._looks += 1

    def end_look(self, before: int) -> None:
        """All that were there were seen: what was written before this stamp and was not is gone,
        and what has no parent by now will have none."""
        with self.lock:
            old = [held for held in self._held.values() if held.written.stamp < before]
            for held in old:
                of = held.written
                if held.seen != self._looks and of.key in self._held:
                    self.removed_by_others(of.key, of.write_id)
                elif of.key in self._held and of.key not in self._view.index:
                    self._give_up(of.key)

    def is_known(self, write_id: bytes, key: bytes) -> bool:
        """Whether a part belongs to a record that is there."""
        with self.lock:
            held = self._held.get(key)
            return held is not None and held.written.write_id == write_id

    # ---- numbers

    def tell_all(self) -> None:
        """What there is, to whoever asks."""
        with self.lock:
            self._tell(())

    def _tell(self, removed: Iterable[bytes]) -> None:
        self._census.said(self.used_bytes, removed)

    def check_integrity(self) -> None:
        """Assert that the names that are held and the tree agree."""
        with self.lock:
            self._view.check_integrity()
            assert set(self._view.index) <= set(self._held), "a row without a name"
            held = sum(one.length_bytes for one in self._held.values())
            waiting = sum(one.length_bytes for one in self._victims)
            assert held + waiting <= self.used_bytes, (held, waiting, self.used_bytes)


def _means(clear: Message, held: Held) -> bool:
    assert clear.scope is not None, clear
    return held.written.stamp <= clear.stamp and clear.scope.has(held.kind.root)


def _age(written: Written) -> tuple[int, bytes]:
    return written.stamp, written.write_id
