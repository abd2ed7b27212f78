"""Real object stores for tests: moto, rclone, and Ceph's radosgw.

`scripts/setup` installs the first two, `.ci/run` the last where it may. Each is a process of its
own on a free port, with one bucket, and ends with its test. Moto takes any credentials; rclone
and radosgw verify them. rclone keeps objects as files, and answers each range with all of it.
"""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import obstore
from obstore.store import S3Store

from kvtide.testing.redis_servers import free_port

START_S_MAX = 60.0
SERVERS = Path(os.environ.get("KVTIDE_TEST_SERVERS", sys.prefix))
"""Where `scripts/setup` installs them."""
BUCKET = "records"
ACCESS_KEY, SECRET_KEY = "AKIAKVTIDETESTS00", "aSecretOfTestsAndOfNothingElse"
REGION = "us-east-1"


@dataclass(slots=True)
class Server:
    """One server process."""

    command: list[str]
    directory: Path
    port: int
    process: "subprocess.Popen[bytes] | None" = None
    _store: Any = field(default=None)

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def bucket(self) -> S3Store:
        """As tests look at it, beside the tier."""
        if self._store is None:
            self._store = S3Store(
                BUCKET,
                config=config_for(self.port),
                client_options={"allow_http": True, "timeout": timedelta(seconds=30)},
            )
        return self._store

    def start(self) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        log = (self.directory / "log").open("ab")
        self.process = subprocess.Popen(
            self.command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=self.directory
        )
        log.close()
        self._wait(self._answers)

    def _answers(self) -> bool:
        try:
            socket.create_connection(("127.0.0.1", self.port)).close()
        except OSError:
            return False
        return True

    def _wait(self, is_done: Callable[[], bool]) -> None:
        deadline_s = time.monotonic() + START_S_MAX
        while not is_done():
            assert self.process is not None
            assert self.process.poll() is None, (self.directory / "log").read_text()
            assert time.monotonic() < deadline_s, (self.directory / "log").read_text()
            time.sleep(0.02)

    def kill(self) -> None:
        """At once."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None

    def names(self, folder: str | None = None) -> list[str]:
        return sorted(one["path"] for one in obstore.list(self.bucket, folder).collect())

    def bytes_taken(self) -> int:
        """By all objects."""
        return sum(one["size"] for one in obstore.list(self.bucket).collect())


def config_for(port: int) -> dict[str, Any]:
    """How a bucket on this port is reached, in obstore's words."""
    return {
        "endpoint": f"http://127.0.0.1:{port}",
        "region": REGION,
        "access_key_id": ACCESS_KEY,
        "secret_access_key": SECRET_KEY,
        "virtual_hosted_style_request": False,
    }


def moto(directory: Path) -> Server:
    """A server that is not started yet, in memory."""
    port = free_port()
    found = SERVERS / "moto" / "bin" / "moto_server"
    assert found.exists(), "moto is missing: run scripts/setup"
    return Server([str(found), "-H", "127.0.0.1", "-p", str(port)], directory, port)


def rclone(directory: Path) -> Server:
    """A server that is not started yet, on a directory."""
    port = free_port()
    found = SERVERS / "bin" / "rclone"
    assert found.exists(), "rclone is missing: run scripts/setup"
    options = ["--addr", f"127.0.0.1:{port}", "--auth-key", f"{ACCESS_KEY},{SECRET_KEY}", str(directory / "data")]
    return Server([str(found), "serve", "s3", *options], directory, port)


PROGRAMS: dict[str, Callable[[Path], Server]] = {"moto": moto, "rclone": rclone}


@contextmanager
def running(program: str, directory: Path) -> Iterator[Server]:
    """A server with an empty bucket, from start to end."""
    one = PROGRAMS[program](directory)
    (directory / "data" / BUCKET).mkdir(parents=True, exist_ok=True)
    one.start()
    try:
        if program == "moto":
            make_bucket(one)
        yield one
    finally:
        one.kill()


def make_bucket(server: Server) -> None:
    """As its owner does, once."""
    with socket.create_connection(("127.0.0.1", server.port)) as sock:
        request = f"PUT /{BUCKET} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 0\r\n"
        sock.sendall(f"{request}Connection: close\r\n\r\n".encode())
        answer = sock.recv(4096)
    assert b" 200 " in answer[:20], answer
