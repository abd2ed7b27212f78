"""Why something was not cached: closed lists, the only values that logs, metrics and status use.

The documentation page of reasons is made from this file.
"""

import enum
from dataclasses import dataclass


class OffReason(enum.StrEnum):
    """Why an engine runs without kvtide."""

    FIELD_UNKNOWN = "field_unknown"
    """a part of the engine's fingerprint could not be determined"""
    GROUPS = "groups"
    """the model has several KV cache groups, or one that is not plain attention"""
    DEVICE = "device"
    """the engine keeps its KV cache on a device that kvtide cannot copy from yet"""
    PARALLEL = "parallel"
    """context parallelism, or ranks on several machines"""
    QUANTISED_CACHE = "quantised_cache"
    """the KV cache is quantised, which is not yet tested"""
    WEIGHTS_HASHING = "weights_hashing"
    """the weights are still being read to tell them from others; ends by itself"""
    WEIGHTS_NOT_LOCAL = "weights_not_local"
    """the weights are not local files, so their content cannot be named"""
    WEIGHTS_CHANGE = "weights_change"
    """the engine changes its weights while it runs, or a weight file is not what its name says"""
    ENGINE_VERSION = "engine_version"
    """this version of the engine has not been tested with this version of kvtide"""
    WIRE_VERSION = "wire_version"
    """the node speaks another version of the protocol"""
    ENGINE_ID_IN_USE = "engine_id_in_use"
    """another live engine has the same engine_id"""
    WORKERS_DIFFER = "workers_differ"
    """a worker is missing, or the workers do not agree"""
    HOST_TOO_SMALL = "host_too_small"
    """the host memory cannot hold four regions of this model's chunks"""
    KERNEL = "kernel"
    """the kernel lacks memfd, seals or pidfd"""
    NODE_UNREACHABLE = "node_unreachable"
    """no node answers, and none may be started"""
    CANARY = "canary"
    """what is kept for this engine is not what it computes; `kvtide clear` begins anew"""
    NODE_ENDS_AT_START = "node_ends_at_start"
    """three nodes in a row ended within a minute of their start, and served no engine"""


VOIDS_LOADS = (OffReason.WEIGHTS_CHANGE, OffReason.CANARY)
"""Those with which nothing that is being loaded may be used: it is not what it is kept as."""


class MissReason(enum.StrEnum):
    """Why prompt tokens were not served from kvtide."""

    ABSENT = "absent"
    """nobody stored them, they were evicted, or the engine has not mapped their memory yet"""
    NO_ANSWER = "no_answer"
    """the node did not answer in time"""
    NODE_GONE = "node_gone"
    """no node is connected"""
    WAITED_TOO_LONG = "waited_too_long"
    """the request had waited for external data as long as it may"""
    LOAD_FAILED = "load_failed"
    """a load of this request failed before"""
    OPTED_OUT = "opted_out"
    """the request asked not to be cached"""
    ROLE = "role"
    """the engine only stores"""
    PROMPT_EMBEDS = "prompt_embeds"
    """the prompt is given as embeddings, which have no token ids"""
    MULTIMODAL = "multimodal"
    """the request has images or the like, whose ids are not trusted without a salt, or too long"""
    ADAPTER_UNKNOWN = "adapter_unknown"
    """the content of the request's adapter is not known yet"""
    ADAPTER_MAY_CHANGE = "adapter_may_change"
    """the engine may be told to load another adapter in place of the request's while that runs"""
    UNREADABLE = "unreadable"
    """the request's tokens, salt or ids are not what they should be, so it has no name"""
    STREAMING = "streaming"
    """the prompt of the request is still arriving"""
    SKIP_READING = "skip_reading"
    """the request must compute its whole prompt (prompt log-probabilities)"""
    RESET = "reset"
    """the cache was reset after the request arrived"""
    CANARY = "canary"
    """the last chunk of a long hit was computed to compare it with the one that is kept"""


class DropReason(enum.StrEnum):
    """Why computed blocks were not stored."""

    NO_MEMORY = "no_memory"
    """nothing could be evicted for them"""
    QUEUE_FULL = "queue_full"
    """as many bytes as allowed were already on their way"""
    IN_FLIGHT = "in_flight"
    """another request is storing the same chunk"""
    NOT_ANCHORED = "not_anchored"
    """the chunk before them is not held"""
    NOT_MAPPED = "not_mapped"
    """no memory that this engine has mapped is free"""
    SOURCE_GONE = "source_gone"
    """the engine reused their blocks before they could be copied"""
    TOO_OLD = "too_old"
    """they waited for memory longer than a store may"""
    FAILED = "failed"
    """copying them, or a chunk before them, failed"""
    ROLE = "role"
    """the engine only loads"""
    WEIGHTS_UNVERIFIED = "weights_unverified"
    """the engine's weights count by the names of their files, which are still being verified"""


class CutReason(enum.StrEnum):
    """Why a lookup was answered with less than tiers have."""

    NO_MEMORY = "no_memory"
    """there was no memory to load into, or too much is kept for other lookups"""
    TOO_LATE = "too_late"
    """no chunk came within T_load, or computing would have been quicker"""
    TOO_MANY = "too_many"
    """as many lookups as allowed were already waiting for tiers"""
    SILENT = "silent"
    """the tier had left five lookups waiting, and is left alone for a while"""
    SLOWER_THAN_COMPUTE = "slower_than_compute"
    """computing was known to be quicker than loading"""
    TAKEN_AWAY = "taken_away"
    """something of the chain was cleared or moved meanwhile, or is cleared and not gone yet"""


class Verdict(enum.StrEnum):
    """What a canary has shown."""

    EQUAL = "equal"
    """what is kept is what the engine computes, but for rounding"""
    DIFFERS = "differs"
    """it is not: an alarm"""
    NO_VERDICT = "no_verdict"
    """the chunk was taken away, or could not be read, before it was compared"""


class EvictCause(enum.StrEnum):
    """Why an entry was taken away."""

    ROOM = "room"
    """others needed its cells"""
    SUPERSEDED = "superseded"
    """a longer entry begins with all its blocks"""
    MOVED = "moved"
    """its region went back to the machine, or to another layout"""
    CLEARED = "cleared"
    """somebody ordered it"""


@dataclass(frozen=True, slots=True)
class Off:
    """Caching is off in an engine: why, in a word and in a sentence."""

    reason: OffReason
    detail: str

    def __str__(self) -> str:
        return f"{self.reason} ({self.detail})" if self.detail else str(self.reason)
