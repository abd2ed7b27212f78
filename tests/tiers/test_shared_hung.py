"""Looks of a shared directory that hang, fail or take long: nobody waits for them; none spins."""

import errno
import os
import time
from pathlib import Path

import pytest

from kvtide.bounds import T_LOAD_MS
from kvtide.core.keys import salt_digest
from kvtide.testing.faulty_files import Call
from kvtide.testing.tier_drive import DrivenTier
from kvtide.testing.tier_records import chain_of, text
from kvtide.tiers.base import LoadOutcome
from kvtide.tiers.kinds import Kind
from kvtide.tiers.patience import CLEAR_S_MAX
from kvtide.tiers.shared_dir import journal
from kvtide.tiers.shared_dir import others as others_module
from kvtide.tiers.shared_dir import tier as tier_module
from kvtide.tiers.shared_dir.journal import GoneRow, KeptRow, KindRow, Piece, Position, Row
from kvtide.tiers.shared_dir.ops import Ended, FreeOp
from kvtide.tiers.shared_dir.others import Others
from kvtide.tiers.shared_dir.own import LiveRows
from kvtide.tiers.shared_dir.reads import MEMBER_MS_MAX
from kvtide.tiers.shared_dir.view import View
from tests.tiers.shared_place import (
    ROOT,
    SMALL,
    driven,
    files_of,
    folder_of,
    look,
    open_shared,
    shared_of,
    tails,
    wait_on,
    wait_quiet,
)


