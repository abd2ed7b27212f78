"""The suite of the tiers notices a tier that breaks a promise: each test, by some mutant."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvtide.core.records import Record
from kvtide.testing import tier_limits
from kvtide.testing.memory_tier import Held, MemoryTier, Turn
from kvtide.tiers.base import (
    Done,
    Found,
    Loaded,
    LoadJob,
    LoadOutcome,
    LookupJob,
    StoreJob,
    StoreOutcome,
    TierStatistics,
)
from tests.testing.memory_place import MemoryTierTests


class KeepsTheCells(MemoryTier):
    """It copies nothing, so it has what the cells hold later."""

    def _copy_in(self, turn: Turn) -> StoreOutcome:
        outcome = super()._copy_in(turn)
        turn.held.shards = list(turn.job.cells)
        return outcome


class SwapsShardsOfASize(MemoryTier):
    """Pages of a shard change places."""

    def _copy_out(self, turn: Turn) -> LoadOutcome:
        outcome = super()._copy_out(turn)
        for cells in turn.job.cells:
            cells[:4096], cells[-4096:] = bytes(cells[-4096:]), bytes(cells[:4096])
        return outcome


class ForgetsToWake(MemoryTier):
    def _end(self, done: Done) -> None:
        self._ended.append(done)


class EndsLoadsTwice(MemoryTier):
    def _end_load(self, job: LoadJob, outcome: LoadOutcome) -> None:
        super()._end_load(job, outcome)
        self._end(Loaded(job.number, outcome))


class MixesUpWhatRuns(MemoryTier):
    """Beside another load, it loads that one's record."""

    def _copy_out(self, turn: Turn) -> LoadOutcome:
        if self._loads and self._loads[0].job.record.blocks == turn.job.record.blocks:
            turn.held = self.held[self._loads[0].job.record.key]
        return super()._copy_out(turn)


class WritesBeside(MemoryTier):
    def _copy_out(self, turn: Turn) -> LoadOutcome:
        outcome = super()._copy_out(turn)
        whole = memoryview(turn.job.cells[0].obj)
        whole[0] ^= 1
        return outcome


class TouchesCellsLater(MemoryTier):
    """What it was given last is written to once more, at the end."""

    def load(self, job: LoadJob) -> None:
        self.last = job
        super().load(job)

    def close(self, timeout_s: float) -> None:
        super().close(timeout_s)
        self.last.cells[0][0] = 1


class AlwaysGoesOn(MemoryTier):
    def _end(self, done: Done) -> None:
        super()._end(replace(done, may_go_on=True) if isinstance(done, Found) else done)


class NeverGoesOn(MemoryTier):
    def _end(self, done: Done) -> None:
        super()._end(replace(done, may_go_on=False) if isinstance(done, Found) else done)


class LooksBehindAGap(MemoryTier):
    def lookup(self, job: LookupJob) -> None:
        keys = [job.keys[start : start + 32] for start in range(0, len(job.keys), 32)]
        there = [key for key in keys if key in self.held]
        super().lookup(replace(job, keys=b"".join(there)))


class IgnoresTheParent(MemoryTier):
    def _belongs(self, record: Record, job: LookupJob, parent: bytes) -> bool:
        return (record.root, record.layout) == (job.root, job.layout)


class IgnoresTheRoot(MemoryTier):
    def _belongs(self, record: Record, job: LookupJob, parent: bytes) -> bool:
        return (record.parent, record.layout) == (parent, job.layout)


class IgnoresTheLayout(MemoryTier):
    def _belongs(self, record: Record, job: LookupJob, parent: bytes) -> bool:
        return (record.parent, record.root) == (parent, job.root)


class TakesTheFirstChild(MemoryTier):
    @staticmethod
    def _longest(records: Sequence[Record], digests: bytes) -> Record | None:
        return next((one for one in records if one.digests[:16] == digests[:16]), None)


class TakesWholeChunksOnly(MemoryTier):
    @staticmethod
    def _longest(records: Sequence[Record], digests: bytes) -> Record | None:
        return next((one for one in records if one.digests == digests), None)


class LoadsByKey(MemoryTier):
    def _refuse_load(self, turn: Turn) -> LoadOutcome | None:
        outcome = super()._refuse_load(turn)
        is_alike = turn.held and turn.held.record.payload_bytes == turn.job.record.payload_bytes
        return None if is_alike else outcome


