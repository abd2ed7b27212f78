"""What of a model's identity vLLM's ModelConfig tells: config, class and code, rope, files read.

The model config counts by content, as vLLM has resolved it (overrides applied, rope parameters
filled in). Names, paths and versions of libraries do not: the same model in another directory, or
saved by another version of transformers, is the same model.
"""

import hashlib
import importlib.metadata
import importlib.util
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import vllm
from huggingface_hub import snapshot_download
from huggingface_hub.errors import LocalEntryNotFoundError
from vllm.transformers_utils.config import iter_rope_parameters

from kvtide.engines.vllm import left_out
from kvtide.engines.vllm.plain import FieldUnknown, config_fields
from kvtide.engines.vllm.versions import is_tested

CODE_FILES_MAX = 20_000
"""Files of one package of model code; a larger one is taken for a mistake."""

_NAMES_IN_HF_CONFIGS = frozenset({"transformers_version", "auto_map", "_commit_hash"})

_LENGTH_FREE_ROPES = frozenset(
    {
        "default",
        "linear",
        "llama3",
        "yarn",
        "ntk",
        "deepseek_yarn",
        "deepseek_llama_scaling",
        "proportional",
        "bailing_mrope",
        "mllama4",
        "openpangu",
    }
)
"""Rope types whose values at a position do not depend on the length the engine was started for."""

_LENGTH_ARCHITECTURES = ("Llama4",)
"""Models that choose something else by `max_model_len` (here: temperature tuning)."""

_PROCESSOR_FILES = (
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
)


def local_directory(model_config: Any, cache_dir: str | None) -> Path | None:
    """Where the model's files lie: its path, or the snapshot of the hub that vLLM has fetched."""
    if os.path.isdir(model_config.model):
        return Path(model_config.model)
    try:
        snapshot = snapshot_download(
            model_config.model,
            revision=model_config.revision,
            cache_dir=cache_dir,
            local_files_only=True,
        )
    except (LocalEntryNotFoundError, ValueError):  # ValueError: not a name of the hub
        return None
    return Path(snapshot)


def model_fields(model_config: Any) -> dict[str, object]:
    """Section `model`: everything in ModelConfig that reaches the KV, and what is derived."""
    fields = config_fields(model_config, left_out.MODEL_LEFT_OUT)
    fields["runner_type"] = model_config.runner_type
    fields["convert_type"] = model_config.convert_type
    fields["sliding_window"] = model_config.get_sliding_window()
    fields["max_model_len"] = model_config.max_model_len if _length_selects(model_config) else None
    if model_config.architecture.startswith(_LENGTH_ARCHITECTURES):
        generation = model_config.try_get_generation_config()
        generation.update(model_config.override_generation_config)
        fields["attn_temperature_tuning"] = generation.get("attn_temperature_tuning")
    return fields


def _length_selects(model_config: Any) -> bool:
    """Whether `max_model_len` selects values that KV is computed with.

    Dynamic NTK stretches the base by the length, longrope picks one of two tables by it. What is
    not known to be free of it counts as depending on it; so does model code that is not vLLM's,
    or of a version that we have not read.
    """
    if not is_tested(vllm.__version__):
        return True
    if model_config.architecture.startswith(_LENGTH_ARCHITECTURES):
        return True
    if not model_module(model_config)[0].startswith("vllm.") or _brings_code(model_config):
        return True
    config = model_config.hf_text_config
    if getattr(config, "dual_chunk_attention_config", None) is not None:
        return True
    return any(
        rope.get("rope_type") not in _LENGTH_FREE_ROPES or rope.get("use_fope")
        for rope in iter_rope_parameters(config)
    )


def hf_fields(config: Any) -> dict[str, object]:
    """Section `hf`: a Hugging Face config by content."""
    # to_dict tells the class's model_type; vLLM goes by that of the object, which may be another.
    return {**_without_names(config.to_dict()), "model_type": config.model_type}


def _without_names(config: Mapping[Any, Any]) -> dict[Any, Any]:
    return {
        key: _nameless(value)
        for key, value in config.items()
        if key not in _NAMES_IN_HF_CONFIGS and not str(key).endswith("name_or_path")
    }


def _nameless(value: object) -> object:
    if isinstance(value, Mapping):
        return _without_names(value)
    if isinstance(value, list | tuple):
        return [_nameless(part) for part in value]
    if hasattr(value, "to_dict"):
        return _without_names(value.to_dict())
    return value


