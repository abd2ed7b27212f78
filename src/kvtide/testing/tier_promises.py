"""What is found, loaded and kept: the part of the tiers' suite that no limit disturbs."""

from dataclasses import replace

import pytest

from kvtide.core.keys import INNER_DIGEST_BYTES
from kvtide.core.layout import KVLayout
from kvtide.core.records import RootName
from kvtide.testing.tier_place import TierPlace
from kvtide.testing.tier_records import (
    BLOCK_TOKENS,
    BLOCKS_PER_CHUNK,
    CHUNK_TOKENS,
    chain_of,
    layout_of,
    root_of,
    text,
)
from kvtide.tiers.base import LoadOutcome, StoreOutcome
from kvtide.units import MiB

LAYOUTS: dict[str, KVLayout] = {
    "one shard": layout_of(8192),
    "two shards of two sizes": layout_of(4096, 12288),
}
ONE = LAYOUTS["one shard"]
ROOT = root_of()

FOREIGN: dict[str, tuple[RootName, KVLayout]] = {
    "another engine": (root_of("other"), ONE),
    "another epoch": (root_of(epoch=b"2"), ONE),
    "another salt": (root_of(salt="secret"), ONE),
    "another size of cells": (ROOT, layout_of(4096)),
    "another number of shards": (ROOT, layout_of(4096, 4096)),
    "another length of chunks": (ROOT, replace(ONE, chunk_tokens=2 * CHUNK_TOKENS)),
}


