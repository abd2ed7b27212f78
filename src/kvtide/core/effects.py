"""What `core.machine` takes in and what it wants done.

Events and messages go in, effects come out, in order; the runtime carries them out and feeds
results back as events.
"""

from dataclasses import dataclass
from typing import TypeAlias

from kvtide.core.layout import KVLayout
from kvtide.core.messages import Message, Run
from kvtide.core.records import Record, RootName

# ---- events


@dataclass(frozen=True, slots=True)
class Received:
    """A message came on a connection, whose number is never used twice."""

    connection: int
    message: Message


@dataclass(frozen=True, slots=True)
class Disconnected:
    """The connection ended; the process behind it may live on."""

    connection: int


@dataclass(frozen=True, slots=True)
class ProcessDied:
    """The process that said hello on this connection is proven dead (by its pidfd)."""

    connection: int


@dataclass(frozen=True, slots=True)
class RegionMade:
    """The memory of a region is there."""

    region: int


@dataclass(frozen=True, slots=True)
class RegionNotMade:
    """The machine did not give the memory of a region."""

    region: int
    detail: str


@dataclass(frozen=True, slots=True)
class HostLimit:
    """From now on the host tier may hold at most this much (memory pressure, or its end)."""

    host_bytes: int


@dataclass(frozen=True, slots=True)
class TierFound:
    """A tier's answer to `AskTier`: what of the chain is there, in order."""

    number: int
    records: list[Record]
    may_go_on: bool
    """Whether there is more behind, which only block digests would tell."""


@dataclass(frozen=True, slots=True)
class TierLoaded:
    """A `LoadFrom` has ended: the tier does not touch the cells any more."""

    number: int
    outcome: str
    is_ok: bool


@dataclass(frozen=True, slots=True)
class TierStored:
    """A `StoreTo` has ended: the tier does not read the cells any more."""

    number: int
    outcome: str
    is_ok: bool


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed."""


Event: TypeAlias = (
    Received
    | Disconnected
    | ProcessDied
    | RegionMade
    | RegionNotMade
    | HostLimit
    | TierFound
    | TierLoaded
    | TierStored
    | Tick
)

# ---- effects


@dataclass(frozen=True, slots=True)
class Send:
    """Send a message."""

    connection: int
    message: Message


@dataclass(frozen=True, slots=True)
class SendRegion:
    """Offer a region to a worker, with the descriptors of its shard's cells and generations."""

    connection: int
    region: int
    shard: int
    cell_count: int
    cell_bytes: int


@dataclass(frozen=True, slots=True)
class Close:
    """End a connection after what was sent before."""

    connection: int


@dataclass(frozen=True, slots=True)
class MakeRegion:
    """Allocate memory for a region: for each shard `cell_count` cells, and the generations."""

    region: int
    layout: KVLayout
    cell_count: int


@dataclass(frozen=True, slots=True)
class FreeRegion:
    """Give the memory of a region back to the machine."""

    region: int


@dataclass(frozen=True, slots=True)
class SetGenerations:
    """Write the generation of a run into all its cells; done before any later effect."""

    run: Run


@dataclass(frozen=True, slots=True)
class AskTier:
    """Ask a tier how much of a chain it has, from the chunk behind `parent` on.

    `keys`: of whole chunks, in order; `digests`: of the blocks of the one chunk behind these.
    """

    tier: int
    number: int
    root: RootName
    parent: bytes
    keys: bytes
    digests: bytes
    layout: KVLayout


@dataclass(frozen=True, slots=True)
class LoadFrom:
    """Have a tier fill the run's cells, in every shard, with a record."""

    tier: int
    number: int
    record: Record
    run: Run


@dataclass(frozen=True, slots=True)
class StoreTo:
    """Have a tier keep what is in the run's cells, in every shard, as a record."""

    tier: int
    number: int
    record: Record
    run: Run


@dataclass(frozen=True, slots=True)
class ClearTiers:
    """Have all tiers take away everything, or what is of one salt or one fingerprint."""

    salt_digest: bytes | None
    fingerprint: bytes | None = None


@dataclass(frozen=True, slots=True)
class Note:
    """A line for the node's log."""

    text: str
    is_warning: bool = False


@dataclass(frozen=True, slots=True)
class Alarm:
    """A line for the node's log that somebody must read."""

    text: str


@dataclass(frozen=True, slots=True)
class End:
    """The node's work is done: nobody has needed it for `linger_s`, or it was told to stop."""

    why: str
    on_purpose: bool


Effect: TypeAlias = (
    Send
    | SendRegion
    | Close
    | MakeRegion
    | FreeRegion
    | SetGenerations
    | AskTier
    | LoadFrom
    | StoreTo
    | ClearTiers
    | Note
    | Alarm
    | End
)
