"""What is damaged at rest is a miss that removes exactly that record, and nothing else."""

import logging
import os
import re
import shutil
import struct
from pathlib import Path

import pytest

from kvtide.codec import record as codec
from kvtide.testing.faulty_files import Call
from kvtide.testing.tier_records import chain_of, root_of, text
from kvtide.tiers.base import LoadOutcome, StoreOutcome
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
    payload_offset,
    tails,
)

SIXTEENTHS = range(16)
LENGTH = codec.stored_bytes(TINY, 1)


def only(kv: Path, suffix: str) -> Path:
    """The one file of a kind."""
    [path] = kv.glob(f"*.{suffix}")
    return path


def killed(kv: Path) -> None:
    """Make a closed directory look as if the node had been killed: a rows log and no index."""
    with driven(kv) as tier:
        copy = kv.parent / "copy"
        tier.keep(tails(1, first=9_000))
        shutil.copytree(kv, copy)
    shutil.rmtree(kv)
    copy.rename(kv)


@pytest.mark.parametrize("part", SIXTEENTHS)
def test_a_segment_cut_short_keeps_what_is_whole(kv: Path, part: int) -> None:
    """Records that end before the cut are there; the others are not, before they are asked."""
    records = tails(16)
    places = keep(kv, records)
    segment = only(kv, "segment")
    cut = segment.stat().st_size * part // 16 + 100
    os.truncate(segment, cut)
    good = [record for record in records if places[record.key][1] + LENGTH <= cut]
    with driven(kv) as tier:
        assert tier.tier.statistics().records == len(good)
        assert_holds(tier, good, [one for one in records if one not in good])
        assert tier.store(records)[-1] is StoreOutcome.STORED


def test_each_byte_of_a_header_counts(kv: Path) -> None:
    """As many records as there are bytes, one of each is flipped: all are gone, the rest stays."""
    records = tails(500)
    good = tails(20, first=1_000)
    places = keep(kv, records + good)
    for at, record in enumerate(records):
        path, offset = places[record.key]
        flip(path, offset + (at if at < 480 else 4096 - 500 + at), 1 << at % 8)
    with driven(kv) as tier:
        assert {tier.load(record) for record in records} == {LoadOutcome.CORRUPT}
        assert_holds(tier, good, records)


def test_each_part_of_a_payload_counts(kv: Path) -> None:
    """First, last and some bytes between, in each shard."""
    chains = [chain_of(ROOT, SMALL, text(number, 4)) for number in range(40)]
    records = [record for chain in chains for record in chain]
    places = keep(kv, records)
    length = codec.stored_bytes(SMALL, 4)
    spots = [4096, 4096 + 4 * 4096 - 1, 2 * 4096 + 4 * 4096, length - 1]
    spots += [4096 + 411 * number for number in range(34)]
    for spot, record in zip(spots, records, strict=False):
        path, offset = places[record.key]
        flip(path, offset + spot)
    with driven(kv) as tier:
        assert_holds(tier, records[len(spots) :], records[: len(spots)])


def test_records_that_changed_places_are_gone(kv: Path) -> None:
    """Both, since each is where the other should be; what stands below them is as well."""
    records = tails(6)
    places = keep(kv, records)
    path, first = places[records[1].key]
    _, second = places[records[4].key]
    content = bytearray(path.read_bytes())
    held = content[first : first + LENGTH]
    content[first : first + LENGTH] = content[second : second + LENGTH]
    content[second : second + LENGTH] = held
    path.write_bytes(content)
    with driven(kv) as tier:
        assert_holds(tier, [*records[:1], *records[2:4], records[5]], [records[1], records[4]])


def test_a_duplicate_is_not_taken_for_what_it_replaces(kv: Path) -> None:
    """The original is well, its copy is not."""
    records = tails(4)
    places = keep(kv, records)
    path, first = places[records[0].key]
    _, second = places[records[2].key]
    content = bytearray(path.read_bytes())
    content[second : second + LENGTH] = content[first : first + LENGTH]
    path.write_bytes(content)
    with driven(kv) as tier:
        assert_holds(tier, [records[0], records[1], records[3]], [records[2]])


@pytest.mark.parametrize("what", ["header", "payload", "all"])
def test_zeros_are_no_record(kv: Path, what: str) -> None:
    """As a drive leaves them that lost its cache."""
    records = tails(4)
    places = keep(kv, records)
    path, offset = places[records[2].key]
    start, end = {"header": (0, 4096), "payload": (4096, LENGTH), "all": (0, LENGTH)}[what]
    content = bytearray(path.read_bytes())
    content[offset + start : offset + end] = bytes(end - start)
    path.write_bytes(content)
    with driven(kv) as tier:
        assert_holds(tier, [*records[:2], records[3]], [records[2]])


