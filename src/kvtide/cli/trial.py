"""A trial of a tier: records are put, found, got, verified and deleted.

Nothing of anybody else's is touched: they have a fingerprint of their own, made at random, and
what is deleted is what has that.
"""

import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from kvtide.bounds import T_PUT_MS
from kvtide.core.chain import Chain
from kvtide.core.keys import KEY_BYTES, fingerprint, root_key
from kvtide.core.layout import KVLayout
from kvtide.core.records import Record, RootName
from kvtide.errors import KVTideError
from kvtide.node.health import ON
from kvtide.tiers.base import (
    Done,
    Found,
    Loaded,
    LoadJob,
    LoadOutcome,
    LookupJob,
    Stored,
    StoreJob,
    StoreOutcome,
    Tier,
)
from kvtide.tiers.files import page_memory
from kvtide.units import MiB, format_bytes

RECORDS = 8
RECORD_BYTES = 4 * MiB
"""As a chunk of a small model; enough of them for a rate to mean something, in a second or so."""
TICK_S = 0.1
STEP_S_MAX = T_PUT_MS / 1000 + 5.0
"""So long one step may take: what is stored ends within T_put, well or not."""

STORE_WORDS = {
    StoreOutcome.NOT_ANCHORED: "the record before it is not kept: it was evicted at once, or the"
    " place keeps nothing",
    StoreOutcome.QUEUE_FULL: "too much waits already",
    StoreOutcome.TOO_OLD: f"it was not written within {T_PUT_MS // 1000} s: the place is slow, or"
    " does not answer",
    StoreOutcome.NO_ROOM: "there is no room: the place is full, or its cap too small",
    StoreOutcome.FAILED: "the place did not take it",
    StoreOutcome.BROKEN: "the place failed so often that it is left alone for now",
}
LOAD_WORDS = {
    LoadOutcome.ABSENT: "it is not there any more: somebody evicts it at once",
    LoadOutcome.CORRUPT: "what came back is not what was put",
    LoadOutcome.FAILED: "the place did not give it",
    LoadOutcome.BROKEN: "the place failed so often that it is left alone for now",
}
"""What outcomes mean to whoever asks why."""


class TrialFailed(KVTideError):
    """A step went wrong; says which, and why."""


@dataclass(frozen=True, slots=True)
class Step:
    """One step that went well."""

    text: str


class Trial:
    """Drives a tier; `woken` is set by its `wake`."""

    def __init__(self, tier: Tier, woken: threading.Event) -> None:
        self._tier = tier
        self._woken = woken
        self._began_s = time.monotonic()
        self._next_number = 0
        name = fingerprint({"kvtide tier test": os.urandom(16).hex()})
        self._root = RootName(root_key(name, epoch=b"", salt=None, adapter=b""), name, b"", b"")
        self._layout = KVLayout(16, 16, (RECORD_BYTES,))
        self._records = self._chain()

    def _chain(self) -> list[Record]:
        chain = Chain(self._root.key, 16, 16)
        chain.extend(range(16 * RECORDS))
        return [
            Record(
                self._root,
                chain.parent(at),
                chain.keys[at],
                chain.short_digests(at, 1),
                self._layout,
            )
            for at in range(RECORDS)
        ]

    def steps(self) -> Iterator[Step]:
        """Each as it is done.

        Raises:
            TrialFailed: at the first that goes wrong; what was put is deleted all the same.
        """
        try:
            content = [page_memory(RECORD_BYTES) for _ in self._records]
            for cells in content:
                cells[:] = os.urandom(MiB) * (RECORD_BYTES // MiB)
            yield Step(f"put {self._timed(lambda: self._put(content))}")
            self._find(len(self._records))
            yield Step("found all by one question")
            got = [page_memory(RECORD_BYTES) for _ in self._records]
            yield Step(f"got {self._timed(lambda: self._get(got))}")
            if content != got:
                raise TrialFailed("get: what came back is not what was put, and nobody noticed")
            yield Step("each byte is as it was put")
        finally:
            self._tier.clear(None, self._root.fingerprint)
        self._find(0)
        yield Step("deleted, and not found any more")

    def _timed(self, step: Callable[[], None]) -> str:
        began_s = time.monotonic()
        step()
        took_s = max(1e-6, time.monotonic() - began_s)
        size = RECORDS * RECORD_BYTES
        return (
            f"{RECORDS} records of {format_bytes(RECORD_BYTES)} in {took_s:.2f} s,"
            f" {size / took_s / 1e6:.0f} MB/s"
        )

    def _put(self, content: list[memoryview]) -> None:
        jobs = [
            StoreJob(self._number(), record, [cells])
            for record, cells in zip(self._records, content, strict=True)
        ]
        for job in jobs:
            self._tier.store(job)
        for done in self._ended([job.number for job in jobs]):
            assert isinstance(done, Stored), done
            if not done.outcome.is_kept:
                raise self._failed("put", done.outcome, STORE_WORDS.get(done.outcome))

    def _get(self, content: list[memoryview]) -> None:
        jobs = [
            LoadJob(self._number(), record, [cells])
            for record, cells in zip(self._records, content, strict=True)
        ]
        for job in jobs:
            self._tier.load(job)
        for done in self._ended([job.number for job in jobs]):
            assert isinstance(done, Loaded), done
            if done.outcome is not LoadOutcome.LOADED:
                raise self._failed("get", done.outcome, LOAD_WORDS.get(done.outcome))

    def _find(self, wanted: int) -> None:
        keys = b"".join(record.key for record in self._records)
        assert len(keys) == RECORDS * KEY_BYTES, len(keys)
        number = self._number()
        self._tier.lookup(LookupJob(number, self._root, self._root.key, keys, b"", self._layout))
        (done,) = self._ended([number])
        assert isinstance(done, Found), done
        if len(done.records) != wanted:
            raise TrialFailed(
                f"look up: {len(done.records)} of {RECORDS} records are found, not {wanted}"
                f"{self._state()}"
            )

    def _number(self) -> int:
        self._next_number += 1
        return self._next_number

    def _ended(self, numbers: list[int]) -> list[Done]:
        """How these jobs ended, in order; time goes on meanwhile."""
        ended: dict[int, Done] = {}
        until_s = time.monotonic() + STEP_S_MAX
        while not ended.keys() >= set(numbers):
            if time.monotonic() > until_s:
                raise TrialFailed(f"no answer within {STEP_S_MAX:g} s{self._state()}")
            self._woken.wait(TICK_S)
            self._woken.clear()
            self._tier.tick(int((time.monotonic() - self._began_s) * 1000))
            ended |= {done.number: done for done in self._tier.poll()}
        return [ended[number] for number in numbers]

    def _failed(self, step: str, outcome: str, words: str | None) -> TrialFailed:
        said = f"{words} ({outcome})" if words else outcome
        return TrialFailed(f"{step}: {said}{self._state()}")

    def _state(self) -> str:
        state = self._tier.statistics().state
        return "" if state == ON else f"; it says: {state}"
