"""A shared directory as an entry of `tiers` asks for it."""

import os
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from kvtide.errors import ConfigError, reason_of
from kvtide.tier_values import SHARED_DIR
from kvtide.tiers.disk_names import is_of_a_disk
from kvtide.tiers.files import SystemFiles
from kvtide.tiers.registry import TierType
from kvtide.tiers.shared_dir.journal import JOURNAL
from kvtide.tiers.shared_dir.members import OWNER, Place
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


def folders_in(path: Path) -> set[bytes]:
    """Members that have a folder there. Raises OSError."""
    place = Place(str(path), SystemFiles())
    return {
        member
        for member in place.members()
        if any(os.path.lexists(place.at(member, name)) for name in (OWNER, JOURNAL))
    }


def remove_empty_folders(path: Path, but: Collection[bytes]) -> None:
    """Take away folders that nobody owns and that hold no record, but those of these members.

    Raises:
        OSError: the directory cannot be read.
    """
    for member in folders_in(path).difference(but):
        with suppress(OSError):
            _remove_if_empty(path / member.hex())


def _remove_if_empty(folder: Path) -> None:
    owner = folder / OWNER
    owner.open("x").close()  # taken, as members take one: it is nobody else's from here on
    try:
        below = [folder / name for name in os.listdir(folder) if name not in (OWNER, JOURNAL)]
        if any(os.listdir(one) for one in below):
            return
        for one in below:
            one.rmdir()
        (folder / JOURNAL).unlink()
    finally:
        owner.unlink()
    folder.rmdir()


TYPE = TierType(options=SHARED_DIR, open=open_shared_dir, schemes=("file",), url_option="path")
