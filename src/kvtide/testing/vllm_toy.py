"""A vLLM engine without a model: its own scheduler, our connector, a toy for the forward.

    ToyEngine ── Scheduler or AsyncScheduler, which builds KVTideConnector in the scheduler role
        └─ ToyWorker, one for each rank: KVTideConnector in the worker role, KV memory, toy model

Steps go as in vLLM's engine core, hooks in the order of its model runner, plans and reports
through pickle as between processes. Only the forward is not vLLM's: see `toy_engine`. So thousands
of requests a minute go through the real scheduler, and each output tells whether all KV was right.
"""

import copy
import json
import pickle
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.engine.arg_utils import EngineArgs
from vllm.lora.request import LoRARequest
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
    create_kv_cache_views,
)
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.outputs import DraftTokenIds, KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from kvtide.testing.toy_engine import TOKEN_KV_BYTES, PagedMemory, ToySequence, next_token

LAYERS = 2
HEAD_SIZE = TOKEN_KV_BYTES // LAYERS // 4  # keys and values, two bytes each
VOCABULARY = 1024
LENGTH_MAX = 4096
IDLE_STEP_S = 0.0005
"""Between steps without a forward, in which vLLM's engine core sleeps too."""
STEPS_MAX = 100_000


@dataclass(frozen=True, slots=True)
class ToyOptions:
    """What differs between toy engines; vLLM's words where it is vLLM's."""

    block_tokens: int = 16
    block_count: int = 128
    step_tokens: int = 64
    chunk_tokens: int = 64
    workers: int = 1
    replicas: int = 1
    sequences_max: int = 8
    is_async: bool = False
    runs_late: bool = False
    """With `is_async`: a step runs when its output is asked for, not when it is scheduled."""
    draft_tokens: int = 0
    prefix_caching: bool = True
    policy: str = "fcfs"
    role: str = "kv_both"
    connector: bool = True
    settings: Mapping[str, object] = field(default_factory=dict)


@dataclass(slots=True)
class ToyResult:
    """What became of one request."""

    prompt: list[int]
    tokens: list[int] = field(default_factory=list)
    local: int = 0
    external: int = 0
    finish_reason: str | None = None

    @property
    def hit(self) -> int:
        """Prompt tokens that were planned to be taken from a cache."""
        return self.local + self.external


class _Layer:
    """Stands for an attention layer as the model runner leaves it."""

    isa = "vec"

    def get_attn_backend(self) -> Any:
        return SimpleNamespace(get_name=lambda: "CPU_ATTN")


