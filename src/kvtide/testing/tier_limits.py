"""What a tier does at its limits, when it is cleared or closed, and when its place fails."""

import time
from collections.abc import Sequence

import pytest

from kvtide.core.records import Record
from kvtide.testing.tier_drive import DrivenTier, Job
from kvtide.testing.tier_place import TierPlace
from kvtide.testing.tier_records import (
    BLOCKS_PER_CHUNK,
    chain_of,
    layout_of,
    root_of,
    text,
)
from kvtide.tiers.base import LoadJob, LoadOutcome, StoreJob, StoreOutcome
from kvtide.units import KiB

SMALL = layout_of(4096, 8192)
LARGE = layout_of(64 * KiB)
ROOT = root_of()
SALTS = ("", "one tenant", "another")

CLOSE_S_MAX = 5.0
"""Beyond the time that `close` was given: for threads to be scheduled on a busy machine."""
TURNS_MAX = 20
"""Chances to win a race that is won nine times of ten, and never by who must wait."""
NEVER_THERE = (
    StoreOutcome.NOT_ANCHORED,
    StoreOutcome.TOO_OLD,
    StoreOutcome.QUEUE_FULL,
    StoreOutcome.NO_ROOM,
    StoreOutcome.FAILED,
    StoreOutcome.BROKEN,
    StoreOutcome.CLOSED,
)


def chunks(count: int, first: int = 0) -> list[Record]:
    """Large chunks that begin chains of their own."""
    return [chain_of(ROOT, LARGE, text(first + n, BLOCKS_PER_CHUNK))[0] for n in range(count)]


