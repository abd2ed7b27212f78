"""The scheduler role: decides what is loaded and stored, and never waits longer than a moment.

    on_new_request      keys are hashed, the lookup is sent
    matched_tokens      the answer, if it is there; None while it is not; 0 when it comes too late
    allocated           the blocks are known: a load is planned, stores are asked for
    build_plan          what the workers do in this step
    loads_ended         what they report
    request_finished    the last blocks are asked for; they are copied in the next step

Whatever the node says arrives in a queue of `EngineSession` and is taken in at these hooks, so all
state here belongs to the scheduler's thread. A step costs nothing for requests that have nothing
to load or store: one dictionary lookup and two comparisons.
"""

import secrets
import time
from typing import Any

from kvtide.clock import Clock
from kvtide.config import EngineConfig
from kvtide.core import messages as m
from kvtide.core.chain import Chain
from kvtide.core.keys import root_key, salt_digest
from kvtide.core.leases import LEASE_MS
from kvtide.core.plan import StorePlan, cut_runs, usable_blocks
from kvtide.core.reasons import MissReason
from kvtide.engines.vllm.metadata import LoadJob, StepPlan
from kvtide.engines.vllm.session import EngineIdentity, EngineSession, Session
from kvtide.engines.vllm.stores import Stores
from kvtide.engines.vllm.tracker import Load, Question, Tracker, items_of, refusal
from kvtide.engines.vllm.weights import AdapterDigests
from kvtide.metrics import Counters

STEP_WAIT_S = 0.001
"""T_lookup: waiting for answers in one step, all requests together."""
ANSWER_MS_MAX = 250
"""T_answer: no first word by then is a miss."""
PENDING_MS_MAX = 2_000
"""T_load: so long a promised answer may take."""
EPOCH_BYTES = 16