def test_what_stood_behind_a_damaged_record_goes_with_it(kv: Path) -> None:
    """It cannot be reached; a sibling of it can. All may be stored again."""
    chain = chain_of(ROOT, SMALL, text(1, 14))
    sibling = chain_of(ROOT, SMALL, text(1, 4) + text(2, 4))[1]
    places = keep(kv, [*chain, sibling])
    path, offset = places[chain[1].key]
    flip(path, offset + payload_offset(chain[1]))
    with driven(kv) as tier:
        assert tier.load(chain[1]) is LoadOutcome.CORRUPT
        assert_holds(tier, [chain[0], sibling], chain[1:])
        assert tier.store(chain[1:]) == [StoreOutcome.STORED] * 3
        assert_holds(tier, [*chain, sibling], [])
    with driven(kv) as tier:
        assert_holds(tier, [*chain, sibling], [])


# ---- rows and indexes


@pytest.mark.parametrize("part", SIXTEENTHS)
@pytest.mark.parametrize("how", ["cut", "flip", "zero"])
@pytest.mark.parametrize("suffix", ["index", "rows"])
def test_a_damaged_index_or_log_is_mended_by_headers(
    kv: Path, suffix: str, how: str, part: int
) -> None:
    """Every record is still there: the segment says so itself."""
    chain = chain_of(ROOT, SMALL, text(1, 14))
    salted = chain_of(root_of(salt="secret"), SMALL, text(1, 6))
    records = chain + salted
    keep(kv, records)
    if suffix == "rows":
        killed(kv)
        records += tails(1, first=9_000)
    for path in kv.glob(f"*.{suffix}"):
        size = path.stat().st_size
        at = size * part // 16
        if how == "cut":
            os.truncate(path, at)
        elif how == "flip":
            flip(path, at)
        else:
            with path.open("r+b") as file:
                file.seek(at)
                file.write(bytes(min(64, size - at)))
    with driven(kv) as tier:
        assert_holds(tier, records, [])
    with driven(kv) as tier:
        assert_holds(tier, records, [])


@pytest.mark.parametrize("suffix", ["index", "rows", "segment"])
def test_a_file_that_is_gone_costs_what_only_it_knew(kv: Path, suffix: str) -> None:
    """An index or a log nothing, a segment its records; nothing of ours is left over."""
    records = tails(8)
    keep(kv, records)
    if suffix == "rows":
        killed(kv)
        records += tails(1, first=9_000)
    for path in kv.glob(f"*.{suffix}"):
        path.unlink()
    with driven(kv) as tier:
        good = [] if suffix == "segment" else records
        assert_holds(tier, good, [record for record in records if record not in good])
    left = {path.suffix for path in kv.iterdir()} - {""}
    assert left == (set() if suffix == "segment" else {".segment", ".index"})


def test_rows_of_another_segment_are_not_believed(kv: Path) -> None:
    """Files that changed names; each segment's headers say what is in it."""
    keep(kv, tails(4))
    keep(kv, tails(5, first=100))
    first, second = sorted(kv.glob("*.index"))
    held = first.read_bytes()
    first.write_bytes(second.read_bytes())
    second.write_bytes(held)
    with driven(kv) as tier:
        assert_holds(tier, tails(4) + tails(5, first=100), [])


