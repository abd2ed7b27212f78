"""Segments stay few: what those hold that hold little is put together."""

import errno
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest

from kvtide.core.records import Record
from kvtide.testing.faulty_files import Call
from kvtide.testing.tier_drive import DrivenTier
from kvtide.testing.tier_records import chain_of, root_of, text
from kvtide.tiers.base import LoadOutcome, StoreOutcome
from kvtide.tiers.disk.check import check
from kvtide.tiers.disk.cleared import told_by
from kvtide.tiers.disk.merging import PAUSE_MS, SEGMENTS_RATIO, SEGMENTS_SPARE
from kvtide.units import MiB
from tests.tiers.disk_place import (
    ROOT,
    SMALL,
    TINY,
    assert_holds,
    bytes_taken,
    disk_of,
    driven,
    files_of,
    flip,
    keep,
    keep_few,
    payload_offset,
    place_of,
    settle,
    tails,
)

FEW = 3
SALTED = root_of(salt="cleared")


def segments_of(kv: Path) -> int:
    return len(list(kv.glob("*.segment")))


def lives(kv: Path, records: Sequence[Record]) -> None:
    """One after the other, each of one record."""
    for record in records:
        keep(kv, [record])
    assert segments_of(kv) == len(records)


def merge(tier: DrivenTier) -> None:
    """Wait until nothing more is copied."""
    disk = disk_of(tier)
    while disk._merging.is_busy or disk._room.is_removing:
        tier.poll_for(0.1)


@pytest.fixture
def chain() -> list[Record]:
    """Records that stand below one another."""
    return chain_of(ROOT, SMALL, text(1, 22))


@pytest.fixture
def kv(tmp_path: Path, chain: list[Record]) -> Path:
    """What so many lives have left."""
    lives(tmp_path / "kv", chain)
    return tmp_path / "kv"


