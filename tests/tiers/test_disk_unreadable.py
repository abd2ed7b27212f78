"""A spot that the drive cannot read any more costs the record on it, and nothing else."""

import errno
import logging
from pathlib import Path

import pytest

from kvtide.testing.faulty_files import Call
from kvtide.testing.tier_drive import DrivenTier
from kvtide.testing.tier_records import chain_of, layout_of, text
from kvtide.tiers.base import LoadOutcome, StoreOutcome
from kvtide.tiers.breaker import FAILURES_MAX
from kvtide.tiers.disk import unreadable
from kvtide.units import KiB
from tests.tiers.disk_place import (
    ROOT,
    assert_holds,
    disk_of,
    driven,
    files_of,
    place_of,
    settle,
)

CHUNKS = [chain_of(ROOT, layout_of(64 * KiB), text(number, 4))[0] for number in range(8)]
BAD, *GOOD = CHUNKS


def load_badly(tier: DrivenTier) -> LoadOutcome:
    """Load the bad one: its pages cannot be read, but for the first, as a probe does."""
    files_of(disk_of(tier)).fail(Call.READ, errno.EIO, path_part=".segment", bytes_over=4 * KiB)
    outcome = tier.load(BAD)
    files_of(disk_of(tier)).heal()
    return outcome


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What a user is told."""
    return [one.getMessage() for one in caplog.records if one.levelno >= logging.WARNING]


def test_a_record_that_cannot_be_read_is_removed_and_can_be_stored_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Twice in a row, while others can: it would be in the way of what is computed anew."""
    with driven(tmp_path / "kv") as tier:
        tier.keep(CHUNKS)
        assert load_badly(tier) is LoadOutcome.FAILED
        assert tier.load(GOOD[0]) is LoadOutcome.LOADED
        assert not warnings(caplog)
        assert load_badly(tier) is LoadOutcome.CORRUPT
        [line] = warnings(caplog)
        assert f"errno {errno.EIO}" in line
        assert "the record is removed" in line
        assert tier.tier.statistics().loaded["corrupt"] == 1
        assert not tier.is_there(BAD)
        settle(tier)
        assert tier.store([BAD]) == [StoreOutcome.STORED]
        assert_holds(tier, CHUNKS, [])


def test_a_record_that_is_read_in_between_stays(tmp_path: Path) -> None:
    with driven(tmp_path / "kv") as tier:
        tier.keep(CHUNKS)
        for _ in range(3):
            assert load_badly(tier) is LoadOutcome.FAILED
            assert tier.load(GOOD[0]) is LoadOutcome.LOADED
            assert tier.load(BAD) is LoadOutcome.LOADED
        assert_holds(tier, CHUNKS, [])


def test_a_place_that_fails_loses_no_record(tmp_path: Path) -> None:
    """Each is asked for again and again; then all is well, and all are there."""
    with driven(tmp_path / "kv") as tier:
        tier.keep(CHUNKS)
        files_of(disk_of(tier)).fail_all(errno.EIO)
        for _ in range(4):
            for record in CHUNKS:
                assert tier.load(record) in (LoadOutcome.FAILED, LoadOutcome.BROKEN)
            tier.pass_time(60_000)
            assert disk_of(tier)._workers.wait_result(30)
            tier.poll()
        files_of(disk_of(tier)).heal()
        while tier.tier.statistics().state != "on":
            tier.pass_time(60_000)
            tier.poll_for(0.05)
        assert_holds(tier, CHUNKS, [])


def test_what_is_asked_for_alone_is_judged_by_a_probe_of_another(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Nobody else asks; the breaker would be opened by one record for ever."""
    with driven(tmp_path / "kv") as tier:
        tier.keep(CHUNKS)
        assert [load_badly(tier) for _ in range(FAILURES_MAX)] == [LoadOutcome.FAILED] * 5
        assert tier.tier.statistics().state != "on"
        tier.pass_time(1_000)
        while tier.tier.statistics().state != "on":
            tier.poll_for(0.05)
        assert load_badly(tier) is LoadOutcome.CORRUPT
        assert len(warnings(caplog)) == 2
        assert_holds(tier, GOOD, [BAD])
        assert len(warnings(caplog)) == 3, "reads stop, the record is removed, reads work again"


def test_one_page_that_is_read_well_condemns_one_record(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A drive that gives a page now and then, and no more: each probe goes well, no load does."""
    with driven(tmp_path / "kv") as tier:
        tier.keep(CHUNKS)
        disk = disk_of(tier)
        files_of(disk).fail(Call.READ, errno.EIO, bytes_over=4 * KiB)
        assert [tier.load(one) for one in CHUNKS[:5]] == [LoadOutcome.FAILED] * FAILURES_MAX
        tier.pass_time(1_000)
        while disk._reads.is_probing:
            tier.poll_for(0.05)
        assert [tier.load(one) for one in CHUNKS[:3]] == [
            LoadOutcome.CORRUPT,
            LoadOutcome.FAILED,
            LoadOutcome.BROKEN,
        ]
        assert not any("work again" in line for line in warnings(caplog))
        tier.pass_time(1_999)
        assert not disk._reads.is_probing, "the pause is longer: nothing has worked"
        tier.pass_time(1)
        assert disk._reads.is_probing
        files_of(disk).heal()
        while tier.tier.statistics().state != "on":
            tier.poll_for(0.05)
        assert_holds(tier, GOOD, [])


def test_a_probe_reads_no_record_that_could_not_be_read(tmp_path: Path) -> None:
    """The drive is well but for that one, which happens to be the first."""
    with driven(tmp_path / "kv") as tier:
        tier.keep(CHUNKS)
        disk = disk_of(tier)
        load_badly(tier)
        good = disk._catalog.place(disk._catalog.index[GOOD[0].key])
        assert disk._unreadable.place_to_probe(disk._catalog) == good


@pytest.mark.parametrize("code", [errno.EIO, errno.EACCES])
def test_a_probe_that_fails_is_not_of_the_same_record_again(tmp_path: Path, code: int) -> None:
    """Nobody has loaded the first one, so it is not known that its file cannot be read."""
    with driven(tmp_path / "kv", segment_bytes=128 * KiB) as tier:
        tier.keep(CHUNKS)
        disk = disk_of(tier)
        files = files_of(disk)
        files.fail(Call.READ, errno.EIO)
        assert [tier.load(one) for one in GOOD[2:]] == [LoadOutcome.FAILED] * FAILURES_MAX
        files.heal()
        bad, _ = place_of(disk, BAD)
        call = Call.READ if code == errno.EIO else Call.OPEN
        files.fail(call, code, path_part=bad.name)
        for _ in range(len(CHUNKS)):
            tier.pass_time(60_000)
            while disk._reads.is_probing:
                tier.poll_for(0.05)
        assert tier.tier.statistics().state == "on"
        assert tier.load(GOOD[-1]) is LoadOutcome.LOADED
        assert tier.load(BAD) is LoadOutcome.FAILED, "its first load: a probe condemns nothing"
        files.heal()
        assert_holds(tier, CHUNKS, [])


def test_what_is_remembered_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unreadable, "SUSPECTS_MAX", 3)
    with driven(tmp_path / "kv") as tier:
        tier.keep(CHUNKS)
        remembered = disk_of(tier)._unreadable
        for record in CHUNKS[:4]:
            files_of(disk_of(tier)).fail(Call.READ, errno.EIO, count=1)
            assert tier.load(record) is LoadOutcome.FAILED
        assert [one.key in remembered._suspects for one in CHUNKS[:4]] == [False, True, True, True]
