"""The cap holds at all times, as the file system counts, all files together."""

import errno
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from kvtide.core.records import Record
from kvtide.testing.faulty_files import Call, FaultyFiles
from kvtide.testing.tier_records import chain_of, layout_of, text
from kvtide.tiers.base import LoadOutcome, StoreOutcome
from kvtide.units import KiB, MiB
from tests.tiers.disk_place import ROOT, bytes_taken, disk_of, driven, open_disk, settle

CHUNKS = layout_of(16 * KiB, 8 * KiB)
CAP = 2 * MiB


def sizes(kv: Path) -> dict[str, tuple[int, int]]:
    """What each file takes, and when it was changed."""
    found = {}
    for name in os.listdir(kv) if kv.exists() else ():
        with suppress(FileNotFoundError):
            state = os.stat(kv / name)
            found[name] = (state.st_blocks * 512, state.st_ctime_ns)
    return found


@contextmanager
def watched(kv: Path) -> Iterator[list[int]]:
    """Sums up all files again and again on a thread of its own; the largest sum is first.

    Files are looked at one after the other, so a sum counts only where a second look finds every
    file as the first did: then all were so at one time, between the two.
    """
    most = [0, 0]
    ending = threading.Event()

    def look() -> None:
        while not ending.is_set():
            seen = sizes(kv)
            if seen and sizes(kv) == seen:
                most[0] = max(most[0], sum(size for size, _ in seen.values()))
                most[1] += 1

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield most
    finally:
        ending.set()
        thread.join()


def chains(count: int, first: int = 0) -> list[list[Record]]:
    return [chain_of(ROOT, CHUNKS, text(number, 9)) for number in range(first, first + count)]


