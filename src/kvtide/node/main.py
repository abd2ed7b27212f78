"""The node process: `python -m kvtide.node.main`, or `kvtide serve`.

It takes the lock of the runtime directory, works out how much memory it may have, opens its
socket, and hands over to `Runtime`. Whoever finds the lock taken leaves: one node for each user,
runtime directory and wire version.

A node that an engine started ends `linger_s` after its last engine. One that somebody serves in
the foreground (a terminal, a service manager, a container) stays until it is told to end, unless
`linger_s` is set.
"""

import asyncio
import contextlib
import fcntl
import functools
import gc
import importlib
import logging
import logging.handlers
import os
import resource
import secrets
import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import kvtide
from kvtide import config as settings
from kvtide.clock import MonotonicClock
from kvtide.core.host import LAYOUT_REGIONS_MIN, REGION_SLOTS_MIN
from kvtide.core.machine import Machine
from kvtide.core.parts import MachineConfig
from kvtide.errors import ConfigError, KVTideError, NodeError, reason_of
from kvtide.memory import probe
from kvtide.node.build import Way, open_tiers
from kvtide.node.launch import EXIT_CONFIG, EXIT_FAULT
from kvtide.node.runtime import Runtime
from kvtide.node.tiers import close_tiers
from kvtide.units import GiB, KiB, MiB, format_bytes
from kvtide.values import CHUNK_TOKENS_DEFAULT, HOST_BYTES_MIN
from kvtide.wire.places import Places, check_socket_path, open_directory

if TYPE_CHECKING:
    from kvtide.node.http import HTTPPages

logger = logging.getLogger("kvtide.node")

LOG_BYTES_MAX = 8 * MiB
"""Weeks of a node's life, and twice as much is nothing to any disk."""
HOST_BYTES_AUTO_MAX = 64 * GiB
"""More should be meant: it takes minutes to fill, and others may have plans for it."""
HOST_RATIO_AUTO = 0.25
"""Of what is available; README.md and docs/configuration.md name it."""
OOM_SCORE_ADJ = 500
"""When memory runs out, the cache goes before the engine that it serves."""
SWITCH_INTERVAL_S = 0.0005
"""A page being made in another thread holds up the owner's answers no longer than this."""
LOCK_TRIES, LOCK_PAUSE_S = 3, 0.02
"""An engine that looks whether the lock is held has it for an instant."""
LOG_FORMAT = "%(asctime)s %(levelname)s %(message)s"
TOKEN_BYTES_8B = 128 * KiB
"""Of common models of 8B parameters in bf16: 32 layers, 8 heads of keys and of values, of 128."""
HOST_BYTES_8B = LAYOUT_REGIONS_MIN * REGION_SLOTS_MIN * CHUNK_TOKENS_DEFAULT * TOKEN_BYTES_8B
"""The least host that serves such a model; docs/configuration.md names it."""
STAYS = "never (a node in the foreground stays until it is stopped)"


class NodeRunning(NodeError):
    """There is a node in this runtime directory already."""


def host_bytes(wanted: int | None, way: Way) -> int:
    """Bytes of the host tier: as set, or a quarter of what is available, at most 64 GiB.

    More than there is to spare is refused to whoever waits for the answer. A node that an engine
    started takes what there is: it may follow one that died, when the machine is fuller than it
    was.

    Raises ConfigError for more than there is, NodeError where there is nothing.
    """
    memory = probe.host_memory()
    available, spare = memory.available_bytes, max(0, memory.spare_bytes)
    there = f"{format_bytes(spare)} are to spare here, of {format_bytes(available)} available"
    if spare < HOST_BYTES_MIN:
        raise NodeError(f"no room for a cache: {there}; free memory, or raise the limit on it")
    if wanted is None:
        return min(int(available * HOST_RATIO_AUTO), spare, HOST_BYTES_AUTO_MAX)
    if wanted <= spare:
        return wanted
    text = f"host_bytes asks for {format_bytes(wanted)}, but only {there}"
    if way is Way.FOREGROUND:
        raise ConfigError(f"{text}: ask for less, or leave it out for a quarter of that")
    logger.warning("%s: the node makes do with these", text)
    return spare


