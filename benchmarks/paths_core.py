"""What the node and an engine's scheduler compute: keys, lookups, stores, and the index's memory.

No bytes are copied and nothing is sent: events go into `core.machine` and answers come out, with
the collector off as in the node. Chains of 512 chunks of 16 blocks; a lookup asks for a random one
of them, so large indexes are read from memory, not from the processor's caches. Sizes take turns
in every round; the smallest is measured twice, and how far the two medians lie apart is the noise.

    python -m benchmarks.paths_core [--quick] [--rounds 200]

`--quick` leaves the index of a million chunks out.
"""

import argparse
import gc
import os
import random
import statistics
import sys
import time
import tracemalloc
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from kvtide.core import keys
from kvtide.core import messages as m
from kvtide.core.effects import (
    Event,
    MakeRegion,
    Received,
    RegionMade,
    Send,
    SendRegion,
    Tick,
)
from kvtide.core.index import FRESHENED_MAX
from kvtide.core.leases import LEASE_MS
from kvtide.core.machine import Machine, MachineConfig
from kvtide.core.slots import RegionCells

PROMPT_TOKENS = 128 * 1024
CHUNK_TOKENS = 256
BLOCK_TOKENS = 16
BLOCKS = CHUNK_TOKENS // BLOCK_TOKENS
CHAIN_CHUNKS = 512
CELL_BYTES = 4096
CHUNK_BYTES = BLOCKS * CELL_BYTES
OFFER_CHUNKS = 16
STALL_ROUNDS = 5

KEYS_MS_MAX = 4.0
DIGESTS_US_MAX = 25.0
LOOKUP_US_MAX = 150.0
"""Half of the round trip's budget: the other half is the wire's."""
ENTRY_BYTES_MAX = 1024 + 64 * BLOCKS
CHILDREN_RATIO_MAX = 2.0

