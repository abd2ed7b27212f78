"""What `kvtide doctor` looks at, each a function that finds one or more things.

The page makes no directory and starts no node; a node that runs is asked to check its state, which
holds it up meanwhile. What is wrong keeps kvtide from working; a note costs speed, memory, or will
be wrong on a GPU.
"""

import datetime
import os
import re
import shutil
import sys
from collections.abc import Iterator
from importlib import metadata
from typing import Any, NamedTuple

import kvtide
from kvtide import config
from kvtide.cli.here import is_absent
from kvtide.core.messages import WIRE_VERSION
from kvtide.engines.vllm.versions import TESTED, is_tested
from kvtide.errors import (
    ConfigError,
    HostMemoryError,
    KVTideError,
    NodeError,
    NodeUnreachable,
    WireError,
)
from kvtide.memory import probe
from kvtide.node.build import Way
from kvtide.node.main import host_bytes, smallness
from kvtide.units import MiB, format_bytes
from kvtide.wire.command import ask
from kvtide.wire.places import (
    SOCKET_PATH_BYTES_MAX,
    Places,
    check_socket_path,
    no_node,
    open_directory,
)

OK, NOTE, WRONG = "ok", "note", "WRONG"
DISK_BYTES_FEW = 64 * MiB
"""Less free is a note: a node keeps twice 8 MiB of log."""
PRESSURE_RATIO_MUCH = 0.10
"""More of the time spent waiting for memory is a note."""
LOG_BYTES_READ = 1 * MiB
"""From the end of the log, in which errors are looked for."""
RECENT_HOURS = 24
"""An error is a note for so long; older ones are only counted."""
_ERROR = re.compile(r"^(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d),\d+ (ERROR|CRITICAL) (.*)$", re.MULTILINE)


class Finding(NamedTuple):
    """One line of the page."""

    verdict: str
    what: str
    text: str


def everything() -> Iterator[Finding]:
    """All there is to say."""
    yield from kernel()
    yield from limits()
    wanted, fault, is_any_version = None, "", False
    read: config.Config | None = None
    try:
        read = config.read()
    except ConfigError as error:
        fault = str(error)
        yield Finding(WRONG, "settings", fault)
    else:
        changed = [one.name for one in read.effective if one.source != "default"]
        yield Finding(OK, "settings", f"set: {', '.join(changed)}" if changed else "all defaults")
        wanted = read.node.host_bytes
        is_any_version = read.engine.any_engine_version
    yield vllm(_version_of("vllm"), is_any_version=is_any_version)
    status: dict[str, Any] | None = None
    places = None
    try:
        places = Places(config.runtime_dir())
    except ConfigError as error:
        if str(error) != fault:
            yield Finding(WRONG, "directory", str(error))
    if places is not None:
        directory = list(runtime_directory(places))
        yield from directory
        if all(finding.verdict != WRONG for finding in directory):
            found, status = node(places)
            yield from found
            yield from log(places)
    if read is not None and status is None:  # else the node has said how its own are
        for entry in read.node.places:
            text = f"{entry.shown}; not looked at here: `kvtide tier test {entry.name}` tries it"
            yield Finding(NOTE, f"tier {entry.name}", text)
    yield from memory(wanted, status)


def kernel() -> Iterator[Finding]:
    """Features of the kernel."""
    features = probe.kernel_features()
    if features.missing:
        text = f"lacks {', '.join(features.missing)}: use a newer one, or allow these system calls"
        yield Finding(WRONG, "kernel", f"{text} in the container's filter")
    elif not features.populate_write:
        text = "no MADV_POPULATE_WRITE (Linux 5.14): engines map memory at half the speed"
        yield Finding(NOTE, "kernel", text)
    else:
        yield Finding(OK, "kernel", "memory files with seals, pidfd, populating")


def limits() -> Iterator[Finding]:
    """Limits on this process."""
    try:
        found = probe.host_memory()
    except HostMemoryError as error:
        yield Finding(WRONG, "cgroup", str(error))
        return
    if found.limit is None:
        yield Finding(OK, "cgroup", "no memory limit")
    else:
        limit = found.limit
        yield Finding(
            OK,
            "cgroup",
            f"at most {format_bytes(limit.limit_bytes)}, {format_bytes(limit.used_bytes)} used"
            f" ({limit.directory}); all that the node keeps counts there",
        )
    locked = probe.memlock_bytes()
    if locked is None:
        yield Finding(OK, "memlock", "unlimited")
    else:
        yield Finding(
            NOTE,
            "memlock",
            f"{format_bytes(locked)}; no matter on CPUs, but engines on GPUs register host memory:"
            " there raise it with `ulimit -l unlimited`, or `--ulimit memlock=-1` for a container",
        )
    pressure = probe.pressure()
    if pressure is not None and pressure.some_ratio > PRESSURE_RATIO_MUCH:
        yield Finding(
            NOTE,
            "pressure",
            f"tasks waited for memory {pressure.some_ratio:.0%} of the last 10 s: give host_bytes"
            " less, or the machine more",
        )


