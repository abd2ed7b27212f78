"""Numbers: the one table of metrics, how engines count, and the Prometheus text of it all.

Engines count in plain integers by name and send the increments to the node; the node adds them
up. A histogram is a handful of such counters, so nothing but additions ever travels. Metrics can
never break serving: nothing here raises on a strange value, it only counts.

docs/metrics.md is generated from METRICS.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

BUCKETS_US = (100, 300, 1_000, 3_000, 10_000, 30_000, 100_000, 300_000, 1_000_000, 3_000_000)
"""Upper bounds of the buckets of every duration, in microseconds."""

LABELS_MAX = 128
"""Values of the labels of one metric: a scraper keeps every one that it has ever seen, and engines
name some. Eight tiers with eleven outcomes of a store are 88."""
OTHER = "other"
_LABEL = re.compile(r"[a-z][a-z0-9_]{0,39}")


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric as users see it.

    `source` is the name of the counter, or the prefix of counters that differ in their labels; a
    gauge with labels has one value for each tier. `is_of_node`: no engine counts it.
    """

    name: str
    kind: str
    doc: str
    source: str
    labels: tuple[str, ...] = ()
    is_of_node: bool = False


METRICS = (
    Metric("kvtide_host_size_bytes", "gauge", "Most bytes the host tier may hold.", "size_bytes"),
    Metric(
        "kvtide_host_reachable_bytes",
        "gauge",
        "Most bytes the host tier may hold now, as far as the machine has memory to spare.",
        "reachable_bytes",
    ),
    Metric("kvtide_host_allocated_bytes", "gauge", "Bytes of all regions.", "allocated_bytes"),
    Metric("kvtide_host_held_bytes", "gauge", "Bytes of entries that can be hit.", "held_bytes"),
    Metric("kvtide_host_free_bytes", "gauge", "Bytes of free cells.", "free_bytes"),
    Metric(
        "kvtide_host_granted_bytes",
        "gauge",
        "Bytes lent to engines or tiers that have not answered, quarantine included, and of what"
        " was copied behind a chunk that is not there yet.",
        "granted_bytes",
    ),
    Metric(
        "kvtide_host_quarantine_bytes",
        "gauge",
        "Bytes of failed grants whose writer, a worker or a tier, is silent.",
        "quarantine_bytes",
    ),
    Metric("kvtide_leases", "gauge", "Matches that are protected for a moment.", "leases"),
    Metric("kvtide_loads", "gauge", "Loads that are running.", "loads"),
    Metric("kvtide_grants", "gauge", "Runs of cells lent to engines and tiers.", "grants"),
    Metric(
        "kvtide_fingerprints_quarantined",
        "gauge",
        "Fingerprints under which nobody is served, since a canary differed. Alert on any.",
        "quarantined",
    ),
    Metric(
        "kvtide_canaries_total",
        "counter",
        "Chunks that a worker compared with the same computed anew, by verdict: equal, differs (an"
        " alarm), no_verdict (taken away before).",
        "canaries.",
        ("verdict",),
        is_of_node=True,
    ),
    Metric("kvtide_engines", "gauge", "Engines that are connected.", "engines"),
    Metric(
        "kvtide_engines_off_total",
        "counter",
        "Engines whose caching was turned off, by themselves or by the node, by reason.",
        "off.",
        ("reason",),
        is_of_node=True,
    ),
    Metric(
        "kvtide_prompt_tokens_total",
        "counter",
        "Prompt tokens by where their KV came from, counted once for each request when it is"
        " first scheduled after its last load: local (the engine's own cache), external"
        " (kvtide), computed.",
        "tokens.",
        ("source",),
    ),
    Metric(
        "kvtide_recomputed_tokens_total",
        "counter",
        "Tokens computed again after a preemption.",
        "recomputed_tokens",
    ),
    Metric(
        "kvtide_misses_total",
        "counter",
        "Requests that were served nothing, or less than was asked, by reason.",
        "miss.",
        ("reason",),
    ),
    Metric(
        "kvtide_lookups_total",
        "counter",
        "Answers of the node; not_mapped: those cut short because the engine had not mapped"
        " memory yet.",
        "lookups.",
        ("outcome",),
        is_of_node=True,
    ),
    Metric(
        "kvtide_unprotected_loads_total",
        "counter",
        "Loads that began without a lease: what they read may be evicted meanwhile, and then they"
        " fail.",
        "unprotected_loads",
        is_of_node=True,
    ),
    Metric(
        "kvtide_stored_blocks_total",
        "counter",
        "Blocks stored.",
        "stored_blocks",
        is_of_node=True,
    ),
    Metric(
        "kvtide_already_held_blocks_total",
        "counter",
        "Blocks offered that the node had already.",
        "held_blocks",
    ),
    Metric(
        "kvtide_dropped_blocks_total",
        "counter",
        "Blocks that were not stored, by reason.",
        "drop.",
        ("reason",),
    ),
    Metric(
        "kvtide_loaded_blocks_total",
        "counter",
        "Blocks loaded and verified.",
        "loaded_blocks",
        is_of_node=True,
    ),
    Metric(
        "kvtide_failed_load_blocks_total",
        "counter",
        "Blocks whose load failed; the engine computed them.",
        "failed_blocks",
    ),
    Metric("kvtide_loaded_bytes_total", "counter", "Bytes copied into engines.", "loaded_bytes"),
    Metric("kvtide_stored_bytes_total", "counter", "Bytes copied out of engines.", "stored_bytes"),
    Metric(
        "kvtide_evictions_total",
        "counter",
        "Entries taken away: for room, because a longer one came, because their region moved,"
        " or by order.",
        "evicted.",
        ("cause",),
        is_of_node=True,
    ),
    Metric(
        "kvtide_promotions_cut_total",
        "counter",
        "Lookups answered with less than tiers have, by reason.",
        "promotions.",
        ("reason",),
        is_of_node=True,
    ),
    Metric(
        "kvtide_tier_lookups_total",
        "counter",
        "Questions to a tier about what host memory lacks: found (all or the first part of it) or"
        " absent.",
        "tier_lookups.",
        ("tier", "outcome"),
        is_of_node=True,
    ),
    Metric(
        "kvtide_tier_loads_total",
        "counter",
        "Loads from a tier below the host, by outcome.",
        "tier_loads.",
        ("tier", "outcome"),
        is_of_node=True,
    ),
    Metric(
        "kvtide_tier_loaded_bytes_total",
        "counter",
        "Bytes loaded from a tier and verified.",
        "tier_loaded_bytes.",
        ("tier",),
        is_of_node=True,
    ),
    Metric(
        "kvtide_tier_stores_total",
        "counter",
        "Entries written behind to a tier, by outcome; what is neither stored nor held there"
        " already was dropped.",
        "tier_stores.",
        ("tier", "outcome"),
        is_of_node=True,
    ),
    Metric(
        "kvtide_tier_stored_bytes_total",
        "counter",
        "Bytes stored in a tier.",
        "tier_stored_bytes.",
        ("tier",),
        is_of_node=True,
    ),
    Metric(
        "kvtide_tier_evictions_total",
        "counter",
        "Records that a tier took away for room.",
        "tier_evicted.",
        ("tier",),
        is_of_node=True,
    ),
    Metric(
        "kvtide_tier_healthy",
        "gauge",
        "1 where a tier is on and has not failed at all that it was asked for two minutes, else 0;"
        " `kvtide status` says what is wrong.",
        "is_healthy",
        ("tier",),
    ),
    Metric("kvtide_tier_used_bytes", "gauge", "Bytes in a tier.", "bytes_used", ("tier",)),
    Metric("kvtide_tier_max_bytes", "gauge", "Cap of a tier.", "bytes_max", ("tier",)),
    Metric("kvtide_tier_records", "gauge", "Records that can be found.", "records", ("tier",)),
    Metric(
        "kvtide_tier_queued_bytes",
        "gauge",
        "Bytes that wait to be written to a tier.",
        "queued_bytes",
        ("tier",),
    ),
    Metric("kvtide_lookup_seconds", "histogram", "From a lookup to its answer.", "lookup"),
    Metric("kvtide_load_seconds", "histogram", "Copying of one load in one worker.", "load"),
    Metric("kvtide_store_seconds", "histogram", "Copying of one step's stores.", "store"),
    Metric(
        "kvtide_stored_after_seconds",
        "histogram",
        "From the grant of a chunk or tail to the moment when all workers have copied it.",
        "stored_after",
        is_of_node=True,
    ),
    Metric(
        "kvtide_retrieve_seconds",
        "histogram",
        "From a request's arrival to the report that its load has ended.",
        "retrieve",
    ),
)


