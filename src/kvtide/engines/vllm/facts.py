"""What only a worker can see of its KV cache: facts for the fingerprint, places for the mover.

    register_kv_caches(views) ─┬─► WorkerFacts  ─ to the node, compared over ranks ─► fingerprint
                               └─► PagePlace, one for each layer ─ stays in this process

A view is `[kernel blocks, heads, tokens, content]`, strided over one allocation of all layers. We
use of it only where it begins, how far apart its blocks are, and that a block's bytes lie
together: a page is opaque (on CPUs it is packed for the processor's instruction set). Layers that
share KV appear as aliases of one page and are taken once.

    address ─►│ page of block 0 │ … │ page of block 1 │ …        page_bytes ≤ block_stride_bytes
              │◄── block_stride_bytes ─►│

Rejected: the order of the mapping given to us. Layers are taken in the order of the KV cache
config, which the scheduler role and every engine of the same config agree on.
"""

import os
import platform
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import torch
from vllm.platforms import current_platform
from vllm.v1.kv_cache_interface import UniformTypeKVCacheSpecs

from kvtide.core.keys import FieldValue
from kvtide.core.reasons import Off, OffReason
from kvtide.engines.vllm.plain import FieldUnknown, plain
from kvtide.movers.base import PagePlace
from kvtide.movers.compare import PageNumbers

PLAIN_KINDS = frozenset({"FullAttentionSpec", "MLAAttentionSpec"})
PLAIN_DTYPES = frozenset({"float16", "bfloat16", "float32"})
"""Kinds of attention and of KV that are tested; `support` goes by them too."""

EQUAL_IN_ALL_RANKS = ("worker.device", "worker.isa")
"""Facts that no parallelism makes different; the others are equal in the ranks of one shard."""

_ONEDNN_VARIABLES = ("DEFAULT_FPMATH_MODE", "MAX_CPU_ISA", "CPU_ISA_HINTS")
KERNEL_VARIABLES = (
    "CUBLAS_WORKSPACE_CONFIG",
    *(f"{prefix}_{name}" for prefix in ("ONEDNN", "DNNL") for name in _ONEDNN_VARIABLES),
    "MKL_CBWR",
    "MKL_ENABLE_INSTRUCTIONS",
    "NVIDIA_TF32_OVERRIDE",
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
)
"""Variables by which the libraries below torch and vLLM choose kernels, or compute in less than
they are asked to: where one is set, the KV of the same model has other bytes."""

_CPU_FLAGS = ("amx", "avx", "fma", "neon", "asimd", "sve", "sme", "vsx", "vxe", "rvv")


