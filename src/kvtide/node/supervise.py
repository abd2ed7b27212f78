"""When an engine starts a node: not too often, and not for ever.

absent ─► start at once ─► it dies ─► start after 1 s, 2 s, 4 s … 60 s
three in a row that end within a minute of their start: give up, and say where the log is
told to stop on purpose: start nothing, join a node that somebody else starts
"""

import subprocess
from pathlib import Path

from kvtide.node.launch import start_node

PAUSE_S_FIRST, PAUSE_S_MAX = 1.0, 60.0
SHORT_LIFE_S = 60.0
SHORT_LIVES_MAX = 3
COME_UP_S_MAX = 5.0
"""A node that was launched and does not listen by then has ended."""


class NodeStarter:
    """Decides and starts; owned by one thread. Times are seconds of one monotonic clock."""

    def __init__(self, runtime_dir: Path, settings: dict[str, str] | None = None) -> None:
        """`settings`: variables that hold for the node, from `Config.node_environment`."""
        self._runtime_dir = runtime_dir
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
            self._ended(now_s)
        if self._started_s is not None or self.has_given_up or now_s < self._next_s:
            return
        self._started_s = now_s
        try:
            start_node(self._runtime_dir, self._settings)
            self.error = ""
        except (OSError, subprocess.SubprocessError) as error:
            self.error = str(error)
            self._ended(now_s)

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

    def _pause(self, now_s: float) -> None:
        self._pause_s = min(max(PAUSE_S_FIRST, self._pause_s * 2), PAUSE_S_MAX)
        self._next_s = now_s + self._pause_s
