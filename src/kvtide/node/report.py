"""What the node says of itself: for `kvtide status`, `config show` and HTTP.

Answered from the machine's own state and the engines' counts. Salts and keys never appear.

`status` and `numbers` look at no entry by itself: a scraper reads the latter every few seconds,
and an engine waits for its answers meanwhile. What is counted by entry is counted by the index as
it goes; the rest follows from regions, grants, leases and the chains that these keep.
"""

import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from kvtide.core.index import Entry, Root
from kvtide.core.instances import Instance
from kvtide.core.machine import Machine
from kvtide.core.quarantine import SHOWN_DIGITS
from kvtide.core.reasons import (
    CutReason,
    DropReason,
    EvictCause,
    MissReason,
    OffReason,
    Verdict,
)
from kvtide.metrics import OTHER
from kvtide.node.health import ON
from kvtide.tiers.base import LoadOutcome, StoreOutcome, TierStatistics

COUNT_MAX = (1 << 63) - 1
"""What a message can carry; absurd values stay below it, since metrics never break anything."""
LABELS: dict[str, tuple[str, ...]] = {
    "tokens.": ("local", "external", "computed"),
    "off.": tuple(OffReason),
    "miss.": tuple(MissReason),
    "lookups.": ("answered", "not_mapped"),
    "drop.": tuple(DropReason),
    "evicted.": tuple(EvictCause),
    "promotions.": tuple(CutReason),
    "canaries.": tuple(Verdict),
}
"""Counters that differ in one label, by the metric's source, and all values that are ours: metrics
give each from the start, since a rate misses the step from nothing to the first one."""
TIER_LABELS: dict[str, tuple[str, ...]] = {
    "tier_lookups.": ("found", "absent"),
    "tier_loads.": tuple(LoadOutcome),
    "tier_stores.": tuple(StoreOutcome),
}
"""The same for counters of each tier: the values of their second label."""
LEFT_NAMES_MAX = 1024
"""Names of counters that are kept of engines that have left; the engines chose them."""


def config_values(shown: list[dict[str, str]]) -> dict[str, Any]:
    """Every effective value of the node with its owner and source."""
    return {"settings": shown}


def status(
    machine: Machine,
    left: dict[str, int],
    uptime_ms: int,
    shown: list[dict[str, str]],
    tiers: Mapping[str, TierStatistics],
) -> dict[str, Any]:
    """The whole status, as plain values. `left`: counts of engines that have left."""
    instances = list(machine.instances.values())
    return {
        "node": {
            "pid": machine.config.pid,
            "version": machine.config.version,
            "incarnation": machine.config.node.hex()[:8],
            "uptime_s": uptime_ms // 1000,
            "settings": shown,
        },
        "host": host(machine),
        "entries": _entries(machine),
        "engines": [_engine(machine, instance) for instance in instances],
        "not_shared": not_shared(instances),
        "counts": totals(machine, left),
        "evicted": {str(cause): count for cause, count in machine.lending.evicted.items()},
        "tiers": _tiers(tiers),
        "quarantined": quarantined(machine),
        "canary_difference": machine.quarantine.greatest_difference,
    }


def quarantined(machine: Machine) -> list[dict[str, str]]:
    """Fingerprints that nobody is served under, as `status` shows them: each with why."""
    return [
        {
            "fingerprint": fingerprint.hex()[:SHOWN_DIGITS],
            "text": f"fingerprint {fingerprint.hex()[:SHOWN_DIGITS]} is quarantined until"
            f" `kvtide clear`: {why}",
        }
        for fingerprint, why in machine.quarantined.items()
    ]


def _tiers(tiers: Mapping[str, TierStatistics]) -> dict[str, Any]:
    return {
        name: dataclasses.asdict(statistics) | {"is_healthy": int(statistics.state == ON)}
        for name, statistics in tiers.items()
    }


def add_left(left: dict[str, int], counts: dict[str, int]) -> None:
    """Keep the counts of an engine that has left: totals never go back."""
    for name, value in counts.items():
        kept = name if name in left or len(left) < LEFT_NAMES_MAX else OTHER
        left[kept] = left.get(kept, 0) + value


def numbers(
    machine: Machine, left: dict[str, int], tiers: Mapping[str, TierStatistics]
) -> dict[str, Any]:
    """The part of the status that metrics are made of."""
    connected = sum(one.connection is not None for one in machine.instances.values())
    return {
        "host": _bytes(machine),
        "engines": connected,
        "counts": _named(tiers) | totals(machine, left),
        "evicted": {str(cause): count for cause, count in machine.lending.evicted.items()},
        "tiers": _tiers(tiers),
    }


def _named(tiers: Iterable[str]) -> dict[str, int]:
    """Nothing counted yet, under every name of ours; first, so that none is crowded out."""
    names = [source + value for source, values in LABELS.items() for value in values]
    for tier in tiers:
        names += [f"{source}{tier}.{v}" for source, values in TIER_LABELS.items() for v in values]
        names += [f"tier_loaded_bytes.{tier}", f"tier_stored_bytes.{tier}"]
    return dict.fromkeys(names, 0)


def host(machine: Machine) -> dict[str, Any]:
    """Bytes of the host tier, and its regions."""
    in_all = _bytes(machine)
    return {
        **in_all,
        "refusal": machine.host.refusal,
        "evictable_bytes": _evictable_bytes(machine, in_all["held_bytes"]),
        "regions": [
            {
                "layout": region.layout.name,
                "shards": region.layout.shard_count,
                "bytes": region.bytes,
                "free_bytes": region.cells.free_cells * region.layout.block_bytes,
                "state": _region_state(region.is_ready, region.is_leaving),
                "open_to": sorted(
                    instance.engine_id[:8]
                    for instance in machine.instances.values()
                    if region.number in instance.open_regions
                ),
                "refused": [refusal.text for refusal in region.refused.values()],
            }
            for region in machine.host.regions.values()
        ],
    }


