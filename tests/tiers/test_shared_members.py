"""Several members of one shared directory: what each may rely on, whatever the others do."""

import errno
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from kvtide.errors import ConfigError
from kvtide.testing.faulty_files import Call, FaultyFiles
from kvtide.testing.tier_drive import DrivenTier
from kvtide.testing.tier_records import BLOCKS_PER_CHUNK, chain_of, layout_of, root_of, text
from kvtide.tiers.base import LoadOutcome, StoreOutcome
from kvtide.tiers.disk.files import SystemFiles
from kvtide.tiers.shared_dir.members import SILENT_S, Place, Process, this_process
from kvtide.units import KiB, MiB
from tests.tiers.disk_place import flip, payload_offset
from tests.tiers.shared_place import (
    ROOT,
    SMALL,
    bytes_taken,
    driven,
    file_of,
    files_of,
    look,
    part_of,
    shared_of,
    tails,
)

LARGE = layout_of(64 * KiB)


@pytest.fixture
def kv(tmp_path: Path) -> Path:
    """The directory."""
    return tmp_path / "kv"


# ---- sharing


def test_what_one_stored_the_other_finds_and_does_not_store_again(kv: Path) -> None:
    records = chain_of(ROOT, SMALL, text(1, 10))
    with driven(kv) as here, driven(kv) as there:
        here.keep(records)
        look(there)
        assert there.find(records[:2], records[2].digests) == records
        assert {there.load(record) for record in records} == {LoadOutcome.LOADED}
        assert there.store(records) == [StoreOutcome.HELD] * 3
        assert there.tier.statistics().bytes_used < records[0].payload_bytes, "nothing is its own"
        assert there.tier.statistics().records == 3


def test_a_chain_may_be_in_several_parts(kv: Path) -> None:
    """Each goes on behind what the other has; a third finds all, and so do both after a start."""
    records = chain_of(ROOT, SMALL, text(1, 18))
    with driven(kv) as here, driven(kv) as there:
        for number, record in enumerate(records):
            member = (here, there)[number % 2]
            look(member)
            member.keep([record])
        with driven(kv) as third:
            assert third.find(records[:4], records[4].digests) == records
        here.close(30)
        there.close(30)
    with driven(kv) as here, driven(kv) as there:
        for member in (here, there):
            look(member)
            assert member.find(records[:4], records[4].digests) == records
            assert {member.load(record) for record in records} == {LoadOutcome.LOADED}
            shared_of(member).check_integrity()


def test_both_may_store_the_same_at_once(kv: Path) -> None:
    """Neither has seen the other's: it is there twice, and goes once both have evicted it."""
    (record,) = chain_of(ROOT, SMALL, text(1, 4))
    with driven(kv) as here, driven(kv) as there:
        here.keep([record])
        there.keep([record])
        look(here)
        assert here.is_there(record)
        here.tier.clear(None)
        assert not here.is_there(record)
        assert there.load(record) is LoadOutcome.LOADED
        with driven(kv) as third:
            assert third.load(record) is LoadOutcome.LOADED


def test_a_lookup_that_is_answered_in_full_asks_nobody(kv: Path) -> None:
    """And one that is not asks once in a tenth of a second, whatever comes."""
    records = chain_of(ROOT, SMALL, text(1, 10))
    with driven(kv) as here, driven(kv):
        here.keep(records)
        files = files_of(shared_of(here))
        here.pass_time(100)
        before = files.calls[Call.NAMES]
        assert here.find(records[:2], records[2].digests) == records
        assert files.calls[Call.NAMES] == before
        lookups = [here.ask([record]) for record in chain_of(ROOT, SMALL, text(2, 16))]
        here.wait(lookups)
        assert files.calls[Call.NAMES] == before + 1


# ---- caps and eviction


def test_a_member_keeps_to_its_own_share(kv: Path) -> None:
    """It fills it over and over; the other's records stay where they are."""
    other = chain_of(root_of("other"), SMALL, text(1, 10))
    with driven(kv, 2 * MiB) as here, driven(kv, 4 * MiB) as there:
        there.keep(other)
        taken = bytes_taken(part_of(shared_of(there)))
        for number in range(40):
            record = chain_of(ROOT, LARGE, text(number, BLOCKS_PER_CHUNK))[0]
            assert here.store([record]) == [StoreOutcome.STORED]
            assert bytes_taken(part_of(shared_of(here))) <= 2 * MiB
        assert here.tier.statistics().evicted > 30
        assert bytes_taken(part_of(shared_of(there))) == taken
        look(here)
        assert here.find(other[:2], other[2].digests) == other


