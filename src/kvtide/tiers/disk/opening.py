"""A disk as an entry of `tiers` asks for it."""

import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

from kvtide.errors import ConfigError
from kvtide.tier_values import DISK
from kvtide.tiers.disk.tier import DiskTier
from kvtide.tiers.disk_names import parsed_name
from kvtide.tiers.registry import TierType

RATIO_AUTO = 0.8
"""Of what is free, for `bytes_max: auto`."""


def open_disk(
    options: Mapping[str, Any], wake: Callable[[], None], queue_bytes_max: int
) -> DiskTier:
    """See `TierType`."""
    return DiskTier(
        options["path"],
        bytes_of(options["path"], options["bytes_max"]),
        wake,
        sync=options["sync"],
        queue_bytes_max=queue_bytes_max,
    )


def bytes_of(path: Path, wanted: int | Literal["auto"]) -> int:
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
            f"the disk {path} cannot be used: {error.strerror}; correct its path"
        ) from error
    return int((free + taken) * RATIO_AUTO)


TYPE = TierType(options=DISK, open=open_disk)
