"""The scheduler role's stores: what is offered when, and what is copied in which step.

    owned      blocks the request has: copied after the forward of the step (`stores`)
    not owned  blocks of an ended or preempted request: copied before the forward (`rescues`), if
               nobody was given them in an earlier step; else dropped (`source_gone`)

Who owns a block is asked of the engine's cache manager when a copy is planned, never remembered.
For a request that is gone, its last block list is kept together with the step in which it was last
known to own them; every block given out since is noted with its step, so a block is intact exactly
if it was not given out after that step, or only in this very step, whose forward is still to come.
"""

from collections.abc import Callable, Iterable
from typing import Any

from kvtide.clock import Clock
from kvtide.core import messages as m
from kvtide.core.lending import HELD
from kvtide.core.plan import PLANNED, Granted, StorePlan
from kvtide.core.reasons import DropReason
from kvtide.engines.vllm.metadata import StepPlan, StoreJob
from kvtide.engines.vllm.session import EngineIdentity, EngineSession
from kvtide.engines.vllm.tracker import Tracker
from kvtide.metrics import Counters

ANSWER_MS_MAX = 250
"""How long an ended request waits for a grant."""
AHEAD_STEPS = 2
"""Grants are asked for at most so many step budgets ahead of what is computed."""


class Stores:
    """All stores of one engine."""

    def __init__(
        self,
        identity: EngineIdentity,
        link: EngineSession,
        number: Callable[[], int],
        clock: Clock,
        counters: Counters,
    ) -> None:
        self._identity = identity
        self._link = link
        self._number = number
        self._clock = clock
        self._counters = counters
        self._manager: Any = None
        self._step = 0
        self._given: dict[int, int] = {}  # block -> step in which it was last given out
        self._asking: dict[int, Tracker] = {}
        self._ended: list[Tracker] = []
        self._due: list[StoreJob] = []
        self._rescues: list[StoreJob] = []
        self._returned: list[int] = []

    def bind(self, kv_cache_manager: Any) -> None:
        """The engine's cache manager."""
        self._manager = kv_cache_manager

    @property
    def has_work(self) -> bool:
        """Copies of ended requests are still to be planned."""
        return bool(self._ended)

    # ---- what happens to requests

    def given_out(self, block_ids: Iterable[int]) -> None:
        """The engine gives these blocks to a request in the step being scheduled."""
        step = self._step
        for block_id in block_ids:
            self._given[block_id] = step

    def admitted(self, tracker: Tracker) -> None:
        """Blocks are allocated: ask for what the prompt will need next."""
        if tracker.store is not None:
            self._offer(tracker, self._horizon(tracker, tracker.request.num_computed_tokens))

    def computed(self, tracker: Tracker, storable_tokens: int) -> None:
        """The request is scheduled; by the end of the step so many tokens can be stored."""
        store, request = tracker.store, tracker.request
        assert store is not None
        tracker.storable_tokens = storable_tokens
        tracker.is_preempted = False
        if not tracker.prefill_end_block and storable_tokens >= request.num_prompt_tokens:
            tracker.prefill_end_block = storable_tokens // self._identity.block_tokens
        self._plan_owned(tracker, store)
        has_tail = store.tail_end_block < tracker.prefill_end_block
        horizon = self._horizon(tracker, storable_tokens)
        if has_tail or horizon // self._identity.chunk_tokens > store.next_chunk:
            self._offer(tracker, horizon, with_tail=has_tail)
        if store.is_waiting:
            tracker.blocks = self._blocks_of(request)
            tracker.blocks_step = self._step

    def _horizon(self, tracker: Tracker, computed_tokens: int) -> int:
        """Known tokens that are computed, or will be within the next steps."""
        request = tracker.request
        if computed_tokens >= request.num_prompt_tokens:
            return computed_tokens
        ahead = computed_tokens + AHEAD_STEPS * self._identity.step_tokens
        return int(min(ahead, request.num_prompt_tokens))

    def preempted(self, tracker: Tracker) -> None:
        """Its blocks are free: copy what was computed, return the rest of its grants."""
        store = tracker.store
        if store is not None:
            self._rescue(tracker, store)
            self._returned += store.take_back()
        tracker.storable_tokens = 0
        tracker.is_preempted = True

    def ended(self, tracker: Tracker, storable_tokens: int, block_ids: list[int]) -> None:
        """The request is gone; what it computed is offered a last time, tail included."""
        store, chain = tracker.store, tracker.chain
        assert store is not None
        assert chain is not None
        tracker.storable_tokens = storable_tokens
        tracker.blocks = block_ids
        tracker.blocks_step = self._step - 1
        tracker.ended_ms = self._clock.now_ms()
        chain.extend(tracker.request.all_token_ids)
        self._offer(tracker, storable_tokens, with_tail=True)
        self._ended.append(tracker)
        if not store.is_waiting:
            self._finish(tracker, store)

    # ---- questions and answers

    def _offer(self, tracker: Tracker, horizon_tokens: int, *, with_tail: bool = False) -> None:
        store, chain = tracker.store, tracker.chain
        assert store is not None
        assert chain is not None
        if store.is_asking or not self._link.is_usable:
            return
        if chain.token_count < min(horizon_tokens, tracker.request.num_tokens):
            chain.extend(tracker.request.all_token_ids)
        number = self._number()
        now_ms = self._clock.now_ms()
        offer = store.offer(number, horizon_tokens, with_tail=with_tail, now_ms=now_ms)
        if offer is None:
            return
        self._asking[number] = tracker
        if not self._link.send(offer):
            del self._asking[number]
            store.forget()

    def answered(self, answer: m.StoreAnswer) -> None:
        """The node has granted or dropped."""
        if answer.grants:
            self._link.last_grant = max(self._link.last_grant, *answer.grants)
        tracker = self._asking.pop(answer.number, None)
        store = tracker.store if tracker is not None else None
        if tracker is None or store is None or not store.answered(answer, self._clock.now_ms()):
            self._returned += answer.grants
        elif tracker.is_preempted:
            self._returned += store.take_back()

    def session_changed(self, living: Iterable[Tracker]) -> None:
        """Another session: questions are void, and so are grants.

        Those go back in the next step that finds a node; one that never gave them ignores them.
        """
        for tracker in [*living, *self._ended]:
            if tracker.store is not None:
                self._returned += tracker.store.take_back()
                tracker.store.forget()
        self._asking.clear()
        self._finish_all()

    def reset(self, living: Iterable[Tracker]) -> None:
        """Nothing is planned from now on; grants that were not planned are given up."""
        for tracker in living:
            if tracker.store is not None:
                self._give_up(tracker.store, 0)
                tracker.store = None
        self._finish_all()
        self._send_returned()

    def _finish_all(self) -> None:
        for tracker in list(self._ended):
            assert tracker.store is not None
            self._finish(tracker, tracker.store)

    # ---- planning

    def _plan_owned(self, tracker: Tracker, store: StorePlan) -> None:
        if not store.granted:
            return
        due = store.take_storable(tracker.storable_tokens)
        if due:
            block_ids = self._blocks_of(tracker.request)
            self._due += [_job(granted, block_ids) for granted in due]

    def _blocks_of(self, request: Any) -> list[int]:
        """What the engine's cache manager says the request owns now."""
        blocks: list[int] = self._manager.get_block_ids(request.request_id)[0]
        return blocks

    def _rescue(self, tracker: Tracker, store: StorePlan) -> None:
        """Copy blocks whose owner is gone, where nobody can have written them yet."""
        for granted in store.take_storable(tracker.storable_tokens):
            job = _job(granted, tracker.blocks)
            if all(self._is_intact(block_id, tracker) for block_id in job.block_ids):
                self._rescues.append(job)
            else:
                self._returned.append(granted.grant)
                self._count_drop(DropReason.SOURCE_GONE, len(job.block_ids))

    def _is_intact(self, block_id: int, tracker: Tracker) -> bool:
        given_step = self._given.get(block_id, -1)
        return given_step <= tracker.blocks_step or given_step == self._step

    def plan(self, plan: StepPlan) -> None:
        """Put this step's copies into the plan; the step is over for us."""
        for tracker in list(self._ended):
            assert tracker.store is not None
            self._plan_ended(tracker, tracker.store)
        plan.stores, self._due = self._due, []
        plan.rescues, self._rescues = self._rescues, []
        self._send_returned()
        self._step += 1

    def _send_returned(self) -> None:
        if self._returned:
            if self._link.send(m.GrantReturn(self._returned)):
                self._returned = []

    def left_alone(self, storable_tokens: int) -> None:
        """A request of an engine that only loads has ended."""
        self._count_drop(DropReason.ROLE, storable_tokens // self._identity.block_tokens)

    def _plan_ended(self, tracker: Tracker, store: StorePlan) -> None:
        assert tracker.ended_ms is not None
        self._rescue(tracker, store)
        self._offer(tracker, tracker.storable_tokens, with_tail=True)
        is_late = self._clock.now_ms() - tracker.ended_ms >= ANSWER_MS_MAX
        if is_late or not store.is_waiting or not self._link.is_usable:
            self._finish(tracker, store)

    def _finish(self, tracker: Tracker, store: StorePlan) -> None:
        self._ended.remove(tracker)
        self._give_up(store, tracker.storable_tokens // self._identity.block_tokens)

    def _give_up(self, store: StorePlan, end_block: int) -> None:
        """Nothing more of this request is copied."""
        number = store.question_number
        if number is not None and self._asking.pop(number, None) is not None:
            self._link.abandon(number)
        self._returned += store.give_up(DropReason.TOO_OLD, end_block)
        self._count_outcomes(store)

    def _count_outcomes(self, store: StorePlan) -> None:
        for outcome, blocks in store.take_outcomes().items():
            if outcome == HELD:
                self._counters.add("held_blocks", blocks)
            elif outcome != PLANNED:
                self._count_drop(DropReason(outcome), blocks)

    def _count_drop(self, reason: DropReason, blocks: int) -> None:
        self._counters.add(f"drop.{reason}", blocks)


def _job(granted: Granted, block_ids: list[int]) -> StoreJob:
    blocks = block_ids[granted.first_block : granted.end_block]
    return StoreJob(granted.grant, granted.connections, blocks, granted.run)
