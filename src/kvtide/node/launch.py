"""Starts a node that outlives whoever asked for it: `python -m kvtide.node.launch`.

This program, not the engine, forks: an engine has threads, locks and gigabytes that a fork would
copy. The node gets its own session, no open descriptors, all processors, the default memory
policy, no blocked signals, and none of the engine's environment but what it needs. Its output,
which is nothing but the last words of a broken interpreter, goes into its log.
"""

import contextlib
import ctypes
import os
import platform
import signal
import subprocess
import sys
from pathlib import Path

from kvtide.errors import KVTideError
from kvtide.wire.places import open_directory

KEPT_VARIABLES = (
    "PATH",
    "HOME",
    "USER",
    "LANG",
    "LC_ALL",
    "TMPDIR",
    "PYTHONHOME",
    "PYTHONPATH",
    "LD_LIBRARY_PATH",  # where some interpreters find their own library
    "VIRTUAL_ENV",
    "XDG_RUNTIME_DIR",
    "XDG_CONFIG_HOME",
    "XDG_CACHE_HOME",
    # Where a store like Amazon's is, and where its keys are: never keys themselves.
    "AWS_ENDPOINT_URL",
    "AWS_ENDPOINT_URL_S3",
    "AWS_ENDPOINT_URL_STS",
    "AWS_REGION",
    "AWS_DEFAULT_REGION",
    "AWS_PROFILE",
    "AWS_SHARED_CREDENTIALS_FILE",
    "AWS_ROLE_ARN",
    "AWS_ROLE_SESSION_NAME",
    "AWS_WEB_IDENTITY_TOKEN_FILE",
    "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
    "AWS_CONTAINER_CREDENTIALS_FULL_URI",
    "AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE",
)
LEFT_VARIABLES = ("KVTIDE_SALT",)
"""Ours, but not for the node: secrets of those who run commands."""
START_S_MAX = 10.0
"""The launcher ends once it has forked; where memory is short, Python alone takes seconds."""
LAST_WORDS_BYTES_MAX = 500
"""Of a launcher that failed: the end of a traceback, for one line of the engine's log."""
EXIT_CONFIG = 78
"""Exit code for settings or a machine that cannot be used (EX_CONFIG)."""
EXIT_FAULT = 70
"""Exit code after a fault of ours, such as a state that the machine no longer believes
(EX_SOFTWARE)."""
_SET_MEMPOLICY = {"x86_64": 238, "aarch64": 237}
"""The number of the system call set_mempolicy(2), which libc does not wrap."""
_MPOL_DEFAULT = 0


def start_node(runtime_dir: Path, settings: dict[str, str] | None = None) -> None:
    """Start a node for this user; returns once it has been launched, not once it answers.

    `settings` are variables (KVTIDE_HOST_BYTES=…) that hold for the node above the environment's.
    Raises OSError or subprocess.SubprocessError where no process can be started; the `stderr` of
    the latter is the end of what the launcher said.
    """
    # Not a pipe, whose end would be waited for: a node has it for a moment, too.
    words_fd = os.memfd_create("kvtide-launch", os.MFD_CLOEXEC)
    try:
        subprocess.run(
            [sys.executable, "-P", "-m", "kvtide.node.launch"],
            env=_environment(runtime_dir) | (settings or {}),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=words_fd,
            cwd="/",
            check=True,
            timeout=START_S_MAX,
        )
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
        start = max(0, os.fstat(words_fd).st_size - LAST_WORDS_BYTES_MAX)
        error.stderr = os.pread(words_fd, LAST_WORDS_BYTES_MAX, start).decode(errors="replace")
        raise
    finally:
        os.close(words_fd)


def _environment(runtime_dir: Path) -> dict[str, str]:
    """What the node needs of ours; it starts in another directory, so paths are made whole."""
    environment = {
        name: value
        for name, value in os.environ.items()
        if name in KEPT_VARIABLES or (name.startswith("KVTIDE_") and name not in LEFT_VARIABLES)
    }
    if "PYTHONPATH" in environment:
        places = environment["PYTHONPATH"].split(os.pathsep)
        environment["PYTHONPATH"] = os.pathsep.join(os.path.abspath(place) for place in places)
    if "KVTIDE_CONFIG_FILE" in environment:
        environment["KVTIDE_CONFIG_FILE"] = os.path.abspath(environment["KVTIDE_CONFIG_FILE"])
    environment["KVTIDE_RUNTIME_DIR"] = str(runtime_dir)
    return environment


def _detach() -> None:
    """Become a process of its own: two forks, so that nobody waits for it or owns its terminal."""
    if os.fork():
        os._exit(0)
    os.setsid()
    if os.fork():
        os._exit(0)
    os.umask(0o077)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    with contextlib.suppress(OSError):
        os.sched_setaffinity(0, range(os.cpu_count() or 1))
    number = _SET_MEMPOLICY.get(platform.machine())
    if number is not None:  # an engine bound to one NUMA node must not bind what all share
        ctypes.CDLL(None).syscall(number, _MPOL_DEFAULT, None, 0)


def _close_descriptors() -> None:
    """All but the standard three; found, not counted up to a limit that may be a billion."""
    for name in os.listdir("/proc/self/fd"):
        if int(name) > 2:
            with contextlib.suppress(OSError):
                os.close(int(name))


def _write_to_log(log: Path) -> None:
    """Let output end up in the node's log, or nowhere: who started us has gone."""
    try:
        descriptor = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError:
        descriptor = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)


def main() -> None:
    """Detach, then become the node; where there is no place for one, say so to who starts it."""
    try:
        places = open_directory(Path(os.environ["KVTIDE_RUNTIME_DIR"]))
    except KVTideError as error:
        print(f"kvtide: {error}", file=sys.stderr)
        sys.exit(EXIT_CONFIG)
    _detach()
    _close_descriptors()
    _write_to_log(places.log)
    os.execv(sys.executable, [sys.executable, "-P", "-m", "kvtide.node.main"])


if __name__ == "__main__":
    main()
