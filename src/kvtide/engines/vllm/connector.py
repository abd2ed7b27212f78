"""vLLM's connector class: one object in each role, thin, and unable to harm the engine.

Every hook goes through `_guarded`: what kvtide does wrong is counted, said once, and turns caching
off in this process; the engine gets the answer that a connector without content would give. What a
hook may return, and when it is called, is vLLM's contract (KVConnectorBase_V1 of vLLM 0.32).
"""

import contextlib
import functools
import logging
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    SupportsHMA,
)
from vllm.v1.metrics.stats import CacheHitSource

from kvtide import config as settings
from kvtide.bounds import T_STOP_CONNECTOR_S
from kvtide.clock import MonotonicClock
from kvtide.engines.vllm.assemble import build_scheduler, build_worker
from kvtide.engines.vllm.metadata import LoadJob, StepPlan
from kvtide.engines.vllm.stats import KVTidePromMetrics, KVTideStats, WorkerCounts

if TYPE_CHECKING:
    from types import FrameType

    from kvtide.engines.vllm.scheduler import SchedulerSide
    from kvtide.engines.vllm.worker import WorkerSide

logger = logging.getLogger("vllm.kvtide")

CLOSE_S_MAX = T_STOP_CONNECTOR_S
"""How long each of its parts may take to end."""

Answer = TypeVar("Answer")
Other = TypeVar("Other")