def test_what_hangs_on_what_another_has_evicted_is_a_miss_and_gives_its_room_back(
    kv: Path,
) -> None:
    """And what another keeps below one's own is left for longer than what nobody needs."""
    first, second, tail = chain_of(ROOT, LARGE, text(1, 10))
    with driven(kv, 2 * MiB) as here, driven(kv, 4 * MiB) as there:
        here.keep([first])
        look(there)
        assert there.find([first]) == [first]
        there.keep([second, tail])
        look(here)
        assert here.find([first, second], tail.digests) == [first, second, tail]
        for number in range(2, 10):
            here.keep(chain_of(ROOT, LARGE, text(number, BLOCKS_PER_CHUNK)))
        assert here.is_there(first), "the only one that others have something below"
        here.tier.clear(None)
        look(there)
        assert there.find([first, second], tail.digests) == []
        assert there.load(second) is LoadOutcome.ABSENT
        used = there.tier.statistics().bytes_used
        while used > second.payload_bytes:
            there.poll_for(0.05)
            used = there.tier.statistics().bytes_used
        assert not file_of(shared_of(there), second).exists()
        shared_of(there).check_integrity()
        look(here)
        here.keep([first])
        look(there)
        assert there.find([first]) == [first]


def test_a_record_that_another_evicts_while_it_is_found_here_is_a_miss(kv: Path) -> None:
    records = tails(4)
    with driven(kv) as here, driven(kv) as there:
        here.keep(records)
        look(there)
        assert there.is_there(records[0])
        file_of(shared_of(here), records[0]).unlink()
        assert there.load(records[0]) is LoadOutcome.ABSENT
        assert not there.is_there(records[0])
        assert there.load(records[1]) is LoadOutcome.LOADED
        assert here.load(records[0]) is LoadOutcome.ABSENT
        assert here.store(records[:1]) == [StoreOutcome.STORED]


def test_a_record_that_is_damaged_in_anothers_part_is_nobodys(kv: Path) -> None:
    """The reader leaves the file alone; its owner removes it when it meets it."""
    records = tails(2)
    with driven(kv) as here, driven(kv) as there:
        here.keep(records)
        look(there)
        assert there.is_there(records[0])
        flip(file_of(shared_of(here), records[0]), payload_offset(records[0]) + 5)
        assert there.load(records[0]) is LoadOutcome.CORRUPT
        assert there.load(records[0]) is LoadOutcome.ABSENT
        assert there.store(records[:1]) == [StoreOutcome.STORED], "its own is good"
        assert there.load(records[0]) is LoadOutcome.LOADED
        assert here.load(records[0]) is LoadOutcome.CORRUPT
        assert there.load(records[1]) is LoadOutcome.LOADED


def test_what_hung_on_a_record_that_is_gone_is_back_with_it(kv: Path) -> None:
    """Damaged here, and stored again, before the other has seen that its own hangs on nothing."""
    first, second, tail = chain_of(ROOT, SMALL, text(1, 10))
    with driven(kv) as here, driven(kv) as there:
        here.keep([first])
        look(there)
        there.keep([second, tail])
        look(here)
        assert here.find([first, second], tail.digests) == [first, second, tail]
        flip(file_of(shared_of(here), first), payload_offset(first) + 5)
        assert here.load(first) is LoadOutcome.CORRUPT
        assert here.find([first, second]) == []
        assert here.load(second) is LoadOutcome.ABSENT
        here.keep([first])
        assert here.find([first, second], tail.digests) == [first, second, tail]
        shared_of(here).check_integrity()


# ---- clear


