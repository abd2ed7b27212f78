"""The node collects no cycles: whatever became of its calls, an s3 tier leaves none behind."""

import gc
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import obstore
import pytest

from kvtide.core.records import Record
from kvtide.testing import object_servers
from kvtide.testing.proxy import Proxy
from kvtide.testing.tier_drive import DrivenTier
from kvtide.testing.tier_records import chain_of, layout_of, root_of, text
from kvtide.tiers.base import LoadOutcome, StoreOutcome
from kvtide.tiers.remote.tier import SURVEY_MS
from kvtide.tiers.s3 import names
from kvtide.tiers.s3.session import Limits
from kvtide.units import KiB
from tests.tiers.s3_place import Bucket, driven, until

PART_BYTES = 64 * KiB
LAYOUT = layout_of(24 * KiB)
"""Two objects for each record: what is under way beside a call that fails ends, too."""
HASTY = Limits(call_s=0.5, put_s=0.5)
CALLS = 3


class Place:
    """A tier on a server that can fail, and a record that is there."""

    def __init__(self, tier: DrivenTier, proxy: Proxy, bucket: Bucket) -> None:
        self.tier = tier
        self.proxy = proxy
        self.bucket = bucket
        self.numbers = iter(range(1, 1000))
        self.chain = chain_of(root_of(), LAYOUT, text(0, 8))
        self.record = self.chain[0]
        tier.keep(self.chain)

    def fresh(self) -> Record:
        """One that was never stored."""
        return chain_of(root_of(), LAYOUT, text(next(self.numbers), 4))[0]

    def fault(self, kind: str) -> AbstractContextManager[None]:
        return self.proxy.refusing() if kind == "refused" else self.proxy.stalled()

    def load(self) -> None:
        assert self.tier.load(self.record) is LoadOutcome.LOADED

    def store(self) -> None:
        assert self.tier.store([self.fresh()]) == [StoreOutcome.STORED]

    def load_in_vain(self, fault: str) -> None:
        with self.fault(fault):
            assert self.tier.load(self.record) is LoadOutcome.FAILED
        until(self.tier, lambda: self.tier.load(self.record) is LoadOutcome.LOADED)

    def store_in_vain(self, fault: str) -> None:
        with self.fault(fault):
            assert self.tier.store([self.fresh()]) == [StoreOutcome.FAILED]
        until(self.tier, lambda: self.tier.load(self.record) is LoadOutcome.LOADED)

    def look_in_vain(self) -> None:
        with self.fault("refused"):
            self.tier.pass_time(SURVEY_MS)
        until(self.tier, lambda: self.tier.load(self.record) is LoadOutcome.LOADED)

    def load_damaged(self) -> None:
        self.bucket.change(self.bucket.objects_of(self.record)[0])
        assert self.tier.load(self.record) is LoadOutcome.CORRUPT
        self.tier.keep(self.chain)

    def load_evicted(self) -> None:
        obstore.delete(self.bucket.store, self.bucket.objects_of(self.record)[1])
        assert self.tier.load(self.record) is LoadOutcome.ABSENT
        self.tier.keep(self.chain)


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    monkeypatch.setattr(names, "PART_BYTES", PART_BYTES)
    with object_servers.running("rclone", tmp_path) as server:
        proxy = Proxy("127.0.0.1", server.port)
        with driven(proxy.port, limits=HASTY) as tier:
            yield Place(tier, proxy, Bucket(server.port))
        proxy.close()


def cycles_of(call: Callable[[], None]) -> int:
    """Objects that only a collection would free, after so many calls."""
    call()  # what is made once is made now
    gc.collect()
    gc.disable()
    try:
        for _ in range(CALLS):
            call()
        return gc.collect()
    finally:
        gc.enable()


def test_calls_that_go_well_leave_no_cycles(place: Place) -> None:
    for call in (place.load, place.store):
        assert cycles_of(call) < CALLS, call


@pytest.mark.parametrize("fault", ["refused", pytest.param("stalled", marks=pytest.mark.long)])
def test_calls_that_fail_leave_no_cycles(place: Place, fault: str) -> None:
    """Errors would keep the frames that they came through, and those the cells."""
    assert cycles_of(lambda: place.load_in_vain(fault)) < CALLS
    assert cycles_of(lambda: place.store_in_vain(fault)) < CALLS
    assert cycles_of(place.look_in_vain) < CALLS


def test_records_that_are_gone_leave_no_cycles(place: Place) -> None:
    """Rows that named each other let go of each other."""
    for call in (place.load_damaged, place.load_evicted):
        assert cycles_of(call) < CALLS, call
