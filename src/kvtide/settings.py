"""The table of settings: every key with its default, its parser, its owner and its words.

The parser (`kvtide.config`), the environment's names and docs/configuration.md follow from it.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from kvtide import tier_entries, tier_values, values
from kvtide.tier_entries import TierEntry

Owner = Literal["node", "engine"]

ENVIRONMENT_PREFIX = "KVTIDE_"
"""Of a key's name in the environment."""

DISK_KEYS = ("disk_path", "disk_bytes_max", "disk_write", "disk_sync")
"""Those that give one disk in short; it needs the first two."""


@dataclass(frozen=True, slots=True)
class NodeConfig:
    """Settings of the node process."""

    host_bytes: int | None  # bytes; None: a quarter of what is available, at most 64 GiB
    linger_s: float  # seconds from the last engine's leaving to the node's end
    http_address: values.HTTPAddress | None  # None: no HTTP
    http_token: str | None = field(repr=False)  # None: pages that need one answer 403
    disk_path: Path | None  # None: nothing is kept on disk
    disk_bytes_max: int | Literal["auto"] | None  # bytes; auto: 80 % of what is free there
    disk_write: Literal["through", "on_reuse", "on_eviction"]
    disk_sync: Literal["none", "sealed", "each"]
    tiers: tuple[TierEntry, ...] | None = field(repr=False)  # in the order of asking
    load_policy: Literal["estimate", "always"]

    @property
    def places(self) -> tuple[TierEntry, ...]:
        """All places below host memory, however they were given, in the order of asking."""
        if self.disk_path is None or self.disk_bytes_max is None:
            return self.tiers or ()
        size = self.disk_bytes_max
        return (tier_values.disk_entry(self.disk_path, size, self.disk_write, self.disk_sync),)


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Settings of one engine's connector, equal in all its processes."""

    enabled: bool  # no unit; False: the engine serves as if kvtide were not there
    chunk_tokens: int  # tokens, before rounding down to whole blocks
    multimodal_ids: Literal["salted", "trusted"]
    weights_change: Literal["none", "reset"]
    any_engine_version: bool
    start_node: bool
    canary_rate: float  # share of long hits, 0 to 1


@dataclass(frozen=True, slots=True)
class Key:
    """One setting. `parse` takes text, or a value of YAML or JSON, and raises ValueError."""

    name: str
    default: object
    parse: Callable[[object], Any]
    owner: Owner
    accepts: str
    doc: str
    show: Callable[[object], str] = values.show
    secret: bool = False
    """Whether what was given for it is never printed; `show` says what may be."""

    @property
    def variable(self) -> str:
        """Its name in the environment."""
        return ENVIRONMENT_PREFIX + self.name.upper()


