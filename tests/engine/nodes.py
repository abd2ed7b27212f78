"""A node as tests with real engines see it: from outside, through its socket and /proc."""

import contextlib
import os
import select
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from kvtide.errors import KVTideError
from kvtide.testing import serving
from kvtide.testing.serving import ServedEngine
from kvtide.wire.command import ask
from kvtide.wire.places import open_directory
from tests.engine.cgroups import Cgroup

HOST_BYTES = "2GiB"
SMOLLM2_BLOCK_BYTES = 128 * 23_040
"""Of a cell that holds a block of 128 tokens of SmolLM2."""
WAIT_S_MAX = 60.0
"""How long a state may take to come; a test that needs less says so."""
POLL_S = 0.02
PULSE_S = 1.2
"""A little more than engines take between two messages of what they have counted."""

Status = dict[str, Any]


class Node:
    """Whatever node runs in one runtime directory: first one, after its death another."""

    def __init__(self, directory: Path) -> None:
        self.places = open_directory(directory / "run")
        self.variables = {
            "KVTIDE_RUNTIME_DIR": str(self.places.directory),
            "KVTIDE_HOST_BYTES": HOST_BYTES,
            "KVTIDE_CANARY_RATE": "0",  # hits are what a test expects; those of canaries set it
            "XDG_CACHE_HOME": str(directory / "cache"),
            "XDG_CONFIG_HOME": str(directory / "config"),
        }
        self._children: list[subprocess.Popen[bytes]] = []

    # ---- what it says

    def status(self) -> Status:
        """Its status now; KVTideError where there is none. What was not counted yet is 0."""
        status = ask(self.places, "status")
        for part in (status, *status["engines"]):
            part["counts"] = Counter(part["counts"])
        return status

    def is_there(self) -> bool:
        """Whether a node answers."""
        with contextlib.suppress(KVTideError):
            return bool(self.status())
        return False

    @property
    def pid(self) -> int:
        """Its process."""
        pid: int = self.status()["node"]["pid"]
        return pid

    def count(self, name: str) -> int:
        """One of its counters, those of its engines added up."""
        value: int = self.status()["counts"][name]
        return value

    def counts_at_rest(self) -> Counter[str]:
        """Its counters once those of all requests that have ended are among them.

        Engines send them with each pulse, about once a second: two looks with one between them.
        """
        before, counts = None, None
        while counts is None or counts != before:
            before = counts
            time.sleep(PULSE_S)
            counts = Counter(self.status()["counts"])
        return counts

    def engines_of(self, served: ServedEngine) -> list[Status]:
        """What it says of an engine: one entry for each engine core."""
        pids = served.processes().keys()
        return [dict(one) for one in self.status()["engines"] if one["pid"] in pids]

    def engine_of(self, served: ServedEngine) -> Status:
        """The same, of one that has one core."""
        (found,) = self.engines_of(served)
        return found

    def wait(
        self, what: str, condition: Callable[[Status], object], wait_s_max: float = WAIT_S_MAX
    ) -> Status:
        """Wait for a state of the node; one that does not answer is asked again."""
        status: Status = {}

        def holds() -> bool:
            nonlocal status
            with contextlib.suppress(KVTideError):
                status = self.status()
                return bool(condition(status))
            return False

        wait_until(what, holds, wait_s_max, lambda: status)
        return status

    def wait_count(self, name: str, above: int) -> None:
        """Wait until one of its counters is above this."""
        self.wait(f"{name} is above {above}", lambda status: status["counts"][name] > above)

    def wait_on(self, engine_count: int = 1, wait_s_max: float = WAIT_S_MAX) -> Status:
        """Wait until so many engines are served; nobody else is there."""

        def are_on(status: Status) -> bool:
            states = [engine["state"] for engine in status["engines"]]
            return states == ["on"] * engine_count and bool(_open_to_all(status))

        return self.wait(f"{engine_count} engines are on", are_on, wait_s_max)

    def wait_at_rest(self) -> Status:
        """Wait until nothing is lent, leased or read; then whatever was computed is stored."""
        return self.wait("the node is at rest", is_at_rest)

    @contextlib.contextmanager
    def storing(self, blocks: int, block_bytes: int = SMOLLM2_BLOCK_BYTES) -> Iterator[None]:
        """Inside, exactly so many blocks become new hits; waits until they are."""
        before = self.status()["host"]["held_bytes"]

        def held_blocks(status: Status) -> float:
            held: int = status["host"]["held_bytes"]
            return (held - before) / block_bytes

        yield
        self.wait(f"{blocks} blocks are held", lambda status: held_blocks(status) >= blocks)
        assert held_blocks(self.wait_at_rest()) == blocks

    @contextlib.contextmanager
    def loading(self, blocks: int) -> Iterator[None]:
        """Inside, exactly so many blocks are loaded into engines and verified."""
        before = self.count("loaded_blocks")
        yield
        self.wait(
            f"{blocks} blocks are loaded",
            lambda status: status["counts"]["loaded_blocks"] - before >= blocks,
        )
        assert self.count("loaded_blocks") - before == blocks

    def check(self) -> None:
        """Let the node assert all that it can; a NodeError says what is broken."""
        ask(self.places, "check")

    def clear(self) -> None:
        """`kvtide clear`."""
        ask(self.places, "clear")

    # ---- what is done to it

    def serve(self, cgroup: Cgroup | None = None, **variables: str) -> int:
        """Start a node, in a cgroup if one is given; its pid once it answers."""
        environment = serving.environment(**self.variables | variables)
        child = subprocess.Popen(
            [sys.executable, "-m", "kvtide.node.main"],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd="/",
            start_new_session=True,
            preexec_fn=cgroup and cgroup.enter,
        )
        self._children.append(child)
        wait_until("the node answers", self.is_there)
        assert self.pid == child.pid, "another node was there already"
        return child.pid

    def stop(self) -> None:
        """`kvtide stop`; returns when the process has ended."""
        with dying(self.pid):
            ask(self.places, "stop")

    def kill(self) -> int:
        """SIGKILL; returns the pid of the dead."""
        pid = self.pid
        with dying(pid):
            os.kill(pid, signal.SIGKILL)
        return pid

    @contextlib.contextmanager
    def stopped(self) -> Iterator[int]:
        """Inside, the process stands still (asserted, at both ends)."""
        pid = self.pid
        os.kill(pid, signal.SIGSTOP)
        wait_until("the node stands still", lambda: state_of(pid) == "T")
        try:
            yield pid
            assert state_of(pid) == "T", "the node ran meanwhile"
        finally:
            os.kill(pid, signal.SIGCONT)

    def close(self) -> None:
        """End it, if one runs, and whatever was started here."""
        with contextlib.suppress(KVTideError, ProcessLookupError):
            self.stop()
        for child in self._children:
            if child.poll() is None:
                child.kill()
            child.wait()


