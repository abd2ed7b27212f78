"""What engines, commands and the node say to each other: plain values, encoded by `kvtide.wire`.

`core.machine` takes these as they are, so the wire has no second set of types and a simulator
speaks to the machine in its own words.

Keys and digests travel as one `bytes`, 32 or 16 bytes after one another.
"""

from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

WIRE_VERSION = 1
"""Raised when a message changes; the socket's name carries it, so versions run side by side."""


class Run(NamedTuple):
    """Cells lent together, the same in the region's file of every shard; one generation."""

    region: int
    first_cell: int
    cell_count: int
    generation: int

    @property
    def end_cell(self) -> int:
        """The first cell behind it."""
        return self.first_cell + self.cell_count

    def part(self, first: int, end: int) -> "Run":
        """Its cells [first, end), counted from its own first."""
        assert 0 <= first < end <= self.cell_count, (first, end, self)
        return Run(self.region, self.first_cell + first, end - first, self.generation)


# ---- from an engine's scheduler


@dataclass(frozen=True, slots=True)
class SchedulerHello:
    """First words of an instance. `incarnation` is random for each life of the process.

    `last_grant` is the highest grant that the scheduler has received from this node: what was
    granted after it got lost with a connection, and can never be planned.
    """

    wire_version: int
    version: str
    engine_id: str
    incarnation: bytes
    pid: int
    label: str
    worker_count: int
    last_grant: int = 0


@dataclass(frozen=True, slots=True)
class Identity:
    """What the engine is, once its workers' facts are known; or why it is off.

    `fields` are names with printable values or their digests, for comparison between engines.
    """

    fingerprint: bytes
    weights: bytes
    fields: dict[str, str]
    block_tokens: int
    chunk_tokens: int
    cell_bytes: list[int]
    step_tokens: int
    off_reason: str = ""
    off_detail: str = ""


@dataclass(frozen=True, slots=True)
class RegisterRoot:
    """A root key that later messages may name."""

    root: bytes
    epoch: bytes
    salt_digest: bytes


@dataclass(frozen=True, slots=True)
class Lookup:
    """How much of this chain is held? `digests` are those of the blocks behind the last key."""

    number: int
    root: bytes
    keys: bytes
    digests: bytes


@dataclass(frozen=True, slots=True)
class Probe:
    """The second half of a lookup: the block digests of the first chunk that did not match."""

    number: int
    root: bytes
    parent: bytes
    digests: bytes


@dataclass(frozen=True, slots=True)
class LeaseRelease:
    """The engine will not load what this lease protects."""

    lease: int


@dataclass(frozen=True, slots=True)
class LoadBegin:
    """The engine has allocated blocks: the lease becomes a reference until `LoadEnd`."""

    lease: int


@dataclass(frozen=True, slots=True)
class LoadEnd:
    """All workers have reported the load that began with this lease."""

    lease: int
    blocks_verified: int


@dataclass(frozen=True, slots=True)
class StoreOffer:
    """Chunks, one behind the other below `parent`, that could be stored now.

    `digests` holds for each chunk the short digests of its whole blocks, the last of which begins
    its key; only the last chunk may have fewer than `blocks_per_chunk`: then it is a tail.
    """

    number: int
    root: bytes
    parent: bytes
    keys: list[bytes]
    digests: list[bytes]


@dataclass(frozen=True, slots=True)
class GrantReturn:
    """These grants were never planned: nobody has written or will write under them."""

    grants: list[int]


@dataclass(frozen=True, slots=True)
class Clear:
    """What was stored under this fingerprint and salt may not be what it is called: no entry of
    them shall be found any more, in no tier. (The salt's digest; empty: requests without one.)

    The node says the same back once that is so.
    """

    fingerprint: bytes
    salt_digest: bytes


@dataclass(frozen=True, slots=True)
class Counts:
    """Increments of the engine's counters since the last such message."""

    increments: dict[str, int]


# ---- from an engine's worker


@dataclass(frozen=True, slots=True)
class WorkerHello:
    """One worker of an instance: which shard it holds, and what it still has from before.

    `regions_mapped` are those that it can copy from now; `regions_mapping` are its others: being
    populated, or on their way out. `facts` are opaque to the node, which hands them to the
    scheduler to compare.
    """

    wire_version: int
    engine_id: str
    incarnation: bytes
    pid: int
    rank: int
    shard: int
    shard_count: int
    is_writer: bool
    cell_bytes: int
    facts: dict[str, Any]
    grants_held: list[int]
    regions_mapped: list[int]
    node: bytes
    regions_mapping: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class RegionOpen:
    """The worker has mapped and populated the region."""

    region: int


