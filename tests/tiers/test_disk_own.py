"""The directory is the node's alone: who else may write to it could plant records and links."""

import errno
import os
import shutil
from pathlib import Path

import pytest

from kvtide.errors import ConfigError
from kvtide.testing.faulty_files import Call
from kvtide.testing.tier_drive import DrivenTier
from kvtide.tiers.base import LoadOutcome, StoreOutcome
from kvtide.tiers.disk.opening import open_disk as open_disk_entry
from kvtide.tiers.disk.tier import DiskTier
from kvtide.units import KiB, MiB
from tests.tiers import shared_place
from tests.tiers.disk_place import (
    assert_holds,
    disk_of,
    driven,
    files_of,
    keep,
    open_disk,
    open_files,
    place_of,
    settle,
    tails,
)

OTHER_USER = 54_321
PROBES = 5


def notice(tier: DrivenTier) -> None:
    """Stores fail until the tier has seen that its lock is gone."""
    outcomes = tier.store(tails(12, first=100))
    assert StoreOutcome.STORED not in outcomes
    assert outcomes[-1] is StoreOutcome.BROKEN


def probe(tier: DrivenTier) -> str:
    """Let it try whether the place works again; its state then."""
    tier.pass_time(60_000)
    while disk_of(tier)._writes.is_probing:
        assert disk_of(tier)._workers.wait_result(30)
        tier.poll()
    return tier.tier.statistics().state


@pytest.mark.parametrize("mode", [0o777, 0o720, 0o1777])
def test_a_directory_that_others_may_write_to_is_refused(kv: Path, mode: int) -> None:
    """With what to do; nothing is made in it."""
    kv.mkdir()
    kv.chmod(mode)
    with pytest.raises(ConfigError, match="chmod it to 700"):
        open_disk(kv)
    assert not list(kv.iterdir())
    kv.chmod(0o755)
    open_disk(kv).close(30)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
@pytest.mark.parametrize("is_link", [False, True])
def test_a_directory_of_another_user_is_refused(kv: Path, *, is_link: bool) -> None:
    """And so is a link that another user has made, wherever it leads."""
    keep(kv, tails(2))
    path = kv
    if is_link:
        path = kv.parent / "link"
        path.symlink_to(kv)
        open_disk(path).close(30)  # ours, so far
    os.chown(path, OTHER_USER, OTHER_USER, follow_symlinks=False)
    with pytest.raises(ConfigError, match=f"user {OTHER_USER}"):
        open_disk(path)


@pytest.mark.parametrize("bytes_max", [64 * MiB, "auto"])
@pytest.mark.parametrize("what", ["file", "link to nowhere", "link to itself", "below a file"])
def test_what_is_no_directory_is_refused_and_told_from_one(
    kv: Path, what: str, bytes_max: int | str
) -> None:
    path = kv
    match what:
        case "file":
            kv.touch()
        case "link to nowhere":
            kv.symlink_to(kv.parent / "gone" / "mount")
        case "link to itself":
            kv.symlink_to(kv)
        case "below a file":
            kv.touch()
            path = kv / "below" / "it"
    options = {"path": path, "bytes_max": bytes_max, "sync": "sealed"}
    refused = "cannot be used: no directory is there, but a file, or a link that leads to none;"
    with pytest.raises(ConfigError, match=refused):
        open_disk_entry(options, lambda: None, MiB)
    assert [one.name for one in kv.parent.iterdir()] == [kv.name]


def test_the_directory_of_a_shared_dir_is_no_disk(kv: Path) -> None:
    """Others may be members there: it stays as it is, also once they are gone. A folder that only
    looks like a member's keeps nobody away."""

    def open_entry(path: Path, bytes_max: int | str) -> DiskTier:
        options = {"path": path, "bytes_max": bytes_max, "sync": "sealed"}
        return open_disk_entry(options, lambda: None, MiB)

    def assert_refused() -> None:
        before = sorted(kv.rglob("*"))
        for bytes_max in (64 * MiB, "auto"):
            with pytest.raises(ConfigError, match=f"{kv} is the directory of a shared_dir"):
                open_entry(kv, bytes_max)
        assert sorted(kv.rglob("*")) == before

    with shared_place.driven(kv) as member:
        member.keep(shared_place.tails(2))
        assert_refused()
    assert_refused()
    other = kv.parent / "other"
    (other / ("ab" * 16)).mkdir(parents=True)
    open_entry(other, 64 * MiB).close(30)


def test_a_lock_that_is_a_link_harms_no_other_file(kv: Path) -> None:
    """It would be cut to nothing."""
    other = kv.parent / "precious"
    other.write_text("x" * 1000)
    kv.mkdir()
    (kv / "LOCK").symlink_to(other)
    with pytest.raises(ConfigError, match="cannot be used"):
        open_disk(kv)
    assert other.read_text() == "x" * 1000


