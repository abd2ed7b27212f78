"""A worker without a model: maps real regions, writes and verifies bytes that follow from digests.

    python -m kvtide.testing.fake_worker RUNTIME_DIR ENGINE_ID RANK SHARD_COUNT CELL_BYTES

As a process of its own it takes one JSON command a line on its standard input and answers each
with one line, so that a test can kill it between any two, or in the middle of a copy (`hold`).

A block's bytes are those of its digest, repeated: whoever loads a block knows what must be in it.
"""

import contextlib
import hashlib
import json
import os
import secrets
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvtide.core import messages as m
from kvtide.core.messages import Run
from kvtide.memory.mapped import MappedRegions
from kvtide.wire.link import Link
from kvtide.wire.places import Places

WAIT_S_MAX = 20.0
"""For a state that must come; a test that waits this long has failed."""
CLOSE_S_MAX = 2.0


def block_bytes(digest: bytes, shard: int, cell_bytes: int) -> bytes:
    """What the cell of a block holds in one shard."""
    unit = hashlib.sha256(digest + bytes([shard])).digest()
    return unit * (cell_bytes // len(unit))


class FakeWorker:
    """One worker; a `LinkOwner`. Its methods may be called from any thread."""

    def __init__(
        self, places: Places, engine_id: str, rank: int, shard_count: int, cell_bytes: int
    ) -> None:
        self.rank = rank
        self.cell_bytes = cell_bytes
        self.deaths = 0
        """How often it was told that the node is dead."""
        self.refused: list[m.Refused] = []
        self.facts: dict[str, Any] = {"rank": rank}
        self._engine_id = engine_id
        self._shard_count = shard_count
        self._incarnation = secrets.token_bytes(16)
        self._changed = threading.Condition()
        self._connection: int | None = None
        self._node = b""
        self._held: set[int] = set()
        self._open: set[int] = set()
        self.regions = MappedRegions(self._region_open, self._region_failed, self._region_left)
        self.link = Link(places.socket, self, f"fake-worker-{rank}")

    def start(self) -> None:
        """Look for the node."""
        self.regions.start()
        self.link.start()

    def close(self) -> None:
        """Leave in order; the process lives on."""
        self.link.close(CLOSE_S_MAX)
        self.regions.close(CLOSE_S_MAX)

    # ---- copying

    def write(
        self, grant: int, run: Run, digests: Sequence[bytes], connections: Sequence[int]
    ) -> bool:
        """Fill the cells of a grant and answer it; False where it is not for us any more."""
        with self._changed:
            if self._connection is None or self._connection != connections[self.rank]:
                return False
            self._held.add(grant)
        is_ok = self._fill(run, digests)
        self.link.send(m.Stored(grant, is_ok))
        with self._changed:
            self._held.discard(grant)
        return is_ok

    def hold(
        self, grant: int, run: Run, digests: Sequence[bytes], connections: Sequence[int]
    ) -> bool:
        """Write the first half of a grant's cells and never answer."""
        with self._changed:
            if self._connection != connections[self.rank]:
                return False
            self._held.add(grant)
        half = max(1, run.cell_count // 2)
        return self._fill(run.part(0, half), digests[:half])

    def _fill(self, run: Run, digests: Sequence[bytes]) -> bool:
        assert len(digests) == run.cell_count, (len(digests), run)
        with self.regions.using({run.region}) as regions:
            region = regions.get(run.region)
            if region is None:
                return False
            seen = region.generations[run.first_cell : run.end_cell].tolist()
            assert seen == [run.generation] * run.cell_count, (seen, run)  # lent to nobody else
            for position, digest in enumerate(digests):
                start = (run.first_cell + position) * self.cell_bytes
                data = block_bytes(digest, self.rank, self.cell_bytes)
                region.cells[start : start + self.cell_bytes] = data
        return True

    def read(self, runs: Sequence[Run], digests: Sequence[bytes]) -> list[bool]:
        """Copy blocks out, then verify: whether each is of the generation that was promised.

        A block of that generation with other bytes than its digest's is what kvtide must never
        hand out: an AssertionError.
        """
        found: list[bool] = []
        left = list(digests)
        with self.regions.using({run.region for run in runs}) as regions:
            for run in runs:
                own, left = left[: run.cell_count], left[run.cell_count :]
                region = regions.get(run.region)
                if region is None:
                    found += [False] * len(own)
                    continue
                start, end = run.first_cell * self.cell_bytes, run.end_cell * self.cell_bytes
                copied = bytes(region.cells[start:end])
                seen = region.generations[run.first_cell : run.end_cell].tolist()
                for position, digest in enumerate(own):
                    is_good = seen[position] == run.generation
                    found.append(is_good)
                    if is_good:
                        at = position * self.cell_bytes
                        data = block_bytes(digest, self.rank, self.cell_bytes)
                        assert copied[at : at + self.cell_bytes] == data, "wrong bytes"
        return found

    # ---- what it sees

    @property
    def open_regions(self) -> set[int]:
        """Regions that it has mapped and populated."""
        with self._changed:
            return set(self._open)

    def wait_open(self, count: int, timeout_s: float = WAIT_S_MAX) -> bool:
        """Wait until so many regions are open."""
        with self._changed:
            return self._changed.wait_for(lambda: len(self._open) >= count, timeout_s)

    # ---- the link, on its thread

    def hello(self) -> m.Message:
        """Who it is, and what it still has."""
        with self._changed:
            self._connection = None
            held = sorted(self._held)
        mapped, mapping = self.regions.named()
        return m.WorkerHello(
            wire_version=m.WIRE_VERSION,
            engine_id=self._engine_id,
            incarnation=self._incarnation,
            pid=os.getpid(),
            rank=self.rank,
            shard=self.rank,
            shard_count=self._shard_count,
            is_writer=True,
            cell_bytes=self.cell_bytes,
            facts=self.facts,
            grants_held=held,
            regions_mapped=mapped,
            node=self._node,
            regions_mapping=mapping,
        )

    def on_up(self, welcome: m.Welcome) -> None:
        """Grants of this connection count from now on."""
        self.regions.say_changes()
        if welcome.node != self._node:
            self._leave_all()
        with self._changed:
            self._node = welcome.node
            self._connection = welcome.connection

    def on_message(self, message: m.Message, descriptors: list[int]) -> None:
        """Regions come and go."""
        if isinstance(message, m.RegionOffer):
            self.regions.offer(message.region, message.cell_count, message.cell_bytes, descriptors)
        elif isinstance(message, m.RegionLeave):
            self.regions.leave(message.region)
        for descriptor in descriptors:
            os.close(descriptor)

    def on_down(self, *, node_is_dead: bool) -> None:
        """Mappings outlive a connection, not a node."""
        with self._changed:
            self._connection = None
        if node_is_dead:
            self.deaths += 1
            self._leave_all()

    def on_refused(self, refused: m.Refused) -> None:
        """Kept for the test."""
        self.refused.append(refused)

    def on_absent(self) -> None:
        """It starts no node."""

    def on_pulse(self) -> None:
        """Nothing to do."""

    def _leave_all(self) -> None:
        self.regions.leave_all()
        self.regions.wait_empty(WAIT_S_MAX)
        with self._changed:
            self._open.clear()

    def _region_open(self, number: int) -> None:
        with self._changed:
            self._open.add(number)
            self._changed.notify_all()
        self.link.send(m.RegionOpen(number))

    def _region_failed(self, number: int, detail: str) -> None:
        self.link.send(m.RegionFailed(number, detail))

    def _region_left(self, number: int) -> None:
        with self._changed:
            self._open.discard(number)
        self.link.send(m.RegionLeft(number))


class WorkerProcess:
    """The same worker in a process of its own, which can be killed."""

    def __init__(
        self, places: Places, engine_id: str, rank: int, shard_count: int, cell_bytes: int
    ) -> None:
        arguments = [places.directory, engine_id, rank, shard_count, cell_bytes]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "kvtide.testing.fake_worker", *map(str, arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def start(self) -> None:
        """It looks for the node by itself."""

    def write(
        self, grant: int, run: Run, digests: Sequence[bytes], connections: Sequence[int]
    ) -> bool:
        """As `FakeWorker.write`."""
        return bool(self._ask("write", grant, run, _hex(digests), list(connections)))

    def hold(
        self, grant: int, run: Run, digests: Sequence[bytes], connections: Sequence[int]
    ) -> bool:
        """As `FakeWorker.hold`: on return the first half is written."""
        return bool(self._ask("hold", grant, run, _hex(digests), list(connections)))

    def read(self, runs: Sequence[Run], digests: Sequence[bytes]) -> list[bool]:
        """As `FakeWorker.read`."""
        found: list[bool] = self._ask("read", list(runs), _hex(digests))
        return found

    def kill(self) -> None:
        """SIGKILL; on return it is dead."""
        self.process.kill()
        self.process.wait()
        self._close_pipes()

    def close(self) -> None:
        """End it, by the end of its input."""
        if self.process.poll() is None:
            self._close_pipes()
            try:
                self.process.wait(WAIT_S_MAX)
            except subprocess.TimeoutExpired:
                self.kill()
        self._close_pipes()

    def _close_pipes(self) -> None:
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()

    def _ask(self, name: str, *arguments: object) -> Any:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        print(json.dumps([name, *arguments]), file=self.process.stdin, flush=True)
        return json.loads(self.process.stdout.readline())


def _hex(digests: Sequence[bytes]) -> list[str]:
    return [digest.hex() for digest in digests]


def main(arguments: Sequence[str]) -> int:
    """Serve commands until the input ends."""
    runtime_dir, engine_id, *numbers = arguments
    rank, shard_count, cell_bytes = map(int, numbers)
    worker = FakeWorker(Places(Path(runtime_dir)), engine_id, rank, shard_count, cell_bytes)
    worker.start()
    for line in sys.stdin:
        name, *given = json.loads(line)
        answer: object
        if name == "read":
            runs, digests = given
            answer = worker.read([Run(*run) for run in runs], list(map(bytes.fromhex, digests)))
        else:
            grant, run, digests, connections = given
            do = worker.write if name == "write" else worker.hold
            answer = do(grant, Run(*run), list(map(bytes.fromhex, digests)), connections)
        print(json.dumps(answer), flush=True)
    worker.close()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
