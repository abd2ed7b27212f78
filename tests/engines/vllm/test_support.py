"""What kvtide refuses says so in one word of the closed list, and everything else is taken."""

import dataclasses
import json
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.config import WeightTransferConfig
from vllm.v1.kv_cache_interface import (
    HiddenStateCacheSpec,
    KVCacheGroupSpec,
    KVQuantMode,
    MLAAttentionSpec,
    SinkFullAttentionSpec,
    SlidingWindowSpec,
)

from kvtide import config as kvtide_config
from kvtide.core.reasons import Off, OffReason
from kvtide.engines.vllm import support
from kvtide.engines.vllm.support import EngineWeights, engine_weights, unsupported
from kvtide.engines.vllm.versions import is_tested
from kvtide.engines.vllm.weights import DummyWeights, LocalWeights
from tests.engines.vllm.engine_configs import (
    MODELS,
    TINY,
    attention_spec,
    engine_config,
    kv_cache_config,
    restored,
)

# Warnings of what vLLM imports are not ours to end.
pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("ignore")]

SETTINGS = kvtide_config.read(environ={}).engine


@pytest.fixture(scope="module")
def shared_config() -> Any:
    return engine_config()


@pytest.fixture
def config(shared_config: Any) -> Iterator[Any]:
    with restored(shared_config) as lent:
        yield lent


def reason_of(config: Any, kv: Any = None, settings: Any = SETTINGS) -> OffReason | None:
    off = unsupported(config, kv or kv_cache_config(config), settings)
    assert off is None or off.detail
    return off.reason if off else None


@pytest.mark.parametrize("kind", ["cuda", "xpu", "tpu"])
def test_a_device_that_cannot_be_copied_from_is_refused(
    config: Any, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """The mover would take its addresses for the processor's."""
    monkeypatch.setattr(config, "device_config", SimpleNamespace(device_type=kind))
    assert reason_of(config) is OffReason.DEVICE


def test_a_plain_decoder_is_supported(config: Any) -> None:
    assert reason_of(config) is None


@pytest.mark.parametrize(
    ("version", "tested"),
    [
        ("0.32.0", True),
        ("0.32.1", True),
        ("0.32.0+cpu", True),
        ("0.32.0.post1", True),
        ("0.31.9", False),
        ("0.33.0", False),
        ("0.32.0rc1", False),
        ("0.32.1.dev5+gabc", False),
        ("10.32.0", False),
        ("dev", False),
    ],
)
def test_only_releases_of_tested_versions_are_taken_unless_allowed(
    version: str, tested: bool, config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vllm.__version__", version)
    assert is_tested(version) == tested
    assert reason_of(config) == (None if tested else OffReason.ENGINE_VERSION)
    any_version = dataclasses.replace(SETTINGS, any_engine_version=True)
    assert reason_of(config, settings=any_version) is None


def with_spec(config: Any, kind: type, **changes: Any) -> Any:
    spec = attention_spec(config)
    parts = {field.name: getattr(spec, field.name) for field in dataclasses.fields(spec)}
    names = {field.name for field in dataclasses.fields(kind)}  # type: ignore[arg-type]
    taken = {name: value for name, value in parts.items() if name in names}
    return kv_cache_config(config, kind(**{**taken, **changes}))


def test_one_group_of_plain_or_latent_attention_is_taken_and_nothing_else(config: Any) -> None:
    assert reason_of(config, with_spec(config, MLAAttentionSpec, num_kv_heads=1)) is None
    spec = type(attention_spec(config))
    for kv in (
        with_spec(config, SlidingWindowSpec, sliding_window=64),
        with_spec(config, SinkFullAttentionSpec, sink_len=4),
        with_spec(config, HiddenStateCacheSpec),
        with_spec(config, spec, non_causal=True),
        with_spec(config, MLAAttentionSpec, non_causal_multi_token_decode=True),
        with_spec(config, spec, tokens_per_state=4),
        with_spec(config, spec, tokens_per_state=Fraction(1, 2)),
    ):
        assert reason_of(config, kv) is OffReason.GROUPS


def test_several_groups_and_groups_that_are_not_to_be_moved_are_refused(config: Any) -> None:
    two = kv_cache_config(config)
    two.kv_cache_groups.append(KVCacheGroupSpec(["other"], attention_spec(config)))
    none = kv_cache_config(config)
    none.kv_cache_groups.clear()
    host, ephemeral = kv_cache_config(config), kv_cache_config(config)
    host.kv_cache_groups[0].host_resident = True
    ephemeral.kv_cache_groups[0].enable_kv_transfer = False
    for kv in (two, none, host, ephemeral):
        assert reason_of(config, kv) is OffReason.GROUPS


@pytest.mark.parametrize(
    ("layout", "reason"),
    [
        ("LBHNC", None),
        ("LBNHC", None),
        ("BLHNC", None),
        ("BLNHC", None),
        ("LHBNC", OffReason.GROUPS),
        ("BHLNC", OffReason.GROUPS),
    ],
)
def test_a_layout_that_scatters_a_layers_block_is_refused(
    layout: str, reason: OffReason | None, config: Any
) -> None:
    assert reason_of(config, kv_cache_config(config, layout=layout)) is reason


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("decode_context_parallel_size", 2),
        ("prefill_context_parallel_size", 2),
        ("nnodes", 2),
        ("distributed_executor_backend", "ray"),
        ("distributed_executor_backend", "external_launcher"),
        ("distributed_executor_backend", dict),
        ("enable_elastic_ep", True),
    ],
)
def test_context_parallelism_and_ranks_elsewhere_are_refused(
    name: str, value: Any, config: Any
) -> None:
    vars(config.parallel_config)[name] = value
    assert reason_of(config) is OffReason.PARALLEL


