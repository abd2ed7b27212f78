"""What stands at a path before a trial, and what of a trial is taken away after it.

A path that is typed at a prompt may be anything: what is somebody else's is refused before a byte
is written. What was not there before goes, as far as it can be told to be the trial's.
"""

import contextlib
import os
import queue
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from kvtide.errors import ConfigError, reason_of
from kvtide.node.build import OPEN_S_MAX
from kvtide.tiers.files import SystemFiles
from kvtide.tiers.shared_dir.members import Place
from kvtide.tiers.shared_dir.opening import refuse_disk

OF_FILE_SYSTEMS = frozenset({"lost+found", ".snapshot", ".snapshots"})
"""What a mount may hold that nobody has put there."""


@dataclass(frozen=True, slots=True)
class _Before:
    """What stood there before a trial.

    Attributes:
        missing: the path and what is above it, as far as it is not there, deepest first.
        folders: those of a shared directory.
    """

    missing: tuple[Path, ...]
    folders: frozenset[bytes]


@contextlib.contextmanager
def left_as_found(path: Path, *, is_shared_dir: bool) -> Iterator[None]:
    """What is made at the path meanwhile is taken away at the end.

    Raises:
        ConfigError: something else is there, or nothing is to be learned about it.
    """
    before = _in_time(path, lambda: _looked(path, is_shared_dir=is_shared_dir))
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            if is_shared_dir:
                Place(str(path), SystemFiles()).remove_empty(before.folders)
        for one in before.missing:
            with contextlib.suppress(OSError):
                if one == path and not path.is_dir():
                    path.unlink()
                else:
                    one.rmdir()  # not where somebody else has put something there


def _in_time(path: Path, look: Callable[[], _Before]) -> _Before:
    """On a thread that is left behind if the place hangs."""
    answers: queue.SimpleQueue[_Before | OSError | ConfigError] = queue.SimpleQueue()

    def run() -> None:
        try:
            answers.put(look())
        except (OSError, ConfigError) as error:
            answers.put(error)

    threading.Thread(target=run, name="kvtide-look", daemon=True).start()
    try:
        answer = answers.get(timeout=OPEN_S_MAX)
    except queue.Empty:
        raise ConfigError(
            f"{path} has not answered for {OPEN_S_MAX:g} s; see that it is mounted, and that its"
            " server runs"
        ) from None
    if isinstance(answer, OSError):
        raise ConfigError(
            f"{path} cannot be looked at: {reason_of(answer)}; give a directory that this user"
            " may read, or make it so"
        ) from answer
    if isinstance(answer, ConfigError):
        raise answer
    return answer


def _looked(path: Path, *, is_shared_dir: bool) -> _Before:
    missing = tuple(one for one in (path, *path.parents) if not os.path.lexists(one))
    if not is_shared_dir or not path.is_dir():
        return _Before(missing, frozenset())
    refuse_disk(path)
    folders = frozenset(Place(str(path), SystemFiles()).folders())
    others = sorted(set(os.listdir(path)) - OF_FILE_SYSTEMS)
    if others and not folders:
        raise ConfigError(
            f"{path} holds {others[0]!r} and is no shared_dir; give a directory that is one, is"
            " empty, or is not there yet"
        )
    return _Before(missing, folders)