def _version_of(package: str) -> str | None:
    """Of one that this Python has; it is not imported."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def vllm(version: str | None, *, is_any_version: bool) -> Finding:
    """The engine beside this command, by its version."""
    if version is None:
        text = f"none in {sys.prefix}: run this where the engine is, for it needs kvtide there"
        return Finding(NOTE, "vllm", text)
    if is_tested(version):
        return Finding(OK, "vllm", f"{version}, a version that kvtide was tested with")
    text = f"{version} was not tested; {TESTED} was"
    if is_any_version:
        return Finding(NOTE, "vllm", f"{text}: on, because any_engine_version is set")
    return Finding(
        WRONG, "vllm", f"{text}: caching is off. Install that, or set any_engine_version"
    )


def runtime_directory(places: Places) -> Iterator[Finding]:
    """Where engines and node meet."""
    what = "directory"
    try:
        check_socket_path(places.socket)
        if is_absent(places.directory):
            yield Finding(OK, what, f"{places.directory}, made when a node starts")
        else:
            open_directory(places.directory)
            yield Finding(OK, what, f"{places.directory}, yours alone")
    except ConfigError as error:
        yield Finding(WRONG, what, str(error))
        return
    length = len(str(places.socket).encode())
    text = f"{length} of {SOCKET_PATH_BYTES_MAX} bytes that the kernel allows"
    yield Finding(OK, "socket path", text)
    ways = (places.directory, *places.directory.parents)
    existing = next(path for path in ways if os.path.exists(path))
    free = shutil.disk_usage(existing).free
    if free < DISK_BYTES_FEW:
        text = f"{format_bytes(free)} free at {existing}: the node's log will be cut short"
        yield Finding(NOTE, "disk", text)


def node(places: Places) -> tuple[list[Finding], dict[str, Any] | None]:
    """The node that listens, if one does; and its status."""
    found = [
        Finding(NOTE, "node", f"one of another version listens, too: {other.name}")
        for other in sorted(places.directory.glob("node-*.sock"))
        if other != places.socket
    ]
    if is_absent(places.socket):
        found.append(Finding(OK, "node", no_node(places)))
        return found, None
    try:
        status = ask(places, "status")
        found += _running(places, status)
    except (NodeError, NodeUnreachable, WireError) as error:
        is_left = str(error) == no_node(places)
        left = "A socket is left: the last one was killed"
        hint = left if is_left else "If it hangs, kill it: engines serve on"
        found.append(Finding(WRONG, "node", f"{error}. {hint}"))
        return found, None
    return found, status


def _running(places: Places, status: dict[str, Any]) -> Iterator[Finding]:
    pid, version = status["node"]["pid"], status["node"]["version"]
    if version == kvtide.__version__:
        text = f"process {pid}, kvtide {version}, wire version {WIRE_VERSION}"
        yield Finding(OK, "node", text)
    else:
        yield Finding(
            NOTE,
            "node",
            f"process {pid} is kvtide {version}, this is {kvtide.__version__}: after `kvtide stop`"
            " an engine that is started then, or `kvtide serve`, starts the new one",
        )
    try:
        entries = ask(places, "check")["entries"]
        yield Finding(OK, "integrity", f"{entries:,} entries, all in order")
    except KVTideError as error:
        text = f"{error}; please report it with the node's log, then run `kvtide stop`"
        yield Finding(WRONG, "integrity", text)
    for one in status["quarantined"]:
        text = f"{one['text']}. Please report it with the node's log before you clear"
        yield Finding(WRONG, "canary", text)
    for engine in status["engines"]:
        name = f"engine {engine['engine_id'][:8]}"
        if engine["off"]:
            yield Finding(
                NOTE, name, f"off: {engine['off']}; docs/reasons.md says what that means"
            )
        else:
            yield Finding(OK, name, f"{engine['state']}, process {engine['pid']}")
    for tier, statistics in status["tiers"].items():
        verdict = OK if statistics["is_healthy"] else NOTE
        yield Finding(verdict, f"tier {tier}", statistics["state"])


def log(places: Places) -> Iterator[Finding]:
    """Errors in the node's log, and when they were."""
    try:
        with places.log.open("rb") as file:
            file.seek(max(0, places.log.stat().st_size - LOG_BYTES_READ))
            text = file.read().decode("utf-8", "replace")
    except OSError:
        return
    errors = _ERROR.findall(text)
    if not errors:
        yield Finding(OK, "log", f"no errors in {places.log}")
        return
    when, _, last = errors[-1]
    age = datetime.datetime.now() - datetime.datetime.fromisoformat(when)
    verdict = NOTE if age < datetime.timedelta(hours=RECENT_HOURS) else OK
    text = f"{len(errors)} errors, the last at {when}: {last[:160]} (`kvtide logs`)"
    yield Finding(verdict, "log", text)


def memory(wanted: int | None, status: dict[str, Any] | None) -> Iterator[Finding]:
    """What there is, and what a node takes or would take of it."""
    try:
        available = probe.available_bytes()
        would = host_bytes(wanted, Way.FOREGROUND)
    except (HostMemoryError, ConfigError, NodeError) as error:
        verdict = NOTE if status else WRONG  # a running node has its memory already
        yield Finding(verdict, "memory", str(error))
        return
    if status is not None:
        host = status["host"]
        text = (
            f"{format_bytes(available)} available; the node has"
            f" {format_bytes(host['allocated_bytes'])} of at most"
            f" {format_bytes(host['limit_bytes'])}"
        )
        if host["limit_bytes"] < host["size_bytes"]:
            text += f": it gives memory back, asked for {format_bytes(host['size_bytes'])}"
            yield Finding(NOTE, "memory", text)
        elif small := smallness(host["size_bytes"]):
            yield Finding(NOTE, "memory", f"{text}: little; {small}")
        else:
            yield Finding(OK, "memory", text)
        return
    how = "`auto` would take" if wanted is None else "host_bytes takes"
    text = f"{format_bytes(available)} available, of which {how} up to {format_bytes(would)}"
    if small := smallness(would):
        yield Finding(NOTE, "memory", f"{text}: little; {small}")
    else:
        yield Finding(OK, "memory", text)
