"""A check proves every record, finds each that is damaged, and disturbs nobody."""

import errno
from pathlib import Path

from kvtide.testing.faulty_files import Call
from kvtide.testing.tier_records import chain_of, root_of, text
from kvtide.tiers.base import LoadOutcome
from kvtide.tiers.disk.check import check, listed, segments_of
from kvtide.units import KiB, MiB
from tests.tiers.disk_place import (
    ROOT,
    SMALL,
    TINY,
    disk_of,
    driven,
    files_of,
    flip,
    keep,
    payload_offset,
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
