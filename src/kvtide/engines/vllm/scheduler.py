"""The scheduler role: decides what is loaded and stored, and never waits longer than a moment.

    on_new_request      keys are hashed, the lookup is sent                        (lookups.py)
    matched_tokens      the answer, if it is there; None while it is not; 0 when it comes too late
    allocated           the blocks are known: a load is planned, stores are asked for
    build_plan          what the workers do in this step
    loads_ended         what they report
    request_finished    the last blocks are asked for; they are copied in the next step (stores.py)

Whatever the node says arrives in a queue of `EngineSession` and is taken in at these hooks, so all
state here belongs to the scheduler's thread. A step costs nothing for requests that have nothing
to load or store: one dictionary lookup and two comparisons.
"""

import contextlib
import itertools
import logging
import secrets
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

from kvtide.clock import Clock
from kvtide.core import messages as m
from kvtide.core.chain import Chain
from kvtide.core.instances import ROOTS_MAX
from kvtide.core.keys import root_key, salt_digest
from kvtide.core.plan import StorePlan, cut_runs, usable_blocks
from kvtide.core.reasons import VOIDS_LOADS, MissReason
from kvtide.engines.vllm.adapter_numbers import AdapterNumbers
from kvtide.engines.vllm.adapters import AdapterDigests
from kvtide.engines.vllm.canaries import Canaries
from kvtide.engines.vllm.lookups import Lookups
from kvtide.engines.vllm.metadata import LoadJob, StepPlan
from kvtide.engines.vllm.session import EngineIdentity, EngineSession, Session
from kvtide.engines.vllm.stores import Stores
from kvtide.engines.vllm.tracker import Load, Tracker, items_of, refusal
from kvtide.metrics import Counters
from kvtide.settings import EngineConfig

logger = logging.getLogger("vllm.kvtide")

