"""The arms of the engine benchmark: one served vLLM each, equal but for what caches its prefixes.

Every arm has the same model, cores, threads and arguments; how LMCache runs, and why so, says
`lmcache_server`.
"""

import contextlib
import enum
import json
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks import lmcache_server
from benchmarks.hook_reports import REPORTS
from benchmarks.lmcache_server import LMCacheServer, files_below, resp_below, run_server
from benchmarks.outside import Bucket, Directory, Outside, Valkey
from kvtide.testing import object_servers, redis_servers
from kvtide.testing.nodes import stop_nodes
from kvtide.testing.serving import KVTIDE, SMOLLM2, ServedEngine, environment

ROOT = Path(__file__).resolve().parent.parent
HOST_BYTES = "3GiB"  # of kvtide's node; LMCache's server has as many
PLACE_BYTES = "8GiB"  # the cap of what is below it
HOOK_REPORTS = "hook-reports"  # below the directory of an engine's log


class Arm(enum.Enum):
    """What caches prefixes; the value is the column's title."""

    NONE = "no cache"
    OWN = "engine's prefix cache"
    LMCACHE = "LMCache 0.5.6"
    LMCACHE_DISK = "LMCache 0.5.6 with fs_native"
    LMCACHE_RESP = "LMCache 0.5.6 with resp"
    KVTIDE = "kvtide"
    KVTIDE_DISK = "kvtide with a disk"
    KVTIDE_REDIS = "kvtide with Valkey"
    KVTIDE_S3 = "kvtide with S3 (rclone)"
    KVTIDE_SHARED = "kvtide with shared_dir"
    KVTIDE_TIMED = "kvtide, its hooks timed"


@dataclass(frozen=True, slots=True)
class Node:
    """kvtide's node of an engine: whoever kills it can start another like it."""

    directory: Path
    settings: Mapping[str, str]  # by their names in `config.KEYS`

    def variables(self) -> dict[str, str]:
        """The same for the environment."""
        settings = {"runtime_dir": str(self.directory), **self.settings}
        return {f"KVTIDE_{name.upper()}": value for name, value in settings.items()}


@dataclass(frozen=True, slots=True)
class Running:
    """Arms that serve, and what is beside them."""

    engines: dict[Arm, ServedEngine] = field(default_factory=dict)
    servers: dict[Arm, LMCacheServer] = field(default_factory=dict)
    nodes: dict[Arm, Node] = field(default_factory=dict)
    places: dict[Arm, Outside] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Setting:
    """Where the arms of one part of the benchmark run."""

    directory: Path  # logs, kvtide's runtime directories, places
    arguments: Sequence[str]  # of every `vllm serve`
    running: Running


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
        running = Running()
        setting = Setting(directory, arguments, running)
        for arm in arms:
            print(f"  starts: {arm.value}", flush=True)
            engine = stack.enter_context(_ARMS[arm](setting))
            engine.wait_idle()
            running.engines[arm] = engine
        yield running


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
    return _with_node(setting, Arm.KVTIDE, KVTIDE)


def _kvtide_disk(setting: Setting) -> contextlib.AbstractContextManager[ServedEngine]:
    path = setting.directory / "disk"
    setting.running.places[Arm.KVTIDE_DISK] = Directory(path)
    settings = {"disk_path": str(path), "disk_bytes_max": PLACE_BYTES}
    return _with_node(setting, Arm.KVTIDE_DISK, KVTIDE, settings)


def _kvtide_shared(setting: Setting) -> contextlib.AbstractContextManager[ServedEngine]:
    path = setting.directory / "shared"
    setting.running.places[Arm.KVTIDE_SHARED] = Directory(path)
    settings = _tier(type="shared_dir", path=str(path))
    return _with_node(setting, Arm.KVTIDE_SHARED, KVTIDE, settings)


@contextlib.contextmanager
def _kvtide_redis(setting: Setting) -> Iterator[ServedEngine]:
    with redis_servers.running("valkey", setting.directory / "valkey") as server:
        setting.running.places[Arm.KVTIDE_REDIS] = Valkey(server)
        settings = _tier(type="redis", url=f"redis://127.0.0.1:{server.port}")
        with _with_node(setting, Arm.KVTIDE_REDIS, KVTIDE, settings) as engine:
            yield engine