SCHEDULER, WORKER = 1, 2


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table."""

    what: str
    unit: str
    values: Sequence[float]
    limit: float | None = None

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    @property
    def keeps_limit(self) -> bool:
        return self.limit is None or self.median <= self.limit

    def __str__(self) -> str:
        low, high = (quantile(self.values, ratio) for ratio in (0.1, 0.99))
        limit = "" if self.limit is None else f"<= {self.limit:g}"
        verdict = "" if self.keeps_limit else "  MISSED"
        return (
            f"{self.what:<54}{self.median:>10.1f}{low:>9.1f}{high:>9.1f} {self.unit:<6}"
            f"{limit:<9}{verdict}"
        )


def quantile(values: Sequence[float], ratio: float) -> float:
    """The value that this part of all values does not exceed."""
    return sorted(values)[min(len(values) - 1, int(ratio * len(values)))]


def timed_us(call: Callable[[], Any]) -> float:
    """How long one call takes."""
    start = time.perf_counter_ns()
    call()
    return (time.perf_counter_ns() - start) / 1e3


class Node:
    """A machine with one engine, whose chunks are named by random keys."""

    def __init__(self, chunks_max: int) -> None:
        self.machine = Machine(
            MachineConfig(
                node=b"node",
                pid=1,
                version="0",
                host_bytes=chunks_max * CHUNK_BYTES,
                linger_ms=0,
                first_number=1,
            )
        )
        self.draw = random.Random(1)
        self.now_ms = 1
        self.number = 0
        self.root = self.draw.randbytes(keys.KEY_BYTES)
        self.chains: list[bytes] = []
        version, engine = m.WIRE_VERSION, "engine"
        self.give(Received(SCHEDULER, m.SchedulerHello(version, "0", engine, b"s", 1, "", 1)))
        self.give(
            Received(
                WORKER,
                m.WorkerHello(
                    version, engine, b"w", 2, 0, 0, 1, True, CELL_BYTES, {}, [], [], b""
                ),
            )
        )
        self.say(m.Identity(bytes(32), b"", {}, BLOCK_TOKENS, CHUNK_TOKENS, [CELL_BYTES], 1 << 40))
        self.say(m.RegisterRoot(self.root, b"", b""))

    def give(self, event: Event) -> list[Any]:
        """Hand an event in; regions are made and mapped at once. What was sent comes back."""
        sent = []
        waiting = [event]
        while waiting:
            for effect in self.machine.handle(waiting.pop(0), self.now_ms):
                match effect:
                    case MakeRegion(region):
                        waiting.append(RegionMade(region))
                    case SendRegion(connection, region):
                        waiting.append(Received(connection, m.RegionOpen(region)))
                    case Send(message=message):
                        sent.append(message)
        return sent

    def say(self, message: m.Message) -> list[Any]:
        """The scheduler speaks."""
        return self.give(Received(SCHEDULER, message))

    def chunk(self) -> tuple[bytes, bytes]:
        """Key and short digests of a chunk that nobody has seen."""
        digests = self.draw.randbytes(keys.INNER_DIGEST_BYTES * BLOCKS)
        return digests[-keys.INNER_DIGEST_BYTES :] + self.draw.randbytes(16), digests

    def store(self, parent: bytes, chunks: Sequence[tuple[bytes, bytes]]) -> None:
        """Offer chunks that follow one another, and answer for them."""
        self.number += 1
        found = [[key for key, _ in chunks], [digests for _, digests in chunks]]
        answer = self.say(m.StoreOffer(self.number, self.root, parent, *found))[-1]
        assert not any(answer.outcomes), answer.outcomes
        for grant in answer.grants:
            self.give(Received(WORKER, m.Stored(grant, ok=True)))

    def store_leaves(self, count: int) -> float:
        """Time the storing of so many chunks behind one another, in µs."""
        chunks = [self.chunk() for _ in range(count)]
        start = time.perf_counter_ns()
        self.store(self.root, chunks)
        return (time.perf_counter_ns() - start) / 1e3

    def fill(self, chunk_count: int) -> "Node":
        """Chains of whole chunks; `chains` keeps the keys of each."""
        while chunk_count:
            parent, chain = self.root, []
            for _ in range(min(CHAIN_CHUNKS, chunk_count) // OFFER_CHUNKS):
                chunks = [self.chunk() for _ in range(OFFER_CHUNKS)]
                self.store(parent, chunks)
                chain += [key for key, _ in chunks]
                parent = chain[-1]
            self.chains.append(b"".join(chain))
            chunk_count -= len(chain)
        return self

    def look_up(self, chain: bytes) -> float:
        """Time a lookup from its message to its answer, in µs; the lease goes back."""
        self.number += 1
        event = Received(SCHEDULER, m.Lookup(self.number, self.root, chain, b""))
        self.now_ms += 1
        start = time.perf_counter_ns()
        effects = self.machine.handle(event, self.now_ms)
        took_us = (time.perf_counter_ns() - start) / 1e3
        assert isinstance(effects[-1], Send)
        match = effects[-1].message
        assert isinstance(match, m.Match)
        assert match.chunks * keys.KEY_BYTES == len(chain), match.chunks
        self.say(m.LeaseRelease(match.lease))
        return took_us

    def probe(self, parent: bytes, digests: bytes) -> float:
        """Time the match of one chunk's blocks, in µs."""
        self.number += 1
        event = Received(SCHEDULER, m.Probe(self.number, self.root, parent, digests))
        start = time.perf_counter_ns()
        effects = self.machine.handle(event, self.now_ms)
        took_us = (time.perf_counter_ns() - start) / 1e3
        assert isinstance(effects[-1], Send)
        match = effects[-1].message
        assert isinstance(match, m.Match)
        assert match.blocks, "nothing matched"
        self.say(m.LeaseRelease(match.lease))
        return took_us


# ---- what is measured