def test_tensor_and_pipeline_parallelism_on_one_machine_are_taken(config: Any) -> None:
    parallel = vars(config.parallel_config)
    parallel |= {"tensor_parallel_size": 2, "pipeline_parallel_size": 2, "world_size": 4}
    assert reason_of(config) is None


def test_a_quantised_cache_is_refused_also_where_only_the_checkpoint_says_so(config: Any) -> None:
    spec = type(attention_spec(config))
    fp8 = with_spec(config, spec, dtype=torch.float8_e4m3fn)
    assert reason_of(config, fp8) is OffReason.QUANTISED_CACHE
    scaled = with_spec(config, spec, kv_quant_mode=KVQuantMode.INT8_PER_TOKEN_HEAD)
    assert reason_of(config, scaled) is OffReason.QUANTISED_CACHE
    config.cache_config.cache_dtype = "fp8"
    assert reason_of(config) is OffReason.QUANTISED_CACHE
    config.cache_config.cache_dtype = "bfloat16"
    assert reason_of(config) is None


def test_a_users_switch_for_vllms_own_prefix_cache_does_not_matter(config: Any) -> None:
    config.cache_config.enable_prefix_caching = False
    assert reason_of(config) is None


def test_prefix_caching_that_vllm_turned_off_for_a_reason_is_respected(config: Any) -> None:
    """Without chunked prefill vLLM cannot begin a prefill behind a prefix: so it does for models
    that are not causal, and for CPU MLA."""
    config.scheduler_config.enable_chunked_prefill = False
    assert reason_of(config) is None, "its own prefix cache is on, so hits are possible"
    config.cache_config.enable_prefix_caching = False
    assert reason_of(config) is OffReason.GROUPS


def test_a_model_that_vllm_does_not_cache_prefixes_of_is_refused(config: Any) -> None:
    config.cache_config.enable_prefix_caching = False
    config.model_config.pooler_config = SimpleNamespace(
        seq_pooling_type="MEAN", tok_pooling_type="ALL"
    )
    assert reason_of(config) is OffReason.GROUPS


def test_weights_that_change_in_place_are_refused_unless_the_trainer_resets(config: Any) -> None:
    config.weight_transfer_config = WeightTransferConfig()
    assert reason_of(config) is OffReason.WEIGHTS_CHANGE
    resets = dataclasses.replace(SETTINGS, weights_change="reset")
    assert reason_of(config, settings=resets) is None


def test_a_surprise_in_vllms_objects_is_a_refusal(config: Any) -> None:
    kv = kv_cache_config(config)
    config.parallel_config = None
    assert reason_of(config, kv) is OffReason.FIELD_UNKNOWN


# --- where weights come from ------------------------------------------------------------------


def off_of(config: Any) -> Off:
    found = engine_weights(config)
    assert isinstance(found, Off), found
    return found


def test_a_local_directory_is_taken(config: Any) -> None:
    assert engine_weights(config) == EngineWeights(LocalWeights(TINY, "auto"), None)


