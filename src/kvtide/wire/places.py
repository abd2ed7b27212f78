"""Where a node can be found: the names in a runtime directory, and who may use it."""

import contextlib
import os
import stat
import time
from dataclasses import dataclass
from pathlib import Path

from kvtide.core.messages import WIRE_VERSION
from kvtide.errors import ConfigError, reason_of

SOCKET_PATH_BYTES_MAX = 107
"""What `sockaddr_un` holds, less its closing zero."""


@dataclass(frozen=True, slots=True)
class Places:
    """Files of one node. Names carry the wire version, so two versions run side by side."""

    directory: Path

    @property
    def socket(self) -> Path:
        """Where the node listens."""
        return self.directory / f"node-{WIRE_VERSION}.sock"

    @property
    def lock(self) -> Path:
        """Held for life by the node."""
        return self.directory / f"node-{WIRE_VERSION}.lock"

    @property
    def stopped(self) -> Path:
        """Left by a node that was stopped on purpose, taken away by the next one."""
        return self.directory / f"node-{WIRE_VERSION}.stopped"

    @property
    def log(self) -> Path:
        """The node's log."""
        return self.directory / f"node-{WIRE_VERSION}.log"


def open_directory(directory: Path) -> Places:
    """The runtime directory, made if it is missing, and checked to be ours alone.

    Raises ConfigError where it belongs to somebody else, is open to others, or cannot be made. A
    link is refused: somebody else may have made it, in a directory that is open to all.
    """
    try:
        with contextlib.suppress(FileExistsError):  # by something else: it is looked at below
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = directory.lstat()
    except OSError as error:
        raise ConfigError(
            f"the runtime directory {directory} cannot be used ({reason_of(error)}): "
            "set KVTIDE_RUNTIME_DIR to a directory of yours"
        ) from error
    if stat.S_ISLNK(found.st_mode):
        raise ConfigError(
            f"the runtime directory {directory} is a symbolic link: set KVTIDE_RUNTIME_DIR to the "
            "directory itself"
        )
    if not stat.S_ISDIR(found.st_mode):
        raise ConfigError(
            f"the runtime directory {directory} is not a directory: set KVTIDE_RUNTIME_DIR to one "
            "of yours"
        )
    if found.st_uid != os.getuid():
        raise ConfigError(
            f"the runtime directory {directory} belongs to user {found.st_uid}, not to "
            f"{os.getuid()}: set KVTIDE_RUNTIME_DIR to a directory of yours"
        )
    if found.st_mode & 0o077:
        below = f"set KVTIDE_RUNTIME_DIR to a directory below it, such as {directory}/kvtide"
        is_for_all = found.st_mode & stat.S_ISVTX  # as /tmp, which must stay so
        or_close = "" if is_for_all else ", or chmod 700 it"
        raise ConfigError(
            f"the runtime directory {directory} is open to others "
            f"(mode {stat.S_IMODE(found.st_mode):o}): {below}{or_close}"
        )
    return Places(directory)


def no_node(places: Places) -> str:
    """For people, where no node listens: that it is so, and what it takes until one does."""
    others = sorted(other.name for other in places.directory.glob("node-*.sock"))
    others = [name for name in others if name != places.socket.name]
    kind = f"node of this version (there is {', '.join(others)})" if others else "node"
    is_so = f"no {kind} is running in {places.directory}"
    try:
        stopped_s = places.stopped.stat().st_mtime
    except OSError:
        return f"{is_so}. `kvtide serve`, or the next engine, starts one"
    when = time.strftime("%Y-%m-%d %H:%M", time.localtime(stopped_s))
    return (
        f"{is_so}: it was stopped on purpose at {when}. `kvtide serve`, or an engine that is"
        " started now, starts the next"
    )


def silent_node(places: Places) -> str:
    """For people, where one listens and does not answer; it may log to elsewhere."""
    return (
        f"the node at {places.socket} does not answer; `kvtide logs` shows its log, or says where"
        " that is"
    )


def check_socket_path(path: Path) -> None:
    """Raise ConfigError where the path is longer than the kernel allows."""
    length = len(os.fsencode(path))
    if length > SOCKET_PATH_BYTES_MAX:
        raise ConfigError(
            f"the socket's path {path} has {length} bytes, the kernel allows "
            f"{SOCKET_PATH_BYTES_MAX}: set KVTIDE_RUNTIME_DIR to a shorter directory"
        )