class LimitTests(TierPlace):
    """Room, queues, time, the end, and faults."""

    # ---- room

    def test_the_cap_holds_at_all_times_and_what_is_new_finds_room(self) -> None:
        """Ten times the cap is written; the driver looks at the numbers with every poll."""
        tier = self.start()
        count = 10 * self.cap_bytes // LARGE.chunk_bytes
        for record in chunks(count):
            assert tier.store([record]) == [StoreOutcome.STORED]
            assert self.bytes_taken(tier.tier) <= self.cap_bytes
            assert tier.is_there(record)
        numbers = tier.tier.statistics()
        assert numbers.evicted + numbers.records == count, numbers
        assert numbers.records >= self.cap_bytes // LARGE.chunk_bytes // 2, "room is made use of"
        held = [record for record in chunks(count) if tier.is_there(record)]
        assert len(held) == numbers.records
        assert {tier.load(record) for record in held} == {LoadOutcome.LOADED}

    def test_leaves_are_evicted_before_what_they_hang_on(self) -> None:
        """Whatever is found by itself is found from its root on."""
        tier = self.start()
        prompts = [text(number, 4 * BLOCKS_PER_CHUNK + 2) for number in range(24)]
        chains = [chain_of(ROOT, LARGE, prompt) for prompt in prompts]
        for chain in chains:
            tier.keep(chain)
        assert tier.tier.statistics().evicted > 0
        found = 0
        for *whole, tail in chains:
            is_there = [tier.is_there(record) for record in (*whole, tail)]
            assert is_there == sorted(is_there, reverse=True), is_there
            assert len(tier.find(whole, tail.digests)) == sum(is_there)
            found += sum(is_there)
        assert found == tier.tier.statistics().records
        gone = sum(map(len, chains)) - found
        assert gone == tier.tier.statistics().evicted, "some went with what they hung on"

    def test_a_chain_longer_than_the_cap_keeps_its_beginning(self) -> None:
        """Its end finds no room, or nothing to hang on; the next chain takes room from it."""
        tier = self.start()
        count = 2 * self.cap_bytes // LARGE.chunk_bytes
        chain = chain_of(ROOT, LARGE, text(1, count * BLOCKS_PER_CHUNK))
        outcomes = tier.store(chain)
        kept = outcomes.count(StoreOutcome.STORED)
        assert outcomes[:kept] == [StoreOutcome.STORED] * kept, outcomes
        assert set(outcomes[kept:]) <= {StoreOutcome.NO_ROOM, StoreOutcome.NOT_ANCHORED}
        found = tier.find(chain)
        assert count // 4 <= len(found) <= kept
        assert [tier.is_there(record) for record in chain] == [one in found for one in chain]
        other = chunks(1, first=2)
        assert tier.store(other) == [StoreOutcome.STORED]

    def test_room_comes_back_from_what_is_cleared_or_superseded(self) -> None:
        """Three rounds, each of which writes more than the cap and keeps less."""
        tier = self.start()
        count = self.cap_bytes // LARGE.chunk_bytes * 3 // 4
        for number in range(3 * count):
            for blocks in range(1, BLOCKS_PER_CHUNK + 1):
                tail = chain_of(ROOT, LARGE, text(number, blocks))
                assert tier.store(tail) == [StoreOutcome.STORED], (number, blocks)
            if number % count == count - 1:
                assert tier.tier.clear(None) >= count // 2, "most of a round fits"
        assert tier.store(chunks(1)) == [StoreOutcome.STORED]
        assert tier.tier.statistics().records == 1

    def test_what_is_used_stays(self) -> None:
        """One chunk is loaded again and again while the cap is filled four times over."""
        tier = self.start()
        used, *others = chunks(4 * self.cap_bytes // LARGE.chunk_bytes)
        tier.keep([used])
        for record in others:
            tier.pass_time(100)
            assert tier.store([record]) == [StoreOutcome.STORED]
            assert tier.load(used) is LoadOutcome.LOADED

    def test_what_waits_is_bounded_in_bytes(self) -> None:
        """Twice as much as may wait: some is dropped at once, and the rest is kept."""
        tier = self.start(bytes_max=4 * self.queue_bytes_max)
        records = chunks(2 * self.queue_bytes_max // LARGE.chunk_bytes)
        with self.stalled(tier.tier):
            jobs = []
            for record in records:
                jobs.append(tier.submit_store(record))
                queued = tier.tier.statistics().queued_bytes
                assert queued <= self.queue_bytes_max, queued
            tier.poll()
            dropped = [job for job in jobs if tier.has_ended(job)]
            assert {tier.stored(job) for job in dropped} == {StoreOutcome.QUEUE_FULL}
            assert len(dropped) >= len(records) // 4, len(dropped)
        outcomes = [tier.stored(job) for job in jobs]
        assert outcomes.count(StoreOutcome.STORED) == len(jobs) - len(dropped), outcomes
        assert tier.tier.statistics().queued_bytes == 0
        assert tier.store(chunks(1, first=1000)) == [StoreOutcome.STORED]

    def test_a_store_that_waits_for_too_long_is_dropped(self) -> None:
        """Its cells come back while the place still does not answer."""
        tier = self.start()
        with self.stalled(tier.tier):
            jobs = [tier.submit_store(record) for record in chunks(self.running_max + 4)]
            tier.pass_time(self.put_ms_max - 1)
            tier.poll()
            assert not [job for job in jobs if tier.has_ended(job)], "not yet"
            tier.pass_time(1)
            tier.wait(jobs[-4:])
            assert {tier.stored(job) for job in jobs[-4:]} == {StoreOutcome.TOO_OLD}
        outcomes = [tier.stored(job) for job in jobs]
        assert set(outcomes) <= {StoreOutcome.STORED, StoreOutcome.TOO_OLD}
        self.assert_found_as_ended(tier, jobs)

    def test_loads_go_before_stores(self) -> None:
        """A request waits for the one, nobody for the other. Where each has threads of its own, a
        load may lose a race with stores that are over before it has got a turn, as on a busy
        machine with a quick place; a queue that holds it back does so each time."""
        tier = self.start()
        held, count = chunks(1)[0], self.running_max + 7
        for turn in range(TURNS_MAX):
            tier.keep([held])
            with self.stalled(tier.tier):
                records = chunks(count, first=1 + turn * count)
                stores = [tier.submit_store(record) for record in records]
                load = tier.submit_load(held)
            assert tier.loaded(load) is LoadOutcome.LOADED
            tier.wait(stores)
            is_ahead = tier.order.index(load) < tier.order.index(stores[-1])
            if is_ahead:
                break
        assert is_ahead, "it waited for all stores, each time"

    def test_its_numbers_add_up(self) -> None:
        """Every job by its outcome, and the bytes of those that were good."""
        tier = self.start()
        first, second, tail = chain_of(ROOT, SMALL, text(1, 10))
        tier.store([first, first, tail, second, tail])
        for record in (first, tail, chain_of(ROOT, SMALL, text(2, 4))[0]):
            tier.load(record)
        numbers = tier.tier.statistics()
        assert numbers.state == "on"
        assert numbers.bytes_max == self.cap_bytes
        assert numbers.records == 3
        assert {name: n for name, n in numbers.stored.items() if n} == {
            "stored": 3,
            "held": 1,
            "not_anchored": 1,
        }
        assert {name: n for name, n in numbers.loaded.items() if n} == {"loaded": 2, "absent": 1}
        payload = sum(record.payload_bytes for record in (first, second, tail))
        assert numbers.stored_bytes == payload
        assert numbers.loaded_bytes == first.payload_bytes + tail.payload_bytes
        assert numbers.bytes_used >= payload
        assert (numbers.queued_bytes, numbers.evicted) == (0, 0)

    # ---- clear

    @pytest.mark.parametrize("which", [*SALTS, None])
    def test_a_salt_is_cleared_and_no_other(self, which: str | None) -> None:
        """One tenant, those of no salt, or all; and there is room for them again."""
        tier = self.start()
        chains = {salt: chain_of(root_of(salt=salt), SMALL, text(1, 10)) for salt in SALTS}
        for chain in chains.values():
            tier.keep(chain)
        digest = None if which is None else root_of(salt=which).salt_digest
        gone = [chain for salt, chain in chains.items() if which in (None, salt)]
        assert tier.tier.clear(digest) == sum(len(chain) for chain in gone)
        assert tier.tier.statistics().records == 9 - 3 * len(gone)
        for chain in chains.values():
            is_there = [tier.is_there(record) for record in chain]
            assert is_there == [chain not in gone] * 3
            want = LoadOutcome.ABSENT if chain in gone else LoadOutcome.LOADED
            assert {tier.load(record) for record in chain} == {want}
        assert tier.tier.clear(digest) == 0
        for chain in gone:
            assert tier.store(chain[1:]) == [StoreOutcome.NOT_ANCHORED] * 2
            assert tier.store(chain) == [StoreOutcome.STORED] * 3

    def test_what_is_cleared_while_it_waits_does_not_appear(self) -> None:
        """Neither what was being written nor what was queued; what comes later is kept."""
        tier = self.start()
        roots = {salt: root_of(salt=salt) for salt in SALTS[1:]}
        chains = {salt: chain_of(root, SMALL, text(1, 18)) for salt, root in roots.items()}
        cleared, other = chains.values()
        apart = chain_of(cleared[0].root, SMALL, text(2, 6))
        tier.keep(cleared[:1])
        with self.stalled(tier.tier):
            before = [tier.submit_store(record) for record in cleared[1:] + apart]
            aside = [tier.submit_store(record) for record in other]
            assert tier.tier.clear(cleared[0].root.salt_digest) == 1
            after = [tier.submit_store(record) for record in cleared[:2]]
        assert not {tier.stored(job) for job in before} & {StoreOutcome.STORED, StoreOutcome.HELD}
        assert {tier.stored(job) for job in aside} == {StoreOutcome.STORED}
        assert [tier.stored(job) for job in after] == [StoreOutcome.STORED] * 2
        assert tier.find(cleared[:-1], cleared[-1].digests) == cleared[:2]
        assert tier.find(apart[:1], apart[1].digests) == []
        assert tier.find(other[:-1], other[-1].digests) == other

    def test_what_is_cleared_while_it_is_loaded_ends_as_it_would_have(self) -> None:
        """Every byte, or nothing."""
        tier = self.start()
        records = chain_of(ROOT, SMALL, text(1, 18))
        tier.keep(records)
        with self.stalled(tier.tier):
            loads = [tier.submit_load(record) for record in records]
            tier.tier.clear(None)
            lookup = tier.ask(records[:1])
        outcomes = {tier.loaded(job) for job in loads}
        assert outcomes <= {LoadOutcome.LOADED, LoadOutcome.ABSENT}, outcomes
        assert tier.found(lookup).records == []
        assert tier.tier.statistics().records == 0

    # ---- close

    def test_a_tier_may_be_closed_before_anything_was_asked(self) -> None:
        """And then it gives nothing."""
        tier = self.start()
        tier.close(CLOSE_S_MAX)
        assert tier.order == []

    def test_close_ends_every_job_once(self) -> None:
        """Jobs of each kind under way; what had been stored is there for the next one."""
        tier = self.start()
        records = chain_of(ROOT, SMALL, text(1, 18))
        tier.keep(records)
        jobs: list[Job] = [*map(tier.submit_store, chunks(12, first=100))]
        jobs += map(tier.submit_load, records)
        jobs += [tier.ask(records[:4]) for _ in range(4)]
        tier.close(self.wait_s)
        assert not tier.running()
        self.assert_closed_well(tier, jobs)
        again = self.restart(tier)
        assert again.find(records[:-1], records[-1].digests) == records
        self.assert_found_as_ended(again, jobs, of=tier)

    def test_close_does_not_wait_for_a_place_that_does_not_answer(self) -> None:
        """What waits ends at once. What is under way ends when the place does answer."""
        tier = self.start()
        records = chain_of(ROOT, SMALL, text(1, 18))
        tier.keep(records)
        with self.stalled(tier.tier):
            jobs: list[Job] = [*map(tier.submit_store, chunks(self.running_max + 8, first=100))]
            jobs += map(tier.submit_load, records * 4)
            begin_s = time.monotonic()
            tier.close(0.05)
            assert time.monotonic() - begin_s < CLOSE_S_MAX
            assert len(tier.running()) <= self.running_max, tier.running()
            closed = [job for job in jobs if tier.has_ended(job)]
            self.assert_closed_well(tier, closed)
        deadline_s = time.monotonic() + self.wait_s
        while tier.running() and time.monotonic() < deadline_s:
            tier.poll_for(0.05)
        assert not tier.running(), "ended by its thread, once it could"

    # ---- faults

    def test_a_place_that_fails_is_left_alone_and_comes_back(self) -> None:
        """Failures, then a breaker that ends everything at once; it heals by itself."""
        tier = self.start()
        records = chain_of(ROOT, SMALL, text(1, 10))
        tier.keep(records)
        with self.failing(tier.tier):
            assert tier.load(records[0]) is LoadOutcome.FAILED
            outcomes = tier.store(chunks(20))
            assert outcomes[0] is StoreOutcome.FAILED
            assert set(outcomes) <= {StoreOutcome.FAILED, StoreOutcome.BROKEN}, outcomes
            assert outcomes[-1] is StoreOutcome.BROKEN, "twenty failures in a row are not tried"
            loads = [tier.load(record) for record in records]
            assert not {LoadOutcome.LOADED, LoadOutcome.CORRUPT} & set(loads), loads
            assert tier.tier.statistics().state != "on"
        deadline_s = time.monotonic() + self.wait_s
        while not (
            tier.store(chunks(1))[0] in (StoreOutcome.STORED, StoreOutcome.HELD)
            and tier.load(records[0]) is LoadOutcome.LOADED
        ):
            assert time.monotonic() < deadline_s, "it was never tried again"
            tier.pass_time(self.retry_ms_max)
            tier.poll_for(0.01)
        assert tier.tier.statistics().state == "on"
        assert tier.find(records[:2], records[2].digests) == records
        assert {tier.load(record) for record in records} == {LoadOutcome.LOADED}

    def test_what_waits_behind_a_failed_store_is_dropped_with_it(self) -> None:
        """Nothing is kept that could not be reached."""
        tier = self.start()
        chain = chain_of(ROOT, SMALL, text(1, 10))
        with self.failing(tier.tier):
            jobs = [tier.submit_store(record) for record in chain]
            outcomes = [tier.stored(job) for job in jobs]
        assert outcomes[0] is StoreOutcome.FAILED
        assert set(outcomes[1:]) <= {StoreOutcome.NOT_ANCHORED, StoreOutcome.BROKEN}, outcomes
        assert not tier.is_there(chain[0])

    def test_a_damaged_record_is_never_loaded_and_is_gone(self) -> None:
        """With what lies behind it, and nothing else; it may be stored again."""
        tier = self.start()
        first, second, tail = chain_of(ROOT, SMALL, text(1, 10))
        sibling = chain_of(ROOT, SMALL, text(1, 4) + text(2, 4))[1]
        tier.keep([first, second, tail, sibling])
        self.damage(tier.tier, second)
        assert tier.load(second) is LoadOutcome.CORRUPT
        assert tier.find([first, second], tail.digests) == [first]
        assert tier.load(second) is LoadOutcome.ABSENT
        assert tier.find([first, sibling]) == [first, sibling]
        assert tier.load(sibling) is LoadOutcome.LOADED
        assert tier.store([second, tail]) == [StoreOutcome.STORED] * 2
        assert tier.load(second) is LoadOutcome.LOADED

    # ---- what the tests share

    @staticmethod
    def assert_closed_well(tier: DrivenTier, jobs: Sequence[Job]) -> None:
        """Each ended as it would have, or as closed."""
        for job in jobs:
            if isinstance(job, StoreJob):
                assert tier.stored(job) in (StoreOutcome.STORED, StoreOutcome.CLOSED)
            elif isinstance(job, LoadJob):
                assert tier.loaded(job) in (LoadOutcome.LOADED, LoadOutcome.CLOSED)

    @staticmethod
    def assert_found_as_ended(
        tier: DrivenTier, jobs: Sequence[Job], of: DrivenTier | None = None
    ) -> None:
        """What was said to be stored is there, whole; what was dropped is not."""
        for job in jobs:
            if isinstance(job, StoreJob):
                outcome = (of or tier).stored(job)
                assert tier.is_there(job.record) == (outcome not in NEVER_THERE), outcome
                if outcome not in NEVER_THERE:
                    assert tier.load(job.record) is LoadOutcome.LOADED
