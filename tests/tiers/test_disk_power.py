"""After a loss of power nothing is found but what is whole and right, whatever the drive had
written of what was not synced, in whatever order: rows without records, records without rows,
indexes without segments, pages by half.

A failure names its history; its seed is the last one printed.
"""

import random
import shutil
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from kvtide.core.records import Record
from kvtide.testing.tier_drive import DrivenTier
from kvtide.testing.tier_records import chain_of, root_of, text
from kvtide.tiers.base import LoadOutcome, StoreOutcome
from kvtide.tiers.disk.check import check
from kvtide.tiers.disk.space import EXTENTS_BYTES
from kvtide.tiers.files import SystemFiles
from kvtide.units import KiB, MiB
from tests.tiers.disk_place import ROOT, TINY, bytes_taken, disk_of, driven, settle
from tests.tiers.lost_writes import LostWrites

SALTED = root_of(salt="cleared")
CHAINS, BLOCKS = 24, 5  # a whole record, and a tail of one block
SEGMENT_BYTES = 112 * KiB
ROOMY, TIGHT = 8 * MiB, 512 * KiB


@dataclass
class History:
    """What a node did, and after how many changes of its files what was so.

    Attributes:
        records: all that were ever stored, by key.
        kept: when a store had ended well.
        sealed: when the index of the segment that a record lies in was sure to stay.
        cleared: when nothing of the salted root could come back.
    """

    files: LostWrites
    sync: str
    cap: int
    records: dict[bytes, Record] = field(default_factory=dict)
    kept: dict[bytes, int] = field(default_factory=dict)
    sealed: dict[bytes, int] = field(default_factory=dict)
    cleared: int = 0


HISTORIES = {
    "each": ("each", ROOMY),
    "sealed": ("sealed", ROOMY),
    "sealed, at the cap": ("sealed", TIGHT),
    "none, at the cap": ("none", TIGHT),
}


def live(path: Path, sync: str, cap: int) -> History:
    """Store, look up, load, clear, and at a cap evict; then end in order."""
    path.mkdir(mode=0o700)
    history, draw = History(LostWrites(path), sync, cap), random.Random(cap)
    with driven(path, cap, files=history.files, sync=sync, segment_bytes=SEGMENT_BYTES) as tier:
        for number in range(CHAINS):
            is_salted = number < CHAINS // 2 and number % 4 == 1
            chain = chain_of(SALTED if is_salted else ROOT, TINY, text(number, BLOCKS))
            jobs = [tier.submit_store(record) for record in chain]
            for job in jobs:
                if tier.stored(job) is StoreOutcome.STORED:
                    history.records[job.record.key] = job.record
                    history.kept[job.record.key] = history.files.now
            if number == CHAINS // 2:
                tier.tier.clear(SALTED.salt_digest)
            if draw.random() < 0.3:
                tier.load(draw.choice(list(history.records.values())))
        settle(tier)
        catalog = disk_of(tier)._catalog
        places = {key: catalog.place(row) for key, row in catalog.index.items()}
    indexes = history.files.sure_names(".index")
    for key, place in places.items():
        history.sealed[key] = indexes.get(f"{place.segment:08d}.index", history.files.now + 1)
    [history.cleared] = history.files.sure_names(".cleared").values()
    return history


@pytest.fixture(scope="module", params=HISTORIES)
def history(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> History:
    """One of each kind."""
    return live(tmp_path_factory.mktemp("history") / "kv", *HISTORIES[request.param])


def start_after_a_cut(history: History, kv: Path, after: int, draw: random.Random) -> None:
    """Lose power at this moment, start, and look at all that is there."""
    history.files.cut(kv, after, draw)
    more = {"files": SystemFiles(), "segment_bytes": SEGMENT_BYTES, "sync": "none"}
    with driven(kv, history.cap, **more) as tier:
        settle(tier)
        disk_of(tier).check_integrity()
        assert bytes_taken(kv) <= history.cap
        # What nobody has synced may be laid out otherwise by now, and need another map.
        maps = EXTENTS_BYTES * len(disk_of(tier)._space.segments)
        assert abs(tier.tier.statistics().bytes_used - bytes_taken(kv)) <= maps
        found = all_found(tier)
        assert found.items() <= history.records.items()
        faults = [one.record for one in check(kv) if one.fault]
        jobs = [tier.submit_load(record) for record in found.values()]
        refused = {job.record.key for job in jobs if tier.loaded(job) is not LoadOutcome.LOADED}
        assert None not in faults, "what stands beside records a start has mended"
        assert {record.key for record in faults if record} == refused
        while not disk_of(tier)._catalog.is_swept:
            tier.poll_for(0.01)
        settle(tier)
        assert {one.fault for one in check(kv)} <= {""}
        disk_of(tier).check_integrity()
    assert_promises(history, after, found.keys() - refused)


def all_found(tier: DrivenTier) -> dict[bytes, Record]:
    """Each record that a lookup could find."""
    catalog = disk_of(tier)._catalog
    return {key: catalog.record(row) for key, row in catalog.index.items()}


def assert_promises(history: History, after: int, whole: Collection[bytes]) -> None:
    """What was cleared is gone; what was sure to stay is there."""
    if after >= history.cleared:
        assert not [key for key in whole if history.records[key].root == SALTED]
    if history.cap == ROOMY:
        sure = history.kept if history.sync == "each" else history.sealed
        wanted = {key for key, moment in sure.items() if moment <= after}
        wanted -= {key for key in wanted if history.records[key].root == SALTED}
        assert wanted <= set(whole)


@pytest.mark.parametrize(
    "seeds", [range(40), pytest.param(range(40, 240), marks=pytest.mark.long)], ids=["few", "many"]
)
def test_after_a_loss_of_power_all_that_is_found_is_whole_or_refused(
    history: History, tmp_path: Path, seeds: Sequence[int]
) -> None:
    """The cap holds; `disk check` names those records that a load refuses, and once they are
    refused nothing; what a sync has made sure of is there, and what was cleared is not."""
    for seed in seeds:
        print("seed", seed)
        kv, draw = tmp_path / str(seed), random.Random(seed)
        start_after_a_cut(history, kv, draw.randrange(history.files.now + 1), draw)
        shutil.rmtree(kv)