class KVTideConnector(KVConnectorBase_V1, SupportsHMA):
    """Keeps the KV cache of a vLLM engine in a kvtide node."""

    _cache_hit_source = CacheHitSource.HOST

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        """Read settings (an unusable one stops the start) and find out what the engine is."""
        super().__init__(vllm_config, role, kv_cache_config)
        transfer = vllm_config.kv_transfer_config
        self._config = settings.read(transfer.kv_connector_extra_config)
        self._scheduler: SchedulerSide | None = None
        self._worker: WorkerSide | None = None
        """Each, once there, stays: loads may run, and must be reported, after we are off."""
        self._asked_local_tokens = 0
        self._orphans: list[LoadJob] = []
        self._is_off = not self._config.engine.enabled
        self._owes_off_plan = False
        # A lost chunk must cost a recomputation, not the request. vLLM's scheduler reads this once
        # it has built us; inside MultiConnector it reads that one's, which the user has to set.
        transfer.kv_load_failure_policy = "recompute"
        self._kv_block_tokens = vllm_config.cache_config.block_size
        if role == KVConnectorRole.SCHEDULER and not self._is_off:
            self._scheduler = self._guarded(
                lambda: build_scheduler(
                    vllm_config,
                    kv_cache_config,
                    self._config,
                    MonotonicClock(),
                    failed_loads=_outer_policy() or "recompute",
                ),
                None,
            )

    def _guarded(self, hook: Callable[[], Answer], otherwise: Other) -> Answer | Other:
        """The one boundary: a failure of ours is a miss, never the engine's."""
        return otherwise if self._is_off else self._always(hook, otherwise)

    def _turn_off(self) -> None:
        """Let go of everything; the workers are told with the next plan."""
        self._is_off = True
        self._owes_off_plan = self._scheduler is not None
        for side in (self._scheduler, self._worker):
            if side is not None:
                with contextlib.suppress(Exception):
                    side.close(0.0)

    def _always(self, hook: Callable[[], Answer], otherwise: Other) -> Answer | Other:
        """For what must be done also once we are off: loads may still run, caches be reset."""
        try:
            return hook()
        except Exception:
            logger.exception("kvtide off: an error of its own; the engine serves uncached")
            if not self._is_off:
                self._turn_off()
            return otherwise

    # ---- what kind of connector this is

    @property
    def requires_kv_delivery(self) -> bool:
        """A cache: a store that is dropped is a later miss."""
        return False

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """No layer waits for us. Asked before any process is started, where graphs are captured:
        settings that cannot be used stop the start here, minutes before a connector is made."""
        settings.read(extra_config)
        return False

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: Any) -> None:
        """Any will do. Asked before a model is compiled: as above, for engines without graphs."""
        settings.read(vllm_config.kv_transfer_config.kv_connector_extra_config)

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVTideStats:
        """Rebuild statistics in the API server's process."""
        return KVTideStats(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: Any,
        metric_types: Any,
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> KVTidePromMetrics:
        """Our counters among vLLM's own metrics."""
        return KVTidePromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    # ---- worker

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """The KV memory is there: find out what it is, and join the node."""
        if self._is_off:
            return
        self._worker = self._guarded(
            lambda: build_worker(
                kv_caches, self._vllm_config, self._kv_cache_config, self._config
            ),
            None,
        )

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        """Before the forward: the last moment of blocks that were given away."""
        worker, plan = self._worker, kv_connector_metadata
        if worker is None or not isinstance(plan, StepPlan):
            return
        if plan.is_off and not self._is_off:
            self._turn_off()
        self._guarded(lambda: worker.handle_preemptions(plan), None)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Hand this step's loads to the mover threads."""
        worker, plan = self._worker, self._get_connector_metadata()
        if worker is not None and isinstance(plan, StepPlan):
            self._always(lambda: worker.start_loads(plan), None)  # each load is reported

    def wait_for_layer_load(self, layer_name: str) -> None:
        """All loads are asynchronous: nothing to wait for."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Blocks are stored whole, after the forward."""

    def wait_for_save(self) -> None:
        """After the forward: copy this step's stores."""
        worker, plan = self._worker, self._get_connector_metadata()
        if worker is not None and isinstance(plan, StepPlan):
            self._guarded(lambda: worker.wait_for_save(plan), None)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """Loads that have ended."""
        worker = self._worker
        ended = worker.take_ended() if worker is not None else set()
        return KVConnectorTransferResults(finished_recving=ended)

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Blocks of those loads that the engine must compute."""
        return self._worker.take_load_errors() if self._worker is not None else set()

    def build_connector_worker_meta(self) -> WorkerCounts | None:
        """This worker's counters since the last step."""
        worker = self._worker
        if worker is None:
            return None
        counts = self._always(lambda: worker.counters.take(), None)
        return WorkerCounts(counts) if counts else None

    # ---- scheduler

    def bind_kv_cache_manager(self, kv_cache_manager: Any) -> None:
        """The engine's cache manager, asked who owns a block."""
        super().bind_kv_cache_manager(kv_cache_manager)
        scheduler = self._scheduler
        if scheduler is not None:
            self._guarded(lambda: scheduler.bind(kv_cache_manager), None)

    def on_new_request(self, request: Any) -> None:
        """Send the lookup."""
        scheduler = self._scheduler
        if scheduler is not None:
            self._guarded(lambda: scheduler.on_new_request(request), None)

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """External tokens; None: ask again. All loads are asynchronous."""
        scheduler = self._scheduler
        if scheduler is None:
            return 0, False
        self._asked_local_tokens = num_computed_tokens
        tokens: int | None = self._guarded(
            lambda: scheduler.matched_tokens(request, num_computed_tokens), 0
        )
        return tokens, bool(tokens)

    def update_state_after_alloc(
        self, request: Any, blocks: Any, num_external_tokens: int
    ) -> None:
        """Blocks are allocated. A load that we fail to plan is reported as failed."""
        scheduler = self._scheduler
        if scheduler is None:
            return
        is_done = self._guarded(
            lambda: scheduler.allocated(request, _block_ids(blocks), num_external_tokens), False
        )
        if num_external_tokens > 0 and not is_done:
            local = self._asked_local_tokens
            ends = (local, local + num_external_tokens)
            first, end = (tokens // self._kv_block_tokens for tokens in ends)
            own = _block_ids(blocks)[first:end]
            self._orphans.append(LoadJob(request.request_id, own, []))

    def build_connector_meta(self, scheduler_output: Any) -> StepPlan:
        """This step's plan."""
        scheduler = self._scheduler
        if scheduler is None:
            return StepPlan()
        plan = self._guarded(lambda: scheduler.build_plan(scheduler_output), None)
        if plan is None:
            plan = StepPlan(loads=scheduler.take_new_loads(), is_off=True)
            self._owes_off_plan = False
        plan.loads += self._orphans
        self._orphans = []
        return plan

    def update_connector_output(self, connector_output: Any) -> None:
        """What the workers report."""
        scheduler = self._scheduler
        if scheduler is None:
            return
        counts = connector_output.kv_connector_worker_meta
        ended = connector_output.finished_recving or set()
        failed = connector_output.invalid_block_ids or set()
        if isinstance(counts, WorkerCounts):
            self._guarded(lambda: scheduler.worker_counts(counts.counts), None)
        if ended or failed:
            held_back = self._always(lambda: scheduler.loads_ended(ended, failed), set[str]())
            ended.difference_update(held_back)

    def request_finished(
        self, request: Any, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        """The request has ended; its blocks are free at once."""
        scheduler = self._scheduler
        if scheduler is not None:
            self._guarded(lambda: scheduler.request_finished(request, block_ids), None)
        return False, None

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """The same, as vLLM calls it for connectors that know several groups."""
        return self.request_finished(request, block_ids[0] if block_ids else [])

    def has_pending_push_work(self) -> bool:
        """Keep the engine stepping while blocks of ended requests are to be copied."""
        scheduler = self._scheduler
        if scheduler is None:
            return False
        return self._guarded(lambda: scheduler.has_work, False) or self._owes_off_plan

    def reset_cache(self) -> bool:
        """Nothing that was stored before can be reached from now on. Never fails."""
        scheduler = self._scheduler
        if scheduler is not None:
            self._always(scheduler.void_loads, None)
            self._guarded(scheduler.reset_cache, None)
        return True

    def get_kv_connector_stats(self) -> KVTideStats | None:
        """Counters for vLLM's own log and metrics; the scheduler has those of the workers too."""
        scheduler = self._scheduler
        if scheduler is None:
            return None
        counts = self._guarded(scheduler.take_stats, None)
        return KVTideStats(data=counts) if counts else None

    # ---- both

    def shutdown(self) -> None:
        """End threads and connections in bounded time."""
        self._is_off = True
        for side in (self._scheduler, self._worker):
            if side is not None:
                self._always(functools.partial(side.close, CLOSE_S_MAX), None)


def _block_ids(blocks: Any) -> list[int]:
    """The blocks of the one group; none where a model has no group at all (encoders)."""
    groups: tuple[list[int], ...] = blocks.get_block_ids()
    return groups[0] if groups else []


def _outer_policy() -> str | None:
    """What happens to failed loads where a MultiConnector builds us; None where it does not.

    Its configuration is the one that vLLM's scheduler reads, and it hands its children copies: the
    frame that is building us is the only place where it can be seen.
    """
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        builder = frame.f_locals.get("self")
        if type(builder).__name__ == "MultiConnector":
            outer = frame.f_locals.get("vllm_config")
            return str(outer.kv_transfer_config.kv_load_failure_policy) if outer else None
        if frame.f_code.co_name == "create_connector":
            return None
        frame = frame.f_back
    return None
