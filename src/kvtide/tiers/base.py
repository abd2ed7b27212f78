"""What a place below the host must do. `kvtide.testing.tier_suite` holds every tier to it.

    owner ── lookup, load, store, clear ──► tier        submit: returns at once, never raises
    owner ◄── wake() … poll() ───────────── tier        what has ended since, in the order it ended

The caller is the node's owner, on one thread. A tier does its I/O elsewhere and calls `wake`, from
any thread, when `poll` has something to give. Every job that was submitted ends exactly once, with
an outcome, whatever happens to the place; until then its cells are the tier's, whatever a deadline
says: the owner lends them to nobody else.

Promises of every tier. A record is found only when it is complete, and loaded only when each byte
was verified; one that is damaged is absent from then on. A record is kept only behind its parent;
leaves are evicted first. The cap holds at all times. Loads go before stores. A place that fails
costs its callers nothing: after a few failures in a row the tier's *breaker* opens, everything
ends at once as `BROKEN` or absent, and it tries again by itself.
"""

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

from kvtide.core.layout import KVLayout
from kvtide.core.records import Record, RootName

NO_CAP_BYTES = 1 << 60
"""A cap of so much is none: a repair evicts nothing, nor does a trial at a place that others use,
which does not wait until it is known what is there."""


class LoadOutcome(enum.StrEnum):
    """How a load ended; the cells hold the record's bytes only if it was LOADED."""

    LOADED = "loaded"
    """each byte came, and was verified"""
    ABSENT = "absent"
    """evicted meanwhile, cleared, or never there"""
    CORRUPT = "corrupt"
    """not what was asked for, or unreadable while others are; it is removed"""
    FAILED = "failed"
    """the place did not give it"""
    BROKEN = "broken"
    """the breaker is open: it was not tried"""
    NOT_OPEN = "not_open"
    """the place is not open yet, or could not be opened"""
    CLOSED = "closed"
    """the tier is being closed"""


class StoreOutcome(enum.StrEnum):
    """How a store ended. STORED and HELD: its blocks are there."""

    STORED = "stored"
    """it is there now"""
    HELD = "held"
    """it was there already, or a longer record that begins with all its blocks"""
    NOT_ANCHORED = "not_anchored"
    """its parent is not there, or was dropped ahead of it"""
    QUEUE_FULL = "queue_full"
    """too many bytes wait"""
    TOO_OLD = "too_old"
    """it waited for T_put"""
    NO_ROOM = "no_room"
    """nothing could be evicted for it, or the place is full"""
    FAILED = "failed"
    """the place did not take it, or has other content of this name"""
    BROKEN = "broken"
    """the breaker is open: it was not tried"""
    NOT_OPEN = "not_open"
    """the place is not open yet, or could not be opened"""
    CLOSED = "closed"
    """the tier is being closed"""

    @property
    def is_kept(self) -> bool:
        """Whether the record is there."""
        return self in (StoreOutcome.STORED, StoreOutcome.HELD)


@dataclass(frozen=True, slots=True)
class LookupJob:
    """How much of a chain is there?

    Attributes:
        number: the caller's; comes back with the answer.
        root: of the chain; a record below another root never matches.
        parent: key of the chunk before the first of `keys`; the root key at the start.
        keys: chunk keys in order, 32 bytes each, of whole chunks; may be empty.
        digests: short digests of the blocks of the one chunk behind `keys`, 16 bytes each; may be
            empty. Looked for only where all of `keys` are there.
        layout: records of another one never match.
    """

    number: int
    root: RootName
    parent: bytes
    keys: bytes
    digests: bytes
    layout: KVLayout


@dataclass(frozen=True, slots=True)
class LoadJob:
    """Fill cells with a record's bytes.

    Attributes:
        number: the caller's.
        record: as a lookup gave it.
        cells: for each shard, writable memory of as many cells as the record has blocks, starting
            on a page.
    """

    number: int
    record: Record
    cells: Sequence[memoryview]


@dataclass(frozen=True, slots=True)
class StoreJob:
    """Keep a record; its cells do not change until the job has ended.

    Attributes:
        number: the caller's.
        record: what it is.
        cells: for each shard, the memory of its blocks, starting on a page.
    """

    number: int
    record: Record
    cells: Sequence[memoryview]


@dataclass(frozen=True, slots=True)
class Found:
    """The answer to a lookup.

    Attributes:
        number: the lookup's.
        records: those of `keys` that are there, in order, up to the first that is not; then, where
            all are and blocks of `digests` match, the record that shares most of them.
        may_go_on: whether the last of them (or `parent`) has children that were not looked at,
            which `digests` of the chunk behind would tell.
    """

    number: int
    records: list[Record]
    may_go_on: bool


@dataclass(frozen=True, slots=True)
class Loaded:
    """The end of a load."""

    number: int
    outcome: LoadOutcome


@dataclass(frozen=True, slots=True)
class Stored:
    """The end of a store."""

    number: int
    outcome: StoreOutcome


Done: TypeAlias = Found | Loaded | Stored


@dataclass(frozen=True, slots=True)
class TierStatistics:
    """One moment of a tier.

    Attributes:
        state: "on", or why it is not: shown to people.
        bytes_used: as the cap counts them; `bytes_max` is the cap.
        records: how many can be found.
        queued_bytes: of stores that have not ended.
        loaded, stored: outcomes of all loads and stores so far, by name.
        loaded_bytes, stored_bytes: payload of those that were good.
        evicted: records taken away for room.
    """

    state: str
    bytes_used: int
    bytes_max: int
    records: int
    queued_bytes: int
    loaded: dict[str, int] = field(default_factory=dict)
    stored: dict[str, int] = field(default_factory=dict)
    loaded_bytes: int = 0
    stored_bytes: int = 0
    evicted: int = 0


class Tier(Protocol):
    """One place below the host. Calls come from its owner, one at a time, and return at once; only
    `close` blocks, and may come from another thread once the owner makes no more."""

    name: str
    """As settings, status and metrics name it: `disk`, `redis`, …"""

    def lookup(self, job: LookupJob) -> None:
        """Ask how much of a chain is there; `poll` gives a `Found`."""

    def load(self, job: LoadJob) -> None:
        """Fill cells; `poll` gives a `Loaded`. What is found may be gone by now."""

    def store(self, job: StoreJob) -> None:
        """Keep a record; `poll` gives a `Stored`. Stores of one chain come parent first."""

    def clear(self, salt_digest: bytes | None, fingerprint: bytes | None = None) -> int:
        """Take away records: of one salt (empty: of requests without one), of one fingerprint, of
        both, or all where both are None; how many there were, as far as it knows by then.

        None of them is found from now on, nor after a restart or a kill, where the place takes
        note of it within a fifth of a second: for so long these calls may block between two ticks,
        all together, as no other does.
        Their stores that have not ended end as NOT_ANCHORED, the first of a chain too; their loads
        end as they would have. What is stored later is kept.
        """

    def poll(self) -> list[Done]:
        """What has ended since the last call."""

    def tick(self, now_ms: int) -> None:
        """Time has passed: try again what is broken, drop what has waited for too long."""

    def statistics(self) -> TierStatistics:
        """Its numbers now."""

    def close(self, timeout_s: float) -> None:
        """End all jobs, within this time where the place answers; the last call. What is stored
        stays. Jobs end as CLOSED (a running one as it ends), to be polled once more; one that the
        place still has by then ends when that answers, and is polled then."""