def test_a_lock_that_is_a_pipe_does_not_hang_the_start(kv: Path) -> None:
    """An open would wait for somebody at its other end."""
    kv.mkdir()
    os.mkfifo(kv / "LOCK")
    with pytest.raises(ConfigError, match="not a regular file"):
        open_disk(kv)


@pytest.mark.parametrize("suffix", ["segment", "index"])
@pytest.mark.parametrize("kind", ["link", "pipe"])
def test_records_are_not_read_through_links_and_pipes(kv: Path, suffix: str, kind: str) -> None:
    """Such a segment is left alone; the node starts, and stores."""
    keep(kv, tails(4))
    file = kv / f"00000001.{suffix}"
    away = kv.parent / "away"
    file.rename(away)
    if kind == "link":
        file.symlink_to(away)
    else:
        os.mkfifo(file)
    before = away.read_bytes()
    with driven(kv) as tier:
        assert not any(map(tier.is_there, tails(4)))
        tier.keep(tails(4, first=50))
        assert_holds(tier, tails(4, first=50), [])
    assert away.read_bytes() == before


def test_a_directory_that_was_emptied_and_taken_is_no_longer_written_to(kv: Path) -> None:
    """The first node notices by the lock's file that it is another; it goes on once that ends."""
    with driven(kv) as first:
        first.keep(tails(4))
        for path in kv.iterdir():
            path.unlink()
        with driven(kv) as second:
            second.keep(tails(4, first=50))
            outcomes = first.store(tails(12, first=100))
            assert StoreOutcome.STORED not in outcomes
            assert outcomes[-1] is StoreOutcome.BROKEN
            while "one node" not in first.tier.statistics().state:
                first.pass_time(60_000)
                first.poll_for(0.02)
            assert_holds(second, tails(4, first=50), [])
        shutil.rmtree(kv)
        while first.tier.statistics().state != "on":
            first.pass_time(60_000)
            first.poll_for(0.02)
        first.keep(tails(4, first=200))
        assert all(map(first.is_there, tails(4, first=200)))


def test_a_node_whose_segments_are_anothers_by_now_takes_nothing_for_its_own(kv: Path) -> None:
    """The directory was emptied by hand and taken: both count segments from one, and records lie
    at the same places in them. Neither one's bytes are the other's, whatever each looks up, loads,
    or takes away; nor once the second has ended and left its records behind."""
    mine, others = tails(8), tails(8, first=50)
    with driven(kv) as first:
        first.keep(mine)
        places = [place_of(disk_of(first), record) for record in mine]
        for path in kv.iterdir():
            path.unlink()
        with driven(kv) as second:
            second.keep(others)
            assert [place_of(disk_of(second), record) for record in others] == places
            for record in mine:
                assert first.find([record])[:1] in ([record], [])
                assert first.load(record) is LoadOutcome.CORRUPT
                assert not first.is_there(record)
            second.keep(mine[:1])
            assert first.tier.statistics().records == 0
            assert_holds(second, [*others, mine[0]], mine[1:])
        while "another node" not in first.tier.statistics().state:
            assert first.store(tails(1, first=100)) != [StoreOutcome.STORED]
            first.pass_time(60_000)
            first.poll_for(0.02)
    with driven(kv) as third:
        assert_holds(third, [*others, mine[0]], [])


def test_a_store_that_comes_too_late_makes_no_hole_in_anothers_segment(kv: Path) -> None:
    """Its bytes were on their way when the directory was emptied and taken: where they were to be
    lies a record of the other's by now."""
    with driven(kv) as first:
        faults = files_of(disk_of(first))
        faults.stall(Call.WRITE)
        job = first.submit_store(tails(1)[0])
        faults.wait_stalled(1)
        for path in kv.iterdir():
            path.unlink()
        with driven(kv) as second:
            second.keep(tails(1, first=50))
            faults.release()
            assert first.stored(job) is StoreOutcome.FAILED
            assert_holds(second, tails(1, first=50), [])


def test_nothing_of_before_is_found_once_an_emptied_directory_is_used_again(kv: Path) -> None:
    """Also where it was emptied while nothing was loaded: a record that cannot be there is not
    found, and its number is no other's."""
    with driven(kv) as tier:
        tier.keep(tails(8))
        shutil.rmtree(kv)
        outcomes = tier.store(tails(12, first=100))
        assert outcomes[-1] is StoreOutcome.BROKEN
        while tier.tier.statistics().state != "on":
            tier.pass_time(60_000)
            tier.poll_for(0.02)
        assert not any(map(tier.is_there, tails(8)))
        tier.keep(tails(4, first=200))
        settle(tier)
        assert_holds(tier, tails(4, first=200), tails(8))
        tier.close(30)
        assert {path.name for path in kv.glob("*.segment")} == {"00000002.segment"}
    with driven(kv) as tier:
        assert_holds(tier, tails(4, first=200), tails(8))


