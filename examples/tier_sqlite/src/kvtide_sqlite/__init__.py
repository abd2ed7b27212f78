"""A tier over a SQLite file: an example of a tier from another package.

    owner ── lookups, loads, clears ──┐
    owner ── stores ──────────────────┴─► one thread, with the only connection ── wake ──► owner

All that is decided is decided by SQL on that thread, one job after the other, so there is nothing
to keep in step. Loads and lookups go before stores.

Ownership: the two queues, what has ended and the numbers are under `_change`; the connection is
the thread's.
"""

import secrets
import sqlite3
import threading
from collections import Counter, deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeAlias

from kvtide.bounds import T_PUT_MS
from kvtide.codec import record as codec
from kvtide.core.keys import INNER_DIGEST_BYTES, KEY_BYTES
from kvtide.core.records import Record
from kvtide.errors import ConfigError, CorruptRecord
from kvtide.tier_entries import Option
from kvtide.tier_values import parse_bytes_max, parse_path
from kvtide.tiers.base import (
    Done,
    Found,
    Loaded,
    LoadJob,
    LoadOutcome,
    LookupJob,
    Stored,
    StoreJob,
    StoreOutcome,
    TierStatistics,
)
from kvtide.tiers.registry import TierType
from kvtide.values import show_bytes

FAILURES_MAX = 5
"""So many in a row open the breaker: then all ends at once, until `RETRY_MS` have passed."""
RETRY_MS = 1_000
CLEAR_S_MAX = 0.2

SCHEMA = """
PRAGMA journal_mode = WAL;
PRAGMA synchronous = NORMAL;
CREATE TABLE IF NOT EXISTS records (
    key BLOB PRIMARY KEY, parent BLOB, name BLOB, salt BLOB, fingerprint BLOB, digests BLOB,
    is_whole INTEGER, size INTEGER, used INTEGER, content BLOB
);
CREATE INDEX IF NOT EXISTS parents ON records (parent, name);
"""
BELOW = """
WITH RECURSIVE below(key) AS (
    SELECT ?1 UNION ALL SELECT records.key FROM records, below WHERE records.parent = below.key
) DELETE FROM records WHERE key IN below RETURNING salt, fingerprint, size
"""
ONE = "DELETE FROM records WHERE key = ? RETURNING salt, fingerprint, size"
SCOPE = """
DELETE FROM records WHERE salt = COALESCE(?, salt) AND fingerprint = COALESCE(?, fingerprint)
RETURNING salt, fingerprint, size
"""
COLDEST = """
SELECT key FROM records AS leaf WHERE key != ?1
AND NOT EXISTS (SELECT 1 FROM records WHERE parent = leaf.key) ORDER BY used LIMIT 1
"""


_Store: TypeAlias = tuple[int, StoreJob, list[bool]]
"""Since when it waits, the job, and whether it was cleared: a list that is not empty."""


def _name(job: LookupJob | Record) -> bytes:
    """Root and layout in one: records of another never match."""
    root, layout = job.root, job.layout
    return root.key + root.fingerprint + layout.name.encode()


