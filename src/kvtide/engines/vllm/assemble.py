"""Builds both roles of the connector from vLLM's configuration."""

import logging
from pathlib import Path
from typing import Any

from kvtide.clock import Clock
from kvtide.config import Config
from kvtide.core.reasons import Off, OffReason
from kvtide.engines.vllm.adapters import AdapterDigests
from kvtide.engines.vllm.facts import page_places, worker_facts
from kvtide.engines.vllm.file_digests import FileDigests
from kvtide.engines.vllm.identity import engine_fields
from kvtide.engines.vllm.scheduler import SchedulerSide
from kvtide.engines.vllm.session import EngineIdentity, EngineSession
from kvtide.engines.vllm.support import engine_weights, unsupported
from kvtide.engines.vllm.tracker import adapters_may_change
from kvtide.engines.vllm.weights import WeightsDigest, process_began_ns
from kvtide.engines.vllm.worker import WorkerSide
from kvtide.memory.probe import kernel_features
from kvtide.movers.host import HostMover
from kvtide.units import round_down
from kvtide.wire.places import open_directory

logger = logging.getLogger("vllm.kvtide")


def build_scheduler(
    vllm_config: Any, kv_cache_config: Any, config: Config, clock: Clock, failed_loads: str
) -> SchedulerSide:
    """The scheduler role: knows what the engine is, starts a node, decides.

    `failed_loads` is the policy that vLLM goes by, for the line in its log.
    """
    digests = FileDigests(config.cache_dir / "weights")
    block_tokens = vllm_config.cache_config.block_size
    chunk_tokens = max(block_tokens, round_down(config.engine.chunk_tokens, block_tokens))
    transfer = vllm_config.kv_transfer_config
    off = _off(vllm_config, kv_cache_config, config)
    fields: Any = {} if off else engine_fields(vllm_config, kv_cache_config)
    weights: Any = () if off else engine_weights(vllm_config)
    for found in (fields, weights):
        off = found if isinstance(found, Off) and off is None else off
    identity = EngineIdentity(
        engine_id=transfer.engine_id,
        label=Path(str(vllm_config.model_config.served_model_name or "vllm")).name,
        fields={} if off else fields,
        weights=() if off else _digests_of(weights, digests),
        worker_count=vllm_config.parallel_config.world_size,
        block_tokens=block_tokens,
        chunk_tokens=chunk_tokens,
        step_tokens=vllm_config.scheduler_config.max_num_batched_tokens,
        may_load=transfer.is_kv_consumer,
        may_store=transfer.is_kv_producer,
        failed_loads=failed_loads,
        drops_last_block=_drops_last_block(vllm_config),
        off=off,
    )
    session = EngineSession(identity, config, open_directory(config.runtime_dir))
    adapters = AdapterDigests(digests, process_began_ns(), session.clear)
    if vllm_config.lora_config is not None and adapters_may_change(config.engine):
        logger.warning(
            "kvtide caches no request with an adapter: VLLM_ALLOW_RUNTIME_LORA_UPDATING lets an"
            " adapter be loaded in place of another under running requests. Unset it, or say"
            " weights_change: reset and reset the prefix cache with each such load"
        )
    side = SchedulerSide(identity, config.engine, session, adapters, clock)
    session.start()  # last: what fails before it leaves nothing running
    return side


def _off(vllm_config: Any, kv_cache_config: Any, config: Config) -> Off | None:
    missing = kernel_features().missing
    if missing:
        return Off(OffReason.KERNEL, f"this kernel lacks {', '.join(missing)}")
    return unsupported(vllm_config, kv_cache_config, config.engine)


def _drops_last_block(vllm_config: Any) -> bool:
    speculative = vllm_config.speculative_config
    return speculative is not None and speculative.use_eagle_block_drop()


def _digests_of(weights: Any, digests: FileDigests) -> tuple[WeightsDigest, ...]:
    began_ns = process_began_ns()
    return tuple(
        WeightsDigest(found, digests, unchanged_since_ns=began_ns)
        for found in (weights.model, weights.draft)
        if found is not None
    )


def build_worker(
    kv_caches: dict[str, Any], vllm_config: Any, kv_cache_config: Any, config: Config
) -> WorkerSide | None:
    """A worker's role: joins the node with what it sees of its KV memory; None where it is off."""
    if _off(vllm_config, kv_cache_config, config) is not None:
        return None
    devices = {cache.device.type for cache in kv_caches.values()}
    if devices != {"cpu"}:  # whatever the configuration says: these addresses would be used
        logger.info("kvtide off: %s", Off(OffReason.DEVICE, f"KV cache on {sorted(devices)}"))
        return None
    facts = worker_facts(kv_caches, vllm_config, kv_cache_config)
    if isinstance(facts, Off):
        logger.info("kvtide off in rank %d: %s", vllm_config.parallel_config.rank, facts)
        return None
    pages = page_places(kv_caches, vllm_config, kv_cache_config)
    mover = HostMover(pages, facts.block_count)
    is_writer = facts.rank % kv_cache_config.kv_tp_replicas == 0
    side = WorkerSide(
        vllm_config.kv_transfer_config.engine_id,
        open_directory(config.runtime_dir),
        facts,
        is_writer,
        mover,
    )
    side.start()
    return side
