"""Who has which folder of a shared directory: members that come, go, are killed, or sleep."""

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
from kvtide.testing.tier_records import chain_of, root_of, text
from kvtide.tiers.base import LoadOutcome, StoreOutcome
from kvtide.tiers.files import SystemFiles
from kvtide.tiers.shared_dir import others
from kvtide.tiers.shared_dir import tier as tier_module
from kvtide.tiers.shared_dir.journal import Position, read_on
from kvtide.tiers.shared_dir.members import (
    ALIVE_MS,
    SILENT_S,
    FolderLost,
    Place,
    Process,
    this_process,
)
from kvtide.units import MiB
from tests.tiers.shared_place import (
    LARGE,
    ROOT,
    SMALL,
    bytes_taken,
    driven,
    file_of,
    files_of,
    folder_of,
    look,
    open_shared,
    shared_of,
    tails,
    wait_on,
    wait_quiet,
)


def test_members_have_folders_of_their_own_whatever_they_are_called(kv: Path) -> None:
    """One host, one process, one time: the names are random, and the owner says who it is."""
    with driven(kv) as here, driven(kv) as there:
        assert folder_of(shared_of(here)) != folder_of(shared_of(there))
        folders = {folder_of(shared_of(here)), folder_of(shared_of(there))}
    with driven(kv) as one, driven(kv) as other:
        assert {folder_of(shared_of(one)), folder_of(shared_of(other))} == folders, (
            "both are taken again"
        )
    assert {path for path in kv.iterdir() if path.is_dir()} == folders


def test_a_folder_that_was_only_begun_is_taken(kv: Path) -> None:
    """A kill came between its making and its first file: else such folders would add up."""
    begun = kv / ("0a" * 16)
    begun.mkdir(parents=True, mode=0o700)
    kv.chmod(0o700)
    with driven(kv) as tier:
        assert folder_of(shared_of(tier)) == begun
        tier.keep(tails(2))
    assert [path for path in kv.iterdir() if path.is_dir()] == [begun]


def test_who_starts_takes_the_fullest_folder_that_is_free(kv: Path) -> None:
    with driven(kv) as empty, driven(kv) as full:
        full.keep(tails(8))
        wanted = folder_of(shared_of(full))
        empty.close(30)
    with driven(kv) as tier:
        assert folder_of(shared_of(tier)) == wanted
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
        folder = folder_of(shared_of(tier))
        told = file_of(shared_of(tier), tails(1)[0])
    left = [
        folder / "00" / ("00" * 32),
        folder / "ff" / f"{'ff' * 32}.0123.tmp",
        folder / "owner.1.tmp",
    ]
    for path in left:
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(told.read_bytes())
    with driven(kv) as tier:
        assert folder_of(shared_of(tier)) == folder
        tier.keep(tails(1, first=9))
        assert not any(path.exists() for path in left)
        assert all(map(tier.is_there, tails(2)))
        shared_of(tier).check_integrity()


def test_a_silent_owner_is_followed_by_another_and_writes_no_more(kv: Path) -> None:
    """It may be alive all the same: a machine that slept. What it holds is read as anybody's."""
    records = tails(12)
    with driven(kv) as first:
        first.keep(records[:4])
        owner = folder_of(shared_of(first)) / "owner"
        journal = folder_of(shared_of(first)) / "journal"
        number = read_on(SystemFiles(), str(journal), Position()).position
        words = owner.read_text().split(" ")
        owner.write_text(" ".join([words[0], "another-boot", *words[2:]]))
        with driven(kv) as second:
            assert folder_of(shared_of(second)) != folder_of(shared_of(first)), (
                "it is not silent yet"
            )
        for path in kv.glob("*/owner"):
            os.utime(path, (0, path.stat().st_mtime - SILENT_S - 1))
        with driven(kv) as second:
            assert folder_of(shared_of(second)) == folder_of(shared_of(first))
            assert read_on(SystemFiles(), str(journal), number).is_anew, "readers take no other's"
            second.keep(records[4:6])
            outcomes = first.store(records[6:])
            assert StoreOutcome.STORED not in outcomes
            assert outcomes[-1] is StoreOutcome.BROKEN
            assert "another node has taken" in first.tier.statistics().state
            assert first.load(records[0]) is LoadOutcome.LOADED
            assert second.load(records[0]) is LoadOutcome.LOADED
            wait_on(first)
            assert folder_of(shared_of(first)) != folder_of(shared_of(second))
            first.keep(records[6:])
            for tier in (first, second):
                look(tier)
                assert {tier.load(record) for record in records[:4]} == {LoadOutcome.LOADED}
                assert {tier.load(record) for record in records[6:]} == {LoadOutcome.LOADED}
                shared_of(tier).check_integrity()
        assert not owner.exists(), "who took it has freed it"


