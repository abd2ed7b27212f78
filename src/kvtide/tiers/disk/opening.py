"""A disk as an entry of `tiers` asks for it."""

import os
import shutil
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

from kvtide.errors import ConfigError
from kvtide.tier_values import DISK
from kvtide.tiers.disk.tier import DiskTier
from kvtide.tiers.disk_names import parsed_name
from kvtide.tiers.files import SystemFiles
from kvtide.tiers.registry import TierType
from kvtide.tiers.shared_names import is_of_members

RATIO_AUTO = 0.8
"""Of what is free, for `bytes_max: auto`."""


def open_disk(
    options: Mapping[str, Any], wake: Callable[[], None], queue_bytes_max: int
) -> DiskTier:
    """See `TierType`."""
    _refuse_shared_dir(options["path"])
    return DiskTier(
        options["path"],
        bytes_of(options["path"], options["bytes_max"]),
        wake,
        sync=options["sync"],
        queue_bytes_max=queue_bytes_max,
        auto_ratio=RATIO_AUTO if options["bytes_max"] == "auto" else 0.0,
    )


def _refuse_shared_dir(path: Path) -> None:
    """Nothing is written where members of a shared directory are.

    Raises:
        ConfigError: one is, or was, there.
    """
    with suppress(OSError):  # not there, or not for us: that is told when it is opened
        if is_of_members(path):
            raise ConfigError(
                f"the disk {path} is the directory of a shared_dir, which others may have; name"
                " another, or a tier of type shared_dir"
            )


def bytes_of(path: Path, wanted: int | Literal["auto"]) -> int:
    """The cap in bytes; for `auto` what is free, and what we have there already, count."""
    if wanted != "auto":
        return wanted
    try:
        SystemFiles().make_directory(str(path))
        free = shutil.disk_usage(path).free
        ours = [entry for entry in os.scandir(path) if parsed_name(entry.name) is not None]
        taken = sum(entry.stat().st_blocks * 512 for entry in ours)
    except OSError as error:
        raise ConfigError(
            f"the disk {path} cannot be used: {error.strerror}; correct its path"
        ) from error
    return int((free + taken) * RATIO_AUTO)


TYPE = TierType(options=DISK, open=open_disk)
