"""Canaries of the scheduler role: the last chunk of a long hit, computed anew and compared.

    match ─ cut ─► load of all but one chunk ─► that is computed ─► workers compare ─► the node
            drawn   its reference is kept ...................................└─ given back

Nothing waits for a canary and no output depends on it: the request computes a chunk more, as after
a shorter hit. Workers compare the blocks with the cells in the step that has computed them, where
they would have stored them. Whatever happens to the request before is the end of its canary.

Left out: requests with adapters, whose files may have been replaced a moment ago, and engines with
a draft model that reads a block's successor (EAGLE), or whose weights are still being verified:
there what is computed may differ from what is kept though nothing is wrong.
"""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from kvtide.core import messages as m
from kvtide.core.messages import Run
from kvtide.core.plan import cut_runs, usable_blocks
from kvtide.core.reasons import MissReason
from kvtide.engines.vllm.metadata import CanaryJob, StepPlan
from kvtide.engines.vllm.session import EngineIdentity, EngineSession
from kvtide.engines.vllm.tracker import Load, Tracker
from kvtide.metrics import Counters

LOADED_CHUNKS_MIN = 3
"""A hit is long where it loads so many: what is computed anew is then a third of it at most."""
_DRAWS = 1 << 64


@dataclass(slots=True)
class _Canary:
    """Blocks [first_block, end_block) of a request, which are computed instead of loaded.

    Attributes:
        fingerprint: that under which they are kept.
        runs: where they are kept.
        preemptions: how often the request had been preempted when its hit was cut.
        load_end: what ends the load of all before them, once that has ended: the node is told
            when they have been compared, and keeps their cells until then.
        is_planned: workers compare them in the last step that was planned.
    """

    tracker: Tracker
    fingerprint: bytes
    first_block: int
    end_block: int
    runs: list[Run]
    preemptions: int
    load_end: m.LoadEnd | None = None
    is_planned: bool = False


class Canaries:
    """All canaries of one engine's requests; mostly there is none."""

    def __init__(
        self, identity: EngineIdentity, rate: float, link: EngineSession, counters: Counters
    ) -> None:
        self._chunk_blocks = identity.chunk_tokens // identity.block_tokens
        self._block_tokens = identity.block_tokens
        self._rate = 0.0 if identity.drops_last_block else rate
        self._link = link
        self._counters = counters
        self._canaries: dict[str, _Canary] = {}  # by request
        self._alarms = 0

    # ---- a hit is cut

    def cut(self, tracker: Tracker, match: m.Match) -> m.Match:
        """The match as the engine is told it: all of it, or a chunk less where a canary is drawn.

        vLLM asks again at each step until it has room; the answer is the same, unless the engine's
        own cache has changed.
        """
        self.drop(tracker)
        session = self._link.session
        request, chain = tracker.request, tracker.chain
        if not self._rate or session is None or chain is None or request.lora_request is not None:
            return match
        matched = match.chunks * self._chunk_blocks + match.blocks
        end = usable_blocks(matched, request.num_tokens, self._block_tokens)
        loaded = end - tracker.local_tokens // self._block_tokens
        if loaded < LOADED_CHUNKS_MIN * self._chunk_blocks or not self._link.are_weights_verified:
            return match
        if not self._is_drawn(request.request_id, chain.block_digest(end - 1)):
            return match
        first = end - self._chunk_blocks
        self._canaries[request.request_id] = _Canary(
            tracker,
            session.fingerprint,
            first,
            end,
            cut_runs(match.runs, self._chunk_blocks, first, end),
            request.num_preemptions,
        )
        chunks, blocks = divmod(first, self._chunk_blocks)
        return replace(match, chunks=chunks, blocks=blocks)

    def _is_drawn(self, request_id: Any, digest: bytes) -> bool:
        """By the request and what it asks for: a prefix that everybody hits is drawn now and then,
        and a request that is looked at again is drawn again."""
        draw = hashlib.sha256(f"{request_id}".encode() + digest).digest()
        return int.from_bytes(draw[:8], "big") < self._rate * _DRAWS

    # ---- its request goes on

    def load_ended(self, request_id: str, load: Load, verified_blocks: int) -> None:
        """All before the canary is loaded, or some of it failed; the node is told now or later."""
        load_end = m.LoadEnd(load.lease, verified_blocks)
        canary = self._canaries.get(request_id)
        if canary is not None and canary.first_block == load.first_block + verified_blocks:
            canary.load_end = load_end
            self._counters.add(f"miss.{MissReason.CANARY}")
            return
        self._canaries.pop(request_id, None)
        self._link.end_load(load_end)

    def plan(self, plan: StepPlan, block_ids_of: Callable[[str], list[int]]) -> None:
        """Put into a step's plan what it has computed, and give back what was compared before."""
        for request_id, canary in list(self._canaries.items()):
            tracker = canary.tracker
            is_over = tracker.request.num_preemptions != canary.preemptions
            if is_over or canary.is_planned or not self._link.are_weights_verified:
                self.drop(tracker)
            elif canary.load_end and self._is_computed(canary):
                blocks = block_ids_of(request_id)[canary.first_block : canary.end_block]
                plan.canaries.append(CanaryJob(canary.fingerprint, blocks, canary.runs))
                canary.is_planned = True

    def _is_computed(self, canary: _Canary) -> bool:
        return canary.tracker.storable_tokens >= canary.end_block * self._block_tokens

    def drop(self, tracker: Tracker) -> None:
        """No more canary of this request, whether it was compared or not."""
        canary = self._canaries.pop(tracker.request.request_id, None)
        if canary is not None and canary.load_end is not None:
            self._link.end_load(canary.load_end)

    def not_loaded(self, tracker: Tracker) -> None:
        """The engine computes all that was matched, unless its load has begun."""
        canary = self._canaries.get(tracker.request.request_id)
        if canary is not None and canary.load_end is None and tracker.load is None:
            self.drop(tracker)

    def session_changed(self) -> None:
        """Another session: what was asked for in the one before is void."""
        for canary in list(self._canaries.values()):
            self.drop(canary.tracker)

    # ---- alarms

    def take_alarm(self) -> bool:
        """Whether the node has quarantined our fingerprint since this was asked last."""
        before, self._alarms = self._alarms, self._link.alarms
        return self._alarms != before
