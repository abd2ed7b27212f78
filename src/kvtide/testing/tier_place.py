"""What a tier must lend to the suite: how it is made, and how its place is disturbed.

Hooks that a tier does not override skip the tests that need them, with the reason that says so.
"""

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import ClassVar

import pytest

from kvtide.bounds import T_PUT_MS
from kvtide.core.records import Record
from kvtide.testing.tier_drive import DrivenTier
from kvtide.tiers.base import Tier
from kvtide.units import MiB

CAP_BYTES = 8 * MiB


class TierPlace:
    """Makes the tier under test, and closes what a test leaves open."""

    tier_type: ClassVar[type[Tier]]
    """What `make_tier` makes."""
    cap_bytes: ClassVar[int] = CAP_BYTES
    """The cap that tests give where they say nothing else: no less than the tier can have."""
    queue_bytes_max: ClassVar[int] = 8 * MiB
    """Of stores that may wait in the tier which `make_tier` gives; it hands this on."""
    put_ms_max: ClassVar[int] = T_PUT_MS
    """T_put of that tier."""
    running_max: ClassVar[int] = 8
    """Jobs that its threads may have begun when the place stops answering."""
    retry_ms_max: ClassVar[int] = 120_000
    """A broken place that is well again is tried within this time."""
    narrowed: ClassVar[dict[str, str]] = {}
    """Tests that do not apply to this tier, by name, each with its reason."""
    wait_s: ClassVar[float] = 30.0
    """So long a test waits for `wake`."""

    woken: threading.Event

    def make_tier(self, tmp_path: Path, *, bytes_max: int) -> Tier:
        """The tier under test, empty, at a place below this path; it calls `self.wake`."""
        raise NotImplementedError

    def reopen(self, tier: Tier) -> Tier | None:
        """A tier at the place of one that was closed; None: this one ends with its process."""
        raise NotImplementedError

    def bytes_taken(self, tier: Tier) -> int:
        """What its place holds, measured from outside where that can be done."""
        return tier.statistics().bytes_used

    def stalled(self, tier: Tier) -> AbstractContextManager[None]:
        """Within it the place takes jobs and does not answer."""
        pytest.skip("nothing makes this tier's place stand still")

    def failing(self, tier: Tier) -> AbstractContextManager[None]:
        """Within it the place fails whatever it is asked for."""
        pytest.skip("nothing makes this tier's place fail")

    def damage(self, tier: Tier, record: Record) -> None:
        """Change one byte of a record where it rests."""
        pytest.skip("nothing reaches the bytes of this tier's records")

    # ---- for the tests

    def wake(self) -> None:
        """What the tier calls when `poll` has something to give."""
        self.woken.set()

    @pytest.fixture(autouse=True)
    def _place(self, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[None]:
        for name in self.narrowed:
            assert hasattr(self, name), f"{name} is narrowed, but is no test of the suite"
        reason = self.narrowed.get(getattr(request.node, "originalname", ""))
        if reason is not None:
            pytest.skip(reason)
        self.begin(tmp_path)
        yield
        self.end()

    def begin(self, tmp_path: Path) -> None:
        """Before each test."""
        self.woken = threading.Event()
        self._tmp_path = tmp_path
        self._open: list[DrivenTier] = []

    def end(self) -> None:
        """After each test: all that it made is closed, and every job has ended once."""
        with ExitStack() as stack:
            for tier in self._open:
                stack.callback(tier.check_quiet)
                stack.callback(tier.close, self.wait_s)

    def start(self, bytes_max: int | None = None) -> DrivenTier:
        """A tier, empty."""
        bytes_max = self.cap_bytes if bytes_max is None else bytes_max
        return self._driven(self.make_tier(self._tmp_path, bytes_max=bytes_max))

    def restart(self, driven: DrivenTier) -> DrivenTier:
        """Close a tier and open what it leaves; skips where that is nothing."""
        driven.close(self.wait_s)
        tier = self.reopen(driven.tier)
        if tier is None:
            pytest.skip("this tier ends with its process")
        return self._driven(tier)

    def _driven(self, tier: Tier) -> DrivenTier:
        driven = DrivenTier(tier, self.woken, self.wait_s)
        self._open.append(driven)
        assert isinstance(tier, self.tier_type), f"{tier} is no {self.tier_type}"
        return driven
