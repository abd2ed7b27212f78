"""One file in a shared directory that is not as it was left: it costs no more than itself."""

import errno
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from kvtide.testing.faulty_files import Call, FaultyFiles
from kvtide.testing.tier_records import chain_of, text
from kvtide.tiers.base import LoadOutcome, StoreOutcome
from kvtide.tiers.files import SystemFiles
from kvtide.tiers.kinds import Kind
from kvtide.tiers.scope import EVERYTHING
from kvtide.tiers.shared_dir.journal import (
    EVERY_NUMBER,
    Cleared,
    KeptRow,
    KindRow,
    Piece,
    Position,
)
from kvtide.tiers.shared_dir.members import ALIVE_MS, Place
from kvtide.tiers.shared_dir.ops import ClaimOp, Ended, Hands, LookOp, claimed
from kvtide.tiers.shared_dir.others import Others
from kvtide.tiers.shared_dir.view import View
from tests.tiers.disk_place import flip
from tests.tiers.shared_place import (
    ROOT,
    SMALL,
    driven,
    file_of,
    files_of,
    folder_of,
    look,
    shared_of,
    tails,
    wait_on,
    wait_quiet,
)

# ---- a journal of another


@pytest.mark.parametrize("code", [errno.EIO, errno.EACCES, errno.ESTALE])
def test_a_clear_means_all_of_a_member_whose_journal_cannot_be_read(kv: Path, code: int) -> None:
    """Until it can: then no more than what it had come to. What others have is not waited with."""
    with driven(kv) as there, driven(kv) as other:
        journal = f"{folder_of(shared_of(there)).name}/journal"
        with driven(kv) as here:
            files = files_of(shared_of(here))
            files.fail(Call.OPEN, code, path_part=journal)
            there.keep(tails(2))
            here.tier.clear(None)
            wait_quiet(here)
            assert here.tier.statistics().state == "on"
            other.keep(tails(1, first=10))
            look(here)
            assert here.is_there(tails(1, first=10)[0])
        with driven(kv) as here:
            look(here)
            assert not any(map(here.is_there, tails(2))), "it is noted"
            there.keep(tails(1, first=20))
            look(here)
            assert here.is_there(tails(1, first=20)[0])
            assert not any(map(here.is_there, tails(2)))


def test_a_look_that_began_before_a_clear_does_not_say_how_much_that_means() -> None:
    """The member has stored more since, which the clear means too; nor does one that has read half
    of it."""
    own, there = b"o" * 16, b"t" * 16
    records = tails(4)
    kind = Kind(ROOT, records[0].layout)
    others = Others(View(own))

    def take(op: LookOp, *numbers: int, has_more: bool = False) -> list[bytes]:
        rows = [
            KeptRow(1, number, record.key, record.parent, record.digests)
            for number, record in enumerate(records, 1)
            if number in numbers
        ]
        piece = Piece([KindRow(1, kind), *rows], Position(7, 100), False, has_more, 100, 0)
        others.take(Ended(op, pieces={there: piece}))
        return list(others._view.index)

    early = others.look()
    others.clearing.append(EVERYTHING)
    others.noted(EVERYTHING, {own: 0, there: EVERY_NUMBER})
    assert take(early, 1) == []
    assert take(others.look(), 2, has_more=True) == []
    assert take(others.look(), 3) == []
    assert take(others.look(), 4) == [records[3].key]


def test_such_a_clear_does_not_mean_what_is_stored_in_that_folder_once_it_is_ours(
    kv: Path,
) -> None:
    """Its owner ended before anybody has read how far it had come."""
    with driven(kv) as there:
        there.keep(tails(2))
        member = shared_of(there)._place.own
        place = Place(str(kv), SystemFiles())
        hands = Hands(place, claimed(place))
    cleared = Cleared({EVERYTHING: {member: EVERY_NUMBER}})
    assert hands.run(ClaimOp(cleared)).error is None
    hands.leave()
    with driven(kv) as here:
        assert shared_of(here)._place.own == member
        assert not any(map(here.is_there, tails(2)))
        here.keep(tails(1, first=9))
    with driven(kv) as here:
        assert here.is_there(tails(1, first=9)[0])
        assert not any(map(here.is_there, tails(2)))


def test_what_is_no_folder_is_no_member(kv: Path) -> None:
    """A file with such a name, or something else where a journal would be."""
    with driven(kv) as here:
        (kv / ("0a" * 16)).write_bytes(b"x")
        (kv / ("0b" * 16) / "journal").mkdir(parents=True)
        (kv / ("0c" * 16)).symlink_to("nowhere")
        here.keep(tails(2))
        here.tier.clear(None)
        look(here)
        wait_quiet(here)
        assert here.tier.statistics().state == "on"
        here.keep(tails(2))
    with driven(kv) as here:
        assert all(map(here.is_there, tails(2)))
        assert shared_of(here)._others._is_settled, "nothing more is expected of them"


