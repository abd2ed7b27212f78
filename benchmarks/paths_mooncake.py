"""A mooncake tier against plain loops of the binding that it uses, on the same store.

    python -m benchmarks.paths_mooncake [--quick]

A plain loop has Mooncake's client in its own process, and its memory registered there, so nothing
is copied on the way; nothing is proven, indexed or counted. One puts and gets record by record
(`put_from`, `get_into`), by a thread for each that is under way; one gives as many to a call
(`batch_put_from`, `batch_get_into`). Beside them is what manuals show, `put` and `get` of bytes.
The store is a master and one owner of memory, on the same machine, by TCP. It evicts by itself, so
nobody makes room inside what is timed: what is two rounds old is removed between rounds, for all.
How they are compared, and what is shown, says benchmarks/places.py.

LMCache's adapter of this name (`mooncake_store`) is not there: its wheel lacks the part in C++.

`--quick` measures few rounds, of one size alone, and decides nothing.
"""

import ctypes
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.places import (
    DEPTHS,
    HELD_ROUNDS,
    ROUND_BYTES,
    Arm,
    Arms,
    Cell,
    Extent,
    Here,
    Memory,
    Tier,
    closing,
    judge,
    measured,
    parser_of,
)
from kvtide.core.keys import fingerprint, root_key, salt_digest
from kvtide.core.records import RootName
from kvtide.errors import ConfigError
from kvtide.testing import mooncake_servers
from kvtide.testing.mooncake_servers import Store, clients_of
from kvtide.tiers.mooncake.opening import require_client
from kvtide.units import GiB

OWNED_BYTES = 4 * GiB
"""Twice what all hold together, so that the store itself has nothing to evict."""
TICKS_A_SECOND = os.sysconf("SC_CLK_TCK")
LEASE_MS = 10_000
"""Of a store that is told nothing; of a shorter one nothing may come on a busy machine."""
COPIES_BYTES = 2 * ROUND_BYTES
"""What the binding copies bytes to, and from."""


class Binding:
    """Mooncake's client in this process; it owns nothing of the store."""

    def __init__(self, store: Store, memory: Memory) -> None:
        from mooncake.store import MooncakeDistributedStore

        self.calls: Any = MooncakeDistributedStore()
        code = self.calls.setup(
            "127.0.0.1", "P2PHANDSHAKE", 0, COPIES_BYTES, "tcp", "", f"127.0.0.1:{store.port}"
        )
        assert code == 0, code
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(memory.view))
        code = self.calls.register_buffer(self.address, len(memory.view))
        assert code == 0, code


class Plain(Here):
    """What plain loops have in common: names, and what removes old ones."""

    def __init__(self, binding: Binding, name: str, memory: Memory, piece_bytes: int) -> None:
        super().__init__(memory)
        self._calls = binding.calls
        self._views = memory.pieces(piece_bytes)
        self._bytes = piece_bytes
        self._addresses = [binding.address + n * piece_bytes for n in range(len(self._views))]
        self._name = name
        self._round = 0

    def _names(self, back: int = 0) -> list[str]:
        of_round = self._round - back
        return [f"{self._name}:{of_round}:{number}" for number in range(len(self._views))]

    def settle(self) -> None:
        if self._round > HELD_ROUNDS:
            codes = self._calls.batch_remove(self._names(HELD_ROUNDS), True)
            assert not any(codes), codes

    def close(self) -> None:
        for back in range(min(HELD_ROUNDS, self._round)):
            self._calls.batch_remove(self._names(back), True)


