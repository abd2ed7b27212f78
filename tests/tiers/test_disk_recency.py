"""What was used lately is known to the next start, as far as it can be told."""

import hashlib
import os
from pathlib import Path

import pytest

from kvtide.core.records import Record
from kvtide.testing.faulty_files import Call, FaultyFiles
from kvtide.tiers.base import StoreOutcome
from kvtide.tiers.disk import recency
from kvtide.tiers.disk.catalog import Place
from kvtide.tiers.disk.directory import USED
from kvtide.units import KiB
from tests.tiers.disk_place import assert_holds, bytes_taken, disk_of, driven, flip, keep, tails

CAP = 512 * KiB


def fill_up(kv: Path) -> list[Record]:
    """A directory at its watermark, closed; what is there, oldest first."""
    with driven(kv, CAP, segment_bytes=64 * KiB) as tier:
        tier.keep(tails(100))
        return [record for record in tails(100) if tier.is_there(record)]


def those_left(kv: Path, records: list[Record]) -> list[Record]:
    """After a restart and as many stores as evict half of them."""
    with driven(kv, CAP, segment_bytes=64 * KiB) as tier:
        outcomes = tier.store(tails(len(records) // 2, first=1_000))
        assert set(outcomes) == {StoreOutcome.STORED}
        assert bytes_taken(kv) <= CAP
        return [record for record in records if tier.is_there(record)]


def use(kv: Path, records: list[Record]) -> None:
    """In a life of its own."""
    with driven(kv, CAP, segment_bytes=64 * KiB) as tier:
        assert all(map(tier.is_there, records))


@pytest.mark.parametrize("rows_at_once", [-1, 65_536])
def test_what_was_used_before_a_restart_outlives_what_was_not(
    kv: Path, monkeypatch: pytest.MonkeyPatch, rows_at_once: int
) -> None:
    """The oldest of all among them, which would go first."""
    monkeypatch.setattr("kvtide.tiers.disk.intake.EAGER_ROWS", rows_at_once)
    records = fill_up(kv)
    (kv / USED).unlink()
    use(kv, records[:10])
    left = those_left(kv, records)
    assert left[:10] == records[:10]
    assert 10 < len(left) < len(records)


def test_what_was_used_outlives_an_end_before_a_start_had_taken_in_all(
    kv: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A life of a moment, as that of a repair, in which nothing was asked for."""
    monkeypatch.setattr("kvtide.tiers.disk.intake.EAGER_ROWS", -1)
    records = fill_up(kv)
    (kv / USED).unlink()
    use(kv, records[:10])
    before = recency.decode((kv / USED).read_bytes())
    with driven(kv, CAP, segment_bytes=64 * KiB) as tier:
        assert tier.is_there(records[-1])
        assert not disk_of(tier)._catalog.is_taken_in
    after = recency.decode((kv / USED).read_bytes())
    assert {number: after[number] & pages for number, pages in before.items()} == before
    assert those_left(kv, records)[:10] == records[:10]


@pytest.mark.parametrize("how", ["none", "cut", "flip", "longer"])
def test_without_a_word_on_it_the_oldest_go_first(kv: Path, how: str) -> None:
    """There is no file after a kill; a damaged one says nothing, and does no harm."""
    records = fill_up(kv)
    (kv / USED).unlink()
    use(kv, records[:10])
    if how == "none":
        (kv / USED).unlink()
    elif how == "cut":
        os.truncate(kv / USED, 50)
    elif how == "flip":
        flip(kv / USED, 30)
    else:
        with (kv / USED).open("ab") as file:
            file.write(bytes(8))
    left = those_left(kv, records)
    assert left == records[-len(left) :]


def test_it_is_told_once_and_never_above_the_cap(kv: Path) -> None:
    """A start removes it; an end that finds no room, or cannot write, leaves none."""
    keep(kv, tails(3))
    with driven(kv) as tier:
        assert not (kv / USED).exists()
        assert tier.is_there(tails(3)[1])
    assert list(recency.decode((kv / USED).read_bytes())) == [1]
    with driven(kv) as tier:
        disk_of(tier)._space.bytes_max = 0
    assert not (kv / USED).exists()
    files = FaultyFiles()
    with driven(kv, files=files) as tier:
        files.fail(Call.RENAME, 5, path_part=USED)
    assert not (kv / USED).exists()
    with driven(kv) as tier:
        assert not (kv / f"{USED}.tmp").exists()
        assert_holds(tier, tails(3), [])


def test_the_bytes_of_it_are_these() -> None:
    """Golden, and bounded."""
    content = recency.encode(Place(segment, segment << 13, 4096) for segment in range(1, 50))
    assert recency.decode(content) == {segment: {segment << 1} for segment in range(1, 50)}
    golden = "6a730827a90e6e5250107c129c5580d1fa2f7eb655aff802f97c807a1b6a6a2b"
    assert hashlib.sha256(content).hexdigest() == golden
    many = recency.encode(Place(1, page << 12, 4096) for page in range(recency.USED_MAX + 5))
    assert len(many) <= (1 << 20) + 24
    assert len(recency.decode(many)[1]) == recency.USED_MAX