@pytest.mark.parametrize("call", [Call.OPEN, Call.READ, Call.SIZE])
def test_a_folder_whose_journal_cannot_be_read_is_not_taken(kv: Path, call: Call) -> None:
    """A start takes another one; the next one can read it."""
    with driven(kv) as tier:
        tier.keep(tails(2))
        folder = folder_of(shared_of(tier))
    files = FaultyFiles()
    files.fail(call, errno.EIO, path_part=f"{folder.name}/journal")
    with driven(kv, files=files) as tier:
        assert folder_of(shared_of(tier)) != folder
        tier.keep(tails(1, first=9))
    assert not (folder / "owner").exists()
    with driven(kv) as tier:
        assert folder_of(shared_of(tier)) == folder
        assert all(map(tier.is_there, [*tails(2), *tails(1, first=9)]))


def test_the_only_other_journal_cannot_be_read(kv: Path) -> None:
    """Our own can: so it is not the place, and what is known is served."""
    with driven(kv) as here, driven(kv) as there:
        here.keep(tails(1))
        there.keep(tails(1, first=9))
        look(here)
        journal = f"{folder_of(shared_of(there)).name}/journal"
        files_of(shared_of(here)).fail(Call.OPEN, errno.EIO, path_part=journal)
        for _ in range(8):
            look(here)
        assert here.tier.statistics().state == "on"
        here.keep(tails(2))
        for record in [*tails(2), *tails(1, first=9)]:
            assert here.load(record) is LoadOutcome.LOADED


# ---- the own journal


def remove(journal: Path, older: bytes) -> None:
    journal.unlink()


def damage(journal: Path, older: bytes) -> None:
    flip(journal, 0)


def cut(journal: Path, older: bytes) -> None:
    with journal.open("r+b") as file:
        file.truncate(len(older))


def put_back(journal: Path, older: bytes) -> None:
    journal.unlink()
    journal.write_bytes(older)


def empty(journal: Path, older: bytes) -> None:
    with journal.open("r+b") as file:
        file.truncate(0)


@pytest.mark.parametrize("spoil", [remove, damage, cut, put_back, empty])
@pytest.mark.parametrize("is_storing", [False, True])
def test_whoever_has_lost_its_journal_takes_another_folder(
    kv: Path,
    spoil: Callable[[Path, bytes], None],
    caplog: pytest.LogCaptureFixture,
    *,
    is_storing: bool,
) -> None:
    """Once, and within half a minute, whether it stores meanwhile or not; what it stores then is
    found by all, and what it has cleared is not."""
    with driven(kv) as here, driven(kv) as there:
        there.keep(tails(2, first=90))
        here.tier.clear(None)
        here.keep(tails(1))
        folder = folder_of(shared_of(here))
        older = (folder / "journal").read_bytes()
        here.keep(tails(4))
        look(there)
        caplog.clear()
        spoil(folder / "journal", older)
        seconds, count = 0, 20
        while folder_of(shared_of(here)) == folder or here.tier.statistics().state != "on":
            assert seconds <= ALIVE_MS // 1_000 + 8
            seconds += 1
            here.pass_time(1_000)
            if is_storing:
                here.store(tails(1, first=count))
                count += 1
            wait_quiet(here)
        here.keep(tails(4))
        assert [line.message.endswith("work again") for line in caplog.records].count(True) == 1
        look(there)
        assert all(map(there.is_there, tails(4)))
        look(here)
        assert not any(map(here.is_there, tails(2, first=90)))
        shared_of(here).check_integrity()
        there.keep(tails(2, first=80))
        here.close(30)
        with driven(kv) as here:
            assert all(map(here.is_there, [*tails(4), *tails(2, first=80)]))
            assert not any(map(here.is_there, tails(2, first=90)))