def write_model(directory: Path) -> Path:
    """A model that vLLM can configure and nobody can run."""
    directory.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "bfloat16",
        "hidden_size": 2 * HEAD_SIZE,
        "head_dim": HEAD_SIZE,
        "intermediate_size": 4 * HEAD_SIZE,
        "num_attention_heads": 4,
        "num_hidden_layers": LAYERS,
        "num_key_value_heads": 4,
        "max_position_embeddings": LENGTH_MAX,
        "vocab_size": VOCABULARY,
    }
    (directory / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return directory


def engine_config(model: Path, options: ToyOptions) -> Any:
    """A VllmConfig as the engine core has it."""
    transfer = {
        "kv_connector": "KVTideConnector",
        "kv_connector_module_path": "kvtide.engines.vllm",
        "kv_role": options.role,
        "kv_connector_extra_config": {
            "kvtide.chunk_tokens": options.chunk_tokens,
            **options.settings,
        },
    }
    drafts = {"method": "ngram", "num_speculative_tokens": options.draft_tokens}
    config = EngineArgs(
        model=str(model),
        load_format="dummy",
        skip_tokenizer_init=True,
        enforce_eager=True,
        enable_prefix_caching=options.prefix_caching,
        max_num_batched_tokens=options.step_tokens,
        max_num_seqs=options.sequences_max,
        max_model_len=LENGTH_MAX,
        tensor_parallel_size=options.workers,
        scheduling_policy=options.policy,
        speculative_config=drafts if options.draft_tokens else None,
        kv_transfer_config=transfer if options.connector else None,
    ).create_engine_config()
    # The CPU platform has views of its own on both; the scheduler does not care.
    config.scheduler_config.async_scheduling = options.is_async
    config.cache_config.block_size = options.block_tokens
    config.cache_config.num_gpu_blocks = options.block_count
    return config


def kv_cache_config(options: ToyOptions) -> Any:
    """One group of full attention, as vLLM lays it out on CPUs."""
    spec = FullAttentionSpec(
        block_size=options.block_tokens, num_kv_heads=1, head_size=HEAD_SIZE, dtype=torch.bfloat16
    )
    names = [f"model.layers.{number}.self_attn.attn" for number in range(LAYERS)]
    page_bytes = spec.page_size_bytes
    layer_stride = page_bytes * options.block_count
    tensor = KVCacheTensor(layer_stride * LAYERS, names, layer_stride, page_bytes)
    config = KVCacheConfig(
        num_blocks=options.block_count,
        kv_cache_tensors=[tensor],
        kv_cache_groups=[KVCacheGroupSpec(names, spec)],
        kv_cache_layout="LBHNC",
    )
    config.kv_tp_replicas = options.replicas
    return config


class ToyWorker:
    """One rank: its half of the connector, its KV memory, and the toy model over it."""

    def __init__(self, vllm_config: Any, kv_config: Any, rank: int) -> None:
        config = copy.copy(vllm_config)
        config.parallel_config = copy.copy(vllm_config.parallel_config)
        config.parallel_config.rank = rank
        (tensor,) = kv_config.kv_cache_tensors
        spec = kv_config.kv_cache_groups[0].kv_cache_spec
        # Random, so that nothing is right by chance.
        self._raw = torch.randint(-128, 128, (tensor.size,), dtype=torch.int8)
        shape = (LAYERS, kv_config.num_blocks, spec.block_size, TOKEN_KV_BYTES // LAYERS)
        memory = self._raw.numpy().view("uint8").reshape(shape)
        self.memory = PagedMemory(memory, rank // kv_config.kv_tp_replicas)
        self.sequences: dict[str, ToySequence] = {}
        self.guess: Callable[[list[int]], list[int]] = lambda known: []
        """Drafts of what follows these tokens."""
        self.connector: Any = None
        if vllm_config.kv_transfer_config is not None:
            config.compilation_config = copy.copy(vllm_config.compilation_config)
            config.compilation_config.static_forward_context = {
                name: _Layer() for name in tensor.layers
            }
            self.connector = KVConnectorFactory.create_connector(
                config=config, role=KVConnectorRole.WORKER, kv_cache_config=kv_config
            )
            layout = KVCacheLayout[kv_config.kv_cache_layout]
            views = create_kv_cache_views(self._raw, spec, kv_config.num_blocks, layout, tensor)
            self.connector.register_kv_caches(dict(zip(tensor.layers, views, strict=True)))

    def execute(self, output: Any) -> tuple[dict[str, list[bytes]], KVConnectorOutput | None]:
        """One step: hashes behind each computed token of each request, and what moved."""
        connector = self.connector
        if connector is None:
            self._update(output)
            return self._forward(output), None
        plan = pickle.loads(pickle.dumps(output.kv_connector_metadata))
        connector.handle_preemptions(plan)
        self._update(output)
        connector.bind_connector_metadata(plan)
        assert not output.has_sync_kv_loads
        hashes = self._forward(output)
        loads = [job for part in getattr(plan, "metadata", [plan]) for job in part.loads]
        for job in loads:
            self.memory.scribble(job.block_ids)
        connector.start_load_kv(None)
        is_drafting = bool(output.num_spec_tokens_to_schedule)
        if not is_drafting:
            connector.wait_for_save()
        results = connector.get_transfer_results(output.finished_req_ids)
        moved = KVConnectorOutput(
            finished_sending=results.finished_sending,
            finished_recving=results.finished_recving,
            failed_recving=results.failed_recving,
            invalid_block_ids=connector.get_block_ids_with_load_errors(),
            kv_connector_stats=connector.get_kv_connector_stats(),
            kv_connector_worker_meta=connector.build_connector_worker_meta(),
        )
        if is_drafting:  # after the draft model has run
            connector.wait_for_save()
        connector.clear_connector_metadata()
        return hashes, pickle.loads(pickle.dumps(moved))

    def _update(self, output: Any) -> None:
        """Requests as the step's output describes them."""
        for request_id in output.finished_req_ids:
            self.sequences.pop(request_id, None)
        for new in output.scheduled_new_reqs:
            self.sequences[new.req_id] = ToySequence(new.prompt_token_ids, new.block_ids[0])
        cached = output.scheduled_cached_reqs
        for request_id, blocks in zip(cached.req_ids, cached.new_block_ids, strict=True):
            sequence = self.sequences[request_id]
            if request_id in cached.resumed_req_ids:
                # Tokens that were sampled and then dropped must not be known any more.
                sequence.tokens = list(cached.all_token_ids[request_id])
                sequence.table = list(blocks[0])
            elif blocks is not None:
                sequence.table += blocks[0]

    def _forward(self, output: Any) -> dict[str, list[bytes]]:
        starts = {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
        cached = output.scheduled_cached_reqs
        starts |= dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        hashes = {}
        for request_id, count in output.num_scheduled_tokens.items():
            sequence, start = self.sequences[request_id], starts[request_id]
            sequence.drafts = list(output.scheduled_spec_decode_tokens.get(request_id, ()))
            wanted = count - len(sequence.drafts)
            if sequence.drafts and sequence.drafts[0] < 0:
                # The scheduler does not know them, nor how many were accepted in the last step.
                sequence.drafts = self.guess(sequence.tokens)
                start = len(sequence.tokens) - wanted
            known = sequence.tokens[start : start + wanted]
            assert len(known) == wanted, "a token that nobody has sampled"
            sequence.is_sampled = start + wanted == len(sequence.tokens)
            tokens = [*known, *sequence.drafts]
            hashes[request_id] = self.memory.forward(sequence.table, start, tokens)
        return hashes


class ToyEngine:
    """One engine core: scheduler, workers, and the loop over steps."""

    def __init__(self, model: Path, options: ToyOptions, engine_id: str = "toy") -> None:
        self.options = options
        self.config = engine_config(model, options)
        if self.config.kv_transfer_config is not None:
            self.config.kv_transfer_config.engine_id = engine_id
        kv_config = kv_cache_config(options)
        self.workers = [ToyWorker(self.config, kv_config, rank) for rank in range(options.workers)]
        hash_function = get_hash_fn_by_name(self.config.cache_config.prefix_caching_hash_algo)
        init_none_hash(hash_function)
        self._hasher = get_request_block_hasher(options.block_tokens, hash_function)
        scheduler_class = AsyncScheduler if options.is_async else Scheduler
        self.scheduler: Any = scheduler_class(
            vllm_config=self.config,
            kv_cache_config=kv_config,
            structured_output_manager=StructuredOutputManager(self.config),
            block_size=options.block_tokens,
            log_stats=True,
        )
        self.connector: Any = self.scheduler.connector
        self._aggregator = KVOutputAggregator(options.workers)
        self._in_flight: deque[tuple[Any, Any]] = deque()
        self.results: dict[str, ToyResult] = {}
        self.step_count = 0
        self.computed_tokens = 0
        self.before_output: Callable[[], None] = lambda: None
        """Called between a step's execution and its output, where vLLM takes aborts in."""

    # ---- requests

    def add(
        self,
        prompt: Sequence[int],
        max_tokens: int = 1,
        *,
        request_id: str = "",
        salt: str | None = None,
        adapter: LoRARequest | None = None,
        priority: int = 0,
        extra_args: dict[str, Any] | None = None,
        prompt_logprobs: int | None = None,
    ) -> str:
        """A request comes; its id."""
        request_id = request_id or f"r{len(self.results)}"
        sampling = SamplingParams(
            max_tokens=max_tokens,
            ignore_eos=True,
            extra_args=extra_args,
            prompt_logprobs=prompt_logprobs,
        )
        request = Request(
            request_id=request_id,
            prompt_token_ids=list(prompt),
            sampling_params=sampling,
            pooling_params=None,
            cache_salt=salt,
            lora_request=adapter,
            priority=priority,
            block_hasher=self._hasher,
        )
        self.results[request_id] = ToyResult(list(prompt))
        self.scheduler.add_request(request)
        return request_id

    def abort(self, request_id: str) -> None:
        """The client has gone."""
        self.scheduler.finish_requests(request_id, RequestStatus.FINISHED_ABORTED)

    def preempt(self) -> str | None:
        """Do to the last running request what the scheduler does when blocks run out.

        vLLM waits for steps that may still write its blocks, so they are taken in first.
        """
        self.drain()
        if not self.scheduler.running:
            return None
        request = self.scheduler.running.pop()
        self.scheduler._preempt_request(request, time.monotonic())
        self.scheduler.prev_step_scheduled_req_ids.discard(request.request_id)
        return str(request.request_id)

    # ---- steps, as in vLLM's EngineCore

    def step(self) -> bool:
        """One step; whether there was anything to do."""
        if self.options.is_async:
            return self._step_overlapped()
        if not self.scheduler.has_requests():
            return False
        output = self._schedule()
        self._take(output, self._execute(output))
        return True

    def _step_overlapped(self) -> bool:
        if self.scheduler.has_requests():
            output = self._schedule()
            result = None if self.options.runs_late else self._execute(output)
            self._in_flight.append((output, result))
            is_full = len(self._in_flight) == 2
            if not is_full and (
                output.total_num_scheduled_tokens or self.scheduler.has_requests()
            ):
                return True
        if not self._in_flight:
            return False
        self._take_oldest()
        return True

    def drain(self) -> None:
        """Take in the output of every step that runs."""
        while self._in_flight:
            self._take_oldest()

    def _take_oldest(self) -> None:
        output, result = self._in_flight.popleft()
        self._take(output, result or self._execute(output))

    def _schedule(self) -> Any:
        self.step_count += 1
        output = self.scheduler.schedule()
        self.computed_tokens += output.total_num_scheduled_tokens
        return output

    def _execute(self, output: Any) -> ModelRunnerOutput:
        """Run a step in all workers and put their outputs together as vLLM does."""
        by_worker = [worker.execute(output) for worker in self.workers]
        sampled = self._sample(output, [hashes for hashes, _ in by_worker])
        results = [
            ModelRunnerOutput(
                req_ids=list(sampled),
                req_id_to_index={request_id: i for i, request_id in enumerate(sampled)},
                sampled_token_ids=list(sampled.values()),
                kv_connector_output=moved,
            )
            for _, moved in by_worker
        ]
        if self.connector is None:
            return results[0]
        whole = self._aggregator.aggregate(results)
        if not output.total_num_scheduled_tokens:
            time.sleep(IDLE_STEP_S)
        return whole

    def _sample(
        self, output: Any, by_worker: Sequence[Mapping[str, list[bytes]]]
    ) -> dict[str, list[int]]:
        sampled: dict[str, list[int]] = {}
        for request_id in output.num_scheduled_tokens:
            hashes = list(zip(*(worker[request_id] for worker in by_worker), strict=True))
            sequences = [worker.sequences[request_id] for worker in self.workers]
            drafts, tokens = sequences[0].drafts, list[int]()
            if sequences[0].is_sampled:
                behind = hashes[len(hashes) - len(drafts) - 1 :]
                for draft, hashes_there in zip([*drafts, None], behind, strict=True):
                    shards = _one_of_each_shard(hashes_there, self.options)
                    tokens.append(next_token(shards, VOCABULARY))
                    if tokens[-1] != draft:
                        break
            for sequence in sequences:
                sequence.tokens += tokens
            sampled[request_id] = tokens
        return sampled

    def _take(self, output: Any, result: ModelRunnerOutput) -> None:
        self.before_output()
        for core in self.scheduler.update_from_output(output, result).values():
            for part in core.outputs:
                known = self.results[part.request_id]
                known.tokens += part.new_token_ids
                if part.prefill_stats is not None:
                    known.local = part.prefill_stats.num_local_cached_tokens
                    known.external = part.prefill_stats.num_external_cached_tokens
                if part.finish_reason is not None:
                    known.finish_reason = str(part.finish_reason)
        if self.options.draft_tokens and not self.options.is_async:
            running = [r for r in self.scheduler.running if not r.is_prefill_chunk]
            drafts = [self.workers[0].guess(list(r.all_token_ids)) for r in running]
            ids = [request.request_id for request in running]
            self.scheduler.update_draft_token_ids(DraftTokenIds(ids, drafts))

    def run(self) -> None:
        """Step until nothing is left to do."""
        for _ in range(STEPS_MAX):
            if not self.step():
                return
        raise AssertionError(f"{STEPS_MAX} steps and no end")

    def generate(self, prompt: Sequence[int], max_tokens: int = 1, **arguments: Any) -> ToyResult:
        """One request, to its end."""
        request_id = self.add(prompt, max_tokens, **arguments)
        self.run()
        return self.results[request_id]

    def reset(self, *, running: bool = False, external: bool = False) -> bool:
        """Reset the prefix cache, as by vLLM's HTTP call."""
        return bool(self.scheduler.reset_prefix_cache(running, external))

    def load_weights(self, weights: int) -> None:
        """Go on with other weights, as a trainer's update in place."""
        for worker in self.workers:
            worker.memory.weights = weights

    def close(self) -> None:
        """End both halves of the connector."""
        for worker in self.workers:
            if worker.connector is not None:
                worker.connector.shutdown()
        self.scheduler.shutdown()


def _one_of_each_shard(hashes: Sequence[bytes], options: ToyOptions) -> Sequence[bytes]:
    """Replicas hold the same bytes, and count once; where they differ the token is wrong."""
    shards = [hashes[i : i + options.replicas] for i in range(0, len(hashes), options.replicas)]
    return [one for shard in shards for one in sorted(set(shard))]
