"""When an engine starts a node: not too often, and not for ever.

    absent ─► start at once ─► it dies ─► start after 1 s, 2 s, 4 s … 60 s
    three in a row that end within a minute, and served nobody: give up, and say where the log is
    stopped on purpose: start nothing, join a node that somebody else starts

An engine that is connected is told that the node is stopped on purpose; one that is not finds a
file that the node leaves, and that the next one takes away. Either counts for engines that lived
then: a later one starts a node.

A start that only has to wait is no short life: while another node holds the lock (it ends, or
hangs), or where there is no memory to spare.
"""

import fcntl
import os
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from kvtide.errors import HostMemoryError
from kvtide.memory.probe import spare_bytes
from kvtide.node.launch import start_node
from kvtide.units import format_bytes
from kvtide.values import HOST_BYTES_MIN
from kvtide.wire.places import Places

PAUSE_S_FIRST, PAUSE_S_MAX = 1.0, 60.0
"""Between two starts: the second comes soon enough for T_heal, the last ones cost nothing."""
SHORT_LIFE_S = 60.0
"""Who ends sooner has hardly served: it dies of the start, not of what happened since."""
SHORT_LIVES_MAX = 3
"""One may be bad luck, two a neighbour's; after that, somebody has to look at the log."""
COME_UP_S_MAX = 5.0
"""A node that was launched and does not listen by then has ended."""


class NodeStarter:
    """Decides and starts; owned by one thread. Times are seconds of one monotonic clock."""

    def __init__(
        self,
        runtime_dir: Path,
        settings: dict[str, str] | None = None,
        spare_bytes: Callable[[], int] = spare_bytes,
    ) -> None:
        """`settings`: variables that hold for the node, from `Config.node_environment`."""
        self._places = Places(runtime_dir)
        self._spare_bytes = spare_bytes
        self._born_s = time.time()  # as files' times are
        self._settings = settings or {}
        self._started_s: float | None = None
        self._pause_s = 0.0
        self._next_s = 0.0
        self.short_lives = 0
        self.error = ""

    @property
    def has_given_up(self) -> bool:
        """Nodes end at their start; nothing more is tried."""
        return self.short_lives >= SHORT_LIVES_MAX

    def absent(self, now_s: float) -> None:
        """No node listens: start one if it is time."""
        if self._started_s is not None and now_s - self._started_s >= COME_UP_S_MAX:
            if self._is_lock_held():
                self._started_s = None
                self._pause(now_s)
            else:
                self._ended(now_s)
        if self._started_s is not None or self.has_given_up or now_s < self._next_s:
            return
        if self._is_stopped():
            return
        self.error = self._shortage()
        if self.error:
            self._pause(now_s)
            return
        self._started_s = now_s
        try:
            start_node(self._places.directory, self._settings)
        except (OSError, subprocess.SubprocessError) as error:
            words = getattr(error, "stderr", None)
            self.error = f"{error}: {words.strip()}" if words else str(error)
            self._ended(now_s)

    def served(self) -> None:
        """An engine is served: what ends from now on does not die of its start."""
        self.short_lives = 0

    def dead(self, now_s: float) -> None:
        """The node that served us has died."""
        if self._started_s is None:
            self._pause(now_s)
        else:
            self._ended(now_s)

    def _ended(self, now_s: float) -> None:
        """The node that we started is gone."""
        assert self._started_s is not None
        if now_s - self._started_s < SHORT_LIFE_S:
            self.short_lives += 1
        else:
            self.short_lives = 0
            self._pause_s = 0.0
        self._started_s = None
        self._pause(now_s)

    def _is_stopped(self) -> bool:
        """A node was stopped on purpose in our time, and nobody has started one since."""
        try:
            return self._places.stopped.stat().st_mtime >= self._born_s
        except OSError:
            return False

    def _is_lock_held(self) -> bool:
        """Whether there is a node, though it does not listen."""
        try:
            descriptor = os.open(self._places.lock, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return False
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            return True
        finally:
            os.close(descriptor)
        return False

    def _shortage(self) -> str:
        """Why a node would find no memory here; empty where it finds some."""
        try:
            spare = self._spare_bytes()
        except (HostMemoryError, OSError, ValueError):
            return ""  # the node looks, too
        if spare >= HOST_BYTES_MIN:
            return ""
        return (
            f"no node is started: {format_bytes(max(0, spare))} of memory are to spare, a cache"
            f" takes {format_bytes(HOST_BYTES_MIN)} at least; free some, or raise the limit on it"
        )

    def _pause(self, now_s: float) -> None:
        self._pause_s = min(max(PAUSE_S_FIRST, self._pause_s * 2), PAUSE_S_MAX)
        self._next_s = now_s + self._pause_s