EPOCH_BYTES = 16
"""Random: no two resets, of any engine, are ever the same."""


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
        self._epoch = b""
        self._trackers: dict[str, Tracker] = {}
        self._loads: dict[str, Load] = {}
        self._loading: dict[bytes, list[Load]] = {}  # by the keys before the chunks being loaded
        self._new_loads: list[LoadJob] = []
        self._session: Session | None = None
        self._roots: set[bytes] = set()
        self._adapter_numbers = AdapterNumbers()
        self._fingerprint = b""
        self._number = itertools.count(1).__next__
        self._unreadable = ""  # what was said last of a request that has no name
        self.counters = Counters()
        self._stats: Counter[str] = Counter()
        self._canaries = Canaries(identity, settings.canary_rate, session, self.counters)
        self._lookups = Lookups(
            session,
            self._number,
            self._register,
            self._take_in,
            clock,
            self.counters,
            self._canaries,
        )
        self._stores = Stores(
            identity, session, self._number, self._register, clock, self.counters
        )

    def bind(self, kv_cache_manager: Any) -> None:
        """The engine's cache manager, which says who owns a block."""
        self._stores.bind(kv_cache_manager)

    # ---- requests come

    def on_new_request(self, request: Any) -> None:
        """Hash the keys and send the lookup; the answer arrives while the request queues."""
        self._take_in()
        self._drop_what_changed()
        tracker = Tracker(request=request, arrived_s=time.monotonic())
        self._trackers[request.request_id] = tracker
        tracker.no_load = self._name(tracker)
        if tracker.no_load is not None:
            return
        if not self._identity.may_load:
            tracker.no_load = MissReason.ROLE
        elif request.skip_reading_prefix_cache:
            tracker.no_load = MissReason.SKIP_READING
        else:
            self._lookups.ask(tracker)

    def _name(self, tracker: Tracker) -> MissReason | None:
        """Begin the request's chain; or why it has none.

        Salts and ids are a caller's: whatever is wrong with them costs this request.
        """
        request, identity = tracker.request, self._identity
        try:
            # Whether it is cached or not: the engine loads the adapter of each.
            lora = request.lora_request
            is_alone = lora is None or self._note_adapter(lora)
            refused = refusal(request, self._settings)
            root = refused or self._root(request, is_alone=is_alone)
            if isinstance(root, MissReason):
                return root
            items = items_of(request)
            chain = Chain(root.root, identity.block_tokens, identity.chunk_tokens, items)
        except Exception as error:
            if repr(error) != self._unreadable:
                self._unreadable = repr(error)
                logger.exception("kvtide: a request that cannot be named is served uncached")
            return MissReason.UNREADABLE
        tracker.root, tracker.chain = root, chain
        return None

    def _root(self, request: Any, *, is_alone: bool) -> m.RegisterRoot | MissReason:
        """The root key of a request, and what a node must know of it; or why there is none.

        `is_alone`: its adapter's number, if it has one, stands for it and no other.
        """
        if not self._fingerprint:
            return MissReason.NODE_GONE
        adapter, lora = b"", request.lora_request
        if lora is not None:
            digest = self._adapter_numbers.digest(lora, self._adapters) if is_alone else None
            if digest is None:
                return MissReason.ADAPTER_UNKNOWN
            adapter = digest
        salt = request.cache_salt
        root = root_key(self._fingerprint, epoch=self._epoch, salt=salt, adapter=adapter)
        return m.RegisterRoot(root, self._epoch, salt_digest(salt))

    def _of_adapter(self, is_meant: Callable[[Any], bool]) -> list[Tracker]:
        """The requests whose adapter is meant."""
        adapters = [(one, one.request.lora_request) for one in self._trackers.values()]
        return [one for one, lora in adapters if lora is not None and is_meant(lora)]

    def _note_adapter(self, lora: Any) -> bool:
        """Whether an adapter's number stands for it; else nothing that runs under it is known."""
        if self._adapter_numbers.note(lora):
            return True
        number = lora.lora_int_id
        running = self._of_adapter(lambda other: other.lora_int_id == number)
        self._forget(running, MissReason.ADAPTER_UNKNOWN)
        return False

    def _forget_if_adapter_changed(self, tracker: Tracker) -> None:
        """Forget a request that may not compute with what it was named for any more."""
        lora, root, digests = tracker.request.lora_request, tracker.root, self._adapters
        if lora and root and not digests.is_unchanged(lora.lora_path, root.salt_digest):
            self._forget([tracker], MissReason.ADAPTER_UNKNOWN)

    def _drop_what_changed(self) -> None:
        """Where an adapter was found changed, or kept bytes wrong, the engine's own cache may hold
        what was loaded or computed wrongly: it forgets all, and what its requests add to it."""
        changed, is_alarm = self._adapters.take_changed(), self._canaries.take_alarm()
        if changed or is_alarm:
            doubtful = self._of_adapter(lambda lora: lora.lora_path in changed)
            doubtful = list(self._trackers.values()) if is_alarm else doubtful
            for tracker in doubtful:
                tracker.is_doubtful = True
            self._forget(doubtful, MissReason.RESET if is_alarm else MissReason.ADAPTER_UNKNOWN)
            self._stores.drop_all()

    def _register(self, root: m.RegisterRoot) -> bool:
        """Make a root known on the present connection; False where that cannot be sent."""
        if root.root in self._roots:
            return True
        if not self._link.send(root):
            return False
        if len(self._roots) >= ROOTS_MAX:
            self._roots.clear()  # the node has begun to forget, too
        self._roots.add(root.root)
        return True

    # ---- what the node says

    def _take_in(self, wait_s: float | None = None) -> None:
        """Take in what the node has said; a new session voids what was asked before."""
        if self._link.session is not self._session:
            self._session_changed(self._link.session)
        self._void_wrong_loads()
        for answer in self._link.take_answers(wait_s):
            match answer:
                case m.StoreAnswer():
                    self._stores.answered(answer)
                case m.Pending(number):
                    self._lookups.pending(number)
                case m.Match():
                    self._lookups.matched(answer)

    def _void_wrong_loads(self) -> None:
        """Where our weights, or kept bytes, are not what they seemed, nothing is to be loaded."""
        off = self._link.off
        if self._loads and off is not None and off.reason in VOIDS_LOADS:
            self.void_loads()

    def _session_changed(self, session: Session | None) -> None:
        self._session = session
        self._roots.clear()
        self._lookups.session_changed(self._trackers.values())
        self._stores.session_changed(self._trackers.values())
        if session is None:
            return
        if self._fingerprint and session.fingerprint != self._fingerprint:
            self.reset_cache()
        self._fingerprint = session.fingerprint

    # ---- matched tokens

    def matched_tokens(self, request: Any, local_tokens: int) -> int | None:
        """External tokens behind `local_tokens`; None while the answer is not there."""
        self._take_in()
        tracker = self._trackers.get(request.request_id)
        if tracker is None:
            return 0
        tracker.local_tokens = local_tokens
        self._forget_if_adapter_changed(tracker)
        if tracker.chain is None or tracker.no_load is not None:
            return 0
        match = self._lookups.match_of(tracker)
        if match is None:
            return None if tracker.question is not None else 0
        match = self._canaries.cut(tracker, match)
        block_tokens = self._identity.block_tokens
        matched = match.chunks * tracker.chain.blocks_per_chunk + match.blocks
        matched -= self._identity.drops_last_block
        usable = usable_blocks(matched, request.num_tokens, block_tokens)
        external = usable * block_tokens - local_tokens
        if external <= 0:
            return 0
        if self._is_being_loaded(tracker.chain, local_tokens // block_tokens):
            return None
        return external

    def _is_being_loaded(self, chain: Chain, block: int) -> bool:
        """Whether this block, the first that is missing, is being loaded for another request."""
        parent = chain.parent(block // chain.blocks_per_chunk)
        return any(load.brings(block, chain) for load in self._loading.get(parent, ()))

    # ---- blocks are allocated

    def allocated(self, request: Any, block_ids: list[int], external_tokens: int) -> bool:
        """The engine has admitted the request: with a load, or to compute.

        Whether that is how it was planned; a load that was not must be reported as failed.
        """
        self._take_in()
        tracker = self._trackers.get(request.request_id)
        if tracker is None:
            return False
        self._note_preemption(tracker)
        self._stores.given_out(block_ids[tracker.local_tokens // self._identity.block_tokens :])
        tracker.blocks = block_ids
        chain, match = tracker.chain, tracker.question.match if tracker.question else None
        if chain is not None and self._identity.may_store and tracker.store is None:
            tracker.store = StorePlan(chain, match.chunks if match else 0)
        if external_tokens > 0 and chain is not None and match is not None:
            tracker.question = None
            self._plan_load(tracker, chain, match, external_tokens)
            return True
        self._lookups.drop(tracker)
        self._stores.admitted(tracker)
        return external_tokens <= 0

    def _plan_load(
        self, tracker: Tracker, chain: Chain, match: m.Match, external_tokens: int
    ) -> None:
        first = tracker.local_tokens // chain.block_tokens
        end = first + external_tokens // chain.block_tokens
        runs = cut_runs(match.runs, chain.blocks_per_chunk, first, end)
        load = Load(match.lease, tracker.blocks[first:end], chain, first)
        for parent in load.parents:
            self._loading.setdefault(parent, []).append(load)
        request_id = tracker.request.request_id
        tracker.load = self._loads[request_id] = load
        if match.lease:
            self._link.send(m.LoadBegin(match.lease))
        # Last: a load whose planning fails half-way is reported as failed by the connector.
        self._new_loads.append(LoadJob(request_id, load.block_ids, runs))

    def _note_preemption(self, tracker: Tracker) -> None:
        """Whoever was preempted has lost its blocks: keep what can still be copied.

        vLLM tells it with the plan, after it may have admitted the request anew: then it is
        noticed before the old blocks are forgotten.
        """
        preemptions = tracker.request.num_preemptions
        if preemptions == tracker.preemptions:
            return
        tracker.preemptions = preemptions
        storable_tokens, tracker.storable_tokens = tracker.storable_tokens, 0
        tracker.unverified_tokens = 0
        tracker.prefill_end_block = 0
        if tracker.store is not None:
            self._stores.left(tracker, storable_tokens, tracker.blocks, has_ended=False)

    # ---- the step

    def build_plan(self, scheduler_output: Any) -> StepPlan:
        """What the workers do in this step."""
        self._adapters.step_planned()
        is_asking = self._lookups.is_asking or self._stores.is_asking
        self._take_in(0.0 if is_asking else None)
        self._drop_what_changed()
        self._lookups.next_step()
        self._note_blocks(scheduler_output)
        self._note_tokens(scheduler_output)
        token_count = scheduler_output.total_num_scheduled_tokens
        plan = StepPlan(has_forward=token_count > 0, token_count=token_count)
        self._stores.plan(plan)
        self._canaries.plan(plan, self._stores.block_ids_of)
        self._link.leave_reading(self._stores.is_asking or self._lookups.is_asking)
        self._count()
        plan.loads = self.take_new_loads()  # last: what fails before must not lose them
        return plan

    def _note_blocks(self, scheduler_output: Any) -> None:
        """Whose blocks are gone with this step, and who is given which."""
        for request_id in scheduler_output.preempted_req_ids or ():
            tracker = self._trackers.get(request_id)
            if tracker is not None:
                self._note_preemption(tracker)
        cached = scheduler_output.scheduled_cached_reqs
        for request_id, new_block_ids in zip(cached.req_ids, cached.new_block_ids, strict=True):
            if new_block_ids and request_id not in cached.resumed_req_ids:
                self._stores.given_out(new_block_ids[0])
                tracker = self._trackers.get(request_id)
                if tracker is not None:
                    tracker.blocks += new_block_ids[0]

    def _note_tokens(self, scheduler_output: Any) -> None:
        """What each request has computed by the end of this step, and where its prompt is from."""
        drafts = scheduler_output.scheduled_spec_decode_tokens
        resumed = scheduler_output.scheduled_cached_reqs.resumed_req_ids
        for request_id, token_count in scheduler_output.num_scheduled_tokens.items():
            tracker = self._trackers.get(request_id)
            if tracker is None:
                continue
            if tracker.is_doubtful:
                self._stores.uncache(tracker.blocks)
            self._forget_if_adapter_changed(tracker)
            request = tracker.request
            start = request.num_computed_tokens
            is_admitted = not tracker.is_counted or request_id in resumed
            if is_admitted:
                tracker.count_tokens(start, self._identity.block_tokens, self.counters)
            has_loads = is_admitted and scheduler_output.has_sync_kv_loads
            if not tracker.is_verified(token_count, has_sync_loads=has_loads):
                continue
            end = start + token_count - len(drafts.get(request_id, ()))
            tracker.storable_tokens = min(end, request.num_tokens)
            if tracker.store is not None:
                self._stores.computed(tracker)

    def take_new_loads(self) -> list[LoadJob]:
        """Loads whose blocks are allocated, and which no worker knows of yet."""
        loads, self._new_loads = self._new_loads, []
        return loads

    def worker_counts(self, counts: dict[str, int]) -> None:
        """Counters of the workers, which came with a step's output."""
        for name, increment in counts.items():
            self.counters.add(name, increment)

    def take_stats(self) -> dict[str, int]:
        """Increments since the last call, for vLLM's own metrics: it asks as each step ends."""
        self._adapters.step_ended()
        stats, self._stats = self._stats, Counter()
        return stats

    def _count(self) -> None:
        counts = self.counters.take()
        if counts:
            self._link.count(counts)
            self._stats.update(counts)

    # ---- loads end

    def loads_ended(self, request_ids: set[str], failed_blocks: set[int]) -> set[str]:
        """All workers have reported these requests; any may have told of failed blocks before.

        Returns those whose report must be held back: the cache was reset while they loaded, so all
        of their blocks must fail. They are loaded again, from nowhere, which fails in a step.
        """
        self._void_wrong_loads()
        held_back: set[str] = set()
        for load in self._loads.values() if failed_blocks else ():
            load.failed.update(failed_blocks.intersection(load.block_ids))
        for request_id in request_ids & self._loads.keys():
            load = self._loads[request_id]
            if load.is_void and len(load.failed) < len(load.block_ids):
                held_back.add(request_id)
                self._new_loads.append(LoadJob(request_id, load.block_ids, []))
            else:
                del self._loads[request_id]
                self._load_ended(request_id, load)
        return held_back

    def _load_ended(self, request_id: str, load: Load) -> None:
        for parent in load.parents:
            self._loading[parent].remove(load)
            if not self._loading[parent]:
                del self._loading[parent]
        verified = next(
            (i for i, block in enumerate(load.block_ids) if block in load.failed),
            len(load.block_ids),
        )
        self._canaries.load_ended(request_id, load, verified)
        self.counters.add("failed_blocks", len(load.block_ids) - verified)
        tracker = self._trackers.get(request_id)
        if tracker is None:
            return
        tracker.load = None
        tracker.loaded_tokens = verified * self._identity.block_tokens
        self.counters.observe_s("retrieve", time.monotonic() - tracker.arrived_s)
        if verified < len(load.block_ids):
            tracker.no_load = tracker.no_load or MissReason.LOAD_FAILED
            if tracker.store is not None:
                tracker.store.not_held(load.first_block + verified)

    # ---- requests go

    def request_finished(self, request: Any, block_ids: list[int]) -> None:
        """The request has ended, however; its last blocks may still be stored."""
        self._take_in()
        tracker = self._trackers.pop(request.request_id, None)
        if tracker is None:
            return
        self._forget_if_adapter_changed(tracker)
        self._lookups.forget(tracker)
        self._note_preemption(tracker)
        if tracker.chain is None:
            return
        storable = 0
        if tracker.storable_tokens:  # else nothing of it has been computed: blocks may be empty
            computed = max(0, request.num_computed_tokens - request.num_in_flight_tokens)
            storable = min(computed, request.num_tokens)
        if tracker.store is not None:
            self._stores.left(tracker, storable, block_ids, has_ended=True)
        elif not self._identity.may_store:
            self._stores.left_alone(storable)

    @property
    def has_work(self) -> bool:
        """Whether the engine must take another step for us: never for longer than T_answer."""
        return self._stores.has_work

    def reset_cache(self) -> None:
        """A fresh epoch: nothing stored before can be reached again. Needs no node."""
        self._epoch = secrets.token_bytes(EPOCH_BYTES)
        self.void_loads()
        self._forget(list(self._trackers.values()), MissReason.RESET)

    def _forget(self, trackers: list[Tracker], why: MissReason) -> None:
        """Nothing of these requests is stored or loaded from now on."""
        if not trackers:
            return
        self._stores.reset(trackers)
        for tracker in (one for one in trackers if one.chain is not None):
            if tracker.load is not None:
                tracker.load.is_void = True
            tracker.no_load = why
            tracker.chain = tracker.root = None
            self._lookups.forget(tracker)

    def void_loads(self) -> None:
        """Whatever is being loaded must not be used: it is reported as failed."""
        for load in self._loads.values():
            load.is_void = True

    def close(self, timeout_s: float) -> None:
        """End in bounded time."""
        with contextlib.ExitStack() as parts:  # each, whatever becomes of those before it
            parts.callback(self._link.close, timeout_s)
            parts.callback(self._adapters.close, timeout_s / 4)
            parts.callback(self._count)