def test_records_of_many_lives_are_put_together(
    kv: Path, chain: list[Record], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every byte of them is there after it, and after the next start; nobody sees more of it."""
    keep_few(monkeypatch, FEW)
    for _ in range(2):
        with driven(kv) as tier:
            merge(tier)
            assert segments_of(kv) <= FEW
            assert tier.tier.statistics().bytes_used == bytes_taken(kv)
            numbers = tier.tier.statistics()
            assert (numbers.loaded, numbers.stored) == ({}, {})
            assert tier.find(chain[:-1], chain[-1].digests) == chain
            assert_holds(tier, chain, [])
        assert [one.fault for one in check(kv)] == [""] * len(chain)


def test_a_bound_is_above_what_full_segments_need(tmp_path: Path) -> None:
    """So what is full is never copied."""
    with driven(tmp_path / "kv", 64 * MiB, segment_bytes=MiB) as tier:
        merging, space = disk_of(tier)._merging, disk_of(tier)._space
        wanted = SEGMENTS_SPARE + SEGMENTS_RATIO * 64
        for _ in range(wanted):
            space.begin()
            space.active = None
        assert not merging._is_many
        space.begin()
        assert merging._is_many
        space.active = None
        space.segments.clear()


def test_a_kill_before_the_source_of_a_copy_is_gone_leaves_one_of_them(
    kv: Path, chain: list[Record], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep_few(monkeypatch, FEW)
    with driven(kv) as tier:
        files_of(disk_of(tier)).stall(Call.UNLINK, path_part=".segment")
        merging, catalog = disk_of(tier)._merging, disk_of(tier)._catalog
        while merging.is_busy:
            tier.poll_for(0.1)
        copied = sum(catalog.place(row).segment > len(chain) for row in catalog.index.values())
        assert copied > FEW
        assert segments_of(kv) > len(chain)
        shutil.copytree(kv, tmp_path / "killed")
        files_of(disk_of(tier)).release()
    monkeypatch.undo()
    with driven(tmp_path / "killed") as tier:
        settle(tier)
        assert segments_of(tmp_path / "killed") == len(chain) - copied + 1
        assert_holds(tier, chain, [])
        assert tier.tier.statistics().bytes_used == bytes_taken(tmp_path / "killed")


@pytest.mark.parametrize("is_killed", [True, False])
@pytest.mark.parametrize("in_segment", [1, 6])
def test_no_chain_is_parted_while_some_of_it_is_copied(
    tmp_path: Path,
    chain: list[Record],
    in_segment: int,
    is_killed: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Parents are where they were copied to, once or twice, and what stands below is where it was,
    beside them or elsewhere."""
    kv = tmp_path / "chain"
    for first in range(0, len(chain), in_segment):
        keep(kv, chain[first:][:in_segment])
    keep_few(monkeypatch, 0)
    monkeypatch.setattr("kvtide.tiers.disk.merging.COPIES_MAX", 1)
    with driven(kv) as tier:
        disk = disk_of(tier)
        if is_killed:
            files_of(disk).stall(Call.UNLINK, path_part=".segment")
            monkeypatch.setattr(disk._room, "flush", lambda: None)
        while (
            disk._catalog.place(disk._catalog.index[chain[4].key]).segment == 1 + 4 // in_segment
        ):
            tier.poll_for(0.1)
        disk._merging.is_closed = True
        while disk._merging.is_busy:
            tier.poll_for(0.1)
        if is_killed:
            shutil.copytree(kv, tmp_path / "killed")
            monkeypatch.undo()
            files_of(disk).release()
    monkeypatch.undo()
    for eager_rows in (-1, 1 << 16):
        monkeypatch.setattr("kvtide.tiers.disk.intake.EAGER_ROWS", eager_rows)
        shutil.copytree(tmp_path / "killed" if is_killed else kv, tmp_path / f"{eager_rows}")
        with driven(tmp_path / f"{eager_rows}") as tier:
            while not disk_of(tier)._catalog.is_swept:
                tier.poll_for(0.1)
            settle(tier)
            assert_holds(tier, chain, [])
            assert tier.find(chain[:-1], chain[-1].digests) == chain


@pytest.mark.parametrize("call", [Call.READ, Call.WRITE])
def test_what_is_cleared_while_it_is_copied_is_not_found_again(
    tmp_path: Path, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither now nor by a start: none of it lies behind what the clear means."""
    kv, kept = tmp_path / "kv", tails(3)
    cleared = chain_of(SALTED, TINY, text(1, 24))
    lives(kv, [*cleared, *kept])
    keep_few(monkeypatch, FEW)
    with driven(kv) as tier:
        disk = disk_of(tier)
        files_of(disk).stall(call)
        while not (disk._merging.is_writing if call is Call.WRITE else disk._merging.is_busy):
            tier.poll_for(0.1)
        tier.tier.clear(SALTED.salt_digest)
        files_of(disk).release()
        merge(tier)
        up_to = max(told_by(path.name for path in kv.iterdir()).values(), default=0)
        assert up_to >= len(cleared)
        behind = [one for number, one in disk._space.segments.items() if number > up_to]
        assert not any(kind.root == SALTED for segment in behind for kind in segment.kinds)
        assert_holds(tier, kept, [])
    monkeypatch.undo()
    with driven(kv) as tier:
        assert_holds(tier, kept, [])


def test_a_record_that_is_damaged_is_not_copied(
    kv: Path, chain: list[Record], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is removed, as by any load of it, and what stood behind it."""
    with driven(kv) as tier:
        path, offset = place_of(disk_of(tier), chain[5])
    flip(path, offset + payload_offset(chain[5]) + 100)
    keep_few(monkeypatch, FEW)
    with driven(kv) as tier:
        merge(tier)
        assert segments_of(kv) <= FEW
        assert_holds(tier, chain[:5], [])


def test_what_an_engine_asks_for_goes_before_copies(
    kv: Path, chain: list[Record], monkeypatch: pytest.MonkeyPatch
) -> None:
    """None is begun while a load is under way."""
    keep_few(monkeypatch, len(chain))
    with driven(kv) as tier:
        files = files_of(disk_of(tier))
        with files.stalled(Call.READ):
            job = tier.submit_load(chain[0])
            keep_few(monkeypatch, FEW)
            tier.pass_time(100)
            tier.poll_for(0.1)
            assert not disk_of(tier)._merging.is_busy
        assert tier.loaded(job) is LoadOutcome.LOADED
        merge(tier)
        assert segments_of(kv) <= FEW


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
def test_copies_that_fail_are_tried_again_after_a_pause(
    kv: Path, chain: list[Record], code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And cost no record."""
    keep_few(monkeypatch, FEW)
    before = segments_of(kv)
    with driven(kv) as tier:
        files = files_of(disk_of(tier))
        files.fail(Call.WRITE, code, path_part=".segment")
        merge(tier)
        assert segments_of(kv) in (before, before + 1)
        files.heal()
        assert_holds(tier, chain, [])
        tier.pass_time(PAUSE_MS + 1)
        merge(tier)
        assert segments_of(kv) <= FEW
        assert_holds(tier, chain, [])
        assert tier.store(tails(1)) == [StoreOutcome.STORED]