def measure_keys(rounds: int) -> list[Row]:
    """Keys of a long prompt, which a scheduler keeps as an array and only ever extends."""
    draw = random.Random(2)
    tokens = array("I", (draw.randrange(128_000) for _ in range(PROMPT_TOKENS)))
    root = draw.randbytes(32)
    one_chunk = keys.packed_tokens(tokens[:CHUNK_TOKENS])

    def whole() -> None:
        keys.chunk_keys(root, keys.packed_tokens(tokens), CHUNK_TOKENS, 0)

    def last() -> None:
        packed = keys.packed_tokens(tokens[-CHUNK_TOKENS:])
        keys.chunk_keys(root, packed, CHUNK_TOKENS, PROMPT_TOKENS - CHUNK_TOKENS)

    def blocks() -> None:
        keys.block_digests(root, one_chunk, BLOCK_TOKENS, 0)

    arms = {"whole": whole, "again": whole, "last": last, "blocks": blocks}
    times: dict[str, list[float]] = {name: [] for name in arms}
    for _ in range(rounds):
        for name, arm in arms.items():
            times[name].append(timed_us(arm))
    ms = {name: [value / 1e3 for value in values] for name, values in times.items()}
    return [
        Row("chunk keys of 128k tokens", "ms", ms["whole"], KEYS_MS_MAX),
        Row("  the same again (noise)", "ms", ms["again"]),
        Row("  of one more chunk", "us", times["last"]),
        Row("block digests of one chunk", "us", times["blocks"], DIGESTS_US_MAX),
    ]


