"""How the bytes of records move: past the page cache, without a copy, beside what is freed."""

import logging
import mmap
import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from kvtide.codec.record import header_bytes
from kvtide.testing.faulty_files import Call, FaultyFiles
from kvtide.testing.tier_records import chain_of, layout_of, text
from kvtide.tiers.base import LoadJob, LoadOutcome, StoreJob
from kvtide.tiers.record_io import read_proven, to_write
from kvtide.units import KiB, MiB
from tests.tiers.disk_place import ROOT, disk_of, driven, files_of, settle, tails

LARGE = layout_of(64 * KiB)
CHUNKS = [chain_of(ROOT, LARGE, text(number, 4))[0] for number in range(6)]


class Noted(FaultyFiles):
    """Notes how segments are opened, and what is let go of."""

    def __init__(self, *, refuses: bool = False) -> None:
        super().__init__()
        self.refuses = refuses
        self.flags: list[int] = []
        self.dropped: list[tuple[int, int, int]] = []

    def open(self, path: str, flags: int) -> int:
        if self.refuses and flags & os.O_DIRECT:
            raise OSError(22, "Invalid argument", path)
        if path.endswith(".segment"):
            self.flags.append(flags)
        return super().open(path, flags)

    def drop_cached(self, descriptor: int, offset_bytes: int, length_bytes: int) -> None:
        self.dropped.append((self.flags[-1] & os.O_ACCMODE, offset_bytes, length_bytes))
        super().drop_cached(descriptor, offset_bytes, length_bytes)


def test_records_go_past_the_page_cache_where_the_file_system_lets_them(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Each time that a segment is opened for them, to read or to write; one line says so."""
    caplog.set_level(logging.INFO, "kvtide.disk")
    files = Noted()
    with driven(tmp_path / "kv", files=files) as tier:
        if not disk_of(tier)._directory.is_direct:
            pytest.skip("this file system refuses O_DIRECT")
        said = [line for line in caplog.messages if "O_DIRECT" in line or "plain I/O" in line]
        assert said == [f"disk {tmp_path / 'kv'}: O_DIRECT, past the page cache"]
        tier.keep(CHUNKS)
        for record in CHUNKS:
            assert tier.load(record) is LoadOutcome.LOADED
        assert {flags & os.O_ACCMODE for flags in files.flags} == {os.O_RDONLY, os.O_RDWR}
        assert all(flags & os.O_DIRECT for flags in files.flags)


def test_plain_reads_and_plain_writes_leave_nothing_in_the_page_cache(tmp_path: Path) -> None:
    """A read what it has read; writes what lies before them in their segment."""
    files = Noted(refuses=True)
    with driven(tmp_path / "kv", files=files) as tier:
        tier.keep(CHUNKS)
        places = [
            disk_of(tier)._catalog.place(disk_of(tier)._catalog.index[one.key]) for one in CHUNKS
        ]
        written = files.dropped.copy()
        assert (os.O_RDWR, 0, places[-1].offset_bytes) in written
        files.dropped.clear()
        for record, place in zip(CHUNKS, places, strict=True):
            assert tier.load(record) is LoadOutcome.LOADED
            wanted = (os.O_RDONLY, place.offset_bytes, place.length_bytes)
            assert files.dropped.pop() == wanted


def test_cells_are_written_and_read_where_they_are(tmp_path: Path) -> None:
    """No byte of a payload is copied on its way; headers have memory of their own."""
    record = CHUNKS[0]
    cells = mmap.mmap(-1, record.payload_bytes)
    header, payload = to_write(StoreJob(1, record, [memoryview(cells)]))
    assert payload.obj is cells
    assert len(header) == header_bytes(1, record.blocks)
    path = tmp_path / "record"
    path.write_bytes(bytes(header) + bytes(payload))
    seen: list[memoryview] = []

    class Reads(FaultyFiles):
        def read_at(self, descriptor: int, parts: Sequence[memoryview], offset: int) -> int:
            seen.extend(parts)
            return super().read_at(descriptor, parts, offset)

    files = Reads()
    descriptor = files.open(str(path), os.O_RDONLY)
    memory = memoryview(bytearray(len(header)))
    read_proven(files, descriptor, 0, LoadJob(2, record, [memoryview(cells)]), memory, "here")
    files.close(descriptor)
    assert [part.obj for part in seen] == [memory.obj, cells]


@pytest.mark.parametrize("call", [Call.PUNCH, Call.UNLINK, Call.WRITE, Call.RENAME])
def test_what_makes_room_keeps_no_load_waiting(tmp_path: Path, call: Call) -> None:
    """At the cap, while what evicts does not come back."""
    with driven(tmp_path / "kv", MiB, segment_bytes=128 * KiB) as tier:
        tier.keep(tails(100))
        settle(tier)
        files = files_of(disk_of(tier))
        with files.stalled(call):
            jobs = [tier.submit_store(record) for record in tails(60, first=500)]
            for _ in range(500):
                if not files.stalled_count:
                    tier.poll_for(0.02)
            assert files.stalled_count, "something is to be freed"
            last = [record for record in tails(100) if tier.is_there(record)][-1]
            assert tier.load(last) is LoadOutcome.LOADED
            assert files.stalled_count, "it still stands"
        tier.wait(jobs)
