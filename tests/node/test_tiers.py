"""Between machine and tiers: what a tier is told, and when."""

import asyncio
import json
import os
import re
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvtide import config
from kvtide.bounds import T_STOP_S
from kvtide.clock import MonotonicClock
from kvtide.core import effects as fx
from kvtide.core import messages as m
from kvtide.core.layout import KVLayout
from kvtide.core.records import Record, RootName
from kvtide.core.tiering import TierPlan, WritePolicy
from kvtide.node import build, main, runtime
from kvtide.node import tiers as node_tiers
from kvtide.node.memory import RegionFiles, allocate
from kvtide.node.tiers import CLOSE_LATE_S_MAX, CLOSE_S_MAX, HEALTH_MS, Tiers
from kvtide.testing.memory_tier import MemoryTier
from kvtide.tiers.base import Done, Found, Loaded, LoadOutcome, Stored, StoreOutcome
from kvtide.tiers.disk import opening
from kvtide.tiers.disk.tier import DiskTier
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


class Hanging(Recorder):
    """Is not closed before it may be."""

    def __init__(self) -> None:
        super().__init__(lambda: None)
        self.may_end = threading.Event()

    def close(self, timeout_s: float) -> None:
        assert self.may_end.wait(60)
        super().close(timeout_s)


@pytest.fixture
def hanging(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hanging]:
    """A tier that hangs at its end, for as long as the test runs; it is waited for briefly."""
    monkeypatch.setattr(node_tiers, "CLOSE_LATE_S_MAX", 0.1 - CLOSE_S_MAX)
    tier = Hanging()
    tier.name = "hanging"
    yield tier
    tier.may_end.set()


def test_a_node_ends_though_a_tier_hangs_at_its_end(
    tmp_path: Path, hanging: Hanging, caplog: pytest.LogCaptureFixture
) -> None:
    """Contract 10. Others are closed meanwhile."""
    other = Recorder(lambda: None)

    async def live() -> None:
        node = runtime.Runtime(
            fresh_machine(), MonotonicClock(), Places(tmp_path), [], tiers=[hanging, other]
        )
        node.listen()
        node.stop("the test is over", on_purpose=True)
        try:
            assert await asyncio.wait_for(node.run(), 20) == 0
        finally:
            hanging.may_end.set()

    asyncio.run(live())
    assert other.is_closed
    assert "tier hanging is left behind" in caplog.text


def test_a_node_ends_within_its_bound_whatever_tiers_and_memory_take() -> None:
    assert CLOSE_S_MAX + CLOSE_LATE_S_MAX + runtime.STOP_S_MAX < T_STOP_S