def measure_lookups(sizes: Sequence[int], rounds: int) -> list[Row]:
    """Lookups of 512 chunks in indexes of several sizes."""
    nodes = {}
    for size in sizes:
        start = time.perf_counter()
        nodes[size] = Node(size * 5 // 4 + 1024).fill(size)
        took_us = (time.perf_counter() - start) / size * 1e6
        print(f"  {size} chunks stored, {took_us:.1f} us each", file=sys.stderr, flush=True)
    arms = [*((f"{size} chunks", nodes[size]) for size in sizes)]
    arms.append((f"{sizes[0]} chunks again (noise)", nodes[sizes[0]]))
    times: dict[str, list[float]] = {name: [] for name, _ in arms}
    draw = random.Random(3)
    for _ in range(rounds):
        for name, node in arms:
            times[name].append(node.look_up(draw.choice(node.chains[:-1] or node.chains)))
    return [
        Row(f"lookup of 512, {name}", "us", values, LOOKUP_US_MAX)
        for name, values in times.items()
    ]


def measure_children(counts: Sequence[int], rounds: int) -> list[Row]:
    """The match of one chunk's blocks among many children of one key."""
    asked = {}
    for count in counts:
        node = Node(count * 5 // 4 + 1024)
        children = [node.chunk() for _ in range(count)]
        for child in children:
            node.store(node.root, [child])
        asked[count] = (node, children)
    times: dict[int, list[float]] = {count: [] for count in counts}
    draw = random.Random(4)
    for _ in range(rounds):
        for count, (node, children) in asked.items():
            _, digests = draw.choice(children)
            half = digests[: len(digests) // 2] + bytes(len(digests) // 2)
            times[count].append(node.probe(node.root, half))
    return [
        Row(f"match of one chunk among {count} children", "us", values)
        for count, values in times.items()
    ]


def measure_memory(chunk_count: int) -> list[Row]:
    """Bytes of the index for each chunk: in chains, and as many children of one key."""
    rows = []
    for shape in ("in chains", "of one key"):
        node = Node(chunk_count * 5 // 4 + 1024)
        parent = node.root
        tracemalloc.start()
        for number in range(chunk_count):
            key, digests = node.chunk()
            node.store(parent, [(key, digests)])
            if shape == "in chains":
                parent = node.root if number % CHAIN_CHUNKS == CHAIN_CHUNKS - 1 else key
        used, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        rows.append(
            Row(f"index, chunks {shape}", "B", [used / chunk_count], float(ENTRY_BYTES_MAX))
        )
    return rows


def measure_stores(chunk_count: int) -> list[Row]:
    """Storing into a host with room, then into a full one; and after every leaf was touched."""
    node = Node(chunk_count)
    times: dict[str, list[float]] = {"with room": [], "evicting": []}
    for _ in range(3 * chunk_count // OFFER_CHUNKS):
        node.now_ms += 1
        evicted = node.machine.lending.evicted["room"]
        took_us = node.store_leaves(OFFER_CHUNKS)
        is_full = node.machine.lending.evicted["room"] > evicted
        times["evicting" if is_full else "with room"].append(took_us / OFFER_CHUNKS)
    return [
        Row("store of a chunk, host with room", "us", times["with room"]),
        Row("store of a chunk, host full", "us", times["evicting"]),
    ]


def measure_stalls(chunk_count: int) -> list[Row]:
    """One store into a full host, all leaves of which were looked up since the last one."""
    node = Node(chunk_count)
    for _ in range(chunk_count):
        node.store_leaves(1)
    times: dict[int, list[float]] = {0: [], 1 + chunk_count // FRESHENED_MAX: []}
    for _ in range(STALL_ROUNDS):
        for ticks, taken in times.items():
            for key in list(node.machine.index.entries):
                node.now_ms += 1
                node.say(m.Lookup(0, node.root, key, b""))
            node.now_ms += LEASE_MS
            node.machine.leases.expire(node.now_ms)
            for _ in range(ticks):
                node.give(Tick())
            taken.append(node.store_leaves(1))
    return [
        Row(f"store once {chunk_count} leaves were used, {ticks} ticks later", "us", taken)
        for ticks, taken in times.items()
    ]


def measure_tails(slot_counts: Sequence[int], rounds: int) -> list[Row]:
    """Finding room for a tail of two blocks among slots that have room for one."""
    rows = []
    for slot_count in slot_counts:
        cells = RegionCells(slot_count, BLOCKS)
        while cells.free_slots > 1:
            cells.take(BLOCKS - 1)
        times = []
        for _ in range(rounds):
            start = time.perf_counter_ns()
            first = cells.take(2)
            times.append((time.perf_counter_ns() - start) / 1e3)
            assert first is not None
            cells.give_back(first, 2)
        rows.append(Row(f"cells for a tail, {slot_count} shared slots", "us", times))
    return rows


@contextmanager
def collector_off() -> Iterator[None]:
    """As in the node."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print; 0 where every budget is kept."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="no index of a million chunks")
    parser.add_argument("--rounds", type=int, default=200)
    options = parser.parse_args(argv)
    sizes = [1_024, 10_240, 102_400] + ([] if options.quick else [1_024_000])
    with collector_off():
        rows = measure_keys(options.rounds)
        lookups = measure_lookups(sizes, options.rounds)
        gc.collect()
        children = measure_children([10, 1_000, 100_000], options.rounds)
        rows += lookups + children + measure_memory(20_480) + measure_stores(20_480)
        rows += measure_stalls(20_480) + measure_tails([100, 10_000], options.rounds)
    python = sys.version.split()[0]
    print(f"Python {python}; load average {os.getloadavg()[0]:.2f}; {options.rounds} rounds")
    print(f"{'':<54}{'median':>10}{'p10':>9}{'p99':>9} {'unit':<6}budget")
    for row in rows:
        print(row)
    noise = abs(1 - lookups[-1].median / lookups[0].median)
    growth = lookups[-2].median / lookups[0].median
    spread = children[-1].median / children[0].median
    print(f"\nnoise floor of lookups {noise:.1%}")
    print(f"lookup, {sizes[-1]} chunks to {sizes[0]}: {growth:.2f} times (memory, not steps)")
    print(f"match, 100000 children to 10: {spread:.2f} times (<= {CHILDREN_RATIO_MAX:g})")
    is_good = all(row.keeps_limit for row in rows) and spread <= CHILDREN_RATIO_MAX
    print("all budgets kept" if is_good else "a budget was MISSED")
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
