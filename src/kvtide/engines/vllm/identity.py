"""Fingerprint fields of a vLLM engine: everything constant in it that changes its KV bytes.

    engine_fields(...)      scheduler role: what the configuration says, once, for all ranks
    facts.worker_facts(...) each worker: what only it can see (strides, backend, processor)
    weights.WeightsDigest   the bytes of the weights, in the background
    ── joined by `session`, with `chunk_tokens` and our format version ──► fingerprint

A field is named `section.name`; the sections are listed at the end of this file. What does not
count stands in `left_out`, everything else does. What has no plain value makes the whole identity
unknown, never a field less.

What selects other kernels (compilation, backends, parallel shape) counts too: the same model then
computes the same KV up to rounding, but a hit has to be the bytes that this engine would have
made. Sizes of batches, graphs and memory do not count: one engine's own steps differ in them.

Rejected: vLLM's own `compute_hash`. It names what changes a compiled graph, contains the model's
path, and leaves out what changes bytes but no graph.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
import vllm
from vllm import envs
from vllm.v1.kv_cache_interface import iter_layer_specs

from kvtide.core.keys import FieldValue
from kvtide.core.reasons import Off, OffReason
from kvtide.engines.vllm import left_out, model_fields
from kvtide.engines.vllm.plain import FieldUnknown, config_fields, plain


def engine_fields(vllm_config: Any, kv_cache_config: Any) -> dict[str, FieldValue] | Off:
    """The fields that the scheduler role knows; Off names the first that cannot be determined.

    Called once, when the connector's scheduler role is built: by then vLLM has resolved
    everything. Reads small files of the model, never its weights.
    """
    fields: dict[str, FieldValue] = {}
    for section, collect in SECTIONS.items():
        try:
            for name, value in collect(vllm_config, kv_cache_config).items():
                full_name = f"{section}.{name}"
                fields[full_name] = plain(value, full_name)
        except FieldUnknown as unknown:
            return Off(OffReason.FIELD_UNKNOWN, str(unknown))
        except Exception as error:  # vLLM's objects are not ours: any surprise is an unknown field
            return Off(OffReason.FIELD_UNKNOWN, f"{section}: {error!r}")
    return fields


def _engine(vllm_config: Any, _: Any) -> Mapping[str, object]:
    """The torch version counts because torch's kernels compute KV as much as vLLM's do; each vLLM
    pins one torch, so that it seldom tells two engines apart."""
    return {
        "name": "vllm",
        "version": vllm.__version__,
        "torch": torch.__version__,
        "device": vllm_config.device_config.device_type,
    }


def _model(vllm_config: Any, _: Any) -> Mapping[str, object]:
    return model_fields.model_fields(vllm_config.model_config)


def _class(vllm_config: Any, _: Any) -> Mapping[str, object]:
    return model_fields.class_fields(vllm_config.model_config)


def _hf(vllm_config: Any, _: Any) -> Mapping[str, object]:
    return model_fields.hf_fields(vllm_config.model_config.hf_config)


def _hf_text(vllm_config: Any, _: Any) -> Mapping[str, object]:
    model_config = vllm_config.model_config
    if model_config.hf_text_config is model_config.hf_config:
        return {}
    return model_fields.hf_fields(model_config.hf_text_config)


def _files(vllm_config: Any, _: Any) -> Mapping[str, object]:
    return model_fields.file_fields(vllm_config)


def _multimodal(vllm_config: Any, _: Any) -> Mapping[str, object]:
    config = vllm_config.model_config.multimodal_config
    if config is None:
        return {}
    if config.mm_encoder_fp8_scale_path is not None:
        raise FieldUnknown("multimodal.mm_encoder_fp8_scale_path names a file")
    return config_fields(config, left_out.MULTIMODAL_LEFT_OUT)


def _cache(vllm_config: Any, kv_cache_config: Any) -> Mapping[str, object]:
    layout = kv_cache_config.kv_cache_layout or vllm_config.cache_config.kv_cache_layout
    if layout is None:
        raise FieldUnknown("cache.layout is not resolved")
    return {**config_fields(vllm_config.cache_config, left_out.CACHE_LEFT_OUT), "layout": layout}


def _groups(_: Any, kv_cache_config: Any) -> Mapping[str, object]:
    """Page bytes, block size and kind stand in a field of their own: they explain most mismatches.

    With pipeline parallelism these are the layers of the first stage; the other stages' stand in
    their workers' facts.
    """
    groups = kv_cache_config.kv_cache_groups
    specs = [spec for group in groups for spec in iter_layer_specs(group.kv_cache_spec)]
    return {
        "kinds": [type(spec).__name__ for spec in specs],
        "block_tokens": [spec.block_size for spec in specs],
        "page_bytes": [spec.page_size_bytes for spec in specs],
        "specs": specs,
        "layers": [group.layer_names for group in groups],
        "draft_layers": [group.is_eagle_group for group in groups],
        "kv_tp_replicas": kv_cache_config.kv_tp_replicas,
    }


def _parallel(vllm_config: Any, _: Any) -> Mapping[str, object]:
    config = vllm_config.parallel_config
    fields = config_fields(config, left_out.PARALLEL_LEFT_OUT)
    fields["experts_over"] = config.data_parallel_size if config.is_moe_model else 1
    return fields


def _attention(vllm_config: Any, _: Any) -> Mapping[str, object]:
    return config_fields(vllm_config.attention_config, left_out.ATTENTION_LEFT_OUT)


def _kernel(vllm_config: Any, _: Any) -> Mapping[str, object]:
    return config_fields(vllm_config.kernel_config, left_out.KERNEL_LEFT_OUT)


def _compilation(vllm_config: Any, _: Any) -> Mapping[str, object]:
    return config_fields(vllm_config.compilation_config, left_out.COMPILATION_LEFT_OUT)


def _lora(vllm_config: Any, _: Any) -> Mapping[str, object]:
    config = vllm_config.lora_config
    return {} if config is None else config_fields(config, left_out.LORA_LEFT_OUT)


def _speculative(vllm_config: Any, _: Any) -> Mapping[str, object]:
    config = vllm_config.speculative_config
    if config is None:
        return {}
    if config.method == "custom_class":
        raise FieldUnknown("speculative.method custom_class brings code of its own")
    return config_fields(config, left_out.SPECULATIVE_LEFT_OUT)


def _draft(vllm_config: Any, _: Any) -> Mapping[str, object]:
    """The draft model, whose layers' KV lies in our pages too."""
    speculative = vllm_config.speculative_config
    draft = speculative and speculative.draft_model_config
    if not draft or draft is vllm_config.model_config:
        return {}
    return {
        "model": model_fields.model_fields(draft),
        "class": model_fields.class_fields(draft),
        "hf": model_fields.hf_fields(draft.hf_config),
        "hf_text": model_fields.hf_fields(draft.hf_text_config),
    }