KEYS = (
    Key(
        "host_bytes",
        default=None,
        parse=values.parse_host_bytes,
        owner="node",
        accepts="`auto`, or a size such as 16GiB",
        doc="Most memory that the node keeps KV cache in; it grows there as it is used. `auto` is"
        " a quarter of the memory available when the node starts (the smaller of MemAvailable and"
        " the cgroup's limit minus its usage), at most 64 GiB. 3 % of the machine, and of the"
        " cgroup's limit, stay free, 256 MiB at least. Asked for more than that leaves,"
        " `kvtide serve` does not start, and a node that an engine starts makes do with less. It"
        " must hold 16 chunks of a model, or that model's engines stay off (`host_too_small`): 512"
        " MiB for 8B parameters (32 layers with 8 heads of 128 in bf16: 128 KiB for each of 256"
        " tokens), 2 GiB for 7B without grouped heads (512 KiB).",
        show=values.show_host_bytes,
    ),
    Key(
        "linger_s",
        default=600.0,
        parse=values.parse_seconds,
        owner="node",
        accepts="seconds, 0 or more",
        doc="How long the node, and what it keeps, stays after its last engine has left; 0: not at"
        " all. A node that no engine has come to yet waits for one for 60 s at least. A node in"
        " the foreground (`kvtide serve`) stays unless this is set.",
    ),
    Key(
        "http_address",
        default=None,
        parse=values.parse_address,
        owner="node",
        accepts="address:port, such as 127.0.0.1:9470, [::1]:9470 or localhost:9470",
        doc="Where the node serves `/healthz`, `/metrics` and `/status`. Not given: no HTTP.",
    ),
    Key(
        "http_token",
        default=None,
        parse=values.parse_token,
        owner="node",
        accepts="text without spaces, at most 1024 ASCII characters",
        doc="Bearer token for `/status`. Not given: `/status` is refused; the other two pages"
        " never need one. Useless, so an error, without `http_address`.",
        show=values.show_secret,
        secret=True,
    ),
    Key(
        "disk_path",
        default=None,
        parse=tier_values.parse_path,
        owner="node",
        accepts="an absolute path, such as /mnt/nvme/kvtide",
        doc="Directory, made if need be, where the node keeps KV cache on disk: what it holds is"
        " found again after a restart of engine, node or machine. One node has it at a time. Not"
        " given: host memory is the only place.",
    ),
    Key(
        "disk_bytes_max",
        default=None,
        parse=tier_values.parse_disk_bytes,
        owner="node",
        accepts="a size such as 2TiB, or `auto`",
        doc="Most bytes that kvtide's files in `disk_path` take, as the file system counts them."
        " `auto`: 80 % of what is free there when the node starts, what it holds already included;"
        " more where there is more later. Where less is set than is there, a start evicts for"
        " up to a second; the rest goes while the node serves, and nothing is stored before."
        " Needed with `disk_path`.",
        show=values.show_bytes,
    ),
    Key(
        "disk_write",
        default="through",
        parse=values.one_of(*tier_entries.WRITE),
        owner="node",
        accepts="`through`, `on_reuse` or `on_eviction`",
        doc="When a chunk is written to disk: as soon as it is stored; when it is matched for the"
        " first time; when host memory becomes short. Only with `through` is what was stored found"
        " again after any end of the node. Only beside `disk_path`.",
    ),
    Key(
        "disk_sync",
        default="sealed",
        parse=values.one_of(*tier_values.DISK_SYNC),
        owner="node",
        accepts="`none`, `sealed` or `each`",
        doc="When the drive is told to make what was written durable against a loss of power:"
        " never, when a segment file is full, after each write. What is lost is a miss, whatever"
        " stands here; an end of the node or of the engine loses nothing. Only"
        " beside `disk_path`.",
    ),
    Key(
        "tiers",
        default=None,
        parse=tier_values.parse_tiers,
        owner="node",
        accepts="a list, such as `[{type: disk, path: /mnt/nvme/kvtide, bytes_max: 2TiB}]`; in the"
        ' environment JSON: `[{"type": "disk", "path": "/mnt/nvme/kvtide", "bytes_max": "2TiB"}]`',
        doc="The places below host memory, in the order in which they are asked, nearest first;"
        " [Tiers](#tiers) says what an entry of each type may name. One disk alone may be given by"
        " `disk_path` and the other `disk_…` settings instead; giving both is an error.",
        show=tier_entries.show,
        secret=True,
    ),
    Key(
        "load_policy",
        default="estimate",
        parse=values.one_of("estimate", "always"),
        owner="node",
        accepts="`estimate` or `always`",
        doc="Whether what lies below host memory is loaded. `estimate`: unless measurements say"
        " that computing it is at least twice as quick. `always`: whatever they say.",
    ),
    Key(
        "enabled",
        default=True,
        parse=values.parse_flag,
        owner="engine",
        accepts="true or false",
        doc="With `false` the engine serves as if kvtide were not there.",
    ),
    Key(
        "chunk_tokens",
        default=values.CHUNK_TOKENS_DEFAULT,
        parse=values.parse_chunk_tokens,
        owner="engine",
        accepts=f"a whole number from {values.CHUNK_TOKENS_MIN} to {values.CHUNK_TOKENS_MAX}",
        doc="Tokens that are stored and moved together, rounded down to whole blocks of the"
        " engine. Hits do not depend on it: they are as fine as the engine's own prefix cache."
        " Engines share only if theirs are equal.",
    ),
    Key(
        "multimodal_ids",
        default="salted",
        parse=values.one_of("salted", "trusted"),
        owner="engine",
        accepts="`salted` or `trusted`",
        doc="Whether requests with images, audio or video are cached. `salted`: only those that"
        " carry a `cache_salt`, because a client may choose an item's id and the engine does not"
        " tell such an id from a hash of the content. `trusted`: all, on the word of whoever sets"
        " this that equal ids mean equal content.",
    ),
    Key(
        "weights_change",
        default="none",
        parse=values.one_of("none", "reset"),
        owner="engine",
        accepts="`none` or `reset`",
        doc="Whether weights may change under a running engine. `none`: an engine set up for it is"
        " not cached, nor are requests with adapters where VLLM_ALLOW_RUNTIME_LORA_UPDATING is"
        " set. `reset`: they are, on the word of whoever sets this that the prefix cache, external"
        " part included, is reset on each update, and on each load of an adapter in place.",
    ),
    Key(
        "any_engine_version",
        default=False,
        parse=values.parse_flag,
        owner="engine",
        accepts="true or false",
        doc="With `true` kvtide also works in versions of the engine that it was not tested with.",
    ),
    Key(
        "start_node",
        default=True,
        parse=values.parse_flag,
        owner="engine",
        accepts="true or false",
        doc="Whether the connector starts a node when none is there. With `false` it waits for"
        " one, uncached, for as long as that takes.",
    ),
    Key(
        "canary_rate",
        default=0.001,
        parse=values.parse_share,
        owner="engine",
        accepts="a number from 0 to 1",
        doc="Of how many long hits (three chunks or more, without an adapter) the last chunk is"
        " computed instead of loaded, and compared with what is kept. Where it differs by more"
        " than rounding, the engine's fingerprint is quarantined until `kvtide clear`: what is"
        " kept for it is cleared, its engines serve uncached, and the node raises an alarm. 0: of"
        " none.",
    ),
)
"""All settings; the parser, the environment's names and docs/configuration.md follow from it."""