def test_a_folder_that_somebody_removes_is_followed_by_another(kv: Path) -> None:
    """With all its records; what was cleared before stays so."""
    records = tails(12)
    with driven(kv) as here, driven(kv) as there:
        there.keep(records[:2])
        here.tier.clear(None)
        here.keep(records[2:4])
        look(there)
        shutil.rmtree(folder_of(shared_of(here)))
        outcomes = here.store(records[4:])
        assert StoreOutcome.STORED not in outcomes
        assert outcomes[-1] is StoreOutcome.BROKEN
        assert "was removed" in here.tier.statistics().state
        wait_on(here)
        here.keep(records[4:])
        look(there)
        assert all(map(there.is_there, [*records[:2], *records[4:]]))
        for tier in (here, there):
            look(tier)
            assert not any(map(tier.is_there, records[2:4]))
            assert {tier.load(record) for record in records[4:]} == {LoadOutcome.LOADED}
            shared_of(tier).check_integrity()
        here.close(30)
        with driven(kv) as here:
            assert {here.load(record) for record in records[4:]} == {LoadOutcome.LOADED}
            assert not any(map(here.is_there, records[:2])), "they were cleared here"


@pytest.mark.parametrize("is_silent", [False, True])
def test_of_all_who_want_a_folder_one_has_it(kv: Path, *, is_silent: bool) -> None:
    """Eight start at once, and one folder is free, or its owner silent. Who was quick, and then
    another quicker, knows it before a write."""
    with driven(kv) as tier:
        tier.keep(tails(2))
        wanted = shared_of(tier)._place.own
    if is_silent:
        owner = kv / wanted.hex() / "owner"
        owner.write_text("incarnation boot namespace 1 1\n1\n")
        os.utime(owner, (0, owner.stat().st_mtime - SILENT_S - 1))
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
    owners = []
    for place in places:
        try:
            place.require()
        except FolderLost:
            assert is_silent
        else:
            owners.append(place.own)
    assert len(set(owners)) == len(owners), "no two have the same"
    assert wanted in owners


def test_a_member_that_is_removed_is_forgotten(kv: Path) -> None:
    """By hand, with all that it had; what hung on it goes as well."""
    first, second = chain_of(ROOT, SMALL, text(1, 8))
    with driven(kv) as here:
        with driven(kv) as there:
            there.keep([first])
            look(here)
            assert here.find([first]) == [first]
            here.keep([second])
        shutil.rmtree(folder_of(shared_of(there)))
        look(here)
        assert here.find([first, second]) == []
        assert here.tier.statistics().records == 0
        shared_of(here).check_integrity()


def test_what_hangs_on_nothing_at_a_start_gives_its_room_back(kv: Path) -> None:
    """The folder that had its beginning was removed while nobody was there."""
    first, second, tail = chain_of(ROOT, SMALL, text(1, 10))
    with driven(kv) as here, driven(kv) as there:
        here.keep([first])
        look(there)
        there.keep([second, tail, *tails(1)])
        gone, left = folder_of(shared_of(here)), folder_of(shared_of(there))
    shutil.rmtree(gone)
    with driven(kv) as tier:
        assert folder_of(shared_of(tier)) == left
        while len(list(left.glob("??/*"))) > 1:
            tier.poll_for(0.05)
        assert tier.load(tails(1)[0]) is LoadOutcome.LOADED
        assert tier.tier.statistics().records == 1
        shared_of(tier).check_integrity()