def duration_counts(name: str, micros: int) -> list[tuple[str, int]]:
    """The counters of a histogram that one duration raises, and by how much."""
    micros = max(0, micros)
    bucket = next((bound for bound in BUCKETS_US if micros <= bound), "inf")
    return [(f"{name}.us.{bucket}", 1), (f"{name}.us.sum", micros)]


class Counters:
    """Increments since they were last taken; one thread's."""

    def __init__(self) -> None:
        self._increments: dict[str, int] = {}

    def add(self, name: str, increment: int = 1) -> None:
        """Count."""
        if increment > 0:
            self._increments[name] = self._increments.get(name, 0) + increment

    def observe_s(self, name: str, seconds: float) -> None:
        """Count one duration."""
        for counter, increment in duration_counts(name, int(seconds * 1e6)):
            self.add(counter, increment)

    def take(self) -> dict[str, int]:
        """The increments; counting starts anew."""
        increments, self._increments = self._increments, {}
        return increments


def render(numbers: Mapping[str, Any]) -> str:
    """The Prometheus text of a node's numbers (`kvtide.node.report.numbers`)."""
    gauges = {**numbers["host"], "engines": numbers["engines"]}
    counts = dict(numbers["counts"])
    counts |= {f"evicted.{cause}": number for cause, number in numbers["evicted"].items()}
    tiers = numbers["tiers"]
    counts |= {f"tier_evicted.{name}": tier["evicted"] for name, tier in tiers.items()}
    lines: list[str] = []
    for metric in METRICS:
        lines.append(f"# HELP {metric.name} {metric.doc}")
        lines.append(f"# TYPE {metric.name} {metric.kind}")
        if metric.kind == "gauge" and metric.labels:
            lines += [
                f'{metric.name}{{tier="{name}"}} {tier[metric.source]}'
                for name, tier in tiers.items()
            ]
        else:
            lines.extend(_samples(metric, gauges, counts))
    return "\n".join(lines) + "\n"


