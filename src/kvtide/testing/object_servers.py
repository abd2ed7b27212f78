"""Real object stores for tests: moto, rclone, and Ceph's radosgw.

`scripts/setup` installs the first two; the last is Debian's, for who has it. Each runs on a free
port, has one bucket, and ends with its test. Moto takes any credentials; the others verify them.
rclone keeps objects as files, knows no conditions, and answers a range with all there is. Ceph is
a monitor, a manager, one store in memory and the gateway: fifteen seconds, and the most faithful.
"""

import os
import shutil
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from kvtide.testing.redis_servers import free_port

START_S_MAX = 60.0
BUCKET = "records"
ACCESS_KEY, SECRET_KEY = "AKIAKVTIDETESTS00", "aSecretOfTestsAndOfNothingElse"
REGION = "us-east-1"
MOTO = Path(sys.prefix) / "moto"
"""Packages of its own: what it needs is not what kvtide is tested with."""
RCLONE = Path(sys.prefix) / "bin" / "rclone"
MAKE_BUCKET = f"""
import boto3, sys
from botocore.config import Config
boto3.client("s3", endpoint_url=sys.argv[1], region_name="{REGION}",
    aws_access_key_id="{ACCESS_KEY}", aws_secret_access_key="{SECRET_KEY}",
    config=Config(s3={{"addressing_style": "path"}})).create_bucket(Bucket="{BUCKET}")
"""


@dataclass(slots=True)
class Server:
    """One server: the process that answers, and those that it needs, in the order of starting."""

    directory: Path
    port: int
    commands: list[list[str]] = field(default_factory=list)
    processes: "list[subprocess.Popen[bytes]]" = field(default_factory=list)

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def config(self) -> dict[str, Any]:
        """How its bucket is reached, in obstore's words."""
        return config_for(self.port)

    def start(self) -> None:
        for command in self.commands:
            self.run(command)
        self.wait(self._answers)

    def run(self, command: list[str]) -> None:
        """Start one more process."""
        with self.log.open("ab") as log:
            self.processes.append(
                subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    cwd=self.directory,
                    env={**os.environ, "PYTHONPATH": str(MOTO)},
                )
            )

    @property
    def log(self) -> Path:
        return self.directory / "log"

    def wait(self, is_done: Callable[[], bool]) -> None:
        deadline_s = time.monotonic() + START_S_MAX
        while not is_done():
            for process in self.processes:
                assert process.poll() is None, self.log.read_text()
            assert time.monotonic() < deadline_s, self.log.read_text()
            time.sleep(0.02)

    def _answers(self) -> bool:
        try:
            socket.create_connection(("127.0.0.1", self.port)).close()
        except OSError:
            return False
        return True

    def make_bucket(self) -> None:
        """As its owner does, once."""
        subprocess.run(
            [sys.executable, "-c", MAKE_BUCKET, self.endpoint],
            env={**os.environ, "PYTHONPATH": str(MOTO)},
            check=True,
            timeout=START_S_MAX,
        )

    def kill(self) -> None:
        """At once."""
        for process in reversed(self.processes):
            process.kill()
            process.wait()
        self.processes.clear()


def config_for(port: int) -> dict[str, Any]:
    """How the bucket on this port is reached, in obstore's words."""
    return {
        "endpoint": f"http://127.0.0.1:{port}",
        "region": REGION,
        "access_key_id": ACCESS_KEY,
        "secret_access_key": SECRET_KEY,
        "virtual_hosted_style_request": False,
    }


def moto(directory: Path) -> Server:
    """A server that is not started yet, in memory."""
    assert (MOTO / "moto").is_dir(), "moto is missing: run scripts/setup"
    port = free_port()
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    return Server(directory, port, [command])


def rclone(directory: Path) -> Server:
    """A server that is not started yet, on a directory."""
    assert RCLONE.exists(), "rclone is missing: run scripts/setup"
    port = free_port()
    # Of two puts that make one directory at the same time it fails one: they stay.
    for name in ("r", "p", "m"):
        (directory / "data" / BUCKET / "kvtide" / "1" / name).mkdir(parents=True, exist_ok=True)
    command = [str(RCLONE), "serve", "s3", "--no-cleanup", "--addr", f"127.0.0.1:{port}"]
    command += ["--auth-key", f"{ACCESS_KEY},{SECRET_KEY}", str(directory / "data")]
    return Server(directory, port, [command])


