"""Every fault happens as a test says, is counted, and ends."""

import errno
import inspect
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvtide.testing.faulty_files import Call, FaultyFiles
from kvtide.tiers.files import Files, read_fully, write_fully

WRITING = os.O_RDWR | os.O_CREAT


class Opened:
    """One file behind faulty files."""

    def __init__(self, path: Path) -> None:
        self.files = FaultyFiles()
        self.path = str(path)
        self.descriptor = self.files.open(self.path, WRITING)

    def write(self, size: int, offset: int = 0) -> None:
        write_fully(self.files, self.descriptor, [b"x" * size], offset)

    def read(self, size: int) -> bytes:
        into = bytearray(size)
        return bytes(into[: read_fully(self.files, self.descriptor, [memoryview(into)], 0)])


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Opened]:
    one = Opened(tmp_path / "0.segment")
    yield one
    one.files.heal()
    one.files.close(one.descriptor)


def code_of(call: Callable[[], object]) -> int:
    """What it fails with; 0: it does not."""
    try:
        call()
    except OSError as error:
        return error.errno or 0
    return 0


def each_call(one: Opened) -> dict[Call, Callable[[], object]]:
    """One of every kind; each works where nothing is wrong, in this order."""
    files, descriptor, directory = one.files, one.descriptor, os.path.dirname(one.path)
    return {
        Call.WRITE: lambda: files.write_at(descriptor, [b"abc", b"def"], 0),
        Call.READ: lambda: files.read_at(descriptor, [memoryview(bytearray(3))], 1),
        Call.SYNC: lambda: files.sync(descriptor),
        Call.PUNCH: lambda: files.punch(descriptor, 0, 4096),
        Call.WANT_CACHED: lambda: files.want_cached(descriptor),
        Call.DROP_CACHED: lambda: files.drop_cached(descriptor, 0, 0),
        Call.WANT_CACHED: lambda: files.want_cached(descriptor),
        Call.TRUNCATE: lambda: files.truncate(descriptor, 0),
        Call.SIZE: lambda: files.size(descriptor),
        Call.SIZE_AT: lambda: files.size_at(one.path),
        Call.LOCK: lambda: files.lock(descriptor),
        Call.NAMES: lambda: files.names(directory),
        Call.FREE_SPACE: lambda: files.free_space(directory),
        Call.MAKE_DIRECTORY: lambda: files.make_directory(directory + "/below"),
        Call.SYNC_DIRECTORY: lambda: files.sync_directory(directory),
        Call.OPEN: lambda: files.close(files.open(directory + "/other", WRITING)),
        Call.RENAME: lambda: files.rename(directory + "/other", directory + "/third"),
        Call.UNLINK: lambda: files.unlink(directory + "/third"),
    }


def test_without_a_fault_every_call_is_the_file_systems(opened: Opened) -> None:
    calls = each_call(opened)
    assert calls.keys() == set(Call)
    assert {call: code_of(run) for call, run in calls.items()} == dict.fromkeys(Call, 0)
    assert opened.files.calls == {call: 1 + (call is Call.OPEN) for call in Call}
    assert not opened.files.injected


def test_it_has_every_call_that_files_have() -> None:
    protocol = {name for name, _ in inspect.getmembers(Files, inspect.isfunction)}
    for name in protocol - {"__init__", "__subclasshook__"}:
        if not name.startswith("_"):
            ours = inspect.signature(getattr(FaultyFiles, name))
            assert ours == inspect.signature(getattr(Files, name)), name


def test_each_kind_of_call_fails_by_itself(opened: Opened) -> None:
    """And no other kind with it."""
    for wanted in Call:
        opened.files.fail(wanted, errno.EIO)
        for call, run in each_call(opened).items():
            code = code_of(run)
            is_behind = wanted is Call.OPEN and call in (Call.RENAME, Call.UNLINK)
            is_behind |= wanted is Call.RENAME and call is Call.UNLINK
            if not is_behind:  # they lack the file that the failed call was to make
                assert code == (errno.EIO if call is wanted else 0), (wanted, call)
        assert opened.files.injected[f"{wanted} EIO"] == 1
        opened.files.heal()


def test_the_kth_open_fails_and_as_many_as_were_wanted(opened: Opened) -> None:
    opened.files.fail(Call.OPEN, errno.EMFILE, nth=3, count=2)

    def reopen() -> None:
        opened.files.close(opened.files.open(opened.path, WRITING))

    codes = [code_of(reopen) for _ in range(6)]
    assert codes == [0, 0, errno.EMFILE, errno.EMFILE, 0, 0]
    assert opened.files.injected == {"open EMFILE": 2}