@dataclass(frozen=True, slots=True)
class RegionFailed:
    """The worker could not map the region; it does without."""

    region: int
    detail: str


@dataclass(frozen=True, slots=True)
class RegionLeft:
    """The worker has no mapping of the region any more."""

    region: int


@dataclass(frozen=True, slots=True)
class Stored:
    """A grant is answered by this worker: it will never write under it again."""

    grant: int
    ok: bool


@dataclass(frozen=True, slots=True)
class Compared:
    """A canary has ended in this worker, which has compared a chunk that is kept with the same one
    computed anew.

    Attributes:
        fingerprint: that under which the chunk is kept.
        verdict: a `Verdict`.
        difference: the relative distance (`movers.compare`), 0 at least; 0 without a verdict.
    """

    fingerprint: bytes
    verdict: str
    difference: float


# ---- from both roles and from commands


@dataclass(frozen=True, slots=True)
class Ping:
    """Are you there? Answered by `Pong`."""


@dataclass(frozen=True, slots=True)
class Pong:
    """Yes."""


@dataclass(frozen=True, slots=True)
class Bye:
    """The sender ends on purpose."""


@dataclass(frozen=True, slots=True)
class Command:
    """A request of the command line: status, config, clear, check, stop."""

    name: str
    arguments: dict[str, str] = field(default_factory=dict)


# ---- from the node


@dataclass(frozen=True, slots=True)
class Welcome:
    """The connection's number, which grants carry, and which node this is."""

    connection: int
    node: bytes
    pid: int
    host_bytes: int
    settings: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Refused:
    """The node will not serve this connection."""

    reason: str
    detail: str


@dataclass(frozen=True, slots=True)
class Workers:
    """Facts of all workers by rank, once all are there, and for each shard its cells' bytes."""

    facts: list[dict[str, Any]]
    cell_bytes: list[int]


@dataclass(frozen=True, slots=True)
class Serving:
    """The instance is on: its layout has memory. Or off, with the node's reason."""

    off_reason: str = ""
    off_detail: str = ""


@dataclass(frozen=True, slots=True)
class RegionOffer:
    """Map this region. Two descriptors travel with it: cells, then generations."""

    region: int
    cell_count: int
    cell_bytes: int


@dataclass(frozen=True, slots=True)
class RegionLeave:
    """Unmap this region between steps, and say so."""

    region: int


@dataclass(frozen=True, slots=True)
class Match:
    """What is held: runs of `chunks` whole chunks, then `blocks` blocks of one more.

    `lease` is 0 where the node protects nothing; `probe` says that the chunk behind has
    children, so that its block digests are worth sending.
    """

    number: int
    chunks: int
    blocks: int
    runs: list[Run]
    lease: int
    probe: bool = False


@dataclass(frozen=True, slots=True)
class Pending:
    """Part of it is on its way, and the answer follows; said again when more of it has come."""

    number: int


@dataclass(frozen=True, slots=True)
class StoreAnswer:
    """What became of an offer, chunk by chunk.

    `outcomes` holds "" for a granted chunk, "held" for one the node has, else a drop reason.
    """

    number: int
    outcomes: list[str]
    grants: list[int]
    runs: list[Run]
    connections: list[int]


@dataclass(frozen=True, slots=True)
class Stopping:
    """The node ends; on purpose means that nobody shall start another."""

    on_purpose: bool


@dataclass(frozen=True, slots=True)
class CommandAnswer:
    """The answer to a command: JSON-like values; `error` says what went wrong."""

    values: dict[str, Any]
    error: str = ""


Message: TypeAlias = (
    SchedulerHello
    | Identity
    | RegisterRoot
    | Lookup
    | Probe
    | LeaseRelease
    | LoadBegin
    | LoadEnd
    | StoreOffer
    | GrantReturn
    | Counts
    | WorkerHello
    | RegionOpen
    | RegionFailed
    | RegionLeft
    | Stored
    | Ping
    | Pong
    | Bye
    | Command
    | Welcome
    | Refused
    | Workers
    | Serving
    | RegionOffer
    | RegionLeave
    | Match
    | Pending
    | StoreAnswer
    | Stopping
    | CommandAnswer
    | Clear
    | Compared
)