class StoresTwice(MemoryTier):
    def _refuse_store(self, turn: Turn) -> StoreOutcome | None:
        outcome = super()._refuse_store(turn)
        return None if outcome is StoreOutcome.HELD else outcome


class HoldsByKey(MemoryTier):
    def _refuse_store(self, turn: Turn) -> StoreOutcome | None:
        is_there = turn.job.record.key in self.held
        return StoreOutcome.HELD if is_there else super()._refuse_store(turn)


class NeedsNoParent(MemoryTier):
    def _refuse_store(self, turn: Turn) -> StoreOutcome | None:
        outcome = super()._refuse_store(turn)
        return None if outcome is StoreOutcome.NOT_ANCHORED else outcome


class ForgetsWhatIsQueuedAhead(MemoryTier):
    def store(self, job: StoreJob) -> None:
        record = job.record
        if record.parent in self.held or record.parent == record.root.key:
            super().store(job)
        else:
            self._end_store(job, StoreOutcome.NOT_ANCHORED)


class KeepsEachTail(MemoryTier):
    def _keep(self, held: Held) -> StoreOutcome:
        siblings, self._siblings = self._siblings, lambda record: []
        outcome = super()._keep(held)
        self._siblings = siblings
        return outcome


class PutsTheShorterInPlace(MemoryTier):
    def store(self, job: StoreJob) -> None:
        for other in self._siblings(job.record):
            if other.digests.startswith(job.record.digests) and other.key != job.record.key:
                self._remove(other.key)
        super().store(job)


class ForgetsTheLastAtRestart(MemoryTier):
    def __init__(self, *args: Any, held: dict[bytes, Held] | None = None, **more: Any) -> None:
        super().__init__(*args, held=held, **more)
        if self.held:
            self._remove(next(reversed(self.held)))


class HasNoCap(MemoryTier):
    def _keep(self, held: Held) -> StoreOutcome:
        self._bytes_max, kept = 1 << 40, self._bytes_max
        outcome = super()._keep(held)
        self._bytes_max = kept
        return outcome


class TakesNothingWhenFull(MemoryTier):
    def _keep(self, held: Held) -> StoreOutcome:
        if self._used_bytes() + held.record.payload_bytes > self._bytes_max:
            return StoreOutcome.NO_ROOM
        return super()._keep(held)


class EvictsTheOldestOfAll(MemoryTier):
    def _keep(self, held: Held) -> StoreOutcome:
        while self._used_bytes() + held.record.payload_bytes > self._bytes_max:
            self.held.pop(next(iter(self.held)))
            self._counts.evicted += 1
        return super()._keep(held)


class EvictsTheParent(MemoryTier):
    """Room is made of what the record is to hang on."""

    def _keep(self, held: Held) -> StoreOutcome:
        outcome = super()._keep(held)
        if outcome is StoreOutcome.NO_ROOM:
            self.held.pop(held.record.parent)
            self.held[held.record.key] = held
            return StoreOutcome.STORED
        return outcome


class ForgetsToCountBack(MemoryTier):
    """What it takes away but for room is counted on."""

    leaked_bytes = 0

    def _remove(self, key: bytes) -> None:
        self.leaked_bytes += self.held[key].record.payload_bytes
        super()._remove(key)

    def _used_bytes(self) -> int:
        return super()._used_bytes() + self.leaked_bytes


class NeverTouches(MemoryTier):
    def _touch(self, key: bytes) -> None:
        pass


class QueuesWithoutBound(MemoryTier):
    def store(self, job: StoreJob) -> None:
        self._stores.append(Turn(job, self._now_ms))
        self._begin_next()


class NeverTooOld(MemoryTier):
    def tick(self, now_ms: int) -> None:
        self._now_ms = now_ms


class TooOldTooEarly(MemoryTier):
    def tick(self, now_ms: int) -> None:
        super().tick(now_ms + 1)


class StoresFirst(MemoryTier):
    def load(self, job: LoadJob) -> None:
        self._stores.append(Turn(job, self._now_ms))
        self._begin_next()


class CountsWhatWasHeld(MemoryTier):
    def statistics(self) -> TierStatistics:
        numbers = super().statistics()
        numbers.stored["stored"] = numbers.stored.get("stored", 0) + numbers.stored.get("held", 0)
        return numbers