def model_module(model_config: Any) -> tuple[str, str]:
    """Module and name of the class that vLLM has chosen for the model."""
    registry, architecture = model_config.registry, model_config.architecture
    if architecture not in registry.models:
        architecture = registry._normalize_arch(architecture, model_config)
    registered = registry.models.get(architecture)
    if registered is None:
        raise FieldUnknown(f"model.class: vLLM's registry has no {architecture}")
    if hasattr(registered, "module_name"):
        return registered.module_name, registered.class_name
    return registered.model_cls.__module__, registered.model_cls.__qualname__


def class_fields(model_config: Any) -> dict[str, object]:
    """Section `class`: the class of the model, and its source where that is not vLLM's own.

    vLLM's version names vLLM's code; code from elsewhere is named by its bytes.
    """
    module, name = model_module(model_config)
    fields: dict[str, object] = {"name": f"{module}:{name}"}
    if not module.startswith("vllm."):
        fields["package"] = package_digest(module)
    if module.startswith("vllm.model_executor.models.transformers"):
        fields["transformers"] = importlib.metadata.version("transformers")
    if _brings_code(model_config):
        fields["source"] = _model_code_digest(model_config)
    return fields


def _brings_code(model_config: Any) -> bool:
    return bool(model_config.trust_remote_code and _code_places(model_config.hf_config))


def _code_places(config: Any) -> list[str]:
    """Where a config says its classes are: `file.Class`, or `owner/name--file.Class`."""
    auto_map = getattr(config, "auto_map", None) or {}
    return [
        place
        for name, place in auto_map.items()
        if name.startswith(("AutoConfig", "AutoModel")) and isinstance(place, str)
    ]


def _model_code_digest(model_config: Any) -> bytes:
    for place in _code_places(model_config.hf_config):
        repository = place.rpartition("--")[0]
        if repository not in ("", model_config.model):
            raise FieldUnknown(f"class.source: the model's code lies in {repository}")
    if model_config.code_revision not in (None, model_config.revision):
        raise FieldUnknown("class.source: the model's code is of another revision")
    directory = local_directory(model_config, None)
    if directory is None:
        raise FieldUnknown("class.source: the model's code is not in a local directory")
    return _sources_digest(directory, directory.rglob("*.py"), "class.source")


def package_digest(module: str) -> bytes:
    """Digest of all code of the package that a module belongs to."""
    top = module.partition(".")[0]
    spec = importlib.util.find_spec(top)
    places = list(spec.submodule_search_locations or ()) if spec else []
    if len(places) == 1:
        root = Path(places[0])
        files = (path for path in root.rglob("*") if path.suffix in (".py", ".so"))
        return _sources_digest(root, files, "class.package")
    if spec and spec.origin and Path(spec.origin).is_file():
        origin = Path(spec.origin)
        return _sources_digest(origin.parent, [origin], "class.package")
    raise FieldUnknown(f"class.package: the source of {top} cannot be found")


def _sources_digest(root: Path, files: Iterable[Path], name: str) -> bytes:
    whole = hashlib.sha256()
    count = 0
    for path in sorted(files):
        count += 1
        if count > CODE_FILES_MAX:
            raise FieldUnknown(f"{name}: more than {CODE_FILES_MAX} files of code in {root}")
        whole.update(b"%b\0%b" % (os.fsencode(path.relative_to(root)), _file_digest(path)))
    if not count:
        raise FieldUnknown(f"{name}: no code in {root}")
    return whole.digest()


def file_fields(vllm_config: Any) -> dict[str, object]:
    """Section `files`: what small files beside the weights add to what the engine computes.

    Some quantisation methods read their settings from a file of their own, and multimodal models
    turn an image into tokens as their processor's files say.
    """
    model_config, quantisation = vllm_config.model_config, vllm_config.quant_config
    if getattr(model_config.hf_config, "quantization_config_file", None) is not None:
        raise FieldUnknown("files: hf_overrides names a quantization_config_file")
    fields: dict[str, object] = {}
    names: list[str] = []
    if quantisation is not None:
        fields["quantisation"] = type(quantisation)
        names += quantisation.get_config_filenames()
    if model_config.multimodal_config is not None:
        names += _PROCESSOR_FILES
    if names:
        directory = local_directory(model_config, None)
        if directory is None:
            raise FieldUnknown(f"files: {names[0]} is not in a local directory")
        paths = (directory / name for name in names)
        fields |= {path.name: _file_digest(path) for path in paths if path.is_file()}
    return fields


def _file_digest(path: Path) -> bytes:
    return hashlib.sha256(path.read_bytes()).digest()
