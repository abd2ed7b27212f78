"""What becomes of failed loads is vLLM's to decide: kvtide's line says what it will go by."""

from pathlib import Path
from typing import Any

import pytest
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

from kvtide.testing import vllm_toy
from kvtide.testing.vllm_toy import ToyOptions, engine_config, kv_cache_config
from tests.engines.vllm.connector.test_connector_loads import BLOCK, failing
from tests.engines.vllm.connector.toys import Node, Toys, assert_right, ours, tokens

pytestmark = [pytest.mark.filterwarnings("ignore")]


def inside_multi(config: Any, policy: str) -> Any:
    """The same, with kvtide as the only connector of vLLM's MultiConnector."""
    names = ("kv_connector", "kv_connector_module_path", "kv_role", "kv_connector_extra_config")
    inner = {name: getattr(config.kv_transfer_config, name) for name in names}
    config.kv_transfer_config = KVTransferConfig(
        kv_connector="MultiConnector",
        kv_role="kv_both",
        kv_load_failure_policy=policy,
        kv_connector_extra_config={"connectors": [inner]},
    )
    return config


def said_and_done(config: Any) -> tuple[str, str]:
    """What the connector says of failed loads, and what vLLM's scheduler reads afterwards."""
    built: Any = KVConnectorFactory.create_connector(
        config=config,
        role=KVConnectorRole.SCHEDULER,
        kv_cache_config=kv_cache_config(ToyOptions()),
    )
    try:
        said: str = ours(built)._scheduler._identity.failed_loads
    finally:
        built.shutdown()
    return said, config.kv_transfer_config.kv_load_failure_policy


def test_alone_failed_loads_are_recomputed_whatever_is_set(node: Node, toy_model: Path) -> None:
    """vLLM's default would end their requests."""
    config = engine_config(toy_model, ToyOptions())
    assert config.kv_transfer_config.kv_load_failure_policy == "fail"
    assert said_and_done(config) == ("recompute", "recompute")


@pytest.mark.parametrize("policy", ["fail", "recompute"])
def test_inside_a_multi_connector_the_users_word_holds_and_is_said(
    node: Node, toy_model: Path, policy: str
) -> None:
    """vLLM reads the outer configuration, of which kvtide is handed no part."""
    config = inside_multi(engine_config(toy_model, ToyOptions()), policy)
    assert said_and_done(config) == (policy, policy)


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize("position", [0, 4, 8])
def test_a_block_that_fails_inside_a_multi_connector_is_computed(
    toys: Toys, position: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What has failed there reaches vLLM through that one."""
    monkeypatch.setattr(
        vllm_toy, "engine_config", lambda *given: inside_multi(engine_config(*given), "recompute")
    )
    engine = toys.start(ToyOptions(chunk_tokens=64, step_tokens=64))
    assert engine.connector is not ours(engine.connector)
    prompt = tokens(9 * BLOCK + 5)
    assert_right(engine.generate(prompt), 1)
    toys.rest()
    assert engine.reset()
    before = toys.node.count("loaded_blocks")
    failing(engine, lambda rank, ids: {ids[position]})
    assert_right(engine.generate(prompt), 1)
    toys.rest()
    assert toys.node.count("loaded_blocks") - before == position
