"""What the node says of itself: for `kvtide status`, `config show` and HTTP.

Answered from the machine's own state and the engines' counts. Salts and keys never appear.
"""

import itertools
from collections.abc import Iterable
from typing import Any

from kvtide.core.index import Entry
from kvtide.core.instances import Instance
from kvtide.core.machine import Machine


def config_values(shown: list[dict[str, str]]) -> dict[str, Any]:
    """Every effective value of the node with its owner and source."""
    return {"settings": shown}


def status(machine: Machine, uptime_ms: int, shown: list[dict[str, str]]) -> dict[str, Any]:
    """The whole status, as plain values."""
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
        "entries": _entries(machine.index.entries.values()),
        "engines": [_engine(machine, instance) for instance in instances],
        "not_shared": not_shared(instances),
        "counts": totals(machine),
        "evicted": dict(machine.lending.evicted),
    }


def host(machine: Machine) -> dict[str, Any]:
    """Bytes of the host tier, and its regions."""
    regions = machine.host.regions.values()
    held = sum(
        entry.blocks * entry.layout.block_bytes
        for entry in machine.index.entries.values()
        if entry.is_held
    )
    quarantine = sum(grant.bytes for grant in machine.lending.grants.values() if grant.has_failed)
    leases, loads = machine.leases.counts()
    free = sum(region.cells.free_cells * region.layout.block_bytes for region in regions)
    return {
        "size_bytes": machine.host.size_bytes,
        "limit_bytes": machine.host.limit_bytes,
        "allocated_bytes": machine.host.allocated_bytes,
        "free_bytes": free,
        "held_bytes": held,
        "evictable_bytes": _evictable_bytes(machine),
        "granted_bytes": machine.lending.granted_bytes,
        "quarantine_bytes": quarantine,
        "pinned_bytes": machine.leases.pinned_bytes,
        "grants": len(machine.lending.grants),
        "leases": leases,
        "loads": loads,
        "regions": [
            {
                "layout": region.layout.name,
                "bytes": region.bytes,
                "free_bytes": region.cells.free_cells * region.layout.block_bytes,
                "state": _region_state(region.is_ready, region.is_leaving),
                "open_to": sorted(
                    instance.engine_id[:8]
                    for instance in machine.instances.values()
                    if region.number in instance.open_regions
                ),
            }
            for region in regions
        ],
    }


def _evictable_bytes(machine: Machine) -> int:
    """Bytes of held entries that no pin, their own or one below them, keeps."""
    kept: set[int] = set()
    for entry in [*machine.index.entries.values()]:
        node: Any = entry
        while isinstance(node, Entry) and (entry.pins or not entry.is_held):
            if id(node) in kept:
                break
            kept.add(id(node))
            node = node.parent
    return sum(
        entry.blocks * entry.layout.block_bytes
        for entry in machine.index.entries.values()
        if id(entry) not in kept
    )


def _region_state(is_ready: bool, is_leaving: bool) -> str:
    if is_leaving:
        return "leaving"
    return "ready" if is_ready else "being made"


def _entries(entries: Iterable[Entry]) -> dict[str, int]:
    chunks = tails = storing = 0
    for entry in entries:
        storing += not entry.is_held
        chunks += entry.is_held and entry.is_whole
        tails += entry.is_held and not entry.is_whole
    return {"chunks": chunks, "tails": tails, "storing": storing}


def _engine(machine: Machine, instance: Instance) -> dict[str, Any]:
    hello, identity = instance.hello, instance.identity
    leases, loads = machine.leases.counts(instance.engine_id)
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
        "leases": leases,
        "loads": loads,
        "grants": sum(
            grant.engine_id == instance.engine_id for grant in machine.lending.grants.values()
        ),
        "counts": dict(instance.counts),
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


def totals(machine: Machine) -> dict[str, int]:
    """Counters of the node and of all engines, those that have left included."""
    sums = dict(machine.counts)
    sums["stored_blocks"] = machine.lending.stored_blocks
    for instance in machine.instances.values():
        for name, value in instance.counts.items():
            sums[name] = sums.get(name, 0) + value
    return sums