@pytest.mark.parametrize(
    ("segment_bytes", "sync"),
    [
        (256 * KiB, "sealed"),
        pytest.param(1 * MiB, "none", marks=pytest.mark.long),
        pytest.param(1 * MiB, "each", marks=pytest.mark.long),
        (64 * MiB, "sealed"),
    ],
)
def test_ten_times_the_cap_never_takes_more_than_the_cap(
    kv: Path, segment_bytes: int, sync: str
) -> None:
    """Records, logs, indexes; with holes, with segments that go, with one that never fills."""
    every = chains(10 * CAP // (9 * CHUNKS.block_bytes))
    with watched(kv) as most:
        with driven(kv, CAP, segment_bytes=segment_bytes, sync=sync) as tier:
            outcomes = []
            for chain in every:
                outcomes += [tier.stored(job) for job in map(tier.submit_store, chain)]
            settle(tier)
            numbers = tier.tier.statistics()
            assert outcomes.count(StoreOutcome.STORED) >= 0.98 * len(outcomes)
            assert numbers.records * CHUNKS.chunk_bytes > CAP // 2, "room is made use of"
            disk_of(tier).check_integrity()
            assert abs(numbers.bytes_used - bytes_taken(kv)) <= 64 * KiB
            last = every[-1]
            assert tier.find(last[:2], last[2].digests) == last
        with driven(kv, CAP, segment_bytes=segment_bytes, sync=sync) as tier:
            again = tier.tier.statistics()
            assert again.records == numbers.records
            assert again.bytes_used == bytes_taken(kv)
            assert tier.find(last[:2], last[2].digests) == last
            assert {tier.load(record) for record in last} == {LoadOutcome.LOADED}
            for chain in chains(40, first=10_000):
                tier.store(chain)
    assert most[0] <= CAP, most
    assert most[1] > 10, "it was looked at"


def test_a_lowered_cap_holds_before_the_first_write(kv: Path) -> None:
    """What is too much goes first, the least used of it; then stores find room."""
    with driven(kv, CAP) as tier:
        for chain in chains(12):
            tier.keep(chain)
        before = tier.tier.statistics()
    lower = CAP // 3
    with driven(kv, lower) as tier:
        assert tier.tier.statistics().bytes_used <= before.bytes_used
        [chain] = chains(1, first=500)
        job = tier.submit_store(chain[0])
        tier_numbers = []
        while not tier.has_ended(job):
            assert disk_of(tier)._workers.wait_result(30)
            for done in disk_of(tier).poll():
                assert done.number == job.number
                tier_numbers.append(bytes_taken(kv))
                tier._ends[id(job)] = done
                tier._running.clear()
        assert tier.stored(job) is StoreOutcome.STORED
        assert tier_numbers[0] <= lower
        assert bytes_taken(kv) <= lower
        assert 0 < tier.tier.statistics().records < before.records
        disk_of(tier).check_integrity()
    with driven(kv, lower) as tier:
        assert tier.find(chain[:1]) == chain[:1]


def test_what_cannot_fit_evicts_nothing(kv: Path) -> None:
    """A chunk that is larger than the cap finds no room, and takes none from others."""
    with driven(kv, CAP, queue_bytes_max=64 * MiB) as tier:
        held = chains(4)
        for chain in held:
            tier.keep(chain)
        [huge] = chain_of(ROOT, layout_of(4 * MiB), text(900, 4))
        assert tier.store([huge]) == [StoreOutcome.NO_ROOM]
        assert tier.tier.statistics().evicted == 0


def test_what_is_loaded_is_not_taken_away_from_below(kv: Path) -> None:
    """Loads that take their time while the cap is written over: each brings its own bytes."""
    with driven(kv, CAP) as tier:
        held = chains(6)
        for chain in held:
            tier.keep(chain)
        jobs = []
        for chain in chains(60, first=100):
            jobs += [tier.submit_load(record) for record in held[len(jobs) % 6]]
            tier.store(chain)
        outcomes = {tier.loaded(job) for job in jobs}
        assert outcomes <= {LoadOutcome.LOADED, LoadOutcome.ABSENT}
        assert LoadOutcome.LOADED in outcomes
        disk_of(tier).check_integrity()


def test_a_cap_that_was_lowered_holds_before_anybody_is_served(kv: Path) -> None:
    """A start evicts down to it: the space may have been promised to somebody else."""
    chains = [chain_of(ROOT, CHUNKS, text(number, 4)) for number in range(60)]
    with driven(kv, bytes_max=8 * MiB, segment_bytes=256 * KiB) as tier:
        tier.keep([record for chain in chains for record in chain])
        assert bytes_taken(kv) > CAP
    tier_now = open_disk(kv, bytes_max=CAP)
    try:
        assert bytes_taken(kv) <= CAP
        assert tier_now.statistics().records > 0
        tier_now.check_integrity()
    finally:
        tier_now.close(30)


def test_a_cap_that_takes_long_to_reach_is_reached_while_the_node_serves(
    kv: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A start evicts for a second; the rest goes by and by, whether anybody asks or not."""
    monkeypatch.setattr("kvtide.tiers.disk.tier.SHRINK_S_MAX", 0.0)
    monkeypatch.setattr("kvtide.tiers.disk.room.EVICTIONS_MAX", 4)
    every = [chain_of(ROOT, CHUNKS, text(number, 4))[0] for number in range(60)]
    with driven(kv, bytes_max=64 * MiB, segment_bytes=256 * KiB, queue_bytes_max=64 * MiB) as tier:
        tier.wait([tier.submit_store(record) for record in every])
    woken = threading.Event()
    tier_now = open_disk(kv, woken.set, CAP, segment_bytes=256 * KiB)
    try:
        assert bytes_taken(kv) > CAP, "it takes longer than a start may"
        while bytes_taken(kv) > CAP:
            assert woken.wait(30), "it goes on by itself"
            woken.clear()
            tier_now.poll()
        assert tier_now.statistics().records > 0
        tier_now.check_integrity()
    finally:
        tier_now.close(30)


def test_a_cap_that_cannot_be_reached_does_not_hold_up_a_start(kv: Path) -> None:
    """Nothing can be given back: the node starts, and stores nothing."""
    with driven(kv, bytes_max=8 * MiB, segment_bytes=256 * KiB) as tier:
        tier.keep([chain_of(ROOT, CHUNKS, text(number, 4))[0] for number in range(60)])
    files = FaultyFiles()
    for call in (Call.PUNCH, Call.UNLINK, Call.WRITE):
        files.fail(call, errno.EIO)
    begun_s = time.monotonic()
    tier_now = open_disk(kv, bytes_max=CAP, files=files)
    assert time.monotonic() - begun_s < 10
    tier_now.close(30)