class SQLiteTier:
    """See `kvtide.tiers.base.Tier`."""

    name = "sqlite"

    def __init__(
        self, path: Path, bytes_max: int, wake: Callable[[], None], queue_bytes_max: int
    ) -> None:
        """Open the file, or make it. Raises ConfigError."""
        self.path = path
        self.bytes_max = bytes_max
        self._wake = wake
        self._queue_bytes_max = queue_bytes_max
        self._change = threading.Condition()
        self._first: deque[Callable[[], None]] = deque()  # lookups, loads, clears
        self._stores: deque[_Store] = deque()
        self._running: _Store | None = None
        self._ended: list[Done] = []
        self._loaded: Counter[str] = Counter()
        self._stored: Counter[str] = Counter()
        self._bytes: Counter[str] = Counter()
        self._now_ms = self._failures = self._retry_ms = self._used = self._evicted = 0
        self._used_bytes = self._queued_bytes = 0
        self._records: Counter[tuple[bytes, bytes]] = Counter()  # by salt and fingerprint
        self._is_closed = False
        try:
            self._sql = sqlite3.connect(path, check_same_thread=False, isolation_level=None)
            self._sql.executescript(SCHEMA)
            for row in self._sql.execute("SELECT salt, fingerprint, size FROM records"):
                self._count(row, 1)
            ((self._used,),) = self._sql.execute("SELECT COALESCE(MAX(used), 0) FROM records")
        except sqlite3.Error as error:
            raise ConfigError(f"{path} cannot be used: {error}") from error
        self._thread = threading.Thread(target=self._run, name="kvtide-sqlite", daemon=True)
        self._thread.start()

    # ---- the owner's side

    @property
    def _is_broken(self) -> bool:
        return self._failures >= FAILURES_MAX

    def _give(self, work: Callable[[], None]) -> None:
        with self._change:
            self._first.append(work)
            self._change.notify()

    def _end(self, done: Done) -> None:
        with self._change:
            match done:
                case Loaded(_, outcome):
                    self._loaded[outcome] += 1
                case Stored(_, outcome):
                    self._stored[outcome] += 1
            self._ended.append(done)
        self._wake()

    def lookup(self, job: LookupJob) -> None:
        """In the thread."""
        if self._is_closed or self._is_broken:
            self._end(Found(job.number, [], may_go_on=False))
        else:
            self._give(lambda: self._look_up(job))

    def load(self, job: LoadJob) -> None:
        """In the thread."""
        if self._is_closed or self._is_broken:
            closed = LoadOutcome.CLOSED if self._is_closed else LoadOutcome.BROKEN
            self._end(Loaded(job.number, closed))
        else:
            self._give(lambda: self._load(job))

    def store(self, job: StoreJob) -> None:
        """In the thread, if it may wait."""
        size = job.record.payload_bytes
        if self._is_closed or self._is_broken:
            closed = StoreOutcome.CLOSED if self._is_closed else StoreOutcome.BROKEN
            self._end(Stored(job.number, closed))
        elif self._queued_bytes + size > self._queue_bytes_max:
            self._end(Stored(job.number, StoreOutcome.QUEUE_FULL))
        else:
            with self._change:
                self._queued_bytes += size
                self._stores.append((self._now_ms, job, []))
                self._change.notify()

    def clear(self, salt_digest: bytes | None, fingerprint: bytes | None = None) -> int:
        """Ahead of all that is asked from now on; stores that wait will not be there either."""

        def is_meant(salt: bytes, name: bytes) -> bool:
            return salt_digest in (None, salt) and fingerprint in (None, name)

        is_done = threading.Event()

        def work() -> None:
            try:
                self._delete(SCOPE, (salt_digest, fingerprint))
            except sqlite3.Error:
                self._judge(is_good=False)
            finally:
                is_done.set()

        with self._change:
            count = sum(number for root, number in self._records.items() if is_meant(*root))
            stores = [*self._stores, *([self._running] if self._running else ())]
            for _, job, cleared in stores:
                if is_meant(job.record.root.salt_digest, job.record.root.fingerprint):
                    cleared.append(True)
        if not self._is_closed:
            self._give(work)
            is_done.wait(CLEAR_S_MAX)
        return count

    def poll(self) -> list[Done]:
        """What has ended."""
        with self._change:
            ended, self._ended = self._ended, []
        return ended

    def tick(self, now_ms: int) -> None:
        """Drop what is too old; try again what is broken."""
        self._now_ms = now_ms
        with self._change:
            old = [one for one in self._stores if now_ms - one[0] >= T_PUT_MS]
            for one in old:
                self._stores.remove(one)
        for _, job, _ in old:
            self._end_store(job, StoreOutcome.TOO_OLD)
        if self._is_broken and now_ms >= self._retry_ms:
            self._failures = FAILURES_MAX - 1

    def statistics(self) -> TierStatistics:
        """Its numbers now."""
        with self._change:
            return TierStatistics(
                state="failing" if self._is_broken else "on",
                bytes_used=self._used_bytes,
                bytes_max=self.bytes_max,
                records=self._records.total(),
                queued_bytes=self._queued_bytes,
                loaded=dict(self._loaded),
                stored=dict(self._stored),
                loaded_bytes=self._bytes["loaded"],
                stored_bytes=self._bytes["stored"],
                evicted=self._evicted,
            )

    def close(self, timeout_s: float) -> None:
        """What the thread has not begun ends as closed, by its own hand."""
        with self._change:
            self._is_closed = True
            self._change.notify()
        self._thread.join(timeout_s)

    # ---- the thread's side

    def _run(self) -> None:
        while True:
            with self._change:
                self._change.wait_for(lambda: self._first or self._stores or self._is_closed)
                if not (self._first or self._stores):
                    break
                first = self._first.popleft() if self._first else None
                store = None if first else self._stores.popleft()
                self._running = store
            if first is not None:
                first()
            elif store is not None:
                self._store(store[1], store[2])
            self._running = None
            del first, store  # cells may be wanted back while this thread waits
        self._sql.close()

    def _judge(self, *, is_good: bool) -> None:
        self._failures = 0 if is_good else self._failures + 1
        self._retry_ms = self._now_ms + RETRY_MS

    def _count(self, row: tuple[bytes, bytes, int], change: int) -> None:
        salt, fingerprint, size = row
        with self._change:
            self._records[salt, fingerprint] += change
            self._used_bytes += change * size

    def _delete(self, sql: str, values: tuple[object, ...]) -> None:
        for row in self._sql.execute(sql, values).fetchall():
            self._count(row, -1)

    def _use(self, keys: list[bytes]) -> None:
        self._used += 1
        self._sql.executemany(
            "UPDATE records SET used = ? WHERE key = ?", [(self._used, key) for key in keys]
        )

    def _look_up(self, job: LookupJob) -> None:
        try:
            found, may_go_on = self._found(job)
            self._judge(is_good=True)
        except sqlite3.Error:
            found, may_go_on = [], False
            self._judge(is_good=False)
        self._end(Found(job.number, found, may_go_on))

    def _found(self, job: LookupJob) -> tuple[list[Record], bool]:
        found: list[Record] = []
        name, parent = _name(job), job.parent
        for start in range(0, len(job.keys), KEY_BYTES):
            key = job.keys[start : start + KEY_BYTES]
            row = self._sql.execute(
                "SELECT digests FROM records WHERE key = ? AND parent = ? AND name = ?"
                " AND is_whole",
                (key, parent, name),
            ).fetchone()
            if row is None:
                break
            found.append(Record(job.root, parent, key, row[0], job.layout))
            parent = key
        is_all = len(found) * KEY_BYTES == len(job.keys)
        children = self._sql.execute(
            "SELECT key, digests FROM records WHERE parent = ? AND name = ?", (parent, name)
        ).fetchall()
        if is_all and job.digests:
            key, digests = max(
                children, key=lambda row: _shared(row[1], job.digests), default=(b"", b"")
            )
            if _shared(digests, job.digests):
                found.append(Record(job.root, parent, key, digests, job.layout))
        self._use([record.key for record in found])
        return found, bool(children) and not (is_all and job.digests)

    def _load(self, job: LoadJob) -> None:
        try:
            outcome = self._loaded_into(job)
            self._judge(is_good=True)
        except sqlite3.Error:
            outcome = LoadOutcome.FAILED
            self._judge(is_good=False)
        if outcome is LoadOutcome.LOADED:
            self._bytes["loaded"] += job.record.payload_bytes
        self._end(Loaded(job.number, outcome))

    def _loaded_into(self, job: LoadJob) -> LoadOutcome:
        record = job.record
        row = self._sql.execute(
            "SELECT content FROM records WHERE key = ? AND parent = ? AND name = ?"
            " AND digests = ?",
            (record.key, record.parent, _name(record), record.digests),
        ).fetchone()
        if row is None:
            return LoadOutcome.ABSENT
        content, at = row[0], 0
        headers = []
        length = codec.header_bytes(record.layout.shard_count, record.blocks)
        try:
            for cells in job.cells:
                headers.append(memoryview(content)[at : at + length])
                at += length + len(cells)
                cells[:] = content[at - len(cells) : at].ljust(len(cells))
            codec.verify(headers, job.cells, record)
        except CorruptRecord:
            self._delete(BELOW, (record.key,))
            return LoadOutcome.CORRUPT
        self._use([record.key])
        return LoadOutcome.LOADED

    def _store(self, job: StoreJob, cleared: list[bool]) -> None:
        record = job.record
        try:
            if self._is_closed:
                outcome = StoreOutcome.CLOSED
            elif self._is_broken:
                outcome = StoreOutcome.BROKEN
            elif cleared:
                outcome = StoreOutcome.NOT_ANCHORED
            else:
                outcome = self._refusal(record) or self._kept(job)
                self._judge(is_good=True)
                if cleared:  # meanwhile
                    self._delete(ONE, (record.key,))
                    outcome = StoreOutcome.NOT_ANCHORED
        except sqlite3.Error:
            outcome = StoreOutcome.FAILED
            self._judge(is_good=False)
        if outcome is StoreOutcome.STORED:
            self._bytes["stored"] += record.payload_bytes
        self._end_store(job, outcome)

    def _end_store(self, job: StoreJob, outcome: StoreOutcome) -> None:
        with self._change:
            self._queued_bytes -= job.record.payload_bytes
        self._end(Stored(job.number, outcome))

    def _refusal(self, record: Record) -> StoreOutcome | None:
        name = _name(record)
        known = self._sql.execute(
            "SELECT name, parent, digests FROM records WHERE key = ?", (record.key,)
        ).fetchone()
        if known is not None:
            is_same = known == (name, record.parent, record.digests)
            return StoreOutcome.HELD if is_same else StoreOutcome.FAILED
        above = self._sql.execute(
            "SELECT 1 FROM records WHERE key = ? AND name = ? AND is_whole", (record.parent, name)
        ).fetchone()
        if record.parent != record.root.key and above is None:
            return StoreOutcome.NOT_ANCHORED
        siblings = self._sql.execute(
            "SELECT digests FROM records WHERE parent = ? AND name = ?", (record.parent, name)
        )
        if any(digests.startswith(record.digests) for (digests,) in siblings):
            return StoreOutcome.HELD
        return None

    def _kept(self, job: StoreJob) -> StoreOutcome:
        record = job.record
        size = codec.stored_bytes(record.layout, record.blocks)
        shorter = self._sql.execute(
            "SELECT key, digests FROM records WHERE parent = ? AND name = ?",
            (record.parent, _name(record)),
        ).fetchall()
        for key, digests in shorter:
            if record.digests.startswith(digests):
                self._delete(ONE, (key,))
        while self._used_bytes + size > self.bytes_max:
            coldest = self._sql.execute(COLDEST, (record.parent,)).fetchone()
            if coldest is None or size > self.bytes_max:
                return StoreOutcome.NO_ROOM
            self._delete(ONE, coldest)
            self._evicted += 1
        self._used += 1
        root = record.root
        self._sql.execute(
            "INSERT INTO records VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            (
                *(record.key, record.parent, _name(record), root.salt_digest, root.fingerprint),
                *(record.digests, record.is_whole, size, self._used, _content(job)),
            ),
        )
        self._use([record.parent])
        self._count((root.salt_digest, root.fingerprint, size), 1)
        return StoreOutcome.STORED