class Singly(Plain):
    """Record by record, by as many threads as there may be under way."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._pool = ThreadPoolExecutor(max(DEPTHS))

    def put(self, depth: int) -> None:
        self._round += 1
        self._each(depth, self._put_one)

    def get(self, depth: int) -> None:
        self._each(depth, self._get_one)

    def _put_one(self, name: str, number: int) -> None:
        code = self._calls.put_from(name, self._addresses[number], self._bytes)
        assert code == 0, code

    def _get_one(self, name: str, number: int) -> None:
        length = self._calls.get_into(name, self._addresses[number], self._bytes)
        assert length == self._bytes, length

    def _each(self, depth: int, call: Callable[[str, int], None]) -> None:
        names = self._names()

        def share(first: int) -> None:
            for number in range(first, len(names), depth):
                call(names[number], number)

        if depth == 1:
            share(0)
        else:
            list(self._pool.map(share, range(depth)))

    def close(self) -> None:
        self._pool.shutdown()
        super().close()


class Bytes(Singly):
    """Values as bytes, which the binding copies."""

    def _put_one(self, name: str, number: int) -> None:
        code = self._calls.put(name, self._views[number])
        assert code == 0, code

    def _get_one(self, name: str, number: int) -> None:
        self._views[number][:] = self._calls.get(name)


class Together(Plain):
    """So many records by each call."""

    def put(self, depth: int) -> None:
        self._round += 1
        for part in self._parts(depth):
            codes = self._calls.batch_put_from(*part)
            assert not any(codes), codes

    def get(self, depth: int) -> None:
        for part in self._parts(depth):
            lengths = self._calls.batch_get_into(*part)
            assert set(lengths) == {self._bytes}, lengths

    def _parts(self, depth: int) -> list[tuple[list[str], list[int], list[int]]]:
        names, addresses = self._names(), self._addresses
        return [
            (names[at : at + depth], addresses[at : at + depth], [self._bytes] * depth)
            for at in range(0, len(names), depth)
        ]


class ClearedTier(Tier):
    """Each round has a salt, by which it is cleared when it is old."""

    def __init__(self, store: Store, memory: Memory, piece_bytes: int) -> None:
        super().__init__(
            memory,
            piece_bytes,
            type="mooncake",
            url=str(store.address),
            metrics_port=store.metrics_port,
        )
        self._salts: list[bytes] = []

    def put(self, depth: int) -> None:
        salt = os.urandom(16).hex()
        name = fingerprint({"engine": "benchmark"})
        key = root_key(name, epoch=b"", salt=salt, adapter=b"")
        self._root = RootName(key, name, b"", salt_digest(salt))
        self._salts.append(self._root.salt_digest)
        super().put(depth)

    def settle(self) -> None:
        while len(self._salts) > HELD_ROUNDS:
            self._tier.clear(self._salts.pop(0))

    def cpu_s(self) -> float:
        """Of its clients, too, which are processes."""
        stats = [Path(f"/proc/{pid}/stat").read_text() for pid in clients_of(os.getpid())]
        used = [stat.rpartition(")")[2].split()[11:13] for stat in stats]
        return super().cpu_s() + sum(int(ticks) for one in used for ticks in one) / TICKS_A_SECOND

    def close(self) -> None:
        for salt in self._salts:
            self._tier.clear(salt)
        super().close()


def arms_of(store: Store, binding: Binding, memory: Memory, piece_bytes: int) -> Arms:
    """All for one size."""
    plain: dict[str, Arm] = {
        "plain": Singly(binding, "plain", memory, piece_bytes),
        "plain, several a call": Together(binding, "together", memory, piece_bytes),
    }
    return Arms(
        plain,
        again=Singly(binding, "again", memory, piece_bytes),
        tier=ClearedTier(store, memory, piece_bytes),
        others={"put and get of bytes": Bytes(binding, "bytes", memory, piece_bytes)},
    )


def run(extent: Extent) -> list[Cell]:
    """All sizes on one store."""
    memory = Memory()
    with (
        tempfile.TemporaryDirectory(prefix="kvtide-bench-") as directory,
        mooncake_servers.running(Path(directory), OWNED_BYTES, LEASE_MS) as store,
    ):
        binding = Binding(store, memory)
        try:
            return measured(
                "mooncake",
                extent,
                lambda piece_bytes: closing(arms_of(store, binding, memory, piece_bytes)),
            )
        finally:
            binding.calls.close()


def main(argv: Sequence[str]) -> int:
    """Measure; 1 where the goal is missed."""
    options = parser_of(__doc__).parse_args(argv)
    try:
        require_client()
    except ConfigError as error:
        print(error)
        return 0
    return judge({"mooncake": run(options.extent)}, options.extent)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
