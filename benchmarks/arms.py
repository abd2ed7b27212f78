"""The arms of the engine benchmark: one served vLLM each, equal but for what caches its prefixes.

Every arm has the same model, cores, threads and arguments. LMCache runs in its multiprocess mode,
worker copying (`engine_driven`) through shared memory, the fastest of its modes on a CPU, from an
environment of its own (scripts/setup_lmcache), with its log and its metrics quiet.

With a disk: LMCache writes files by its `fs_native`, past the page cache as kvtide does. Its memory
is then only a buffer (`skip_l1`): what is on disk leaves it, so every hit is read from disk, by the
same path as where memory was too small for it.
"""

import contextlib
import enum
import json
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.hook_reports import REPORTS
from kvtide.testing.leashed import LeashedProgram, ProgramError
from kvtide.testing.nodes import stop_nodes
from kvtide.testing.serving import KVTIDE, SMOLLM2, ServedEngine, environment

ROOT = Path(__file__).resolve().parent.parent
LMCACHE_PYTHON = ROOT / ".venv-lmcache" / "bin" / "python"
LMCACHE_START_S_MAX = 60.0
HOST_BYTES = "3GiB"  # of kvtide's node; LMCache's server has as many
LMCACHE_GB = 3
DISK_NODE = "kvtide-disk"  # below the same: the runtime directory of the node with a disk
LMCACHE_DISK = "lmcache-disk"  # below the same: where LMCache keeps files
DISK_SETTINGS = {"KVTIDE_DISK_BYTES_MAX": "8GiB"}
HOOK_REPORTS = "hook-reports"  # below the directory of an engine's log


class Arm(enum.Enum):
    """What caches prefixes; the value is the column's title."""

    NONE = "no cache"
    OWN = "engine's prefix cache"
    LMCACHE = "LMCache 0.5.6"
    LMCACHE_DISK = "LMCache 0.5.6 with fs_native"
    KVTIDE = "kvtide"
    KVTIDE_DISK = "kvtide with a disk"
    KVTIDE_TIMED = "kvtide, its hooks timed"


@dataclass(frozen=True, slots=True)
class Setting:
    """Where the arms of one part of the benchmark run."""

    directory: Path  # logs, kvtide's runtime directory
    arguments: Sequence[str]  # of every `vllm serve`
    servers: dict[Arm, LeashedProgram] = field(default_factory=dict)  # that run beside engines


@dataclass(frozen=True, slots=True)
class Running:
    """Arms that serve."""

    engines: dict[Arm, ServedEngine]
    servers: dict[Arm, LeashedProgram]  # LMCache's, of its arms


@contextlib.contextmanager
def serve(arms: Sequence[Arm], *arguments: str) -> Iterator[dict[Arm, ServedEngine]]:
    """All of these arms at once, started one after the other, idle; ended on the way out."""
    with run_all(arms, *arguments) as running:
        yield running.engines


@contextlib.contextmanager
def run_all(arms: Sequence[Arm], *arguments: str) -> Iterator[Running]:
    """The same, with what runs beside the engines."""
    with contextlib.ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvtide-")))
        setting = Setting(directory, arguments)
        engines = {}
        for arm in arms:
            print(f"  starts: {arm.value}", flush=True)
            engines[arm] = stack.enter_context(_ARMS[arm](setting))
            engines[arm].wait_idle()
        yield Running(engines, setting.servers)


@contextlib.contextmanager
def _plain(
    setting: Setting,
    *,
    name: str,
    connector: Mapping[str, object] | None = None,
    more: Sequence[str] = (),
    variables: Mapping[str, str] | None = None,
    python: Path = Path(sys.executable),
) -> Iterator[ServedEngine]:
    engine = ServedEngine(
        SMOLLM2,
        log=setting.directory / f"{name}.log",
        connector=connector,
        arguments=[*setting.arguments, *more],
        variables=variables,
        python=python,
    )
    with engine:
        yield engine


def _none(setting: Setting) -> contextlib.AbstractContextManager[ServedEngine]:
    return _plain(setting, name="none", more=["--no-enable-prefix-caching"])


def _own(setting: Setting) -> contextlib.AbstractContextManager[ServedEngine]:
    return _plain(setting, name="own")


def _kvtide(setting: Setting) -> contextlib.AbstractContextManager[ServedEngine]:
    return _with_node(setting, "kvtide", KVTIDE, {})


def _kvtide_disk(setting: Setting) -> contextlib.AbstractContextManager[ServedEngine]:
    variables = {
        "KVTIDE_DISK_PATH": str(setting.directory / "disk"),
        **DISK_SETTINGS,
    }
    return _with_node(setting, DISK_NODE, KVTIDE, variables)


