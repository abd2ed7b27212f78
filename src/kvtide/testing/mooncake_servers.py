"""A real Mooncake Store for tests: a master, and owners of memory, as processes on loopback.

`scripts/setup` installs them. A store needs no server of metadata here, and nothing on disk.
"""

import http.client
import importlib.util
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from kvtide.server_address import Address
from kvtide.testing.redis_servers import free_port
from kvtide.tiers.mooncake.client import PROGRAM, Client, Place
from kvtide.tiers.mooncake.master import Master, Numbers
from kvtide.units import MiB

START_S_MAX = 30.0
OWNED_BYTES_MIN = 16 * MiB
"""Less than this no owner gives."""
LEASE_MS = 100
"""What was asked for so lately is not evicted: ten seconds, if nobody says otherwise."""


def program(name: str) -> str:
    """The path of one that comes with Mooncake's package."""
    spec = importlib.util.find_spec("mooncake")
    assert spec is not None, "mooncake is missing: run scripts/setup"
    assert spec.origin is not None, spec
    return str(Path(spec.origin).parent / name)


@dataclass(slots=True)
class Store:
    """One store; `owners` are told apart by their order of starting."""

    directory: Path
    lease_ms: int = LEASE_MS
    port: int = field(default_factory=free_port)
    metrics_port: int = field(default_factory=free_port)
    master: "subprocess.Popen[bytes] | None" = None
    owners: "list[subprocess.Popen[bytes]]" = field(default_factory=list)

    @property
    def address(self) -> Address:
        return Address("mooncake", "127.0.0.1", self.port)

    def start(self) -> None:
        """The master alone."""
        self.master = self._run(
            "mooncake_master",
            f"--rpc_port={self.port}",
            "--rpc_address=127.0.0.1",
            f"--metrics_port={self.metrics_port}",
            "--metrics_host=127.0.0.1",
            f"--default_kv_lease_ttl={self.lease_ms}",
        )
        self._wait(lambda: self.ask("/health")[0] == http.client.OK)

    def add_owner(self, owned_bytes: int) -> None:
        """One that gives so much memory, once it has."""
        before = self.numbers().bytes_max
        owner = self._run(
            "mooncake_client",
            "--host=127.0.0.1",
            f"--port={free_port()}",
            f"--global_segment_size={owned_bytes}B",
            f"--master_server_address=127.0.0.1:{self.port}",
            "--metadata_server=P2PHANDSHAKE",
            "--protocol=tcp",
        )
        self.owners.append(owner)
        self._wait(lambda: self.numbers().bytes_max > before)

    def wait_for_owners(self) -> None:
        """Until a master that came back knows of them."""
        self._wait(lambda: self.numbers().bytes_max > 0)

    def kill_master(self) -> None:
        """At once; with it goes what it knew, which is all."""
        if self.master is not None:
            self.master.kill()
            self.master.wait()
            self.master = None

    def kill_owners(self) -> None:
        """At once, with all that they have."""
        for owner in self.owners:
            owner.kill()
            owner.wait()
        self.owners.clear()

    def kill(self) -> None:
        """All."""
        self.kill_master()
        self.kill_owners()

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """Within it nobody answers, and nobody has gone."""
        processes = [one for one in (self.master, *self.owners) if one is not None]
        for one in processes:
            one.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            for one in processes:
                one.send_signal(signal.SIGCONT)

    def numbers(self) -> Numbers:
        return Master("127.0.0.1", self.metrics_port).numbers(time.monotonic() + START_S_MAX)

    def names(self) -> list[str]:
        """Of all values."""
        found = Master("127.0.0.1", self.metrics_port).names(time.monotonic() + START_S_MAX)
        return sorted(name for name in found if name)

    def remove(self, names: Sequence[str]) -> None:
        """As the store itself does when it is full."""
        client = Client(Place(self.address))
        client.limit(time.monotonic() + START_S_MAX)
        assert client.call("remove", list(names)) == [0] * len(names)
        client.close()

    def flip(self, name: str, at: int) -> None:
        """Change a byte of a value in its owner's memory. Negative: from its end."""
        status, answer = self.ask(f"/query_key?key={name}")
        assert status == http.client.OK, answer
        (where,) = json.loads(answer)["data"]
        (owner,) = self.owners
        place = where["buffer_address_"] + at + (where["size_"] if at < 0 else 0)
        memory = os.open(f"/proc/{owner.pid}/mem", os.O_RDWR)
        try:
            (old,) = os.pread(memory, 1, place)
            os.pwrite(memory, bytes([old ^ 1]), place)
        finally:
            os.close(memory)

    def ask(self, path: str) -> tuple[int, bytes]:
        """What the master answers by HTTP; 0: nothing."""
        connection = http.client.HTTPConnection(
            "127.0.0.1", self.metrics_port, timeout=START_S_MAX
        )
        try:
            connection.request("GET", path)
            answer = connection.getresponse()
            return answer.status, answer.read()
        except OSError:
            return 0, b""
        finally:
            connection.close()

    def _run(self, name: str, *options: str) -> "subprocess.Popen[bytes]":
        self.directory.mkdir(parents=True, exist_ok=True)
        with (self.directory / "log").open("ab") as log:
            return subprocess.Popen(
                [program(name), *options, "--logtostderr"],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=self.directory,
            )

    def _wait(self, is_done: Callable[[], bool]) -> None:
        deadline_s = time.monotonic() + START_S_MAX
        while not is_done():
            for process in (self.master, *self.owners):
                assert process is None or process.poll() is None, (
                    self.directory / "log"
                ).read_text()
            assert time.monotonic() < deadline_s, (self.directory / "log").read_text()
            time.sleep(0.01)


@contextmanager
def running(directory: Path, owned_bytes: int = 0, lease_ms: int = LEASE_MS) -> Iterator[Store]:
    """A store, from start to end; of one owner, where it is said how much that has."""
    one = Store(directory, lease_ms)
    try:
        one.start()
        if owned_bytes:
            one.add_owner(owned_bytes)
        yield one
    finally:
        one.kill()


def clients_of(pid: int) -> list[int]:
    """Processes that a process has started as clients of a store, and that run."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            with suppress(OSError):  # it has ended meanwhile
                parent = (entry / "stat").read_text().rpartition(")")[2].split()[1]
                if int(parent) == pid and PROGRAM.encode() in (entry / "cmdline").read_bytes():
                    found.append(int(entry.name))
    return found
