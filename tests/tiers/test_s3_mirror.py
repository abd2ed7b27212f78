"""The mirror of a bucket fits together, whatever it hears in whatever order."""

import random
from dataclasses import replace

import pytest

from kvtide.core.records import Record
from kvtide.testing.tier_records import chain_of, keys_of, layout_of, root_of, text
from kvtide.tiers.base import LookupJob, StoreOutcome
from kvtide.tiers.remote.census import Census
from kvtide.tiers.s3 import names
from kvtide.tiers.s3.mirror import Mirror
from kvtide.tiers.s3.names import Message, Written
from kvtide.tiers.scope import Scope

LAYOUT = layout_of(4096)
SALTS = ("", "one", "other")


def write_of(record: Record, stamp: int, number: int = 0) -> Written:
    return names.written(record, stamp, number.to_bytes(16, "little"))


def knowing(*records: Record) -> Mirror:
    """A mirror that knows the kinds of these."""
    mirror = Mirror(Census(), "kvtide/1")
    for record in records:
        mirror.learned(record.root, record.layout)
    return mirror


def found(mirror: Mirror, records: list[Record]) -> list[Record]:
    root = records[0].root
    job = LookupJob(1, root, root.key, keys_of(records), b"", records[0].layout)
    return mirror.find(job)[0]


def empty(mirror: Mirror) -> None:
    """Delete all that was given up."""
    mirror.deleted(mirror.take_given_up(1 << 20))


def test_names_in_any_order_make_the_same_chain() -> None:
    """A child that is listed before its parent waits for it."""
    chain = chain_of(root_of(), LAYOUT, text(1, 16))
    mirror = knowing(*chain)
    for stamp, record in reversed(list(enumerate(chain, 1))):
        assert found(mirror, chain) == []
        mirror.take_in(write_of(record, stamp, stamp))
        mirror.check_integrity()
    assert found(mirror, chain) == chain


def test_a_name_with_more_blocks_than_its_kind_has_is_not_taken_in() -> None:
    """Nobody of us made it; it would be no record."""
    record = chain_of(root_of(), LAYOUT, text(1, 4))[0]
    mirror = knowing(record)
    written = write_of(record, 1)
    mirror.take_in(replace(written, digests=bytes(16) + written.digests))
    assert mirror.used_bytes == 0


def test_the_earlier_of_two_writes_stays_whichever_is_heard_of_first() -> None:
    record = chain_of(root_of(), LAYOUT, text(1, 4))[0]
    early, late = write_of(record, 1, 1), write_of(record, 2, 2)
    for order in ((early, late), (late, early)):
        mirror = knowing(record)
        for written in order:
            mirror.take_in(written)
        assert [row.written for row in mirror.take_given_up(9)] == [late]
        loading = mirror.begin_load(record)
        assert loading is not None
        assert loading.written == early


def test_what_is_gone_does_not_come_back_but_is_deleted_again() -> None:
    """A list names it that was begun before, or a call that was given up has made it since."""
    chain = chain_of(root_of(), LAYOUT, text(1, 8))
    mirror = knowing(*chain)
    first, second = (write_of(record, stamp, stamp) for stamp, record in enumerate(chain, 1))
    for written in (first, second):
        assert mirror.take_in(written)
    mirror.removed_by_others(chain[0].key, first.write_id)
    empty(mirror)
    assert mirror.used_bytes == 0
    assert not mirror.take_in(first), "salts come and go: what has no records is not known"
    mirror.learned(chain[0].root, chain[0].layout)
    for written in (first, second, first):
        assert mirror.take_in(written)
    assert found(mirror, chain) == []
    assert mirror.used_bytes > 0
    assert [row.written for row in mirror.take_given_up(9)] == [first, second]


def test_a_store_that_failed_counts_until_what_there_may_be_of_it_is_deleted() -> None:
    record = chain_of(root_of(), LAYOUT, text(1, 4))[0]
    mirror = knowing(record)
    mirror.failed(record, write_of(record, 1))
    assert mirror.used_bytes > 0
    assert [row.written for row in mirror.take_given_up(9)] == [write_of(record, 1)]
    mirror.take_in(write_of(record, 1))
    assert found(mirror, [record]) == []


def test_a_store_that_failed_after_its_name_was_seen_counts_once() -> None:
    """A clear that was heard of with the name has given it up already."""
    record = chain_of(root_of(), LAYOUT, text(1, 4))[0]
    mirror = knowing(record)
    mirror.clear(Message(2, "", "clear", scope=Scope(None, None)))
    mirror.take_in(write_of(record, 1))
    mirror.failed(record, write_of(record, 1))
    assert mirror.used_bytes > 0
    empty(mirror)
    assert mirror.used_bytes == 0


def test_what_comes_again_while_it_is_deleted_in_vain_counts_once() -> None:
    record = chain_of(root_of(), LAYOUT, text(1, 4))[0]
    mirror = knowing(record)
    mirror.failed(record, write_of(record, 1))
    under_way = mirror.take_given_up(9)
    mirror.take_in(write_of(record, 1))
    mirror.not_deleted(under_way)
    assert mirror.used_bytes > 0
    empty(mirror)
    assert mirror.used_bytes == 0


def test_what_is_loaded_or_stored_behind_is_not_evicted() -> None:
    first, second = (chain_of(root_of(), LAYOUT, text(number, 4))[0] for number in (1, 2))
    mirror = knowing(first)
    for stamp, record in enumerate((first, second), 1):
        assert mirror.stored(record, write_of(record, stamp, stamp))
    loading = mirror.begin_load(first)
    assert loading is not None
    assert mirror.evict(1, [second.key]) == 0
    mirror.end_load(loading)
    assert mirror.evict(1, [second.key]) > 0
    assert found(mirror, [first]) == []
    assert found(mirror, [second]) == [second]


@pytest.mark.parametrize("seed", range(20))
def test_it_fits_together_after_anything_that_is_heard(seed: int) -> None:
    """Names, losses, evictions, clears, looks, in random order; nothing is counted in the end."""
    chance = random.Random(seed)
    chains = [
        chain_of(root_of(salt=salt), LAYOUT, text(number, 14))
        for salt in SALTS
        for number in range(3)
    ]
    records = [record for chain in chains for record in chain]
    mirror = knowing(*records)
    for number in range(1, 300):
        record = chance.choice(records)
        stamp = mirror.next_stamp()
        match chance.randrange(8):
            case 0 | 1 | 2:
                outcome = mirror.before(record, is_behind=False)
                assert outcome is not StoreOutcome.FAILED
                if outcome is None:
                    assert mirror.stored(record, write_of(record, stamp, number))
            case 3:
                mirror.take_in(write_of(record, chance.randrange(stamp), number))
            case 4:
                loading = mirror.begin_load(record)
                if loading is not None:
                    mirror.end_load(loading)
                    mirror.remove(loading.written)
            case 5:
                mirror.evict(chance.randrange(100_000), [])
            case 6:
                digest = root_of(salt=chance.choice(SALTS)).salt_digest
                mirror.clear(Message(stamp, "", "clear", scope=Scope(digest, None)))
                mirror.heed([])
            case _:
                mirror.begin_look()
                mirror.end_look(stamp if chance.random() < 0.2 else 0)
        mirror.check_integrity()
        if chance.random() < 0.3:
            empty(mirror)
    mirror.clear(Message(mirror.next_stamp(), "", "clear", scope=Scope(None, None)))
    empty(mirror)
    assert mirror.used_bytes == 0
    assert all(found(mirror, chain) == [] for chain in chains)