def test_a_look_that_fails_with_more_to_read_is_not_made_again_at_once(
    kv: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The mount went in the middle; the rest is read once it is back."""
    monkeypatch.setattr(journal, "PIECE_BYTES", 1 << 10)
    with driven(kv) as here, driven(kv) as there:
        there.keep(tails(30))
        files = files_of(shared_of(here))
        files.fail(Call.NAMES, errno.ENOENT, nth=2)
        look(here)
        while not files.injected:
            here.poll_for(0.01)
        for _ in range(20):
            here.poll_for(0.01)
        assert files.injected["names ENOENT"] == 1
        files.heal()
        while here.tier.statistics().records < 30:
            look(here)
        assert all(map(here.is_there, tails(30)))


def test_the_folder_that_was_lost_is_not_read_for_ever_while_no_other_can_be_taken(
    kv: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its new owner's journal is long, and what is taken by half is none of ours yet."""
    monkeypatch.setattr(journal, "PIECE_BYTES", 1 << 10)
    with driven(kv) as here:
        here.keep(tails(30))
        folder = folder_of(shared_of(here))
        (folder / "owner").write_text("somebody boot namespace 1 1\n1\n")
        files = files_of(shared_of(here))
        files.fail(Call.SYNC, errno.EIO, path_part="journal")
        while "could be taken" not in here.tier.statistics().state:
            here.pass_time(30_000)
            wait_quiet(here)
        before = files.calls[Call.NAMES]
        here.pass_time(1_000)
        for _ in range(20):
            here.poll_for(0.01)
        assert files.calls[Call.NAMES] <= before + 2, "a look, and a try to take one"
        files.heal()
        wait_on(here)
        assert folder_of(shared_of(here)) != folder
        while here.tier.statistics().records < 30:  # as another's
            look(here)


def test_a_look_that_began_before_another_folder_was_taken_does_not_say_what_is_nowhere() -> None:
    """What hangs on records of the lost one waits for the next look, which reads it."""
    lost, own = b"l" * 16, b"o" * 16
    first, second = chain_of(ROOT, SMALL, text(1, 8))
    kind = KindRow(1, Kind(ROOT, SMALL))
    rows = [KeptRow(1, 1, record.key, record.parent, record.digests) for record in (first, second)]
    others = Others(View(lost))
    early = others.look()
    others.change_own(own)
    live = LiveRows()
    for row in (kind, rows[1]):
        live.take(row)
    others.take_own(live)
    others.take_more()
    assert others.take(Ended(early)) == []
    assert others.are_more
    piece = Piece([kind, rows[0]], Position(7, 100), False, False, 100, 0)
    assert others.take(Ended(others.look(), pieces={lost: piece})) == []
    assert not others.are_more
    assert list(others._view.index) == [first.key, second.key]


def hang(tier: DrivenTier, *calls: Call) -> None:
    """Until it is known that a look hangs in such a call."""
    files_of(shared_of(tier)).stall(*calls)
    tier.pass_time(1_000)
    files_of(shared_of(tier)).wait_stalled(1)
    while tier.tier.statistics().state == "on":
        tier.pass_time(500)


def test_clears_in_a_row_hold_up_the_owner_no_longer_than_one(kv: Path) -> None:
    """One for each salt of an adapter, where the journal cannot be made durable."""
    with driven(kv) as tier:
        tier.keep(tails(2))
        with files_of(shared_of(tier)).stalled(Call.SYNC):
            began_s = time.monotonic()
            for number in range(20):
                tier.tier.clear(salt_digest(f"salt {number}"))
            assert time.monotonic() - began_s < 5 * CLEAR_S_MAX
            tier.pass_time(1)
            began_s = time.monotonic()
            tier.tier.clear(salt_digest("one more"))
            assert time.monotonic() - began_s > CLEAR_S_MAX / 2, "the next tick brings patience"
            files_of(shared_of(tier)).wait_stalled(1)


def test_lookups_end_behind_a_look_that_hangs_though_a_load_came_back(kv: Path) -> None:
    """Which says that the place works: one journal does not, and the look is still in it."""
    records = tails(3)
    with driven(kv) as tier:
        tier.keep(records[:2])
        files = files_of(shared_of(tier))
        files.stall(Call.READ)
        load = tier.submit_load(records[0])
        files.wait_stalled(1)
        hang(tier, Call.READ, Call.NAMES)
        files.stall(Call.NAMES)
        assert tier.loaded(load) is LoadOutcome.LOADED
        assert tier.tier.statistics().state == "on"
        for _ in range(3):
            tier.pass_time(100)
            asked = tier.ask((), records[2].digests, root=ROOT, layout=records[2].layout)
            tier.poll()
            assert tier.has_ended(asked)
            assert tier.is_there(records[1]), "what is known is served"
        files.release()


def test_a_look_may_take_its_time_with_many_members_and_lookups_do_not(kv: Path) -> None:
    """A few answers for each, one after the other: nothing hangs. Who waits is told in time."""
    with driven(kv) as here, driven(kv), driven(kv) as there:
        look(here)
        files = files_of(shared_of(here))
        here.pass_time(1_000)
        wait_quiet(here)
        there.keep(tails(1))
        with files.stalled(Call.NAMES):
            here.pass_time(100)
            record = tails(1)[0]
            asked = here.ask((), record.digests, root=ROOT, layout=record.layout)
            files.wait_stalled(1)
            here.pass_time(0)
            here.pass_time(T_LOAD_MS + 2 * MEMBER_MS_MAX)
            here.poll()
            assert here.has_ended(asked)
            assert here.tier.statistics().state == "on"
            here.pass_time(1)
            assert f"{T_LOAD_MS + 2 * MEMBER_MS_MAX} ms" in here.tier.statistics().state
        wait_on(here)
        assert here.is_there(record)


def test_nothing_is_removed_while_writes_are_broken(
    kv: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder is still being taken in, with more than the cap by now; another may be taken in its
    place, where what was to be removed of this one is none of ours."""
    monkeypatch.setattr(others_module, "OWN_RECORDS", 1)
    monkeypatch.setattr(tier_module, "START_S_MAX", 0)
    with driven(kv) as there:
        there.keep(tails(30))
        used = there.tier.statistics().bytes_used
    tier = open_shared(kv, bytes_max=used // 2)
    for _ in range(5):
        tier._writes.failed(OSError(errno.EIO, "as if"), 0)
    while tier._others.is_taking:
        tier.poll()
    assert not any(isinstance(op, FreeOp) for op in tier._workers._writes)
    assert not tier._workers.are_writing
    now_ms = 0
    while tier.statistics().bytes_used > used // 2:
        now_ms += 1_000
        tier.tick(now_ms)
        tier.poll()
        os.sched_yield()
    assert tier.statistics().evicted
    tier.check_integrity()
    tier.close(30)


def test_clears_that_cannot_be_noted_do_not_add_up(
    kv: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beyond a number each means all records, and so all that the others mean."""
    monkeypatch.setattr(tier_module, "CLEARS_MAX", 3)
    with driven(kv) as here, driven(kv) as there:
        there.keep(tails(2))
        look(here)
        files = files_of(shared_of(here))
        files.fail(Call.SYNC, errno.EIO)
        for number in range(20):
            here.tier.clear(bytes([number]) * 32)
            wait_quiet(here)
            assert len(shared_of(here)._clears) <= 3
            assert len(shared_of(here)._others.clearing) == len(shared_of(here)._clears)
        files.heal()
        wait_on(here)
        wait_quiet(here)
        assert not shared_of(here)._others.clearing
        look(here)
        assert not any(map(here.is_there, tails(2)))
        there.keep(tails(1, first=9))
        look(here)
        assert here.is_there(tails(1, first=9)[0])


def stop_member(here: DrivenTier, member: DrivenTier) -> None:
    """Whatever is opened in this one's folder hangs from here on; known, and left behind."""
    files = files_of(shared_of(here))
    files.stall(Call.OPEN, path_part=folder_of(shared_of(member)).name)
    here.pass_time(1_000)
    files.wait_stalled(1)
    while here.tier.statistics().state == "on":
        here.pass_time(500)
    while here.tier.statistics().state != "on":
        here.pass_time(500)
        here.poll_for(0.02)


def test_one_member_that_hangs_keeps_nobody_from_the_others(kv: Path) -> None:
    """Its files lie on a server that is away, those of others do not. What is known of it is not
    waited for; all of it is back with that server."""
    with driven(kv) as here, driven(kv) as there, driven(kv) as other:
        there.keep(tails(1))
        other.keep(tails(1, first=9))
        look(here)
        stop_member(here, there)
        there.keep(tails(1, first=1))
        other.keep(tails(1, first=10))
        look(here)
        for record in tails(2, first=9):
            assert here.is_there(record)
            assert here.load(record) is LoadOutcome.LOADED
        assert here.load(tails(1)[0]) is LoadOutcome.FAILED
        assert files_of(shared_of(here)).stalled_count == 1, "nothing else waits for it"
        assert here.tier.statistics().state == "on"
        files_of(shared_of(here)).release()
        wait_quiet(here)
        look(here)
        assert {here.load(record) for record in tails(2)} == {LoadOutcome.LOADED}
        shared_of(here).check_integrity()


def test_a_clear_does_not_wait_for_a_member_that_hangs(kv: Path) -> None:
    """All that it has counts as cleared until it is read; what it stores later is found."""
    with driven(kv) as here, driven(kv) as there:
        there.keep(tails(1))
        look(here)
        stop_member(here, there)
        here.tier.clear(None)
        while shared_of(here)._clears:
            here.poll_for(0.01)
        assert files_of(shared_of(here)).stalled_count == 1
        files_of(shared_of(here)).release()
        wait_quiet(here)
        look(here)
        assert not here.is_there(tails(1)[0])
        there.keep(tails(1, first=5))
        look(here)
        assert here.is_there(tails(1, first=5)[0])


def test_a_clear_while_an_own_record_hangs_means_nothing_that_is_stored_later(kv: Path) -> None:
    """Its member is stuck, and is this node itself: the numbers of its own records are known."""
    with driven(kv) as tier:
        tier.keep(tails(1))
        files = files_of(shared_of(tier))
        files.stall(Call.OPEN, path_part=tails(1)[0].key.hex())
        load = tier.submit_load(tails(1)[0])
        files.wait_stalled(1)
        while tier.tier.statistics().state == "on":
            tier.pass_time(500)
        tier.tier.clear(None)
        while shared_of(tier)._clears:
            tier.poll_for(0.01)
        files.release()
        tier.wait([load])
        wait_quiet(tier)
        tier.keep(tails(2, first=5))
    with driven(kv) as tier:
        assert not tier.is_there(tails(1)[0])
        assert all(map(tier.is_there, tails(2, first=5)))


def test_a_look_that_was_left_behind_brings_only_what_goes_on_from_what_is_known() -> None:
    """It hung in one journal when it had read another, which a later one has read further: what
    went meanwhile is not back."""
    member, slow = b"m" * 16, b"s" * 16
    first, second = tails(2)
    rows: list[Row] = [KindRow(1, Kind(ROOT, first.layout))]
    rows += [
        KeptRow(1, n, one.key, ROOT.key, one.digests) for n, one in enumerate((first, second))
    ]
    others = Others(View(b"o" * 16))
    early, later = others.look(), others.look(frozenset({slow}))
    further = Piece([*rows[:2], GoneRow([first.key])], Position(7, 300), True, False, 300, 0)
    others.take(Ended(later, pieces={member: further}, is_partial=True))
    assert not others._view.index
    stale = Piece(rows[:2], Position(7, 200), True, False, 200, 0)
    late = Piece([rows[0], rows[2]], Position(8, 100), True, False, 100, 0)
    others.take(Ended(early, pieces={member: stale, slow: late}))
    assert list(others._view.index) == [second.key]
    assert others.look().positions == {member: Position(7, 300), slow: Position(8, 100)}
