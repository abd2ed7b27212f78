"""The node as an engine meets it: its start, a lookup over the real socket, frames a second.

A real node and a fake engine, which speaks the real protocol and maps real memory but has no
model. A lookup asks for 512 chunks that are all held, and the lease that its answer carries is
released. `socket` waits in the read itself; `link` is the engines' own way, by the thread of a
`Link`, which wakes the one that asks. Arms take turns; the first is measured twice, and how far
the two medians lie apart is the noise.

    python -m benchmarks.paths_node [--quick]

`--quick` starts the node five times, not twenty, and asks 2,000 times, not 20,000.
"""

import argparse
import os
import shutil
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from kvtide.core import messages as m
from kvtide.core.keys import INNER_DIGEST_BYTES
from kvtide.testing.fake_engine import FakeEngine, Shape, make_tokens
from kvtide.testing.fake_worker import FakeWorker
from kvtide.testing.node_process import NodeProcess
from kvtide.units import KiB
from kvtide.wire.frames import FrameReader, encode, receive
from kvtide.wire.places import Places

CHUNKS = 512
SHAPE = Shape(block_tokens=16, chunk_tokens=256, cell_bytes=4 * KiB, step_tokens=CHUNKS * 256)
HOST_BYTES = "512MiB"
ROUND_LOOKUPS = 100
PINGS = 10_000
PING_WINDOW = 64
"""Pings sent at once: few enough that neither side's socket fills."""
WAIT_S_MAX = 10.0
START_MS_MAX = 500.0
P50_US_MAX, P99_US_MAX = 300.0, 1000.0


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table."""

    what: str
    unit: str
    values: Sequence[float]
    limit_p50: float | None = None
    limit_p99: float | None = None

    @property
    def median(self) -> float:
        """Half of the values lie below."""
        return statistics.median(self.values)

    def part(self, hundredths: int) -> float:
        """So many hundredths of the values lie below."""
        return statistics.quantiles(self.values, n=100, method="inclusive")[hundredths - 1]

    @property
    def keeps_limits(self) -> bool:
        """Whether the budget is met."""
        is_p50 = self.limit_p50 is None or self.median <= self.limit_p50
        return is_p50 and (self.limit_p99 is None or self.part(99) <= self.limit_p99)

    def __str__(self) -> str:
        budget = ""
        if self.limit_p50 is not None:
            budget = f"<= {self.limit_p50:g}"
            budget += f" p50, {self.limit_p99:g} p99" if self.limit_p99 is not None else ""
            budget += "" if self.keeps_limits else "  MISSED"
        numbers = f"{self.median:>10,.1f}{self.part(10):>10,.1f}{self.part(99):>11,.1f}"
        return f"{self.what:<44}{numbers} {self.unit:<6}{budget}"


@contextmanager
def node(**settings: object) -> Iterator[NodeProcess]:
    """A node of its own, in a directory of its own."""
    directory = Path(tempfile.mkdtemp(prefix="kvt-", dir="/tmp"))
    try:
        with NodeProcess(directory, **settings) as running:
            yield running
    finally:
        shutil.rmtree(directory, ignore_errors=True)


# ---- start


def measure_starts(rounds: int) -> list[Row]:
    """From the call that starts a node to its first answer; sizes take turns."""
    sizes = ("64MiB", "4GiB")
    taken_ms: dict[str, list[float]] = {size: [] for size in sizes}
    for _ in range(rounds):
        for size in sizes:
            directory = Path(tempfile.mkdtemp(prefix="kvt-", dir="/tmp"))
            starting = NodeProcess(directory, host_bytes=size)
            taken_ms[size].append(starting.start() * 1e3)
            starting.end()
            shutil.rmtree(directory, ignore_errors=True)
    return [
        Row(f"node start to first answer, host {size}", "ms", taken, START_MS_MAX)
        for size, taken in taken_ms.items()
    ]


# ---- lookups


class SocketScheduler:
    """A scheduler that waits in the read of its socket: the wire and the node, nothing else."""

    def __init__(self, places: Places) -> None:
        self._sock = socket.socket(socket.AF_UNIX)
        self._sock.settimeout(WAIT_S_MAX)
        self._sock.connect(str(places.socket))
        self._reader = FrameReader()
        self._worker = FakeWorker(places, "socket", 0, 1, SHAPE.cell_bytes)
        self._number = 0

    def start(self, root: bytes) -> None:
        """Come as an engine, and wait until it is served."""
        hello = m.SchedulerHello(
            wire_version=m.WIRE_VERSION,
            version="0",
            engine_id="socket",
            incarnation=b"benchmark",
            pid=os.getpid(),
            label="benchmark",
            worker_count=1,
        )
        pidfd = os.pidfd_open(os.getpid())
        socket.send_fds(self._sock, [encode(hello, 1)], [pidfd])
        os.close(pidfd)
        self._wait_for(m.Welcome)
        self._worker.start()
        self._wait_for(m.Workers)
        identity = m.Identity(
            fingerprint=SHAPE.fingerprint,
            weights=b"",
            fields={},
            block_tokens=SHAPE.block_tokens,
            chunk_tokens=SHAPE.chunk_tokens,
            cell_bytes=[SHAPE.cell_bytes],
            step_tokens=SHAPE.step_tokens,
        )
        self._sock.sendall(encode(identity) + encode(m.RegisterRoot(root, b"", b"")))
        self._wait_for(m.Serving)

    def lookup(self, root: bytes, keys: bytes, digests: bytes) -> m.Match:
        """Ask, wait, release."""
        self._number += 1
        self._sock.sendall(encode(m.Lookup(self._number, root, keys, digests)))
        match = self._wait_for(m.Match)
        assert isinstance(match, m.Match)
        self._sock.sendall(encode(m.LeaseRelease(match.lease)))
        return match

    def pings(self, count: int) -> None:
        """So many questions without content, in windows."""
        window = encode(m.Ping()) * PING_WINDOW
        for _ in range(count // PING_WINDOW):
            self._sock.sendall(window)
            left = PING_WINDOW
            while left:
                left -= sum(1 for _ in self._reader.feed(*receive(self._sock)))

    def close(self) -> None:
        """Leave."""
        self._sock.close()
        self._worker.close()

    def _wait_for(self, kind: type[m.Message]) -> m.Message:
        found: m.Message | None = None
        while found is None:
            for message, descriptors in self._reader.feed(*receive(self._sock)):
                for descriptor in descriptors:
                    os.close(descriptor)
                if isinstance(message, kind):
                    found = message
        return found


def measure_lookups(asked: int) -> list[Row]:
    """Round trips of 512 chunks, all held; and frames a second."""
    tokens = make_tokens(CHUNKS * SHAPE.chunk_tokens, seed=1)
    with (
        node(host_bytes=HOST_BYTES) as running,
        FakeEngine(running.places, "link", SHAPE) as engine,
    ):
        engine.keep(tokens)
        until_s = time.monotonic() + WAIT_S_MAX
        chain = engine.chain(tokens)
        root, keys = engine.scheduler.root(), b"".join(chain.keys)
        behind = b"x" * INNER_DIGEST_BYTES * SHAPE.chunk_blocks
        raw = SocketScheduler(running.places)
        raw.start(root)

        def by_socket() -> m.Match:
            return raw.lookup(root, keys, behind)

        def by_link() -> m.Match:
            match: m.Match = engine.scheduler.ask(
                lambda number: m.Lookup(number, root, keys, behind)
            )
            engine.scheduler.link.send(m.LeaseRelease(match.lease))
            return match

        while by_socket().chunks < CHUNKS:  # its memory is being mapped
            assert time.monotonic() < until_s, "not all chunks are open"
        arms = {"socket": by_socket, "link": by_link, "socket again (noise)": by_socket}
        taken = interleaved(arms, asked)
        frames = [timed_frames(raw) for _ in range(10)]
        raw.close()
    rows = [
        Row(f"lookup of {CHUNKS} chunks, {name}", "µs", values, P50_US_MAX, P99_US_MAX)
        for name, values in taken.items()
    ]
    return [*rows, Row("frames there and back, one connection", "/s", frames)]


def interleaved(arms: dict[str, Callable[[], m.Match]], asked: int) -> dict[str, list[float]]:
    """Microseconds of each answer; arms take turns, in both orders."""
    taken: dict[str, list[float]] = {name: [] for name in arms}
    for number in range(asked // ROUND_LOOKUPS):
        order = list(arms) if number % 2 else list(reversed(arms))
        for name in order:
            arm = arms[name]
            for _ in range(ROUND_LOOKUPS):
                began_ns = time.perf_counter_ns()
                match = arm()
                taken[name].append((time.perf_counter_ns() - began_ns) / 1e3)
                assert match.chunks == CHUNKS, match.chunks
    return taken


def timed_frames(raw: SocketScheduler) -> float:
    """Frames a second, of which half go each way."""
    began_s = time.perf_counter()
    raw.pings(PINGS)
    return 2 * PINGS / (time.perf_counter() - began_s)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print; 0 where every budget is kept."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer starts and questions")
    options = parser.parse_args(argv)
    starts, asked = (5, 2_000) if options.quick else (20, 20_000)
    before = os.getloadavg()[0]
    rows = measure_starts(starts) + measure_lookups(asked)
    python = sys.version.split()[0]
    print(f"Python {python}; load average {before:.2f}; {starts} starts, {asked} lookups an arm")
    print(f"{'':<44}{'median':>10}{'p10':>10}{'p99':>11} {'unit':<6}budget")
    for row in rows:
        print(row)
    by_name = {row.what.rpartition(", ")[2]: row for row in rows}
    noise = abs(1 - by_name["socket again (noise)"].median / by_name["socket"].median)
    print(f"\nnoise floor of lookups {noise:.1%}")
    is_good = all(row.keeps_limits for row in rows)
    print("all budgets kept" if is_good else "a budget was MISSED")
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
