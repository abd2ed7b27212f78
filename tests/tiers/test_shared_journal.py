"""A member's journal: read on by others, whatever was torn, damaged or replaced."""

import errno
import os
from pathlib import Path

import pytest

from kvtide.core.records import Record
from kvtide.errors import CorruptRecord, UnknownFormat
from kvtide.testing.faulty_files import Call, FaultyFiles
from kvtide.testing.tier_records import chain_of, root_of, text
from kvtide.tiers.files import SystemFiles
from kvtide.tiers.scope import EVERYTHING, Scope
from kvtide.tiers.shared_dir import journal as module
from kvtide.tiers.shared_dir import own
from kvtide.tiers.shared_dir.journal import (
    JOURNAL,
    Cleared,
    ClearedRow,
    GoneRow,
    KeptRow,
    Position,
    Row,
    read_on,
)
from kvtide.tiers.shared_dir.members import FolderLost
from kvtide.tiers.shared_dir.own import Journal
from tests.tiers.disk_place import flip
from tests.tiers.shared_place import ROOT, SMALL, LateFiles, tails

MEMBER, OTHER = b"m" * 16, b"o" * 16
SALTED = chain_of(root_of(salt="secret"), SMALL, text(1, 6))


def write(path: Path, records: list[Record], first: int = 1) -> Journal:
    """A journal of these, numbered from there."""
    journal = Journal(SystemFiles(), str(path), MEMBER)
    for number, record in enumerate(records, first):
        journal.keep(record, number)
    return journal


def read_all(path: Path, position: Position | None = None) -> tuple[list[Row], Position]:
    """All rows from a position on."""
    rows: list[Row] = []
    position = position or Position()
    while True:
        piece = read_on(SystemFiles(), str(path / JOURNAL), position)
        rows += piece.rows
        position = piece.position
        if not piece.has_more:
            return rows, position


def keys(rows: list[Row]) -> list[bytes]:
    return [row.key for row in rows if isinstance(row, KeptRow)]


def test_a_reader_goes_on_where_it_stood(tmp_path: Path) -> None:
    records = tails(6)
    journal = write(tmp_path, records[:2])
    rows, position = read_all(tmp_path)
    assert keys(rows) == [record.key for record in records[:2]]
    assert read_all(tmp_path, position) == ([], position)
    journal.keep(records[2], 3)
    journal.take_away([records[0].key])
    journal.clear(ClearedRow(Scope(b"s" * 32, None), {MEMBER: 3, OTHER: 9}))
    rows, _ = read_all(tmp_path, position)
    assert keys(rows) == [records[2].key]
    assert GoneRow([records[0].key]) in rows
    assert rows[-1] == ClearedRow(Scope(b"s" * 32, None), {MEMBER: 3, OTHER: 9})
    journal.close()


def test_a_reader_of_one_that_is_shorter_than_what_it_has_read_begins_anew(tmp_path: Path) -> None:
    """An older one was put back, of the same number: what stands there now is other rows."""
    records = tails(6)
    journal = write(tmp_path, records[:2])
    older = (tmp_path / JOURNAL).read_bytes()
    journal.keep(records[2], 3)
    journal.close()
    _, position = read_all(tmp_path)
    (tmp_path / JOURNAL).write_bytes(older)
    piece = read_on(SystemFiles(), str(tmp_path / JOURNAL), position)
    assert piece.is_anew
    assert keys(piece.rows) == [record.key for record in records[:2]]


@pytest.mark.parametrize("scope", [EVERYTHING, Scope(b"", None), Scope(b"", b"f" * 32)])
def test_scopes_come_back_as_they_were(tmp_path: Path, scope: Scope) -> None:
    """None and empty are two."""
    journal = write(tmp_path, [])
    journal.clear(ClearedRow(scope, {OTHER: 1}))
    assert read_all(tmp_path)[0] == [ClearedRow(scope, {OTHER: 1})]
    journal.close()


def test_a_large_journal_is_read_in_pieces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "PIECE_BYTES", 1 << 10)
    records = tails(40)
    write(tmp_path, records).close()
    assert read_on(SystemFiles(), str(tmp_path / JOURNAL), Position()).has_more
    assert keys(read_all(tmp_path)[0]) == [record.key for record in records]
    assert set(Journal(SystemFiles(), str(tmp_path), MEMBER).live.kept) == {
        record.key for record in records
    }