def is_at_rest(status: Status) -> bool:
    """Contract C08, as a state."""
    host = status["host"]
    held = [host[name] for name in ("grants", "leases", "loads", "granted_bytes", "pinned_bytes")]
    return not any(held) and not status["entries"]["storing"]


def assert_accounts(status: Status) -> None:
    """Contract C08, as an equation: at rest nothing is lost."""
    assert is_at_rest(status), status["host"]
    host = status["host"]
    assert host["quarantine_bytes"] == 0, host
    assert host["free_bytes"] + host["evictable_bytes"] == host["allocated_bytes"], host
    assert host["held_bytes"] == host["evictable_bytes"], host


def _open_to_all(status: Status) -> bool:
    """Every engine has a region it may use: an offer is not dropped for want of one."""
    open_to = {name for region in status["host"]["regions"] for name in region["open_to"]}
    return all(engine["engine_id"][:8] in open_to for engine in status["engines"])


def state_of(pid: int) -> str:
    """The letter of a process's state in /proc; X where it is gone."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return "X"
    return stat.rpartition(")")[2].split()[0]


@contextlib.contextmanager
def dying(pid: int) -> Iterator[None]:
    """Inside, a process is brought to its end, which is awaited."""
    pidfd = os.pidfd_open(pid)
    try:
        yield
        assert select.select([pidfd], [], [], WAIT_S_MAX)[0], f"process {pid} lives"
    finally:
        os.close(pidfd)


def wait_until(
    what: str,
    condition: Callable[[], object],
    wait_s_max: float = WAIT_S_MAX,
    state: Callable[[], object] = lambda: "",
) -> None:
    """Poll a state until it holds; what it was instead is in the error."""
    until_s = time.monotonic() + wait_s_max
    while not condition():
        assert time.monotonic() < until_s, f"{wait_s_max:g} s passed before {what}; {state()}"
        time.sleep(POLL_S)