class SchedulerSide:
    """The scheduler's half of the connector."""

    def __init__(
        self,
        identity: EngineIdentity,
        settings: EngineConfig,
        session: EngineSession,
        adapters: AdapterDigests,
        clock: Clock,
    ) -> None:
        self._identity = identity
        self._settings = settings
        self._link = session
        self._adapters = adapters
        self._clock = clock
        self._epoch = b""
        self._trackers: dict[str, Tracker] = {}
        self._questions: dict[int, Tracker] = {}
        self._loads: dict[str, Load] = {}
        self._loading: dict[bytes, str] = {}  # chunk or block being loaded -> request
        self._new_loads: list[LoadJob] = []
        self._condemned: list[str] = []
        self._session: Session | None = None
        self._roots: set[bytes] = set()
        self._fingerprint = b""
        self._next_number = 1
        self._wait_left_s = STEP_WAIT_S
        self.counters = Counters()
        self._stats: dict[str, int] = {}
        self._stores = Stores(identity, session, self._number, clock, self.counters)

    def bind(self, kv_cache_manager: Any) -> None:
        """The engine's cache manager, which says who owns a block."""
        self._stores.bind(kv_cache_manager)

    # ---- requests come

    def on_new_request(self, request: Any) -> None:
        """Hash the keys and send the lookup; the answer arrives while the request queues."""
        self._take_in()
        tracker = Tracker(request=request, arrived_s=time.monotonic())
        self._trackers[request.request_id] = tracker
        tracker.no_load = refusal(request, self._settings)
        if tracker.no_load is not None:
            return
        root = self._root(request)
        if isinstance(root, MissReason):
            tracker.no_load = root
            return
        identity = self._identity
        tracker.chain = Chain(
            root, identity.block_tokens, identity.chunk_tokens, items_of(request)
        )
        if not identity.may_load:
            tracker.no_load = MissReason.ROLE
        elif request.skip_reading_prefix_cache:
            tracker.no_load = MissReason.SKIP_READING
        else:
            self._ask(tracker)

    def _root(self, request: Any) -> bytes | MissReason:
        """The root key of a request, registered with the node; or why there is none."""
        if not self._fingerprint:
            return MissReason.NODE_GONE
        adapter = b""
        if request.lora_request is not None:
            digest = self._adapters.digest(request.lora_request.lora_path)
            if digest is None:
                return MissReason.ADAPTER_UNKNOWN
            adapter = digest
        salt = request.cache_salt
        root = root_key(self._fingerprint, epoch=self._epoch, salt=salt, adapter=adapter)
        if root not in self._roots and self._link.is_usable:
            self._link.send(m.RegisterRoot(root, self._epoch, salt_digest(salt)))
            self._roots.add(root)
        return root

    def _number(self) -> int:
        number = self._next_number
        self._next_number += 1
        return number

    # ---- lookups

    def _ask(self, tracker: Tracker) -> None:
        """Send the lookup; without a node the request simply has no question."""
        chain, request = tracker.chain, tracker.request
        assert chain is not None
        if not self._link.is_usable or self._root(request) != chain.root:
            return
        chain.extend(request.all_token_ids)
        block_tokens = chain.block_tokens
        most = usable_blocks(chain.token_count // block_tokens, request.num_tokens, block_tokens)
        chunks, blocks = divmod(most, chain.blocks_per_chunk)
        if not most:
            return
        lookup = m.Lookup(
            self._number(),
            chain.root,
            b"".join(chain.keys[:chunks]),
            chain.short_digests(chunks, blocks),
        )
        if self._link.send(lookup):
            tracker.question = Question(lookup.number, self._clock.now_ms(), time.monotonic())
            self._questions[lookup.number] = tracker

    def _take_in(self, wait_s: float = 0.0) -> None:
        """Take in what the node has said; a new session voids what was asked before."""
        if self._link.session is not self._session:
            self._session_changed(self._link.session)
        for answer in self._link.take_answers(wait_s):
            match answer:
                case m.StoreAnswer():
                    self._stores.answered(answer)
                case m.Pending(number):
                    tracker = self._questions.get(number)
                    if tracker is not None and tracker.question is not None:
                        tracker.question.is_pending = True
                case m.Match():
                    self._matched(answer)

    def _session_changed(self, session: Session | None) -> None:
        self._session = session
        self._questions.clear()
        self._roots.clear()
        for tracker in self._trackers.values():
            tracker.question = None
        self._stores.session_changed(self._trackers.values())
        if session is None:
            return
        if self._fingerprint and session.fingerprint != self._fingerprint:
            self.reset_cache()
        self._fingerprint = session.fingerprint

    def _matched(self, match: m.Match) -> None:
        """An answer; the chunk where it ends may be worth a second question."""
        tracker = self._questions.pop(match.number, None)
        question = tracker.question if tracker is not None else None
        if tracker is None or question is None or question.number != match.number:
            self._release(match.lease)
            return
        self.counters.observe_s("lookup", time.monotonic() - question.sent_s)
        if question.first is not None:
            question.match = _joined(question.first, match)
            if match.lease:
                self._release(question.first.lease)
        elif match.probe and self._probe(tracker, question, match):
            return
        else:
            question.match = match
        question.answered_ms = self._clock.now_ms()

    def _probe(self, tracker: Tracker, question: Question, match: m.Match) -> bool:
        chain = tracker.chain
        assert chain is not None
        blocks = min(
            chain.blocks_per_chunk,
            usable_blocks(
                chain.token_count // chain.block_tokens,
                tracker.request.num_tokens,
                chain.block_tokens,
            )
            - match.chunks * chain.blocks_per_chunk,
        )
        probe = m.Probe(
            self._number(),
            chain.root,
            chain.parent(match.chunks),
            chain.short_digests(match.chunks, blocks),
        )
        if not self._link.send(probe):
            return False
        question.first = match
        question.number = probe.number
        self._questions[probe.number] = tracker
        return True

    def _release(self, lease: int) -> None:
        if lease:
            self._link.send(m.LeaseRelease(lease))

    def _drop_question(self, tracker: Tracker) -> None:
        """The answer, if any, will not be used."""
        question, tracker.question = tracker.question, None
        if question is not None:
            self._questions.pop(question.number, None)
            for lease in question.leases:
                self._release(lease)

    # ---- matched tokens

    def matched_tokens(self, request: Any, local_tokens: int) -> int | None:
        """External tokens behind `local_tokens`; None while the answer is not there."""
        self._take_in()
        tracker = self._trackers.get(request.request_id)
        if tracker is None:
            return 0
        tracker.local_tokens = local_tokens
        if tracker.chain is None or tracker.no_load is not None:
            return 0
        match = self._match_of(tracker)
        if match is None:
            return None if tracker.question is not None else 0
        block_tokens = self._identity.block_tokens
        matched = match.chunks * tracker.chain.blocks_per_chunk + match.blocks
        matched -= self._identity.drops_last_block
        usable = usable_blocks(matched, request.num_tokens, block_tokens)
        external = usable * block_tokens - local_tokens
        if external <= 0:
            return 0
        if self._is_being_loaded(tracker, match, local_tokens // block_tokens):
            return None
        return external

    def _match_of(self, tracker: Tracker) -> m.Match | None:
        """The match in force; where there is none, and no question either, there will be none."""
        question = tracker.question
        if question is not None and question.match is not None:
            if self._clock.now_ms() - question.answered_ms < LEASE_MS * 3 // 4:
                return question.match
            self._drop_question(tracker)
            question = None
        if question is None:
            self._ask(tracker)
            question = tracker.question
        if question is None:
            tracker.no_load = MissReason.NODE_GONE
            return None
        self._wait_for(question)
        if question.match is None:
            self._give_up_late(tracker, question)
        return question.match

    def _wait_for(self, question: Question) -> None:
        """Wait for an answer as long as this step still may."""
        while question.match is None and not question.is_pending and self._wait_left_s > 0:
            began_s = time.monotonic()
            self._take_in(self._wait_left_s)
            self._wait_left_s -= time.monotonic() - began_s

    def _give_up_late(self, tracker: Tracker, question: Question) -> None:
        waited_ms = self._clock.now_ms() - question.sent_ms
        if waited_ms < (PENDING_MS_MAX if question.is_pending else ANSWER_MS_MAX):
            return
        if question.is_pending:
            tracker.no_load = MissReason.WAITED_TOO_LONG
        else:
            tracker.no_load = MissReason.NO_ANSWER
            self._link.note_silence()
        self._drop_question(tracker)

    def _is_being_loaded(self, tracker: Tracker, match: m.Match, first_block: int) -> bool:
        """Whether another request of this engine is loading what this one needs first."""
        assert tracker.chain is not None
        if not self._loading:
            return False
        chunk, block = divmod(first_block, tracker.chain.blocks_per_chunk)
        if chunk < match.chunks:
            return tracker.chain.keys[chunk] in self._loading
        return tracker.chain.digests(chunk, block + 1)[-1] in self._loading

    # ---- blocks are allocated

    def allocated(self, request: Any, block_ids: list[int], external_tokens: int) -> bool:
        """The engine has admitted the request: with a load, or to compute.

        Whether that is how it was planned; a load that was not must be reported as failed.
        """
        tracker = self._trackers.get(request.request_id)
        if tracker is None:
            return False
        self._stores.given_out(block_ids[tracker.local_tokens // self._identity.block_tokens :])
        chain, match = tracker.chain, tracker.question.match if tracker.question else None
        if chain is not None and self._identity.may_store and tracker.store is None:
            tracker.store = StorePlan(chain, match.chunks if match else 0)
        if external_tokens > 0 and chain is not None and match is not None:
            tracker.question = None
            self._plan_load(tracker, chain, match, (block_ids, external_tokens))
            return True
        self._drop_question(tracker)
        self._stores.admitted(tracker)
        return external_tokens <= 0

    def _plan_load(
        self, tracker: Tracker, chain: Chain, match: m.Match, blocks: tuple[list[int], int]
    ) -> None:
        block_ids, external_tokens = blocks
        first = tracker.local_tokens // chain.block_tokens
        end = first + external_tokens // chain.block_tokens
        runs = cut_runs(match.runs, chain.blocks_per_chunk, first, end)
        request_id = tracker.request.request_id
        load = Load(match.lease, block_ids[first:end], _names(chain, first, end))
        for name in load.names:
            self._loading.setdefault(name, request_id)
        tracker.load = self._loads[request_id] = load
        self._new_loads.append(LoadJob(request_id, load.block_ids, runs))
        if match.lease:
            self._link.send(m.LoadBegin(match.lease))

    # ---- the step

    def build_plan(self, scheduler_output: Any) -> StepPlan:
        """What the workers do in this step."""
        self._take_in()
        self._wait_left_s = STEP_WAIT_S
        for request_id in scheduler_output.preempted_req_ids or ():
            tracker = self._trackers.get(request_id)
            if tracker is not None:
                tracker.question = None
                tracker.local_tokens = 0
                self._stores.preempted(tracker)
        cached = scheduler_output.scheduled_cached_reqs
        for new_block_ids in cached.new_block_ids:
            if new_block_ids:
                self._stores.given_out(new_block_ids[0])
        drafts = scheduler_output.scheduled_spec_decode_tokens
        for request_id, token_count in scheduler_output.num_scheduled_tokens.items():
            tracker = self._trackers.get(request_id)
            if tracker is None:
                continue
            request = tracker.request
            start = request.num_computed_tokens
            if not tracker.is_counted or request_id in cached.resumed_req_ids:
                self._count_tokens(tracker, start)
            if tracker.store is not None:
                end = start + token_count - len(drafts.get(request_id, ()))
                self._stores.computed(tracker, min(end, request.num_tokens))
        plan = StepPlan(has_forward=scheduler_output.total_num_scheduled_tokens > 0)
        self._stores.plan(plan)
        plan.loads, plan.condemned = self.take_new_loads(), self._condemned
        self._condemned = []
        self._count()
        return plan

    def take_new_loads(self) -> list[LoadJob]:
        """Loads whose blocks are allocated, and which no worker knows of yet."""
        loads, self._new_loads = self._new_loads, []
        return loads

    def worker_counts(self, counts: dict[str, int]) -> None:
        """Counters of the workers, which came with a step's output."""
        for name, increment in counts.items():
            self.counters.add(name, increment)

    def take_stats(self) -> dict[str, int]:
        """Increments since the last call, for vLLM's own metrics."""
        stats, self._stats = self._stats, {}
        return stats

    def _count(self) -> None:
        counts = self.counters.take()
        if counts:
            self._link.count(counts)
            for name, increment in counts.items():
                self._stats[name] = self._stats.get(name, 0) + increment

    def _count_tokens(self, tracker: Tracker, computed_tokens: int) -> None:
        """Contract C19: a request counts when it is first scheduled after its last load."""
        request = tracker.request
        if tracker.is_counted:
            self.counters.add("recomputed_tokens", request.num_tokens - computed_tokens)
            return
        tracker.is_counted = True
        external = min(tracker.loaded_tokens, computed_tokens)
        self.counters.add("tokens.external", external)
        self.counters.add("tokens.local", computed_tokens - external)
        self.counters.add("tokens.computed", request.num_prompt_tokens - computed_tokens)
        block_tokens = self._identity.block_tokens
        tokens = request.num_prompt_tokens
        usable = usable_blocks(tokens // block_tokens, tokens, block_tokens) * block_tokens
        if computed_tokens < usable and (tracker.no_load is not None or not external):
            self.counters.add(f"miss.{tracker.no_load or MissReason.ABSENT}")

    # ---- loads end

    def loads_ended(self, request_ids: set[str], failed_blocks: set[int]) -> None:
        """All workers have reported these requests; blocks that failed anywhere are failed."""
        for request_id in request_ids:
            load = self._loads.pop(request_id, None)
            if load is None:
                continue
            for name in load.names:
                if self._loading.get(name) == request_id:
                    del self._loading[name]
            verified = next(
                (i for i, block in enumerate(load.block_ids) if block in failed_blocks),
                len(load.block_ids),
            )
            self._link.send(m.LoadEnd(load.lease, verified))
            self.counters.add("failed_blocks", len(load.block_ids) - verified)
            tracker = self._trackers.get(request_id)
            if tracker is None:
                continue
            tracker.load = None
            tracker.loaded_tokens = verified * self._identity.block_tokens
            self.counters.observe_s("retrieve", time.monotonic() - tracker.arrived_s)
            if verified < len(load.block_ids):
                tracker.no_load = tracker.no_load or MissReason.LOAD_FAILED

    # ---- requests go

    def request_finished(self, request: Any, block_ids: list[int]) -> None:
        """The request has ended, however; its last blocks may still be stored."""
        tracker = self._trackers.pop(request.request_id, None)
        if tracker is None:
            return
        self._drop_question(tracker)
        computed = max(0, request.num_computed_tokens - request.num_in_flight_tokens)
        storable = min(computed, request.num_tokens)
        if tracker.load is not None or tracker.chain is None:
            return
        if tracker.store is not None:
            self._stores.ended(tracker, storable, block_ids)
        elif not self._identity.may_store:
            self._stores.left_alone(storable)

    @property
    def has_work(self) -> bool:
        """Whether the engine must take another step for us: never for longer than T_answer."""
        return self._stores.has_work

    def reset_cache(self) -> None:
        """A fresh epoch: nothing stored before can be reached again. Needs no node."""
        self._epoch = secrets.token_bytes(EPOCH_BYTES)
        self._condemned += list(self._loads)
        self._stores.reset(self._trackers.values())
        for tracker in self._trackers.values():
            tracker.no_load = MissReason.RESET
            tracker.chain = None
            self._drop_question(tracker)
        self._questions.clear()

    def close(self, timeout_s: float) -> None:
        """End in bounded time."""
        self._count()
        self._link.close(timeout_s)


def _names(chain: Chain, first_block: int, end_block: int) -> list[bytes]:
    """What to call the parts of a load: whole chunks by key, blocks of a partial one by digest."""
    per_chunk = chain.blocks_per_chunk
    whole = end_block // per_chunk
    names = chain.keys[first_block // per_chunk : whole]
    if end_block > whole * per_chunk:
        names = names + chain.digests(whole, end_block - whole * per_chunk)
    return names


def _joined(first: m.Match, second: m.Match) -> m.Match:
    """The answers to a lookup and to its probe, as one."""
    return m.Match(
        second.number,
        first.chunks,
        second.blocks,
        first.runs + second.runs,
        second.lease or first.lease,
    )
