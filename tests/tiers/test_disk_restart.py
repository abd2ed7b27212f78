"""Start k+1 works after k hard kills at any moment, and finds what was stored before them."""

import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from kvtide.testing.tier_drive import DrivenTier
from kvtide.testing.tier_records import chain_of, text
from kvtide.tiers.base import LoadOutcome
from kvtide.tiers.disk.check import check
from kvtide.units import KiB, MiB
from tests.tiers import storing
from tests.tiers.disk_place import bytes_taken, disk_of, driven, settle

KILLS = 24
ROOMY, TIGHT = 64 * MiB, 1 * MiB


def store_and_be_killed(kv: Path, cap: int, seed: int, draw: random.Random) -> list[int]:
    """Numbers of the chains that were stored by the time of the kill."""
    command = [sys.executable, storing.__file__, str(kv), str(cap), str(seed)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        stored = [int(process.stdout.readline()) for _ in range(draw.randrange(1, 12))]
        for _ in range(draw.randrange(200_000)):
            pass  # somewhere inside the next one
        process.send_signal(signal.SIGKILL)
        stored += [int(line) for line in process.stdout.read().split("\n")[:-1]]
    return stored


def assert_clean(kv: Path, tier: DrivenTier, cap: int) -> None:
    """Usage is known and below the cap; each file belongs to a segment, each record is proven."""
    settle(tier)
    disk_of(tier).check_integrity()
    assert bytes_taken(kv) <= cap
    assert tier.tier.statistics().bytes_used == bytes_taken(kv)
    segments = {path.stem for path in kv.glob("*.segment")}
    indexes = {path.stem for path in kv.glob("*.index")}
    assert indexes == segments, "each is sealed"
    assert {path.stem for path in kv.glob("*.rows")} <= segments, "what is gone since"
    known = {".segment", ".index", ".rows", ".cleared"}
    assert {path.name for path in kv.iterdir() if path.suffix not in known} == {"LOCK"}
    assert {one.fault for one in check(kv)} <= {""}


def test_what_was_stored_before_a_kill_is_there_after_it(tmp_path: Path) -> None:
    """A dozen lives in one directory, each killed at a random point; nothing is ever lost."""
    kv, draw = tmp_path / "kv", random.Random(5)
    stored: list[int] = []
    for life in range(KILLS // 2):
        stored += store_and_be_killed(kv, ROOMY, life, draw)
        with driven(kv, ROOMY) as tier:
            assert_clean(kv, tier, ROOMY)
            for number in stored:
                chain = chain_of(storing.ROOT, storing.LAYOUT, text(number, storing.CHAIN_BLOCKS))
                assert tier.find(chain[:-1], chain[-1].digests) == chain
            for number in stored[-12:]:
                chain = chain_of(storing.ROOT, storing.LAYOUT, text(number, storing.CHAIN_BLOCKS))
                assert {tier.load(record) for record in chain} == {LoadOutcome.LOADED}
            extra = tier.tier.statistics().records - 3 * len(stored)
            assert 0 <= extra <= 6 * (life + 1), "a chain that was not said, and one to be cleared"


@pytest.mark.long
def test_the_cap_holds_over_kills(tmp_path: Path) -> None:
    """A small cap: eviction, seals and unlinks are what the kills meet. All that is found loads,
    and what was stored last is found."""
    kv, draw = tmp_path / "kv", random.Random(6)
    for life in range(KILLS // 2):
        stored = store_and_be_killed(kv, TIGHT, life, draw)
        with driven(kv, TIGHT, segment_bytes=128 * KiB) as tier:
            assert_clean(kv, tier, TIGHT)
            last = stored[-1]
            chain = chain_of(storing.ROOT, storing.LAYOUT, text(last, storing.CHAIN_BLOCKS))
            found = tier.find(chain[:-1], chain[-1].digests)
            assert {tier.load(record) for record in found} <= {LoadOutcome.LOADED}
            assert found, "the latest is the last to go"
            catalog = disk_of(tier)._catalog
            for row in list(catalog.index.values()):
                assert tier.load(catalog.record(row)) is LoadOutcome.LOADED
