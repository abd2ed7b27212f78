"""The arms of the engine benchmark: one served vLLM each, equal but for what caches its prefixes.

Every arm has the same model, cores, threads and arguments; how LMCache runs, and why so, says
`lmcache_server`.
"""

import contextlib
import enum
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks import lmcache_server
from benchmarks.hook_reports import REPORTS
from benchmarks.lmcache_server import LMCacheServer, run_server
from kvtide.testing.nodes import stop_nodes
from kvtide.testing.serving import KVTIDE, SMOLLM2, ServedEngine, environment

ROOT = Path(__file__).resolve().parent.parent
HOST_BYTES = "3GiB"  # of kvtide's node; LMCache's server has as many
DISK_NODE = "kvtide-disk"  # below the same: the runtime directory of the node with a disk
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
    servers: dict[Arm, LMCacheServer] = field(default_factory=dict)  # beside engines


@dataclass(frozen=True, slots=True)
class Running:
    """Arms that serve."""

    engines: dict[Arm, ServedEngine]
    servers: dict[Arm, LMCacheServer]  # of LMCache's arms


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
    return _with_lmcache(setting, "lmcache", Arm.LMCACHE, None)


def _lmcache_disk(setting: Setting) -> contextlib.AbstractContextManager[ServedEngine]:
    files = setting.directory / "lmcache-files"
    return _with_lmcache(setting, "lmcache-disk", Arm.LMCACHE_DISK, files)


@contextlib.contextmanager
def _with_lmcache(
    setting: Setting, name: str, arm: Arm, files: Path | None
) -> Iterator[ServedEngine]:
    """An engine with a server of its own."""
    with run_server(setting.directory / f"{name}-server.log", files) as server:
        setting.servers[arm] = server
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
    Arm.KVTIDE: _kvtide,
    Arm.KVTIDE_DISK: _kvtide_disk,
    Arm.KVTIDE_TIMED: _kvtide_timed,
}