def _bytes(machine: Machine) -> dict[str, Any]:
    """What becomes of every byte: allocated = free + held + storing + loose (+ being made)."""
    lending, leases = machine.lending, machine.leases
    regions = machine.host.regions.values()
    lent = sum(
        (region.cells.cell_count - region.cells.free_cells) * region.layout.block_bytes
        for region in regions
    )
    storing = _storing_bytes(machine)
    loose = sum(entry.bytes for entry in lending.loose)
    counts = leases.counts()
    return {
        "size_bytes": machine.host.size_bytes,
        "limit_bytes": machine.host.limit_bytes,
        "reachable_bytes": machine.host.reachable_bytes,
        "allocated_bytes": machine.host.allocated_bytes,
        "free_bytes": sum(r.cells.free_cells * r.layout.block_bytes for r in regions),
        "held_bytes": lent - storing - loose,
        "storing_bytes": storing,
        "loose_bytes": loose,
        "granted_bytes": lending.granted_bytes,
        "quarantine_bytes": sum(g.bytes for g in lending.grants.values() if g.has_failed),
        "pinned_bytes": leases.pinned_bytes,
        "grants": len(lending.grants),
        "leases": counts.leases,
        "loads": counts.loads,
        "quarantined": len(machine.quarantined),
    }


def _storing_bytes(machine: Machine) -> int:
    """Bytes of entries that are not held yet: those with a grant, and the copied behind them."""
    return sum(entry.bytes for entry in _storing(machine))


def _storing(machine: Machine) -> Iterator[Entry]:
    for grant in machine.lending.grants.values():
        entry = grant.entry
        if entry.is_attached and entry.parent is not None and entry.parent.is_held:
            yield entry  # the first of its chain that is not held
            yield from machine.index.below(entry)


def _evictable_bytes(machine: Machine, held_bytes: int) -> int:
    """Bytes of held entries that no lease, write, waiting lookup or entry being stored keeps, or
    one below."""
    index, lending = machine.index, machine.lending
    not_held = itertools.chain(lending.loose, _storing(machine))
    kept_bytes = index.leased_bytes
    kept_bytes -= sum(entry.bytes for entry in not_held if entry.leases)
    seen: set[Entry] = set()
    keepers: list[Entry | Root | None] = [g.entry.parent for g in lending.grants.values()]
    keepers += [*machine.writes.pinned(), *machine.promotions.pinned()]
    for node in keepers:
        while isinstance(node, Entry) and not node.leases and node not in seen:
            seen.add(node)
            kept_bytes += node.bytes if node.is_held else 0
            node = node.parent
    return held_bytes - kept_bytes


def _region_state(is_ready: bool, is_leaving: bool) -> str:
    if is_leaving:
        return "leaving"
    return "ready" if is_ready else "being made"


def _entries(machine: Machine) -> dict[str, int]:
    index = machine.index
    storing = len(index.entries) - index.held_chunks - index.held_tails
    return {"chunks": index.held_chunks, "tails": index.held_tails, "storing": storing}


def _engine(machine: Machine, instance: Instance) -> dict[str, Any]:
    hello, identity = instance.hello, instance.identity
    counts = machine.leases.counts(instance.engine_id)
    return {
        "engine_id": instance.engine_id,
        "pid": hello.pid if hello else None,
        "label": hello.label if hello else "",
        "workers": {str(rank): worker.pid for rank, worker in instance.workers.items()},
        "state": _engine_state(instance),
        "off": str(instance.off) if instance.off else "",
        "fingerprint": identity.fingerprint.hex()[:8] if identity else "",
        "layout": instance.layout.name if instance.layout else "",
        "fields": identity.fields if identity else {},
        "leases": counts.leases,
        "loads": counts.loads,
        "grants": sum(
            grant.engine_id == instance.engine_id for grant in machine.lending.grants.values()
        ),
        "counts": _absorbed(instance.counts),
    }


def _engine_state(instance: Instance) -> str:
    if instance.off is not None:
        return "off"
    if instance.connection is None:
        return "away"
    return "on" if instance.is_serving else "starting"


def not_shared(instances: list[Instance]) -> list[dict[str, Any]]:
    """For each pair of engines with equal weights, the fields that keep them from sharing."""
    found = []
    for one, other in itertools.combinations(instances, 2):
        if one.identity is None or other.identity is None:
            continue
        mine, theirs = one.identity, other.identity
        if mine.fingerprint == theirs.fingerprint or not mine.weights:
            continue
        if mine.weights != theirs.weights:
            continue
        names = sorted(mine.fields.keys() | theirs.fields.keys())
        differ = {
            name: [mine.fields.get(name, "absent"), theirs.fields.get(name, "absent")]
            for name in names
            if mine.fields.get(name) != theirs.fields.get(name)
        }
        found.append({"engines": [one.engine_id, other.engine_id], "fields": differ})
    return found


def totals(machine: Machine, left: dict[str, int]) -> dict[str, int]:
    """Counters of the node and of all engines, those that have left included."""
    sums = dict(machine.counts)
    sums["stored_blocks"] = machine.lending.stored_blocks
    sums[f"drop.{DropReason.FAILED}"] = machine.lending.failed_blocks
    for counts in (left, *(instance.counts for instance in machine.instances.values())):
        for name, value in counts.items():
            sums[name] = sums.get(name, 0) + value
    return _absorbed(sums)


def _absorbed(counts: dict[str, int]) -> dict[str, int]:
    return {name: min(value, COUNT_MAX) for name, value in counts.items()}
