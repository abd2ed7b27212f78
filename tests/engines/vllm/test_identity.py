"""The identity of an engine: one changed field gives another fingerprint, nothing else does."""

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm.config import (
    AttentionConfig,
    CacheConfig,
    CompilationConfig,
    KernelConfig,
    LoRAConfig,
    ModelConfig,
    ParallelConfig,
    SpeculativeConfig,
    VllmConfig,
)
from vllm.config.multimodal import MultiModalConfig

from kvtide.core.keys import FieldValue, encode, fingerprint
from kvtide.core.reasons import Off, OffReason
from kvtide.engines.vllm import left_out, model_fields
from kvtide.engines.vllm.identity import engine_fields
from tests.engines.vllm.engine_configs import (
    MODELS,
    TINY,
    another,
    attention_spec,
    engine_config,
    kv_cache_config,
    restored,
)

# Warnings of what vLLM imports are not ours to end.
pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("ignore")]

DYNAMIC = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
YARN = {
    "rope_type": "yarn",
    "factor": 2.0,
    "rope_theta": 10000.0,
    "original_max_position_embeddings": 4096,
}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0] * 32,
    "long_factor": [2.0] * 32,
    "original_max_position_embeddings": 4096,
}


@pytest.fixture(scope="module")
def shared_config() -> Any:
    return engine_config()


@pytest.fixture
def config(shared_config: Any) -> Iterator[Any]:
    with restored(shared_config) as lent:
        yield lent


def fields_of(vllm_config: Any, kv: Any = None) -> dict[str, FieldValue]:
    fields = engine_fields(vllm_config, kv or kv_cache_config(vllm_config))
    assert not isinstance(fields, Off), fields
    return fields


def off_of(vllm_config: Any, kv: Any = None) -> Off:
    off = engine_fields(vllm_config, kv or kv_cache_config(vllm_config))
    assert isinstance(off, Off), off
    assert off.reason is OffReason.FIELD_UNKNOWN
    return off


def changed(before: dict[str, FieldValue], after: dict[str, FieldValue]) -> set[str]:
    return {name for name in before | after if before.get(name, ...) != after.get(name, ...)}


def test_every_value_is_plain_and_has_an_encoding(config: Any) -> None:
    fields = fields_of(config)
    assert len(fingerprint(fields)) == 32
    for name, value in fields.items():
        assert encode(value), name


# --- what counts ------------------------------------------------------------------------------


PARTS = {
    "model": ("model_config", left_out.MODEL_LEFT_OUT),
    "cache": ("cache_config", left_out.CACHE_LEFT_OUT),
    "parallel": ("parallel_config", left_out.PARALLEL_LEFT_OUT),
    "attention": ("attention_config", left_out.ATTENTION_LEFT_OUT),
    "kernel": ("kernel_config", left_out.KERNEL_LEFT_OUT),
    "compilation": ("compilation_config", left_out.COMPILATION_LEFT_OUT),
}


@pytest.mark.parametrize("section", PARTS)
def test_any_one_field_changed_changes_that_field_of_the_identity(
    section: str, config: Any
) -> None:
    attribute, names = PARTS[section]
    part = getattr(config, attribute)
    before, kv = fields_of(config), kv_cache_config(config)
    tried = 0
    for field in dataclasses.fields(part):
        if field.name in names:
            continue
        old = getattr(part, field.name)
        object.__setattr__(part, field.name, another(old))
        after = engine_fields(config, kv)
        object.__setattr__(part, field.name, old)
        if isinstance(after, Off):
            assert after.reason is OffReason.FIELD_UNKNOWN
        else:
            assert f"{section}.{field.name}" in changed(before, after)
            assert fingerprint(after) != fingerprint(before)
        tried += 1
    assert tried > 3


@pytest.mark.parametrize("section", PARTS)
def test_a_field_that_is_left_out_changes_nothing(section: str, config: Any) -> None:
    attribute, names = PARTS[section]
    part = getattr(config, attribute)
    before, kv = fields_of(config), kv_cache_config(config)
    told_elsewhere = {"hf_config", "hf_text_config", "multimodal_config"}
    for name in sorted(names - told_elsewhere):
        old = getattr(part, name)
        object.__setattr__(part, name, another(old))
        after = engine_fields(config, kv)
        object.__setattr__(part, name, old)
        assert after == before, name


def test_every_value_of_the_model_config_counts_but_names(config: Any) -> None:
    hf_config = config.model_config.hf_config
    before, kv = fields_of(config), kv_cache_config(config)
    names = {"_name_or_path", "transformers_version"}
    values = hf_config.to_dict()
    assert names <= set(values)
    for name, value in values.items():
        if name not in vars(hf_config):
            continue
        original = vars(hf_config)[name]
        vars(hf_config)[name] = another(value)  # past the checks of the class
        after = engine_fields(config, kv)
        vars(hf_config)[name] = original
        assert (after == before) == (name in names), name
    hf_config.a_new_value = 7
    assert changed(before, fields_of(config)) == {"hf.a_new_value"}