def test_every_cut_is_a_shorter_journal_and_the_next_row_follows_it(tmp_path: Path) -> None:
    """A kill may come at any byte. Whoever read further than that reads the rest anew."""
    records = tails(3)
    write(tmp_path, records[:2]).close()
    path = tmp_path / JOURNAL
    content = path.read_bytes()
    _, end = read_all(tmp_path)
    for cut in range(0, len(content), 7):
        path.write_bytes(content[:cut])
        journal = Journal(SystemFiles(), str(tmp_path), MEMBER)
        left = list(journal.live.kept)
        assert left == [record.key for record in records[: len(left)]]
        journal.keep(records[2], 3)
        journal.close()
        rows, position = read_all(tmp_path)
        assert keys(rows) == [*left, records[2].key]
        assert position.number != end.number, "a journal that was torn is written anew"
        assert keys(read_all(tmp_path, end)[0]) == [*left, records[2].key]


def test_a_row_that_is_damaged_ends_it_and_is_never_believed(tmp_path: Path) -> None:
    records = tails(2)
    write(tmp_path, records).close()
    path = tmp_path / JOURNAL
    good = path.read_bytes()
    for at in range(module.OPENING_BYTES, len(good)):
        path.write_bytes(good)
        flip(path, at)
        found = keys(read_all(tmp_path)[0])
        assert found == [record.key for record in records[: len(found)]]
        assert len(found) < 2


def test_what_is_no_journal_is_told_apart_from_one_of_another_version(tmp_path: Path) -> None:
    write(tmp_path, tails(1)).close()
    path = tmp_path / JOURNAL
    flip(path, 8)
    with pytest.raises(UnknownFormat):
        read_all(tmp_path)
    with pytest.raises(UnknownFormat):
        Journal(SystemFiles(), str(tmp_path), MEMBER)
    flip(path, 8)
    flip(path, 0)
    with pytest.raises(CorruptRecord):
        read_all(tmp_path)
    assert not Journal(SystemFiles(), str(tmp_path), MEMBER).live.kept


def test_a_write_that_failed_half_way_tells_of_nothing(tmp_path: Path) -> None:
    """What comes after it goes on from what is good, and takes back what it was to say."""
    files = FaultyFiles()
    records = tails(3)
    journal = Journal(files, str(tmp_path), MEMBER)
    journal.keep(records[0], 1)
    files.fill_after(40)
    with pytest.raises(OSError, match="No space"):
        journal.keep(records[1], 2)
    files.heal()
    files.fail(Call.SYNC, errno.EIO, count=1)
    with pytest.raises(OSError, match="Input/output"):
        journal.keep(SALTED[0], 2)  # longer than what comes next
    journal.keep(records[2], 3)
    journal.close()
    _, position = read_all(tmp_path)
    assert position.at_bytes == os.stat(tmp_path / JOURNAL).st_size
    live = Journal(SystemFiles(), str(tmp_path), MEMBER).live
    assert set(live.kept) == {records[0].key, records[2].key}


def test_who_has_read_what_failed_reads_on_with_the_others(tmp_path: Path) -> None:
    """The bytes were there before the server said that they are not safe."""
    files = FaultyFiles()
    records = tails(2)
    journal = Journal(files, str(tmp_path), MEMBER)
    for number, record in enumerate([SALTED[0], records[0]], 1):
        files.fail(Call.SYNC, errno.EIO, count=1)
        with pytest.raises(OSError, match="Input/output"):
            journal.keep(record, number)
        rows, position = read_all(tmp_path)
        assert keys(rows)[-1] == record.key
    journal.keep(records[1], 3)
    journal.close()
    rows, end = read_all(tmp_path, position)
    assert keys(rows) == [records[1].key]
    assert GoneRow([records[0].key]) in rows
    assert end == read_all(tmp_path)[1]
    live = Journal(SystemFiles(), str(tmp_path), MEMBER).live
    assert set(live.kept) == {records[1].key}


