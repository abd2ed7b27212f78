"""What a worker sees of its KV cache: every page once, its place, its shard; nothing guessed."""

import ctypes
import dataclasses
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from vllm.v1.kv_cache_interface import (
    KVCacheGroupSpec,
    MLAAttentionSpec,
    UniformTypeKVCacheSpecs,
    create_kv_cache_views,
)
from vllm.v1.kv_cache_layout import KVCacheLayout

from kvtide.core.keys import encode
from kvtide.core.reasons import Off, OffReason
from kvtide.engines.vllm.facts import (
    WorkerFacts,
    page_places,
    refused_pages,
    worker_facts,
)
from kvtide.movers.base import PagePlace
from tests.engines.vllm.engine_configs import (
    BLOCKS,
    attention_spec,
    engine_config,
    kv_cache_config,
)

# Warnings of what vLLM imports are not ours to end.
pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("ignore")]

LAYERS = 4


class Layer:
    """Stands for an attention layer as the model runner leaves it."""

    def __init__(self, backend: str = "CPU_ATTN", isa: str | None = "vec") -> None:
        self.isa = isa
        self._backend = SimpleNamespace(get_name=lambda: backend)

    def get_attn_backend(self) -> Any:
        return self._backend


@pytest.fixture(scope="module")
def shared_config() -> Any:
    return engine_config()


@pytest.fixture
def config(shared_config: Any) -> Any:
    """The parts of a configuration that a worker looks at, free to change."""
    names = kv_cache_config(shared_config).kv_cache_groups[0].layer_names
    return SimpleNamespace(
        parallel_config=SimpleNamespace(rank=0, tensor_parallel_size=1, pipeline_parallel_size=1),
        compilation_config=SimpleNamespace(
            static_forward_context={name: Layer() for name in names}
        ),
        full=shared_config,
    )


def views(kv: Any, kernel_block_tokens: int | None = None) -> dict[str, torch.Tensor]:
    """Tensors as vLLM makes them: strided views over one allocation."""
    (tensor,) = kv.kv_cache_tensors
    layout = KVCacheLayout[kv.kv_cache_layout]
    raw = torch.zeros(tensor.size, dtype=torch.int8)
    made = create_kv_cache_views(
        raw,
        kv.kv_cache_groups[0].kv_cache_spec,
        kv.num_blocks,
        layout,
        tensor,
        kernel_block_tokens,
    )
    return dict(zip(tensor.layers, made, strict=True))


def facts_of(caches: Any, config: Any, kv: Any) -> WorkerFacts:
    facts = worker_facts(caches, config, kv)
    assert isinstance(facts, WorkerFacts), facts
    return facts


def off_of(caches: Any, config: Any, kv: Any) -> Off:
    off = worker_facts(caches, config, kv)
    assert isinstance(off, Off), off
    assert off.reason is OffReason.FIELD_UNKNOWN
    return off


@pytest.mark.parametrize(
    ("layout", "kernel_block_tokens"),
    [
        ("LBHNC", None),
        ("LBNHC", None),
        ("BLHNC", None),
        ("BLNHC", None),
        ("LBHNC", 32),  # vLLM splits blocks only where each layer's lie side by side
        ("LBNHC", 32),
    ],
)
def test_the_bytes_at_each_place_are_the_page_of_that_block(
    layout: str, kernel_block_tokens: int | None, config: Any
) -> None:
    """Each block of each layer gets a byte of its own, then is read back through its place."""
    kv = kv_cache_config(config.full, layout=layout)
    caches = views(kv, kernel_block_tokens)
    places = page_places(caches, config, kv)
    facts = facts_of(caches, config, kv)
    page_bytes = kv.kv_cache_groups[0].kv_cache_spec.page_size_bytes
    assert [page.page_bytes for page in facts.pages] == [page_bytes] * LAYERS
    assert {page.kernel_blocks for page in facts.pages} == {4 if kernel_block_tokens else 1}
    for layer, view in enumerate(caches.values()):
        for block in range(BLOCKS):
            ratio = facts.pages[layer].kernel_blocks
            part = view[block * ratio : (block + 1) * ratio]
            part.copy_(torch.full(part.shape, 1 + layer * BLOCKS + block).to(part.dtype))
    for layer, (place, view) in enumerate(zip(places, caches.values(), strict=True)):
        for block in range(BLOCKS):
            read = page_at(place, block).view(view.dtype)
            assert torch.all(read == 1 + layer * BLOCKS + block), (layer, block)


def page_at(place: PagePlace, block: int) -> torch.Tensor:
    """The bytes that a mover would copy."""
    address = place.address + block * place.block_stride_bytes
    raw = (ctypes.c_char * place.page_bytes).from_address(address)
    return torch.frombuffer(bytearray(raw), dtype=torch.int8)