def test_every_value_of_a_layers_spec_counts(config: Any) -> None:
    spec = attention_spec(config)
    before = fields_of(config)
    for field in dataclasses.fields(spec):
        value = another(getattr(spec, field.name))
        after = fields_of_spec(config, dataclasses.replace(spec, **{field.name: value}))
        assert after is None or "groups.specs" in changed(before, after), field.name


def fields_of_spec(config: Any, spec: Any) -> dict[str, FieldValue] | None:
    """None where vLLM itself does not believe the spec."""
    kv = kv_cache_config(config)
    kv.kv_cache_groups[0].kv_cache_spec = spec
    fields = engine_fields(config, kv)
    return None if isinstance(fields, Off) else fields


def test_layout_layers_replicas_and_versions_count(
    config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = fields_of(config)
    assert changed(before, fields_of(config, kv_cache_config(config, layout="BLHNC"))) == {
        "cache.layout"
    }
    kv = kv_cache_config(config)
    kv.kv_cache_groups[0].layer_names.reverse()
    assert changed(before, fields_of(config, kv)) == {"groups.layers"}
    kv = kv_cache_config(config)
    kv.kv_tp_replicas = 2
    assert changed(before, fields_of(config, kv)) == {"groups.kv_tp_replicas"}
    monkeypatch.setattr(torch, "__version__", "2.99.0")
    monkeypatch.setattr("vllm.__version__", "0.32.7")
    assert changed(before, fields_of(config)) == {"engine.torch", "engine.version"}


def test_a_variable_that_chooses_kernels_counts_and_a_place_does_not(
    config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = fields_of(config)
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0-1")
    monkeypatch.setenv("VLLM_CACHE_ROOT", "/elsewhere")
    monkeypatch.setenv("VLLM_DP_RANK", "3")
    monkeypatch.setenv("VLLM_NIXL_SIDE_CHANNEL_PORT", "1234")
    monkeypatch.setenv("PYTHONHASHSEED", "77")
    assert fields_of(config) == before
    monkeypatch.setenv("VLLM_CPU_ATTN_SPLIT_KV", "0")
    assert changed(before, fields_of(config)) == {"environment.VLLM_CPU_ATTN_SPLIT_KV"}


def test_data_parallelism_counts_for_mixtures_of_experts_only(config: Any) -> None:
    parallel = config.parallel_config
    before = fields_of(config)
    parallel.data_parallel_size = 4
    assert fields_of(config) == before
    parallel.is_moe_model = True
    assert fields_of(config)["parallel.experts_over"] == 4


def test_lora_counts_by_what_changes_kv() -> None:
    plain = fields_of(engine_config())
    lora = engine_config(enable_lora=True, max_loras=2)
    fields = fields_of(lora)
    assert fields["lora.max_lora_rank"] == 16
    assert "lora.max_loras" not in fields
    assert "compilation.mode" in changed(plain, fields), "vLLM on CPUs does not compile with LoRA"
    lora.lora_config.target_modules = ["o_proj"]
    assert changed(fields, fields_of(lora)) == {"lora.target_modules"}


def test_speculation_counts_with_its_draft_model_by_content() -> None:
    plain = fields_of(engine_config())
    ngram = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 4}
    fields = fields_of(engine_config(speculative_config=ngram))
    assert fields["speculative.prompt_lookup_max"] == 4
    assert "draft.hf" not in fields
    assert changed(plain, fields) == {name for name in fields if name.startswith("speculative.")}
    own = {"method": "draft_model", "model": str(TINY), "num_speculative_tokens": 2}
    drafted = fields_of(engine_config(speculative_config=own))
    copied = {**own, "model": str(MODELS / "tiny-llama-b")}
    assert drafted == fields_of(engine_config(speculative_config=copied)), "equal but for weights"
    small = {**own, "num_speculative_tokens": 3}
    assert changed(drafted, fields_of(engine_config(speculative_config=small))) == {
        "speculative.num_speculative_tokens"
    }
    draft_hf = drafted["draft.hf"]
    assert isinstance(draft_hf, dict)
    assert draft_hf["hidden_size"] == 256
    assert str(TINY) not in json.dumps(drafted)


def test_sizes_of_batches_and_memory_do_not_count() -> None:
    """Two engines that differ in these share their KV."""
    one = engine_config()
    other = engine_config(
        max_model_len=4096,
        max_num_seqs=7,
        max_num_batched_tokens=512,
        gpu_memory_utilization=0.5,
        served_model_name="another-name",
        seed=5,
        enable_prefix_caching=False,
    )
    assert fields_of(one) == fields_of(other)


@pytest.mark.parametrize(
    ("rope", "counts"),
    [(None, False), (YARN, False), (DYNAMIC, True), (LONGROPE, True)],
    ids=["plain", "yarn", "dynamic", "longrope"],
)
def test_max_model_len_counts_where_it_selects_rope_values(
    rope: dict[str, Any] | None, counts: bool
) -> None:
    overrides = {"hf_overrides": {"rope_parameters": rope}} if rope else {}
    short, long = (
        fields_of(engine_config(max_model_len=length, **overrides)) for length in (2048, 4096)
    )
    assert changed(short, long) == ({"model.max_model_len"} if counts else set())
    plain = fields_of(engine_config(max_model_len=2048))
    assert ("hf.rope_parameters" in changed(plain, short)) == (rope is not None)


def test_max_model_len_counts_in_a_version_that_was_not_read(
    config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vllm.__version__", "0.99.0")
    assert fields_of(config)["model.max_model_len"] == config.model_config.max_model_len


def test_a_model_that_picks_by_max_model_len_counts_it(config: Any) -> None:
    """Llama 4 turns temperature tuning on by it, unless the generation config says so."""
    config.model_config._architecture = "Llama4ForCausalLM"
    fields = fields_of(config)
    assert fields["model.max_model_len"] == config.model_config.max_model_len
    assert fields["model.attn_temperature_tuning"] is None
    config.model_config.override_generation_config = {"attn_temperature_tuning": True}
    assert fields_of(config)["model.attn_temperature_tuning"] is True


# --- code, and files beside the weights -------------------------------------------------------


def test_vllms_own_model_code_is_named_by_its_version(config: Any) -> None:
    fields = fields_of(config)
    assert fields["class.name"] == "vllm.model_executor.models.llama:LlamaForCausalLM"
    assert {name for name in fields if name.startswith("class.")} == {"class.name"}


def test_code_that_a_model_brings_counts_by_content(config: Any, tmp_path: Path) -> None:
    model = config.model_config
    model.model, model.trust_remote_code = str(tmp_path), True
    model.hf_config.auto_map = {"AutoModelForCausalLM": "modeling.Model"}
    assert "class.source" in off_of(config).detail, "there is no code yet"
    (tmp_path / "modeling.py").write_text("class Model: pass")
    before = fields_of(config)
    assert before["model.max_model_len"] == model.max_model_len, "its code may look at it"
    (tmp_path / "modeling.py").write_text("class Model: ...")
    assert changed(before, fields_of(config)) == {"class.source"}
    model.trust_remote_code = False
    assert "class.source" not in fields_of(config)


def test_code_from_another_repository_or_revision_is_unknown(config: Any, tmp_path: Path) -> None:
    (tmp_path / "modeling.py").write_text("class Model: pass")
    model = config.model_config
    model.model, model.trust_remote_code = str(tmp_path), True
    model.hf_config.auto_map = {"AutoModel": "someone/else--modeling.Model"}
    assert "someone/else" in off_of(config).detail
    model.hf_config.auto_map = {"AutoModel": f"{tmp_path}--modeling.Model"}
    assert fields_of(config)["class.source"]
    model.code_revision = "abc"
    assert "revision" in off_of(config).detail


def test_a_model_class_of_another_package_counts_by_its_whole_package(
    config: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "their_models"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "model.py").write_text("one = 1")
    monkeypatch.syspath_prepend(str(tmp_path))
    registry = config.model_config.registry
    monkeypatch.setattr(registry, "models", dict(registry.models))
    registry.register_model("LlamaForCausalLM", "their_models.model:Model")
    before = fields_of(config)
    assert before["class.name"] == "their_models.model:Model"
    (package / "model.py").write_text("one = 2")
    assert changed(before, fields_of(config)) == {"class.package"}
    monkeypatch.setattr(model_fields, "CODE_FILES_MAX", 1)
    assert "more than 1 files" in off_of(config).detail


class Quantisation:
    """Stands for one of vLLM's quantisation configs, which name the files they read."""

    @staticmethod
    def get_config_filenames() -> list[str]:
        return ["quantize_config.json"]


def test_files_that_quantisation_and_processors_read_count_by_content(
    config: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config.model_config.model = str(tmp_path)
    config.quant_config = Quantisation()
    assert "files.quantisation" in off_of(config).detail, "not vLLM's own class"
    monkeypatch.setattr(Quantisation, "__module__", "vllm.somewhere")
    before = fields_of(config)
    (tmp_path / "quantize_config.json").write_text("{}")
    (tmp_path / "preprocessor_config.json").write_text("{}")
    assert changed(before, fields_of(config)) == {"files.quantize_config.json"}
    config.model_config.multimodal_config = MultiModalConfig()
    after = fields_of(config)
    assert "files.preprocessor_config.json" in changed(before, after)
    assert "multimodal.video_pruning_rate" in after
    config.model_config.multimodal_config.mm_processor_kwargs = {"size": 3}
    assert changed(after, fields_of(config)) == {"multimodal.mm_processor_kwargs"}
    config.model_config.model = "not/local"
    assert "local directory" in off_of(config).detail


# --- what is unknown --------------------------------------------------------------------------


def test_a_value_without_plain_form_makes_the_identity_unknown_and_is_named(config: Any) -> None:
    hf_config = config.model_config.hf_config
    for value in (print, object(), Path("/x"), {"a": [lambda: 0]}, {(1, 2): 3}, {1: 0, "1": 0}):
        hf_config.odd = value
        assert "hf.odd" in off_of(config).detail, value
    endless: list[object] = []
    endless.append(endless)
    hf_config.odd = 0
    config.additional_config = {"odd": endless}
    assert "others.additional" in off_of(config).detail


def test_whatever_is_missing_from_vllms_objects_makes_the_identity_unknown(config: Any) -> None:
    kv = kv_cache_config(config)
    kv.kv_cache_layout = None
    assert "cache.layout" in off_of(config, kv).detail
    config.kernel_config = None
    assert "kernel" in off_of(config).detail
    del config.attention_config
    assert "attention" in off_of(config).detail


# --- the lists of what does not count, against the installed vLLM ------------------------------


def test_every_part_of_vllms_configuration_is_looked_at_or_left_out_on_purpose() -> None:
    looked_at = {
        "model_config",
        "cache_config",
        "parallel_config",
        "device_config",
        "attention_config",
        "kernel_config",
        "compilation_config",
        "lora_config",
        "speculative_config",
        "quant_config",
        "additional_config",
        "diffusion_config",
        "engram_config",
    }
    assert not looked_at & left_out.CONFIG_LEFT_OUT
    parts = {field.name for field in dataclasses.fields(VllmConfig)}
    assert parts == looked_at | left_out.CONFIG_LEFT_OUT


@pytest.mark.parametrize(
    ("config_class", "names"),
    [
        (ModelConfig, left_out.MODEL_LEFT_OUT),
        (CacheConfig, left_out.CACHE_LEFT_OUT),
        (ParallelConfig, left_out.PARALLEL_LEFT_OUT),
        (AttentionConfig, left_out.ATTENTION_LEFT_OUT),
        (KernelConfig, left_out.KERNEL_LEFT_OUT),
        (CompilationConfig, left_out.COMPILATION_LEFT_OUT),
        (LoRAConfig, left_out.LORA_LEFT_OUT),
        (SpeculativeConfig, left_out.SPECULATIVE_LEFT_OUT),
        (MultiModalConfig, left_out.MULTIMODAL_LEFT_OUT),
    ],
)
def test_every_name_left_out_is_one_of_vllms(config_class: type, names: frozenset[str]) -> None:
    assert names <= {field.name for field in dataclasses.fields(config_class)}


def test_every_variable_left_out_is_one_of_vllms() -> None:
    from vllm import envs

    factors = set(envs.compile_factors())
    assert factors >= left_out.ENV_LEFT_OUT
    for prefix in left_out.ENV_LEFT_OUT_PREFIXES:
        assert any(name.startswith(prefix) for name in factors), prefix
    for suffix in left_out.ENV_LEFT_OUT_SUFFIXES:
        assert any(name.endswith(suffix) for name in factors), suffix


# --- over processes and directories -----------------------------------------------------------


PROGRAM = """
import sys
from pathlib import Path
from kvtide.core.keys import fingerprint
from kvtide.engines.vllm.identity import engine_fields
from tests.engines.vllm.engine_configs import engine_config, kv_cache_config
if __name__ == "__main__":
    config = engine_config(Path(sys.argv[1]))
    print(fingerprint(engine_fields(config, kv_cache_config(config))).hex())
"""


def test_equal_configurations_in_other_processes_and_directories_have_one_fingerprint(
    config: Any, tmp_path: Path
) -> None:
    """Other hash seeds, another copy of the model."""
    copy = tmp_path / "copy-of-model"
    copy.mkdir()
    for path in TINY.iterdir():
        (copy / path.name).symlink_to(path)
    running = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(model)],
            stdout=subprocess.PIPE,
            cwd=Path(__file__).parents[3],
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": "."},
        )
        for model, seed in ((TINY, "1"), (copy, "2"))
    ]
    said = [process.communicate()[0].split()[-1].decode() for process in running]
    assert said == [fingerprint(fields_of(config)).hex()] * 2
