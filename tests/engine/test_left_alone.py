"""Engines that kvtide leaves alone, and starts that fail for reasons that are plain to see."""

import contextlib
import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtide.testing.leashed import ProgramError
from kvtide.testing.serving import KVTIDE, SMOLLM2, TINY_LLAMA, ServedEngine
from tests.engine.answers import ask, assert_same, forget
from tests.engine.conftest import engine_on, make_node, together
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


@pytest.fixture(scope="module")
def unsupported(
    node: Node, logs: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, ServedEngine]]:
    """Engines of models that are not one group of KV cache."""
    engines = {}
    for name, config, more in (
        ("hybrid", HYBRID, ()),
        ("encoder", ENCODER, ("--runner", "pooling", "--max-model-len", "512")),
    ):
        below = tmp_path_factory.mktemp("models")
        model = copy_without(SMOLLM2, below / name, "*.safetensors", "config.json")
        (model / "config.json").write_text(json.dumps(config))
        arguments = ("--load-format", "dummy", *more)
        engines[name] = engine_on(node, logs, name, *arguments, model=model)
    with together(*engines.values()):
        yield engines


def test_a_hybrid_model_is_served_as_without_kvtide(
    unsupported: dict[str, ServedEngine], node: Node
) -> None:
    """vLLM keeps its hybrid manager (two groups), one line says why, no node is started."""
    engine = unsupported["hybrid"]
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


def test_an_encoder_is_served_as_without_kvtide(
    unsupported: dict[str, ServedEngine], node: Node
) -> None:
    """vLLM calls every hook, with the blocks of no group."""
    engine = unsupported["encoder"]
    tokens = prompt("encoder", BLOCK + 9)
    embedding = engine.embed(tokens)
    assert len(embedding) == ENCODER["hidden_size"]
    assert engine.embed(tokens) == embedding
    said = [line for line in engine.log_lines() if "kvtide off" in line]
    assert len(said) == 1
    assert "groups (the model has 0 KV cache groups, not one)" in said[0]
    assert not node.is_there()


@pytest.fixture(scope="module")
def failed(node: Node, logs: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """All that engines have said that must not start, and have ended."""
    damaged = copy_without(TINY_LLAMA, tmp_path_factory.mktemp("models") / "damaged")
    weights = damaged / "model.safetensors"
    with weights.open("r+b") as file:
        file.truncate(weights.stat().st_size // 2)
    misspelt = {**KVTIDE, "kv_connector_extra_config": {"kvtide.chunk_tokns": 512}}
    argument = ("--dtype", "bfloat16")
    engines = {
        "misspelt": engine_on(
            node, logs, "misspelt", *argument, model=TINY_LLAMA, connector=misspelt
        ),
        "damaged": engine_on(node, logs, "damaged", *argument, model=damaged),
    }
    said = {}
    with contextlib.ExitStack() as stack:
        for engine in engines.values():
            engine.start()
            stack.push(engine)
        for name, engine in engines.items():
            with pytest.raises(ProgramError, match="ended at its start"):
                engine.wait_ready()
            assert not engine.processes()
            said[name] = "\n".join(engine.log_lines())
    return said


def test_an_unknown_setting_stops_the_start_and_names_the_nearest(
    failed: dict[str, str], node: Node
) -> None:
    said = failed["misspelt"]
    assert "chunk_tokns" in said
    assert "kvtide.chunk_tokens" in said
    assert not node.is_there()


def test_a_damaged_model_is_vllms_own_error(failed: dict[str, str], node: Node) -> None:
    """Weights cut off in the middle: no hang, nothing of ours in the way, nothing left behind."""
    said = failed["damaged"]
    assert "safetensors" in said.lower()
    assert "incomplete" in said.lower() or "not fully covered" in said.lower()
    assert "kvtide/engines" not in said
    assert not node.is_there()


@pytest.fixture
def other_node() -> Iterator[Node]:
    """A node that those who are left alone do not see: they would be engines of it, too."""
    yield from make_node()


def test_beside_another_connector_each_does_its_part(
    other_node: Node, logs: Path, tmp_path: Path
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
    engine = engine_on(
        other_node, logs, "multi", *arguments, model=TINY_LLAMA, connector=connector
    )
    with engine:
        other_node.wait_on()
        assert engine.wait_kvtide().endswith(", failed loads are recomputed")
        tokens = prompt("multi", 5 * BLOCK + 9)
        with other_node.storing(5, BLOCK_BYTES):
            ask(engine, tokens)
        assert list(tmp_path.iterdir()), "the other connector has stored nothing"
        own = ask(engine, tokens)
        forget(engine)
        with other_node.loading(5):
            assert_same(ask(engine, tokens), own)
        other_node.wait_at_rest()
        other_node.clear()
        forget(engine)
        with other_node.storing(5, BLOCK_BYTES), other_node.loading(0):
            assert ask(engine, tokens).token_ids == own.token_ids
        forget(engine)
        with other_node.loading(5):
            assert_same(ask(engine, tokens), own)
        metrics = engine.metrics()
        assert metrics['vllm:kvtide_prompt_tokens_total{source="external"}'] > 0