def radosgw(directory: Path) -> Server:
    """A server that is not started yet; what it stands on runs. Skips where there is no Ceph."""
    if any(shutil.which(name) is None for name in ("radosgw", "ceph-mon", "ceph-osd", "ceph-mgr")):
        pytest.skip("no Ceph here; on Debian: apt-get install radosgw ceph-mon ceph-osd ceph-mgr")
    server = Server(directory, free_port())
    try:
        _make_cluster(server)
    except BaseException:
        server.kill()
        raise
    return server


def _make_cluster(server: Server) -> None:
    directory, config = server.directory, str(server.directory / "ceph.conf")
    cluster, osd = str(uuid.uuid4()), str(uuid.uuid4())
    monitor = f"[v2:127.0.0.1:{free_port()},v1:127.0.0.1:{free_port()}]"
    text = CEPH.format(cluster=cluster, monitor=monitor, port=server.port, at=directory)
    Path(config).write_text(text)
    for name in ("mon", "osd", "mgr", "rgw"):
        (directory / name).mkdir(exist_ok=True)

    def ceph(program: str, *arguments: str) -> None:
        command = [program, "-c", config, *arguments]
        done = subprocess.run(
            command, cwd=directory, capture_output=True, check=False, timeout=START_S_MAX
        )
        assert done.returncode == 0, (command, done.stderr)

    make = ("--create-keyring", "--gen-key")
    all_of = ("--cap", "mon", "allow *", "--cap", "osd", "allow *", "--cap", "mgr", "allow *")
    ceph("ceph-authtool", "mon.keys", *make, "-n", "mon.", "--cap", "mon", "allow *")
    ceph("ceph-authtool", "admin.keys", *make, "-n", "client.admin", *all_of)
    ceph("ceph-authtool", "mon.keys", "--import-keyring", "admin.keys")
    ceph("monmaptool", "--create", "--fsid", cluster, "--addv", "a", monitor, "monmap")
    ceph("ceph-mon", "--mkfs", "-i", "a", "--monmap", "monmap", "--keyring", "mon.keys")
    server.run(["ceph-mon", "-f", "-c", config, "-i", "a", "--keyring", "mon.keys"])
    server.run(["ceph-mgr", "-f", "-c", config, "-i", "x"])
    ceph("ceph", "-k", "admin.keys", "osd", "new", osd)
    ceph("ceph-osd", "-i", "0", "--mkfs", "--osd-uuid", osd)
    server.run(["ceph-osd", "-f", "-c", config, "-i", "0"])
    rights = ("mon", "allow rw", "osd", "allow rwx", "-o", "rgw.keys")
    ceph("ceph", "-k", "admin.keys", "auth", "get-or-create", "client.rgw.a", *rights)
    by_mode = ("--ms-mon-client-mode", "crc")  # without keys, it asks for one for ever
    user = ("user", "create", "--uid", "u", "--display-name", "u")
    keys = ("--access-key", ACCESS_KEY, "--secret-key", SECRET_KEY)
    ceph("radosgw-admin", "-k", "admin.keys", *by_mode, *user, *keys)
    gateway = ["radosgw", "-f", "-c", config, "-n", "client.rgw.a", "--keyring", "rgw.keys"]
    server.commands = [[*gateway, *by_mode]]


CEPH = """
[global]
fsid = {cluster}
mon host = {monitor}
auth cluster required = none
auth service required = none
auth client required = none
osd pool default size = 1
osd pool default pg num = 8
mon allow pool size one = true
osd crush chooseleaf type = 0
osd objectstore = memstore
memstore device bytes = 1073741824
public addr = 127.0.0.1
cluster addr = 127.0.0.1
mon data = {at}/mon
osd data = {at}/osd
mgr data = {at}/mgr
rgw data = {at}/rgw
rgw frontends = beast endpoint=127.0.0.1:{port}
run dir = {at}
log file = {at}/$name.log
admin socket =
pid file = {at}/$name.pid
"""
"""Without keys between its parts; the gateway's users have theirs."""

PROGRAMS: dict[str, Callable[[Path], Server]] = {
    "moto": moto,
    "rclone": rclone,
    "radosgw": radosgw,
}


@contextmanager
def running(program: str, directory: Path) -> Iterator[Server]:
    """A server with an empty bucket, from start to end."""
    directory.mkdir(parents=True, exist_ok=True)
    one = PROGRAMS[program](directory)
    try:
        one.start()
        if program != "rclone":  # whose buckets are directories
            one.make_bucket()
        yield one
    finally:
        one.kill()