def _kvtide_timed(setting: Setting) -> contextlib.AbstractContextManager[ServedEngine]:
    module = {
        "kv_connector": "TimedKVTideConnector",
        "kv_connector_module_path": "benchmarks.timed",
    }
    reports = setting.directory / HOOK_REPORTS
    reports.mkdir()
    variables = {"PYTHONPATH": str(ROOT), REPORTS: str(reports)}
    return _with_node(setting, "kvtide-timed", {**KVTIDE, **module}, variables)


@contextlib.contextmanager
def _with_node(
    setting: Setting, name: str, connector: Mapping[str, object], variables: Mapping[str, str]
) -> Iterator[ServedEngine]:
    """An engine that starts a node of its own, which is stopped after it."""
    mine = {
        "KVTIDE_RUNTIME_DIR": str(setting.directory / name),
        "KVTIDE_HOST_BYTES": HOST_BYTES,
        **variables,
    }
    try:
        with _plain(setting, name=name, connector=connector, variables=mine) as engine:
            print(f"  kvtide on: {engine.wait_kvtide()}", flush=True)
            yield engine
    finally:
        stop_nodes(Path(mine["KVTIDE_RUNTIME_DIR"]), environment(**mine))


def _lmcache(setting: Setting) -> contextlib.AbstractContextManager[ServedEngine]:
    return _with_lmcache(setting, "lmcache", Arm.LMCACHE)


def _lmcache_disk(setting: Setting) -> contextlib.AbstractContextManager[ServedEngine]:
    files = {
        "type": "fs_native",
        "base_path": str(setting.directory / LMCACHE_DISK),
        "use_odirect": True,
    }
    more = ("--l2-store-policy", "skip_l1", "--l2-adapter", json.dumps(files))
    return _with_lmcache(setting, LMCACHE_DISK, Arm.LMCACHE_DISK, more)


@contextlib.contextmanager
def _with_lmcache(
    setting: Setting, name: str, arm: Arm, more: Sequence[str] = ()
) -> Iterator[ServedEngine]:
    """An engine with a server of its own, which gets these arguments too."""
    if not LMCACHE_PYTHON.exists():
        subprocess.run([ROOT / "scripts" / "setup_lmcache"], check=True)
    variables = {
        "LMCACHE_TRACK_USAGE": "false",
        "LMCACHE_LOG_LEVEL": "WARNING",
        "PYTHONHASHSEED": "0",
        "VLLM_PLUGINS": "",
    }
    log = setting.directory / f"{name}-server.log"
    with _lmcache_server(log, variables, more) as (server, port):
        setting.servers[arm] = server
        connector = {
            "kv_connector": "LMCacheMPConnector",
            "kv_connector_module_path": "lmcache.integration.vllm.lmcache_mp_connector",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {
                "lmcache.mp.host": "tcp://127.0.0.1",
                "lmcache.mp.port": port,
                "lmcache.mp.mp_transfer_mode": "engine_driven",
                "lmcache.mp.mq_timeout": 30,
            },
        }
        with _plain(
            setting,
            name=name,
            connector=connector,
            variables=variables,
            python=LMCACHE_PYTHON,
        ) as engine:
            yield engine


@contextlib.contextmanager
def _lmcache_server(
    log: Path, variables: Mapping[str, str], more: Sequence[str]
) -> Iterator[tuple[LeashedProgram, int]]:
    """LMCache's server, and the port it listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    shm = f"kvtide-bench-lmcache-{port}"
    command = [
        *(str(LMCACHE_PYTHON), "-m", "lmcache.v1.multiprocess.server"),
        *("--host", "127.0.0.1", "--port", str(port), "--chunk-size", "256"),
        *("--supported-transfer-mode", "engine_driven", "--max-workers", "2"),
        *("--shm-name", shm, "--no-l1-use-lazy", "--l1-size-gb", str(LMCACHE_GB)),
        *("--eviction-policy", "LRU", "--disable-metrics"),
        *more,
    ]
    server = LeashedProgram(log)
    server.launch(command, environment(**variables))
    try:
        with server:
            _wait_for_port(server, port)
            yield server, port
    finally:
        for left in Path("/dev/shm").glob(f"*{shm}*"):  # where it was killed
            left.unlink(missing_ok=True)


def _wait_for_port(server: LeashedProgram, port: int) -> None:
    until_s = time.monotonic() + LMCACHE_START_S_MAX
    while time.monotonic() < until_s:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
            return
        if not server.is_alive():
            raise ProgramError(f"LMCache's server ended at its start; {server.log_end()}")
        time.sleep(0.1)
    raise ProgramError(f"LMCache's server does not listen; {server.log_end()}")


_ARMS = {
    Arm.NONE: _none,
    Arm.OWN: _own,
    Arm.LMCACHE: _lmcache,
    Arm.LMCACHE_DISK: _lmcache_disk,
    Arm.KVTIDE: _kvtide,
    Arm.KVTIDE_DISK: _kvtide_disk,
    Arm.KVTIDE_TIMED: _kvtide_timed,
}