def test_the_snapshot_of_a_hub_model_is_found(
    config: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit = "0" * 40
    repository = tmp_path / "models--someone--model"
    snapshot = repository / "snapshots" / commit
    snapshot.mkdir(parents=True)
    (snapshot / "model.safetensors").write_bytes(b"weights")
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commit)
    config.load_config.download_dir = str(tmp_path)
    config.model_config.model = "someone/model"
    for revision in (None, "main", commit):
        config.model_config.revision = revision
        assert engine_weights(config) == EngineWeights(LocalWeights(snapshot), None)
    config.model_config.revision = "1" * 40
    assert off_of(config).reason is OffReason.WEIGHTS_NOT_LOCAL


@pytest.mark.parametrize(
    "model", ["someone/never-fetched", "s3://bucket/model", "not a name", "/no/such/directory"]
)
def test_weights_that_are_not_local_are_refused(model: str, config: Any, tmp_path: Path) -> None:
    config.load_config.download_dir = str(tmp_path)
    config.model_config.model = model
    off = off_of(config)
    assert off.reason is OffReason.WEIGHTS_NOT_LOCAL
    assert model in off.detail


@pytest.mark.parametrize(
    "load_format",
    [
        "runai_streamer",
        "runai_streamer_sharded",
        "sharded_state",
        "tensorizer",
        "modelexpress",
        "ipc_cache",
        "npcache",
        "somebodys_plugin",
    ],
)
def test_loaders_that_do_not_read_plain_files_are_refused(load_format: str, config: Any) -> None:
    config.load_config.load_format = load_format
    off = off_of(config)
    assert off.reason is OffReason.WEIGHTS_NOT_LOCAL
    assert load_format in off.detail


def test_object_storage_behind_a_local_directory_is_refused(config: Any) -> None:
    config.model_config.model_weights = "s3://bucket/model"
    assert off_of(config).reason is OffReason.WEIGHTS_NOT_LOCAL


def test_dummy_weights_are_named_by_seed_and_config_but_not_if_quantised(config: Any) -> None:
    config.load_config.load_format = "dummy"
    found = engine_weights(config)
    assert isinstance(found, EngineWeights)
    assert isinstance(found.model, DummyWeights)
    config.model_config.seed += 1
    assert engine_weights(config) != found
    config.model_config.quantization = "fp8"
    assert off_of(config).reason is OffReason.FIELD_UNKNOWN


def test_a_draft_model_has_weights_of_its_own() -> None:
    def weights(model: Path) -> EngineWeights:
        draft = {"method": "draft_model", "model": str(model), "num_speculative_tokens": 2}
        found = engine_weights(engine_config(speculative_config=draft))
        assert isinstance(found, EngineWeights), found
        return found

    assert weights(MODELS / "tiny-llama-b").draft == LocalWeights(MODELS / "tiny-llama-b")
    assert weights(TINY).draft is None, "the same files again say nothing new"


def test_a_model_that_reads_further_files_is_refused(config: Any) -> None:
    config.model_config._architecture = "UltravoxModel"
    off = off_of(config)
    assert off.reason is OffReason.FIELD_UNKNOWN
    assert "ultravox" in off.detail


def test_signs_of_further_files_are_found_in_every_model_that_inherits_them() -> None:
    """A model built on one that reads files of its own shows a sign itself."""
    import vllm

    models = Path(vllm.__file__).parent / "model_executor" / "models"
    sources = {path.stem: path.read_text() for path in models.glob("*.py")}
    signed = {
        name
        for name, source in sources.items()
        if any(sign in source for sign in support._READS_OTHER_FILES)
    } - {"adapters", "registry"}
    assert {"ultravox", "kimi_audio", "cosmos3", "roberta", "mimo_v2_omni"} <= signed
    for name, source in sources.items():
        for other in signed:
            imports = (f"from .{other} import", f"models.{other} import")
            if any(line in source for line in imports):
                assert name in signed, f"{name} is built on {other}"


def test_a_damaged_model_directory_is_refused_by_name(config: Any, tmp_path: Path) -> None:
    (tmp_path / "model-1.safetensors").write_bytes(b"")
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    config.model_config.model = str(tmp_path)
    off = off_of(config)
    assert off.reason is OffReason.FIELD_UNKNOWN
    assert "model-2.safetensors" in off.detail