def _others(vllm_config: Any, _: Any) -> Mapping[str, object]:
    """Configs of few fields that are mostly absent."""
    return {
        "additional": vllm_config.additional_config,
        "diffusion": vllm_config.diffusion_config,
        "engram": vllm_config.engram_config,
    }


def _environment(_: Any, __: Any) -> Mapping[str, object]:
    """What vLLM itself counts as changing what is computed, resolved, without what cannot.

    This is not about keys: no variable takes part in naming content. These choose kernels.
    """
    return {
        name: value
        for name, value in envs.compile_factors().items()
        if name not in left_out.ENV_LEFT_OUT
        and not name.startswith(left_out.ENV_LEFT_OUT_PREFIXES)
        and not name.endswith(left_out.ENV_LEFT_OUT_SUFFIXES)
    }


SECTIONS: Mapping[str, Callable[[Any, Any], Mapping[str, object]]] = {
    "engine": _engine,
    "model": _model,
    "class": _class,
    "hf": _hf,
    "hf_text": _hf_text,
    "files": _files,
    "multimodal": _multimodal,
    "cache": _cache,
    "groups": _groups,
    "parallel": _parallel,
    "attention": _attention,
    "kernel": _kernel,
    "compilation": _compilation,
    "lora": _lora,
    "speculative": _speculative,
    "draft": _draft,
    "others": _others,
    "environment": _environment,
}