def test_a_clear_takes_away_what_others_have_too_and_for_this_node_alone(kv: Path) -> None:
    """Also after a start; what they store later is found."""
    salted = root_of(salt="secret")
    before = [*chain_of(salted, SMALL, text(1, 10)), *chain_of(ROOT, SMALL, text(1, 4))]
    later = chain_of(salted, SMALL, text(2, 6))
    with driven(kv) as there:
        there.keep(before)
        with driven(kv) as here:
            assert here.find(before[:2]) == before[:2]
            assert here.tier.clear(salted.salt_digest) == 3
            assert here.find(before[:2]) == []
            assert here.is_there(before[3])
            look(here)
            assert here.find(before[:2]) == []
            assert here.load(before[0]) is LoadOutcome.ABSENT
            assert there.find(before[:2]) == before[:2]
        with driven(kv) as here:
            assert here.find(before[:2]) == [], "it is noted"
            there.keep(later)
            look(here)
            assert here.find(later[:1], later[1].digests) == later
            assert here.find(before[:2]) == []
            assert here.store(before[:2]) == [StoreOutcome.STORED] * 2, "its own, now"
            assert here.find(before[:2]) == before[:2]
        assert there.load(before[0]) is LoadOutcome.LOADED


def test_a_clear_that_fails_at_first_is_noted_all_the_same(kv: Path) -> None:
    """Nothing of it is found meanwhile; what comes later is."""
    records, later = tails(3), tails(2, first=50)
    with driven(kv) as there:
        there.keep(records)
        with driven(kv) as here:
            files_of(shared_of(here)).fail(Call.SYNC, errno.EIO, count=2)
            here.tier.clear(None)
            look(here)
            assert not any(map(here.is_there, records))
            here.keep(tails(1, first=70))
            there.keep(later)
            look(here)
            assert all(map(here.is_there, later))
        with driven(kv) as here:
            assert not any(map(here.is_there, records))
            assert all(map(here.is_there, later))


def test_a_clear_means_what_was_not_read_yet_as_well(kv: Path) -> None:
    """The other has stored it; this one has not looked since."""
    records = tails(3)
    with driven(kv) as here, driven(kv) as there:
        there.keep(records)
        here.tier.clear(None)
        look(here)
        assert not any(map(here.is_there, records))
        assert all(map(there.is_there, records))


# ---- coming and going


def test_members_have_parts_of_their_own_whatever_they_are_called(kv: Path) -> None:
    """One host, one process, one time: the names are random, and the owner says who it is."""
    with driven(kv) as here, driven(kv) as there:
        assert part_of(shared_of(here)) != part_of(shared_of(there))
        parts = {part_of(shared_of(here)), part_of(shared_of(there))}
    with driven(kv) as one, driven(kv) as other:
        assert {part_of(shared_of(one)), part_of(shared_of(other))} == parts, (
            "both are taken again"
        )
    assert {path for path in kv.iterdir() if path.is_dir()} == parts


def test_a_part_that_was_only_begun_is_taken(kv: Path) -> None:
    """A kill came between its making and its first file: else such parts would add up."""
    begun = kv / ("0a" * 16)
    begun.mkdir(parents=True, mode=0o700)
    kv.chmod(0o700)
    with driven(kv) as tier:
        assert part_of(shared_of(tier)) == begun
        tier.keep(tails(2))
    assert [path for path in kv.iterdir() if path.is_dir()] == [begun]


def test_who_starts_takes_the_fullest_part_that_is_free(kv: Path) -> None:
    with driven(kv) as empty, driven(kv) as full:
        full.keep(tails(8))
        wanted = part_of(shared_of(full))
        empty.close(30)
    with driven(kv) as tier:
        assert part_of(shared_of(tier)) == wanted
        assert tier.tier.statistics().records == 8


@pytest.mark.parametrize(
    ("change", "is_dead"),
    [({}, False), ({"pid": 2**22 + 1}, True), ({"start": "1"}, True)]
    + [({"pid": 2**22 + 1} | one, False) for one in ({"boot": "other"}, {"namespace": "7"})],
    ids=["itself", "a pid that is free", "a pid of another", "another boot", "another container"],
)
def test_death_is_told_only_where_it_can_be_seen(
    change: dict[str, object], *, is_dead: bool
) -> None:
    """Two containers of one host name and one pid are two; a copied image boots another time."""
    me = this_process()
    words = {"boot": me.boot, "namespace": me.namespace, "pid": me.pid, "start": me.start}
    assert Process(**(words | change)).is_seen_dead(me) is is_dead  # type: ignore[arg-type]


