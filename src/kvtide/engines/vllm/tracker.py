"""One request as the scheduler role sees it, and which requests are left alone."""

from dataclasses import dataclass, field
from typing import Any

from vllm import envs

from kvtide.core import messages as m
from kvtide.core.chain import Chain
from kvtide.core.keys import CONTENT_ID_BYTES_MAX, Item
from kvtide.core.plan import StorePlan, usable_blocks
from kvtide.core.reasons import MissReason
from kvtide.metrics import Counters
from kvtide.settings import EngineConfig


@dataclass(slots=True)
class Question:
    """A lookup on its way, or answered. `first` is its answer while a probe asks for the rest.

    It is overdue once a look came too late for it; the look after that gives it up. Leases of its
    answers began after `asked_ms`; when they came nobody knows: maybe they lay there unread.
    """

    number: int
    asked_ms: int
    sent_ms: int
    sent_s: float
    is_pending: bool = False
    is_overdue: bool = False
    first: m.Match | None = None
    match: m.Match | None = None

    @property
    def leases(self) -> list[int]:
        """The leases that its answers carry; the probe's replaces the lookup's."""
        answers = [self.match] if self.match is not None else [self.first]
        return [answer.lease for answer in answers if answer is not None and answer.lease]


@dataclass(slots=True)
class Load:
    """A load that the engine has allocated blocks for.

    It brings blocks [first_block, end_block) of its chain, so that nobody else in this engine
    loads them meanwhile.
    """

    lease: int
    block_ids: list[int]
    chain: Chain
    first_block: int
    failed: set[int] = field(default_factory=set)
    """Blocks that a worker could not load, or whose bytes were not what was planned."""
    is_void: bool = False
    """The cache was reset meanwhile: whatever it brings is reported as failed."""

    @property
    def end_block(self) -> int:
        """The first block behind it."""
        return self.first_block + len(self.block_ids)

    @property
    def parents(self) -> list[bytes]:
        """The keys before each chunk that it brings blocks of."""
        per_chunk = self.chain.blocks_per_chunk
        chunks = range(self.first_block // per_chunk, -(-self.end_block // per_chunk))
        return [self.chain.parent(chunk) for chunk in chunks]

    def brings(self, block: int, chain: Chain) -> bool:
        """Whether this block of another request, whose chunk has the same parent, is in it."""
        if not self.first_block <= block < self.end_block:
            return False
        return self.chain.block_digest(block) == chain.block_digest(block)


@dataclass(slots=True)
class Tracker:
    """What is remembered of one request between hooks.

    Attributes:
        request: vLLM's object; its token list and counts are read when needed, never copied.
        arrived_s: when it came.
        chain: its keys; None where it is left alone.
        root: what makes the chain's root known to a node.
        no_load: why it is not looked up (any more); None while it may be.
        not_asked: why it has no lookup at the moment; it may be asked for later.
        question: the lookup in force.
        is_asked_again: its first match was too old when it could be used.
        local_tokens: tokens that the engine's own cache had at the last look.
        load: the load that runs.
        loaded_tokens: what its last load brought.
        is_counted: whether its prompt tokens were counted.
        store: None where nothing is stored (yet).
        storable_tokens: known and computed by the end of the last step.
        unverified_tokens: scheduled since another connector's loads of this request began, whose
            outcome is not known yet; 0 where there are none.
        prefill_end_block: whole blocks at the end of the prefill, whose tail is stored; 0 before.
        preemptions: how often it was preempted, as far as we have noticed.
        blocks: its block ids, for what is copied once they are its own no more.
        is_doubtful: its KV may be another adapter's: no block of it stays in the engine's cache.
    """

    request: Any
    arrived_s: float
    chain: Chain | None = None
    root: m.RegisterRoot | None = None
    no_load: MissReason | None = None
    not_asked: MissReason | None = None
    question: Question | None = None
    is_asked_again: bool = False
    local_tokens: int = 0
    load: Load | None = None
    loaded_tokens: int = 0
    is_counted: bool = False
    store: StorePlan | None = None
    storable_tokens: int = 0
    unverified_tokens: int = 0
    prefill_end_block: int = 0
    preemptions: int = 0
    blocks: list[int] = field(default_factory=list)
    is_doubtful: bool = False

    def is_verified(self, token_count: int, *, has_sync_loads: bool) -> bool:
        """Whether what it has so far may be stored, as a step that computes so much is planned.

        Within MultiConnector another connector may load during a step, and say only in its output
        that it failed. Outputs come in order: fewer tokens in flight than were scheduled since
        mean that it has come, and vLLM has taken back what failed.
        """
        if self.unverified_tokens and self.request.num_in_flight_tokens < self.unverified_tokens:
            self.unverified_tokens = 0
        if has_sync_loads or self.unverified_tokens:
            self.unverified_tokens += token_count
        return not self.unverified_tokens

    def count_tokens(self, computed_tokens: int, block_tokens: int, counters: Counters) -> None:
        """Contract C19: a request counts when it is first scheduled after its last load.

        `computed_tokens`: what need not be computed any more as this step begins.
        """
        request = self.request
        if self.is_counted:
            counters.add("recomputed_tokens", request.num_tokens - computed_tokens)
            return
        self.is_counted = True
        external = min(self.loaded_tokens, computed_tokens)
        tokens = request.num_prompt_tokens
        counters.add("tokens.external", external)
        counters.add("tokens.local", computed_tokens - external)
        counters.add("tokens.computed", tokens - computed_tokens)
        usable = usable_blocks(tokens // block_tokens, tokens, block_tokens) * block_tokens
        if computed_tokens < usable and (self.no_load is not None or not external):
            reason = self.no_load or self.not_asked or MissReason.ABSENT
            counters.add(f"miss.{reason}")


def refusal(request: Any, settings: EngineConfig) -> MissReason | None:
    """Why this request is neither looked up nor stored; None where it may be."""
    params = request.kv_transfer_params
    if isinstance(params, dict) and params.get("kvtide") == "off":
        return MissReason.OPTED_OUT
    if request.prompt_embeds is not None:
        return MissReason.PROMPT_EMBEDS
    if request.resumable:
        return MissReason.STREAMING
    if request.lora_request is not None and adapters_may_change(settings):
        return MissReason.ADAPTER_MAY_CHANGE
    trusted = request.cache_salt or settings.multimodal_ids == "trusted"
    features = request.mm_features or ()
    if features and not (trusted and all(_content_id(feature) for feature in features)):
        return MissReason.MULTIMODAL
    return None


def adapters_may_change(settings: EngineConfig) -> bool:
    """Whether an adapter may be loaded in place of another while requests of that one run.

    vLLM's front end then tells the workers, and the scheduler hears nothing of it.
    """
    return envs.VLLM_ALLOW_RUNTIME_LORA_UPDATING and settings.weights_change != "reset"


def items_of(request: Any) -> list[Item]:
    """The multimodal items of a request, in order."""
    return [
        Item(feature.mm_position.offset, feature.mm_position.length, _content_id(feature))
        for feature in sorted(request.mm_features or (), key=lambda f: f.mm_position.offset)
    ]


def _content_id(feature: Any) -> bytes:
    """What names an item's content; empty where that is no text, or longer than a name may be.

    It may be the caller's own.
    """
    try:
        content_id: bytes = feature.identifier.encode()
    except (AttributeError, UnicodeError):
        return b""
    return content_id if len(content_id) <= CONTENT_ID_BYTES_MAX else b""
