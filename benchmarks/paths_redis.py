"""A redis tier against the quickest plain loop on the same server, and against redis-py.

    python -m benchmarks.paths_redis [--quick] [--server valkey|redis]

The plain loop speaks the protocol itself: values of 2 MiB gathered from memory by `sendmsg`,
received into it by `recv_into`, four under way, on one connection; nothing is proven, indexed or
counted. redis-py (where it is installed) is used as its manual shows, a value for each record. The
tier is given records one at a time, and all of a round at once. Arms take turns in every
round; the plain loop also runs a second time, and how far those two lie apart is the noise floor.
CPU seconds are the client's.

`--quick` measures few rounds.
"""

import argparse
import importlib
import importlib.util
import mmap
import os
import resource
import socket
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from kvtide.core.keys import fingerprint, root_key
from kvtide.core.layout import KVLayout
from kvtide.core.records import Record, RootName
from kvtide.testing import redis_servers
from kvtide.testing.redis_servers import Server
from kvtide.tiers.base import Loaded, LoadJob, LoadOutcome, Stored, StoreJob, StoreOutcome
from kvtide.tiers.redis.index import WriteIds
from kvtide.tiers.redis.routes import Limits
from kvtide.tiers.redis.session import RedisSession
from kvtide.tiers.remote.tier import RemoteTier
from kvtide.units import GiB, MiB

BLOCKS = 2
ROUND_BYTES = 128 * MiB
SIZES = (MiB, 4 * MiB, 16 * MiB, 32 * MiB)
VALUE_BYTES = 2 * MiB - 256
AHEAD = 4
HELD_ROUNDS = 2
"""So many rounds each arm keeps; older ones make room."""
WARM_ROUNDS = 3
"""Before it is measured, all memory was used once."""
RATIO_MIN = 0.8
SERVERS = ("valkey", "redis")


class Arm(Protocol):
    """Puts and gets one round of records."""

    def put(self) -> None: ...

    def get(self) -> None: ...

    def close(self) -> None: ...


class Plain:
    """Values in a row, nothing else."""

    def __init__(self, server: Server, name: str, piece_bytes: int, memory: memoryview) -> None:
        self._sock = socket.create_connection(("127.0.0.1", server.port))
        self._sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        spans = [
            (start + at, min(VALUE_BYTES, piece_bytes - at))
            for start in range(0, ROUND_BYTES, piece_bytes)
            for at in range(0, piece_bytes, VALUE_BYTES)
        ]
        self._views = [memory[at : at + length] for at, length in spans]
        self._names: list[bytes] = []
        self._name = name
        self._round = 0
        self._head = memoryview(bytearray(64))

    def put(self) -> None:
        self._round += 1
        held = self._round % HELD_ROUNDS
        self._names = [f"{self._name}:{held}:{n:06d}".encode() for n in range(len(self._views))]
        waiting = 0
        for name, view in zip(self._names, self._views, strict=True):
            head = b"*3\r\n$3\r\nSET\r\n$%d\r\n%b\r\n$%d\r\n" % (len(name), name, len(view))
            self._send([head, view, b"\r\n"])
            waiting += 5  # +OK
            if waiting > 5 * AHEAD:
                waiting -= len(self._sock.recv(waiting))
        while waiting:
            waiting -= len(self._sock.recv(waiting))

    def _send(self, pieces: list[Any]) -> None:
        while pieces:
            sent = self._sock.sendmsg(pieces)
            while pieces and sent >= len(pieces[0]):
                sent -= len(pieces.pop(0))
            if sent:
                pieces[0] = memoryview(pieces[0])[sent:]

    def get(self) -> None:
        asked = 0
        for number, view in enumerate(self._views):
            while asked < min(len(self._views), number + AHEAD):
                name = self._names[asked]
                self._sock.sendall(b"*2\r\n$3\r\nGET\r\n$%d\r\n%b\r\n" % (len(name), name))
                asked += 1
            opening = len(b"$%d\r\n" % len(view))
            self._receive(self._head[:opening])
            self._receive(view)
            self._receive(self._head[:2])

    def _receive(self, into: memoryview) -> None:
        done = 0
        while done < len(into):
            done += self._sock.recv_into(into[done:])

    def close(self) -> None:
        self._sock.close()


class Popular:
    """redis-py."""

    def __init__(self, server: Server, piece_bytes: int, memory: memoryview) -> None:
        self._client = importlib.import_module("redis").Redis(port=server.port)
        count = ROUND_BYTES // piece_bytes
        self._views = [memory[n * piece_bytes : (n + 1) * piece_bytes] for n in range(count)]
        self._round = 0

    def put(self) -> None:
        self._round += 1
        for number, view in enumerate(self._views):
            self._client.set(f"popular:{self._round % HELD_ROUNDS}:{number}", view)

    def get(self) -> None:
        for number, view in enumerate(self._views):
            view[:] = self._client.get(f"popular:{self._round % HELD_ROUNDS}:{number}")

    def close(self) -> None:
        self._client.close()


