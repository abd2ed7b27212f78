"""A place that opens after its node serves: nothing until then, and all that it has afterwards."""

import itertools
import logging
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvtide import config
from kvtide.core import effects as fx
from kvtide.core import messages as m
from kvtide.errors import ConfigError
from kvtide.node import build
from kvtide.node import late as lates
from kvtide.node.tiers import Tiers
from kvtide.testing.memory_tier import MemoryTier
from kvtide.testing.tier_drive import DrivenTier
from kvtide.testing.tier_records import chain_of, layout_of, root_of, text
from kvtide.tiers.base import LoadOutcome, StoreOutcome, Tier
from kvtide.tiers.disk import opening
from kvtide.tiers.disk.tier import DiskTier
from kvtide.units import MiB
from tests.tiers.disk_place import driven, keep, tails

SALTED = [
    chain_of(root_of(salt=str(number)), layout_of(4096), text(number, 1))[0] for number in range(4)
]


@pytest.fixture
def may_open(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Set, it lets disks be opened, for which nobody waits."""
    event = threading.Event()

    def slow(*arguments: Any, **options: Any) -> DiskTier:
        assert event.wait(60)
        return DiskTier(*arguments, **options, floor_bytes=0)

    monkeypatch.setattr(opening, "DiskTier", slow)
    monkeypatch.setattr(build, "OPEN_S_MAX", 0.0)
    yield event
    event.set()


def late_disk(kv: Path) -> DrivenTier:
    """What a node has of a disk that is still being opened."""
    given = {"KVTIDE_DISK_PATH": str(kv), "KVTIDE_DISK_BYTES_MAX": "64MiB"}
    woken = threading.Event()
    node = config.read(environ=given).node
    [one] = build.open_tiers(node, 64 * MiB, build.Way.LAUNCHED, woken.set)
    assert one.plan.name == one.tier.name == "disk"
    tier = DrivenTier(one.tier, woken, 30)
    tier.pass_time(1_000)
    return tier


def open_now(tier: DrivenTier, may_open: threading.Event) -> None:
    """It has opened; nobody asks meanwhile."""
    may_open.set()
    while tier.tier.statistics().state == "being opened":
        assert tier._woken.wait(30), "nobody is told that it is open"
        tier.poll()


def test_what_a_disk_holds_is_found_once_it_has_opened(
    tmp_path: Path, may_open: threading.Event, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "kvtide.node")
    keep(tmp_path / "kv", tails(4))
    tier = late_disk(tmp_path / "kv")
    assert not tier.is_there(tails(1)[0])
    assert tier.load(tails(1)[0]) is LoadOutcome.NOT_OPEN
    assert tier.store(tails(1, first=50)) == [StoreOutcome.NOT_OPEN]
    open_now(tier, may_open)
    assert "the tier disk is open" in caplog.text
    assert tier.tier.statistics().state == "on"
    assert {tier.load(record) for record in tails(4)} == {LoadOutcome.LOADED}
    tier.keep(tails(1, first=50))
    tier.close(30)
    tier.check_quiet()


@pytest.mark.parametrize("clears_max", [lates.CLEARS_MAX, 1])
def test_what_was_cleared_meanwhile_is_not_found(
    tmp_path: Path, may_open: threading.Event, monkeypatch: pytest.MonkeyPatch, clears_max: int
) -> None:
    """The place did not hear of it; of more clears than are remembered all is cleared."""
    monkeypatch.setattr(lates, "CLEARS_MAX", clears_max)
    keep(tmp_path / "kv", SALTED)
    tier = late_disk(tmp_path / "kv")
    for record in SALTED[:2]:
        assert tier.tier.clear(record.root.salt_digest) == 0
    open_now(tier, may_open)
    held = [tier.is_there(record) for record in SALTED]
    assert held == [False, False, *[clears_max > 1] * 2]
    assert tier.tier.clear(SALTED[3].root.salt_digest) == held[3]
    tier.close(30)


def test_what_was_cleared_stays_cleared_if_the_node_ends_as_it_opens(
    tmp_path: Path, may_open: threading.Event
) -> None:
    """It is open, and nobody has looked since."""
    keep(tmp_path / "kv", SALTED)
    tier = late_disk(tmp_path / "kv")
    tier.tier.clear(SALTED[0].root.salt_digest)
    may_open.set()
    assert tier._woken.wait(30), "it is open"
    tier.close(30)
    with driven(tmp_path / "kv") as later:
        assert [later.is_there(record) for record in SALTED] == [False, True, True, True]


@pytest.mark.parametrize("is_waited_for", [True, False])
def test_what_was_cleared_stays_cleared_if_the_node_ends_before_it_opens(
    tmp_path: Path,
    may_open: threading.Event,
    caplog: pytest.LogCaptureFixture,
    is_waited_for: bool,
) -> None:
    """It opens while the node ends, or just after it has given up waiting."""
    keep(tmp_path / "kv", SALTED)
    tier = late_disk(tmp_path / "kv")
    [thread] = [one for one in threading.enumerate() if one.name == "kvtide-open"]
    tier.tier.clear(SALTED[0].root.salt_digest)
    if is_waited_for:
        closing = threading.Thread(target=tier.close, args=(30,))
        closing.start()
        may_open.set()
        closing.join(60)
    else:
        tier.close(0)
        may_open.set()
    thread.join(60)
    assert ("nor at the end: clear again" in caplog.text) != is_waited_for
    with driven(tmp_path / "kv") as later:
        assert [later.is_there(record) for record in SALTED] == [False, True, True, True]


def test_what_was_cleared_in_a_place_that_could_not_be_opened_is_told(
    tmp_path: Path, may_open: threading.Event, caplog: pytest.LogCaptureFixture
) -> None:
    other = DiskTier(tmp_path / "kv", 64 * MiB, lambda: None)
    tier = late_disk(tmp_path / "kv")
    open_now(tier, may_open)
    tier.tier.clear(None)
    tier.close(30)
    assert caplog.text.count("nor at the end: clear again") == 1
    other.close(30)


def test_a_node_that_ends_before_leaves_the_place_closed(
    tmp_path: Path, may_open: threading.Event
) -> None:
    tier = late_disk(tmp_path / "kv")
    tier.close(1)
    may_open.set()
    [thread] = [one for one in threading.enumerate() if one.name == "kvtide-open"]
    thread.join(30)
    DiskTier(tmp_path / "kv", 64 * MiB, lambda: None).close(30)  # nobody has it


def test_a_place_that_cannot_be_opened_late_says_why(
    tmp_path: Path, may_open: threading.Event, caplog: pytest.LogCaptureFixture
) -> None:
    """Once; the node goes on without it, until it can be opened."""
    other = DiskTier(tmp_path / "kv", 64 * MiB, lambda: None)
    tier = late_disk(tmp_path / "kv")
    open_now(tier, may_open)
    assert "one node may use it" in tier.tier.statistics().state
    for _ in range(5):  # it is tried again each time
        tier.pass_time(lates.PAUSE_MS_MAX)
        assert not tier.is_there(tails(1)[0])
    assert caplog.text.count("goes without the tier disk") == 1
    other.close(30)
    until_s = time.monotonic() + 30
    while tier.tier.statistics().state != "on":
        assert time.monotonic() < until_s, tier.tier.statistics().state
        tier.pass_time(lates.PAUSE_MS_MAX)
    tier.keep(tails(1))
    tier.close(30)


def test_a_place_that_cannot_be_opened_is_tried_less_and_less_often() -> None:
    tries: list[int] = []

    class Failing:
        def opened(self) -> None:
            tries.append(now_ms)
            raise ConfigError("it is not there")

        def take_back(self, timeout_s: float, at_last: Any) -> None:
            """Nothing to close."""

    now_ms = 0
    tier = lates.LateTier("one", Failing(), Failing, lambda: None)
    for now_ms in range(0, 300_000, 100):
        tier.tick(now_ms)
        tier.poll()
    pauses = [after - before for before, after in itertools.pairwise(tries)]
    assert pauses == [1_000, 2_000, 4_000, 8_000, 16_000, 32_000, *[lates.PAUSE_MS_MAX] * 3]
    tier.close(1)


@pytest.mark.parametrize("call", ["tick", "clear"])
def test_what_was_not_open_yet_is_said_though_the_tier_breaks_as_it_opens(call: str) -> None:
    """Else a load would be waited for, and its cells be lent, as long as the node runs."""
    record = SALTED[0]

    class Broken(MemoryTier):
        def _fail(self, *arguments: Any) -> Any:
            raise KeyError("a fault")

    class Coming:
        tier: Tier | None = None

        def opened(self) -> Tier | None:
            return self.tier

        def take_back(self, timeout_s: float, at_last: Any) -> Tier | None:
            return self.tier

    broken = Broken(wake=lambda: None, bytes_max=MiB)
    setattr(broken, call, broken._fail)
    coming, events = Coming(), list[fx.Event]()
    tier = lates.LateTier("one", coming, Coming, lambda: None)
    tiers = Tiers([tier], lambda _: [memoryview(bytearray(4096))], events.append)
    tiers.carry_out(fx.ClearTiers(None))
    tiers.carry_out(fx.LoadFrom(0, 1, record, m.Run(1, 0, 1, 1)))
    coming.tier = broken
    tiers.tick(0)
    [state] = [numbers.state for numbers in tiers.statistics().values()]
    assert "for a fault of its own" in state
    assert events == [fx.TierLoaded(1, LoadOutcome.NOT_OPEN, is_ok=False)]
    MemoryTier.close(broken, 10)