class PromiseTests(TierPlace):
    """Lookups, loads and stores."""

    @pytest.mark.parametrize("shape", LAYOUTS)
    def test_what_was_stored_is_found_and_brings_every_byte(self, shape: str) -> None:
        """Three whole chunks and a tail; the cells they were stored from have changed since."""
        tier = self.start()
        records = chain_of(ROOT, LAYOUTS[shape], text(1, 3 * BLOCKS_PER_CHUNK + 2))
        assert tier.store(records) == [StoreOutcome.STORED] * 4
        assert tier.find(records[:3], records[3].digests) == records
        assert [tier.load(record) for record in records] == [LoadOutcome.LOADED] * 4

    def test_a_tier_without_records_finds_nothing(self) -> None:
        """Neither chunks nor tails, and nothing to go on with."""
        tier = self.start()
        *chunks, tail = chain_of(ROOT, ONE, text(1, 6))
        found = tier.found(tier.ask(chunks, tail.digests))
        assert (found.records, found.may_go_on) == ([], False)
        assert tier.find(chunks) == []
        empty = tier.found(tier.ask((), b"", root=ROOT, layout=ONE))
        assert (empty.records, empty.may_go_on) == ([], False)
        assert tier.load(chunks[0]) is LoadOutcome.ABSENT

    def test_a_lookup_ends_at_the_first_chunk_that_is_not_there(self) -> None:
        """What lies behind it is not looked for, even where it is there."""
        tier = self.start()
        first, second = chain_of(ROOT, ONE, text(1, 8))
        tail = chain_of(ROOT, ONE, [*text(1, 4), *text(2, 2)])[1]
        tier.keep([first, second, tail])
        other = chain_of(ROOT, ONE, text(3, 4))[0]
        assert tier.find([first, other, second]) == [first]
        assert tier.find([other, first]) == []
        assert tier.find([first, other], tail.digests) == [first]

    def test_a_lookup_may_begin_in_the_middle_of_a_chain(self) -> None:
        """The host has its beginning. Only what is behind that very parent matches."""
        tier = self.start()
        records = chain_of(ROOT, ONE, text(1, 14))
        tier.keep(records)
        assert tier.find(records[1:3], records[3].digests) == records[1:]
        asked = tier.ask(records[1:3], parent=records[2].key)
        assert tier.found(asked).records == []
        asked = tier.ask((), records[3].digests, root=ROOT, parent=records[0].key, layout=ONE)
        assert tier.found(asked).records == []

    def test_a_chunk_is_matched_by_blocks_as_far_as_possible(self) -> None:
        """Three records behind one parent: which one shares most depends on each block."""
        tier = self.start()
        first, second, other = text(1, 4), text(2, 4), text(3, 4)
        ahead = chain_of(ROOT, ONE, first)[0]
        whole = chain_of(ROOT, ONE, first + second)[1]
        forked = [*second[: 2 * BLOCK_TOKENS], *other[:BLOCK_TOKENS]]
        fork = chain_of(ROOT, ONE, first + forked)[1]
        apart = chain_of(ROOT, ONE, first + other[: 2 * BLOCK_TOKENS])[1]
        tier.keep([ahead, whole, fork, apart])
        for blocks in range(1, BLOCKS_PER_CHUNK + 1):
            digests = whole.digests[: blocks * INNER_DIGEST_BYTES]
            *before, last = tier.find([ahead], digests)
            assert before == [ahead]
            assert last == whole or (blocks < 3 and last == fork), (blocks, last)
        assert tier.find([ahead], fork.digests) == [ahead, fork]
        assert tier.find([ahead], apart.digests) == [ahead, apart]
        longer = chain_of(ROOT, ONE, first + forked + text(4, 1))[1]
        assert tier.find([ahead], longer.digests) == [ahead, fork], "three of four blocks"
        nothing = chain_of(ROOT, ONE, first + text(5, 3))[1]
        assert tier.find([ahead], nothing.digests) == [ahead]

    def test_an_answer_says_whether_digests_would_tell_more(self) -> None:
        """Where keys end early and the last that matched has children of another text."""
        tier = self.start()
        ahead, child = chain_of(ROOT, ONE, text(1, 8))
        wanted = chain_of(ROOT, ONE, text(1, 4) + text(2, 4))[1]
        tier.keep([ahead])
        assert not tier.found(tier.ask([ahead, wanted])).may_go_on, "it has no children"
        tier.keep([child])
        assert tier.found(tier.ask([ahead, wanted])).may_go_on
        assert tier.found(tier.ask([chain_of(ROOT, ONE, text(3, 4))[0]])).may_go_on, "of the root"
        assert not tier.found(tier.ask([ahead, child, wanted])).may_go_on
        assert not tier.found(tier.ask([ahead], wanted.digests)).may_go_on, "they were looked at"

    @pytest.mark.parametrize("what", FOREIGN)
    def test_what_belongs_to_another_root_or_layout_is_not_there(self, what: str) -> None:
        """Whoever asks with the right keys in the wrong name gets nothing."""
        tier = self.start()
        ahead, tail = chain_of(ROOT, ONE, text(1, 6))
        tier.keep([ahead, tail])
        root, layout = FOREIGN[what]
        tier.keep(chain_of(root, layout, text(2, 6)))  # so that the other name is known here
        asked = tier.ask([ahead], tail.digests, root=root, layout=layout)
        assert tier.found(asked).records == []
        asked = tier.ask((), tail.digests, root=root, parent=ahead.key, layout=layout)
        assert tier.found(asked).records == []
        assert tier.load(replace(tail, root=root, layout=layout)) is LoadOutcome.ABSENT
        assert tier.find([ahead], tail.digests) == [ahead, tail]
        assert tier.load(tail) is LoadOutcome.LOADED

    def test_a_load_names_the_whole_record(self) -> None:
        """The same key with other blocks or behind another parent is another record."""
        tier = self.start()
        ahead, tail = chain_of(ROOT, ONE, text(1, 6))
        tier.keep([ahead, tail])
        for wrong in (
            replace(tail, parent=ROOT.key),
            replace(tail, digests=tail.digests[INNER_DIGEST_BYTES:]),
        ):
            assert tier.load(wrong) is LoadOutcome.ABSENT
        assert tier.load(tail) is LoadOutcome.LOADED

    def test_a_record_that_is_there_is_not_stored_again(self) -> None:
        """Nor where both come at once."""
        tier = self.start()
        ahead, tail = chain_of(ROOT, ONE, text(1, 6))
        twice = [tier.submit_store(record) for record in (ahead, ahead, tail, tail)]
        outcomes = [tier.stored(job) for job in twice]
        assert outcomes == [StoreOutcome.STORED, StoreOutcome.HELD] * 2
        used = tier.tier.statistics().bytes_used
        assert tier.store([ahead, tail]) == [StoreOutcome.HELD] * 2
        assert tier.tier.statistics().bytes_used == used
        assert tier.tier.statistics().records == 2

    def test_a_name_of_other_content_is_not_taken_for_what_is_held(self) -> None:
        """It cannot be, and if it were, nobody would get the wrong bytes."""
        tier = self.start()
        record = chain_of(ROOT, ONE, text(1, 4))[0]
        tier.keep([record])
        root = root_of("other")
        wrong = replace(record, root=root, parent=root.key)
        assert tier.store([wrong]) != [StoreOutcome.HELD]
        assert tier.is_there(record) != tier.is_there(wrong)
        if tier.is_there(record):
            assert tier.load(record) is LoadOutcome.LOADED

    def test_a_record_is_kept_only_behind_its_parent(self) -> None:
        """Nothing that could not be reached."""
        tier = self.start()
        first, second, tail = chain_of(ROOT, ONE, text(1, 10))
        assert tier.store([second, tail]) == [StoreOutcome.NOT_ANCHORED] * 2
        assert not tier.is_there(second)
        tier.keep([first])
        assert tier.store([tail]) == [StoreOutcome.NOT_ANCHORED]
        elsewhere = replace(second, root=root_of(salt="secret"))
        assert tier.store([elsewhere]) == [StoreOutcome.NOT_ANCHORED], "of another root"
        assert tier.store([second, tail]) == [StoreOutcome.STORED] * 2

    def test_stores_of_a_chain_may_wait_behind_one_another(self) -> None:
        """A parent that is queued ahead is as good as one that is there."""
        tier = self.start()
        records = chain_of(ROOT, ONE, text(1, 18))
        jobs = [tier.submit_store(record) for record in records]
        assert [tier.stored(job) for job in jobs] == [StoreOutcome.STORED] * len(records)
        assert tier.find(records[:-1], records[-1].digests) == records

    def test_what_waits_behind_a_dropped_chunk_is_dropped_with_it(self) -> None:
        """A chunk that fits nowhere, then a tail that would; other chains go on."""
        tier = self.start(bytes_max=8 * MiB)
        big = layout_of(4 * MiB)
        chunk, tail = chain_of(ROOT, big, text(1, 5))
        other = chain_of(root_of("other"), ONE, text(1, 4))[0]
        jobs = [tier.submit_store(record) for record in (chunk, tail, other)]
        outcomes = [tier.stored(job) for job in jobs]
        assert outcomes[0] in (StoreOutcome.NO_ROOM, StoreOutcome.QUEUE_FULL), outcomes
        assert outcomes[1:] == [StoreOutcome.NOT_ANCHORED, StoreOutcome.STORED]
        assert tier.find([chunk], tail.digests) == []

    def test_a_longer_record_takes_the_place_of_the_tail_it_begins_with(self) -> None:
        """Each new block of an answer is a longer tail; siblings stay."""
        tier = self.start()
        ahead, *_ = chain_of(ROOT, ONE, text(1, 4))
        grown = [chain_of(ROOT, ONE, text(1, blocks))[1] for blocks in (5, 6, 7, 8)]
        sibling = chain_of(ROOT, ONE, text(1, 4) + text(2, 1))[1]
        tier.keep([ahead, sibling])
        for shorter, longer in zip([None, *grown], grown, strict=False):
            tier.keep([longer])
            assert tier.tier.statistics().records == 3, "the parent, the sibling and one of them"
            assert tier.find([ahead], longer.digests) == [ahead, longer]
            if shorter is not None:
                assert tier.load(shorter) is LoadOutcome.ABSENT
                assert tier.find([ahead], shorter.digests) == [ahead, longer]
        assert tier.load(grown[-1]) is LoadOutcome.LOADED
        assert tier.is_there(sibling)

    def test_a_tail_that_a_record_begins_with_adds_nothing(self) -> None:
        """Its blocks are there; they are found and loaded."""
        tier = self.start()
        ahead, longer = chain_of(ROOT, ONE, text(1, 7))
        shorter = chain_of(ROOT, ONE, text(1, 6))[1]
        tier.keep([ahead, longer, shorter])
        found = tier.find([ahead], shorter.digests)
        assert len(found) == 2, found
        assert found[1].digests.startswith(shorter.digests)
        assert tier.load(found[1]) is LoadOutcome.LOADED
        assert tier.find([ahead], longer.digests) == [ahead, longer]

    @pytest.mark.parametrize("shape", LAYOUTS)
    def test_loads_stores_and_lookups_go_on_side_by_side(self, shape: str) -> None:
        """Half of the chains is loaded, twice at once, while the other half is stored."""
        tier = self.start()
        chains = [chain_of(ROOT, LAYOUTS[shape], text(number, 10)) for number in range(8)]
        for chain in chains[:4]:
            tier.keep(chain)
        stores = [tier.submit_store(record) for chain in chains[4:] for record in chain]
        loads = [tier.submit_load(record) for chain in chains[:4] for record in chain * 2]
        lookups = [tier.ask(chain[:2], chain[2].digests) for chain in chains]
        assert {tier.stored(job) for job in stores} == {StoreOutcome.STORED}
        assert {tier.loaded(job) for job in loads} == {LoadOutcome.LOADED}
        for chain, lookup in zip(chains, lookups, strict=True):
            found = tier.found(lookup).records
            assert found == chain[: len(found)], "a prefix, however much of it was stored by then"
        for chain in chains:
            assert tier.find(chain[:2], chain[2].digests) == chain

    def test_stores_come_back_after_a_restart(self) -> None:
        """Records, their chains and their bytes; what is new goes on behind them."""
        tier = self.start()
        records = chain_of(ROOT, ONE, text(1, 10))
        salted = chain_of(root_of(salt="secret"), LAYOUTS["two shards of two sizes"], text(1, 6))
        tier.keep(records + salted)
        payload = sum(record.payload_bytes for record in records + salted)
        for _ in range(2):
            tier = self.restart(tier)
            assert tier.tier.statistics().records == len(records + salted)
            assert tier.tier.statistics().bytes_used >= payload
            assert tier.find(records[:2], records[2].digests) == records
            assert tier.find(salted[:1], salted[1].digests) == salted
            loads = [tier.submit_load(record) for record in records + salted]
            assert {tier.loaded(job) for job in loads} == {LoadOutcome.LOADED}
            assert tier.store(records[:1]) == [StoreOutcome.HELD]
        assert tier.tier.clear(salted[0].root.salt_digest) == len(salted)
        tier = self.restart(tier)
        assert tier.find(salted[:1]) == [], "what was cleared does not come back"
        assert tier.store([chain_of(ROOT, ONE, text(1, 12))[2]]) == [StoreOutcome.STORED]