def test_a_process_that_nobody_has_buried_is_dead() -> None:
    """As all are below a first process that does not care for them."""
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    me = this_process()
    try:
        start = Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split()[19]
        process = Process(me.boot, me.namespace, child.pid, start)
        assert not process.is_seen_dead(me)
        child.kill()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert process.is_seen_dead(me)
    finally:
        child.kill()
        child.communicate()
    assert process.is_seen_dead(me)


def test_what_a_kill_left_that_no_row_tells_of_is_removed_before_anything_is_written(
    kv: Path,
) -> None:
    """A record that was renamed and not told of, and files that were being written."""
    with driven(kv) as tier:
        tier.keep(tails(2))
        part = part_of(shared_of(tier))
        told = file_of(shared_of(tier), tails(1)[0])
    left = [part / "00" / ("00" * 32), part / "ff" / f"{'ff' * 32}.0123.tmp", part / "owner.1.tmp"]
    for path in left:
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(told.read_bytes())
    with driven(kv) as tier:
        assert part_of(shared_of(tier)) == part
        tier.keep(tails(1, first=9))
        assert not any(path.exists() for path in left)
        assert all(map(tier.is_there, tails(2)))
        shared_of(tier).check_integrity()


def test_a_silent_owner_is_followed_by_another_and_writes_no_more(kv: Path) -> None:
    """It may be alive all the same: a machine that slept. What it holds is read as anybody's."""
    records = tails(12)
    with driven(kv) as first:
        first.keep(records[:4])
        owner = part_of(shared_of(first)) / "owner"
        words = owner.read_text().split(" ")
        owner.write_text(" ".join([words[0], "another-boot", *words[2:]]))
        with driven(kv) as second:
            assert part_of(shared_of(second)) != part_of(shared_of(first)), "it is not silent yet"
        for path in kv.glob("*/owner"):
            os.utime(path, (0, path.stat().st_mtime - SILENT_S - 1))
        with driven(kv) as second:
            assert part_of(shared_of(second)) == part_of(shared_of(first))
            second.keep(records[4:6])
            outcomes = first.store(records[6:])
            assert StoreOutcome.STORED not in outcomes
            assert outcomes[-1] is StoreOutcome.BROKEN
            assert "another node has taken" in first.tier.statistics().state
            assert first.load(records[0]) is LoadOutcome.LOADED
            assert second.load(records[0]) is LoadOutcome.LOADED
            wait_on(first)
            assert part_of(shared_of(first)) != part_of(shared_of(second))
            first.keep(records[6:])
            look(second)
            for tier in (first, second):
                assert {tier.load(record) for record in records[:4]} == {LoadOutcome.LOADED}
                assert {tier.load(record) for record in records[6:]} == {LoadOutcome.LOADED}
                shared_of(tier).check_integrity()
        assert not owner.exists(), "who took it has freed it"


def test_a_part_that_somebody_removes_is_followed_by_another(kv: Path) -> None:
    """With all its records; what was cleared before stays so."""
    records = tails(12)
    with driven(kv) as here, driven(kv) as there:
        there.keep(records[:2])
        here.tier.clear(None)
        here.keep(records[2:4])
        look(there)
        shutil.rmtree(part_of(shared_of(here)))
        outcomes = here.store(records[4:])
        assert StoreOutcome.STORED not in outcomes
        assert outcomes[-1] is StoreOutcome.BROKEN
        assert "was removed" in here.tier.statistics().state
        wait_on(here)
        here.keep(records[4:])
        look(there)
        assert all(map(there.is_there, [*records[:2], *records[4:]]))
        for tier in (here, there):
            assert not any(map(tier.is_there, records[2:4]))
            assert {tier.load(record) for record in records[4:]} == {LoadOutcome.LOADED}
            shared_of(tier).check_integrity()
        here.close(30)
        with driven(kv) as here:
            assert {here.load(record) for record in records[4:]} == {LoadOutcome.LOADED}
            assert not any(map(here.is_there, records[:2])), "they were cleared here"


def wait_on(tier: DrivenTier) -> None:
    """Until it works again, by itself."""
    while tier.tier.statistics().state != "on":
        tier.pass_time(60_000)
        tier.poll_for(0.02)


