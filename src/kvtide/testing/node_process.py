"""A real node in a directory of its own: started as engines start it, ended, proven gone.

    with NodeProcess(directory, host_bytes="64MiB") as node:
        ask(node.places, "status")

A node leaves every session and process group on purpose, so it is found by what only it has: the
program that it runs, and the runtime directory in its environment.
"""

import os
import select
import signal
import time
from collections.abc import Container
from contextlib import suppress
from pathlib import Path
from typing import Any

from kvtide.bounds import T_STOP_S
from kvtide.errors import KVTideError
from kvtide.node.launch import start_node
from kvtide.wire.command import ask
from kvtide.wire.places import Places

START_S_MAX = 15.0
STOP_S_MAX = T_STOP_S
"""T_stop of the contract."""
POLL_S = 0.002
PROGRAM = b"kvtide.node.main"
LAUNCHER = b"kvtide.node.launch"
"""What becomes a node."""


def node_pids(runtime_dir: Path, programs: Container[bytes] = (PROGRAM,)) -> list[int]:
    """Nodes of this runtime directory, those that do not listen included."""
    found = []
    mine = b"KVTIDE_RUNTIME_DIR=" + os.fsencode(runtime_dir)
    for entry in Path("/proc").iterdir():
        if not entry.name.isdecimal():
            continue
        with suppress(OSError):  # it has ended meanwhile, or is not ours
            words = (entry / "cmdline").read_bytes().split(b"\0")
            is_node = any(word in programs for word in words)
            if is_node and mine in (entry / "environ").read_bytes().split(b"\0"):
                found.append(int(entry.name))
    return found


def wait_dead(pid: int, timeout_s: float) -> bool:
    """Whether a process, which need not be a child, has ended in time."""
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([pidfd], [], [], timeout_s)[0])
    finally:
        os.close(pidfd)


class NodeProcess:
    """Whatever node runs in one runtime directory."""

    def __init__(self, runtime_dir: Path, **settings: object) -> None:
        """`settings` by their names in `config.KEYS`."""
        self.places = Places(runtime_dir)
        self.environment = {f"KVTIDE_{n.upper()}": str(v) for n, v in settings.items()}

    def __enter__(self) -> "NodeProcess":
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def start(self) -> float:
        """Start one, and wait for its first answer; the seconds from the call to that."""
        began_s = time.monotonic()
        self.launch()
        self.wait_answer()
        return time.monotonic() - began_s

    def launch(self) -> None:
        """Start one, without waiting."""
        start_node(self.places.directory, self.environment)

    def wait_answer(self) -> dict[str, Any]:
        """Its status, once it answers."""
        until_s = time.monotonic() + START_S_MAX
        while time.monotonic() < until_s:
            with suppress(KVTideError):
                return self.status()
            time.sleep(POLL_S)
        raise AssertionError(f"no node answers; its log:\n{self.log()}")

    def status(self) -> dict[str, Any]:
        """What it says of itself; KVTideError where there is none."""
        return ask(self.places, "status")

    @property
    def pid(self) -> int:
        """Its process."""
        pids = self.pids()
        assert len(pids) == 1, f"nodes {pids} in {self.places.directory}"
        return pids[0]

    def pids(self) -> list[int]:
        """All nodes of this directory."""
        return node_pids(self.places.directory)

    def log(self) -> str:
        """What it has logged."""
        with suppress(OSError):
            return self.places.log.read_text(encoding="utf-8")
        return ""

    def descriptors(self) -> list[str]:
        """What its open descriptors are."""
        found = []
        for entry in Path(f"/proc/{self.pid}/fd").iterdir():
            with suppress(OSError):
                found.append(str(entry.readlink()))
        return found

    def resident_bytes(self, kind: str = "VmRSS") -> int:
        """A line of /proc/PID/status that counts memory."""
        for line in Path(f"/proc/{self.pid}/status").read_text(encoding="ascii").splitlines():
            if line.startswith(f"{kind}:"):
                return int(line.split()[1]) * 1024
        raise AssertionError(f"the kernel does not say {kind}")

    def signal(self, number: signal.Signals) -> None:
        """Send it a signal."""
        os.kill(self.pid, number)

    def kill(self) -> None:
        """SIGKILL; on return it is dead."""
        pid = self.pid
        os.kill(pid, signal.SIGKILL)
        assert wait_dead(pid, STOP_S_MAX), f"node {pid} outlives SIGKILL"

    def wait_gone(self, timeout_s: float = STOP_S_MAX) -> bool:
        """Whether no node is left here in time."""
        until_s = time.monotonic() + timeout_s
        return all(wait_dead(pid, max(0.0, until_s - time.monotonic())) for pid in self.pids())

    def end(self) -> None:
        """SIGTERM, then SIGKILL for those that do not obey, which is a fault; proven gone."""
        pids = self.pids()
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
                os.kill(pid, signal.SIGTERM)
        stubborn = [pid for pid in pids if not wait_dead(pid, STOP_S_MAX)]
        for pid in stubborn:
            os.kill(pid, signal.SIGKILL)
            wait_dead(pid, STOP_S_MAX)
        assert not stubborn, f"nodes {stubborn} did not end by SIGTERM"
        assert not self.pids(), "a node was started meanwhile"
