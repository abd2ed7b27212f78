"""What kvtide refuses: engines whose KV it cannot keep rightly run as if it were not there.

Each check gives one word of the closed list of reasons and a sentence for the log. A refusal is
never an error: the engine serves.

A user who turns vLLM's own prefix cache off (`--no-enable-prefix-caching`) may still use kvtide:
that switch is about memory in the engine. Where vLLM itself turned it off, because the model's
attention is not causal or the backend cannot begin a prefill behind a cached prefix, a hit would
be wrong. vLLM does not say which it was, but in those cases it turns chunked prefill off as well,
or says that the model does not support prefix caching: those two signs decide.
"""

import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import vllm
from vllm.v1.kv_cache_interface import KVQuantMode, iter_layer_specs
from vllm.v1.kv_cache_layout import KVCacheLayout

from kvtide.core.keys import encode
from kvtide.core.reasons import Off, OffReason
from kvtide.engines.vllm.facts import PLAIN_DTYPES, PLAIN_KINDS
from kvtide.engines.vllm.model_fields import hf_fields, local_directory, model_module
from kvtide.engines.vllm.plain import FieldUnknown, plain
from kvtide.engines.vllm.versions import TESTED, is_tested
from kvtide.engines.vllm.weights import DummyWeights, LocalWeights, Weights, weight_files
from kvtide.settings import EngineConfig

_READS_OTHER_FILES = (
    "secondary_weights",
    "allow_patterns_overrides",
    "model_config.model_weights",
    "torch.load(",
    "load_file(",
    "safe_open(",
    # built on such a model
    "mimo_audio import",
    "qwen3_dflash import",
)
"""Signs in the source of a model that it loads more than the loader's own choice of files."""


@dataclass(frozen=True, slots=True)
class EngineWeights:
    """Whose digests make the fingerprint: the model's, and the draft's where it has its own."""

    model: Weights
    draft: Weights | None


def unsupported(vllm_config: Any, kv_cache_config: Any, settings: EngineConfig) -> Off | None:
    """Why caching must be off in this engine, or None.

    Scheduler role. What only the workers see is checked by `facts.refused_pages`.
    """
    try:
        return (
            _version(settings)
            or _device(vllm_config.device_config.device_type)
            or _groups(vllm_config, kv_cache_config)
            or _parallel(vllm_config.parallel_config)
            or _quantised(vllm_config, kv_cache_config)
            or _own_prefix_caching(vllm_config)
            or _weights_change(vllm_config, settings)
        )
    except Exception as error:  # vLLM's objects are not ours: a surprise is a refusal, not an end
        return Off(OffReason.FIELD_UNKNOWN, f"vLLM's configuration: {error!r}")


def _version(settings: EngineConfig) -> Off | None:
    if settings.any_engine_version or is_tested(vllm.__version__):
        return None
    return Off(
        OffReason.ENGINE_VERSION,
        f"vLLM {vllm.__version__} is not one of {TESTED}; any_engine_version allows it",
    )


def _device(kind: str) -> Off | None:
    """The one mover there is takes addresses for the processor's own memory."""
    if kind == "cpu":
        return None
    return Off(OffReason.DEVICE, f"vLLM runs on {kind}; kvtide copies on CPUs only, for now")


def _groups(vllm_config: Any, kv_cache_config: Any) -> Off | None:
    groups = kv_cache_config.kv_cache_groups
    if vllm_config.model_config.is_encoder_decoder:
        return Off(OffReason.GROUPS, "an encoder-decoder model")
    if len(groups) != 1:
        return Off(OffReason.GROUPS, f"the model has {len(groups)} KV cache groups, not one")
    if groups[0].host_resident or not groups[0].enable_kv_transfer:
        return Off(OffReason.GROUPS, "vLLM keeps this KV cache from being moved")
    for spec in iter_layer_specs(groups[0].kv_cache_spec):
        kind = type(spec).__name__
        if kind not in PLAIN_KINDS:
            return Off(OffReason.GROUPS, f"{kind} is not plain attention")
        if spec.non_causal or getattr(spec, "non_causal_multi_token_decode", False):
            return Off(OffReason.GROUPS, "the model's attention is not causal")
        if spec.tokens_per_state != 1:
            return Off(OffReason.GROUPS, f"one state holds {spec.tokens_per_state} tokens")
    layout = kv_cache_config.kv_cache_layout or vllm_config.cache_config.kv_cache_layout
    if layout is not None and not KVCacheLayout[layout].is_block_compact:
        return Off(OffReason.GROUPS, f"layout {layout} scatters the bytes of a layer's block")
    return None


