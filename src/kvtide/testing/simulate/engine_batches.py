"""The scheduler of a toy engine: which request computes how much in which step, in which blocks.

As vLLM's, in few words: slices of long prompts, preemption when blocks run out, priorities, aborts
at any moment, a prefix cache of its own, loads that run beside the steps, and, where it is
asynchronous, a step that is scheduled before the last one's tokens are known. Its hooks are called
in vLLM's order, on the very `SchedulerSide` that a vLLM engine has.
"""

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from kvtide.engines.vllm.metadata import StepPlan
from kvtide.testing.simulate.blocks import Blocks, Status, ToyRequest


@dataclass(slots=True)
class Cached:
    """Of requests that workers know already."""

    req_ids: list[int] = field(default_factory=list)
    new_block_ids: list[tuple[list[int]] | None] = field(default_factory=list)
    resumed_req_ids: set[int] = field(default_factory=set)


@dataclass(slots=True)
class Work:
    """What ranks compute of one request in a step."""

    request_id: int
    weights: int
    start: int
    count: int
    table: list[int]
    tokens: list[int]
    """All that are known when it is scheduled."""
    is_last: bool
    """Whether the next token follows from it."""


@dataclass(slots=True)
class Step:
    """One step, with the names of vLLM's SchedulerOutput where hooks read it."""

    num_scheduled_tokens: dict[int, int] = field(default_factory=dict)
    scheduled_cached_reqs: Cached = field(default_factory=Cached)
    preempted_req_ids: set[int] = field(default_factory=set)
    scheduled_spec_decode_tokens: dict[int, list[int]] = field(default_factory=dict)
    has_sync_kv_loads: bool = False
    total_num_scheduled_tokens: int = 0
    work: list[Work] = field(default_factory=list)
    ended: list[int] = field(default_factory=list)
    """Requests that workers may forget."""
    plan: StepPlan = field(default_factory=StepPlan)


