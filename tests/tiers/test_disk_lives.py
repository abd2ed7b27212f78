"""One life after the other in one directory, each killed between any two changes of its files; at
some moment of the last one the power goes, too.

A failure names its seed, the last one printed.
"""

import errno
import os
import random
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest

from kvtide.testing.tier_drive import DrivenTier
from kvtide.testing.tier_records import chain_of, text
from kvtide.tiers.base import LoadOutcome, StoreOutcome
from kvtide.tiers.files import Buffer
from tests.tiers.disk_place import ROOT, TINY, bytes_taken, disk_of, driven, keep_few, settle
from tests.tiers.lost_writes import LostWrites
from tests.tiers.test_disk_power import (
    BLOCKS,
    HISTORIES,
    SALTED,
    SEGMENT_BYTES,
    History,
    all_found,
    start_after_a_cut,
)

CHANGES_MAX = 90
"""Of a life of ten chains, about: most are killed before they end."""
NEVER = 1 << 60


class Killed(LostWrites):
    """Of a process that is killed after so many changes: no later one is made."""

    until: int | None = None

    def _require_life(self) -> None:
        if self.until is not None and self.now >= self.until:
            raise OSError(errno.EIO, "killed")

    def open(self, path: str, flags: int) -> int:
        if flags & (os.O_CREAT | os.O_TRUNC):
            self._require_life()
        return super().open(path, flags)

    def write_at(self, descriptor: int, parts: Sequence[Buffer], offset_bytes: int) -> int:
        self._require_life()
        return super().write_at(descriptor, parts, offset_bytes)

    def truncate(self, descriptor: int, length_bytes: int) -> None:
        self._require_life()
        super().truncate(descriptor, length_bytes)

    def punch(self, descriptor: int, offset_bytes: int, length_bytes: int) -> None:
        self._require_life()
        super().punch(descriptor, offset_bytes, length_bytes)

    def sync(self, descriptor: int) -> None:
        self._require_life()
        super().sync(descriptor)

    def sync_directory(self, directory: str) -> None:
        self._require_life()
        super().sync_directory(directory)

    def unlink(self, path: str) -> None:
        self._require_life()
        super().unlink(path)

    def rename(self, path: str, to: str) -> None:
        self._require_life()
        super().rename(path, to)


class Lives:
    """All of one directory."""

    def __init__(self, path: Path, sync: str, cap: int, draw: random.Random) -> None:
        path.mkdir(mode=0o700)
        self.path, self.draw = path, draw
        self.files = Killed(path)
        self.history = History(self.files, sync, cap, cleared=NEVER)
        self.number = 0
        self.was_cleared = False

    def live(self, changes: int | None) -> None:
        """Start, look at what is there, store and clear, until a kill or the end."""
        self.files.until = None
        history = self.history
        more = {"files": self.files, "sync": history.sync, "segment_bytes": SEGMENT_BYTES}
        with driven(self.path, history.cap, **more) as tier:
            self.assert_right(tier)
            if changes is not None:
                self.files.until = self.files.now + changes
            for _ in range(10):
                self.store(tier)
                if not self.was_cleared and self.draw.random() < 0.1:
                    tier.tier.clear(SALTED.salt_digest)
                    self.was_cleared = not disk_of(tier)._clears._unmade
            settle(tier)
            catalog = disk_of(tier)._catalog
            places = {key: catalog.place(row) for key, row in catalog.index.items()}
        self.note({key: f"{place.segment:08d}.index" for key, place in places.items()})

    def store(self, tier: DrivenTier) -> None:
        """One chain more."""
        self.number += 1
        is_salted = not self.was_cleared and self.number % 3 == 1
        chain = chain_of(SALTED if is_salted else ROOT, TINY, text(self.number, BLOCKS))
        self.history.records |= {record.key: record for record in chain}
        jobs = [tier.submit_store(record) for record in chain]
        for job in jobs:
            if tier.stored(job) is StoreOutcome.STORED:
                self.history.kept[job.record.key] = self.files.now

    def assert_right(self, tier: DrivenTier) -> None:
        """Kills take nothing that had been stored, and leave nothing that is not right."""
        settle(tier)
        disk_of(tier).check_integrity()
        assert bytes_taken(self.path) <= self.history.cap
        assert tier.tier.statistics().bytes_used == bytes_taken(self.path)
        found = all_found(tier)
        assert found.items() <= self.history.records.items()
        assert {tier.load(record) for record in found.values()} <= {LoadOutcome.LOADED}
        if self.was_cleared:
            assert not [one for one in found.values() if one.root == SALTED]
        if self.history.cap == HISTORIES["sealed"][1]:
            kept = {k for k in self.history.kept if self.history.records[k].root != SALTED}
            assert kept <= found.keys()

    def note(self, index_names: dict[bytes, str]) -> None:
        """Since when no loss of power could take what: by the index that names it."""
        sure = self.files.sure_names(".index")
        before = self.history.sealed  # a copy is as sure as what it is of
        self.history.sealed = {
            key: min(sure.get(name, NEVER), before.get(key, NEVER))
            for key, name in index_names.items()
        }
        if self.was_cleared:
            self.history.cleared = max(self.files.sure_names(".cleared").values())


@pytest.fixture(params=["", "merging"])
def merging(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether few segments are many."""
    if request.param:
        keep_few(monkeypatch)


@pytest.mark.usefixtures("merging")
@pytest.mark.parametrize("how", HISTORIES)
@pytest.mark.parametrize(
    "seeds", [range(2), pytest.param(range(2, 24), marks=pytest.mark.long)], ids=["few", "many"]
)
def test_after_kills_and_a_loss_of_power_nothing_is_found_but_what_is_right(
    how: str, tmp_path: Path, seeds: Sequence[int]
) -> None:
    """Three lives. What an index names after a kill outlives a loss of power as it would have
    without the kill."""
    for seed in seeds:
        print("seed", seed)
        draw = random.Random(seed)
        lives = Lives(tmp_path / f"{seed}", *HISTORIES[how], draw)
        for _ in range(2):
            lives.live(draw.randrange(CHANGES_MAX))
        begin = lives.files.now
        lives.live(None)
        for number in range(6):
            kv = tmp_path / f"{seed} {number}"
            start_after_a_cut(lives.history, kv, draw.randint(begin, lives.files.now), draw)
            shutil.rmtree(kv)
        shutil.rmtree(lives.path)
