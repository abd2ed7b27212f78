"""Several members of one shared directory: what each may rely on, whatever the others do."""

import errno
from pathlib import Path

import pytest

from kvtide.codec.record import stored_bytes
from kvtide.testing.faulty_files import Call
from kvtide.testing.tier_records import BLOCKS_PER_CHUNK, chain_of, root_of, text
from kvtide.tiers.base import LoadOutcome, StoreOutcome
from kvtide.tiers.shared_dir import ops, stores
from kvtide.tiers.shared_dir import tier as tier_module
from kvtide.tiers.shared_dir.ops import LookOp
from kvtide.units import MiB
from tests.tiers.disk_place import flip, payload_offset
from tests.tiers.shared_place import (
    LARGE,
    ROOT,
    SMALL,
    bytes_taken,
    driven,
    file_of,
    files_of,
    folder_of,
    look,
    shared_of,
    tails,
    wait_quiet,
)

# ---- sharing


def test_what_one_stored_the_other_finds_and_does_not_store_again(kv: Path) -> None:
    records = chain_of(ROOT, SMALL, text(1, 10))
    with driven(kv) as here, driven(kv) as there:
        here.keep(records)
        look(there)
        assert there.find(records[:2], records[2].digests) == records
        assert {there.load(record) for record in records} == {LoadOutcome.LOADED}
        assert there.store(records) == [StoreOutcome.HELD] * 3
        assert there.tier.statistics().bytes_used < records[0].payload_bytes, "nothing is its own"
        assert there.tier.statistics().records == 3


def test_a_chain_may_be_in_several_parts(kv: Path) -> None:
    """Each goes on behind what the other has; a third finds all, and so do both after a start."""
    records = chain_of(ROOT, SMALL, text(1, 18))
    with driven(kv) as here, driven(kv) as there:
        for number, record in enumerate(records):
            member = (here, there)[number % 2]
            look(member)
            member.keep([record])
        with driven(kv) as third:
            assert third.find(records[:4], records[4].digests) == records
        here.close(30)
        there.close(30)
    with driven(kv) as here, driven(kv) as there:
        for member in (here, there):
            look(member)
            assert member.find(records[:4], records[4].digests) == records
            assert {member.load(record) for record in records} == {LoadOutcome.LOADED}
            shared_of(member).check_integrity()


def test_both_may_store_the_same_at_once(kv: Path) -> None:
    """Neither has seen the other's: it is there twice, and goes once both have evicted it."""
    (record,) = chain_of(ROOT, SMALL, text(1, 4))
    with driven(kv) as here, driven(kv) as there:
        here.keep([record])
        there.keep([record])
        look(here)
        assert here.is_there(record)
        here.tier.clear(None)
        assert not here.is_there(record)
        assert there.load(record) is LoadOutcome.LOADED
        with driven(kv) as third:
            assert third.load(record) is LoadOutcome.LOADED


def test_a_lookup_that_is_answered_in_full_asks_nobody(kv: Path) -> None:
    """And one that is not asks once in a tenth of a second, whatever comes."""
    records = chain_of(ROOT, SMALL, text(1, 10))
    with driven(kv) as here, driven(kv):
        here.keep(records)
        files = files_of(shared_of(here))
        here.pass_time(100)
        before = files.calls[Call.NAMES]
        assert here.find(records[:2], records[2].digests) == records
        assert files.calls[Call.NAMES] == before
        lookups = [here.ask([record]) for record in chain_of(ROOT, SMALL, text(2, 16))]
        here.wait(lookups)
        assert files.calls[Call.NAMES] == before + 1


# ---- caps and eviction


def test_a_member_keeps_to_its_own_share(kv: Path) -> None:
    """It fills it over and over; the other's records stay where they are."""
    other = chain_of(root_of("other"), SMALL, text(1, 10))
    with driven(kv, 2 * MiB) as here, driven(kv, 4 * MiB) as there:
        there.keep(other)
        taken = bytes_taken(folder_of(shared_of(there)))
        for number in range(40):
            record = chain_of(ROOT, LARGE, text(number, BLOCKS_PER_CHUNK))[0]
            assert here.store([record]) == [StoreOutcome.STORED]
            assert bytes_taken(folder_of(shared_of(here))) <= 2 * MiB
        assert here.tier.statistics().evicted > 30
        assert bytes_taken(folder_of(shared_of(there))) == taken
        look(here)
        assert here.find(other[:2], other[2].digests) == other


def test_the_cap_holds_for_rows_too(kv: Path) -> None:
    """A record would just fit; the row that tells of it would not."""
    with driven(kv) as tier:
        tier.keep(tails(4))
        used = tier.tier.statistics().bytes_used
    cap = used + stored_bytes(tails(1)[0].layout, 1) + 100
    with driven(kv, cap) as tier:
        tier.keep(tails(1, first=9))
        assert tier.tier.statistics().bytes_used <= cap
        assert tier.tier.statistics().evicted == 1


