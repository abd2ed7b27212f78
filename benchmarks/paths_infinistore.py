"""An infinistore tier against plain loops of sockets, on the same server.

    python -m benchmarks.paths_infinistore [--quick]

A plain loop sends frames and values and reads answers, by a thread and a connection for each
record that is under way; nothing is proven, indexed or counted. One has a value for each record,
one has values as long as the tier's. The server (scripts/setup_infinistore) runs behind a stub of
libibverbs, so all goes over TCP. Plain loops remove what is two rounds old inside what is timed;
of the tier, the server evicts it. How they are compared, and what is shown, says
benchmarks/places.py.

Its own client is not among them: it needs torch. Nor is LMCache's adapter, which needs RDMA.

`--quick` measures few rounds, of one size alone, and decides nothing.
"""

import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from benchmarks.places import (
    DEPTHS,
    HELD_ROUNDS,
    WAIT_S_MAX,
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
from kvtide.testing import infinistore_servers
from kvtide.testing.infinistore_servers import Server
from kvtide.tiers.infinistore import frames
from kvtide.tiers.infinistore.client import Client
from kvtide.tiers.infinistore.frames import FINISH, Ask
from kvtide.tiers.infinistore.names import PART_BYTES

POOL_GIB = 4
"""Twice what all hold together, and room for what the tier leaves to the server."""
CALL_S_MAX = 10 * WAIT_S_MAX
"""Of a client that nothing gives up."""


class Plain(Here):
    """Values in a row, nothing else."""

    def __init__(
        self, server: Server, name: str, memory: Memory, piece_bytes: int, value_bytes: int
    ) -> None:
        super().__init__(memory)
        self._pieces = [
            [piece[at : at + value_bytes] for at in range(0, len(piece), value_bytes)]
            for piece in memory.pieces(piece_bytes)
        ]
        self._clients = [Client(server.address) for _ in range(max(DEPTHS))]
        self._pool = ThreadPoolExecutor(max(DEPTHS))
        self._name = name
        self._round = 0

    def put(self, depth: int) -> None:
        self._round += 1
        self._each(depth, self._put_one)

    def get(self, depth: int) -> None:
        self._each(depth, self._get_one)

    def _names(self, number: int, back: int = 0) -> list[bytes]:
        count = len(self._pieces[number])
        of_round = self._round - back
        return [f"{self._name}:{of_round}:{number}:{n}".encode() for n in range(count)]

    def _put_one(self, client: Client, number: int) -> None:
        client.remove(self._names(number, HELD_ROUNDS))
        values = zip(self._names(number), self._pieces[number], strict=True)
        assert client.write((name, [view]) for name, view in values)

    def _get_one(self, client: Client, number: int) -> None:
        one = client.connection(0)
        for name, view in zip(self._names(number), self._pieces[number], strict=True):
            one.send(Ask.GET, [frames.get(name)])
            assert one.answer() == (FINISH, len(view))
            one.read_into(view)

    def _each(self, depth: int, call: Callable[[Client, int], None]) -> None:
        def share(first: int) -> None:
            client = self._clients[first]
            client.begin(time.monotonic() + CALL_S_MAX)
            for number in range(first, len(self._pieces), depth):
                call(client, number)

        if depth == 1:
            share(0)
        else:
            list(self._pool.map(share, range(depth)))

    def close(self) -> None:
        self._pool.shutdown()
        client = self._clients[0]
        client.begin(time.monotonic() + CALL_S_MAX)
        for number in range(len(self._pieces)):
            for back in range(min(HELD_ROUNDS, self._round)):
                client.remove(self._names(number, back))
        for one in self._clients:
            one.close()


def arms_of(server: Server, memory: Memory, piece_bytes: int) -> Arms:
    """All for one size."""
    plain: dict[str, Arm] = {
        "plain": Plain(server, "plain", memory, piece_bytes, PART_BYTES),
        "plain, whole values": Plain(server, "whole", memory, piece_bytes, piece_bytes),
    }
    return Arms(
        plain,
        again=Plain(server, "again", memory, piece_bytes, PART_BYTES),
        tier=Tier(memory, piece_bytes, type="infinistore", url=str(server.address)),
        others={},
    )


def run(extent: Extent) -> list[Cell]:
    """All sizes on one server."""
    memory = Memory()
    with (
        tempfile.TemporaryDirectory(prefix="kvtide-bench-") as directory,
        infinistore_servers.running(
            Path(directory) / "server", f"--prealloc-size={POOL_GIB}"
        ) as server,
    ):
        return measured(
            "infinistore",
            extent,
            lambda piece_bytes: closing(arms_of(server, memory, piece_bytes)),
        )


def main(argv: Sequence[str]) -> int:
    """Measure; 1 where the goal is missed."""
    options = parser_of(__doc__).parse_args(argv)
    if infinistore_servers.missing():
        print(infinistore_servers.missing())
        return 0
    return judge({"infinistore": run(options.extent)}, options.extent)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
