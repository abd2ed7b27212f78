"""A shared directory in trouble: stale handles, errors, mounts that vanish or hang, no room."""

import errno
import os
import shutil
import threading
from pathlib import Path

import pytest

from kvtide.errors import ConfigError
from kvtide.testing.faulty_files import Call, FaultyFiles
from kvtide.testing.tier_records import BLOCKS_PER_CHUNK, chain_of, text
from kvtide.tiers.base import LoadOutcome, StoreOutcome
from kvtide.tiers.breaker import SHARED_RETRY_MS_MAX
from kvtide.tiers.kinds import Kind
from kvtide.tiers.shared_dir.journal import (
    OPENING_BYTES,
    KeptRow,
    KindRow,
    encoded,
    opening_of,
)
from kvtide.tiers.shared_dir.stores import rows_bytes
from kvtide.units import MiB
from tests.tiers.disk_place import flip
from tests.tiers.shared_place import (
    LARGE,
    ROOT,
    SMALL,
    LateFiles,
    bytes_taken,
    driven,
    files_of,
    folder_of,
    look,
    shared_of,
    tails,
    wait_on,
    wait_quiet,
)


def test_a_stale_handle_is_a_miss(kv: Path) -> None:
    """Somebody else has removed the file while it was read."""
    records = tails(2)
    with driven(kv) as here, driven(kv) as there:
        here.keep(records)
        look(there)
        assert there.is_there(records[0])
        files_of(shared_of(there)).fail(Call.READ, errno.ESTALE, count=1, path_part="/")
        assert there.load(records[0]) is LoadOutcome.ABSENT
        assert there.load(records[1]) is LoadOutcome.LOADED


@pytest.mark.parametrize(
    ("code", "is_there"), [(errno.ESTALE, True), (errno.EACCES, False), (errno.EIO, True)]
)
def test_one_journal_that_cannot_be_read_costs_no_more_than_its_member(
    kv: Path, code: int, *, is_there: bool
) -> None:
    """One that is being replaced is read the next time; what is not for us to see is not there.
    An error of the place is neither: nothing is forgotten by it."""
    with driven(kv) as here, driven(kv) as there, driven(kv) as other:
        there.keep(tails(1))
        other.keep(tails(1, first=9))
        look(here)
        folder = folder_of(shared_of(there)).name
        files_of(shared_of(here)).fail(Call.OPEN, code, path_part=f"{folder}/journal")
        other.keep(tails(1, first=10))
        for _ in range(8):
            look(here)
        assert here.is_there(tails(1)[0]) is is_there
        assert all(map(here.is_there, tails(2, first=9)))
        assert here.tier.statistics().state == "on"
        files_of(shared_of(here)).heal()
        there.keep(tails(1, first=20))
        look(here)
        assert all(map(here.is_there, [*tails(1), *tails(1, first=20)]))


def test_a_place_that_gives_no_journal_is_not_asked_for_a_while(kv: Path) -> None:
    """Names are there, but nothing can be read: a probe that only looked for names would say that
    all is well."""
    with driven(kv) as here, driven(kv) as there, driven(kv) as other:
        for tier in (there, other):
            tier.keep(tails(1))
        files_of(shared_of(here)).fail(Call.OPEN, errno.EIO, path_part="journal")
        for _ in range(6):
            look(here)
        assert "errno 5" in here.tier.statistics().state
        files_of(shared_of(here)).heal()
        wait_on(here)
        assert here.is_there(tails(1)[0])


class PlainFiles(FaultyFiles):
    """A file system without direct I/O, as some are."""

    def open(self, path: str, flags: int) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL), path)
        return super().open(path, flags)


def test_a_file_system_without_direct_io_will_do(kv: Path) -> None:
    """Then the page cache is told that it need not keep what host memory does."""
    records = chain_of(ROOT, SMALL, text(1, 10))
    with driven(kv, files=PlainFiles()) as here, driven(kv) as there:
        here.keep(records)
        look(there)
        for tier in (here, there):
            assert {tier.load(record) for record in records} == {LoadOutcome.LOADED}
        assert files_of(shared_of(here)).calls[Call.DROP_CACHED] == 6
        assert files_of(shared_of(there)).calls[Call.DROP_CACHED] == 0


def test_an_error_is_no_miss(kv: Path) -> None:
    """The record is still there when the place works again."""
    (record,) = tails(1)
    with driven(kv) as tier:
        tier.keep([record])
        files_of(shared_of(tier)).fail(Call.READ, errno.EIO, count=1)
        assert tier.load(record) is LoadOutcome.FAILED
        assert tier.load(record) is LoadOutcome.LOADED


def test_a_mount_that_vanishes_and_comes_back(kv: Path) -> None:
    """Nothing is a miss that is only gone for now, and nothing is written where it was."""
    records = tails(20)
    with driven(kv) as tier:
        tier.keep(records[:4])
        files = files_of(shared_of(tier))
        shutil.move(kv, kv.parent / "away")
        assert {tier.load(record) for record in records[:4]} == {LoadOutcome.FAILED}
        outcomes = tier.store(records[4:12])
        assert set(outcomes) <= {StoreOutcome.FAILED, StoreOutcome.BROKEN}
        assert not kv.exists(), "nothing is made where the mount was"
        shutil.move(kv.parent / "away", kv)
        wait_on(tier)
        assert {tier.load(record) for record in records[:4]} == {LoadOutcome.LOADED}
        tier.keep(records[4:])
        assert files.calls[Call.WRITE]


