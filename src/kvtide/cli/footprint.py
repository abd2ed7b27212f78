"""What stands at a path before a trial, and what of a trial is taken away after it.

A path that is typed at a prompt may be anything: what is somebody else's is refused before a byte
is written. What was not there before goes, as far as it can be told to be the trial's.
"""

import contextlib
import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from kvtide.errors import ConfigError, reason_of
from kvtide.node.build import OPEN_S_MAX
from kvtide.tiers.shared_dir import opening as shared_dir

OF_FILE_SYSTEMS = frozenset({"lost+found", ".snapshot", ".snapshots"})
"""What a mount may hold that nobody has put there."""


@dataclass(slots=True)
class _Found:
    """Before a trial.

    Attributes:
        missing: the path and what is above it, as far as it is not there, deepest first.
        folders: those of a shared directory.
    """

    missing: list[Path] = field(default_factory=list)
    folders: set[bytes] = field(default_factory=set)


@contextlib.contextmanager
def left_as_found(path: Path, *, is_shared_dir: bool) -> Iterator[None]:
    """What is made at the path meanwhile is taken away at the end.

    Raises:
        ConfigError: something else is there, or nothing is to be learned about it.
    """
    found = _Found()
    _in_time(path, lambda: _look(path, found, is_shared_dir=is_shared_dir))
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            if is_shared_dir:
                shared_dir.remove_empty_folders(path, found.folders)
        for one in found.missing:
            with contextlib.suppress(OSError):
                if one == path and not path.is_dir():
                    path.unlink()
                else:
                    one.rmdir()  # not where somebody else has put something there


def _in_time(path: Path, look: Callable[[], None]) -> None:
    """On a thread that is left behind if the place hangs."""
    errors: list[Exception] = []

    def run() -> None:
        try:
            look()
        except (OSError, ConfigError) as error:
            errors.append(error)

    thread = threading.Thread(target=run, name="kvtide-look", daemon=True)
    thread.start()
    thread.join(OPEN_S_MAX)
    if thread.is_alive():
        raise ConfigError(f"{path} has not answered for {OPEN_S_MAX:g} s: is its place well?")
    for error in errors:
        if isinstance(error, OSError):
            raise ConfigError(f"{path} cannot be looked at: {reason_of(error)}") from error
        raise error


def _look(path: Path, found: _Found, *, is_shared_dir: bool) -> None:
    found.missing = [one for one in (path, *path.parents) if not os.path.lexists(one)]
    if not is_shared_dir or not path.is_dir():
        return
    shared_dir.refuse_disk(path)
    found.folders = shared_dir.folders_in(path)
    others = sorted(set(os.listdir(path)) - OF_FILE_SYSTEMS)
    if others and not found.folders:
        raise ConfigError(
            f"{path} holds {others[0]!r} and is no shared_dir; give a directory that is one, is"
            " empty, or is not there yet"
        )
