"""Takes damaged records away, while no node has the directory."""

import threading
from collections.abc import Iterable
from pathlib import Path

from kvtide.tiers.disk.tier import DiskTier

CLOSE_S_MAX = 60.0
BYTES_MAX = 1 << 62
"""No cap: a repair evicts nothing."""


def remove(path: Path, keys: Iterable[bytes]) -> int:
    """Take these records away, and what lies behind them; how many there were.

    Raises:
        ConfigError: a node has the directory, or it cannot be used.
    """
    woken = threading.Event()
    tier = DiskTier(path, BYTES_MAX, woken.set, floor_bytes=0)
    try:
        return tier.remove(keys)
    finally:
        tier.close(CLOSE_S_MAX)
        tier.poll()