def test_a_kill_before_the_first_row_is_no_damage(
    tmp_path: Path, kv: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing is warned of; what was whole by then is there."""
    with driven(kv) as tier:
        files_of(disk_of(tier)).stall(Call.OPEN, path_part=".rows")
        job = tier.submit_store(tails(1)[0])
        files_of(disk_of(tier)).wait_stalled(1)
        shutil.copytree(kv, tmp_path / "killed")
        files_of(disk_of(tier)).release()
        assert tier.stored(job) is StoreOutcome.STORED
    caplog.clear()
    assert not list((tmp_path / "killed").glob("*.rows"))
    with driven(tmp_path / "killed") as tier:
        assert_holds(tier, tails(1), [])
    assert not [one for one in caplog.records if one.levelno >= logging.WARNING]


def test_half_a_record_without_a_row_is_not_adopted(kv: Path) -> None:
    """A kill between its header and its last byte, then a log that is damaged."""
    records = tails(3)
    keep(kv, records)
    killed(kv)
    segment = sorted(kv.glob("*.segment"))[-1]
    donor = sorted(kv.glob("*.segment"))[0].read_bytes()
    with segment.open("ab") as file:
        file.write(donor[: 4096 + 2048] + bytes(2048))
    rows = only(kv, "rows")
    rows.write_bytes(rows.read_bytes() + b"torn")
    with driven(kv) as tier:
        assert_holds(tier, records + tails(1, first=9_000), [])


@pytest.mark.parametrize("suffix", ["index", "rows"])
def test_what_an_unknown_version_wrote_is_left_alone(kv: Path, suffix: str) -> None:
    """Neither misread nor removed; it counts, and what is new goes beside it."""
    keep(kv, tails(4))
    if suffix == "rows":
        killed(kv)
    told = only(kv, suffix)
    content = bytearray(told.read_bytes())
    struct.pack_into("<I", content, 8, 2)
    told.write_bytes(content)
    before = {path.name: path.read_bytes() for path in kv.glob(f"{told.stem}.*")}
    bad, good = (tails(4), []) if suffix == "index" else (tails(1, first=9_000), tails(4))
    with driven(kv) as tier:
        assert_holds(tier, good, bad)
        assert tier.tier.statistics().bytes_used >= sum(map(len, before.values())) // 2
        tier.keep(tails(2, first=50))
    assert before == {path.name: path.read_bytes() for path in kv.glob(f"{told.stem}.*")}


def test_a_cap_that_is_taken_by_another_version_is_told_of(
    kv: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing can be stored any more, which whoever upgrades must not have to guess. One line says
    that they are left alone, however many segments there are."""
    keep(kv, tails(52), segment_bytes=1 << 16)
    indexes = list(kv.glob("*.index"))
    assert len(indexes) > 2
    for index in indexes:
        content = bytearray(index.read_bytes())
        struct.pack_into("<I", content, 8, 2)
        index.write_bytes(content)
    with driven(kv, 1 << 19) as tier:
        for number in range(3):
            assert tier.store(tails(1, first=100 + number)) == [StoreOutcome.NO_ROOM]
        state = tier.tier.statistics().state
        assert re.fullmatch(r"4\d\d KiB of the cap of 512 KiB are taken by segments .*", state)
    left, full = [one.getMessage() for one in caplog.records if one.levelname == "WARNING"]
    assert f"{len(indexes)} of {len(indexes)} segments are left alone" in left
    assert "format version 2" in left
    assert state in full


def test_a_record_of_an_unknown_version_is_a_miss(kv: Path) -> None:
    """The index speaks of it; its own header does not say anything that can be read."""
    records = tails(3)
    places = keep(kv, records)
    path, offset = places[records[1].key]
    flip(path, offset + 8, 0x02)
    with driven(kv) as tier:
        assert_holds(tier, [records[0], records[2]], [records[1]])


def test_files_of_others_are_left_alone(kv: Path) -> None:
    """Whatever they are called; leftovers of ours go."""
    kv.mkdir()
    others = {"README", "00000001.segment.bak", "1.segment", "x.tmp", "00000007.other"}
    for name in others:
        (kv / name).write_text("mine")
    (kv / "00000003.index.tmp").write_text("ours")
    (kv / "00000004.rows").write_text("ours")
    keep(kv, tails(2))
    assert {path.name for path in kv.iterdir()} & others == others
    assert not (kv / "00000003.index.tmp").exists()
    assert not (kv / "00000004.rows").exists()


def test_damage_comes_to_light_at_the_cap_too(kv: Path) -> None:
    """Loads that fail their proof give their room back."""
    records = tails(64)
    places = keep(kv, records)
    for path, offset in list(places.values())[::2]:
        flip(path, offset + 4096)
    with driven(kv) as tier:
        before = bytes_taken(kv)
        for record in records:
            tier.load(record)
        assert_holds(tier, records[1::2], records[::2])
        tier.close(30)
        assert bytes_taken(kv) < before - 30 * LENGTH
        disk_of(tier).check_integrity()


def test_what_is_damaged_is_named_with_its_file_and_place(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """So that who reads the line can look at the drive."""
    [record] = tails(1)
    path, at = keep(tmp_path / "kv", [record])[record.key]
    flip(path, at + payload_offset(record) + 5)
    with driven(tmp_path / "kv") as tier:
        assert tier.load(record) is LoadOutcome.CORRUPT
    assert f"{path} at byte {at}: " in caplog.text
