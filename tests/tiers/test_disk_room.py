"""Room that comes back: holes, segments that go, indexes that are written anew."""

import errno
import logging
from pathlib import Path

import pytest

from kvtide.testing.faulty_files import Call
from kvtide.testing.tier_drive import DrivenTier
from kvtide.tiers.disk.room import REWRITE_ROWS_MIN
from kvtide.units import KiB
from tests.tiers.disk_place import assert_holds, disk_of, driven, files_of, settle, tails

GONE = REWRITE_ROWS_MIN + 1


@pytest.fixture
def kv(tmp_path: Path) -> Path:
    """Where the tier is."""
    return tmp_path / "kv"


def take_away(tier: DrivenTier, first: int, count: int) -> None:
    """So many records, from this number on, in one removal."""
    assert disk_of(tier).remove(record.key for record in tails(count, first)) == count


@pytest.mark.parametrize("call", [Call.RENAME, Call.READ])
def test_an_index_that_cannot_be_written_anew_waits_for_the_next_removal(
    kv: Path, call: Call, caplog: pytest.LogCaptureFixture
) -> None:
    """It is not tried again and again meanwhile, and told of once; then it is written."""
    records = tails(100)
    with driven(kv, segment_bytes=1024 * KiB) as tier:
        disk, faults = disk_of(tier), files_of(disk_of(tier))
        tier.keep(records)
        disk._room.roll()
        while not disk._space.segments[1].is_sealed:
            tier.poll_for(0.01)
        caplog.clear()
        faults.fail(call, errno.EIO, path_part=".index")
        for turn in range(2):
            with faults.stalled(call):
                take_away(tier, *[(0, GONE), (GONE, 1)][turn])
                while not faults._waiting:
                    tier.poll_for(0.01)
            assert disk._workers.wait_result(30)
            tier.poll()
            assert not disk._space.segments[1].is_rewriting, turn
        assert len([one for one in caplog.records if one.levelno == logging.WARNING]) == 1
        assert "index of segment 1 could" in caplog.text
        faults.heal()
        take_away(tier, GONE + 1, 1)
        while disk._space.segments[1].indexed != len(records) - GONE - 2:
            tier.poll_for(0.01)
        settle(tier)
        assert_holds(tier, records[GONE + 2 :], [])