@pytest.mark.parametrize("code", [errno.EIO, errno.ESTALE])
def test_a_start_that_cannot_look_around_forgets_nothing(kv: Path, code: int) -> None:
    """What its own records hang on is in another's folder, which it cannot read at first."""
    first, second = chain_of(ROOT, SMALL, text(1, 8))
    with driven(kv) as here:
        here.keep([first])
        with driven(kv) as there:
            look(there)
            there.keep([second])
        files = FaultyFiles()
        folder = folder_of(shared_of(here)).name
        files.fail(Call.OPEN, code, count=1, path_part=f"{folder}/journal")
        with driven(kv, files=files) as there:
            assert files.injected
            look(there)
            assert there.find([first, second]) == [first, second]
            assert there.load(second) is LoadOutcome.LOADED


def test_a_slow_sign_of_life_is_not_taken_for_the_probe(kv: Path) -> None:
    """It ends while another folder is being taken, whose end would then say nothing."""
    records = tails(12)
    with driven(kv) as tier:
        tier.keep(records[:1])
        files, workers = files_of(shared_of(tier)), shared_of(tier)._workers
        before = folder_of(shared_of(tier))
        with files.stalled(Call.SYNC):
            tier.pass_time(ALIVE_MS)
            files.wait_stalled(1)
            shutil.rmtree(before)
            assert tier.store(records[1:])[-1] is StoreOutcome.BROKEN
        while workers.are_writing:
            os.sched_yield()  # not polled: both ends are to be met together
        tier.pass_time(1_000)
        wait_on(tier)
        wait_quiet(tier)
        assert folder_of(shared_of(tier)) != before
        tier.keep(records)
        assert {tier.load(record) for record in records} == {LoadOutcome.LOADED}
        shared_of(tier).check_integrity()


def test_who_only_reads_has_another_folder_soon_and_finds_all_meanwhile(kv: Path) -> None:
    """Its own was removed, and nothing is stored there that would show it."""
    with driven(kv) as here, driven(kv) as there:
        here.keep(tails(1))
        before = folder_of(shared_of(here))
        shutil.rmtree(before)
        there.keep(tails(2, first=5))
        look(here)
        assert {here.load(record) for record in tails(2, first=5)} == {LoadOutcome.LOADED}
        seconds = 0
        while folder_of(shared_of(here)) == before or not folder_of(shared_of(here)).exists():
            assert seconds <= ALIVE_MS // 1_000 + 5
            seconds += 1
            here.pass_time(1_000)
            wait_quiet(here)
        assert here.load(tails(1)[0]) is LoadOutcome.ABSENT
        here.keep(tails(1))


@pytest.mark.parametrize("path_part", ["journal", "owner"])
def test_a_folder_that_is_taken_by_half_is_not_used(kv: Path, path_part: str) -> None:
    """The place fails in between, and works again: then one is taken whole, and clears hold."""
    records = tails(12)
    with driven(kv) as here, driven(kv) as there:
        there.keep(records[:2])
        here.tier.clear(None)
        shutil.rmtree(folder_of(shared_of(here)))
        files = files_of(shared_of(here))
        files.fail(Call.SYNC, errno.EIO, count=2, path_part=path_part)
        assert here.store(records[2:])[-1] is StoreOutcome.BROKEN
        wait_on(here)
        assert files.injected["sync EIO"]
        here.keep(records[2:])
        look(there)
        assert all(map(there.is_there, records))
        here.close(30)
        with driven(kv) as here:
            assert {here.load(record) for record in records[2:]} == {LoadOutcome.LOADED}
            assert not any(map(here.is_there, records[:2]))


def test_what_hangs_on_nothing_in_a_folder_that_is_taken_gives_its_room_back(kv: Path) -> None:
    """Its beginning went with the folder that was lost; and its cap was larger than ours."""
    first, second, tail = chain_of(ROOT, SMALL, text(1, 10))
    with driven(kv, MiB) as here:
        here.keep([first])
        with driven(kv, 4 * MiB) as there:
            look(there)
            there.keep([second, tail, *tails(2)])
            left = folder_of(shared_of(there))
        shutil.rmtree(folder_of(shared_of(here)))
        assert here.store(tails(9, first=20))[-1] is StoreOutcome.BROKEN
        wait_on(here)
        assert folder_of(shared_of(here)) == left
        while len(list(left.glob("??/*"))) > 2:
            here.pass_time(100)
            here.poll_for(0.02)
        assert {here.load(record) for record in tails(2)} == {LoadOutcome.LOADED}
        shared_of(here).check_integrity()


