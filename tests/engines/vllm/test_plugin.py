"""How vLLM finds the connector: its entry point runs in each of vLLM's processes."""

import importlib
import subprocess
import sys
from importlib.metadata import entry_points
from typing import Any

import pytest

from kvtide.engines.vllm import CONNECTOR

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


def test_what_each_process_imports_is_next_to_nothing() -> None:
    asked = (
        "import sys, kvtide.engines.vllm; print({'torch', 'socket', 'vllm'} & set(sys.modules))"
    )
    command = [sys.executable, "-c", asked]
    said = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    assert said.stdout.strip() == "set()"
