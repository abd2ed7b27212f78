"""Members of a shared directory for tests: small, on file systems that can fail one by one."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kvtide.core.records import Record
from kvtide.testing.faulty_files import FaultyFiles
from kvtide.testing.tier_drive import DrivenTier
from kvtide.testing.tier_records import chain_of, layout_of, root_of, text
from kvtide.tiers.shared_dir.tier import SharedDirTier
from kvtide.units import KiB, MiB

QUEUE_BYTES_MAX = 8 * MiB
WAIT_S = 30.0
ROOT = root_of()
SMALL = layout_of(4096, 8192)
TINY = layout_of(4096)
LARGE = layout_of(64 * KiB)


class LateFiles(FaultyFiles):
    """A server that renames, and whose answer is lost: the client asks again, and hears that there
    is nothing to rename."""

    def __init__(self, path_part: str) -> None:
        """Once, where the name that is given has this in it."""
        super().__init__()
        self._late = path_part

    def rename(self, path: str, to: str) -> None:
        super().rename(path, to)
        if self._late and self._late in to:
            self._late = ""
            super().rename(path, to)


def open_shared(
    path: Path, wake: Callable[[], None] = lambda: None, bytes_max: int = 8 * MiB, **more: Any
) -> SharedDirTier:
    """A member with a file system of its own to fail."""
    more.setdefault("files", FaultyFiles())
    more.setdefault("queue_bytes_max", QUEUE_BYTES_MAX)
    return SharedDirTier(path, bytes_max, wake, **more)


@contextmanager
def driven(path: Path, bytes_max: int = 8 * MiB, **more: Any) -> Iterator[DrivenTier]:
    """A member whose promises are watched; closed at the end."""
    woken = threading.Event()
    tier = DrivenTier(open_shared(path, woken.set, bytes_max, **more), woken, WAIT_S)
    try:
        yield tier
    finally:
        tier.close(WAIT_S)
    tier.check_quiet()


def shared_of(tier: DrivenTier) -> SharedDirTier:
    """The tier itself."""
    assert isinstance(tier.tier, SharedDirTier)
    return tier.tier


def files_of(tier: SharedDirTier) -> FaultyFiles:
    """What its faults are injected by."""
    files = tier._place.files
    assert isinstance(files, FaultyFiles)
    return files


def folder_of(tier: SharedDirTier) -> Path:
    """Its own folder."""
    return tier.path / tier._place.own.hex()


def file_of(tier: SharedDirTier, record: Record) -> Path:
    """Where it keeps a record."""
    return folder_of(tier) / record.key.hex()[:2] / record.key.hex()


def bytes_taken(folder: Path) -> int:
    """What all files of a folder take, as the file system counts them."""
    total = 0
    for file in folder.rglob("*"):
        try:
            total += 0 if file.is_dir() else file.stat().st_blocks * 512
        except FileNotFoundError:
            continue  # removed meanwhile
    return total


def look(tier: DrivenTier) -> None:
    """Let it learn what others have done: a question that it cannot answer makes it look."""
    tier.pass_time(100)
    never = chain_of(ROOT, TINY, text(9_999, 1))[0]
    assert not tier.is_there(never)


def tails(count: int, first: int = 0) -> list[Record]:
    """Records of one block, each right below the root."""
    return [chain_of(ROOT, TINY, text(number, 1))[0] for number in range(first, first + count)]


def wait_quiet(tier: DrivenTier) -> None:
    """Until its threads have done all that they were asked for."""
    workers = shared_of(tier)._workers
    while workers.are_writing or workers._reads or workers.running_reads() or workers.results:
        tier.poll_for(0.01)


def wait_on(tier: DrivenTier) -> None:
    """Until it works again, by itself."""
    while tier.tier.statistics().state != "on":
        tier.pass_time(60_000)
        tier.poll_for(0.02)