def test_a_journal_that_is_not_ours_is_not_written_anew(
    kv: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was put back while we had the newer one open, and that was full of garbage just then."""
    monkeypatch.setattr("kvtide.tiers.shared_dir.own.GARBAGE_ROWS", 4)
    with driven(kv) as here:
        here.keep(tails(1))
        path = folder_of(shared_of(here)) / "journal"
        older = path.read_bytes()
        here.keep(tails(8))
        put_back(path, older)
        here.tier.clear(None)
        wait_quiet(here)
        assert path.read_bytes() == older


def test_a_claim_makes_nothing_where_the_mount_was(kv: Path) -> None:
    """The journal was lost, and before another folder was taken so was the mount."""
    with driven(kv) as tier:
        tier.keep(tails(1))
        (folder_of(shared_of(tier)) / "journal").unlink()
        while tier.tier.statistics().state == "on":
            tier.pass_time(ALIVE_MS)
            wait_quiet(tier)
        assert "was removed" in tier.tier.statistics().state
        shutil.move(kv, kv.parent / "away")
        for _ in range(3):
            tier.pass_time(5_000)
            wait_quiet(tier)
        assert not kv.exists()
        shutil.move(kv.parent / "away", kv)
        wait_on(tier)
        tier.keep(tails(3))


# ---- what lies in the own folder


def test_what_is_no_file_in_a_folder_is_left_alone_and_stores_go_on(kv: Path) -> None:
    """Some servers make a directory in each; a file may be marked as not to be removed; one may
    stand where a directory belongs."""
    (record,) = tails(1)
    with driven(kv) as tier:
        tier.keep([record])
        folder = folder_of(shared_of(tier))
        above = file_of(shared_of(tier), record).parent
    for directory in (above / "@eaDir", folder / "@eaDir.tmp", above / "@eaDir" / "full"):
        directory.mkdir(parents=True)
    marked = above / "marked"
    marked.write_bytes(b"x")
    digits = next(path.hex() for path in map(bytes, zip(range(256))) if path.hex() != above.name)
    (folder / digits).write_bytes(b"x")
    files = FaultyFiles()
    files.fail(Call.UNLINK, errno.EPERM, path_part=marked.name)
    with driven(kv, files=files) as tier:
        tier.keep(tails(9))
        assert tier.tier.statistics().state == "on"
        assert files.injected["unlink EPERM"] == 1
        assert not (folder / digits).is_file()
        assert (above / "@eaDir").is_dir()


def test_a_sweep_that_fails_and_fails_is_the_probe(
    kv: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Stores wait for it: as long as it fails it would help none that something else works."""
    with driven(kv) as tier:
        tier.keep(tails(1))
        left = next(folder_of(shared_of(tier)).glob("??")) / "left.tmp"
    left.write_bytes(b"x")
    files = FaultyFiles()
    files.fail(Call.UNLINK, errno.EACCES, path_part=left.name)
    with driven(kv, files=files) as tier:
        while tier.tier.statistics().state == "on":
            assert tier.store(tails(1, first=9)) == [StoreOutcome.FAILED]
        for _ in range(5):
            tier.pass_time(5_000)
            wait_quiet(tier)
            assert tier.store(tails(1, first=9)) == [StoreOutcome.BROKEN]
        assert "errno 13" in tier.tier.statistics().state
        assert "work again" not in caplog.text
        files.heal()
        wait_on(tier)
        tier.keep(tails(1, first=9))
        assert not left.exists()


# ---- records


def test_a_copy_that_cannot_be_read_is_no_loss_where_another_is_good(kv: Path) -> None:
    """It is not gone either: where both fail, the record is there when they work."""
    (record,) = tails(1)
    with driven(kv) as here, driven(kv) as there:
        here.keep([record])
        there.keep([record])
        look(here)
        files = files_of(shared_of(here))
        files.fail(Call.READ, errno.EIO, path_part=str(file_of(shared_of(here), record)))
        assert here.load(record) is LoadOutcome.LOADED
        files.fail(Call.READ, errno.EIO, path_part=str(file_of(shared_of(there), record)))
        assert here.load(record) is LoadOutcome.FAILED
        files.heal()
        shutil.rmtree(folder_of(shared_of(there)))
        assert here.load(record) is LoadOutcome.LOADED


def test_what_came_in_with_its_parent_may_be_let_go_at_once(kv: Path) -> None:
    """An own tail and a longer record of another waited for the same parent, which is stored while
    it is not known yet what all have."""
    first, tail = chain_of(ROOT, SMALL, text(1, 5))
    _, longer = chain_of(ROOT, SMALL, text(1, 8))
    with driven(kv) as there, driven(kv) as other:
        with driven(kv) as here, driven(kv) as above:
            above.keep([first])
            for member, record in ((here, tail), (there, longer)):
                look(member)
                member.keep([record])
            lost, own = (folder_of(shared_of(one)) for one in (above, here))
            here.keep(tails(4))
        shutil.rmtree(lost)
        files = FaultyFiles()
        journal = f"{folder_of(shared_of(other)).name}/journal"
        files.fail(Call.OPEN, errno.EIO, path_part=journal)
        with driven(kv, files=files) as here:
            assert folder_of(shared_of(here)) == own
            look(here)
            here.keep([first])
            assert here.find([first, longer]) == [first, longer]
            wait_quiet(here)
            assert not file_of(shared_of(here), tail).exists()
            shared_of(here).check_integrity()