class ClearsAllForNoSalt(MemoryTier):
    def clear(self, salt_digest: bytes | None) -> int:
        return super().clear(salt_digest or None)


class ClearsByHalf(MemoryTier):
    """It says how many, and still finds them."""

    def clear(self, salt_digest: bytes | None) -> int:
        return sum(
            salt_digest in (None, one.record.root.salt_digest) for one in self.held.values()
        )


class ForgetsTheQueueWhenCleared(MemoryTier):
    def clear(self, salt_digest: bytes | None) -> int:
        count = super().clear(salt_digest)
        for turn in self._stores:
            turn.is_cleared = False
        return count


class EndsWhatNobodyAsked(MemoryTier):
    def close(self, timeout_s: float) -> None:
        super().close(timeout_s)
        self._end(Loaded(99, LoadOutcome.CLOSED))


class DropsTheQueueAtClose(MemoryTier):
    def close(self, timeout_s: float) -> None:
        self._stores.clear()
        super().close(timeout_s)


class ClosesWhenItCan(MemoryTier):
    """It waits for longer than it may."""

    def close(self, timeout_s: float) -> None:
        super().close(timeout_s + 0.2)


class HasNoBreaker(MemoryTier):
    is_broken = property(lambda self: False)


class NeverHeals(MemoryTier):
    def tick(self, now_ms: int) -> None:
        pass


class FailsAsCorrupt(MemoryTier):
    """A place that does not answer is no reason to remove a record."""

    def _copy_out(self, turn: Turn) -> LoadOutcome:
        outcome = super()._copy_out(turn)
        return LoadOutcome.CORRUPT if outcome is LoadOutcome.FAILED else outcome


class DoesNotVerify(MemoryTier):
    def _copy_out(self, turn: Turn) -> LoadOutcome:
        for cells, shard in zip(turn.job.cells, turn.held.shards, strict=True):
            cells[:] = shard
        return LoadOutcome.LOADED


class RemovesTheWholeChain(MemoryTier):
    def _remove(self, key: bytes) -> None:
        self.held.clear()


class KeepsWhatCannotBeReached(MemoryTier):
    def _remove(self, key: bytes) -> None:
        self.held.pop(key)


class KeepsWhatIsDamaged(MemoryTier):
    def _remove(self, key: bytes) -> None:
        pass


