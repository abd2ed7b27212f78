"""Between machine and tiers: what a tier is told, and when."""

import asyncio
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvtide import config
from kvtide.clock import MonotonicClock
from kvtide.core import messages as m
from kvtide.core.layout import KVLayout
from kvtide.node import build, runtime
from kvtide.node.memory import RegionFiles, allocate
from kvtide.testing.memory_tier import MemoryTier
from kvtide.tiers.base import Done
from kvtide.tiers.disk import opening
from kvtide.units import MiB
from kvtide.wire.places import Places
from tests.node.test_runtime import fresh_machine


class Recorder(MemoryTier):
    """Notes what it is told."""

    def __init__(self, wake: Callable[[], None]) -> None:
        super().__init__(wake=wake, bytes_max=MiB)
        self.ticks: list[int] = []
        self.is_closed = False

    def tick(self, now_ms: int) -> None:
        self.ticks.append(now_ms)
        super().tick(now_ms)

    def close(self, timeout_s: float) -> None:
        self.is_closed = True
        super().close(timeout_s)


def test_a_tier_knows_the_time_before_its_first_job(tmp_path: Path) -> None:
    """Else what is stored in the first tenth of a second would be too old at once."""
    ticks: list[int] = []

    async def live() -> None:
        tier = Recorder(lambda: None)
        node = runtime.Runtime(
            fresh_machine(), MonotonicClock(), Places(tmp_path), [], tiers=[tier]
        )
        node.listen()
        ticks.extend(tier.ticks)
        node.stop("the test is over", on_purpose=True)
        assert await node.run() == 0
        assert tier.is_closed

    asyncio.run(live())
    assert len(ticks) == 1
    assert abs(ticks[0] - MonotonicClock().now_ms()) < 10_000


def test_a_node_ends_in_order_while_a_tier_still_has_cells(tmp_path: Path) -> None:
    """As with a disk that hangs: its thread has a part of a region when the node ends."""

    async def live() -> None:
        tier = Recorder(lambda: None)
        node = runtime.Runtime(
            fresh_machine(), MonotonicClock(), Places(tmp_path), [], tiers=[tier]
        )
        node.listen()
        files = allocate(1, KVLayout(16, 16, (4096,)), 16)
        assert isinstance(files, RegionFiles)
        node._memory.add(1, files)
        cells = node._memory.cells(m.Run(1, 0, 1, 1))
        node.stop("the test is over", on_purpose=True)
        assert await node.run() == 0
        assert all(len(cell) == 4096 for cell in cells)

    asyncio.run(live())


def test_a_tier_is_not_polled_while_it_is_closed(tmp_path: Path) -> None:
    """Closing comes from another thread, and what a tier knows has one owner at a time."""
    polled_late: list[bool] = []

    class Closing(Recorder):
        def poll(self) -> list[Done]:
            polled_late.extend([True] if self.is_closed else [])
            return super().poll()

        def close(self, timeout_s: float) -> None:
            super().close(timeout_s)
            for _ in range(20):
                self._wake()
                time.sleep(0.005)

    async def live() -> None:
        made: list[runtime.Runtime] = []
        tier = Closing(lambda: made[0].wake() if made else None)
        made.append(
            runtime.Runtime(fresh_machine(), MonotonicClock(), Places(tmp_path), [], tiers=[tier])
        )
        made[0].listen()
        made[0].stop("the test is over", on_purpose=True)
        assert await made[0].run() == 0

    asyncio.run(live())
    assert not polled_late


def test_a_disk_that_does_not_answer_does_not_keep_a_node_from_serving(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_end, closed = threading.Event(), threading.Semaphore(0)

    class Stuck:
        def __init__(self, *_: object, **__: object) -> None:
            assert may_end.wait(20)

        def close(self, timeout_s: float) -> None:
            closed.release()

    monkeypatch.setattr(opening, "DiskTier", Stuck)
    monkeypatch.setattr(build, "OPEN_S_MAX", 0.1)
    given = {"KVTIDE_DISK_PATH": str(tmp_path / "disk"), "KVTIDE_DISK_BYTES_MAX": "1GiB"}
    node = config.read(environ=given).node
    try:
        assert build.open_tiers(node, 1 << 30, build.Way.LAUNCHED, lambda: None) == []
        with pytest.raises(config.ConfigError, match=r"has not answered for 0\.1 s"):
            build.open_tiers(node, 1 << 30, build.Way.FOREGROUND, lambda: None)
    finally:
        may_end.set()
    for _ in range(2):
        assert closed.acquire(timeout=20), "what came back too late was left open"


def test_a_fault_at_a_disks_start_costs_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Broken:
        def __init__(self, *_: object, **__: object) -> None:
            raise KeyError("a bug")

    monkeypatch.setattr(opening, "DiskTier", Broken)
    given = {"KVTIDE_DISK_PATH": str(tmp_path / "disk"), "KVTIDE_DISK_BYTES_MAX": "1GiB"}
    node = config.read(environ=given).node
    assert build.open_tiers(node, 1 << 30, build.Way.LAUNCHED, lambda: None) == []


def test_auto_counts_what_is_free_and_what_is_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files of others in the directory are neither."""
    monkeypatch.setattr(opening.shutil, "disk_usage", lambda _: SimpleNamespace(free=10 * MiB))
    (tmp_path / "others").write_bytes(bytes(MiB))
    assert opening.bytes_of(tmp_path, "auto") == int(10 * MiB * opening.RATIO_AUTO)
    with (tmp_path / "00000001.segment").open("wb") as file:
        file.write(bytes(MiB))
        file.flush()
        os.fsync(file.fileno())  # else the file system may not count it yet
    assert opening.bytes_of(tmp_path, "auto") == int(11 * MiB * opening.RATIO_AUTO)
