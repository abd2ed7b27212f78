"""A start on a large directory: what is there is found by the first question."""

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path

from kvtide.codec.record import stored_bytes
from kvtide.core.keys import INNER_DIGEST_BYTES
from kvtide.core.records import Record
from kvtide.testing.tier_records import chain_of, text
from kvtide.tiers.disk import columns as tables
from kvtide.tiers.disk import sealing
from kvtide.tiers.disk.directory import SEGMENT, Directory
from kvtide.tiers.disk.files import SystemFiles
from kvtide.tiers.disk.rows import Kept, Kind
from kvtide.units import GiB
from tests.tiers.disk_place import ROOT, SMALL, disk_of, driven, keep

SEGMENTS, IN_SEGMENT = 70, 1_000
CHAIN = 4


def chain(number: int) -> list[Record]:
    """Three chunks and a tail, with made-up names."""
    records: list[Record] = []
    for depth in range(CHAIN):
        key = hashlib.sha256(f"{number} {depth}".encode()).digest()
        blocks = SMALL.blocks_per_chunk if depth < CHAIN - 1 else 2
        inner = hashlib.shake_128(key).digest((blocks - 1) * INNER_DIGEST_BYTES)
        parent = records[-1].key if records else ROOT.key
        digests = inner + key[:INNER_DIGEST_BYTES]
        records.append(Record(ROOT, parent, key, digests, SMALL))
    return records


def rows_of_all() -> Iterator[Record]:
    """All chains but their last records, then those: tails lie in other segments than parents."""
    count = SEGMENTS * IN_SEGMENT // CHAIN
    yield from (record for number in range(count) for record in chain(number)[:-1])
    yield from (chain(number)[-1] for number in range(count))


def make_large(kv: Path) -> None:
    """Indexes of a directory that a node has closed; its segments are as long, and empty."""
    directory = Directory(str(kv), SystemFiles(), "none")
    directory.take()
    length, rows = stored_bytes(SMALL, SMALL.blocks_per_chunk), rows_of_all()
    for segment in range(1, SEGMENTS + 1):
        kept = [
            Kept(at * length, 0, record.key, record.parent, record.digests)
            for at, record in zip(range(IN_SEGMENT), rows, strict=False)
        ]
        path = directory.at(segment, SEGMENT)
        Path(path).touch()
        os.truncate(path, IN_SEGMENT * length)
        sealing.write_index(directory, segment, tables.from_rows({0: Kind(ROOT, SMALL)}, kept))
    directory.free()


def test_tails_of_a_large_directory_are_found_by_the_first_lookup(tmp_path: Path) -> None:
    """Though most of it is still to be taken in, which goes on as it is polled."""
    make_large(tmp_path / "kv")
    with driven(tmp_path / "kv", GiB) as tier:
        for number in (0, 7_000, SEGMENTS * IN_SEGMENT // CHAIN - 1):
            wanted = chain(number)
            assert tier.find(wanted[:-1], wanted[-1].digests) == wanted
            assert tier.find(wanted[:1], wanted[1].digests[:-INNER_DIGEST_BYTES]) == wanted[:2]
        catalog = disk_of(tier)._catalog
        assert not catalog.is_taken_in
        assert tier.tier.statistics().records == SEGMENTS * IN_SEGMENT
        while not catalog.is_swept:
            tier.poll_for(0.1)
        disk_of(tier).check_integrity()
        assert tier.tier.statistics().records == SEGMENTS * IN_SEGMENT


def test_all_that_begins_alike_is_found_after_a_start(tmp_path: Path) -> None:
    """In one segment and in several: the one that shares most blocks."""
    begin = text(1, 2)
    chains = [chain_of(ROOT, SMALL, begin + text(number, 2)) for number in range(2, 30)]
    keep(tmp_path / "kv", [record for one in chains for record in one], segment_bytes=1 << 17)
    with driven(tmp_path / "kv") as tier:
        for [record] in chains:
            asked = tier.ask((), record.digests, root=ROOT, layout=SMALL)
            assert tier.found(asked).records == [record]
        disk_of(tier).check_integrity()
