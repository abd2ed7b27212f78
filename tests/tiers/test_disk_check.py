"""A check proves every record, finds each that is damaged, and disturbs nobody."""

import ctypes
import errno
import mmap
import os
import shutil
from pathlib import Path

import pytest

from kvtide.testing.faulty_files import Call
from kvtide.testing.tier_records import chain_of, root_of, text
from kvtide.tiers.base import LoadOutcome
from kvtide.tiers.disk.check import check, listed, segments_of
from kvtide.units import KiB, MiB
from tests.tiers.disk_place import (
    ROOT,
    SMALL,
    TINY,
    assert_holds,
    disk_of,
    driven,
    files_of,
    flip,
    keep,
    payload_offset,
    place_of,
    tails,
)

ROUNDS_MAX = 30


def test_each_damaged_record_is_found_and_no_other(tmp_path: Path) -> None:
    """With where it is, what it is, and what is wrong."""
    kv = tmp_path / "kv"
    chain = chain_of(ROOT, SMALL, text(1, 14))
    records = chain + tails(10)
    places = keep(kv, records, segment_bytes=128 * KiB)
    assert {one.fault for one in check(kv)} == {""}
    for record, into in ((chain[1], payload_offset(chain[1]) + 9), (records[-1], 77)):
        path, offset = places[record.key]
        flip(path, offset + into)
    found = list(check(kv))
    assert {one.record for one in found} == set(records)
    faults = {one.record: one.fault for one in found if one.fault}
    assert set(faults) == {chain[1], records[-1]}
    assert "block 0" in faults[chain[1]]
    assert "no record begins" in faults[records[-1]]
    numbers = list(segments_of(kv))
    assert len(numbers) > 1
    assert {one.segment for one in check(kv, numbers[1])} == set(numbers[1:])


def test_a_check_beside_a_busy_node_finds_nothing(tmp_path: Path) -> None:
    """Records that come and go under it are not damage."""
    kv = tmp_path / "kv"
    proven = 0
    with driven(kv, 1 * MiB, segment_bytes=128 * KiB) as tier:
        tier.keep(tails(1, first=5_000))
        for number in range(ROUNDS_MAX):
            if proven > 100 and tier.tier.statistics().evicted:
                break
            chain = chain_of(ROOT, SMALL, text(number, 10))
            for record, one in zip(chain * 5, check(kv), strict=False):
                assert not one.fault, one
                proven += 1
                if tier.load(record) is not LoadOutcome.LOADED:
                    tier.submit_store(record)
                tier.poll()
        assert proven > 100, proven
        assert tier.tier.statistics().evicted, "nothing came and went"


def test_what_was_cleared_is_neither_listed_nor_checked(tmp_path: Path) -> None:
    """Though its rows and bytes are all still there, one of them damaged; what another salt has,
    and what was stored since, is."""
    kv = tmp_path / "kv"
    salted = chain_of(root_of(salt="s"), TINY, text(1, 1))
    cleared, later = tails(5), tails(2, first=50)
    places = keep(kv, salted + cleared)
    path, offset = places[cleared[2].key]
    flip(path, offset)
    with driven(kv) as tier:
        files = files_of(disk_of(tier))
        for call in (Call.WRITE, Call.PUNCH, Call.UNLINK):
            files.fail(call, errno.EIO, path_part="00000001.")
        assert tier.tier.clear(b"") == len(cleared)
        tier.keep(later)
        for found in (listed(kv), check(kv)):
            assert {one.record: one.fault for one in found} == dict.fromkeys(salted + later, "")


@pytest.mark.parametrize("suffix", ["index", "rows"])
def test_records_that_damaged_rows_do_not_tell_of_are_proven_too(
    tmp_path: Path, suffix: str
) -> None:
    """By their headers, as a start goes; beside a node, and on what it leaves when it is killed.
    What is damaged beside them is told as well."""
    kv, copy = tmp_path / "kv", tmp_path / "copy"
    records = tails(20)
    if suffix == "index":
        keep(kv, records)
        records += tails(5, first=100)
    with driven(kv) as tier:
        tier.keep(records)
        path, offset = place_of(disk_of(tier), records[2])
        flip(path, offset + payload_offset(records[2]))
        [beside] = kv.glob(f"*.{suffix}")
        flip(beside, beside.stat().st_size // 2)
        shutil.copytree(kv, copy)
        for place in (kv, copy):
            found = list(check(place))
            assert {one.record for one in found if one.record} == set(records)
            record, whole = sorted(
                (one for one in found if one.fault), key=lambda one: not one.record
            )
            assert record.record == records[2]
            assert whole.record is None
            assert f"{place / beside.name}" in whole.fault
            shown = list(listed(place))
            assert {one.record for one in shown if one.record} == set(records)
            assert [one.fault for one in shown if one.fault] == [whole.fault]
    with driven(copy) as tier:
        assert_holds(tier, [one for one in records if one != records[2]], [records[2]])
    assert {one.fault for one in check(copy)} == {""}, "a start has mended it"


@pytest.mark.parametrize("is_written_on", [True, False])
def test_a_row_that_is_being_written_is_no_damage(tmp_path: Path, is_written_on: bool) -> None:
    """Its record is proven meanwhile; what stays half a row is told."""
    kv = tmp_path / "kv"
    records = tails(5)
    with driven(kv) as tier:
        tier.keep(records)
        [rows] = kv.glob("*.rows")
        content = rows.read_bytes()
        rows.write_bytes(content[:-10])
        checking = check(kv)
        found = [next(checking)]
        if is_written_on:
            rows.write_bytes(content)
        found += checking
        rows.write_bytes(content)
    assert {one.record for one in found if one.record} == set(records)
    faults = [one.fault for one in found if one.fault]
    assert [f"{rows} is damaged at byte " in fault for fault in faults] == [True] * (
        not is_written_on
    )


def test_records_that_a_segment_does_not_hold_whole_are_told_of_once(tmp_path: Path) -> None:
    """As a loss of power leaves them: a start says of each that it is gone."""
    kv = tmp_path / "kv"
    records = tails(10)
    places = keep(kv, records)
    path, offset = places[records[6].key]
    os.truncate(path, offset + 4096)
    assert {one.record for one in check(kv) if one.fault} == set(records[6:])
    with driven(kv) as tier:
        assert_holds(tier, records[:6], [])
    assert {one.record: one.fault for one in check(kv)} == dict.fromkeys(records[:6], "")


def cached_pages(path: Path) -> int:
    """Pages of a file that are in memory."""
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as mapped:
        pages = (ctypes.c_ubyte * -(-len(mapped) // mmap.PAGESIZE))()
        first = ctypes.c_char.from_buffer(mapped)
        libc = ctypes.CDLL(None, use_errno=True)
        size = ctypes.c_size_t(len(mapped))
        assert not libc.mincore(ctypes.byref(first), size, pages), ctypes.get_errno()
        del first
        return sum(page & 1 for page in pages)


def test_what_a_check_has_read_does_not_stay_in_memory(tmp_path: Path) -> None:
    """Beside a node with terabytes it would push out everything else. (Where a file lies in memory
    itself, as on tmpfs, nothing changes.)"""
    kv = tmp_path / "kv"
    keep(kv, [one for n in range(20) for one in chain_of(ROOT, SMALL, text(n, 14))])
    [segment] = kv.glob("*.segment")
    before = cached_pages(segment)
    assert {one.fault for one in check(kv)} == {""}
    assert cached_pages(segment) <= before
