"""Starts a node that outlives whoever asked for it: `python -m kvtide.node.launch`.

This program, not the engine, forks: an engine has threads, locks and gigabytes that a fork would
copy. The node gets its own session, no open descriptors, all processors, its log as output, and
none of the engine's environment but what it needs.
"""

import contextlib
import os
import subprocess
import sys
from pathlib import Path

KEPT_VARIABLES = (
    "PATH",
    "HOME",
    "USER",
    "LANG",
    "LC_ALL",
    "TMPDIR",
    "PYTHONPATH",
    "VIRTUAL_ENV",
    "XDG_RUNTIME_DIR",
    "XDG_CONFIG_HOME",
    "XDG_CACHE_HOME",
)
START_S_MAX = 10.0


def start_node(runtime_dir: Path, settings: dict[str, str] | None = None) -> None:
    """Start a node for this user; returns once it has been launched, not once it answers.

    Raises OSError or subprocess.SubprocessError where no process can be started.
    """
    environment = {
        name: value
        for name, value in os.environ.items()
        if name in KEPT_VARIABLES or name.startswith("KVTIDE_")
    }
    environment["KVTIDE_RUNTIME_DIR"] = str(runtime_dir)
    environment |= settings or {}
    subprocess.run(
        [sys.executable, "-m", "kvtide.node.launch"],
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        cwd="/",
        check=True,
        timeout=START_S_MAX,
    )


def _detach() -> None:
    """Become a process of its own: two forks, so that nobody waits for it or owns its terminal."""
    if os.fork():
        os._exit(0)
    os.setsid()
    if os.fork():
        os._exit(0)
    os.closerange(3, 1024)
    os.umask(0o077)
    with contextlib.suppress(OSError):
        os.sched_setaffinity(0, range(os.cpu_count() or 1))


def main() -> None:
    """Detach, then become the node."""
    _detach()
    os.execv(sys.executable, [sys.executable, "-m", "kvtide.node.main"])


if __name__ == "__main__":
    main()
