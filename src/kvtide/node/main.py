"""The node process: `python -m kvtide.node.main`, or `kvtide serve`.

It takes the lock of the runtime directory, works out how much memory it may have, opens its
socket, and hands over to `Runtime`. Whoever finds the lock taken leaves: one node for each user,
runtime directory and wire version.
"""

import asyncio
import contextlib
import fcntl
import functools
import gc
import logging
import logging.handlers
import os
import secrets
import signal
import sys
from pathlib import Path

import kvtide
from kvtide import config as settings
from kvtide.clock import MonotonicClock
from kvtide.core.machine import Machine, MachineConfig
from kvtide.errors import ConfigError, HostMemoryError, KVTideError
from kvtide.memory import probe
from kvtide.node.http import HTTPPages
from kvtide.node.runtime import Runtime
from kvtide.units import GiB, MiB, format_bytes
from kvtide.wire.places import Places, open_directory
from kvtide.wire.server import check_socket_path

logger = logging.getLogger("kvtide.node")

LOG_BYTES_MAX = 8 * MiB
HOST_BYTES_AUTO_MAX = 64 * GiB
HOST_RATIO_AUTO = 4
OOM_SCORE_ADJ = 500
"""When memory runs out, the cache goes before the engine that it serves."""
SWITCH_INTERVAL_S = 0.0005
EXIT_CONFIG = 78
"""Exit code for settings or a machine that cannot be used (EX_CONFIG)."""


def host_bytes(wanted: int | None) -> int:
    """Bytes of the host tier: as set, or a quarter of what is available, at most 64 GiB.

    Raises ConfigError for more than there is.
    """
    available = probe.host_memory().available_bytes
    if wanted is None:
        return min(available // HOST_RATIO_AUTO, HOST_BYTES_AUTO_MAX)
    if wanted > available:
        raise ConfigError(
            f"host_bytes asks for {format_bytes(wanted)}, but only {format_bytes(available)} are "
            "available here: ask for less, or leave it out for a quarter of that"
        )
    return wanted


def take_lock(places: Places) -> int | None:
    """The lock of the runtime directory, held for life; None where a node has it."""
    descriptor = os.open(places.lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    return descriptor


def prepare_process() -> None:
    """Settings of the process that have no owner in code."""
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text(str(OOM_SCORE_ADJ), encoding="ascii")
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    # The index has no cycles that detaching does not cut, and millions of objects to look at.
    gc.collect()
    gc.freeze()
    gc.disable()


async def serve(config: settings.Config, places: Places) -> int:
    """Run a node until it ends; its exit code."""
    clock = MonotonicClock()
    shown = [
        {"name": e.name, "value": e.value, "owner": e.owner, "source": e.source}
        for e in config.effective()
        if e.owner == "node"
    ]
    size_bytes = host_bytes(config.node.host_bytes)
    machine = Machine(
        MachineConfig(
            node=secrets.token_bytes(16),
            pid=os.getpid(),
            version=kvtide.__version__,
            host_bytes=size_bytes,
            linger_ms=int(config.node.linger_s * 1000),
            first_region=secrets.randbits(30) << 32,
            settings={e["name"]: e["value"] for e in shown},
        )
    )
    runtime = Runtime(machine, clock, places.socket, shown)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        stop = functools.partial(runtime.stop, number.name, on_purpose=True)
        loop.add_signal_handler(number, stop)
    runtime.listen()
    logger.info(
        "node %d of kvtide %s serves at %s, host memory up to %s",
        os.getpid(),
        kvtide.__version__,
        places.socket,
        format_bytes(size_bytes),
    )
    with HTTPPages.opened(config.node, runtime, loop):
        return await runtime.run()


def _log_to_file(places: Places) -> None:
    handler = logging.handlers.RotatingFileHandler(
        places.log, maxBytes=LOG_BYTES_MAX, backupCount=1
    )
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    root = logging.getLogger("kvtide")
    root.addHandler(handler)
    root.setLevel(logging.INFO)


def run(*, log_to_file: bool) -> int:
    """Become the node of this user, unless there is one. The process's exit code."""
    try:
        config = settings.read()
        places = open_directory(config.runtime_dir)
        check_socket_path(places.socket)
    except KVTideError as error:
        print(f"kvtide: {error}", file=sys.stderr)
        return EXIT_CONFIG
    lock = take_lock(places)
    if lock is None:
        print(f"kvtide: a node is running already, in {places.directory}", file=sys.stderr)
        return 0
    if log_to_file:
        with contextlib.suppress(OSError):  # a full disk costs the log, not the cache
            _log_to_file(places)
    missing = probe.kernel_features().missing
    if missing:
        logger.error("this kernel lacks %s", ", ".join(missing))
        return EXIT_CONFIG
    prepare_process()
    try:
        return asyncio.run(serve(config, places))
    except (ConfigError, HostMemoryError) as error:
        logger.critical("%s", error)
        return EXIT_CONFIG
    except OSError as error:
        logger.critical("the node cannot serve at %s: %s", places.socket, error)
        return EXIT_CONFIG


if __name__ == "__main__":
    sys.exit(run(log_to_file=True))