class Batches:
    """The scheduler: requests in, steps out, outcomes in."""

    def __init__(
        self,
        side: Any,
        blocks: Blocks,
        *,
        step_tokens: int,
        sequences_max: int,
        is_async: bool,
        has_priorities: bool,
    ) -> None:
        self.side = side
        self.blocks = blocks
        self.requests: dict[int, ToyRequest] = {}
        self.waiting: list[ToyRequest] = []
        self.running: list[ToyRequest] = []
        self._step_tokens = step_tokens
        self._sequences_max = sequences_max
        self._is_async = is_async
        self._has_priorities = has_priorities
        self._ended: list[int] = []
        self.prompt_tokens = 0
        """Of all requests that were ever scheduled."""
        self._told_late: set[int] = set()
        """Preempted between two steps: the next one tells."""
        pool = SimpleNamespace(num_gpu_blocks=blocks.block_count)
        manager = SimpleNamespace(
            get_block_ids=self._block_ids, evict_blocks=blocks.evict, block_pool=pool
        )
        side.bind(manager)

    def _block_ids(self, request_id: int) -> tuple[list[int]]:
        return (list(self.requests[request_id].blocks),)

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything."""
        return bool(self.requests or self._ended) or bool(self.side.has_work)

    # ---- requests come and go

    def add(self, request: ToyRequest) -> None:
        """A request comes."""
        self.requests[request.request_id] = request
        self._enqueue(request)
        self.side.on_new_request(request)

    def _enqueue(self, request: ToyRequest, *, first: bool = False) -> None:
        if self._has_priorities:
            self.waiting.append(request)
            self.waiting.sort(key=lambda one: one.order)
        else:
            self.waiting.insert(0 if first else len(self.waiting), request)

    def finish(self, request: ToyRequest) -> None:
        """It ends: by itself, or because nobody wants it any more."""
        if request.status is Status.ENDED:
            return
        (self.running if request.status is Status.RUNNING else self.waiting).remove(request)
        is_loading = request.status is Status.LOADING and not request.is_load_over
        request.status = Status.ENDED
        used = -(-request.num_computed_tokens // self.blocks.block_tokens)
        self.side.request_finished(request, request.blocks[:used])
        self._ended.append(request.request_id)
        if not is_loading:  # else a rank may still write its blocks
            self._free(request)

    def _free(self, request: ToyRequest) -> None:
        self.blocks.let_go(request.blocks)
        request.blocks = []
        del self.requests[request.request_id]

    def reset_cache(self) -> None:
        """As `reset_prefix_cache` of vLLM, the connector's included."""
        self.blocks.forget()
        self.side.reset_cache()

    # ---- a step is made

    def schedule(self) -> Step:
        """Who computes what next; and what the connector wants done beside it."""
        step = Step()
        left = self._schedule_running(step, self._step_tokens)
        if not step.preempted_req_ids:
            self._schedule_waiting(step, left)
        step.preempted_req_ids |= self._told_late
        self._told_late = set()
        step.total_num_scheduled_tokens = sum(step.num_scheduled_tokens.values())
        step.ended, self._ended = self._ended, []
        step.plan = self.side.build_plan(step)
        for request_id, count in step.num_scheduled_tokens.items():
            request = self.requests[request_id]
            self.prompt_tokens += 0 if request.was_scheduled else request.num_prompt_tokens
            request.was_scheduled = True
            request.num_computed_tokens += count
            request.num_in_flight_tokens += count
            known = request.num_tokens + request.num_output_placeholders
            if self._is_async and request.num_computed_tokens >= known:
                request.num_output_placeholders += 1
        return step

    def _schedule_running(self, step: Step, left: int) -> int:
        index = 0
        while index < len(self.running) and left > 0:
            request = self.running[index]
            known = request.num_tokens + request.num_output_placeholders
            ends = request.num_prompt_tokens + request.max_tokens
            is_last = request.num_output_placeholders and known >= ends
            count = min(known - request.num_computed_tokens, left)
            if is_last or count <= 0:
                index += 1
                continue
            grown = self._grow(step, request, request.num_computed_tokens + count)
            if grown is None:
                break
            index = self.running.index(request) + 1
            self._scheduled(step, request, count, grown)
            left = self._step_tokens - sum(step.num_scheduled_tokens.values())
        return left

    def _grow(self, step: Step, request: ToyRequest, token_count: int) -> list[int] | None:
        """Blocks for so many tokens; others are preempted for them. None: it is itself."""
        wanted = -(-token_count // self.blocks.block_tokens) - len(request.blocks)
        while wanted > self.blocks.free_count:
            if self._take_from_waiting(step, request):
                continue
            later = [r for r in self.running if r.request_id not in step.num_scheduled_tokens]
            victim = max(later, key=lambda one: one.order) if self._has_priorities else later[-1]
            self._preempt(step, victim)
            if victim is request:
                return None
        blocks = self.blocks.take(max(0, wanted))
        request.blocks += blocks
        return blocks

    def _preempt(self, step: Step, victim: ToyRequest) -> None:
        """It loses its blocks and starts again later; steps under way still bring its tokens."""
        self.running.remove(victim)
        self._take_blocks(step, victim)
        victim.status = Status.WAITING
        self._enqueue(victim, first=True)

    def _take_blocks(self, step: Step, victim: ToyRequest) -> None:
        self.blocks.let_go(victim.blocks)
        victim.blocks = []
        victim.num_computed_tokens = 0
        victim.num_output_placeholders = 0
        victim.num_stale_tokens = victim.num_in_flight_tokens
        victim.num_preemptions += 1
        step.preempted_req_ids.add(victim.request_id)

    def _take_from_waiting(self, step: Step, besides: ToyRequest) -> bool:
        """Take the blocks of a request whose load has ended and that has no turn yet, if any."""
        for request in reversed(self.waiting):
            is_loading = request.status is Status.LOADING and not request.is_load_over
            if request.blocks and request is not besides and not is_loading:
                request.status = Status.WAITING
                request.is_load_over = request.has_load_failed = False
                self._take_blocks(step, request)
                return True
        return False

    def preempt_last(self) -> None:
        """As when blocks run out, to the last request that runs."""
        if self.running:
            step = Step()
            self._preempt(step, self.running[-1])
            self._told_late |= step.preempted_req_ids

    def _scheduled(
        self,
        step: Step,
        request: ToyRequest,
        count: int,
        blocks: list[int],
        *,
        is_first: bool = False,
    ) -> None:
        start, end = request.num_computed_tokens, request.num_computed_tokens + count
        request_id, cached = request.request_id, step.scheduled_cached_reqs
        step.num_scheduled_tokens[request_id] = count
        known = request.num_tokens + request.num_output_placeholders
        work = Work(
            request_id, request.weights, start, count, list(request.blocks), [], end >= known
        )
        work.tokens = list(request.all_token_ids)
        step.work.append(work)
        if request.was_scheduled:
            cached.req_ids.append(request_id)
            if is_first:
                cached.resumed_req_ids.add(request_id)
                blocks = list(request.blocks)
            cached.new_block_ids.append((blocks,) if blocks else None)
        self.blocks.cache(request, end)

    def _schedule_waiting(self, step: Step, left: int) -> None:
        skipped: list[ToyRequest] = []
        while self.waiting and left > 0 and len(self.running) < self._sequences_max:
            request = self.waiting.pop(0)
            if not self._is_ready(request):
                skipped.append(request)
                continue
            count = self._admit(step, request, left)
            if count is None:
                self.waiting.insert(0, request)
                break
            if not count:
                skipped.append(request)
                continue
            self.running.append(request)
            request.status = Status.RUNNING
            self._scheduled(step, request, count, [], is_first=True)
            left -= count
        self.waiting = skipped + self.waiting

    def _is_ready(self, request: ToyRequest) -> bool:
        if request.num_stale_tokens:
            return False
        if request.status is not Status.LOADING:
            return True
        if not request.is_load_over:
            return False
        request.status = Status.WAITING
        if not request.num_computed_tokens:
            self.blocks.let_go(request.blocks)
            request.blocks = []
        self.blocks.cache(request, request.num_computed_tokens)
        request.is_load_over = request.has_load_failed = False
        return True

    def _admit(self, step: Step, request: ToyRequest, left: int) -> int | None:
        """Tokens that it computes in this step; 0: it waits, or loads; None: there is no room."""
        size = self.blocks.block_tokens
        local: list[int] = []
        external = 0
        computed = request.num_computed_tokens
        if not computed:
            local = self.blocks.cached_prefix(request)
            found = self.side.matched_tokens(request, len(local) * size)
            if found is None:
                return 0
            external = found
            computed = len(local) * size + external
        count = 0 if external else min(request.num_tokens - computed, left)
        assert external or count > 0, (external, count)
        needed = -(-(computed + count) // size) - len(local) - len(request.blocks)
        while needed + self.blocks.unowned(local) > self.blocks.free_count:
            if self.running or not self._take_from_waiting(step, request):
                return None
        self.blocks.own(local)
        request.local_blocks = len(local)
        request.blocks = request.blocks + local + self.blocks.take(max(0, needed))
        self.side.allocated(request, list(request.blocks), external)
        request.num_computed_tokens = computed
        if external:
            request.status = Status.LOADING
            request.external_tokens += external
        return count

    # ---- a step has ended

    def take_output(
        self, step: Step, tokens: dict[int, int], ended: set[int], failed: set[int]
    ) -> list[ToyRequest]:
        """What ranks say of a step; the requests that have ended with it."""
        self._note_failed(failed)
        over = []
        for request_id, count in step.num_scheduled_tokens.items():
            request = self.requests.get(request_id)
            if request is None or request.status is Status.ENDED:
                continue
            request.num_in_flight_tokens -= count
            is_stale = request.num_stale_tokens > 0
            if is_stale:
                request.num_stale_tokens -= count
            token = tokens.get(request_id)
            if token is None:
                continue
            request.all_token_ids.append(token)
            if self._is_async and not is_stale:
                request.num_output_placeholders -= 1
            if len(request.generated) >= request.max_tokens:
                over.append(request)
        for request in over:
            self.finish(request)
        ended = ended - self.side.loads_ended(ended, failed) if ended or failed else ended
        for request_id in sorted(ended):
            request = self.requests[request_id]
            if request.status is Status.ENDED:
                self._free(request)
            else:
                assert request.status is Status.LOADING, (request_id, request.status)
                request.is_load_over = True
        return over

    def _note_failed(self, failed: set[int]) -> None:
        """What could not be loaded is computed: the request goes back to its first such block."""
        for request in self.waiting if failed else ():
            if request.status is not Status.LOADING:
                continue
            used = -(-request.num_computed_tokens // self.blocks.block_tokens)
            for index, block in enumerate(request.blocks[:used]):
                if block in failed:
                    good_tokens = index * self.blocks.block_tokens
                    request.external_tokens -= request.num_computed_tokens - good_tokens
                    request.num_computed_tokens = good_tokens
                    request.has_load_failed = True
                    break
