"""What must hold when nothing happens any more."""

from typing import TYPE_CHECKING, Any

from kvtide.core.effects import HostLimit
from kvtide.core.reasons import EvictCause

if TYPE_CHECKING:
    from kvtide.testing.simulate.engine import Engine
    from kvtide.testing.simulate.node import Node
    from kvtide.testing.simulate.world import World


def check_idle(world: "World") -> None:
    """No request is left: nothing that it held may be."""
    for engine in world.engines:
        if engine.is_alive and not engine.is_closing:
            _all_zero(world, engine.name, _held_by_engine(engine))
            _check_counts(world, engine)
    for node in world.nodes.values():
        if node.is_alive:
            node.machine.check_integrity()
            _all_zero(world, node.process.name, _held_by_node(node))
            _check_cells(world, node)
    _check_files(world)


def _check_counts(world: "World", engine: "Engine") -> None:
    """Contract C19: each prompt token was counted once, for where it came from."""
    assert engine.batches is not None
    counts, wanted = engine.batches.side._stats, engine.batches.prompt_tokens
    found = sum(counts.get(f"tokens.{source}", 0) for source in ("local", "external", "computed"))
    if found != wanted:
        raise world.kernel.broken(f"{engine.name} counted {found} of {wanted} prompt tokens")


def _all_zero(world: "World", name: str, numbers: dict[str, Any]) -> None:
    left = {what: number for what, number in numbers.items() if number}
    if left:
        raise world.kernel.broken(f"at idle {name} still has {left}")


def _held_by_engine(engine: "Engine") -> dict[str, Any]:
    batches, session = engine.batches, engine.session
    if batches is None or session is None:
        return {"no scheduler": True}
    side = batches.side
    held = {
        "requests": batches.requests,
        "trackers": side._trackers,
        "loads": side._loads,
        "blocks being loaded": side._loading,
        "unplanned loads": side._new_loads,
        "questions": side._lookups._questions,
        "canaries": side._canaries._canaries,
        "offers": side._stores._asking,
        "blocks to rescue": side._stores._left,
        "answers nobody took": session._answers._waiting,
        "questions nobody answered": session._answers._open,
        "grants to return": session._returned,
        "ends of loads to say": session._load_ends,
        "clears to say": session._uncleared,
        "clears not answered": session._clearing,
        "messages nobody took": session._link._channel._left,
        "blocks owned": batches.blocks.block_count - batches.blocks.free_count,
    }
    for rank in engine.ranks:
        worker = rank.side
        if worker is not None:
            held[f"grants of rank {rank.rank}"] = worker._held
            held[f"answers of rank {rank.rank}"] = worker._unsent
            held[f"loads of rank {rank.rank}"] = worker._loads
            held[f"verdicts of rank {rank.rank}"] = worker._verdicts
            held[f"copies of rank {rank.rank}"] = [
                number for number, one in worker._regions._mappings.items() if one.users
            ]
    return held


def _held_by_node(node: "Node") -> dict[str, Any]:
    machine = node.machine
    leases, loads = machine.leases.counts()
    return {
        "leases": leases,
        "loads": loads,
        "pinned bytes": machine.leases.pinned_bytes,
        "grants": machine.lending.grants,
        "granted bytes": machine.lending.granted_bytes,
        "loose entries": machine.lending.loose,
        "promotions": machine.promotions._waiting,
        "questions to tiers": machine.promotions._asked,
        "loads from tiers": machine.promotions._loads,
        "stores to tiers": machine.writes._running,
        "fingerprints quarantined": machine.quarantined,
        "lookups": [one for one in machine.lookups._waiting.values() if one],
    }


def _check_cells(world: "World", node: "Node") -> None:
    """Every cell is free, or an entry's that can be found."""
    machine = node.machine
    used = sum(
        region.cells.cell_count - region.cells.free_cells
        for region in machine.host.regions.values()
    )
    entries = [
        entry for entry in machine.index.entries.values() if entry.blocks and entry.is_attached
    ]
    held = sum(entry.blocks for entry in entries)
    if used != held:
        raise world.kernel.broken(f"at idle {used} cells are in use, and entries hold {held}")


def _check_files(world: "World") -> None:
    """Nobody has more open than what it uses."""
    for engine in world.engines:
        for process in engine.processes:
            if process.is_alive and len(process.files) > 4:  # socket, epoll, event, a pidfd
                kinds = sorted(type(file).__name__ for file in process.files.values())
                raise world.kernel.broken(f"{process.name} has {kinds} open")
    for node in world.nodes.values():
        if node.is_alive:
            connections = len(node.runtime._server._connections)
            regions = sum(len(files.shards) + 1 for files in node.memory._files.values())
            wanted = 3 + connections + len(node.runtime._processes) + regions
            if len(node.process.files) != wanted:
                kinds = sorted(type(file).__name__ for file in node.process.files.values())
                raise world.kernel.broken(f"{node.process.name} has {wanted} files, and {kinds}")


def check_left(world: "World") -> None:
    """All engines have gone: what is in memory can all be freed."""
    for node in world.nodes.values():
        if not node.is_alive:
            continue
        machine = node.machine
        _all_zero(
            world, node.process.name, {"instances": machine.instances, "peers": machine.peers}
        )
        while (entry := machine.index.next_to_evict(machine.host.regions)) is not None:
            machine.lending.evict(entry, EvictCause.ROOM)
        machine.check_integrity()
        left = {
            "entries": machine.index.entries,
            "regions used": [
                region for region in machine.host.regions.values() if not region.is_unused
            ],
        }
        _all_zero(world, node.process.name, left)
        world.kernel.current = node.process
        node.runtime._feed(HostLimit(0))
        world.kernel.current = None
        world.kernel.run_until(world.kernel.now_us + 5_000_000)
        _all_zero(
            world,
            node.process.name,
            {"bytes": machine.host.allocated_bytes, "files": node.memory._files},
        )
