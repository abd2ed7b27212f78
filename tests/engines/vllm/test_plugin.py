"""How vLLM finds the connector: its entry point runs in each of vLLM's processes."""

import importlib
import re
import subprocess
import sys
from contextlib import nullcontext
from importlib.metadata import entry_points
from types import SimpleNamespace
from typing import Any

import pytest

from kvtide.engines.vllm import CONNECTOR
from kvtide.errors import ConfigError

pytestmark = pytest.mark.filterwarnings("ignore")  # vLLM's own, as it is imported


@pytest.fixture
def factory() -> Any:
    """Where vLLM looks connectors up."""
    module = importlib.import_module("vllm.distributed.kv_transfer.kv_connector.factory")
    return module.KVConnectorFactory


def test_registering_again_changes_nothing(factory: Any) -> None:
    """vLLM itself raises where a name comes twice, which would end the engine."""
    (entry,) = entry_points(group="vllm.general_plugins", name="kvtide")
    register = entry.load()
    register()
    before = factory._registry[CONNECTOR]
    register()
    assert factory._registry[CONNECTOR] is before
    assert before().__name__ == CONNECTOR


def test_stores_are_not_deliveries(factory: Any) -> None:
    """vLLM would keep the blocks of ended requests for them."""
    connector = factory.get_connector_class_by_name(CONNECTOR)
    assert connector.requires_kv_delivery.fget(object()) is False


def test_settings_that_cannot_be_used_are_told_when_the_class_is_asked(factory: Any) -> None:
    """Which is minutes before a connector is made, with graphs even before any process is."""
    connector = factory.get_connector_class_by_name(CONNECTOR)
    for extra, said in (
        ({"kvtide.chunk_token": 128}, "did you mean kvtide.chunk_tokens?"),
        ({}, ""),
    ):
        engine = SimpleNamespace(
            kv_transfer_config=SimpleNamespace(kv_connector_extra_config=extra)
        )
        with pytest.raises(ConfigError, match=re.escape(said)) if said else nullcontext():
            assert connector.requires_piecewise_for_cudagraph(extra) is False
        with pytest.raises(ConfigError, match=re.escape(said)) if said else nullcontext():
            assert connector.get_required_kvcache_layout(engine) is None


def test_what_each_process_imports_is_next_to_nothing() -> None:
    asked = (
        "import sys, kvtide.engines.vllm; print({'torch', 'socket', 'vllm'} & set(sys.modules))"
    )
    command = [sys.executable, "-c", asked]
    said = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    assert said.stdout.strip() == "set()"
