"""The owner of a tier, for tests: submits, waits for `wake`, polls, and watches the promises.

With every job: it ends once and as its kind does, its cells are only touched while it runs, a load
that ended well brought each byte. With every poll: the cap holds.

Loads and stores are numbered apart, as the node numbers them: a load and a store share numbers.
"""

import threading
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TypeAlias

from kvtide.core.keys import KEY_BYTES
from kvtide.core.layout import KVLayout
from kvtide.core.records import Record, RootName
from kvtide.testing.tier_records import Cells, keys_of
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

Job: TypeAlias = LookupJob | LoadJob | StoreJob

_ENDS: dict[type[Job], type[Done]] = {LookupJob: Found, LoadJob: Loaded, StoreJob: Stored}


class DrivenTier:
    """A tier and all that was asked of it."""

    def __init__(self, tier: Tier, woken: threading.Event, wait_s: float) -> None:
        """`woken` is set by the tier's `wake`; without one in `wait_s` a wait fails."""
        self.tier = tier
        self.order: list[Job] = []
        """Jobs in the order in which they ended."""
        self._woken = woken
        self._wait_s = wait_s
        self._now_ms = 0
        self._numbers: Counter[type[Job]] = Counter()
        self._running: dict[tuple[type[Done], int], Job] = {}
        self._ends: dict[int, Done] = {}  # by the identity of the job, which `_jobs` keeps alive
        self._jobs: list[Job] = []
        self._cells: dict[int, Cells] = {}  # the same
        self._is_closed = False

    # ---- jobs

    def ask(
        self,
        records: Sequence[Record] = (),
        digests: bytes = b"",
        *,
        root: RootName | None = None,
        parent: bytes | None = None,
        layout: KVLayout | None = None,
    ) -> LookupJob:
        """Submit a lookup of these, which go on from one another; the rest follows from them."""
        root = root or records[0].root
        parent = parent or (records[0].parent if records else root.key)
        layout = layout or records[0].layout
        keys = keys_of(records)
        assert len(keys) == KEY_BYTES * len(records), len(keys)
        job = LookupJob(self._number(LookupJob), root, parent, keys, digests, layout)
        self._submit(job)
        self.tier.lookup(job)
        return job

    def submit_load(self, record: Record) -> LoadJob:
        """Submit a load into cells of its own."""
        cells = Cells(record)
        job = LoadJob(self._number(LoadJob), record, cells.views)
        self._cells[id(job)] = cells
        self._submit(job)
        self.tier.load(job)
        return job

    def submit_store(self, record: Record) -> StoreJob:
        """Submit a store of its bytes, from cells that change once it has ended."""
        cells = Cells(record).fill()
        job = StoreJob(self._number(StoreJob), record, cells.views)
        self._cells[id(job)] = cells
        self._submit(job)
        self.tier.store(job)
        return job

    def _number(self, kind: type[Job]) -> int:
        self._numbers[kind] += 1
        return self._numbers[kind]

    def _submit(self, job: Job) -> None:
        """Before the tier has it: it may end at once."""
        self._running[_ENDS[type(job)], job.number] = job
        self._jobs.append(job)

    # ---- ends

    def poll(self) -> None:
        """Take what has ended, and look at it."""
        self._woken.clear()
        for done in self.tier.poll():
            job = self._running.pop((type(done), done.number), None)
            assert job is not None, f"{done} ends a job that is not running"
            self._ends[id(job)] = done
            self.order.append(job)
            self._look_at(job, done)
        numbers = self.tier.statistics()
        assert numbers.bytes_used <= numbers.bytes_max, numbers

    def _look_at(self, job: Job, done: Done) -> None:
        cells = self._cells.get(id(job))
        if cells is None:
            return
        cells.assert_guarded()
        if isinstance(done, Loaded):
            assert isinstance(done.outcome, LoadOutcome), done
            if done.outcome is LoadOutcome.LOADED:
                cells.assert_filled()
        else:
            assert isinstance(done, Stored), done
            assert isinstance(done.outcome, StoreOutcome), done
        cells.scramble()

    def wait(self, jobs: Iterable[Job]) -> None:
        """Until all these have ended."""
        jobs = list(jobs)
        deadline_s = time.monotonic() + self._wait_s
        while missing := [job for job in jobs if not self.has_ended(job)]:
            is_woken = self._woken.wait(max(0.0, deadline_s - time.monotonic()))
            assert is_woken, f"no wake in {self._wait_s} s; still running: {missing}"
            self.poll()

    def poll_for(self, seconds: float) -> None:
        """Poll once, at the next wake or when this time has passed."""
        self._woken.wait(seconds)
        self.poll()

    def has_ended(self, job: Job) -> bool:
        """Whether its end was polled."""
        return id(job) in self._ends

    def running(self) -> list[Job]:
        """Jobs whose end was not polled yet."""
        return list(self._running.values())

    def found(self, job: LookupJob) -> Found:
        """How a lookup ended; waits for it."""
        self.wait([job])
        done = self._ends[id(job)]
        assert isinstance(done, Found), done
        return done

    def loaded(self, job: LoadJob) -> LoadOutcome:
        """How a load ended; waits for it."""
        self.wait([job])
        done = self._ends[id(job)]
        assert isinstance(done, Loaded), done
        return done.outcome

    def stored(self, job: StoreJob) -> StoreOutcome:
        """How a store ended; waits for it."""
        self.wait([job])
        done = self._ends[id(job)]
        assert isinstance(done, Stored), done
        return done.outcome

    # ---- the same, one after the other

    def find(self, records: Sequence[Record], digests: bytes = b"") -> list[Record]:
        """What a lookup of these finds."""
        return self.found(self.ask(records, digests)).records

    def load(self, record: Record) -> LoadOutcome:
        """Load one record."""
        return self.loaded(self.submit_load(record))

    def store(self, records: Iterable[Record]) -> list[StoreOutcome]:
        """Store these, each after the one before has ended."""
        return [self.stored(self.submit_store(record)) for record in records]

    def keep(self, records: Iterable[Record]) -> None:
        """Store these; they are there now."""
        outcomes = self.store(records)
        assert all(outcome.is_kept for outcome in outcomes), outcomes

    def is_there(self, record: Record) -> bool:
        """Whether it is found by itself, whatever is before it."""
        if record.is_whole:
            return self.find([record]) == [record]
        asked = self.ask(
            (), record.digests, root=record.root, parent=record.parent, layout=record.layout
        )
        return self.found(asked).records == [record]

    # ---- time and end

    def pass_time(self, ms: int) -> None:
        """The clock goes on."""
        self._now_ms += ms
        self.tier.tick(self._now_ms)

    def close(self, timeout_s: float) -> None:
        """Close the tier and poll once more."""
        if not self._is_closed:
            self._is_closed = True
            self.tier.close(timeout_s)
            self.poll()

    def check_quiet(self) -> None:
        """Nothing runs, and nobody touched cells after their job had ended."""
        assert not self._running, f"never ended: {self.running()}"
        for job in self._jobs:
            if isinstance(job, LoadJob):
                self._cells[id(job)].assert_scrambled()
                self._cells[id(job)].assert_guarded()
