"""What is set aside before a byte is written, and what is left to others."""

import shutil
from pathlib import Path

import pytest

from kvtide.testing.faulty_files import FaultyFiles
from kvtide.tiers.disk import rows as logs
from kvtide.tiers.disk.room import EVICTIONS_MAX
from kvtide.tiers.disk.rows import Kind
from kvtide.tiers.disk.space import EXTENTS_BYTES, PAGE, STANDING_BYTES, Space
from kvtide.tiers.disk.tier import DiskTier
from kvtide.units import GiB, KiB, MiB, round_up
from tests.tiers.disk_place import ROOT, TINY, bytes_taken, disk_of, driven, tails

CAP, FLOOR = 64 * MiB, 4 * MiB


@pytest.fixture
def space() -> Space:
    """Empty, on a drive with room."""
    made = Space(CAP, None)
    made.free_bytes, made.floor_bytes = GiB, FLOOR
    return made


def test_room_is_what_nobody_was_promised(space: Space) -> None:
    """Operations under way, the active segment's index, and what removals take."""
    assert space.is_room_for(CAP - STANDING_BYTES)
    assert not space.is_room_for(CAP - STANDING_BYTES + 1)
    space.reserved_bytes = MiB
    assert space.is_room_for(CAP - STANDING_BYTES - MiB)
    assert not space.is_room_for(CAP - STANDING_BYTES - MiB + 1)
    segment = space.begin()
    for _ in range(1_000):
        space.place(segment, Kind(ROOT, TINY), 8 * KiB, 1)
    index_bytes = segment.index_bytes_max
    assert index_bytes > 100 * KiB
    assert space.is_room_for(CAP - STANDING_BYTES - MiB - index_bytes)
    assert not space.is_room_for(CAP - STANDING_BYTES - MiB - index_bytes + 1)


def test_the_floor_is_kept_by_what_was_promised_too(space: Space) -> None:
    space.free_bytes = FLOOR + 8 * MiB
    assert space.is_above_floor(8 * MiB - STANDING_BYTES)
    assert not space.is_above_floor(8 * MiB - STANDING_BYTES + 1)
    space.reserved_bytes = MiB
    assert not space.is_above_floor(8 * MiB - STANDING_BYTES)
    assert not space.is_room_for(8 * MiB - STANDING_BYTES)
    assert space.is_room_for(7 * MiB - STANDING_BYTES)


def test_a_cap_of_auto_grows_with_the_drive_and_its_segments_with_it(space: Space) -> None:
    """It never becomes less: what others take of the drive later is what the floor is for."""
    space.bytes_max = 0
    for free_bytes, cap in ((0, 0), (GiB, GiB // 2), (MiB, GiB // 2), (64 * GiB, 32 * GiB)):
        space.free_bytes = free_bytes
        space.asked_drive()
        assert space.grow(0.5) == space.bytes_max == cap
    assert space.segment_bytes == GiB
    assert space.grow(0.0) == 32 * GiB


def test_what_always_stands_by_is_enough_for_two_removals() -> None:
    """Of all that one call evicts: a row, which may lie across two pages, and what the maps of log
    and segment grow by."""
    row = logs.gone_row(1, logs.OPENING_BYTES, list(range(EVICTIONS_MAX)))
    assert 2 * (round_up(len(row), PAGE) + PAGE + 2 * EXTENTS_BYTES) <= STANDING_BYTES


def test_by_default_two_hundredths_of_the_drive_or_a_gibibyte_are_left_to_others(
    tmp_path: Path,
) -> None:
    tier = DiskTier(tmp_path / "kv", CAP, lambda: None)
    total_bytes = shutil.disk_usage(tmp_path).total
    assert tier._space.floor_bytes == max(GiB, int(0.02 * total_bytes))
    tier.close(30)


class Sealing(FaultyFiles):
    """Notes what all files take when an index is complete and its log is still there."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path
        self.taken: list[int] = []

    def rename(self, path: str, to: str) -> None:
        if to.endswith(".index"):
            self.taken.append(bytes_taken(self.path))
        super().rename(path, to)


def test_an_index_is_written_below_the_cap(tmp_path: Path) -> None:
    """Of a segment that has taken all there was, and is closed only at the end."""
    files = Sealing(tmp_path / "kv")
    cap = 12 * MiB
    with driven(tmp_path / "kv", cap, files=files, segment_bytes=64 * MiB) as tier:
        jobs = [tier.submit_store(record) for record in tails(1_480)]
        tier.wait(jobs)
        assert tier.tier.statistics().evicted > 0, "it is full"
        index_bytes = disk_of(tier)._space.segments[1].index_bytes_max
        assert index_bytes > 2 * STANDING_BYTES
        tier.close(30)
    assert files.taken
    assert max(files.taken) <= cap