def test_a_journal_of_garbage_is_written_anew_while_it_serves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Readers take the new one from its start, and numbers go on where they were."""
    monkeypatch.setattr(own, "GARBAGE_ROWS", 8)
    records = tails(30)
    journal = write(tmp_path, records)
    _, position = read_all(tmp_path)
    size = os.stat(tmp_path / JOURNAL).st_size
    journal.clear(ClearedRow(Scope(None, b"f" * 32), {OTHER: 5}))
    for record in records[:28]:
        journal.take_away([record.key])
    assert os.stat(tmp_path / JOURNAL).st_size < size / 2
    rows, after = read_all(tmp_path, position)
    assert after.number != position.number
    assert keys([row for row in rows if not isinstance(row, GoneRow)])[-2:] == [
        record.key for record in records[28:]
    ]
    assert any(isinstance(row, ClearedRow) for row in rows)
    journal.keep(records[0], 31)
    journal.close()
    again = Journal(SystemFiles(), str(tmp_path), MEMBER)
    assert again.live.sequence == 31
    assert set(again.live.kept) == {record.key for record in (*records[28:], records[0])}
    again.take_away([record.key for record in (*records[28:], records[0])])
    again.close()
    for _ in range(2):
        last = Journal(SystemFiles(), str(tmp_path), MEMBER)
        assert (last.live.sequence, last.live.kept) == (31, {})


def test_a_clear_of_everything_says_what_others_said_before() -> None:
    """Else those would only add up."""
    cleared = Cleared()
    salted, root = SALTED[0].root, ROOT
    scope = Scope(salted.salt_digest, None)
    cleared.note(scope, {MEMBER: 5, OTHER: 7})
    assert cleared.means(MEMBER, salted, 5)
    assert not cleared.means(MEMBER, salted, 6)
    assert not cleared.means(MEMBER, root, 5)
    cleared.note(EVERYTHING, {MEMBER: 6, OTHER: 6})
    assert dict(cleared) == {EVERYTHING: {MEMBER: 6, OTHER: 6}, scope: {OTHER: 7}}
    assert cleared.means(MEMBER, root, 6)
    assert cleared.means(OTHER, salted, 7)
    cleared.note(EVERYTHING, {OTHER: 9, MEMBER: 2})
    assert dict(cleared) == {EVERYTHING: {MEMBER: 6, OTHER: 9}}
    cleared.note(Scope(None, root.fingerprint), {MEMBER: 8})
    assert cleared.means(MEMBER, salted, 8) == (salted.fingerprint == root.fingerprint)


def test_a_clear_counts_by_number_and_not_by_place(tmp_path: Path) -> None:
    """Two threads append: the row of a store may come behind the clear that meant it."""
    journal = write(tmp_path, SALTED[:1])
    scope = Scope(SALTED[0].root.salt_digest, None)
    journal.clear(ClearedRow(scope, {MEMBER: 2}))
    journal.keep(SALTED[1], 2)
    other = chain_of(ROOT, SMALL, text(1, 4))
    journal.keep(other[0], 1)
    journal.keep(SALTED[0], 3)
    journal.close()
    live = Journal(SystemFiles(), str(tmp_path), MEMBER).live
    assert set(live.kept) == {other[0].key, SALTED[0].key}
    assert live.cleared == {scope: {MEMBER: 2}}
    assert set(keys(read_all(tmp_path)[0])) == live.kept.keys(), "nor do others see the rest"


def test_a_rename_that_is_told_to_have_failed_and_happened_tears_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The journal that was written anew is there, under its own number: what comes next is."""
    monkeypatch.setattr(own, "GARBAGE_ROWS", 4)
    write(tmp_path, []).close()
    journal = Journal(LateFiles(JOURNAL), str(tmp_path), MEMBER)
    records = tails(12)
    for number, record in enumerate(records[:10], 1):
        journal.keep(record, number)
    _, before = read_all(tmp_path)
    journal.take_away([record.key for record in records[:9]])
    journal.keep(records[10], 11)
    journal.keep(SALTED[0], 12)
    journal.close()
    rows, after = read_all(tmp_path, before)
    assert after.number != before.number
    assert after.at_bytes == os.stat(tmp_path / JOURNAL).st_size
    assert keys(rows) == [records[9].key, records[10].key, SALTED[0].key]


def test_a_journal_that_cannot_be_written_anew_goes_on_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where there is no room for a second one: rows say what went all the same."""
    monkeypatch.setattr(own, "GARBAGE_ROWS", 4)
    files = FaultyFiles()
    records = tails(12)
    write(tmp_path, records).close()
    journal = Journal(files, str(tmp_path), MEMBER)
    files.fail(Call.WRITE, errno.ENOSPC, path_part=".tmp")
    for record in records[:11]:
        journal.take_away([record.key])
    assert files.injected["write ENOSPC"] == 2, "it is tried again, but not each time"
    assert [path.name for path in tmp_path.iterdir()] == [JOURNAL], "nothing is left of it"
    files.heal()
    journal.take_away([])
    journal.close()
    assert set(Journal(SystemFiles(), str(tmp_path), MEMBER).live.kept) == {records[11].key}


def test_another_journal_is_not_cut_and_not_written_to(tmp_path: Path) -> None:
    """Somebody took the folder over while we slept, and wrote it anew."""
    records = tails(9)
    files = FaultyFiles()
    sleeper = Journal(files, str(tmp_path), MEMBER)
    sleeper.keep(records[0], 1)
    files.fail(Call.SYNC, errno.EIO, count=1)
    with pytest.raises(OSError, match="Input/output"):
        sleeper.keep(records[1], 2)
    _, before = read_all(tmp_path)
    taker = Journal(SystemFiles(), str(tmp_path), MEMBER, is_contested=True)
    for number, record in enumerate(records[2:], 3):
        taker.keep(record, number)
    with pytest.raises(FolderLost, match="not the one that was written last"):
        sleeper.keep(records[1], 2)
    rows, after = read_all(tmp_path)
    assert after.number != before.number
    assert keys(rows)[-7:] == [record.key for record in records[2:]]
    taker.close()