def test_of_all_who_want_a_part_one_gets_it(kv: Path) -> None:
    """Eight start at once, and one part is free."""
    with driven(kv) as tier:
        tier.keep(tails(2))
        wanted = shared_of(tier)._place.own
    places = [Place(str(kv), SystemFiles()) for _ in range(8)]
    together = threading.Barrier(len(places))

    def claim(place: Place) -> None:
        together.wait()
        place.claim()

    threads = [threading.Thread(target=claim, args=(place,)) for place in places]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [place.own for place in places].count(wanted) == 1
    assert len({place.own for place in places}) == len(places)
    for place in places:
        place.require()


def test_a_member_that_is_removed_is_forgotten(kv: Path) -> None:
    """By hand, with all that it had; what hung on it goes as well."""
    first, second = chain_of(ROOT, SMALL, text(1, 8))
    with driven(kv) as here:
        with driven(kv) as there:
            there.keep([first])
            look(here)
            assert here.find([first]) == [first]
            here.keep([second])
        shutil.rmtree(part_of(shared_of(there)))
        look(here)
        assert here.find([first, second]) == []
        assert here.tier.statistics().records == 0
        shared_of(here).check_integrity()


def test_what_hangs_on_nothing_at_a_start_gives_its_room_back(kv: Path) -> None:
    """The part that had its beginning was removed while nobody was there."""
    first, second, tail = chain_of(ROOT, SMALL, text(1, 10))
    with driven(kv) as here, driven(kv) as there:
        here.keep([first])
        look(there)
        there.keep([second, tail, *tails(1)])
        gone, left = part_of(shared_of(here)), part_of(shared_of(there))
    shutil.rmtree(gone)
    with driven(kv) as tier:
        assert part_of(shared_of(tier)) == left
        while len(list(left.glob("??/*"))) > 1:
            tier.poll_for(0.05)
        assert tier.load(tails(1)[0]) is LoadOutcome.LOADED
        assert tier.tier.statistics().records == 1
        shared_of(tier).check_integrity()


def test_a_start_that_cannot_look_around_forgets_nothing(kv: Path) -> None:
    """What its own records hang on is in another's part, which it cannot read at first."""
    first, second = chain_of(ROOT, SMALL, text(1, 8))
    with driven(kv) as here:
        here.keep([first])
        with driven(kv) as there:
            look(there)
            there.keep([second])
        files = FaultyFiles()
        part = part_of(shared_of(here)).name
        files.fail(Call.OPEN, errno.EIO, count=1, path_part=f"{part}/journal")
        with driven(kv, files=files) as there:
            assert files.injected
            look(there)
            assert there.find([first, second]) == [first, second]
            assert there.load(second) is LoadOutcome.LOADED


# ---- faults


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
        part = part_of(shared_of(there)).name
        files_of(shared_of(here)).fail(Call.OPEN, code, path_part=f"{part}/journal")
        for _ in range(2):
            look(here)
        assert here.is_there(tails(1)[0]) is is_there
        assert here.is_there(tails(1, first=9)[0])
        assert here.tier.statistics().state == "on"
        files_of(shared_of(here)).heal()
        there.keep(tails(1, first=20))
        look(here)
        assert all(map(here.is_there, [*tails(1), *tails(1, first=20)]))


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
            assert len(list(part_of(shared_of(tier)).glob("??/*"))) == 1
        tier.keep(records[1:])
        assert all(map(tier.is_there, records))
        shared_of(tier).check_integrity()


def test_a_part_of_another_version_is_left_alone(kv: Path) -> None:
    """Whether its owner is there or not; nothing of it is found, and nothing changed."""
    with driven(kv) as tier:
        tier.keep(tails(2))
        journal = part_of(shared_of(tier)) / "journal"
    flip(journal, 8)
    before = journal.read_bytes()
    with driven(kv) as tier:
        assert part_of(shared_of(tier)) != journal.parent
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
        assert bytes_taken(part_of(shared_of(tier))) <= MiB
        there = [record for record in records if tier.is_there(record)]
        assert len(there) >= 2
        assert {tier.load(record) for record in there} == {LoadOutcome.LOADED}
        shared_of(tier).check_integrity()


def test_a_directory_that_cannot_be_used_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(ConfigError, match="cannot be used"), driven(tmp_path / "file" / "kv"):
        pass
