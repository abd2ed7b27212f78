"""A redis tier against the quickest plain loops on the same server, redis-py, and LMCache.

    python -m benchmarks.paths_redis [--quick] [--server valkey|redis]

Plain loops speak the protocol themselves: values gathered from memory by `sendmsg`, received into
it by `recv_into`, the next ones under way meanwhile; nothing is proven, indexed or counted.
They differ by how large the values are that a record is cut into, and by how many connections, a
thread each, are used where several records are under way. redis-py is used as its manual shows, a
value for each record; several at a time go by one pipeline. LMCache's adapters for servers
(`resp`, in C++, and `valkey`, by the client GLIDE) run in a process of their own. How they are
compared, and what is shown, says benchmarks/places.py.

`--quick` measures few rounds, of one size alone, and decides nothing.
"""

import shutil
import socket
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import redis

from benchmarks.lmcache_arm import Adapter
from benchmarks.lmcache_server import resp_below
from benchmarks.places import (
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
from kvtide.testing import redis_servers
from kvtide.testing.redis_servers import Server
from kvtide.units import GiB, MiB

VALUE_BYTES = 2 * MiB - 256
"""Below what allocators of servers have classes of sizes for; large values cost some of them
faults of pages each time."""
AHEAD = 4
"""Values that a loop has asked for, of the records that may be under way."""
SERVERS = ("valkey", "redis")
OK_BYTES = len(b"+OK\r\n")


class Connection:
    """Some of a round's records, in a row, on one connection."""

    def __init__(
        self, server: Server, name: str, pieces: Sequence[memoryview], value_bytes: int
    ) -> None:
        self._sock = socket.create_connection(("127.0.0.1", server.port))
        self._sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._values = [
            piece[at : at + value_bytes]
            for piece in pieces
            for at in range(0, len(piece), value_bytes)
        ]
        self._in_record = len(self._values) // len(pieces)
        self._name = name
        self._names: list[bytes] = []
        self._head = memoryview(bytearray(64))

    def put(self, number: int, depth: int) -> None:
        """The answers are waited for when so many records are under way."""
        self._names = [f"{self._name}:{number}:{n}".encode() for n in range(len(self._values))]
        waiting = 0
        for n, (name, view) in enumerate(zip(self._names, self._values, strict=True)):
            if n % self._in_record == 0:
                waiting = self._wait(waiting, (depth - 1) * self._in_record)
            head = b"*3\r\n$3\r\nSET\r\n$%d\r\n%b\r\n$%d\r\n" % (len(name), name, len(view))
            self._send([head, view, b"\r\n"])
            waiting += 1
        self._wait(waiting, 0)

    def _wait(self, waiting: int, waiting_max: int) -> int:
        left_bytes = waiting * OK_BYTES
        while left_bytes > waiting_max * OK_BYTES:
            left_bytes -= len(self._sock.recv(left_bytes))
        return -(-left_bytes // OK_BYTES)

    def _send(self, pieces: list[Any]) -> None:
        while pieces:
            sent = self._sock.sendmsg(pieces)
            while pieces and sent >= len(pieces[0]):
                sent -= len(pieces.pop(0))
            if sent:
                pieces[0] = memoryview(pieces[0])[sent:]

    def get(self, depth: int) -> None:
        asked = 0
        for n, view in enumerate(self._values):
            under_way_end = (n // self._in_record + depth) * self._in_record
            while asked < min(len(self._values), n + AHEAD, under_way_end):
                name = self._names[asked]
                self._sock.sendall(b"*2\r\n$3\r\nGET\r\n$%d\r\n%b\r\n" % (len(name), name))
                asked += 1
            self._receive(self._head[: len(b"$%d\r\n" % len(view))])
            self._receive(view)
            self._receive(self._head[:2])

    def _receive(self, into: memoryview) -> None:
        done = 0
        while done < len(into):
            done += self._sock.recv_into(into[done:])

    def close(self) -> None:
        self._sock.close()


class Plain(Here):
    """Values in a row, nothing else; on so many connections, each with its share of the records,
    but never more than are under way."""

    def __init__(
        self,
        server: Server,
        name: str,
        memory: Memory,
        piece_bytes: int,
        value_bytes: int = VALUE_BYTES,
        connections: int = 1,
    ) -> None:
        super().__init__(memory)
        pieces = memory.pieces(piece_bytes)
        self._alone = [Connection(server, f"{name}:0", pieces, value_bytes)]
        self._several = [
            Connection(server, f"{name}:{n + 1}", pieces[n::connections], value_bytes)
            for n in range(connections)
        ]
        self._pool = ThreadPoolExecutor(connections)
        self._round = 0

    def _connections(self, depth: int) -> list[Connection]:
        return self._alone if depth == 1 else self._several

    def put(self, depth: int) -> None:
        self._round += 1
        used, number = self._connections(depth), self._round % HELD_ROUNDS
        list(self._pool.map(lambda one: one.put(number, depth // len(used)), used))

    def get(self, depth: int) -> None:
        used = self._connections(depth)
        list(self._pool.map(lambda one: one.get(depth // len(used)), used))

    def close(self) -> None:
        self._pool.shutdown()
        for one in (*self._alone, *self._several):
            one.close()


class Popular(Here):
    """redis-py."""

    def __init__(self, server: Server, memory: Memory, piece_bytes: int) -> None:
        super().__init__(memory)
        self._client = redis.Redis(port=server.port)
        self._views = memory.pieces(piece_bytes)
        self._round = 0

    def _names(self) -> list[str]:
        held = self._round % HELD_ROUNDS
        return [f"popular:{held}:{number}" for number in range(len(self._views))]

    def put(self, depth: int) -> None:
        self._round += 1
        values = list(zip(self._names(), self._views, strict=True))
        for start in range(0, len(values), depth):
            if depth == 1:
                self._client.set(*values[start])
                continue
            pipeline = self._client.pipeline(transaction=False)
            for name, view in values[start : start + depth]:
                pipeline.set(name, view)
            pipeline.execute()

    def get(self, depth: int) -> None:
        names = self._names()
        for start in range(0, len(names), depth):
            if depth == 1:
                values = [self._client.get(names[start])]
            else:
                pipeline = self._client.pipeline(transaction=False)
                for name in names[start : start + depth]:
                    pipeline.get(name)
                values = pipeline.execute()
            for view, value in zip(self._views[start : start + depth], values, strict=True):
                view[:] = value

    def close(self) -> None:
        self._client.close()


def arms_of(server: Server, memory: Memory, piece_bytes: int, log: Path) -> Arms:
    """All for one size."""
    url = f"redis://127.0.0.1:{server.port}"
    valkey = {"type": "valkey", "startup_nodes": f"127.0.0.1:{server.port}", "key_prefix": "glide"}
    plain: dict[str, Arm] = {
        "plain": Plain(server, "plain", memory, piece_bytes),
        "plain, whole values": Plain(server, "whole", memory, piece_bytes, piece_bytes),
        "plain, 2 connections": Plain(server, "two", memory, piece_bytes, connections=2),
    }
    return Arms(
        plain,
        again=Plain(server, "again", memory, piece_bytes),
        tier=Tier(memory, piece_bytes, type="redis", url=url, bytes_max=HELD_ROUNDS * ROUND_BYTES),
        others={
            "redis-py": Popular(server, memory, piece_bytes),
            "LMCache resp": Adapter(resp_below(server.port), piece_bytes, log),
            "LMCache valkey": Adapter(valkey, piece_bytes, log),
        },
    )


def run(program: str, extent: Extent) -> list[Cell]:
    """All sizes on one server."""
    memory = Memory()
    with tempfile.TemporaryDirectory(prefix="kvtide-bench-") as directory:
        maxmemory = ("--maxmemory", str(8 * GiB))
        log = Path(directory) / "lmcache.log"
        with redis_servers.running(program, Path(directory), *maxmemory) as server:

            @contextmanager
            def opened(piece_bytes: int) -> Iterator[Arms]:
                with closing(arms_of(server, memory, piece_bytes, log)) as arms:
                    yield arms
                server.ask(b"FLUSHALL", b"SYNC")

            return measured(program, extent, opened)


def main(argv: Sequence[str]) -> int:
    """Measure; 1 where the goal is missed."""
    parser = parser_of(__doc__)
    parser.add_argument("--server", choices=SERVERS, action="append")
    options = parser.parse_args(argv)
    cells = {}
    for program in options.server or SERVERS:
        if program == "redis" and shutil.which("redis-server") is None:
            print("no redis-server is here; on Debian: apt-get install redis-server")
            continue
        cells[program] = run(program, options.extent)
    return judge(cells, options.extent)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