def test_layers_are_taken_in_the_order_of_the_config_whatever_the_mapping(config: Any) -> None:
    kv = kv_cache_config(config.full)
    caches = views(kv)
    backwards = dict(reversed(caches.items()))
    assert facts_of(caches, config, kv) == facts_of(backwards, config, kv)
    assert page_places(caches, config, kv) == page_places(backwards, config, kv)


def test_layers_that_share_kv_are_one_page(config: Any) -> None:
    kv = kv_cache_config(config.full)
    caches = views(kv)
    first = next(iter(caches))
    shared = {**caches, "model.layers.9.self_attn.attn": caches[first]}
    assert facts_of(shared, config, kv) == facts_of(caches, config, kv)
    assert len(page_places(shared, config, kv)) == LAYERS
    kv.kv_cache_groups[0].layer_names.append("model.layers.9.self_attn.attn")
    assert len(facts_of(shared, config, kv).pages) == LAYERS, "some runners add it to the group"


def test_each_layer_of_a_mixed_group_has_its_own_page_size(config: Any) -> None:
    spec = attention_spec(config.full)
    wide = dataclasses.replace(spec, head_size=2 * spec.head_size, head_size_v=spec.head_size_v)
    kv = kv_cache_config(config.full)
    names = kv.kv_cache_groups[0].layer_names
    wide_kv = kv_cache_config(config.full, wide)
    caches = {**views(kv), names[1]: views(wide_kv)[names[1]]}
    specs = dict.fromkeys(names, spec) | {names[1]: wide}
    kv.kv_cache_groups[0].kv_cache_spec = UniformTypeKVCacheSpecs(
        block_size=spec.block_size, kv_cache_specs=specs
    )
    facts = facts_of(caches, config, kv)
    sizes = [page.page_bytes for page in facts.pages]
    assert sizes == [specs[name].page_size_bytes for name in names]
    assert facts.block_bytes == sum(sizes)


def test_a_padded_page_is_whole_only_within_its_stride(config: Any) -> None:
    spec = attention_spec(config.full)
    padded = dataclasses.replace(spec, page_size_padded=spec.page_size_bytes + 512)
    kv = kv_cache_config(config.full, padded)
    caches = views(kv)
    assert facts_of(caches, config, kv).pages[0].page_bytes == spec.page_size_bytes + 512
    kv.kv_cache_groups[0].kv_cache_spec = dataclasses.replace(spec, page_size_padded=10**9)
    assert "the next begins" in off_of(caches, config, kv).detail


@pytest.mark.parametrize("layout", ["LHBNC", "BHLNC"])
def test_a_page_whose_bytes_are_scattered_is_refused(layout: str, config: Any) -> None:
    kv = kv_cache_config(config.full, layout="LBHNC")
    kv.kv_cache_layout = layout
    (tensor,) = kv.kv_cache_tensors
    spec = kv.kv_cache_groups[0].kv_cache_spec
    shape = (BLOCKS, spec.num_kv_heads, spec.block_size, 2 * spec.head_size)
    inner = spec.block_size * 2 * spec.head_size
    strides = (inner, inner * BLOCKS, 2 * spec.head_size, 1)
    caches = {
        name: torch.zeros(tensor.size, dtype=spec.dtype).as_strided(shape, strides)
        for name in tensor.layers
    }
    assert "spans" in off_of(caches, config, kv).detail


@pytest.mark.parametrize(
    ("tensor", "pipeline", "replicas", "shards"),
    [
        (1, 1, 1, [0]),
        (2, 1, 1, [0, 1]),
        (4, 1, 2, [0, 0, 1, 1]),
        (4, 1, 4, [0, 0, 0, 0]),
        (1, 2, 1, [0, 1]),
        (2, 2, 1, [0, 1, 2, 3]),
        (4, 2, 2, [0, 0, 1, 1, 2, 2, 3, 3]),
    ],
)
def test_ranks_hold_shards_and_replicas_hold_one_together(
    tensor: int, pipeline: int, replicas: int, shards: list[int], config: Any
) -> None:
    kv = kv_cache_config(config.full)
    kv.kv_tp_replicas = replicas
    caches = views(kv)
    config.parallel_config.tensor_parallel_size = tensor
    config.parallel_config.pipeline_parallel_size = pipeline
    found = []
    for rank in range(tensor * pipeline):
        config.parallel_config.rank = rank
        facts = facts_of(caches, config, kv)
        assert (facts.rank, facts.shard_count) == (rank, 1 + max(shards))
        found.append(facts.shard_index)
    assert found == shards


def test_facts_are_plain_and_hold_no_address(config: Any) -> None:
    """Two workers with their KV at other addresses tell the same."""
    kv = kv_cache_config(config.full)
    first, second = views(kv), views(kv)
    assert page_places(first, config, kv) != page_places(second, config, kv)
    facts = facts_of(first, config, kv)
    assert facts == facts_of(second, config, kv)
    assert msgspec.convert(msgspec.json.decode(msgspec.json.encode(facts)), WorkerFacts) == facts
    fields = facts.fields()
    assert encode(fields) == encode(msgspec.json.decode(msgspec.json.encode(fields)))
    for place in page_places(first, config, kv):
        assert str(place.address) not in str(facts)


