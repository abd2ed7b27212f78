"""Stores of the scheduler role: what is asked for when, and what is copied in which step.

    owned   blocks the request has: copied after the forward of the step (`stores`)
    left    blocks of an ended or preempted request: copied before the forward (`rescues`), if
            nobody was given them in an earlier step; else dropped (`source_gone`)

Who owns a block is asked of the engine's cache manager when a copy is planned, never remembered.
Of a request that is gone, its last block list is kept, with the last step in which it owned them;
every block given out is noted with its step, so a block is intact exactly if it was not given out
after that step, or only in this very step, whose forward is still to come.

Copies hold up the engine's main thread: a step copies no more than `COPIED_STEPS` steps compute,
and what is due beyond that comes in the next. Of ended requests what would be lost by waiting
may take as much again: blocks that this step gives out, and what is left at their deadline. What
is beyond that too is dropped.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from kvtide.bounds import T_ANSWER_MS
from kvtide.clock import Clock
from kvtide.core import messages as m
from kvtide.core.lending import HELD
from kvtide.core.plan import PLANNED, Granted, StorePlan
from kvtide.core.reasons import DropReason
from kvtide.engines.vllm.metadata import StepPlan, StoreJob
from kvtide.engines.vllm.session import EngineIdentity, EngineSession
from kvtide.engines.vllm.tracker import Tracker
from kvtide.metrics import Counters

ANSWER_MS_MAX = T_ANSWER_MS
"""T_answer: how long an ended request waits for a grant."""
AHEAD_STEPS = 2
"""Grants are asked for at most so many step budgets ahead of what is computed."""
COPIED_STEPS = 2
"""Step budgets whose blocks are copied in one step, one chunk at least: as fast as blocks are
computed, and as much again for what a restarted node has lost."""


class _Budget:
    """Blocks that may still be copied in a step."""

    def __init__(self, blocks_max: int) -> None:
        self._blocks_max = self.blocks = blocks_max

    def take(self, granted: Granted) -> bool:
        """Whether these may be copied; then they count."""
        blocks = granted.run.cell_count
        is_within = blocks <= self.blocks
        # What is too much ends the step's copies: no later grant overtakes an earlier one.
        self.blocks -= blocks if is_within else self.blocks
        return is_within

    def renew(self) -> None:
        """Another step."""
        self.blocks = self._blocks_max


@dataclass(frozen=True, slots=True)
class _Left:
    """The stores of a request whose blocks are its own no more.

    Attributes:
        root: what makes its chain's root known to a node.
        blocks: those it had, in order.
        last_step: the last step in which they were its own.
        storable_tokens: what was known and computed by then.
        left_ms: when it ended, or was preempted.
        has_ended: then its blocks count; one that was preempted will be counted when it ends.
    """

    store: StorePlan
    root: m.RegisterRoot
    blocks: list[int]
    last_step: int
    storable_tokens: int
    left_ms: int
    has_ended: bool

    @property
    def end_block(self) -> int:
        """The first block that is not storable."""
        return self.storable_tokens // self.store.chain.block_tokens


class Stores:
    """All stores of one engine."""

    def __init__(
        self,
        identity: EngineIdentity,
        link: EngineSession,
        number: Callable[[], int],
        register: Callable[[m.RegisterRoot], bool],
        clock: Clock,
        counters: Counters,
    ) -> None:
        """`number` gives the next question's; `register` makes a root known to the node."""
        self._identity = identity
        self._link = link
        self._number = number
        self._register = register
        self._clock = clock
        self._counters = counters
        self._manager: Any = None
        self._step = 0
        self._given: dict[int, int] = {}  # block -> last step before this one that gave it out
        self._giving: list[int] = []  # blocks that this step gives out
        self._asking: dict[int, StorePlan] = {}
        self._left: list[_Left] = []
        self._due: list[StoreJob] = []
        copied_tokens = max(COPIED_STEPS * identity.step_tokens, identity.chunk_tokens)
        self._budget = _Budget(copied_tokens // identity.block_tokens)
        self._last_budget = _Budget(copied_tokens // identity.block_tokens)
        """For what would be lost by waiting."""
        self._rescues: list[StoreJob] = []

    def bind(self, kv_cache_manager: Any) -> None:
        """The engine's cache manager."""
        self._manager = kv_cache_manager

    @property
    def has_work(self) -> bool:
        """Copies of requests that are gone are still to be planned."""
        return bool(self._left)

    @property
    def is_asking(self) -> bool:
        """An offer has no answer yet."""
        return bool(self._asking)

    # ---- what happens to requests

    def given_out(self, block_ids: Iterable[int]) -> None:
        """The engine gives these blocks to a request in the step being scheduled.

        It may name again what the request was given in an earlier step.
        """
        self._giving.extend(block_ids)

    def admitted(self, tracker: Tracker) -> None:
        """Blocks are allocated: ask for what the prompt will need next."""
        self._ask_ahead(tracker, self._horizon(tracker, tracker.request.num_computed_tokens))

    def computed(self, tracker: Tracker) -> None:
        """The request is scheduled: by the end of the step more of its tokens can be stored."""
        store, request, storable_tokens = tracker.store, tracker.request, tracker.storable_tokens
        assert store is not None
        if not tracker.prefill_end_block and storable_tokens >= request.num_prompt_tokens:
            tracker.prefill_end_block = storable_tokens // self._identity.block_tokens
        self._plan_owned(tracker, store)
        if store.has_storable(storable_tokens):
            return  # the next steps have enough to copy
        has_tail = store.tail_end_block < tracker.prefill_end_block
        horizon = self._horizon(tracker, storable_tokens)
        if has_tail or horizon // self._identity.chunk_tokens > store.next_chunk:
            self._ask_ahead(tracker, horizon, with_tail=has_tail)

    def _horizon(self, tracker: Tracker, computed_tokens: int) -> int:
        """Known tokens that are computed, or will be within the next steps."""
        request = tracker.request
        if computed_tokens >= request.num_prompt_tokens:
            return computed_tokens
        ahead = computed_tokens + AHEAD_STEPS * self._identity.step_tokens
        return int(min(ahead, request.num_prompt_tokens))

    def left(
        self, tracker: Tracker, storable_tokens: int, block_ids: list[int], *, has_ended: bool
    ) -> None:
        """Its blocks are free: what it computed is offered a last time, tail included."""
        store, root = tracker.store, tracker.root
        assert store is not None
        assert root is not None
        tracker.store = None
        store.chain.extend(tracker.request.all_token_ids)
        left = _Left(
            store,
            root,
            block_ids,
            self._step - 1,
            storable_tokens,
            self._clock.now_ms(),
            has_ended,
        )
        self._left.append(left)
        self._ask_last(left)
        if not store.is_waiting:
            self._finish(left)

    # ---- questions and answers

    @property
    def _may_ask(self) -> bool:
        """What is stored outlives the engine: only what is known to be named right may be."""
        return self._link.is_usable and self._link.are_weights_verified

    def _ask_ahead(
        self, tracker: Tracker, horizon_tokens: int, *, with_tail: bool = False
    ) -> None:
        """Ask for what a living request will need."""
        store, root = tracker.store, tracker.root
        if store is None or root is None or store.is_asking or not self._may_ask:
            return
        if store.chain.token_count < min(horizon_tokens, tracker.request.num_tokens):
            store.chain.extend(tracker.request.all_token_ids)
        self._ask(store, root, horizon_tokens, with_tail=with_tail)

    def _ask_last(self, left: _Left) -> None:
        """Return what is granted behind the last storable block, ask for what is missing."""
        self._link.return_grants(left.store.take_back(left.end_block))
        if not left.store.is_asking and self._may_ask:
            self._ask(left.store, left.root, left.storable_tokens, with_tail=True)

    def _ask(
        self, store: StorePlan, root: m.RegisterRoot, horizon_tokens: int, *, with_tail: bool
    ) -> None:
        number, now_ms = self._number(), self._clock.now_ms()
        offer = store.offer(number, horizon_tokens, with_tail=with_tail, now_ms=now_ms)
        if offer is None:
            return
        if self._register(root) and self._link.ask(offer):
            self._asking[number] = store
        else:
            store.withdraw()

    def answered(self, answer: m.StoreAnswer) -> None:
        """The node has granted or dropped."""
        store = self._asking.pop(answer.number, None)
        if store is None or not store.answered(answer, self._clock.now_ms()):
            self._link.return_grants(answer.grants)

    def session_changed(self, living: Iterable[Tracker]) -> None:
        """Another session: questions are void, and so are grants.

        Those go back, and a node that never gave them ignores them.
        """
        self._asking.clear()
        for tracker in living:
            if tracker.store is not None:
                self._link.return_grants(tracker.store.forget())
        self._finish_all()

    def reset(self, living: Iterable[Tracker]) -> None:
        """Nothing is planned from now on; grants that were not planned are given up."""
        for tracker in living:
            if tracker.store is not None:
                self._give_up(tracker.store)
                self._account(tracker.store, tracker.storable_tokens)
                tracker.store = None
        self._finish_all()

    def uncache(self, block_ids: Iterable[int]) -> None:
        """The engine's own prefix cache forgets these blocks; whoever has them keeps them."""
        self._manager.evict_blocks(set(block_ids))

    def drop_all(self) -> None:
        """Nothing of requests that have ended is stored any more, and the engine's own prefix
        cache forgets everything."""
        self._finish_all()
        self.uncache(range(self._manager.block_pool.num_gpu_blocks))

    def _finish_all(self) -> None:
        for left in list(self._left):
            self._finish(left)

    # ---- planning

    def block_ids_of(self, request_id: str) -> list[int]:
        """The blocks that a request owns now, in order."""
        block_ids: list[int] = self._manager.get_block_ids(request_id)[0]
        return block_ids

    def _plan_owned(self, tracker: Tracker, store: StorePlan) -> None:
        if not store.granted or not self._budget.blocks:
            return
        due = store.take_storable(tracker.storable_tokens, self._budget.take)
        if due:
            block_ids = self.block_ids_of(tracker.request.request_id)
            for granted in due:
                store.mark(granted.first_block, granted.end_block, PLANNED)
                self._due.append(_job(granted, block_ids))

    def _rescue(self, left: _Left, *, is_late: bool) -> None:
        """Copy blocks whose owner is gone, where nobody can have written them yet."""
        if not left.store.granted:
            return
        given = set(self._giving)

        def may_copy(granted: Granted) -> bool:
            if self._budget.take(granted):
                return True
            is_lost_else = is_late or not given.isdisjoint(_job(granted, left.blocks).block_ids)
            return is_lost_else and self._last_budget.take(granted)

        for granted in left.store.take_storable(left.storable_tokens, may_copy):
            job = _job(granted, left.blocks)
            outcome: str = PLANNED
            if all(self._is_intact(block_id, left.last_step) for block_id in job.block_ids):
                self._rescues.append(job)
            else:
                self._link.return_grants([granted.grant])
                outcome = DropReason.SOURCE_GONE
            left.store.mark(granted.first_block, granted.end_block, outcome)

    def _is_intact(self, block_id: int, last_step: int) -> bool:
        return self._given.get(block_id, -1) <= last_step

    def plan(self, plan: StepPlan) -> None:
        """Put this step's copies into the plan; the step is over for us."""
        for left in list(self._left):
            self._plan_left(left)
        plan.stores, self._due = self._due, []
        plan.rescues, self._rescues = self._rescues, []
        for block_id in self._giving:
            self._given[block_id] = self._step
        self._giving.clear()
        self._step += 1
        self._budget.renew()
        self._last_budget.renew()

    def _plan_left(self, left: _Left) -> None:
        is_late = self._clock.now_ms() - left.left_ms >= ANSWER_MS_MAX
        self._rescue(left, is_late=is_late)
        self._ask_last(left)
        is_waiting = left.store.is_waiting if self._link.is_usable else left.store.granted
        if is_late or not is_waiting:
            self._finish(left)

    def left_alone(self, storable_tokens: int) -> None:
        """A request of an engine that only loads has ended."""
        self._count_drop(DropReason.ROLE, storable_tokens // self._identity.block_tokens)

    def _finish(self, left: _Left) -> None:
        self._left.remove(left)
        self._give_up(left.store)
        if left.has_ended:
            self._account(left.store, left.storable_tokens)

    def _account(self, store: StorePlan, storable_tokens: int) -> None:
        end_block = storable_tokens // self._identity.block_tokens
        is_verified = self._link.are_weights_verified
        otherwise = DropReason.TOO_OLD if is_verified else DropReason.WEIGHTS_UNVERIFIED
        for outcome, blocks in store.outcomes(end_block, otherwise).items():
            if outcome == HELD:
                self._counters.add("held_blocks", blocks)
            elif outcome != PLANNED:
                self._count_drop(DropReason(outcome), blocks)

    def _give_up(self, store: StorePlan) -> None:
        """Nothing more of this request is copied."""
        number = store.question_number
        if number is not None and self._asking.pop(number, None) is not None:
            self._link.abandon(number)
        store.withdraw()
        self._link.return_grants(store.take_back())

    def _count_drop(self, reason: DropReason, blocks: int) -> None:
        self._counters.add(f"drop.{reason}", blocks)


def _job(granted: Granted, block_ids: list[int]) -> StoreJob:
    blocks = block_ids[granted.first_block : granted.end_block]
    return StoreJob(granted.grant, granted.connections, blocks, granted.run)
