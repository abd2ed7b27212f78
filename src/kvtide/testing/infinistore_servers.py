"""A real InfiniStore server for tests, as a process: on all addresses, whatever it is told.

`scripts/setup_infinistore` installs it, apart from the rest: only long tests want it. It opens a
device for RDMA before it listens, so it gets a stub of that library, made of `verbs_stub.c` by the
system's C compiler; what goes over TCP is all its own.
"""

import http.client
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from kvtide.server_address import Address
from kvtide.testing.redis_servers import free_port

START_S_MAX = 30.0
POOL_GIB = 1
"""The least that a server takes."""
HOUSE = Path(__file__).parents[3]
HOME = HOUSE / ".venv-infinistore"
SERVE = Path(__file__).parent / "infinistore_serve.py"
STUB = HOUSE / "tests" / "tiers" / "verbs_stub.c"


def missing() -> str:
    """What has to be there before a server can be started here; empty: all is."""
    if compiler() is None:
        return "an InfiniStore server needs a C compiler here, for a stub of libibverbs"
    if not (HOME / "infinistore").is_dir():
        return "infinistore is not installed: run scripts/setup_infinistore"
    return ""


def compiler() -> str | None:
    """The system's, for C."""
    return shutil.which("cc") or shutil.which("gcc")


def stub_in(directory: Path) -> Path:
    """A folder with the stub in it, made if need be."""
    found = directory / "libibverbs.so.1"
    if not found.exists():
        directory.mkdir(parents=True, exist_ok=True)
        made = directory / f"{os.getpid()}.so"
        command = [str(compiler()), "-shared", "-fPIC", "-O1", "-o", str(made), str(STUB)]
        subprocess.run([*command, "-Wl,-soname,libibverbs.so.1"], check=True)
        made.replace(found)
    return directory


@dataclass(slots=True)
class Server:
    """One server, which may be killed and started again on its ports."""

    directory: Path
    options: tuple[str, ...] = ()
    port: int = field(default_factory=free_port)
    manage_port: int = field(default_factory=free_port)
    process: "subprocess.Popen[bytes] | None" = None

    @property
    def address(self) -> Address:
        return Address("infinistore", "127.0.0.1", self.port)

    @property
    def log(self) -> str:
        return (self.directory / "log").read_text(errors="replace")

    def start(self) -> None:
        """Empty; it answers."""
        stub = stub_in(self.directory.parent / "verbs")
        environment = {**os.environ, "LD_LIBRARY_PATH": str(stub), "PYTHONPATH": str(HOME)}
        with (self.directory / "log").open("ab") as log:
            self.process = subprocess.Popen(
                [
                    sys.executable,
                    str(SERVE),
                    f"--service-port={self.port}",
                    f"--manage-port={self.manage_port}",
                    f"--prealloc-size={POOL_GIB}",
                    "--link-type=IB",
                    "--log-level=warning",
                    *self.options,
                ],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=self.directory,
                env=environment,
            )
        deadline_s = time.monotonic() + START_S_MAX
        while not self._answers():
            assert self.process.poll() is None, self.log
            assert time.monotonic() < deadline_s, self.log
            time.sleep(0.02)

    def kill(self) -> None:
        """At once, with all it holds."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None

    @property
    def has_ended(self) -> bool:
        """By itself."""
        return self.process is not None and self.process.poll() is not None

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """Within it nobody answers, and nobody has gone."""
        assert self.process is not None
        self.process.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self.process.send_signal(signal.SIGCONT)

    def names_count(self) -> int:
        """How many values there are."""
        connection = http.client.HTTPConnection("127.0.0.1", self.manage_port, timeout=10)
        try:
            connection.request("GET", "/kvmap_len")
            answer = connection.getresponse().read()
        finally:
            connection.close()
        return int(b"".join(bytes([one]) for one in answer if chr(one).isdigit()))

    def _answers(self) -> bool:
        with suppress(OSError):
            for port in (self.port, self.manage_port):
                socket.create_connection(("127.0.0.1", port), 1).close()
            return True
        return False


@contextmanager
def running(directory: Path, *options: str) -> Iterator[Server]:
    """A server, from start to end."""
    directory.mkdir(parents=True, exist_ok=True)
    one = Server(directory, options)
    try:
        one.start()
        yield one
    finally:
        one.kill()
