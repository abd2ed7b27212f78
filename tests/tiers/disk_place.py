"""Disk tiers for tests: on a file system that can fail, small, and measured from outside."""

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from kvtide.codec.record import header_bytes
from kvtide.core.records import Record
from kvtide.testing.faulty_files import FaultyFiles
from kvtide.testing.tier_drive import DrivenTier
from kvtide.testing.tier_records import chain_of, layout_of, root_of, text
from kvtide.tiers.base import LoadOutcome
from kvtide.tiers.disk.tier import DiskTier
from kvtide.units import MiB

QUEUE_BYTES_MAX = 8 * MiB
WAIT_S = 30.0
ROOT = root_of()
SMALL = layout_of(4096, 8192)
TINY = layout_of(4096)


def open_disk(
    path: Path, wake: Callable[[], None] = lambda: None, bytes_max: int = 8 * MiB, **more: Any
) -> DiskTier:
    """A tier with a file system of its own to fail."""
    more.setdefault("files", FaultyFiles())
    more.setdefault("queue_bytes_max", QUEUE_BYTES_MAX)
    more.setdefault("floor_bytes", 0)
    return DiskTier(path, bytes_max, wake, **more)


@contextmanager
def driven(path: Path, bytes_max: int = 8 * MiB, **more: Any) -> Iterator[DrivenTier]:
    """A tier whose promises are watched; closed at the end."""
    woken = threading.Event()
    tier = DrivenTier(open_disk(path, woken.set, bytes_max, **more), woken, WAIT_S)
    try:
        yield tier
    finally:
        tier.close(WAIT_S)
    tier.check_quiet()


def disk_of(tier: DrivenTier) -> DiskTier:
    """The tier itself."""
    assert isinstance(tier.tier, DiskTier)
    return tier.tier


def settle(tier: DrivenTier) -> None:
    """Wait until nothing is being given back, or copied."""
    disk = disk_of(tier)
    while disk._room.is_removing or disk._merging.is_busy:
        assert disk._workers.wait_result(WAIT_S)
        tier.poll()


def keep_few(monkeypatch: pytest.MonkeyPatch, count: int = 1) -> None:
    """More segments than these are many: records of those that hold little are put together."""
    monkeypatch.setattr("kvtide.tiers.disk.merging.SEGMENTS_RATIO", 0)
    monkeypatch.setattr("kvtide.tiers.disk.merging.SEGMENTS_SPARE", count)


def tails(count: int, first: int = 0) -> list[Record]:
    """Records of one block, each right below the root."""
    return [chain_of(ROOT, TINY, text(number, 1))[0] for number in range(first, first + count)]


def keep(path: Path, records: Sequence[Record], **more: Any) -> dict[bytes, tuple[Path, int]]:
    """Leave a closed directory with these; where each lies."""
    with driven(path, **more) as tier:
        tier.keep(records)
        return {record.key: place_of(disk_of(tier), record) for record in records}


def assert_holds(tier: DrivenTier, good: Sequence[Record], bad: Sequence[Record]) -> None:
    """The good ones are found and bring every byte; the bad ones are misses, if need be after
    one load, and nothing else is missing then."""
    for record in bad:
        assert tier.load(record) in (LoadOutcome.CORRUPT, LoadOutcome.ABSENT)
        assert tier.load(record) is LoadOutcome.ABSENT
        assert not tier.is_there(record)
    for record in good:
        assert tier.is_there(record)
        assert tier.load(record) is LoadOutcome.LOADED
    assert tier.tier.statistics().records == len(good)
    disk_of(tier).check_integrity()


def files_of(tier: DiskTier) -> FaultyFiles:
    """What its faults are injected by."""
    files = tier._directory.files
    assert isinstance(files, FaultyFiles)
    return files


def bytes_taken(path: Path) -> int:
    """What all files below take, as the file system counts them."""
    total = 0
    for file in path.iterdir():
        try:
            total += file.stat().st_blocks * 512
        except FileNotFoundError:
            continue  # unlinked meanwhile
    return total


def open_files() -> list[str]:
    """What descriptors of this process lead to."""
    found = []
    for number in os.listdir("/proc/self/fd"):
        try:
            found.append(os.readlink(f"/proc/self/fd/{number}"))
        except FileNotFoundError:
            continue  # closed meanwhile
    return found


def place_of(tier: DiskTier, record: Record) -> tuple[Path, int]:
    """The segment file that holds a record, and where it begins."""
    place = tier._catalog.place(tier._catalog.index[record.key])
    return tier.path / f"{place.segment:08d}.segment", place.offset_bytes


def payload_offset(record: Record) -> int:
    """Where the first cell of a record is, from its beginning."""
    return header_bytes(record.layout.shard_count, record.blocks)


def flip(path: Path, at_bytes: int, mask: int = 0x01) -> None:
    """Change bits of one byte of a file."""
    with path.open("r+b") as file:
        file.seek(at_bytes)
        before = file.read(1)[0]
        file.seek(at_bytes)
        file.write(bytes([before ^ mask]))
