"""Where simulated things stand in production code: names of modules, for as long as a world lasts.

Production code imports `os`, `socket`, `threading` and so on as modules, and uses them by name. So
these names are what is exchanged, in the modules of this table and in no other; all that is not in
it runs as it is.
"""

import contextlib
import functools
import sys
from collections.abc import Iterator, Mapping
from types import ModuleType
from typing import Any

from kvtide.engines.vllm import adapter_numbers, answers, lookups, scheduler, session, worker
from kvtide.errors import WireError
from kvtide.memory import mapped
from kvtide.node import runtime, supervise, tiers
from kvtide.testing import memory_tier
from kvtide.testing.simulate.files import PidFile, Table
from kvtide.testing.simulate.kernel import Kernel
from kvtide.tiers.remote import census
from kvtide.tiers.remote import tier as remote_tier
from kvtide.tiers.remote import workers as remote_workers
from kvtide.wire import channel, frames, link, server

MODULES: dict[ModuleType, tuple[str, ...]] = {
    frames: ("os", "socket"),
    link: ("os", "select", "socket", "threading", "time", "leave_binding", "logger"),
    channel: ("os", "select", "threading", "time", "logger"),
    server: ("asyncio", "os", "socket"),
    runtime: ("asyncio", "os", "NodeMemory", "pidfd_fault", "logger"),
    tiers: ("time", "logger"),
    supervise: ("fcntl", "os", "time", "Places", "start_node"),
    answers: ("threading",),
    session: ("os", "secrets", "threading", "time", "NodeStarter", "logger"),
    scheduler: ("secrets", "time", "logger"),
    lookups: ("time",),
    adapter_numbers: ("time",),
    worker: (
        "os",
        "queue",
        "secrets",
        "threading",
        "time",
        "processors_of_process",
        "use_processors",
        "SPLIT_BYTES",
        "logger",
    ),
    census: ("threading",),
    remote_workers: ("os", "threading", "time", "logger"),
    remote_tier: ("logger",),
    memory_tier: ("queue", "threading"),
    mapped: ("queue", "threading", "MappedRegion", "leave_binding", "_open_count"),
}
SPLIT_BYTES = 512
"""A load of more than twice this is copied by two threads: of five blocks, as these are small."""


DEAD_BEFORE_HEARD = "the pidfd of a hello is of a process that has ended"
"""The one reason for which a node closes a connection here: all say only what they should."""


class Logger:
    """What stands for a module's logger: lines of the world's log; faults fail it."""

    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel

    def _say(self, level: str, text: str, arguments: tuple[Any, ...]) -> None:
        name = self._kernel.current.name if self._kernel.current else "nobody"
        self._kernel.log(level, name, text % arguments if arguments else text)

    def debug(self, text: str, *arguments: Any) -> None:
        """Not worth a line; but nobody here says what is none of ours."""
        if any(isinstance(one, WireError) for one in arguments):
            self._kernel.broken(text % arguments)

    def info(self, text: str, *arguments: Any) -> None:
        self._say("info", text, arguments)

    def warning(self, text: str, *arguments: Any) -> None:
        self._say("warning", text, arguments)
        said = text % arguments if arguments else text
        if " is closed: " in said and not said.endswith(DEAD_BEFORE_HEARD):
            self._kernel.broken(said)

    def log(self, level: int, text: str, *arguments: Any) -> None:
        self._say(str(level), text, arguments)

    def exception(self, text: str, *arguments: Any) -> None:
        """What production code takes for a fault of its own is one."""
        self._say("fault", text, arguments)
        self._kernel.broken(f"{text % arguments}: {sys.exc_info()[1]!r}")

    def error(self, text: str, *arguments: Any, exc_info: Any = None) -> None:
        """Without an exception it is a place's fault, as a breaker says it."""
        self._say("error", text, arguments)
        if exc_info is not None:
            self._kernel.broken(f"{text % arguments}: {exc_info!r}")

    def critical(self, text: str, *arguments: Any, exc_info: Any = None) -> None:
        self._say("fault", text, arguments)
        self._kernel.broken(f"{text % arguments}: {exc_info!r}")


def stand_ins(kernel: Kernel, table: Table, given: Mapping[str, Any]) -> dict[str, Any]:
    """By name; `given` are those that belong to one world."""

    def pidfd_fault(number: int, peer_pid: int) -> str:
        file = table.file(number)
        assert isinstance(file, PidFile), number
        if file.process.is_proven_dead:
            return DEAD_BEFORE_HEARD
        return "" if file.process.pid == peer_pid else "a pidfd of another process"

    return {
        "leave_binding": lambda: None,
        "processors_of_process": lambda: {0, 1},
        "use_processors": lambda processors: None,
        "_open_count": lambda: 0,
        "SPLIT_BYTES": SPLIT_BYTES,
        "pidfd_fault": pidfd_fault,
        "NodeStarter": functools.partial(supervise.NodeStarter, spare_bytes=lambda: 1 << 40),
        "logger": Logger(kernel),
        **given,
    }


@contextlib.contextmanager
def installed(names: Mapping[str, Any]) -> Iterator[None]:
    """Inside, the modules of the table have these under their names."""
    before = [
        (module, name, getattr(module, name)) for module, all_ in MODULES.items() for name in all_
    ]
    try:
        for module, name, _ in before:
            setattr(module, name, names[name])
        yield
    finally:
        for module, name, real in before:
            setattr(module, name, real)
