"""Plugs kvtide into vLLM.

    vllm serve MODEL --kv-transfer-config '{"kv_connector":"KVTideConnector","kv_role":"kv_both"}'

vLLM loads plug-ins in each of its processes, so importing this module costs nothing: neither torch
nor a socket. The connector itself is imported when vLLM asks for the class.
"""

import importlib
from typing import Any

CONNECTOR = "KVTideConnector"


def register() -> None:
    """vLLM's plug-in entry point: make the connector's name known. Again changes nothing."""
    factory = importlib.import_module(
        "vllm.distributed.kv_transfer.kv_connector.factory"
    ).KVConnectorFactory
    if CONNECTOR not in factory._registry:
        factory.register_connector(CONNECTOR, "kvtide.engines.vllm.connector", CONNECTOR)


def __getattr__(name: str) -> Any:
    """The class, for `kv_connector_module_path: kvtide.engines.vllm`."""
    if name == CONNECTOR:
        return importlib.import_module("kvtide.engines.vllm.connector").KVTideConnector
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
