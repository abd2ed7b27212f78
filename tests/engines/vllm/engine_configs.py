"""Real configurations of vLLM for tests, on the models of `make setup`, without engines."""

import dataclasses
import enum
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
)

MODELS = Path(__file__).parents[3] / ".venv" / "models"
TINY = MODELS / "tiny-llama"
BLOCKS = 6


def engine_config(model: Path = TINY, **arguments: Any) -> Any:
    """A VllmConfig as the engine core has it, but for what is only known with a KV cache."""
    return EngineArgs(model=str(model), **arguments).create_engine_config()


@contextmanager
def restored(vllm_config: Any) -> Iterator[Any]:
    """Lends a configuration to a test that changes it: every part is put back as it was."""
    values = (getattr(vllm_config, field.name) for field in dataclasses.fields(vllm_config))
    parts = [vllm_config, *(value for value in values if dataclasses.is_dataclass(value))]
    parts.append(vllm_config.model_config.hf_config)
    before = [dict(vars(part)) for part in parts]
    yield vllm_config
    for part, content in zip(parts, before, strict=True):
        vars(part).clear()
        vars(part).update(content)


def attention_spec(vllm_config: Any) -> Any:
    """The spec of a layer of a plain decoder."""
    model_config = vllm_config.model_config
    return FullAttentionSpec(
        block_size=vllm_config.cache_config.block_size,
        num_kv_heads=model_config.get_num_kv_heads(vllm_config.parallel_config),
        head_size=model_config.get_head_size(),
        dtype=model_config.dtype,
    )


def kv_cache_config(vllm_config: Any, spec: Any = None, layout: str = "LBHNC") -> Any:
    """The KV cache config of one group of all layers."""
    spec = spec or attention_spec(vllm_config)
    count = vllm_config.model_config.hf_config.num_hidden_layers
    names = [f"model.layers.{number}.self_attn.attn" for number in range(count)]
    page_bytes = spec.page_size_bytes
    outermost = layout.startswith("B")
    layer_stride = page_bytes if outermost else page_bytes * BLOCKS
    block_stride = page_bytes * count if outermost else page_bytes
    size = page_bytes * BLOCKS * count
    return KVCacheConfig(
        num_blocks=BLOCKS,
        kv_cache_tensors=[KVCacheTensor(size, names, layer_stride, block_stride)],
        kv_cache_groups=[KVCacheGroupSpec(names, spec)],
        kv_cache_layout=layout,
    )


def another(value: Any) -> Any:
    """Some other value of the same kind."""
    if isinstance(value, enum.Enum):
        return next(member for member in type(value) if member is not value)
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return value + 1
    if isinstance(value, str):
        return value + "-other"
    if isinstance(value, torch.dtype):
        return torch.float64
    if isinstance(value, dict):
        return {**value, "other": 1}
    if isinstance(value, list | tuple):
        return [*value, "other"]
    if isinstance(value, set):
        return {*value, "other"}
    if dataclasses.is_dataclass(value):
        first = dataclasses.fields(value)[0].name
        return dataclasses.replace(value, **{first: another(getattr(value, first))})
    assert value is None, value
    return "other"
