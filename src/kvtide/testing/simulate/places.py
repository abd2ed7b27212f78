"""What lies below nodes: a disk of each home, and one store on a server that all homes share.

    disk     MemoryTier, as it is; what it holds outlives the node
    server   RemoteTier, as it is, on a simulated client: `Store` has real headers and checksums

Either stands still, fails, is full, forgets behind our back, or has bytes that are not what was
written: flipped, cut short, or another record's.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvtide.codec import record as codec
from kvtide.core.keys import INNER_DIGEST_BYTES, KEY_BYTES
from kvtide.core.records import Record
from kvtide.core.tiering import TierPlan, WritePolicy
from kvtide.errors import CorruptRecord, PlaceFailed
from kvtide.testing.memory_tier import Held, MemoryTier
from kvtide.testing.simulate.kernel import Kernel
from kvtide.testing.simulate.memory import CELL_BYTES
from kvtide.tiers.base import LoadOutcome, LookupJob, StoreOutcome, Tier
from kvtide.tiers.remote.census import Census
from kvtide.tiers.remote.session import CALL_S_MAX, Put
from kvtide.tiers.remote.tier import RemoteTier
from kvtide.tiers.scope import Scope
from kvtide.units import KiB, MiB

if TYPE_CHECKING:
    from kvtide.testing.simulate.node import Node

SERVER_BYTES_MAX = 8 * MiB
DISK_BYTES_MAX = 4 * MiB
CALL_S = 0.002
BLOCK_BYTES = 256
"""Of a cell, what is used."""


@dataclass(slots=True)
class Value:
    """A record at rest: for each shard its header and its cells."""

    record: Record
    headers: list[bytearray]
    cells: list[bytearray]


class Store:
    """The server: values by key, least recently used first."""

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel
        self.values: dict[bytes, Value] = {}
        self.silent_until_us = 0
        self.failing_until_us = 0
        self.bytes_max = SERVER_BYTES_MAX

    @property
    def bytes_used(self) -> int:
        """Of all values."""
        return sum(value.record.payload_bytes for value in self.values.values())

    def remove(self, key: bytes) -> int:
        """Take a record and all behind it away; how many."""
        if self.values.pop(key, None) is None:
            return 0
        children = [one.record.key for one in self.values.values() if one.record.parent == key]
        return 1 + sum(self.remove(child) for child in children)

    def leaf(self, besides: bytes) -> bytes | None:
        """The record that goes next."""
        parents = {value.record.parent for value in self.values.values()}
        return next((key for key in self.values if key not in parents and key != besides), None)

    def damage(self, which: int, how: int) -> None:
        """Every third value is not what was written."""
        values = list(self.values.values())
        for value in values[which % 3 :: 3]:
            shard = which % len(value.cells)
            other = values[which // 7 % len(values)]
            match how % 4:
                case 0 | 1:
                    part = (value.cells if how % 2 else value.headers)[shard]
                    if len(part) >= CELL_BYTES:  # else it was cut short before
                        part[_used(which, len(part))] ^= 1 << which % 8
                case 2:
                    value.cells[shard] = bytearray(other.cells[-1])
                case 3:
                    del value.cells[shard][len(value.cells[shard]) // 2 :]

    def forget(self, which: int) -> None:
        """It evicts as it likes, and not leaves first."""
        keys = list(self.values)
        if keys:
            self.values.pop(keys[which % len(keys)])


class StoreSession:
    """A client of the store: a `Session`."""

    knows_names = False

    def __init__(self, store: Store, census: Census) -> None:
        self._store = store
        self._census = census
        self._kernel = store.kernel

    def _call(self) -> None:
        """A round trip, bounded."""
        kernel, store = self._kernel, self._store
        kernel.edge()
        kernel.sleep(kernel.draw.random() * CALL_S)
        silent_us = store.silent_until_us - kernel.now_us
        if silent_us > 0:
            kernel.sleep(min(silent_us / 1e6, CALL_S_MAX))
            if silent_us / 1e6 > CALL_S_MAX:
                raise PlaceFailed("the server does not answer")
        if store.failing_until_us > kernel.now_us:
            raise PlaceFailed("the server is out of order")

    def find(self, job: LookupJob) -> tuple[list[Record], bool]:
        self._call()
        found: list[Record] = []
        parent = job.parent
        for start in range(0, len(job.keys), KEY_BYTES):
            value = self._store.values.get(job.keys[start : start + KEY_BYTES])
            if value is None or (value.record.parent, value.record.root) != (parent, job.root):
                return found, False
            found.append(value.record)
            parent = value.record.key
        children = [
            value.record
            for value in self._store.values.values()
            if (value.record.parent, value.record.root, value.record.layout)
            == (parent, job.root, job.layout)
        ]
        if not job.digests:
            return found, bool(children)
        best = max(children, key=lambda one: _shared(one.digests, job.digests), default=None)
        if best is not None and _shared(best.digests, job.digests):
            found.append(best)
        return found, False

    def load(self, record: Record, cells: Sequence[memoryview]) -> LoadOutcome:
        value = self._store.values.get(record.key)
        if value is not None:  # it comes piece by piece
            for into, content in zip(cells, value.cells, strict=True):
                half = len(content) // 2
                into[: len(content[:half])] = content[:half]
        self._call()
        value = self._store.values.get(record.key)
        if value is None:
            return LoadOutcome.ABSENT
        for into, content in zip(cells, value.cells, strict=True):
            into[: len(content)] = content[: len(into)]
        try:
            codec.verify([memoryview(one) for one in value.headers], cells, record)
        except CorruptRecord:
            self._store.remove(record.key)
            return LoadOutcome.CORRUPT
        return LoadOutcome.LOADED

    def store(
        self, next_put: Callable[[], Put | None], ended: Callable[[Put, StoreOutcome], None]
    ) -> None:
        while (put := next_put()) is not None:
            headers, cells = _written(put)
            self._call()
            ended(put, self._keep(put.record, headers, cells))

    def _keep(
        self, record: Record, headers: list[bytearray], cells: list[bytearray]
    ) -> StoreOutcome:
        store = self._store
        if record.key in store.values:
            return StoreOutcome.HELD
        if record.parent != record.root.key and record.parent not in store.values:
            return StoreOutcome.NOT_ANCHORED
        while store.bytes_used + record.payload_bytes > store.bytes_max:
            leaf = store.leaf(record.parent)
            if leaf is None:
                return StoreOutcome.NO_ROOM
            store.remove(leaf)
        store.values[record.key] = Value(record, headers, cells)
        self._census.said(store.bytes_used, ())
        return StoreOutcome.STORED

    def clear(self, scope: Scope) -> int:
        self._call()
        keys = [k for k, value in self._store.values.items() if scope.has(value.record.root)]
        return sum(self._store.remove(key) for key in keys)

    def sweep(self) -> bool:
        return False

    def survey(self) -> None:
        self._call()
        self._census.said(self._store.bytes_used, ())

    def interrupt(self) -> None:
        """A call that runs ends by itself."""

    def close(self) -> None:
        """Nothing to close."""


def _written(put: Put) -> tuple[list[bytearray], list[bytearray]]:
    """What is sent of a record: made of the cells as they are now."""
    record = put.record
    headers, cells = [], []
    for shard, content in enumerate(put.cells):
        payload = bytearray(content)
        header = bytearray(codec.header_bytes(record.layout.shard_count, record.blocks))
        checksums = codec.checksums_of(memoryview(payload), record.blocks)
        codec.write_header(
            memoryview(header), codec.Header(record, shard, put.write_id, checksums)
        )
        headers.append(header)
        cells.append(payload)
    return headers, cells


def _used(which: int, length: int) -> int:
    """A byte that is not padding, nor a header's zeros: of one cell's or header's beginning."""
    return which % (length // CELL_BYTES) * CELL_BYTES + which // 64 % BLOCK_BYTES


def _shared(mine: bytes, theirs: bytes) -> int:
    count = 0
    for start in range(0, min(len(mine), len(theirs)), INNER_DIGEST_BYTES):
        if mine[start : start + INNER_DIGEST_BYTES] != theirs[start : start + INNER_DIGEST_BYTES]:
            break
        count += 1
    return count


class Places:
    """All that lies below the nodes of a world."""

    def __init__(self, kernel: Kernel, kinds: tuple[str, ...], policy: WritePolicy) -> None:
        self._kernel = kernel
        self._kinds = kinds
        self._policy = policy
        self.store = Store(kernel)
        self.disks: dict[str, dict[bytes, Held]] = {}
        self.open_disks: dict[str, MemoryTier] = {}

    def open(self, node: "Node") -> list[tuple[TierPlan, Tier]]:
        """The tiers of a node that boots."""
        found: list[tuple[TierPlan, Tier]] = []
        for kind in self._kinds:
            plan = TierPlan(kind, self._policy, loads_always=True)
            if kind == "disk":
                held = self.disks.setdefault(node.home, {})
                disk = MemoryTier(DISK_BYTES_MAX, node.wake, held=held)
                self.open_disks[node.home] = disk
                found.append((plan, disk))
            else:
                found.append((plan, self._remote(node)))
        return found

    def _remote(self, node: "Node") -> Tier:
        return RemoteTier(
            "server",
            "the server",
            lambda census: StoreSession(self.store, census),
            SERVER_BYTES_MAX,
            node.wake,
            256 * KiB,
        )

    def trouble(self, kind: int, which: int, how: int, span: int) -> None:
        """Something goes wrong below."""
        store, until_us = self.store, self._kernel.now_us + span % 4_000_000
        disk = list(self.open_disks.values())
        match kind % 8:
            case 0:
                store.silent_until_us = until_us
            case 1:
                store.failing_until_us = until_us
            case 2 | 3:
                store.damage(which, how)
            case 4:
                store.forget(which)
            case 5:
                store.bytes_max = (64 * KiB, SERVER_BYTES_MAX)[how % 2]
            case 6 if disk:
                tier = disk[which % len(disk)]
                tier.fails = True
                self._kernel.at(until_us, lambda: setattr(tier, "fails", False))
            case 7 if disk:
                self._damage_disk(disk[which % len(disk)], which, how)

    def _damage_disk(self, tier: MemoryTier, which: int, how: int) -> None:
        held = list(tier.held.values())
        if held:
            shards = held[which % len(held)].shards
            content = bytearray(shards[how % len(shards)])
            content[_used(which, len(content))] ^= 1 << how % 8
            shards[how % len(shards)] = bytes(content)

    def calm(self) -> None:
        """Nothing goes wrong any more."""
        self.store.silent_until_us = self.store.failing_until_us = 0
        self.store.bytes_max = SERVER_BYTES_MAX
        for tier in self.open_disks.values():
            tier.fails = False
