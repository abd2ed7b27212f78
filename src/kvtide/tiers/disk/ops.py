"""What the owner asks of the I/O threads, what they hand on, and what they say at the end."""

import threading
from dataclasses import dataclass, field
from typing import TypeAlias

from kvtide.tiers.base import LoadJob, StoreJob
from kvtide.tiers.disk.catalog import Place
from kvtide.tiers.disk.directory import Ours
from kvtide.tiers.kinds import Kind


@dataclass(frozen=True, slots=True, eq=False)
class LoadOp:
    """Fill a job's cells from a place, and verify them."""

    job: LoadJob
    place: Place


@dataclass(frozen=True, slots=True, eq=False)
class StoreOp:
    """Write a job's cells to a place and say so in the rows log.

    Attributes:
        kind, kind_number: of the record, for the log.
        reserve_bytes: what the owner has set aside for it until it has ended.
        refusals: how often it was known by then that the drive has less room.
        is_copy: of a record that lies elsewhere, where it goes once the copy is safe.
    """

    job: StoreJob
    place: Place
    kind: Kind
    kind_number: int
    reserve_bytes: int
    refusals: int
    is_copy: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class FreeOp:
    """Give the space of records of one segment back.

    Attributes:
        segment: theirs.
        places: where they are.
        unsaid: those of them of which no row says yet that they are gone.
        is_again: that has failed before, for all of them.
    """

    segment: int
    places: list[Place]
    unsaid: list[Place]
    is_again: bool


@dataclass(frozen=True, slots=True, eq=False)
class UnlinkOp:
    """Remove a segment, which holds no record any more; `is_again`: that has failed before."""

    segment: int
    places: list[Place]
    is_again: bool


@dataclass(frozen=True, slots=True, eq=False)
class SealOp:
    """Nothing is appended to a segment from now on: write its index, or write it anew."""

    segment: int
    reserve_bytes: int


@dataclass(frozen=True, slots=True, eq=False)
class ProbeOp:
    """Does the place take writes again?"""

    ours: Ours


@dataclass(frozen=True, slots=True, eq=False)
class ReadProbeOp:
    """Can this record be read again? (Its first page; None: there is none.)"""

    place: Place | None
    ours: Ours


@dataclass(frozen=True, slots=True, eq=False)
class MeasureOp:
    """How much is free?"""


@dataclass(frozen=True, slots=True, eq=False)
class ClearOp:
    """Make the files that say what was cleared, so that they outlive a loss of power; then remove
    those that are done with. `is_done` is set when it has ended, well or not."""

    names: tuple[str, ...]
    old_names: tuple[str, ...]
    is_done: threading.Event = field(default_factory=threading.Event)


OtherOp: TypeAlias = FreeOp | UnlinkOp | SealOp | ProbeOp | ReadProbeOp | MeasureOp | ClearOp
WriteOp: TypeAlias = StoreOp | OtherOp
Op: TypeAlias = LoadOp | WriteOp


@dataclass(slots=True)
class Ended:
    """How an operation ended.

    Attributes:
        op: it.
        error: why it failed, `bare`; None if it did not. OSError: the place. CorruptRecord: the
            bytes.
        allocated: of the files of its segment that it touched: what they take now, by suffix;
            0 where one is gone.
        free_bytes: of the file system, afterwards; None where it was not asked.
        is_lost: the file that should hold the record is not there, though the directory is.
        is_spoiled: the segment's rows log cannot be appended to any more.
        is_left: bytes of a store that failed could not be taken away.
        said_count: of how many of a FreeOp's `unsaid` a row says now that they are gone.
    """

    op: Op
    error: Exception | None = None
    allocated: dict[str, int] = field(default_factory=dict)
    free_bytes: int | None = None
    is_lost: bool = False
    is_spoiled: bool = False
    is_left: bool = False
    said_count: int = 0


@dataclass(frozen=True, slots=True)
class Summed:
    """A store whose checksums are taken: its bytes, headers and cells in order."""

    op: StoreOp
    parts: list[memoryview]


@dataclass(frozen=True, slots=True)
class Written:
    """A store whose bytes are where they belong; or are not, and why. `is_left`: some of them are,
    and could not be taken away."""

    op: StoreOp
    error: Exception | None = None
    is_left: bool = False