def smallness(size_bytes: int) -> str:
    """What a host of this size is too small for; empty where it will do for common models."""
    if size_bytes >= HOST_BYTES_8B:
        return ""
    return (
        f"engines need 16 chunks of their model there, {format_bytes(HOST_BYTES_8B)} for one of 8B"
        " parameters, and are off with less: set host_bytes if you can spare more"
    )


def take_lock(places: Places) -> int | None:
    """The lock of the runtime directory, held for life; None where a node has it.

    Raises NodeError where it cannot be made.
    """
    try:
        descriptor = os.open(places.lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise NodeError(
            f"the lock {places.lock} cannot be made ({reason_of(error)}): make room there, or set "
            "KVTIDE_RUNTIME_DIR to another directory"
        ) from error
    for _ in range(LOCK_TRIES):
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return descriptor
        time.sleep(LOCK_PAUSE_S)
    os.close(descriptor)
    return None


def prepare_process() -> None:
    """Settings of the process that have no owner in code."""
    with contextlib.suppress(OSError, ValueError):
        score = Path("/proc/self/oom_score_adj")
        wanted = max(OOM_SCORE_ADJ, int(score.read_text(encoding="ascii")))
        score.write_text(str(wanted), encoding="ascii")
    with contextlib.suppress(OSError, ValueError):  # each worker takes two, each region two more
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    # The index has no cycles that detaching does not cut, and millions of objects to look at.
    gc.collect()
    gc.freeze()
    gc.disable()


def linger_ms(config: settings.Config, way: Way) -> int:
    """How long the machine may be without engines; 0: for ever."""
    is_set = any(e.name == "linger_s" and e.source != "default" for e in config.effective)
    if way is Way.FOREGROUND and not is_set:
        return 0
    return max(1, int(config.node.linger_s * 1000))  # 0 s: as soon as the last one has left


def shown_settings(config: settings.Config, way: Way) -> list[dict[str, str]]:
    """The node's own settings as they hold, for status and for engines to compare."""
    shown = [
        {"name": e.name, "value": e.value, "owner": e.owner, "source": e.source}
        for e in config.effective
        if e.owner == "node"
    ]
    if not linger_ms(config, way):
        shown = [e | {"value": STAYS} if e["name"] == "linger_s" else e for e in shown]
    return shown


def with_size(shown: list[dict[str, str]], wanted: int | None, size: int) -> list[dict[str, str]]:
    """The settings as people read them: with the size that the host has come to.

    (Engines compare the settings with their own, which are what was asked for.)
    """
    if wanted == size:
        return shown
    asked = "auto" if wanted is None else f"asked for {format_bytes(wanted)}"
    value = f"{format_bytes(size)} ({asked})"
    return [e | {"value": value} if e["name"] == "host_bytes" else e for e in shown]


async def serve(config: settings.Config, places: Places, way: Way) -> int:
    """Run a node until it ends; its exit code."""
    shown = shown_settings(config, way)
    size_bytes = host_bytes(config.node.host_bytes, way)
    runtime: Runtime | None = None

    def wake() -> None:
        if runtime is not None:
            runtime.wake()

    tiers = open_tiers(config.node, size_bytes, way, wake)
    with contextlib.ExitStack() as stack:
        # Where it comes to that: a node that serves closes them at its end.
        stack.callback(close_tiers, [one.tier for one in tiers])
        machine = Machine(
            MachineConfig(
                node=secrets.token_bytes(16),
                pid=os.getpid(),
                version=kvtide.__version__,
                host_bytes=size_bytes,
                linger_ms=linger_ms(config, way),
                first_number=secrets.randbits(30) << 32,
                settings={e["name"]: e["value"] for e in shown},
                tiers=tuple(one.plan for one in tiers),
            )
        )
        told = with_size(shown, config.node.host_bytes, size_bytes)
        runtime = Runtime(machine, MonotonicClock(), places, told, [one.tier for one in tiers])
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            # One in the foreground is ended by who started it; any other by who knows whom:
            # engines that serve on may start another.
            stop = functools.partial(runtime.stop, number.name, on_purpose=way is Way.FOREGROUND)
            loop.add_signal_handler(number, stop)
        runtime.listen()
        stack.pop_all()
    logger.info(
        "node %d of kvtide %s serves at %s, host memory up to %s",
        os.getpid(),
        kvtide.__version__,
        places.socket,
        format_bytes(size_bytes),
    )
    if small := smallness(size_bytes):
        logger.info("%s of host memory is little: %s", format_bytes(size_bytes), small)
    with _pages(config, runtime, loop):
        return await runtime.run()


def _pages(
    config: settings.Config, runtime: Runtime, loop: asyncio.AbstractEventLoop
) -> contextlib.AbstractContextManager[None]:
    """HTTP, where it is asked for; else its modules are a sixth of the start, for nothing."""
    if config.node.http_address is None:
        return contextlib.nullcontext()
    pages: type[HTTPPages] = importlib.import_module("kvtide.node.http").HTTPPages
    return pages.opened(config.node, runtime, loop)


def log_to_file(places: Places) -> None:
    """Keep a log of at most twice LOG_BYTES_MAX."""
    handler = logging.handlers.RotatingFileHandler(
        places.log, maxBytes=LOG_BYTES_MAX, backupCount=1, encoding="utf-8"
    )
    log_by(handler)
    logging.raiseExceptions = False  # a full disk costs the log, not the cache


def log_by(handler: logging.Handler) -> None:
    """Write what kvtide logs by this alone; every line has its time and level."""
    handler.setFormatter(logging.Formatter(LOG_FORMAT))
    root = logging.getLogger("kvtide")
    root.handlers[:] = [handler]
    root.setLevel(logging.INFO)


def become_node(way: Way) -> int:
    """Become the node of this user; the exit code once it has ended.

    Raises:
        ConfigError: it cannot be, by settings or the runtime directory.
        NodeError: it cannot be here: kernel, memory, disk.
        NodeRunning: there is one already.
    """
    config = settings.read()
    check_socket_path(Places(config.runtime_dir).socket)
    places = open_directory(config.runtime_dir)
    if take_lock(places) is None:  # else the descriptor stays open for as long as we live
        raise NodeRunning(f"a node is running already, in {places.directory}")
    if way is Way.LAUNCHED:
        with contextlib.suppress(OSError):
            log_to_file(places)
    missing = probe.kernel_features().missing
    if missing:
        raise NodeError(
            f"this kernel lacks {', '.join(missing)}: use a newer one, or allow these system calls"
            " in the container's filter"
        )
    prepare_process()
    try:
        return asyncio.run(serve(config, places, way))
    except OSError as error:
        raise NodeError(
            f"the node cannot serve at {places.socket}: {reason_of(error)}; see `kvtide doctor`"
        ) from error


def main() -> int:
    """The process that `kvtide.node.launch` becomes."""
    log_by(logging.StreamHandler(sys.stderr))  # which is the log, by the launcher
    try:
        return become_node(Way.LAUNCHED)
    except NodeRunning as error:
        logger.info("%s", error)
        return 0
    except KVTideError as error:
        logger.critical("%s", error)
        return EXIT_CONFIG
    except Exception:
        logger.critical("a fault in kvtide", exc_info=True)
        return EXIT_FAULT


if __name__ == "__main__":
    code = main()
    logging.shutdown()
    os._exit(code)  # nothing that hangs, such as a thread in the kernel, may hold up the end