def test_processor_instruction_set_backend_and_strides_are_fields(config: Any) -> None:
    kv = kv_cache_config(config.full)
    before = facts_of(views(kv), config, kv).fields()
    assert before["worker.isa"] == "vec"
    assert before["worker.backends"] == ["CPU_ATTN"]
    assert str(before["worker.device"]).startswith(
        f"x86_64 {torch.backends.cpu.get_cpu_capability()}"
    )
    modules = config.compilation_config.static_forward_context
    name = next(iter(modules))
    modules[name] = Layer(isa="amx")
    assert facts_of(views(kv), config, kv).fields()["worker.isa"] == "amx+vec"
    modules[name] = Layer("CPU_MLA", isa=None)
    assert facts_of(views(kv), config, kv).fields()["worker.backends"] == ["CPU_ATTN", "CPU_MLA"]
    modules[name] = Layer()
    other = kv_cache_config(config.full, layout="LBNHC")
    assert facts_of(views(other), config, other).fields()["worker.pages"] != before["worker.pages"]
    split = facts_of(views(kv, 32), config, kv).fields()
    assert split["worker.pages"] != before["worker.pages"]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("ONEDNN_DEFAULT_FPMATH_MODE", "BF16"),
        ("DNNL_MAX_CPU_ISA", "SSE41"),
        ("MKL_CBWR", "COMPATIBLE"),
        ("NVIDIA_TF32_OVERRIDE", "\udcff"),
    ],
)
def test_what_makes_libraries_compute_otherwise_counts(
    config: Any, monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    """Two engines of which one computes in less, by a variable that vLLM does not look at."""
    kv = kv_cache_config(config.full)
    monkeypatch.delenv(name, raising=False)
    before = facts_of(views(kv), config, kv)
    monkeypatch.setenv(name, value)
    after = facts_of(views(kv), config, kv)
    differ = {field for field, said in after.fields().items() if said != before.fields()[field]}
    assert differ == {"worker.device"}
    assert msgspec.msgpack.encode(after)


def test_what_cannot_be_seen_is_unknown_and_named(config: Any) -> None:
    kv = kv_cache_config(config.full)
    caches = views(kv)
    name = next(iter(caches))
    fewer = {key: view for key, view in caches.items() if key != name}
    assert f"no KV cache of {name}" in off_of(fewer, config, kv).detail
    more = {**caches, "model.stranger": torch.zeros(4)}
    assert "model.stranger" in off_of(more, config, kv).detail
    cut = {**caches, name: caches[name][: BLOCKS - 1]}
    assert "kernel blocks" in off_of(cut, config, kv).detail
    kv.kv_tp_replicas = 2
    assert "replicas" in off_of(caches, config, kv).detail
    kv.kv_tp_replicas = 1
    config.compilation_config.static_forward_context[name] = Layer(isa=None)
    assert "worker.isa" in off_of(caches, config, kv).detail
    del config.compilation_config.static_forward_context[name]
    assert name in off_of(caches, config, kv).detail
    kv.kv_cache_groups = [KVCacheGroupSpec([], attention_spec(config.full))]
    assert "registered no KV cache" in off_of({}, config, kv).detail


def test_pages_that_only_workers_see_are_refused_like_the_others(config: Any) -> None:
    kv = kv_cache_config(config.full)
    facts = facts_of(views(kv), config, kv)
    assert refused_pages([facts, facts]) is None
    page = facts.pages[0]

    def with_page(**changes: Any) -> WorkerFacts:
        changed = msgspec.structs.replace(page, **changes)
        return msgspec.structs.replace(facts, pages=(*facts.pages[1:], changed))

    assert refused_pages([facts, with_page(kind="MLAAttentionSpec")]) is None
    odd, packed = with_page(kind="MambaSpec"), with_page(dtype="float8_e4m3fn")
    assert refused_pages([facts, odd]).reason is OffReason.GROUPS  # type: ignore[union-attr]
    assert refused_pages([packed]).reason is OffReason.QUANTISED_CACHE  # type: ignore[union-attr]


def test_latent_attention_has_one_head_and_no_values(config: Any) -> None:
    spec = attention_spec(config.full)
    latent = MLAAttentionSpec(
        block_size=spec.block_size, num_kv_heads=1, head_size=576, dtype=spec.dtype
    )
    kv = kv_cache_config(config.full, latent)
    page = facts_of(views(kv), config, kv).pages[0]
    assert (page.kind, page.shape) == ("MLAAttentionSpec", (1, spec.block_size, 576))
    assert page.page_bytes == spec.block_size * 576 * 2