def test_a_fault_may_be_meant_for_some_paths(opened: Opened) -> None:
    """By descriptor too."""
    opened.files.fail(Call.WRITE, errno.EIO, path_part=".rows")
    assert code_of(lambda: opened.write(10)) == 0
    opened.files.heal()
    opened.files.fail(Call.WRITE, errno.EIO, path_part=".segment")
    assert code_of(lambda: opened.write(10)) == errno.EIO


def test_short_reads_and_writes_go_on_where_they_ended(opened: Opened) -> None:
    opened.files.shorten(Call.WRITE, 7)
    opened.files.shorten(Call.READ, 3)
    write_fully(opened.files, opened.descriptor, [b"0123", b"456789", b"ab"], 0)
    assert opened.files.calls[Call.WRITE] == 2
    parts = [bytearray(5), bytearray(7)]
    assert read_fully(opened.files, opened.descriptor, [memoryview(p) for p in parts], 0) == 12
    assert b"".join(parts) == b"0123456789ab"
    assert opened.files.injected == {"write short": 1, "read short": 3}
    opened.files.heal()
    assert opened.read(20) == b"0123456789ab"


def test_a_full_disk_takes_what_it_has_room_for(opened: Opened) -> None:
    """A short write, then ENOSPC, until something is given back."""
    opened.files.fill_after(10_000)
    assert code_of(lambda: opened.write(8_000)) == 0
    directory = os.path.dirname(opened.path)
    assert opened.files.free_space(directory).free_bytes == 2_000
    assert code_of(lambda: opened.write(8_000, offset=8_000)) == errno.ENOSPC
    assert opened.files.size(opened.descriptor).length_bytes == 10_000
    assert opened.files.injected == {"write short": 1, "write ENOSPC": 1}
    opened.files.punch(opened.descriptor, 0, 4096)
    assert code_of(lambda: opened.write(4096)) == 0
    assert code_of(lambda: opened.write(1)) == errno.ENOSPC
    opened.files.unlink(opened.path)
    assert code_of(lambda: opened.write(4096)) == 0
    opened.files.heal()
    assert code_of(lambda: opened.write(50_000)) == 0


def test_a_read_only_file_system_is_read(opened: Opened) -> None:
    opened.write(10)
    opened.files.make_read_only()
    assert opened.read(10) == b"x" * 10
    assert code_of(lambda: opened.files.close(opened.files.open(opened.path, os.O_RDONLY))) == 0
    refused = {call for call, run in each_call(opened).items() if code_of(run) == errno.EROFS}
    changing = {Call.WRITE, Call.PUNCH, Call.TRUNCATE, Call.MAKE_DIRECTORY}
    assert refused == changing | {Call.OPEN, Call.RENAME, Call.UNLINK}


def test_a_vanished_mount_has_nothing_by_path_and_fails_what_is_open(opened: Opened) -> None:
    opened.files.vanish()
    codes = {call: code_of(run) for call, run in each_call(opened).items()}
    assert set(codes.values()) == {errno.ENOENT, errno.EIO}
    assert codes[Call.OPEN] == codes[Call.NAMES] == codes[Call.FREE_SPACE] == errno.ENOENT
    assert codes[Call.READ] == codes[Call.WRITE] == codes[Call.SIZE] == errno.EIO
    opened.files.heal()
    assert code_of(lambda: opened.write(10)) == 0


def test_everything_fails_within_a_block(opened: Opened) -> None:
    with opened.files.failing(errno.EACCES):
        assert {code_of(run) for run in each_call(opened).values()} == {errno.EACCES}
        spare = os.open(opened.path, os.O_RDONLY)
        opened.files.close(spare)  # this always works
    assert {code_of(run) for run in each_call(opened).values()} == {0}


def test_a_stalled_call_returns_when_it_is_released(opened: Opened) -> None:
    """Others go on meanwhile; a fault that came in the meantime is met."""
    codes = []
    with opened.files.stalled(Call.WRITE):
        threads = [
            threading.Thread(target=lambda: codes.append(code_of(lambda: opened.write(10))))
            for _ in range(2)
        ]
        for thread in threads:
            thread.start()
        opened.files.wait_stalled(2)
        assert opened.read(10) == b""
        assert not codes
        with pytest.raises(TimeoutError, match="2 calls are stalled, 3"):
            opened.files.wait_stalled(3, timeout_s=0.0)
        opened.files.fail(Call.WRITE, errno.EIO, count=1)
    for thread in threads:
        thread.join(30)
    assert sorted(codes) == [0, errno.EIO]
    assert opened.files.injected == {"write stalled": 2, "write EIO": 1}
    assert opened.read(20) == b"x" * 10
