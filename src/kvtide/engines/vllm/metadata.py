"""What the scheduler role tells the workers with each step. Small: it is pickled and broadcast."""

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata

from kvtide.core.messages import Run


@dataclass(frozen=True, slots=True)
class LoadJob:
    """Copy these runs' cells into these blocks, in order; then check every generation."""

    request_id: str
    block_ids: list[int]
    runs: list[Run]


@dataclass(frozen=True, slots=True)
class StoreJob:
    """Copy these blocks into this run's cells, under a grant.

    `connections` holds the number of each shard's writer, in the order of shards.
    """

    grant: int
    connections: list[int]
    block_ids: list[int]
    run: Run


@dataclass(frozen=True, slots=True)
class CanaryJob:
    """Compare these blocks, which the engine has computed, with these runs' cells, in order; then
    check every generation.

    `fingerprint` is that under which the cells are kept.
    """

    fingerprint: bytes
    block_ids: list[int]
    runs: list[Run]


@dataclass(slots=True)
class StepPlan(KVConnectorMetadata):
    """One step.

    Attributes:
        loads: to be started after the forward.
        stores: whole blocks computed by the end of this step: copied after the forward.
        rescues: blocks of requests that have ended: copied before the forward, which may
            overwrite them.
        canaries: computed by the end of this step: compared after the forward, not copied.
        has_forward: whether this step computes anything.
        token_count: how many tokens it computes, of all requests together.
        is_off: the scheduler role has ended by an error of its own: let go of everything.
    """

    loads: list[LoadJob] = field(default_factory=list)
    stores: list[StoreJob] = field(default_factory=list)
    rescues: list[StoreJob] = field(default_factory=list)
    canaries: list[CanaryJob] = field(default_factory=list)
    has_forward: bool = True
    token_count: int = 0
    is_off: bool = False
