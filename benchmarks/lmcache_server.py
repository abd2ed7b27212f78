"""LMCache's server, as the benchmark's arms of that name run it: one for each engine.

In its multiprocess mode, the worker copying (`engine_driven`) through shared memory, the fastest
of its modes on a CPU, from an environment of its own (scripts/setup_lmcache), with its log and its
metrics quiet.

With a place below, which one of its adapters keeps (`files_below`, `resp_below`, `s3_below`), it
keeps in memory what it has read (`retain`). `clear` empties that memory: the next hit comes from
the place.

Rejected: `skip_l1`, which never keeps anything in memory. A request that hits in the engine's own
cache then reads the place all the same, so nothing is left to compare with.
"""

import contextlib
import http.client
import json
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from kvtide.testing.leashed import LeashedProgram, ProgramError
from kvtide.testing.serving import environment

ROOT = Path(__file__).resolve().parent.parent
PYTHON = ROOT / ".venv-lmcache" / "bin" / "python"
VARIABLES = {
    "LMCACHE_TRACK_USAGE": "false",
    "LMCACHE_LOG_LEVEL": "WARNING",
    "PYTHONHASHSEED": "0",
    "VLLM_PLUGINS": "",
}
"""Of the server and of its engine."""
HOST_GB = 3
CHUNK_TOKENS = 256
LOOPBACK = "127.0.0.1"
START_S_MAX = 60.0
CLEAR_S_MAX = 10.0


class LMCacheServer(LeashedProgram):
    """One server; `run_server` starts it and ends it."""

    def __init__(self, log: Path, below: Mapping[str, object] | None) -> None:
        """`below`: the adapter that keeps chunks in a place too; None for memory alone."""
        super().__init__(log)
        self._below = below
        self.port, self._http_port = _free_port(), _free_port()
        self._shm = f"kvtide-bench-lmcache-{self.port}"

    def connector(self) -> Mapping[str, object]:
        """vLLM's `--kv-transfer-config` for its engine."""
        return {
            "kv_connector": "LMCacheMPConnector",
            "kv_connector_module_path": "lmcache.integration.vllm.lmcache_mp_connector",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {
                "lmcache.mp.host": f"tcp://{LOOPBACK}",
                "lmcache.mp.port": self.port,
                "lmcache.mp.mp_transfer_mode": "engine_driven",
                "lmcache.mp.mq_timeout": 30,
            },
        }

    def clear(self) -> None:
        """Empty its memory; what is below stays."""
        connection = http.client.HTTPConnection(LOOPBACK, self._http_port, timeout=CLEAR_S_MAX)
        with contextlib.closing(connection):
            connection.request("POST", "/cache/clear")
            response = connection.getresponse()
            answer = response.read()
        if response.status != http.HTTPStatus.OK:
            raise ProgramError(f"LMCache does not clear its memory: {answer.decode()}")

    def command(self) -> list[str]:
        """With a place it is the server that HTTP stands before: only that can be cleared."""
        name = "server" if self._below is None else "http_server"
        command = [
            *(str(PYTHON), "-m", f"lmcache.v1.multiprocess.{name}"),
            *("--host", LOOPBACK, "--port", str(self.port), "--chunk-size", str(CHUNK_TOKENS)),
            *("--supported-transfer-mode", "engine_driven", "--max-workers", "2"),
            *("--shm-name", self._shm, "--no-l1-use-lazy", "--l1-size-gb", str(HOST_GB)),
            *("--eviction-policy", "LRU", "--disable-metrics"),
        ]
        if self._below is not None:
            command += ["--http-host", LOOPBACK, "--http-port", str(self._http_port)]
            command += ["--l2-prefetch-policy", "retain"]
            command += ["--l2-adapter", json.dumps(self._below)]
        return command

    def wait_listening(self) -> None:
        """Wait until it may be asked."""
        ports = [self.port] if self._below is None else [self.port, self._http_port]
        until_s = time.monotonic() + START_S_MAX
        while not all(map(_is_open, ports)):
            if not self.is_alive():
                raise ProgramError(f"LMCache's server ended at its start; {self.log_end()}")
            if time.monotonic() > until_s:
                raise ProgramError(f"LMCache's server does not listen; {self.log_end()}")
            time.sleep(0.1)

    def remove_memory(self) -> None:
        """What it leaves in shared memory where it was killed."""
        for left in Path("/dev/shm").glob(f"*{self._shm}*"):
            left.unlink(missing_ok=True)


def files_below(name: str, files: Path) -> Mapping[str, object]:
    """The adapter `fs`, or in C++ `fs_native`, that keeps files in a directory; past the page
    cache as kvtide does, its faster way to what is not in there."""
    return {"type": name, "base_path": str(files), "use_odirect": True}


def resp_below(port: int) -> Mapping[str, object]:
    """The adapter, in C++, that keeps values on a Redis or Valkey server."""
    return {"type": "resp", "host": LOOPBACK, "port": port}


def s3_below(port: int, access_key: str, secret_key: str) -> Mapping[str, object]:
    """The adapter that keeps objects in a bucket, which it names in the host's name alone."""
    return {
        "type": "s3",
        "s3_endpoint": f"{LOOPBACK}:{port}",
        "s3_region": "us-east-1",
        "disable_tls": True,
        "s3_prefer_http2": False,
        "aws_access_key_id": access_key,
        "aws_secret_access_key": secret_key,
    }


def require_lmcache() -> None:
    """Make its environment, where it is not there as it has to be."""
    subprocess.run([ROOT / "scripts" / "setup_lmcache"], check=True)


@contextlib.contextmanager
def run_server(log: Path, below: Mapping[str, object] | None = None) -> Iterator[LMCacheServer]:
    """A server that may be asked; ended on the way out."""
    require_lmcache()
    server = LMCacheServer(log, below)
    server.launch(server.command(), environment(**VARIABLES))
    try:
        with server:
            server.wait_listening()
            yield server
    finally:
        server.remove_memory()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        port: int = probe.getsockname()[1]
        return port


def _is_open(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection((LOOPBACK, port), 1):
        return True
    return False