MUTANTS: list[tuple[type[MemoryTier], str, tuple[str, ...]]] = [
    (KeepsTheCells, "what_was_stored_is_found_and_brings_every_byte", ("one shard",)),
    (SwapsShardsOfASize, "what_was_stored_is_found_and_brings_every_byte", ("one shard",)),
    (ForgetsToWake, "a_tier_without_records_finds_nothing", ()),
    (EndsLoadsTwice, "what_was_stored_is_found_and_brings_every_byte", ("one shard",)),
    (WritesBeside, "what_was_stored_is_found_and_brings_every_byte", ("one shard",)),
    (TouchesCellsLater, "what_was_stored_is_found_and_brings_every_byte", ("one shard",)),
    (AlwaysGoesOn, "a_tier_without_records_finds_nothing", ()),
    (AlwaysGoesOn, "an_answer_says_whether_digests_would_tell_more", ()),
    (NeverGoesOn, "an_answer_says_whether_digests_would_tell_more", ()),
    (LooksBehindAGap, "a_lookup_ends_at_the_first_chunk_that_is_not_there", ()),
    (IgnoresTheParent, "a_lookup_may_begin_in_the_middle_of_a_chain", ()),
    (TakesTheFirstChild, "a_chunk_is_matched_by_blocks_as_far_as_possible", ()),
    (TakesWholeChunksOnly, "a_chunk_is_matched_by_blocks_as_far_as_possible", ()),
    (IgnoresTheRoot, "what_belongs_to_another_root_or_layout_is_not_there", ("another salt",)),
    (IgnoresTheRoot, "what_belongs_to_another_root_or_layout_is_not_there", ("another epoch",)),
    (
        IgnoresTheLayout,
        "what_belongs_to_another_root_or_layout_is_not_there",
        ("another size of cells",),
    ),
    (LoadsByKey, "what_belongs_to_another_root_or_layout_is_not_there", ("another engine",)),
    (LoadsByKey, "a_load_names_the_whole_record", ()),
    (StoresTwice, "a_record_that_is_there_is_not_stored_again", ()),
    (HoldsByKey, "a_name_of_other_content_is_not_taken_for_what_is_held", ()),
    (NeedsNoParent, "a_record_is_kept_only_behind_its_parent", ()),
    (ForgetsWhatIsQueuedAhead, "stores_of_a_chain_may_wait_behind_one_another", ()),
    (NeedsNoParent, "what_waits_behind_a_dropped_chunk_is_dropped_with_it", ()),
    (KeepsEachTail, "a_longer_record_takes_the_place_of_the_tail_it_begins_with", ()),
    (PutsTheShorterInPlace, "a_tail_that_a_record_begins_with_adds_nothing", ()),
    (MixesUpWhatRuns, "loads_stores_and_lookups_go_on_side_by_side", ("one shard",)),
    (ForgetsTheLastAtRestart, "stores_come_back_after_a_restart", ()),
    (HasNoCap, "the_cap_holds_at_all_times_and_what_is_new_finds_room", ()),
    (TakesNothingWhenFull, "the_cap_holds_at_all_times_and_what_is_new_finds_room", ()),
    (EvictsTheOldestOfAll, "leaves_are_evicted_before_what_they_hang_on", ()),
    (EvictsTheParent, "a_chain_longer_than_the_cap_keeps_its_beginning", ()),
    (ForgetsToCountBack, "room_comes_back_from_what_is_cleared_or_superseded", ()),
    (NeverTouches, "what_is_used_stays", ()),
    (QueuesWithoutBound, "what_waits_is_bounded_in_bytes", ()),
    (NeverTooOld, "a_store_that_waits_for_too_long_is_dropped", ()),
    (TooOldTooEarly, "a_store_that_waits_for_too_long_is_dropped", ()),
    (StoresFirst, "loads_go_before_stores", ()),
    (CountsWhatWasHeld, "its_numbers_add_up", ()),
    (ClearsAllForNoSalt, "a_salt_is_cleared_and_no_other", ("",)),
    (ClearsByHalf, "a_salt_is_cleared_and_no_other", ("one tenant",)),
    (ForgetsTheQueueWhenCleared, "what_is_cleared_while_it_waits_does_not_appear", ()),
    (ClearsByHalf, "what_is_cleared_while_it_is_loaded_ends_as_it_would_have", ()),
    (EndsWhatNobodyAsked, "a_tier_may_be_closed_before_anything_was_asked", ()),
    (DropsTheQueueAtClose, "close_ends_every_job_once", ()),
    (DropsTheQueueAtClose, "close_does_not_wait_for_a_place_that_does_not_answer", ()),
    (ClosesWhenItCan, "close_does_not_wait_for_a_place_that_does_not_answer", ()),
    (HasNoBreaker, "a_place_that_fails_is_left_alone_and_comes_back", ()),
    (NeverHeals, "a_place_that_fails_is_left_alone_and_comes_back", ()),
    (FailsAsCorrupt, "a_place_that_fails_is_left_alone_and_comes_back", ()),
    (NeedsNoParent, "what_waits_behind_a_failed_store_is_dropped_with_it", ()),
    (DoesNotVerify, "a_damaged_record_is_never_loaded_and_is_gone", ()),
    (RemovesTheWholeChain, "a_damaged_record_is_never_loaded_and_is_gone", ()),
    (KeepsWhatCannotBeReached, "a_damaged_record_is_never_loaded_and_is_gone", ()),
    (KeepsWhatIsDamaged, "a_damaged_record_is_never_loaded_and_is_gone", ()),
]


@pytest.mark.parametrize(("mutant", "name", "arguments"), MUTANTS)
def test_the_suite_notices_a_tier_that(
    mutant: type[MemoryTier],
    name: str,
    arguments: tuple[str, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tier_limits, "CLOSE_S_MAX", 0.1)
    suite = type("Suite", (MemoryTierTests,), {"tier_type": mutant, "wait_s": 0.2})()
    suite.begin(tmp_path)

    def run() -> None:
        try:
            getattr(suite, f"test_{name}")(*arguments)
        finally:
            suite.end()

    with pytest.raises(AssertionError):
        run()


def test_every_test_of_the_suite_is_proven() -> None:
    tests = {name for name in dir(MemoryTierTests) if name.startswith("test_")}
    assert tests == {f"test_{name}" for _, name, _ in MUTANTS}
