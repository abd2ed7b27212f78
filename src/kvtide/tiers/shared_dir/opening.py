"""A shared directory as an entry of `tiers` asks for it."""

from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from kvtide.errors import ConfigError, reason_of
from kvtide.tier_values import SHARED_DIR
from kvtide.tiers.disk_names import is_of_a_disk
from kvtide.tiers.registry import TierType
from kvtide.tiers.shared_dir.tier import SharedDirTier


def open_shared_dir(
    options: Mapping[str, Any], wake: Callable[[], None], queue_bytes_max: int
) -> SharedDirTier:
    """See `TierType`."""
    path = options["path"]
    refuse_disk(path)
    try:
        return SharedDirTier(path, options["bytes_max"], wake, queue_bytes_max=queue_bytes_max)
    except ConfigError as error:
        if not isinstance(error.__cause__, OSError):
            raise
        raise ConfigError(
            f"shared_dir {path} cannot be used: {reason_of(error.__cause__)}; name a directory"
            " that this user may write to"
        ) from error


def refuse_disk(path: Path) -> None:
    """Nothing is written where the disk of a node is.

    Raises:
        ConfigError: one is, or was, there.
    """
    with suppress(OSError):  # not there, or not for us: that is told when it is opened
        if is_of_a_disk(path):
            raise ConfigError(
                f"shared_dir {path} is the directory of a disk, which one node has alone; name"
                " another, or a tier of type disk"
            )


TYPE = TierType(options=SHARED_DIR, open=open_shared_dir, schemes=("file",), url_option="path")