@contextlib.contextmanager
def _kvtide_s3(setting: Setting) -> Iterator[ServedEngine]:
    with object_servers.running("rclone", setting.directory / "rclone") as server:
        setting.running.places[Arm.KVTIDE_S3] = Bucket(server)
        url, keys = f"s3://{object_servers.BUCKET}", str(server.write_keys())
        settings = _tier(type="s3", url=url, endpoint=server.endpoint, credentials_file=keys)
        with _with_node(setting, Arm.KVTIDE_S3, KVTIDE, settings) as engine:
            yield engine


def _tier(**entry: str) -> dict[str, str]:
    return {"tiers": json.dumps([{**entry, "bytes_max": PLACE_BYTES}])}


def _kvtide_timed(setting: Setting) -> contextlib.AbstractContextManager[ServedEngine]:
    module = {
        "kv_connector": "TimedKVTideConnector",
        "kv_connector_module_path": "benchmarks.timed",
    }
    reports = setting.directory / HOOK_REPORTS
    reports.mkdir()
    variables = {"PYTHONPATH": str(ROOT), REPORTS: str(reports)}
    return _with_node(setting, Arm.KVTIDE_TIMED, {**KVTIDE, **module}, variables=variables)


@contextlib.contextmanager
def _with_node(
    setting: Setting,
    arm: Arm,
    connector: Mapping[str, object],
    settings: Mapping[str, str] | None = None,
    variables: Mapping[str, str] | None = None,
) -> Iterator[ServedEngine]:
    """An engine that starts a node of its own, which is stopped after it."""
    name = arm.name.lower()
    node = Node(setting.directory / name, {"host_bytes": HOST_BYTES, **(settings or {})})
    setting.running.nodes[arm] = node
    mine = node.variables() | dict(variables or {})
    try:
        with _plain(setting, name=name, connector=connector, variables=mine) as engine:
            print(f"  kvtide on: {engine.wait_kvtide()}", flush=True)
            yield engine
    finally:
        stop_nodes(node.directory, environment(**mine))


def _lmcache(setting: Setting) -> contextlib.AbstractContextManager[ServedEngine]:
    return _with_lmcache(setting, Arm.LMCACHE, None)


def _lmcache_disk(setting: Setting) -> contextlib.AbstractContextManager[ServedEngine]:
    files = setting.directory / "lmcache-files"
    setting.running.places[Arm.LMCACHE_DISK] = Directory(files)
    return _with_lmcache(setting, Arm.LMCACHE_DISK, files_below("fs_native", files))


@contextlib.contextmanager
def _lmcache_resp(setting: Setting) -> Iterator[ServedEngine]:
    with redis_servers.running("valkey", setting.directory / "valkey-lmcache") as server:
        setting.running.places[Arm.LMCACHE_RESP] = Valkey(server)
        below = resp_below(server.port)
        with _with_lmcache(setting, Arm.LMCACHE_RESP, below) as engine:
            yield engine


@contextlib.contextmanager
def _with_lmcache(
    setting: Setting, arm: Arm, below: Mapping[str, object] | None
) -> Iterator[ServedEngine]:
    """An engine with a server of its own."""
    name = arm.name.lower()
    with run_server(setting.directory / f"{name}-server.log", below) as server:
        setting.running.servers[arm] = server
        with _plain(
            setting,
            name=name,
            connector=server.connector(),
            variables=lmcache_server.VARIABLES,
            python=lmcache_server.PYTHON,
        ) as engine:
            yield engine


_ARMS = {
    Arm.NONE: _none,
    Arm.OWN: _own,
    Arm.LMCACHE: _lmcache,
    Arm.LMCACHE_DISK: _lmcache_disk,
    Arm.LMCACHE_RESP: _lmcache_resp,
    Arm.KVTIDE: _kvtide,
    Arm.KVTIDE_DISK: _kvtide_disk,
    Arm.KVTIDE_REDIS: _kvtide_redis,
    Arm.KVTIDE_S3: _kvtide_s3,
    Arm.KVTIDE_SHARED: _kvtide_shared,
    Arm.KVTIDE_TIMED: _kvtide_timed,
}