def test_what_kills_left_beside_the_folders_is_removed_by_later_starts(kv: Path) -> None:
    """Not what somebody is about to use who starts now, nor what is not ours."""
    kv.mkdir(mode=0o700)
    old, young, other = kv / f"{'ab' * 16}.tmp", kv / f"{'cd' * 16}.tmp", kv / "mine.tmp"
    for path in (old, young, other):
        path.write_bytes(bytes(4096))
    for path in (old, other):
        os.utime(path, (0, path.stat().st_mtime - SILENT_S - 1))
    with driven(kv):
        assert [path.exists() for path in (old, young, other)] == [False, True, True]


def test_a_start_without_room_leaves_no_owner_behind(kv: Path) -> None:
    """Else the next one would wait two minutes for nobody, and make another folder."""
    files = FaultyFiles()
    files.fail(Call.WRITE, errno.ENOSPC, path_part="owner")
    with pytest.raises(ConfigError, match="No space"), driven(kv, files=files):
        pass
    assert not list(kv.glob("*/owner"))
    (folder,) = kv.iterdir()
    with driven(kv) as tier:
        assert folder_of(shared_of(tier)) == folder


def test_a_folder_that_is_taken_comes_under_the_cap_by_itself(kv: Path) -> None:
    """Who had it was allowed more, and nothing is stored that would make room."""
    with driven(kv, 8 * MiB) as there:
        there.keep(chain_of(ROOT, LARGE, text(1, 32)))
        left = folder_of(shared_of(there))
        tier = open_shared(kv, bytes_max=MiB)
    shutil.rmtree(folder_of(tier))
    now_ms = 0
    while tier._view.own.hex() != left.name or tier.statistics().bytes_used > MiB:
        now_ms += 1_000
        tier.tick(now_ms)
        tier.poll()
        os.sched_yield()
    assert tier.statistics().records > 0
    assert bytes_taken(left) <= MiB
    tier.check_integrity()
    tier.close(30)


def test_a_start_serves_before_it_has_taken_all_in(
    kv: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Millions of records take seconds. What is cleared meanwhile is not taken in; what is stored
    waits until all that is there is known."""
    monkeypatch.setattr(others, "OWN_RECORDS", 4)
    monkeypatch.setattr(tier_module, "START_S_MAX", 0)
    salted = root_of(salt="secret")
    doomed = [chain_of(salted, SMALL, text(number, 4))[0] for number in range(12)]
    with driven(kv) as tier:
        tier.keep([*tails(6), *doomed])
    with driven(kv) as tier:
        assert tier.tier.statistics().records == 0
        store = tier.submit_store(tails(1, first=50)[0])
        tier.poll()
        assert tier.tier.statistics().records == 4
        with files_of(shared_of(tier)).stalled(Call.SYNC):
            assert tier.tier.clear(salted.salt_digest) == 0
            for _ in range(3):
                tier.poll()
            assert tier.tier.statistics().records == 6
        assert tier.stored(store) is StoreOutcome.STORED
        assert tier.tier.statistics().records == 7
        assert {tier.load(record) for record in [*tails(6), *tails(1, first=50)]} == {
            LoadOutcome.LOADED
        }
        wait_quiet(tier)
        assert len(list(folder_of(shared_of(tier)).glob("??/*"))) == 7
        shared_of(tier).check_integrity()
    with driven(kv) as tier:
        tier.keep(tails(1, first=60))
        assert tier.tier.statistics().records == 8


def test_two_may_make_a_directory_at_once(kv: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nodes that start on a fresh one, or threads that store the first of their records."""
    make = os.makedirs

    def quicker(path: str, *, exist_ok: bool) -> None:
        make(path, exist_ok=exist_ok)
        kv.mkdir()

    monkeypatch.setattr(os, "makedirs", quicker)
    SystemFiles().make_directory(str(kv))
    kv.rmdir()
    monkeypatch.setattr(os, "makedirs", lambda path, **_: kv.write_text("x"))
    with pytest.raises(NotADirectoryError):
        SystemFiles().make_directory(str(kv))
