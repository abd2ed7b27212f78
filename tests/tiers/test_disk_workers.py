"""The threads of a disk tier: what they hold, and for how long."""

import errno
import gc
import mmap
import threading
import time
from pathlib import Path

import pytest

from kvtide.errors import ConfigError
from kvtide.testing.faulty_files import Call, FaultyFiles
from kvtide.testing.tier_records import chain_of, layout_of, root_of, text
from kvtide.tiers.base import LoadJob, StoreJob
from kvtide.tiers.disk.stores import WRITING_MAX
from kvtide.tiers.disk.tier import DiskTier
from kvtide.units import KiB, MiB
from tests.tiers.disk_place import open_disk, tails


def test_a_thread_that_waits_holds_no_cells(tmp_path: Path) -> None:
    """Their memory may be wanted back by then, and a mapping lives as long as any part of it."""
    woken = threading.Event()
    tier = DiskTier(tmp_path / "disk", 64 * MiB, woken.set, floor_bytes=0)
    tier.tick(1)
    (record,) = chain_of(root_of(), layout_of(64 * KiB), text(1, 4))
    memory = mmap.mmap(-1, record.payload_bytes)
    view = memoryview(memory)
    tier.store(StoreJob(1, record, [view[:]]))
    wait_done(tier, woken)
    tier.load(LoadJob(2, record, [view[:]]))
    wait_done(tier, woken)
    view.release()
    close_soon(memory)
    tier.close(5)


def close_soon(memory: mmap.mmap) -> None:
    """A thread that has just said how a job ended is about to let go of it."""
    until_s = time.monotonic() + 10
    while True:
        try:
            memory.close()
        except BufferError:
            assert time.monotonic() < until_s, "a thread still has a part of it"
            time.sleep(0.001)
        else:
            return


def wait_done(tier: DiskTier, woken: threading.Event) -> None:
    while not tier.poll():
        assert woken.wait(10)
        woken.clear()


def test_a_job_that_failed_holds_no_cells(tmp_path: Path) -> None:
    """Where nobody collects cycles: an error must not keep the frames that it came through."""
    files = FaultyFiles()
    woken = threading.Event()
    tier = open_disk(tmp_path / "disk", woken.set, files=files)
    gc.disable()
    try:
        memory = mmap.mmap(-1, 4096)
        kept, failed = tails(2)
        files.fail(Call.WRITE, errno.EIO, count=1, path_part="segment")
        tier.store(StoreJob(1, failed, [memoryview(memory)]))
        wait_done(tier, woken)
        tier.store(StoreJob(2, kept, [memoryview(memory)]))
        wait_done(tier, woken)
        files.fail(Call.READ, errno.EIO, count=1, path_part="segment")
        tier.load(LoadJob(3, kept, [memoryview(memory)]))
        wait_done(tier, woken)
        tier.close(5)
        tier.poll()
        assert tier.statistics().stored == {"failed": 1, "stored": 1}
        assert tier.statistics().loaded == {"failed": 1}
        memory.close()
    finally:
        gc.enable()


def test_stores_that_a_breaker_ended_hold_no_cells(tmp_path: Path) -> None:
    """Nothing is written for a minute or an hour; what has ended does not wait for that."""
    files = FaultyFiles()
    woken = threading.Event()
    tier = open_disk(tmp_path / "disk", woken.set, files=files)
    memory = mmap.mmap(-1, 4096)
    files.fail(Call.WRITE, errno.EIO, path_part="segment")
    records = tails(2 * WRITING_MAX)  # some wait here until the breaker opens
    for number, record in enumerate(records):
        tier.store(StoreJob(number, record, [memoryview(memory)]))
    ended = 0
    while ended < len(records):
        ended += len(tier.poll())
        time.sleep(0.001)
    assert tier.statistics().stored["broken"] > 0
    assert not tier._stores._pending.waiting
    gc.disable()
    try:
        close_soon(memory)
    finally:
        gc.enable()
    tier.close(5)


@pytest.mark.parametrize("name", ["kvtide-disk-load-0", "kvtide-disk-free"])
def test_a_machine_that_grants_no_threads_is_told_of(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """None is left behind, and the directory is free."""
    start = threading.Thread.start
    before = set(threading.enumerate())

    def refuse(thread: threading.Thread) -> None:
        if thread.name == name:
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(ConfigError, match="ulimit"):
        open_disk(tmp_path / "disk")
    assert set(threading.enumerate()) <= before
    monkeypatch.undo()
    open_disk(tmp_path / "disk").close(5)