def _samples(
    metric: Metric, gauges: Mapping[str, Any], counts: Mapping[str, int]
) -> Iterator[str]:
    if metric.kind == "gauge":
        yield f"{metric.name} {gauges[metric.source]}"
    elif metric.kind == "histogram":
        yield from _histogram(metric, counts)
    elif metric.labels:
        for values, count in _labelled(metric, counts).items():
            named = zip(metric.labels, values, strict=True)
            shown = ",".join(f'{label}="{value}"' for label, value in named)
            yield f"{metric.name}{{{shown}}} {count}"
    else:
        yield f"{metric.name} {counts.get(metric.source, 0)}"


def _labelled(metric: Metric, counts: Mapping[str, int]) -> dict[tuple[str, ...], int]:
    """Counts by the labels' values; what no words of ours can be is added up as `other`.

    In the order of `counts`, whose first names are ours.
    """
    found: dict[tuple[str, ...], int] = {}
    for name in counts:
        if name.startswith(metric.source):
            values = tuple(name.removeprefix(metric.source).split("."))
            are_words = len(values) == len(metric.labels) and all(map(_LABEL.fullmatch, values))
            if not are_words or len(found) >= LABELS_MAX:
                values = (OTHER,) * len(metric.labels)
            found[values] = found.get(values, 0) + counts[name]
    return found


def _histogram(metric: Metric, counts: Mapping[str, int]) -> Iterator[str]:
    so_far = 0
    for bound in BUCKETS_US:
        so_far += counts.get(f"{metric.source}.us.{bound}", 0)
        yield f'{metric.name}_bucket{{le="{bound / 1e6:g}"}} {so_far}'
    so_far += counts.get(f"{metric.source}.us.inf", 0)
    yield f'{metric.name}_bucket{{le="+Inf"}} {so_far}'
    seconds, micros = divmod(counts.get(f"{metric.source}.us.sum", 0), 1_000_000)
    yield f"{metric.name}_sum {seconds}.{micros:06d}"  # a float loses what was added last
    yield f"{metric.name}_count {so_far}"
