"""Which tiers the settings ask for, opened, in the order in which they are asked.

An optional part cannot stop the start of a node that an engine waits for: where a place cannot be
used, the node goes without it and says so. Whoever serves in the foreground is told instead.
"""

import enum
import logging
import os
import shutil
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from kvtide.core.lending import QUEUE_RATIO_MAX
from kvtide.core.tiering import TierPlan, WritePolicy
from kvtide.errors import ConfigError, KVTideError
from kvtide.settings import NodeConfig
from kvtide.tier_values import DiskConfig
from kvtide.tiers.base import Tier
from kvtide.tiers.disk.directory import parsed_name
from kvtide.tiers.disk.tier import DiskTier

logger = logging.getLogger("kvtide.node")

OPEN_S_MAX = 5.0
"""So long the start of a node waits for a disk: a million records take a second or two."""
CLOSE_S_MAX = 5.0
DISK_RATIO_AUTO = 0.8
"""Of what is free, for `disk_bytes_max: auto`."""


class Way(enum.Enum):
    """Who waits for the node."""

    LAUNCHED = enum.auto()
    """Nobody: an engine started it; what it says goes into its log."""
    FOREGROUND = enum.auto()
    """Whoever ran `kvtide serve`."""


@dataclass(frozen=True, slots=True)
class OpenTier:
    """A tier, and what the machine is told of it."""

    plan: TierPlan
    tier: Tier


def open_tiers(
    config: NodeConfig, host_bytes: int, way: Way, wake: Callable[[], None]
) -> list[OpenTier]:
    """Open what is asked for; `wake` is what the tiers call, from any thread, to be polled.

    Raises:
        ConfigError: in the foreground, where a place cannot be used, or another node has it.
    """
    opened = (_open_disk(one, config, host_bytes, way, wake) for one in config.disks)
    return [one for one in opened if one is not None]


def _open_disk(
    disk: DiskConfig, config: NodeConfig, host_bytes: int, way: Way, wake: Callable[[], None]
) -> OpenTier | None:
    plan = TierPlan(DiskTier.name, WritePolicy(disk.write), config.load_policy == "always")
    opening = _Opening(disk, int(host_bytes * QUEUE_RATIO_MAX), wake)
    try:
        tier = opening.wait()
    except (KVTideError, OSError, RuntimeError) as error:  # the last: no thread is to be had
        if way is Way.FOREGROUND:
            raise
        logger.warning("the node goes without the disk %s: %s", disk.path, error)
        return None
    return OpenTier(plan, tier)


class _Opening:
    """Opens a disk on a thread of its own: a mount that hangs must not keep the node from serving.

    Ownership: `_tier`, `_error` and `_is_given_up` under `_lock`. A thread that hangs is left
    behind; should it come back, it closes what it has opened.
    """

    def __init__(self, disk: DiskConfig, queue_bytes_max: int, wake: Callable[[], None]) -> None:
        self._disk = disk
        self._queue_bytes_max = queue_bytes_max
        self._wake = wake
        self._lock = threading.Lock()
        self._tier: DiskTier | None = None
        self._error: Exception | None = None
        self._is_given_up = False

    def wait(self) -> DiskTier:
        """The tier; what kept it from being opened is raised."""
        thread = threading.Thread(target=self._open, name="kvtide-disk-open", daemon=True)
        thread.start()
        thread.join(OPEN_S_MAX)
        with self._lock:
            self._is_given_up = self._tier is None
            if self._error is not None:
                raise self._error
            if self._tier is None:
                raise ConfigError(
                    f"the disk {self._disk.path} has not answered for {OPEN_S_MAX:g} s: is its"
                    " mount well?"
                )
            return self._tier

    def _open(self) -> None:
        tier, error = None, None
        try:
            tier = DiskTier(
                self._disk.path,
                _disk_bytes(self._disk.path, self._disk.bytes_max),
                self._wake,
                sync=self._disk.sync,
                queue_bytes_max=self._queue_bytes_max,
            )
        except (KVTideError, OSError, RuntimeError) as fault:
            error = fault
        except Exception as fault:
            logger.exception("a fault in kvtide")
            error = ConfigError(f"the disk {self._disk.path} cannot be opened: {fault!r}")
        with self._lock:
            self._tier, self._error = tier, error
            is_wanted = not self._is_given_up
        if tier is not None and not is_wanted:
            tier.close(CLOSE_S_MAX)


def _disk_bytes(path: Path, wanted: int | Literal["auto"]) -> int:
    """The cap in bytes; for `auto` what is free, and what we have there already, count."""
    if wanted != "auto":
        return wanted
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        free = shutil.disk_usage(path).free
        ours = [entry for entry in os.scandir(path) if parsed_name(entry.name) is not None]
        taken = sum(entry.stat().st_blocks * 512 for entry in ours)
    except OSError as error:
        raise ConfigError(
            f"the disk {path} cannot be used: {error.strerror}; correct disk_path"
        ) from error
    return int((free + taken) * DISK_RATIO_AUTO)
