"""The node that engines of a runtime directory share: who it is, and that it ends.

It belongs to no engine and leaves their sessions on purpose, so whoever started engines in a
runtime directory of their own also ends the node there.
"""

import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from kvtide.testing import node_process
from kvtide.wire.peer import peer_of

STOP_S_MAX = 15.0  # a node ends within 10 s of being asked
SOCKETS = "node-*.sock"


def node_pids(runtime_dir: Path) -> list[int]:
    """The nodes that listen in this directory: at most one for each version of the wire."""
    found = []
    for path in runtime_dir.glob(SOCKETS):
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as probe:
            probe.connect(str(path))
            found.append(peer_of(probe).pid)
    return found


def stop_nodes(runtime_dir: Path, environment: Mapping[str, str]) -> bool:
    """`kvtide stop`, and SIGKILL for a node that does not obey, or does not listen (yet); true if
    that was not needed.

    Holds afterwards, if the engines have ended before: no node of this directory runs, nor is one
    on its way. `environment` names the directory too.
    """
    has_obeyed = _stop_listening(runtime_dir, environment)
    return not _kill_silent(runtime_dir) and has_obeyed


def _kill_silent(runtime_dir: Path) -> bool:
    """SIGKILL for whoever is left; whether anybody was.

    An engine that was ended a moment ago may have launched one, which makes its directory anew.
    """
    was_there = False
    while pids := _node_processes(runtime_dir):
        was_there = True
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                pidfd = os.pidfd_open(pid)
                try:
                    if pid in _node_processes(runtime_dir):  # its number is nobody else's by now
                        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
                    _has_ended(pidfd, STOP_S_MAX)
                finally:
                    os.close(pidfd)
    return was_there


def _node_processes(runtime_dir: Path) -> list[int]:
    programs = (node_process.PROGRAM, node_process.LAUNCHER)
    return node_process.node_pids(runtime_dir, programs)


def _stop_listening(runtime_dir: Path, environment: Mapping[str, str]) -> bool:
    """See `stop_nodes`, for the nodes that listen."""
    with _pidfds(runtime_dir) as pidfds:
        if not pidfds:
            return True
        command = [sys.executable, "-m", "kvtide.cli.main", "stop"]
        with contextlib.suppress(subprocess.TimeoutExpired):
            subprocess.run(
                command,
                env=dict(environment),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                timeout=STOP_S_MAX,
                check=False,
            )
        obeyed = [_has_ended(pidfd, 1.0) for pidfd in pidfds]
        for pidfd in pidfds:
            if not _has_ended(pidfd, 0):
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
                _has_ended(pidfd, STOP_S_MAX)
    return all(obeyed)


@contextlib.contextmanager
def _pidfds(runtime_dir: Path) -> Iterator[list[int]]:
    opened: list[int] = []
    try:
        for pid in node_pids(runtime_dir):
            with contextlib.suppress(ProcessLookupError):
                opened.append(os.pidfd_open(pid))
        yield opened
    finally:
        for pidfd in opened:
            os.close(pidfd)


def _has_ended(pidfd: int, wait_s: float) -> bool:
    return bool(select.select([pidfd], [], [], wait_s)[0])