def test_room_is_made_in_steps_however_large_the_cap_is(
    kv: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fiftieth of many terabytes is more files than stores would wait for."""
    monkeypatch.setattr(stores, "SLACK_BYTES_MAX", 0)
    monkeypatch.setattr(stores, "SLACK_RATIO", 0.5)
    records = [chain_of(ROOT, LARGE, text(number, BLOCKS_PER_CHUNK))[0] for number in range(9)]
    with driven(kv, 2 * MiB) as tier:
        tier.keep(records)
        assert tier.tier.statistics().evicted == 2


def test_what_hangs_on_what_another_has_evicted_is_a_miss_and_gives_its_room_back(
    kv: Path,
) -> None:
    """And what another keeps below one's own is left for longer than what nobody needs."""
    first, second, tail = chain_of(ROOT, LARGE, text(1, 10))
    with driven(kv, 2 * MiB) as here, driven(kv, 4 * MiB) as there:
        here.keep([first])
        look(there)
        assert there.find([first]) == [first]
        there.keep([second, tail])
        look(here)
        assert here.find([first, second], tail.digests) == [first, second, tail]
        for number in range(2, 10):
            here.keep(chain_of(ROOT, LARGE, text(number, BLOCKS_PER_CHUNK)))
        assert here.is_there(first), "the only one that others have something below"
        here.tier.clear(None)
        wait_quiet(here)
        look(there)
        assert there.find([first, second], tail.digests) == []
        assert there.load(second) is LoadOutcome.ABSENT
        used = there.tier.statistics().bytes_used
        while used > second.payload_bytes:
            there.poll_for(0.05)
            used = there.tier.statistics().bytes_used
        assert not file_of(shared_of(there), second).exists()
        shared_of(there).check_integrity()
        look(here)
        here.keep([first])
        look(there)
        assert there.find([first]) == [first]


def test_a_record_that_another_evicts_while_it_is_found_here_is_a_miss(kv: Path) -> None:
    records = tails(4)
    with driven(kv) as here, driven(kv) as there:
        here.keep(records)
        look(there)
        assert there.is_there(records[0])
        file_of(shared_of(here), records[0]).unlink()
        assert there.load(records[0]) is LoadOutcome.ABSENT
        assert not there.is_there(records[0])
        assert there.load(records[1]) is LoadOutcome.LOADED
        assert here.load(records[0]) is LoadOutcome.ABSENT
        assert here.store(records[:1]) == [StoreOutcome.STORED]


def test_a_record_that_is_damaged_in_anothers_folder_is_nobodys(kv: Path) -> None:
    """The reader leaves the file alone; its owner removes it when it meets it."""
    records = tails(2)
    with driven(kv) as here, driven(kv) as there:
        here.keep(records)
        look(there)
        assert there.is_there(records[0])
        flip(file_of(shared_of(here), records[0]), payload_offset(records[0]) + 5)
        assert there.load(records[0]) is LoadOutcome.CORRUPT
        assert there.load(records[0]) is LoadOutcome.ABSENT
        assert there.store(records[:1]) == [StoreOutcome.STORED], "its own is good"
        assert there.load(records[0]) is LoadOutcome.LOADED
        assert here.load(records[0]) is LoadOutcome.CORRUPT
        assert there.load(records[1]) is LoadOutcome.LOADED


def test_what_hung_on_a_record_that_is_gone_is_back_with_it(kv: Path) -> None:
    """Damaged here, and stored again, before the other has seen that its own hangs on nothing."""
    first, second, tail = chain_of(ROOT, SMALL, text(1, 10))
    with driven(kv) as here, driven(kv) as there:
        here.keep([first])
        look(there)
        there.keep([second, tail])
        look(here)
        assert here.find([first, second], tail.digests) == [first, second, tail]
        flip(file_of(shared_of(here), first), payload_offset(first) + 5)
        assert here.load(first) is LoadOutcome.CORRUPT
        assert here.find([first, second]) == []
        assert here.load(second) is LoadOutcome.ABSENT
        here.keep([first])
        assert here.find([first, second], tail.digests) == [first, second, tail]
        shared_of(here).check_integrity()


# ---- clear


def test_a_clear_takes_away_what_others_have_too_and_for_this_node_alone(kv: Path) -> None:
    """Also after a start; what they store later is found."""
    salted = root_of(salt="secret")
    before = [*chain_of(salted, SMALL, text(1, 10)), *chain_of(ROOT, SMALL, text(1, 4))]
    later = chain_of(salted, SMALL, text(2, 6))
    with driven(kv) as there:
        there.keep(before)
        with driven(kv) as here:
            assert here.find(before[:2]) == before[:2]
            assert here.tier.clear(salted.salt_digest) == 3
            assert here.find(before[:2]) == []
            assert here.is_there(before[3])
            look(here)
            assert here.find(before[:2]) == []
            assert here.load(before[0]) is LoadOutcome.ABSENT
            assert there.find(before[:2]) == before[:2]
        with driven(kv) as here:
            assert here.find(before[:2]) == [], "it is noted"
            there.keep(later)
            look(here)
            assert here.find(later[:1], later[1].digests) == later
            assert here.find(before[:2]) == []
            assert here.store(before[:2]) == [StoreOutcome.STORED] * 2, "its own, now"
            assert here.find(before[:2]) == before[:2]
        assert there.load(before[0]) is LoadOutcome.LOADED


def test_a_clear_that_fails_at_first_is_noted_all_the_same(kv: Path) -> None:
    """Nothing of it is found meanwhile; what comes later is."""
    records, later = tails(3), tails(2, first=50)
    with driven(kv) as there:
        there.keep(records)
        with driven(kv) as here:
            files = files_of(shared_of(here))
            files.fail(Call.SYNC, errno.EIO, count=2)
            here.tier.clear(None)
            look(here)
            assert not any(map(here.is_there, records))
            while files.injected["sync EIO"] < 2:
                here.poll_for(0.01)
            here.keep(tails(1, first=70))
            there.keep(later)
            look(here)
            assert all(map(here.is_there, later))
        with driven(kv) as here:
            assert not any(map(here.is_there, records))
            assert all(map(here.is_there, later))


def test_what_comes_while_a_clear_is_noted_is_found_after_it(kv: Path) -> None:
    """But for what goes again meanwhile: it is read while nothing of the scope is taken in."""
    later = tails(3, first=50)
    with driven(kv) as here, driven(kv) as there:
        there.keep(tails(2))
        here.keep(tails(2, first=20))
        files = files_of(shared_of(here))
        with files.stalled(Call.SYNC):
            here.tier.clear(None)
            files.wait_stalled(1)
            there.keep(later)
            file_of(shared_of(there), later[2]).unlink()
            assert there.load(later[2]) is LoadOutcome.ABSENT
            wait_quiet(there)
            look(here)
            assert here.tier.statistics().records == 0
        wait_quiet(here)
        assert here.tier.statistics().records == 2
        assert all(map(here.is_there, later[:2]))
        shared_of(here).check_integrity()


def test_a_clear_means_what_was_not_read_yet_as_well(kv: Path) -> None:
    """The other has stored it; this one has not looked since."""
    records = tails(3)
    with driven(kv) as here, driven(kv) as there:
        there.keep(records)
        here.tier.clear(None)
        look(here)
        assert not any(map(here.is_there, records))
        assert all(map(there.is_there, records))


# ---- many


def test_a_look_takes_a_bounded_number_of_rows_whoever_has_how_many(
    kv: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The owner would be busy with it for long; the rest follows at once, and nobody waits."""
    monkeypatch.setattr(ops, "LOOK_RECORDS", 8)
    with driven(kv) as one, driven(kv) as other, driven(kv) as here:
        one.keep(tails(10))
        other.keep(tails(10, first=20))
        ended = shared_of(here)._hands.run(LookOp(shared_of(here)._view.own, {}))
        assert len(ended.pieces) == 1
        assert ended.has_more
        look(here)
        while here.tier.statistics().records < 20:
            here.poll_for(0.02)
        assert all(map(here.is_there, [*tails(10), *tails(10, first=20)]))


def test_a_copy_that_is_damaged_is_no_loss_where_another_is_good(kv: Path) -> None:
    """The damaged one goes; the other is read by the same load."""
    (record,) = tails(1)
    with driven(kv) as here, driven(kv) as there:
        here.keep([record])
        there.keep([record])
        look(here)
        for tier in (here, there):
            flip(file_of(shared_of(tier), record), payload_offset(record) + 5)
        flip(file_of(shared_of(there), record), payload_offset(record) + 5)
        assert here.load(record) is LoadOutcome.LOADED
        wait_quiet(here)
        assert not file_of(shared_of(here), record).exists()
        shared_of(here).check_integrity()
        flip(file_of(shared_of(there), record), payload_offset(record) + 5)
        assert here.load(record) is LoadOutcome.CORRUPT
        assert not here.is_there(record)


def test_what_others_clear_does_not_make_a_clear_mean_more(
    kv: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only what this node remembers of its own is limited."""
    monkeypatch.setattr(tier_module, "CLEARS_MAX", 3)
    salts = [root_of(salt=str(number)) for number in range(5)]
    chains = [chain_of(salt, SMALL, text(1, 4)) for salt in salts]
    with driven(kv) as here, driven(kv) as there:
        for chain in chains:
            there.keep(chain)
        for salt in salts[:3]:
            there.tier.clear(salt.salt_digest)
        look(here)
        assert here.tier.clear(salts[3].salt_digest) == 1
        look(here)
        assert here.find(chains[4]) == chains[4]
