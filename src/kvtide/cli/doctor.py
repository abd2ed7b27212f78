"""What `kvtide doctor` looks at: everything that can keep kvtide from serving on this machine."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import kvtide
from kvtide import config as settings
from kvtide.config import Config
from kvtide.errors import KVTideError, NodeUnreachable
from kvtide.memory import probe
from kvtide.node.main import host_bytes
from kvtide.units import format_bytes
from kvtide.wire.command import ask
from kvtide.wire.places import check_socket_path, open_directory

if TYPE_CHECKING:
    from collections.abc import Callable


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing looked at: how it is, and what to do where it is bad."""

    what: str
    is_ok: bool
    text: str


def examine() -> list[Finding]:
    """Look at everything; what one look cannot do does not keep the others from being done."""
    try:
        config = settings.read()
    except KVTideError as error:
        return [Finding("settings", is_ok=False, text=str(error))]
    looks: list[tuple[str, Callable[[Config], str]]] = [
        ("settings", _settings),
        ("runtime directory", _directory),
        ("kernel", _kernel),
        ("memory", _memory),
        ("memory limit", _limit),
        ("locked memory", _memlock),
        ("node", _node),
    ]
    findings = []
    for what, look in looks:
        try:
            findings.append(Finding(what, is_ok=True, text=look(config)))
        except KVTideError as error:
            findings.append(Finding(what, is_ok=False, text=str(error)))
    return findings


def _settings(config: Config) -> str:
    changed = [e.name for e in config.effective() if e.source != "default"]
    return f"{', '.join(changed)} differ from the defaults" if changed else "all defaults"


def _directory(config: Config) -> str:
    places = open_directory(config.runtime_dir)
    check_socket_path(places.socket)
    return str(places.directory)


def _kernel(config: Config) -> str:
    features = probe.kernel_features()
    if features.missing:
        raise KVTideError(f"lacks {', '.join(features.missing)}: caching is off here")
    if not features.populate_write:
        return "memory files, pidfd; no MADV_POPULATE_WRITE (Linux 5.14), so regions open slower"
    return "memory files, pidfd, MADV_POPULATE_WRITE"


def _memory(config: Config) -> str:
    memory = probe.host_memory()
    size = host_bytes(config.node.host_bytes)
    return (
        f"{format_bytes(memory.available_bytes)} of {format_bytes(memory.total_bytes)} available; "
        f"a node started now would keep up to {format_bytes(size)}"
    )


def _limit(config: Config) -> str:
    limit = probe.host_memory().limit
    if limit is None:
        return "no cgroup limits this process"
    return (
        f"{limit.directory} allows {format_bytes(limit.limit_bytes)}, of which "
        f"{format_bytes(limit.available_bytes)} are left"
    )


def _memlock(config: Config) -> str:
    locked = probe.memlock_bytes()
    if locked is None:
        return "not limited"
    return f"at most {format_bytes(locked)}; matters only where regions are registered with a GPU"


def _node(config: Config) -> str:
    places = open_directory(config.runtime_dir)
    try:
        status = ask(places, "status")
    except NodeUnreachable as error:
        others = sorted(places.directory.glob("node-*.sock"))
        if places.socket in others:
            raise
        if others:
            raise KVTideError(f"{error}; {others[0].name} is of another version") from error
        return "none runs, which is fine: the first engine starts one"
    version = status["node"]["version"]
    if version != kvtide.__version__:
        raise KVTideError(
            f"node {status['node']['pid']} is kvtide {version}, this command is "
            f"{kvtide.__version__}: `kvtide stop`, and the next engine starts a new one"
        )
    entries = ask(places, "check")["entries"]
    return f"{status['node']['pid']}, kvtide {version}, {entries} entries, its state agrees"
