"""What `core.machine` takes in and what it wants done.

Events and messages go in, effects come out, in order; the runtime carries them out and feeds
results back as events.
"""

from dataclasses import dataclass
from typing import TypeAlias

from kvtide.core.layout import KVLayout
from kvtide.core.messages import Message

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
class Tick:
    """Time has passed."""


Event: TypeAlias = (
    Received | Disconnected | ProcessDied | RegionMade | RegionNotMade | HostLimit | Tick
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
    """Write the generation of a run of cells; done before any later effect."""

    region: int
    first_cell: int
    count: int
    generation: int


@dataclass(frozen=True, slots=True)
class Note:
    """A line for the node's log."""

    text: str
    is_warning: bool = False


@dataclass(frozen=True, slots=True)
class End:
    """The node's work is done: nobody has needed it for `linger_s`, or it was told to stop."""

    why: str
    on_purpose: bool


Effect: TypeAlias = (
    Send | SendRegion | Close | MakeRegion | FreeRegion | SetGenerations | Note | End
)