def _content(job: StoreJob) -> bytearray:
    """Header and cells of each shard, in the format of all records at rest."""
    record = job.record
    write_id = secrets.token_bytes(codec.WRITE_ID_BYTES)
    content = bytearray()
    for shard, cells in enumerate(job.cells):
        header = bytearray(codec.header_bytes(record.layout.shard_count, record.blocks))
        sums = codec.checksums_of(cells, record.blocks)
        codec.write_header(memoryview(header), codec.Header(record, shard, write_id, sums))
        content += header
        content += cells
    return content


def _shared(mine: bytes, theirs: bytes) -> int:
    """Blocks that two runs of digests begin with alike."""
    count = 0
    while count < min(len(mine), len(theirs)) and (
        mine[: count + INNER_DIGEST_BYTES] == theirs[: count + INNER_DIGEST_BYTES]
    ):
        count += INNER_DIGEST_BYTES
    return count // INNER_DIGEST_BYTES


def _open(
    options: Mapping[str, Any], wake: Callable[[], None], queue_bytes_max: int
) -> SQLiteTier:
    return SQLiteTier(options["path"], options["bytes_max"], wake, queue_bytes_max)


TYPE = TierType(
    options=(
        Option("path", parse_path, accepts="an absolute path", doc="Of the file."),
        Option("bytes_max", parse_bytes_max, accepts="a size", doc="The cap.", show=show_bytes),
    ),
    open=_open,
    schemes=("sqlite",),
    url_option="path",
)