def test_a_tier_that_hangs_at_its_end_does_not_keep_a_failed_start_from_ending(
    tmp_path: Path, hanging: Hanging, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two places one can be opened, and is closed again where somebody waits for both."""

    def opened(opening: build.Opening) -> Hanging:
        if opening.entry.name == "other":
            raise config.ConfigError("the other cannot be opened")
        return hanging

    monkeypatch.setattr(build.Opening, "_opened", opened)
    entries = [{"type": "shared_dir", "path": str(tmp_path), "bytes_max": "1GiB"}]
    entries += [entries[0] | {"name": "other", "path": str(tmp_path / "other")}]
    node = config.read(environ={"KVTIDE_TIERS": json.dumps(entries)}).node
    ended = []

    def start() -> None:
        with pytest.raises(config.ConfigError, match="the other cannot"):
            build.open_tiers(node, 1 << 30, build.Way.FOREGROUND, lambda: None)
        ended.append(True)

    thread = threading.Thread(target=start)
    thread.start()
    thread.join(20)
    has_ended = bool(ended)
    hanging.may_end.set()
    thread.join()
    assert has_ended


def test_a_node_that_cannot_serve_closes_its_tiers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = Recorder(lambda: None)
    tier.name = "recorder"
    monkeypatch.setattr(build.Opening, "_opened", lambda _: tier)
    entry = {"type": "shared_dir", "path": str(tmp_path / "kv"), "bytes_max": "1GiB"}
    given = {"KVTIDE_TIERS": json.dumps([entry]), "KVTIDE_HOST_BYTES": "64MiB"}
    places = Places(tmp_path)
    (places.socket / "of somebody").mkdir(parents=True)
    with pytest.raises(OSError, match=re.escape(str(places.socket))):
        asyncio.run(main.serve(config.read(environ=given), places, build.Way.FOREGROUND))
    assert tier.is_closed


def test_a_disk_that_does_not_answer_does_not_keep_a_node_from_serving(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Whoever started it."""
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
        for way in build.Way:
            [one] = build.open_tiers(node, 1 << 30, way, lambda: None)
            assert one.tier.statistics().state == "being opened"
            one.tier.close(1)
        assert caplog.text.count("has not answered for 0.1 s") == 2
    finally:
        may_end.set()
    for _ in build.Way:
        assert closed.acquire(timeout=20), "what came back too late was left open"


def test_a_fault_at_a_disks_start_costs_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It is tried again now and then; its trace is logged once."""

    class Broken:
        def __init__(self, *_: object, **__: object) -> None:
            raise KeyError("a bug")

    monkeypatch.setattr(opening, "DiskTier", Broken)
    given = {"KVTIDE_DISK_PATH": str(tmp_path / "disk"), "KVTIDE_DISK_BYTES_MAX": "1GiB"}
    node = config.read(environ=given).node
    woken = threading.Event()
    [opened] = build.open_tiers(node, 1 << 30, build.Way.LAUNCHED, woken.set)
    for hour in range(3):
        woken.clear()
        opened.tier.tick(hour * 3_600_000)
        assert hour == 0 or woken.wait(20), "it is not tried again"
        opened.tier.poll()
        assert "KeyError('a bug')" in opened.tier.statistics().state
    assert caplog.text.count("Traceback") == 1
    opened.tier.close(1)


@pytest.mark.parametrize("write", ["through", "on_reuse", "on_eviction"])
@pytest.mark.parametrize("load_policy", ["estimate", "always"])
def test_what_is_said_of_a_disk_is_what_it_does(
    tmp_path: Path, write: str, load_policy: str
) -> None:
    """When it is written to, when it is loaded from, and what outlives a loss of power."""
    given = {"KVTIDE_DISK_PATH": str(tmp_path / "disk"), "KVTIDE_DISK_BYTES_MAX": "1GiB"}
    given |= {"KVTIDE_DISK_WRITE": write, "KVTIDE_DISK_SYNC": "each"}
    given |= {"KVTIDE_LOAD_POLICY": load_policy}
    node = config.read(environ=given).node
    [one] = build.open_tiers(node, 1 << 30, build.Way.FOREGROUND, lambda: None)
    assert isinstance(one.tier, DiskTier)
    assert one.plan == TierPlan("disk", WritePolicy(write), load_policy == "always")
    assert one.tier._directory.sync == "each"
    one.tier.close(30)


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


# ---- a tier that is not what it should be

LAYOUT = KVLayout(16, 16, (4096,))
ROOT = RootName(bytes(32), bytes(32), b"", bytes(32))
RECORD = Record(ROOT, ROOT.key, b"k" * 32, b"k" * 16, LAYOUT)
ASK = fx.AskTier(0, 1, ROOT, ROOT.key, RECORD.key, b"", LAYOUT)
LOAD = fx.LoadFrom(0, 2, RECORD, m.Run(1, 0, 1, 1))
STORE = fx.StoreTo(0, 1, RECORD, m.Run(1, 0, 1, 1))


class Stub(MemoryTier):
    """Says what it is told to say; a fault in one of its calls where it has one."""

    def __init__(self, fault: str = "") -> None:
        super().__init__(wake=lambda: None, bytes_max=MiB)
        self.says: list[Done] = []
        self.calls: list[str] = []
        self.close(10)
        for name in ("lookup", "load", "store", "clear", "tick", "statistics", "poll"):
            setattr(self, name, self._call(name, getattr(self, name), is_fault=name == fault))

    def _call(
        self, name: str, method: Callable[..., object], *, is_fault: bool
    ) -> Callable[..., object]:
        def call(*arguments: object) -> object:
            self.calls.append(name)
            if is_fault:
                raise KeyError("a fault")
            if name == "poll":
                said, self.says = self.says, []
                return said
            return None if name in ("lookup", "load", "store") else method(*arguments)

        return call


class Fed:
    """Tiers, and what the machine is told."""

    def __init__(self, *tiers: Stub) -> None:
        self.events: list[fx.Event] = []
        self.tiers = Tiers(tiers, lambda _: [memoryview(bytearray(4096))], self.events.append)
        for number, tier in enumerate(tiers):
            tier.name = f"tier {number}"

    @property
    def states(self) -> list[str]:
        return [numbers.state for numbers in self.tiers.statistics().values()]


@pytest.mark.parametrize(
    "fault", ["lookup", "load", "store", "clear", "tick", "statistics", "poll"]
)
def test_what_a_tier_raises_costs_that_tier(fault: str, caplog: pytest.LogCaptureFixture) -> None:
    """Nobody waits for it any more; what it may still write or read stays its own."""
    stub, other = Stub(fault), Stub()
    fed = Fed(stub, other)
    for effect in (ASK, LOAD, STORE, fx.ClearTiers(None)):
        fed.tiers.carry_out(effect)
    fed.tiers.tick(HEALTH_MS)
    assert fed.states == [
        "off until the node's next start, for a fault of its own: KeyError('a fault')",
        "on",
    ]
    assert caplog.text.count("a fault in tier tier 0") == 1
    assert fed.events[0] == fx.TierFound(1, [], may_go_on=False)
    given = stub.calls.index(fault) if fault in ("lookup", "load") else 3
    ends: list[fx.Event] = [
        fx.TierLoaded(2, LoadOutcome.FAILED, is_ok=False),
        fx.TierStored(1, StoreOutcome.FAILED, is_ok=False),
    ]
    assert fed.events[1:] == ends[given:], "what it has never been given ends at once"
    del stub.calls[:], fed.events[:]
    for effect in (ASK, LOAD, STORE):
        fed.tiers.carry_out(effect)
    fed.tiers.tick(2 * HEALTH_MS)
    assert not stub.calls
    assert len(fed.events) == 3
    assert {"tick", "statistics", "poll"} <= set(other.calls), "the other goes on"
    fed.tiers.carry_out(fx.ClearTiers(None))
    assert stub.calls == ["clear"], "its next start shall find nothing of that"


MORE = Record(ROOT, RECORD.key, b"l" * 32, b"l" * 16, LAYOUT)
MOST = Record(ROOT, MORE.key, b"m" * 32, b"m" * 16, LAYOUT)
OTHER = Record(ROOT, b"p" * 32, b"k" * 32, b"k" * 16, LAYOUT)


@pytest.mark.parametrize(
    ("said", "why"),
    [
        (Stored(1, StoreOutcome.STORED), "KeyError(1)"),
        (Stored(7, StoreOutcome.STORED), "KeyError(7)"),
        (Found(1, [OTHER], may_go_on=False), "record 0 of 1 has another parent"),
        (Found(1, [RECORD, RECORD], may_go_on=False), "record 1 of 2 has another parent"),
        (Found(1, [RECORD, MORE, MOST], may_go_on=False), "record 2 of 3 is too many"),
        (Found(2, [], may_go_on=False), "KeyError(2)"),
        (Stored(1, "good"), "'good' is not a valid StoreOutcome"),  # type: ignore[arg-type]
        (None, "AssertionError"),
    ],
    ids=[
        *("twice", "unasked", "another chain", "twice the same", "too many"),
        *("of a load", "no outcome", "nothing"),
    ],
)
def test_what_a_tier_may_not_say_costs_that_tier(said: Done, why: str) -> None:
    """The machine is told what came before that, and of lookups that nothing was found."""
    stub = Stub()
    fed = Fed(stub)
    for effect in (ASK, LOAD, STORE):
        fed.tiers.carry_out(effect)
    stub.says = [Stored(1, StoreOutcome.STORED), said]
    fed.tiers.poll()
    assert "for a fault of its own" in fed.states[0]
    assert why in fed.states[0]
    assert fed.events == [
        fx.TierFound(1, [], may_go_on=False),
        fx.TierStored(1, StoreOutcome.STORED, is_ok=True),
    ]


def test_what_had_ended_before_a_fault_counts() -> None:
    """Its cells come back, and nobody waits for it."""
    stub = Stub("tick")
    fed = Fed(stub)
    for effect in (ASK, LOAD, STORE):
        fed.tiers.carry_out(effect)
    stub.says = [Loaded(2, LoadOutcome.FAILED), Stored(1, StoreOutcome.STORED)]
    fed.tiers.tick(0)
    assert "for a fault of its own" in fed.states[0]
    assert fed.events == [
        fx.TierLoaded(2, LoadOutcome.FAILED, is_ok=False),
        fx.TierStored(1, StoreOutcome.STORED, is_ok=True),
        fx.TierFound(1, [], may_go_on=False),
    ]


# ---- at rest


def test_time_is_told_where_somebody_waits_for_it(
    runtime_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else once a pulse: an engine that has no hits is not disturbed. A tier knows the time before
    its first job all the same."""
    is_waiting = False
    stub = Stub()
    ticks: list[fx.Event] = []

    async def live() -> None:
        nonlocal is_waiting
        places = Places(runtime_dir)
        node = runtime.Runtime(fresh_machine(), MonotonicClock(), places, [], tiers=[stub])
        handle = node.machine.handle

        def noted(event: fx.Event, now_ms: int) -> list[fx.Effect]:
            ticks.extend([event] if isinstance(event, fx.Tick) else [])
            return handle(event, now_ms)

        monkeypatch.setattr(node.machine, "handle", noted)
        monkeypatch.setattr(node.machine, "is_waiting", lambda _: is_waiting)
        monkeypatch.setattr(runtime, "TICK_S", 0.001)
        monkeypatch.setattr(runtime, "PULSE_S", 0.02)
        node.listen()
        ticks.clear()
        while node._pulses < 5:
            await asyncio.sleep(0)
        assert len(ticks) == 5
        monkeypatch.setattr(runtime, "PULSE_S", 3600.0)
        while node._pulses < 6:  # the last one
            await asyncio.sleep(0)
        stub.calls.clear()
        is_waiting = True
        node._carry_out([ASK])
        assert stub.calls[0] == "tick"
        assert "lookup" in stub.calls
        while len(ticks) < 20:
            await asyncio.sleep(0)
        is_waiting = False
        while node._is_ticking:
            await asyncio.sleep(0)
        node.stop("a test", on_purpose=False)
        await node.run()

    asyncio.run(live())
