"""What becomes of failed loads is vLLM's to decide: kvtide's line says what it will go by."""

from pathlib import Path
from typing import Any

import pytest
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

from kvtide.testing.vllm_toy import ToyOptions, engine_config, kv_cache_config
from tests.engines.vllm.connector.toys import Node

pytestmark = [pytest.mark.filterwarnings("ignore")]


def said_and_done(config: Any) -> tuple[str, str]:
    """What the connector says of failed loads, and what vLLM's scheduler reads afterwards."""
    built: Any = KVConnectorFactory.create_connector(
        config=config,
        role=KVConnectorRole.SCHEDULER,
        kv_cache_config=kv_cache_config(ToyOptions()),
    )
    (ours,) = getattr(built, "sub_connectors", [built])
    try:
        said: str = ours._scheduler._identity.failed_loads
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
    config = engine_config(toy_model, ToyOptions())
    inner = {
        name: getattr(config.kv_transfer_config, name)
        for name in ("kv_connector", "kv_connector_module_path", "kv_role")
    }
    config.kv_transfer_config = KVTransferConfig(
        kv_connector="MultiConnector",
        kv_role="kv_both",
        kv_load_failure_policy=policy,
        kv_connector_extra_config={"connectors": [inner]},
    )
    assert said_and_done(config) == (policy, policy)
