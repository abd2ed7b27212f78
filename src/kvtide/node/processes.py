"""Whether a pidfd is of the process at the other end of a connection.

The kernel gives the peer's number as this process sees it (SO_PEERCRED), and the number behind a
pidfd as the mounted /proc sees it (fdinfo). They are compared where both are known:

    engine and node in one pid namespace, or the node outside       both known, must be equal
    engine in another container, which the node cannot see          both 0: nothing to compare
    /proc is of another namespace than the node                     its numbers mean others

Where there is nothing to compare the peer's word stands: it is of the same user, and could write
into the memory that it shares with the node anyway.
"""

import os
from pathlib import Path

from kvtide.errors import reason_of
from kvtide.wire.peer import UNSEEN

DEAD = -1


def pidfd_fault(pidfd: int, peer_pid: int, proc: Path = Path("/proc")) -> str:
    """Why this descriptor is no pidfd of the live peer; empty where it is, as far as can be told.

    `peer_pid` is of SO_PEERCRED.
    """
    try:
        text = (proc / f"self/fdinfo/{pidfd}").read_text(encoding="ascii")
    except OSError as error:
        return f"a hello's descriptor cannot be looked at: {reason_of(error)}"
    fields = dict(line.split(":\t", 1) for line in text.splitlines() if ":\t" in line)
    if "Pid" not in fields:
        return "the descriptor of a hello is no pidfd"
    pid = int(fields["Pid"])
    if pid == DEAD:
        return "the pidfd of a hello is of a process that has ended"
    is_told = peer_pid != UNSEEN and pid != UNSEEN and _shows_our_namespace(proc)
    if is_told and pid != peer_pid:
        return f"process {peer_pid} handed over a pidfd of process {pid}"
    return ""


def _shows_our_namespace(proc: Path) -> bool:
    try:
        return os.readlink(proc / "self") == str(os.getpid())
    except OSError:
        return False
