"""Engines that kvtide leaves alone, and starts that fail for reasons that are plain to see."""

import json
import shutil
from pathlib import Path

import pytest

from kvtide.testing.leashed import ProgramError
from kvtide.testing.serving import KVTIDE, SMOLLM2, TINY_LLAMA, ServedEngine
from tests.engine.answers import ask, assert_same, forget
from tests.engine.conftest import engine_on
from tests.engine.nodes import Node
from tests.engine.prompts import prompt

BLOCK = 128
BLOCK_BYTES = BLOCK * 2048
HYBRID = {
    "model_type": "gemma2",
    "architectures": ["Gemma2ForCausalLM"],
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "num_hidden_layers": 4,
    "sliding_window": 64,
    "vocab_size": 49152,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "query_pre_attn_scalar": 64,
    "attn_logit_softcapping": None,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 2,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
}
"""Two layers that see all, two that see 64 tokens: two KV cache groups."""
ENCODER = {
    "model_type": "bert",
    "architectures": ["BertModel"],
    "num_hidden_layers": 2,
    "vocab_size": 49152,
    "type_vocab_size": 2,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 2,
    "hidden_act": "gelu",
    "max_position_embeddings": 512,
    "layer_norm_eps": 1e-12,
    "pad_token_id": 2,
    "torch_dtype": "float32",
}
"""Layers that see what comes, too: no KV cache, and no group."""


def copy_without(source: Path, target: Path, *names: str) -> Path:
    """A copy of a model directory without some of its files."""
    shutil.copytree(source, target, ignore=shutil.ignore_patterns(*names))
    return target


def start_fails(engine: ServedEngine) -> str:
    """Start an engine that must not start; all that it said, by then nothing of it runs."""
    with pytest.raises(ProgramError, match="ended at its start"):
        engine.__enter__()
    assert not engine.processes()
    return "\n".join(engine.log_lines())


def test_a_hybrid_model_is_served_as_without_kvtide(
    node: Node, logs: Path, tmp_path: Path
) -> None:
    """vLLM keeps its hybrid manager (two groups), one line says why, no node is started."""
    model = copy_without(SMOLLM2, tmp_path / "hybrid", "*.safetensors", "config.json")
    (model / "config.json").write_text(json.dumps(HYBRID))
    with engine_on(node, logs, "hybrid", "--load-format", "dummy", model=model) as engine:
        tokens = prompt("hybrid", 5 * BLOCK + 9)
        assert ask(engine, tokens).cached_tokens == 0
        own = ask(engine, tokens)
        assert own.cached_tokens == 5 * BLOCK
        forget(engine)
        assert ask(engine, tokens).cached_tokens == 0
        assert engine.reset_prefix_cache(external=True)
    said = [line for line in engine.log_lines() if "kvtide off" in line]
    assert len(said) == 1
    assert "groups (the model has 2 KV cache groups, not one)" in said[0]
    assert not node.is_there()


def test_an_encoder_is_served_as_without_kvtide(node: Node, logs: Path, tmp_path: Path) -> None:
    """vLLM calls every hook, with the blocks of no group."""
    model = copy_without(SMOLLM2, tmp_path / "encoder", "*.safetensors", "config.json")
    (model / "config.json").write_text(json.dumps(ENCODER))
    arguments = ("--load-format", "dummy", "--runner", "pooling", "--max-model-len", "512")
    with engine_on(node, logs, "encoder", *arguments, model=model) as engine:
        tokens = prompt("encoder", BLOCK + 9)
        embedding = engine.embed(tokens)
        assert len(embedding) == ENCODER["hidden_size"]
        assert engine.embed(tokens) == embedding
    said = [line for line in engine.log_lines() if "kvtide off" in line]
    assert len(said) == 1
    assert "groups (the model has 0 KV cache groups, not one)" in said[0]
    assert not node.is_there()


def test_an_unknown_setting_stops_the_start_and_names_the_nearest(node: Node, logs: Path) -> None:
    connector = {**KVTIDE, "kv_connector_extra_config": {"kvtide.chunk_tokns": 512}}
    arguments = ("--dtype", "bfloat16")
    engine = engine_on(node, logs, "misspelt", *arguments, model=TINY_LLAMA, connector=connector)
    said = start_fails(engine)
    assert "chunk_tokns" in said
    assert "kvtide.chunk_tokens" in said
    assert not node.is_there()


def test_a_damaged_model_is_vllms_own_error(node: Node, logs: Path, tmp_path: Path) -> None:
    """Weights cut off in the middle: no hang, nothing of ours in the way, nothing left behind."""
    model = copy_without(TINY_LLAMA, tmp_path / "damaged")
    weights = model / "model.safetensors"
    with weights.open("r+b") as file:
        file.truncate(weights.stat().st_size // 2)
    said = start_fails(engine_on(node, logs, "damaged", "--dtype", "bfloat16", model=model))
    assert "safetensors" in said.lower()
    assert "incomplete" in said.lower() or "not fully covered" in said.lower()
    assert "kvtide/engines" not in said
    assert not node.is_there()


def test_beside_another_connector_each_does_its_part(
    node: Node, logs: Path, tmp_path: Path
) -> None:
    """MultiConnector: kvtide first; what kvtide has not, the other loads, and kvtide stores it."""
    other = {
        "kv_connector": "ExampleConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"shared_storage_path": str(tmp_path)},
    }
    connector = {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"connectors": [dict(KVTIDE), other]},
    }
    arguments = ("--dtype", "bfloat16")
    engine = engine_on(node, logs, "multi", *arguments, model=TINY_LLAMA, connector=connector)
    with engine:
        node.wait_on()
        assert engine.wait_kvtide().endswith(", failed loads are recomputed")
        tokens = prompt("multi", 5 * BLOCK + 9)
        with node.storing(5, BLOCK_BYTES):
            ask(engine, tokens)
        assert list(tmp_path.iterdir()), "the other connector has stored nothing"
        own = ask(engine, tokens)
        forget(engine)
        with node.loading(5):
            assert_same(ask(engine, tokens), own)
        node.wait_at_rest()
        node.clear()
        forget(engine)
        with node.storing(5, BLOCK_BYTES), node.loading(0):
            assert ask(engine, tokens).token_ids == own.token_ids
        forget(engine)
        with node.loading(5):
            assert_same(ask(engine, tokens), own)
        metrics = engine.metrics()
        assert metrics['vllm:kvtide_prompt_tokens_total{source="external"}'] > 0
