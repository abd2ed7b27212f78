"""A start on a large directory: what is there is found by the first question."""

import hashlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from kvtide.codec.record import stored_bytes
from kvtide.core.keys import INNER_DIGEST_BYTES
from kvtide.core.records import Record
from kvtide.testing.faulty_files import FaultyFiles
from kvtide.testing.tier_records import chain_of, root_of, text
from kvtide.tiers.base import StoreOutcome
from kvtide.tiers.disk import columns as tables
from kvtide.tiers.disk import sealing
from kvtide.tiers.disk.directory import SEGMENT, USED, Directory
from kvtide.tiers.disk.rows import Kept
from kvtide.tiers.disk.start import AHEAD
from kvtide.tiers.files import SystemFiles
from kvtide.tiers.kinds import Kind
from kvtide.units import GiB, KiB, MiB
from tests.tiers.disk_place import (
    ROOT,
    SMALL,
    TINY,
    assert_holds,
    disk_of,
    driven,
    keep,
    settle,
    tails,
)

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


@pytest.fixture
def by_and_by(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows are made as the tier is polled, however few they are."""
    monkeypatch.setattr("kvtide.tiers.disk.intake.EAGER_ROWS", -1)


@pytest.mark.usefixtures("by_and_by")
def test_what_stands_below_a_record_that_nobody_asked_for_is_found(tmp_path: Path) -> None:
    """By the first lookup that goes on from it, though it lies in another segment."""
    wanted = chain_of(ROOT, SMALL, text(1, 18))
    keep(tmp_path / "kv", wanted, segment_bytes=1 << 17)
    assert len(list((tmp_path / "kv").glob("*.segment"))) > 2
    for first in range(1, 4):
        with driven(tmp_path / "kv", segment_bytes=1 << 17) as tier:
            asked = wanted[first:]
            assert tier.find(asked[:-1], asked[-1].digests) == asked, first


@pytest.mark.usefixtures("by_and_by")
def test_stores_wait_while_a_start_takes_in_what_is_there(tmp_path: Path) -> None:
    """None of them takes it in at once, which would hold up all others. Each ends as it would have
    later: those that are there, those whose parents are, in any segment or in the queue, and those
    whose parents are not."""
    chains = [chain_of(ROOT, SMALL, text(number, 10)) for number in range(12)]
    keep(tmp_path / "kv", [record for one in chains for record in one], segment_bytes=1 << 17)
    longer = chain_of(ROOT, SMALL, text(3, 18))
    *_, missing = chain_of(ROOT, SMALL, text(70, 12))
    tail = chain_of(ROOT, SMALL, text(5, 9))[-1]
    later = chain_of(ROOT, SMALL, text(80, 8))
    with driven(tmp_path / "kv", segment_bytes=1 << 17) as tier:
        catalog = disk_of(tier)._catalog
        jobs = [tier.submit_store(one) for one in [*longer, missing, tail, *later, later[1]]]
        assert catalog.is_taken_in is False
        assert tier.tier.statistics().queued_bytes == sum(
            one.payload_bytes for one in [*longer, missing, tail, *later]
        )
        held, stored = StoreOutcome.HELD, StoreOutcome.STORED
        wanted = [held, held, *[stored] * (len(longer) - 2)]
        wanted += [StoreOutcome.NOT_ANCHORED, held, *[stored] * len(later), held]
        assert [tier.stored(job) for job in jobs] == wanted
        assert catalog.is_taken_in
        left = [record for one in chains for record in one if record != chains[3][-1]]
        assert_holds(tier, [*left, *longer[2:], *later], [missing, chains[3][-1]])


@pytest.mark.usefixtures("by_and_by")
def test_stores_that_wait_for_a_start_are_bounded_cleared_and_ended(tmp_path: Path) -> None:
    """As others that wait."""
    keep(tmp_path / "kv", tails(40), segment_bytes=1 << 16)
    queue_bytes = 4 * TINY.block_bytes
    [salted] = chain_of(root_of(salt="s"), TINY, text(99, 1))
    with driven(tmp_path / "kv", queue_bytes_max=queue_bytes) as tier:
        jobs = [tier.submit_store(record) for record in [salted, *tails(4, first=50)]]
        tier.tier.clear(salted.root.salt_digest)
        assert tier.stored(jobs[0]) is StoreOutcome.NOT_ANCHORED
        assert tier.stored(jobs[-1]) is StoreOutcome.QUEUE_FULL
        assert [tier.stored(job) for job in jobs[1:-1]] == [StoreOutcome.STORED] * 3
        assert_holds(tier, tails(40) + tails(3, first=50), [])
    with driven(tmp_path / "kv") as tier:
        jobs = [tier.submit_store(record) for record in tails(4, first=60)]
        tier.close(30)
        assert {tier.stored(job) for job in jobs} == {StoreOutcome.CLOSED}


@pytest.mark.usefixtures("by_and_by")
def test_what_waiting_stores_stand_below_is_not_evicted_meanwhile(tmp_path: Path) -> None:
    """The start finds the drive full: it evicts once it knows who is a leaf, and no parent of
    what waits."""
    cap = 1 << 20
    with driven(tmp_path / "kv", cap, segment_bytes=1 << 17) as tier:
        tier.keep([chain_of(ROOT, SMALL, text(number, 4))[0] for number in range(60)])
        settle(tier)
        left = [n for n in range(60) if tier.is_there(chain_of(ROOT, SMALL, text(n, 4))[0])]
        used = tier.tier.statistics().bytes_used
    (tmp_path / "kv" / USED).unlink()  # the oldest goes first
    with driven(tmp_path / "kv", used + 4096, segment_bytes=1 << 17) as tier:
        assert not disk_of(tier)._catalog.is_taken_in
        parent, child = chain_of(ROOT, SMALL, text(left[0], 8))
        job = tier.submit_store(child)
        assert tier.stored(job) is StoreOutcome.STORED
        assert tier.tier.statistics().evicted > 0
        assert tier.is_there(parent)
        disk_of(tier).check_integrity()


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


class Ahead(FaultyFiles):
    """Notes what is wanted in the page cache, and what is read of it when."""

    def __init__(self) -> None:
        super().__init__()
        self.noted: list[tuple[str, str]] = []

    def want_cached(self, descriptor: int) -> None:
        self._note("want", descriptor)
        super().want_cached(descriptor)

    def read_at(self, descriptor: int, parts: Sequence[memoryview], offset_bytes: int) -> int:
        self._note("read", descriptor)
        return super().read_at(descriptor, parts, offset_bytes)

    def _note(self, what: str, descriptor: int) -> None:
        self.noted.append((what, Path(self._path(descriptor)).name))


def test_what_stands_beside_segments_is_read_ahead(tmp_path: Path) -> None:
    """A log that is not costs a start after a kill as much as an index that is not: each is asked
    for once, before it is read, and while others are."""
    with driven(tmp_path / "kv", 64 * MiB, segment_bytes=32 * KiB) as tier:
        tier.keep(tails(600))
        assert disk_of(tier).remove(record.key for record in tails(600)[::8]) == 75
    files = Ahead()
    with driven(tmp_path / "kv", 64 * MiB, files=files):
        pass
    names = {path.name for path in (tmp_path / "kv").glob("0*") if path.suffix != ".segment"}
    assert len(names) > 2 * AHEAD
    wanted = {name: files.noted.index(("want", name)) for name in names}
    assert [what for what, name in files.noted if name in names].count("want") == len(names)
    read = {name: files.noted.index(("read", name)) for name in names}
    assert all(wanted[name] < read[name] for name in names)
    assert sum(wanted[name] + AHEAD < read[name] for name in names) > len(names) // 2


def test_what_segments_say_of_a_salt_is_read_once(tmp_path: Path) -> None:
    """Each of them under a number of its own: with a salt for each user a start would be forty
    times as long if it were made of bytes each time."""
    salted = [chain_of(root_of(salt=f"{n}"), TINY, text(n, 1))[0] for n in range(12)]
    again = [chain_of(root_of(salt=f"{n}"), TINY, text(50 + n, 1))[0] for n in range(12)]
    keep(tmp_path / "kv", [*salted, *reversed(again)], segment_bytes=12 * 8 * KiB)
    assert len(list((tmp_path / "kv").glob("*.index"))) == 2
    with driven(tmp_path / "kv", segment_bytes=12 * 8 * KiB) as tier:
        assert len(disk_of(tier)._catalog.kinds) == 12
        first, second, *_ = disk_of(tier)._space.segments.values()
        mine = {id(kind) for kind in first.kinds}
        assert {id(kind) for kind in second.kinds} == mine
        assert_holds(tier, [*salted, *again], [])