def test_a_place_that_was_away_for_long_is_back_within_seconds(kv: Path) -> None:
    """However often it was tried in vain: hits resume within T_heal."""
    (record,) = tails(1)
    with driven(kv) as tier:
        tier.keep([record])
        shutil.move(kv, kv.parent / "away")
        while tier.tier.statistics().state == "on":
            tier.load(record)
        for _ in range(10):
            tier.pass_time(60_000)
            wait_quiet(tier)
        assert tier.tier.statistics().state != "on"
        shutil.move(kv.parent / "away", kv)
        tier.pass_time(SHARED_RETRY_MS_MAX)
        while tier.load(record) is not LoadOutcome.LOADED:
            tier.poll_for(0.02)


def test_lookups_do_not_wait_for_a_place_that_hangs(kv: Path) -> None:
    """Those that wait are answered after two seconds, all later ones at once."""
    records = tails(3)
    with driven(kv) as tier:
        tier.keep(records[:1])
        with files_of(shared_of(tier)).stalled():
            tier.pass_time(100)
            waiting = tier.ask((), records[1].digests, root=ROOT, layout=records[1].layout)
            files_of(shared_of(tier)).wait_stalled(1)
            for _ in range(4):
                tier.poll()
                tier.pass_time(1_000)
            assert tier.found(waiting).records == []
            assert "has not come back" in tier.tier.statistics().state
            at_once = tier.ask((), records[0].digests, root=ROOT, layout=records[0].layout)
            assert tier.found(at_once).records == []
            assert tier.load(records[0]) is LoadOutcome.BROKEN
        wait_on(tier)
        assert tier.load(records[0]) is LoadOutcome.LOADED


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_server_takes_nothing_and_leaves_nothing_behind(kv: Path, code: int) -> None:
    records = tails(3)
    with driven(kv) as tier:
        tier.keep(records[:1])
        for call in (Call.WRITE, Call.SYNC):
            files_of(shared_of(tier)).fail(call, code, count=1)
            assert tier.store(records[1:2]) == [StoreOutcome.NO_ROOM]
            assert len(list(folder_of(shared_of(tier)).glob("??/*"))) == 1
        tier.keep(records[1:])
        assert all(map(tier.is_there, records))
        shared_of(tier).check_integrity()


def test_a_full_server_gets_room_from_what_is_evicted(kv: Path) -> None:
    """Not even a row that says what goes finds room: then files go first."""
    with driven(kv, MiB) as tier:
        count = used = one = 0
        while used + one + rows_bytes(tails(1)[0]) <= MiB:
            tier.keep(tails(1, first=count))
            one, used = tier.tier.statistics().bytes_used - used, tier.tier.statistics().bytes_used
            count += 1
        assert not tier.tier.statistics().evicted
        before = len(list(folder_of(shared_of(tier)).glob("??/*")))
        files = files_of(shared_of(tier))
        files.fail(Call.WRITE, errno.ENOSPC, path_part="journal")
        job = tier.submit_store(tails(1, first=count)[0])
        while not tier.has_ended(job):
            tier.pass_time(100)
            tier.poll_for(0.02)
        assert len(list(folder_of(shared_of(tier)).glob("??/*"))) < before
        files.heal()
        wait_on(tier)
        tier.keep(tails(1, first=count + 1))
        shared_of(tier).check_integrity()


def test_a_folder_of_another_version_is_left_alone(kv: Path) -> None:
    """Whether its owner is there or not; nothing of it is found, and nothing changed."""
    with driven(kv) as tier:
        tier.keep(tails(2))
        journal = folder_of(shared_of(tier)) / "journal"
    flip(journal, 8)
    before = journal.read_bytes()
    with driven(kv) as tier:
        assert folder_of(shared_of(tier)) != journal.parent
        assert not any(map(tier.is_there, tails(2)))
        tier.keep(tails(2))
    assert journal.read_bytes() == before
    assert not (journal.parent / "owner").exists()


@pytest.mark.parametrize("mode", [0o777, 0o720, 0o1777])
def test_a_directory_that_others_may_write_to_is_refused(kv: Path, mode: int) -> None:
    """With what to do; nothing is made in it."""
    kv.mkdir()
    kv.chmod(mode)
    with pytest.raises(ConfigError, match="chmod it to 700"), driven(kv):
        pass
    assert not list(kv.iterdir())


def test_a_cap_that_was_lowered_holds_from_the_start(kv: Path) -> None:
    """Before anything is served."""
    records = [chain_of(ROOT, LARGE, text(number, BLOCKS_PER_CHUNK))[0] for number in range(12)]
    with driven(kv, 8 * MiB) as tier:
        tier.keep(records)
    with driven(kv, MiB) as tier:
        assert bytes_taken(folder_of(shared_of(tier))) <= MiB
        there = [record for record in records if tier.is_there(record)]
        assert len(there) >= 2
        assert {tier.load(record) for record in there} == {LoadOutcome.LOADED}
        shared_of(tier).check_integrity()


