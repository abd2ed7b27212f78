"""Places below host memory as they are seen from outside of whoever keeps something there."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from kvtide.testing import object_servers, redis_servers


class Outside(Protocol):
    """One arm's place."""

    def read_bytes(self, pids: Iterable[int]) -> int:
        """What these processes, which alone use it, have had from it so far."""

    def chunk_count(self) -> int:
        """How many chunks LMCache has there."""


@dataclass(frozen=True, slots=True)
class Directory:
    """Files that are read past the page cache."""

    path: Path

    def read_bytes(self, pids: Iterable[int]) -> int:
        """From drives, as the kernel counts it."""
        files = [Path(f"/proc/{pid}/io") for pid in pids]
        lines = [line for file in files for line in file.read_text().splitlines()]
        return sum(int(line.split()[1]) for line in lines if line.startswith("read_bytes:"))

    def chunk_count(self) -> int:
        return len([path for path in self.path.rglob("*.data") if path.is_file()])


@dataclass(frozen=True, slots=True)
class Valkey:
    """A server."""

    server: redis_servers.Server

    def read_bytes(self, pids: Iterable[int]) -> int:
        """All that it has sent, as it counts it."""
        del pids
        info = self.server.ask(b"INFO", b"stats")
        assert isinstance(info, bytes), info
        (sent,) = [line for line in info.decode().splitlines() if "total_net_output_bytes" in line]
        return int(sent.split(":")[1])

    def chunk_count(self) -> int:
        found = self.server.ask(b"DBSIZE")
        assert isinstance(found, int), found
        return found


@dataclass(frozen=True, slots=True)
class Bucket:
    """On a server of one process, which keeps objects as files."""

    server: object_servers.Server

    def read_bytes(self, pids: Iterable[int]) -> int:
        """All that it has written, to sockets and files, as the kernel counts it: while nothing is
        put there, what it has sent."""
        del pids
        (process,) = self.server.processes
        lines = Path(f"/proc/{process.pid}/io").read_text().splitlines()
        return sum(int(line.split()[1]) for line in lines if line.startswith("wchar:"))

    def chunk_count(self) -> int:
        bucket = self.server.directory / "data" / object_servers.BUCKET
        return len([path for path in bucket.rglob("*") if path.is_file()])
