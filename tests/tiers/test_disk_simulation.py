"""A seeded world: stores, loads, clears, faults and restarts in any order, against a dictionary.

A failure names its seed; run it alone with `-k "[seed]"`.
"""

import errno
import random
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from kvtide.core.records import Record
from kvtide.testing.faulty_files import Call
from kvtide.testing.tier_records import chain_of, layout_of, root_of, text
from kvtide.tiers.base import LoadOutcome, StoreJob, StoreOutcome
from kvtide.tiers.disk_names import LOCK
from kvtide.units import KiB, MiB
from tests.tiers.disk_place import (
    bytes_taken,
    disk_of,
    driven,
    files_of,
    keep_few,
    settle,
    tails,
)

if TYPE_CHECKING:
    from kvtide.testing.tier_drive import DrivenTier

LAYOUTS = (layout_of(4096), layout_of(4096, 8192))
SALTS = ("", "one")
STEPS = 150
ROOMY, TIGHT = 64 * MiB, MiB
FAULTS = (Call.WRITE, Call.OPEN, Call.READ, Call.PUNCH, Call.UNLINK, Call.SYNC, Call.RENAME)


class World:
    """One directory, what should be in it, and the tier of this life."""

    def __init__(self, seed: int, cap: int) -> None:
        self.draw = random.Random(seed)
        self.cap = cap
        self.held: dict[bytes, Record] = {}
        self.later: list[StoreJob] = []
        self.tier: DrivenTier

    def chain(self) -> list[Record]:
        number = self.draw.randrange(12)
        root = root_of(salt=self.draw.choice(SALTS))
        layout = LAYOUTS[number % 2]
        return chain_of(root, layout, text(number, self.draw.randrange(1, 14)))

    def store(self) -> None:
        jobs = [self.tier.submit_store(record) for record in self.chain()]
        if self.draw.random() < 0.3:
            self.inject()
        if self.draw.random() < 0.7:
            self.wait(jobs)
        else:
            self.later += jobs

    def wait(self, jobs: list[StoreJob]) -> None:
        for job in jobs:
            outcome = self.tier.stored(job)
            if outcome is StoreOutcome.STORED:
                self.held[job.record.key] = job.record

    def load(self) -> None:
        for record in self.chain():
            assert self.tier.load(record) is not LoadOutcome.CORRUPT

    def look_up(self) -> None:
        *before, last = self.chain()
        if before:
            found = self.tier.find(before, last.digests)
            assert [one.key for one in found[: len(before)]] == [
                one.key for one in before[: len(found)]
            ]

    def clear(self) -> None:
        self.settle_stores()
        salt = self.draw.choice([*SALTS, None])
        digest = None if salt is None else root_of(salt=salt).salt_digest
        self.tier.tier.clear(digest)
        for key, record in list(self.held.items()):
            if digest in (None, record.root.salt_digest):
                del self.held[key]
                assert not self.tier.is_there(record)

    def inject(self) -> None:
        """Whatever does not take records away: a drive that is full does, where there is room for
        all, and one that cannot read a record twice."""
        call = self.draw.choice(FAULTS)
        codes = [errno.EMFILE, errno.ENOMEM if call is Call.READ else errno.EIO]
        codes += [errno.ENOSPC] if self.cap != ROOMY else []
        count = self.draw.choice([1, 1, 2, 7])
        files = files_of(disk_of(self.tier))
        files.fail(call, self.draw.choice(codes), nth=self.draw.randrange(1, 6), count=count)

    def heal(self) -> None:
        files_of(disk_of(self.tier)).heal()
        for _ in range(200):
            self.tier.pass_time(60_000)
            self.tier.poll_for(0.02)
            if self.tier.tier.statistics().state == "on":
                return
        raise AssertionError(self.tier.tier.statistics())

    def lose_lock(self) -> None:
        """Somebody removes it."""
        self.settle_stores()
        files_of(disk_of(self.tier)).heal()
        (disk_of(self.tier).path / LOCK).unlink()
        while not disk_of(self.tier)._writes.is_open:
            assert StoreOutcome.STORED not in self.tier.store(
                tails(1, first=self.draw.getrandbits(16))
            )
        self.heal()

    def empty(self) -> None:
        """Somebody removes all, one file after the other, while records are loaded."""
        self.settle_stores()
        names = sorted(one.name for one in disk_of(self.tier).path.iterdir())
        for name in names:
            if name != LOCK:
                (disk_of(self.tier).path / name).unlink(missing_ok=True)
            self.load()
        self.lose_lock()
        self.held.clear()

    def settle_stores(self) -> None:
        self.wait(self.later)
        self.later.clear()


SEEDS = [0, 1, *(pytest.param(seed, marks=pytest.mark.long) for seed in (2, 3))]


def live_three_times(world: World, kv: Path) -> None:
    steps = [world.store] * 12 + [world.load, world.look_up, world.inject, world.heal] * 2
    steps += [world.clear] * 2 + [world.lose_lock, world.empty]
    for _ in range(3):
        with driven(kv, world.cap, segment_bytes=128 * KiB) as world.tier:
            for _ in range(STEPS // 3):
                world.draw.choice(steps)()
                disk_of(world.tier).check_integrity()
            world.heal()
            world.settle_stores()
            settle(world.tier)
            compare(world, "")
        with driven(kv, world.cap, segment_bytes=128 * KiB) as world.tier:
            settle(world.tier)
            compare(world, "after a restart")


@pytest.fixture(params=["at once", "by and by", "merging"])
def start(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """How rows are made of what a start has read; and whether few segments are many."""
    if request.param == "merging":
        keep_few(monkeypatch)
    elif request.param == "by and by":
        monkeypatch.setattr("kvtide.tiers.disk.intake.EAGER_ROWS", -1)


@pytest.mark.usefixtures("start")
@pytest.mark.parametrize("seed", SEEDS)
def test_any_order_of_anything_leaves_what_a_dictionary_holds(tmp_path: Path, seed: int) -> None:
    """Room for all: nothing that was stored is ever missing, and nothing else is there."""
    live_three_times(World(seed, ROOMY), tmp_path / "kv")


@pytest.mark.usefixtures("start")
@pytest.mark.parametrize("seed", SEEDS)
def test_any_order_of_anything_at_the_cap(tmp_path: Path, seed: int) -> None:
    """Room for a third: all that is there was stored, and is whole."""
    live_three_times(World(seed, TIGHT), tmp_path / "kv")


def compare(world: World, when: str) -> None:
    """What is there is what was stored, but for tails that a longer record has replaced."""
    disk_of(world.tier).check_integrity()
    records = {
        disk_of(world.tier)._catalog.record(row)
        for row in disk_of(world.tier)._catalog.index.values()
    }
    keys = {record.key for record in records}
    assert keys <= world.held.keys(), when
    for key, record in world.held.items() if world.cap == ROOMY else ():
        assert key in keys or any(
            other.parent == record.parent and other.digests.startswith(record.digests)
            for other in records
        ), key.hex()
    for record in records:
        assert world.tier.load(record) is LoadOutcome.LOADED
    disk = disk_of(world.tier)
    disk.check_integrity()
    assert bytes_taken(disk.path) <= world.cap
    world.held = {record.key: record for record in records}
