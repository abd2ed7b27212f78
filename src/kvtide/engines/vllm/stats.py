"""Our counters among vLLM's own statistics, and how workers' counters reach the scheduler."""

from dataclasses import dataclass
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorWorkerMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)

from kvtide.metrics import METRICS, Metric


def added(one: dict[str, int], other: dict[str, int]) -> dict[str, int]:
    """Counters of both."""
    return {name: one.get(name, 0) + other.get(name, 0) for name in one.keys() | other.keys()}


@dataclass(frozen=True, slots=True)
class WorkerCounts(KVConnectorWorkerMetadata):
    """Counters of one worker, or of several added up."""

    counts: dict[str, int]

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        """Both together."""
        assert isinstance(other, WorkerCounts), type(other)
        return WorkerCounts(added(self.counts, other.counts))


@dataclass
class KVTideStats(KVConnectorStats):
    """Increments by name; plain integers, since they travel as msgpack."""

    def reset(self) -> None:
        """Start anew."""
        self.data: dict[str, int] = {}

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        """Both together."""
        return KVTideStats(data=added(self.data, other.data))

    def reduce(self) -> dict[str, int | float]:
        """What vLLM's log line shows: where tokens came from, and what was stored and loaded."""
        shown = ("tokens.", "loaded_bytes", "stored_bytes", "failed_blocks")
        return {name: value for name, value in sorted(self.data.items()) if name.startswith(shown)}

    def is_empty(self) -> bool:
        """Nothing happened."""
        return not self.data


class KVTidePromMetrics(KVConnectorPromMetrics):
    """The counters of METRICS that engines count, as vLLM's metrics `vllm:kvtide_…`."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: Any,
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._counters: dict[str, tuple[Metric, Any]] = {}
        for metric in METRICS:
            if metric.kind == "counter" and not metric.is_of_node:
                labels = [*labelnames, *metric.labels]
                name = f"vllm:{metric.name.removesuffix('_total')}"
                counter = self._counter_cls(name, metric.doc, labelnames=labels)
                self._counters[metric.source] = (metric, counter)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Add increments; names that are not in the table are left out."""
        values = self.per_engine_labelvalues[engine_idx]
        for name, increment in transfer_stats_data.items():
            prefix, dot, rest = name.partition(".")
            metric, counter = self._counters.get(prefix + dot, (None, None))
            if metric is not None and counter is not None:
                labels = [*values, rest] if metric.labels else values
                counter.labels(*labels).inc(increment)