def test_a_directory_that_cannot_be_used_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(ConfigError, match="cannot be used"), driven(tmp_path / "file" / "kv"):
        pass


def test_a_store_that_fails_late_leaves_nothing_behind(kv: Path) -> None:
    """Its file was renamed, though that was said to have failed: it would count to no cap."""
    (record,) = tails(1)
    with driven(kv, files=LateFiles(record.key.hex())) as tier:
        assert tier.store([record]) == [StoreOutcome.FAILED]
        assert not list(folder_of(shared_of(tier)).glob("??/*"))
        tier.keep([record])
        assert tier.load(record) is LoadOutcome.LOADED


def test_what_a_store_could_not_take_away_counts_until_it_is(kv: Path) -> None:
    """The server failed its write, and then the removal of what was written."""
    records = tails(3)
    with driven(kv) as tier:
        tier.keep(records[:1])
        used = tier.tier.statistics().bytes_used
        files = files_of(shared_of(tier))
        files.fail(Call.SYNC, errno.EIO, count=1)
        files.fail(Call.UNLINK, errno.EIO, count=2)
        assert tier.store(records[1:2]) == [StoreOutcome.FAILED]
        assert len(list(folder_of(shared_of(tier)).glob("??/*"))) == 2
        assert tier.tier.statistics().bytes_used > used
        files.heal()
        tier.keep(records[2:])
        assert len(list(folder_of(shared_of(tier)).glob("??/*"))) == 2
        assert all(map(tier.is_there, (records[0], records[2])))
        shared_of(tier).check_integrity()


@pytest.mark.parametrize("code", [errno.EACCES, errno.ESTALE])
def test_what_cannot_be_removed_is_not_tried_all_the_time(kv: Path, code: int) -> None:
    """Once with each tick; each try writes to the journal. (A stale handle may be that of the
    directory above.)"""
    with driven(kv) as tier:
        tier.keep(tails(1))
        files = files_of(shared_of(tier))
        files.fail(Call.UNLINK, code, path_part="/")
        tier.tier.clear(None)
        for tries in range(1, 4):
            wait_quiet(tier)
            assert files.injected[f"unlink {errno.errorcode[code]}"] == tries
            tier.pass_time(100)
        files.heal()
        while list(folder_of(shared_of(tier)).glob("??/*")):
            tier.pass_time(100)
            tier.poll_for(0.02)


def test_a_sweep_goes_on_beside_what_somebody_reads(kv: Path) -> None:
    """An NFS client keeps what was removed for as long as it is read, under a name of its own."""
    with driven(kv) as tier:
        tier.keep(tails(1))
        folder = folder_of(shared_of(tier))
    silly = next(folder.glob("??")) / ".nfs00000001"
    silly.write_bytes(b"x")
    (folder / silly.name).write_bytes(b"x")
    files = FaultyFiles()
    files.fail(Call.UNLINK, errno.EBUSY, path_part=silly.name)
    with driven(kv, files=files) as tier:
        tier.keep(tails(3))
        assert files.injected["unlink EBUSY"] == 2
    with driven(kv) as tier:
        tier.keep(tails(4))
        assert not list(folder.rglob(".nfs*"))


def test_an_end_does_not_wait_for_a_server_that_hangs_at_the_last_step(kv: Path) -> None:
    """What is left then is done when the server answers."""
    with driven(kv) as tier:
        tier.keep(tails(1))
        owner = folder_of(shared_of(tier)) / "owner"
        with files_of(shared_of(tier)).stalled(Call.UNLINK):
            closing = threading.Thread(target=tier.close, args=(0.2,), daemon=True)
            closing.start()
            files_of(shared_of(tier)).wait_stalled(1)
            closing.join(20)
            assert not closing.is_alive()
            assert owner.exists()
        shared_of(tier)._workers.stop(30)
        assert not owner.exists()


def test_a_row_that_cannot_be_is_not_believed(kv: Path) -> None:
    """More blocks than a chunk has, or a key that is another's: a fault of whoever wrote it."""
    (record,) = tails(1)
    kind = Kind(ROOT, record.layout)
    digests = [record.digests * 9, bytes(16)]
    rows = [KeptRow(1, at, record.key, ROOT.key, one) for at, one in enumerate(digests, 1)]
    member = kv / ("0a" * 16)
    with driven(kv) as tier:
        member.mkdir()
        journal = opening_of(7, 0) + encoded([KindRow(1, kind), *rows], 7, OPENING_BYTES)
        (member / "journal").write_bytes(journal)
        look(tier)
        asked = tier.ask((), record.digests, root=ROOT, layout=record.layout)
        assert tier.found(asked).records == []
        assert tier.tier.statistics().records == 0
    with driven(kv) as tier:
        assert folder_of(shared_of(tier)) == member, "the fullest"
        assert tier.tier.statistics().records == 0
