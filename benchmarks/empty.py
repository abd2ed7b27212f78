"""A connector without content: what vLLM itself spends on having any connector at all.

Its wrapper around every layer, the metadata of every step, the output of every worker: the part of
an overhead that no connector can avoid. Only the benchmark of kvtide's overhead uses it.
"""

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
)


class EmptyConnector(KVConnectorBase_V1):
    """Knows nothing, loads nothing, stores nothing."""

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Nothing to load."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing to wait for."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Nothing to store."""

    def wait_for_save(self) -> None:
        """Nothing to wait for."""

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Nothing is known."""
        return 0, False

    def update_state_after_alloc(
        self, request: Any, blocks: Any, num_external_tokens: int
    ) -> None:
        """Nothing to remember."""

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        """A plan without content."""
        return KVConnectorMetadata()
