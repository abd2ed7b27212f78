"""A small parent for an engine: when whoever started it dies, however, the engine ends too.

    python -I -S leash.py GRACE_S SCRATCH COMMAND...    stdin: a pipe whose other end the owner has

The leash stands between the owner (a test, the demo, a benchmark) and `vllm serve`, in a session
of its own. It ends the command when its pipe closes, which the kernel does for an owner that was
killed, or when it gets SIGTERM: first in order, by SIGTERM to the command alone, which then ends
its own children; after GRACE_S by SIGKILL. When the command has ended, what is left of the session
is killed too, and the leash ends with the command's exit code (128 + n after signal n).

SCRATCH is the command's temporary directory, made here and gone with the session, since a killed
command removes nothing of its own. (Where the leash is killed, its owner removes the directory.)

A kvtide node is not of this session, by its own double fork: it outlives the engine on purpose.

Rejected: PR_SET_PDEATHSIG from the owner. It fires when the starting *thread* ends, and only the
first process would have it, not the engine core and the workers below. (The leash, which has one
thread, sets it on the command, for the case that the leash itself is killed.)
"""

import contextlib
import ctypes
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

PR_SET_PDEATHSIG = 1
LEFT_GRACE_S = 3.0  # for processes that end by themselves when their parent has
TRACKER_GRACE_S = 2.0  # multiprocessing's tracker unlinks the shared memory of killed processes
TICKS_PER_S = os.sysconf("SC_CLK_TCK")
KILLED = "leash: killed"
"""Begins the line in the log that names what had to be killed."""


@dataclass(frozen=True, slots=True)
class Process:
    """One live process, as /proc shows it."""

    pid: int
    command: str
    cpu_ticks: int


def processes_of_session(session: int) -> list[Process]:
    """Every process of this session that still runs; a zombie does not."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdecimal():
            continue
        try:
            stat = (entry / "stat").read_text()
            command = (entry / "cmdline").read_bytes()
        except OSError:  # it has ended meanwhile
            continue
        # The name, in brackets, may itself hold brackets and spaces: fields count from its end.
        fields = stat.rpartition(")")[2].split()
        state, its_session, user_ticks, system_ticks = fields[0], fields[3], fields[11], fields[12]
        if int(its_session) == session and state not in "ZX":
            text = command.replace(b"\0", b" ").decode(errors="replace").strip()
            found.append(Process(int(entry.name), text, int(user_ticks) + int(system_ticks)))
    return found


def kill_session(session: int, *, spare: int = 0) -> list[Process]:
    """SIGKILL for all of a session but the process `spare`; returns who had to be killed.

    Holds afterwards: nobody else of the session runs. Resource trackers are given a moment, since
    they remove what the others leave behind.
    """
    killed: dict[int, Process] = {}
    trackers_until_s = time.monotonic() + TRACKER_GRACE_S
    while left := [process for process in processes_of_session(session) if process.pid != spare]:
        may_spare = time.monotonic() < trackers_until_s
        for process in left:
            if not (may_spare and "resource_tracker" in process.command):
                killed[process.pid] = process
                _kill(process.pid, session)
        time.sleep(0.01)
    return list(killed.values())


def _kill(pid: int, session: int) -> None:
    """SIGKILL, unless the number has gone to somebody else since it was read."""
    with contextlib.suppress(ProcessLookupError):
        pidfd = os.pidfd_open(pid)
        try:
            if os.getsid(pid) == session:
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        finally:
            os.close(pidfd)


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _wait_for_end(child: subprocess.Popen[bytes], grace_s: float) -> None:
    """Wait until the command ends, or must end and is ended."""
    stop_read, stop_write = os.pipe()
    os.set_blocking(stop_write, False)
    signal.signal(signal.SIGTERM, lambda *_: os.write(stop_write, b"t"))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    pidfd = os.pidfd_open(child.pid)
    poll = select.poll()
    for descriptor in (pidfd, stop_read, sys.stdin.fileno()):
        poll.register(descriptor, select.POLLIN)
    if pidfd in dict(poll.poll()):
        return
    child.send_signal(signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        child.wait(grace_s)
        return
    print(f"{KILLED} the command, still there after {grace_s:g} s", flush=True)
    child.kill()


def main(arguments: list[str]) -> int:
    """Run the command to its end, or to its owner's."""
    grace_s, scratch, *command = arguments
    session = os.getsid(0)
    assert session == os.getpid(), "the leash must be started in a session of its own"
    os.mkdir(scratch, 0o700)
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL, preexec_fn=_die_with_parent)
    _wait_for_end(child, float(grace_s))
    code = child.wait()
    until_s = time.monotonic() + LEFT_GRACE_S
    while len(processes_of_session(session)) > 1 and time.monotonic() < until_s:
        time.sleep(0.02)
    left = kill_session(session, spare=os.getpid())
    if left:
        names = "; ".join(f"{process.pid} {process.command}" for process in left)
        print(f"{KILLED} what the command left behind: {names}", flush=True)
    shutil.rmtree(scratch, ignore_errors=True)
    return 128 - code if code < 0 else code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