class PageFacts(msgspec.Struct, frozen=True):
    """One layer's page, as numbers and names: equal facts mean bytes of one format."""

    layer: str
    kind: str
    backend: str
    dtype: str
    page_bytes: int
    kernel_blocks: int
    """Kernel blocks that a page is divided into."""
    shape: tuple[int, ...]
    """Of a kernel block: heads, tokens, content."""
    strides: tuple[int, ...]
    """Bytes between neighbours along each of these."""

    @property
    def numbers(self) -> PageNumbers:
        """What its bytes are, to be compared. CPU attention keeps a head's keys, then its values
        (vLLM's `cpu_attn` cuts its cache so); in pages of others they are not told apart."""
        is_apart = self.backend == "CPU_ATTN" and not self.strides[0] % 2
        return PageNumbers(self.dtype, self.strides[0] // 2 if is_apart else 0)


class WorkerFacts(msgspec.Struct, frozen=True):
    """What a worker tells the node in its hello: what its pages are, and which part of a chunk."""

    rank: int
    shard_index: int
    shard_count: int
    block_count: int
    device: str
    isa: str
    pages: tuple[PageFacts, ...]

    @property
    def block_bytes(self) -> int:
        """Bytes of one block in this worker, unpadded: what a cell of its shard must hold."""
        return sum(page.page_bytes for page in self.pages)

    @property
    def numbers(self) -> list[PageNumbers]:
        """What the bytes of each page are."""
        return [page.numbers for page in self.pages]

    def fields(self) -> dict[str, FieldValue]:
        """The fields of the fingerprint that this worker tells.

        Processor and instruction set are equal in all ranks of an engine. The others are equal in
        the ranks of one shard, and in all shards of a pipeline stage: stages have other layers.
        """
        return {
            "worker.device": self.device,
            "worker.isa": self.isa,
            "worker.backends": sorted({page.backend for page in self.pages}),
            "worker.page_bytes": [page.page_bytes for page in self.pages],
            "worker.pages": plain(msgspec.to_builtins(self.pages), "worker.pages"),
        }


def agreed_facts(facts: list[dict[str, Any]]) -> dict[str, FieldValue] | Off:
    """What all workers have in common, and what each shard's pages are; Off where they differ."""
    try:
        workers = [msgspec.convert(fact, WorkerFacts) for fact in facts]
    except msgspec.ValidationError as error:
        return Off(OffReason.WORKERS_DIFFER, f"facts that cannot be read: {error}")
    refused = refused_pages(workers)
    if refused is not None:
        return refused
    shards: dict[int, dict[str, FieldValue]] = {}
    for worker in workers:
        fields = worker.fields()
        of_shard = shards.setdefault(worker.shard_index, fields)
        for name, value in fields.items():
            must_equal = workers[0].fields() if name in EQUAL_IN_ALL_RANKS else of_shard
            if value != must_equal[name]:
                return Off(OffReason.WORKERS_DIFFER, f"{name} of rank {worker.rank}")
    if sorted(shards) != list(range(workers[0].shard_count)):
        return Off(OffReason.WORKERS_DIFFER, f"shards {sorted(shards)} are there")
    return {
        name: value if name in EQUAL_IN_ALL_RANKS else [shards[i][name] for i in sorted(shards)]
        for name, value in shards[0].items()
    }


def refused_pages(workers: Sequence[WorkerFacts]) -> Off | None:
    """What `support.unsupported` cannot see in the scheduler role: the layers of every worker.

    There, layers of a mixed group and later pipeline stages are told by the first of them only.
    """
    for page in (page for worker in workers for page in worker.pages):
        if page.kind not in PLAIN_KINDS:
            return Off(OffReason.GROUPS, f"{page.layer} is {page.kind}, not plain attention")
        if page.dtype not in PLAIN_DTYPES:
            return Off(OffReason.QUANTISED_CACHE, f"KV of {page.layer} is stored as {page.dtype}")
    return None


def worker_facts(
    kv_caches: Mapping[str, Any], vllm_config: Any, kv_cache_config: Any
) -> WorkerFacts | Off:
    """Look at the tensors given to `register_kv_caches`; Off names what cannot be determined.

    Called once in each worker, on its main thread.
    """
    try:
        return _facts(kv_caches, vllm_config, kv_cache_config)
    except FieldUnknown as unknown:
        return Off(OffReason.FIELD_UNKNOWN, str(unknown))
    except Exception as error:  # vLLM's objects are not ours: any surprise is an unknown field
        return Off(OffReason.FIELD_UNKNOWN, f"worker: {error!r}")


def page_places(
    kv_caches: Mapping[str, Any], vllm_config: Any, kv_cache_config: Any
) -> tuple[PagePlace, ...]:
    """Where the pages of `worker_facts` lie, in the same order; only after that gave facts."""
    return tuple(
        PagePlace(
            view.data_ptr(),
            view.stride(0) * view.element_size() * _kernel_blocks(name, view, kv_cache_config),
            spec.page_size_bytes,
        )
        for name, view, spec in _layers(kv_caches, kv_cache_config)
    )


def _facts(kv_caches: Mapping[str, Any], vllm_config: Any, kv_cache_config: Any) -> WorkerFacts:
    parallel = vllm_config.parallel_config
    layers = _layers(kv_caches, kv_cache_config)
    modules = vllm_config.compilation_config.static_forward_context
    tensor_ranks, replicas = parallel.tensor_parallel_size, kv_cache_config.kv_tp_replicas
    if tensor_ranks % replicas:
        raise FieldUnknown(f"worker.shard: {replicas} replicas over {tensor_ranks} ranks")
    # Ranks count first over tensor, then over pipeline parallelism; neighbours are replicas.
    stage, tensor_rank = divmod(parallel.rank, tensor_ranks)
    shards_of_stage = tensor_ranks // replicas
    return WorkerFacts(
        rank=parallel.rank,
        shard_index=stage * shards_of_stage + tensor_rank // replicas,
        shard_count=parallel.pipeline_parallel_size * shards_of_stage,
        block_count=kv_cache_config.num_blocks,
        device=_device(),
        isa="+".join(sorted({_isa(name, modules[name]) for name, _, _ in layers})),
        pages=tuple(
            _page(name, view, spec, modules[name], kv_cache_config) for name, view, spec in layers
        ),
    )


def _layers(kv_caches: Mapping[str, Any], kv_cache_config: Any) -> list[tuple[str, Any, Any]]:
    """Each page once: the layer's name, its view and its spec, in the order of the config."""
    found: dict[int, tuple[str, Any, Any]] = {}
    for group in kv_cache_config.kv_cache_groups:
        for name in group.layer_names:
            spec = group.kv_cache_spec
            if isinstance(spec, UniformTypeKVCacheSpecs):
                spec = spec.kv_cache_specs[name]
            if name not in kv_caches:
                raise FieldUnknown(f"worker.pages: vLLM registered no KV cache of {name}")
            view = kv_caches[name]
            found.setdefault(view.data_ptr(), (name, view, spec))
    for name, view in kv_caches.items():
        if view.data_ptr() not in found:
            raise FieldUnknown(f"worker.pages: {name} is in no KV cache group")
    if not found:
        raise FieldUnknown("worker.pages: vLLM registered no KV cache")
    return list(found.values())


def _kernel_blocks(name: str, view: Any, kv_cache_config: Any) -> int:
    """The first dimension counts kernel blocks, several to a block where they are smaller."""
    count, rest = divmod(view.shape[0], kv_cache_config.num_blocks)
    if rest or not count:
        blocks = kv_cache_config.num_blocks
        raise FieldUnknown(f"worker.pages: {name} has {view.shape[0]} kernel blocks of {blocks}")
    return int(count)


def _page(name: str, view: Any, spec: Any, module: Any, kv_cache_config: Any) -> PageFacts:
    item_bytes = view.element_size()
    strides = tuple(stride * item_bytes for stride in view.stride())
    count = _kernel_blocks(name, view, kv_cache_config)
    span = strides[0] * (count - 1) + item_bytes
    span += sum(
        (size - 1) * stride for size, stride in zip(view.shape[1:], strides[1:], strict=True)
    )
    page_bytes = spec.page_size_bytes
    if span > page_bytes or strides[0] * count < page_bytes:
        raise FieldUnknown(
            f"worker.pages: a block of {name} spans {span} bytes, its page has {page_bytes}"
            f" and the next begins after {strides[0] * count}"
        )
    return PageFacts(
        layer=name,
        kind=type(spec).__name__,
        backend=module.get_attn_backend().get_name(),
        dtype=str(plain(view.dtype, "worker.dtype")),
        page_bytes=page_bytes,
        kernel_blocks=count,
        shape=tuple(view.shape[1:]),
        strides=strides[1:],
    )


def _isa(name: str, module: Any) -> str:
    """The instruction set that CPU attention packs pages for; empty where there is none.

    vLLM's metadata builder chooses it and notes it in each layer, before KV is registered.
    """
    if module.get_attn_backend().get_name() != "CPU_ATTN":
        return ""
    isa = getattr(module, "isa", None)
    if not isa:
        raise FieldUnknown(f"worker.isa: {name} does not say what its pages are packed for")
    return str(isa)


def _device() -> str:
    """The processor that computes KV, and whatever else its kernels are chosen by."""
    asked = [f"{name}={os.environ[name]!a}" for name in KERNEL_VARIABLES if name in os.environ]
    return " ".join([_processor(), *asked])


def _processor() -> str:
    if current_platform.is_cpu():
        flags = sorted(
            name
            for name, there in torch.cpu.get_capabilities().items()
            if there is True and name.startswith(_CPU_FLAGS)
        )
        capability = torch.backends.cpu.get_cpu_capability()
        return " ".join([platform.machine(), capability, *flags])
    index = torch.accelerator.current_device_index()
    capability = current_platform.get_device_capability(index)
    return f"{current_platform.get_device_name(index)} {capability}"