def _parallel(config: Any) -> Off | None:
    for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        if getattr(config, name) > 1:
            return Off(OffReason.PARALLEL, f"{name} is {getattr(config, name)}")
    if config.nnodes > 1:
        return Off(OffReason.PARALLEL, f"ranks on {config.nnodes} machines")
    if config.distributed_executor_backend not in ("mp", "uni"):
        backend = config.distributed_executor_backend
        return Off(OffReason.PARALLEL, f"executor {backend} may place ranks on other machines")
    if config.enable_elastic_ep:
        return Off(OffReason.PARALLEL, "enable_elastic_ep changes the ranks while it runs")
    return None


def _quantised(vllm_config: Any, kv_cache_config: Any) -> Off | None:
    """Unquantised KV has no scales; where this ends, how they come must become a field."""
    name = vllm_config.cache_config.cache_dtype
    if name != "auto" and name not in PLAIN_DTYPES:
        return Off(OffReason.QUANTISED_CACHE, f"kv_cache_dtype {name} is not tested")
    for group in kv_cache_config.kv_cache_groups:
        for spec in iter_layer_specs(group.kv_cache_spec):
            stored = plain(spec.dtype, "dtype")
            if spec.kv_quant_mode != KVQuantMode.NONE or stored not in PLAIN_DTYPES:
                return Off(OffReason.QUANTISED_CACHE, f"KV is stored as {stored}, not tested")
    return None


def _own_prefix_caching(vllm_config: Any) -> Off | None:
    if vllm_config.cache_config.enable_prefix_caching:
        return None
    if vllm_config.scheduler_config.enable_chunked_prefill:
        if vllm_config.model_config.is_prefix_caching_supported:
            return None
        return Off(OffReason.GROUPS, "vLLM does not support prefix caching for this model")
    return Off(OffReason.GROUPS, "prefix caching and chunked prefill are both off in vLLM")


def _weights_change(vllm_config: Any, settings: EngineConfig) -> Off | None:
    if vllm_config.weight_transfer_config is None or settings.weights_change == "reset":
        return None
    return Off(
        OffReason.WEIGHTS_CHANGE,
        "weight_transfer_config is set; weights_change: reset says that each update resets",
    )


def engine_weights(vllm_config: Any) -> EngineWeights | Off:
    """Where the weights come from; Off if not from local files that the digest can name.

    Scheduler role only. Lists directories, reads no weights.
    """
    try:
        model = _weights_of(vllm_config.model_config, vllm_config.load_config)
        draft = _draft_weights(vllm_config)
    except FieldUnknown as unknown:
        return Off(OffReason.FIELD_UNKNOWN, str(unknown))
    except Exception as error:  # as above
        return Off(OffReason.FIELD_UNKNOWN, f"weights: {error!r}")
    for found in (model, draft):
        if isinstance(found, Off):
            return found
    assert not isinstance(model, Off), model
    assert not isinstance(draft, Off), draft
    return EngineWeights(model, None if draft == model else draft)


def _draft_weights(vllm_config: Any) -> Weights | Off | None:
    speculative = vllm_config.speculative_config
    draft = speculative and speculative.draft_model_config
    if not draft or draft is vllm_config.model_config:
        return None
    return _weights_of(draft, speculative.draft_load_config or vllm_config.load_config)


def _weights_of(model_config: Any, load_config: Any) -> Weights | Off:
    if load_config.load_format == "dummy":
        if model_config.quantization is not None:
            raise FieldUnknown("weights: dummy weights of a quantised model are not repeatable")
        return DummyWeights(
            model_config.seed, encode(plain(hf_fields(model_config.hf_config), "hf"))
        )
    if model_config.model_weights:
        return Off(OffReason.WEIGHTS_NOT_LOCAL, f"weights come from {model_config.model_weights}")
    directory = local_directory(model_config, load_config.download_dir)
    if directory is None:
        return Off(OffReason.WEIGHTS_NOT_LOCAL, f"no local files of {model_config.model}")
    module = model_module(model_config)[0]
    sign = _sign_of_other_files(module)
    if sign is not None:
        raise FieldUnknown(f"weights: {module} reads files of its own ({sign})")
    weights = LocalWeights(directory, load_config.load_format)
    files = weight_files(weights)
    return files if isinstance(files, Off) else weights


def _sign_of_other_files(module: str) -> str | None:
    """Read the source of a model's module (without importing it) for what it loads by itself."""
    spec = importlib.util.find_spec(module)
    if spec is None or spec.origin is None:
        raise FieldUnknown(f"weights: the source of {module} cannot be found")
    origin = Path(spec.origin)
    files = sorted(origin.parent.rglob("*.py")) if spec.submodule_search_locations else [origin]
    for path in files:
        source = path.read_text(encoding="utf-8")
        for sign in _READS_OTHER_FILES:
            if sign in source:
                return sign
    return None