class Tier:
    """The tier, driven as the node drives it."""

    def __init__(
        self, server: Server, piece_bytes: int, memory: memoryview, *, at_once: bool
    ) -> None:
        self._woken = threading.Event()
        cap, address = HELD_ROUNDS * ROUND_BYTES, server.address
        prefix = "several" if at_once else "single"
        known = WriteIds()
        self._tier = RemoteTier(
            "redis",
            "benchmark",
            lambda census: RedisSession(address, None, prefix, cap, census, known, Limits()),
            cap,
            self._woken.set,
            2 * ROUND_BYTES,
        )
        self._layout = KVLayout(128, 128 * BLOCKS, (piece_bytes // BLOCKS,))
        name = fingerprint({"engine": "benchmark"})
        key = root_key(name, epoch=b"", salt=None, adapter=b"")
        self._root = RootName(key, name, b"", b"")
        count = ROUND_BYTES // piece_bytes
        self._views = [memory[n * piece_bytes : (n + 1) * piece_bytes] for n in range(count)]
        self._together = count if at_once else 1
        self._records: list[Record] = []

    def put(self) -> None:
        """One chain: a round's records."""
        parent = self._root.key
        self._records = []
        for number, view in enumerate(self._views):
            key = os.urandom(32)
            digests = os.urandom(16 * (BLOCKS - 1)) + key[:16]
            record = Record(self._root, parent, key, digests, self._layout)
            self._tier.store(StoreJob(number, record, [view]))
            self._records.append(record)
            parent = key
            if (number + 1) % self._together == 0:
                self._wait()

    def get(self) -> None:
        """The records of the last round."""
        for number, (record, view) in enumerate(zip(self._records, self._views, strict=True)):
            self._tier.load(LoadJob(number, record, [view]))
            if (number + 1) % self._together == 0:
                self._wait()

    def _wait(self) -> None:
        left = self._together
        while left:
            assert self._woken.wait(60), "the tier does not answer"
            self._woken.clear()
            for done in self._tier.poll():
                assert isinstance(done, Stored | Loaded), done
                assert done.outcome in (StoreOutcome.STORED, LoadOutcome.LOADED), done
                left -= 1

    def close(self) -> None:
        self._tier.close(10)


@dataclass(slots=True)
class Taken:
    """Seconds and CPU seconds of one arm, a pair for each round."""

    wall_s: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)

    def time(self, work: Callable[[], None]) -> None:
        """One round."""
        began_s, began_cpu_s = time.perf_counter(), _cpu_s()
        work()
        self.wall_s.append(time.perf_counter() - began_s)
        self.cpu_s.append(_cpu_s() - began_cpu_s)


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def measured(server: Server, piece_bytes: int, memory: memoryview, rounds: int) -> bool:
    """Both ways for one size; whether the goal is reached."""
    arms: dict[str, Arm] = {
        "plain": Plain(server, "plain", piece_bytes, memory),
        "plain again": Plain(server, "again", piece_bytes, memory),
        "one at a time": Tier(server, piece_bytes, memory, at_once=False),
        "all at once": Tier(server, piece_bytes, memory, at_once=True),
    }
    if importlib.util.find_spec("redis") is not None:
        arms["redis-py"] = Popular(server, piece_bytes, memory)
    is_reached = True
    for direction in ("put", "get"):
        taken = {name: Taken() for name in arms}
        for number in range(rounds + WARM_ROUNDS):
            for name in list(arms)[:: 1 if number % 2 else -1]:
                one = taken[name] if number >= WARM_ROUNDS else Taken()
                one.time(getattr(arms[name], direction))
        for name in arms:
            pairs = zip(taken["plain"].wall_s, taken[name].wall_s, strict=True)
            ratio = statistics.median(plain / other for plain, other in pairs)
            rate = ROUND_BYTES / statistics.median(taken[name].wall_s) / 1e9
            cpu = statistics.median(taken[name].cpu_s) / ROUND_BYTES * 1e9
            is_missed = name in ("one at a time", "all at once") and ratio < RATIO_MIN
            is_reached &= not is_missed
            print(
                f"{piece_bytes // MiB:>4} MiB {direction:<4} {name:<14} {rate:>6.2f} {ratio:>6.2f}"
                f" {cpu:>9.2f}  {'missed' if is_missed else ''}",
                flush=True,
            )
    for arm in arms.values():
        arm.close()
    return is_reached


def main(argv: Sequence[str]) -> int:
    """Measure; 1 where the goal is missed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--server", choices=SERVERS, action="append")
    options = parser.parse_args(argv)
    rounds = 3 if options.quick else 15
    memory = memoryview(mmap.mmap(-1, ROUND_BYTES))
    memory[:] = os.urandom(MiB) * (ROUND_BYTES // MiB)
    is_reached = True
    for program in options.server or SERVERS:
        with tempfile.TemporaryDirectory(prefix="kvtide-bench-") as directory:
            maxmemory = ("--maxmemory", str(2 * GiB))
            with redis_servers.running(program, Path(directory), *maxmemory) as server:
                print(f"{program}, rounds of {ROUND_BYTES // MiB} MiB, medians of {rounds}")
                print(f"{'record':>8} {'':4} {'':14} {'GB/s':>6} {'ratio':>6} {'CPU s/GB':>9}")
                for piece_bytes in SIZES:
                    is_reached &= measured(server, piece_bytes, memory, rounds)
                    server.ask(b"FLUSHALL", b"SYNC")
    return 0 if is_reached else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