def test_what_a_node_left_in_a_directory_while_it_was_emptied_keeps_it_from_nothing(
    kv: Path,
) -> None:
    """`rm DIR/*` takes the lock last, and does not see what is made meanwhile."""
    records = tails(40)
    with driven(kv, segment_bytes=64 * KiB) as tier:
        tier.keep(records)
        while not disk_of(tier)._space.segments[1].is_sealed:
            tier.poll_for(0.01)
        for path in kv.iterdir():
            if path.name != "LOCK":
                path.unlink()
        assert tier.load(records[0]) is LoadOutcome.ABSENT
        settle(tier)
        assert [path.name for path in kv.glob("0*")] == ["00000001.rows"]
        (kv / "LOCK").unlink()
        notice(tier)
        assert probe(tier) == "on"
        assert not any(map(tier.is_there, records))
        tier.keep(tails(4, first=200))
        while len(disk_of(tier)._space.segments) > 1:
            tier.poll_for(0.01)
        assert len(list(kv.glob("*.segment"))) == 1
        assert len(list(kv.glob("*.rows"))) == 1
        assert_holds(tier, tails(4, first=200), records)
    with driven(kv) as tier:
        assert_holds(tier, tails(4, first=200), records)


def test_a_directory_that_has_lost_its_lock_alone_keeps_all_the_rest(kv: Path) -> None:
    """Every segment is there: the node makes another lock and goes on."""
    records = tails(40)
    with driven(kv, segment_bytes=64 * KiB) as tier:
        tier.keep(records)
        (kv / "LOCK").unlink()
        notice(tier)
        assert probe(tier) == "on"
        with pytest.raises(ConfigError, match=f"process {os.getpid()}"):
            open_disk(kv)
        tier.keep(tails(4, first=200))
        assert_holds(tier, records + tails(4, first=200), [])
    with driven(kv) as tier:
        assert_holds(tier, records + tails(4, first=200), [])


def test_a_directory_that_has_lost_its_lock_and_a_segment_was_emptied(kv: Path) -> None:
    """Who removes that much means all of it; what is left is removed, and nothing is found."""
    records = tails(40)
    with driven(kv, segment_bytes=64 * KiB) as tier:
        tier.keep(records)
        (kv / "LOCK").unlink()
        (kv / "00000002.segment").unlink()
        notice(tier)
        assert probe(tier) == "on"
        assert not any(map(tier.is_there, records))
        while list(kv.glob("0*")):
            tier.poll_for(0.01)
        tier.keep(records)
        assert_holds(tier, records, [])


def test_segments_that_a_node_never_had_are_anothers_though_there_is_no_lock(kv: Path) -> None:
    """They are not removed, and not added to."""
    with driven(kv) as first:
        first.keep(tails(4))
        for path in kv.iterdir():
            path.unlink()
        keep(kv, tails(4, first=50))
        keep(kv, tails(4, first=60))
        (kv / "LOCK").unlink()
        notice(first)
        for _ in range(PROBES):
            assert "another node" in probe(first)
    with driven(kv) as second:
        assert_holds(second, tails(4, first=50) + tails(4, first=60), [])


def test_a_lock_that_cannot_be_had_yet_costs_no_descriptor(kv: Path) -> None:
    """However often it is tried; nor is it taken for another node's, once it can be had."""
    with driven(kv) as tier:
        tier.keep(tails(4))
        shutil.rmtree(kv)
        files_of(disk_of(tier)).fail(Call.LOCK, errno.ENOLCK)
        notice(tier)
        for _ in range(PROBES):
            assert f"errno {errno.ENOLCK}" in probe(tier)
        assert files_of(disk_of(tier)).injected["lock ENOLCK"] == PROBES
        assert len(locks_in(kv)) == 1, "that of before"
        files_of(disk_of(tier)).heal()
        assert probe(tier) == "on"
        tier.keep(tails(4))


def test_a_lock_that_cannot_be_read_costs_no_descriptor(kv: Path) -> None:
    """It says which process has it."""
    with driven(kv) as first:
        first.keep(tails(4))
        shutil.rmtree(kv)
        with driven(kv):
            files_of(disk_of(first)).fail(Call.READ, errno.EIO, path_part="LOCK")
            notice(first)
            for _ in range(PROBES):
                assert f"errno {errno.EIO}" in probe(first)
            assert len(locks_in(kv)) == 2, "one of each"


def locks_in(kv: Path) -> list[str]:
    """Descriptors of locks."""
    return [name for name in open_files() if name.startswith(str(kv / "LOCK"))]


def test_a_start_that_ends_by_anything_gives_the_lock_back(
    kv: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who tries again must not be told that this process has the disk."""
    keep(kv, tails(2))

    def have_no_memory(*_: object) -> None:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr("kvtide.tiers.disk.intake.LazyCatalog.take", have_no_memory)
        with pytest.raises(MemoryError):
            open_disk(kv)
    with driven(kv) as tier:
        assert_holds(tier, tails(2), [])
