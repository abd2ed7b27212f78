"""What several nodes make of one bucket, and what they leave to one another."""

from collections.abc import Iterator

import obstore
import pytest

from kvtide.core.records import Record
from kvtide.testing import object_servers
from kvtide.testing.object_servers import Server
from kvtide.testing.tier_records import chain_of, layout_of, root_of, text
from kvtide.tiers.base import LoadOutcome, StoreOutcome
from kvtide.tiers.s3 import listing, names
from kvtide.tiers.s3.names import Message
from kvtide.tiers.scope import EVERYTHING, Scope
from kvtide.units import KiB, MiB
from tests.tiers.s3_answers import Front, served
from tests.tiers.s3_place import PROGRAMS, TOP, Bucket, driven, until

ROOT = root_of()
SMALL = layout_of(4096, 8192)
LARGE = layout_of(64 * KiB)
CAP_BYTES = 8 * MiB
OTHER = "00000000000000ab"
"""A node of which only messages are left."""


@pytest.fixture(scope="module", params=PROGRAMS)
def server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    with object_servers.running(request.param, tmp_path_factory.mktemp(request.param)) as one:
        yield one


@pytest.fixture
def bucket(server: Server) -> Bucket:
    """Empty."""
    one = Bucket(server.port)
    one.clear()
    return one


def chunks(count: int, first: int = 0) -> list[Record]:
    """Large ones that begin chains of their own."""
    return [chain_of(ROOT, LARGE, text(first + number, 4))[0] for number in range(count)]


def tell(bucket: Bucket, message: Message, content: bytes = b"") -> str:
    """As another node does."""
    name = names.message_name(TOP, message)
    obstore.put(bucket.store, name, content)
    return name


def renamed(bucket: Bucket, record: Record, stamp: int) -> str:
    """A record as if it had been written then; its write stays the same."""
    (name,) = bucket.objects_of(record)
    head = names.parse_record(TOP, name)
    assert head is not None
    new = names.record_name(TOP, names.written(record, stamp, head.write_id))
    obstore.put(bucket.store, new, bytes(obstore.get(bucket.store, name).bytes()))
    obstore.delete(bucket.store, name)
    return new


def test_what_one_node_stores_clears_and_evicts_the_other_learns(
    server: Server, bucket: Bucket
) -> None:
    """Without being asked for it: with its next look."""
    chain = chain_of(ROOT, SMALL, text(1, 10))
    salted = chain_of(root_of(salt="secret"), SMALL, text(1, 10))
    with driven(server.port) as one, driven(server.port) as other:
        one.keep(chain + salted)
        until(other, lambda: other.find(chain[:2], chain[2].digests) == chain)
        until(other, lambda: other.find(salted[:2], salted[2].digests) == salted)
        assert {other.load(record) for record in chain + salted} == {LoadOutcome.LOADED}
        assert other.store(chain) == [StoreOutcome.HELD] * 3
        assert other.tier.clear(salted[0].root.salt_digest) == 3
        until(one, lambda: one.find(salted[:1]) == [])
        assert one.find(chain[:2], chain[2].digests) == chain
        assert one.store(salted) == [StoreOutcome.STORED] * 3, "what comes later is kept"
        bucket.change(bucket.objects_of(chain[0])[-1])
        assert one.load(chain[0]) is LoadOutcome.CORRUPT
        until(other, lambda: other.find(chain[:1]) == [])
        until(other, lambda: other.find(salted[:2], salted[2].digests) == salted)
        assert one.tier.statistics().records == other.tier.statistics().records == 3


def test_one_cap_holds_for_nodes_that_store_at_the_same_time(
    server: Server, bucket: Bucket
) -> None:
    """Three times the cap by each of two; none of them knows what the other is sending."""
    count = 3 * CAP_BYTES // LARGE.chunk_bytes
    with driven(server.port) as one, driven(server.port) as other:
        jobs = []
        for number in range(0, count, 4):
            jobs = [(one, one.submit_store(record)) for record in chunks(4, first=number)]
            jobs += [(other, other.submit_store(r)) for r in chunks(4, first=1000 + number)]
            while not all(tier.has_ended(job) for tier, job in jobs):
                assert bucket.bytes_taken() <= CAP_BYTES
                one.poll_for(0.01)
                other.poll_for(0.01)
            assert {tier.stored(job) for tier, job in jobs} == {StoreOutcome.STORED}
            assert bucket.bytes_taken() <= CAP_BYTES
        assert len(bucket.names(f"{TOP}/r")) >= CAP_BYTES // LARGE.chunk_bytes // 2


def test_a_message_that_cannot_be_read_holds_up_nothing(server: Server, bucket: Bucket) -> None:
    """It may be deleted meanwhile, as the next one replaces it; if not, it is read later."""
    chain = chain_of(ROOT, SMALL, text(1, 4))
    front = Front(server.port)
    front.unreadable = ".gone"
    port = front.server_address[1]
    with served(front), driven(server.port) as one, driven(port) as other:
        one.keep(chain)
        until(other, lambda: other.find(chain) == chain)
        bucket.change(bucket.objects_of(chain[0])[-1])
        assert one.load(chain[0]) is LoadOutcome.CORRUPT
        assert other.store(chunks(9, first=100)) == [StoreOutcome.STORED] * 9
        assert other.find(chain) == chain, "it has not heard of it"
        front.unreadable = "?"
        until(other, lambda: other.find(chain) == [])


def used_names(bucket: Bucket) -> list[str]:
    """Of the messages that tell what was used."""
    return [name for name in bucket.names(f"{TOP}/m") if name.endswith(".used")]


def test_what_one_node_uses_another_does_not_evict(server: Server, bucket: Bucket) -> None:
    """It stores four times the cap, and never asks for it itself."""
    hot = chain_of(ROOT, LARGE, text(5000, 8))
    count = 4 * CAP_BYTES // LARGE.chunk_bytes
    with driven(server.port) as one, driven(server.port) as other:
        one.keep(hot)
        for number in range(0, count, 8):
            assert one.find(hot) == hot, number
            told = used_names(bucket)
            until(one, lambda told=told: used_names(bucket) not in ([], told))
            other.keep(chunks(8, first=number))
        assert other.tier.statistics().evicted > 2 * CAP_BYTES // LARGE.chunk_bytes
        assert {one.load(record) for record in hot} == {LoadOutcome.LOADED}


def test_room_that_a_node_has_claimed_is_nobody_elses(
    server: Server, bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until its time is over: then who finds it removes it."""
    claim = tell(bucket, Message(1, OTHER, "room", CAP_BYTES))
    with driven(server.port) as tier:
        assert tier.store(chunks(1)) == [StoreOutcome.NO_ROOM]
        assert tier.tier.statistics().state == "on"
        assert claim in bucket.names()
        monkeypatch.setattr(listing, "ROOM_S_MAX", -1.0)
        assert tier.store(chunks(1)) == [StoreOutcome.STORED]
        assert claim not in bucket.names()


def test_what_killed_writers_left_is_removed_by_who_starts(server: Server, bucket: Bucket) -> None:
    """Parts without a record, and a record whose parent never came; what is young is left."""
    first, second = chain_of(ROOT, SMALL, text(1, 8))
    with driven(server.port) as tier:
        tier.keep([first, second])
    part = names.part_name(TOP, names.written(first, 1, bytes(16)), 1)
    young = names.part_name(TOP, names.written(first, 1 << 47, bytes(16)), 1)
    for name in (part, young):
        obstore.put(bucket.store, name, bytes(100))
    orphan = renamed(bucket, second, 2)
    obstore.delete(bucket.store, bucket.objects_of(first))
    with driven(server.port) as tier:
        until(tier, lambda: not {part, orphan} & set(bucket.names()))
        until(tier, lambda: tier.tier.statistics().bytes_used == 0)
        assert young in bucket.names()


def test_of_two_writes_of_one_record_everybody_keeps_the_earlier(
    server: Server, bucket: Bucket
) -> None:
    """Two nodes computed the same at the same time."""
    record = chunks(1)[0]
    with driven(server.port) as one, driven(server.port) as other:
        assert one.store([record]) == [StoreOutcome.STORED]
        assert other.store([record]) == [StoreOutcome.STORED], "it has not heard of it"
        until(one, lambda: len(bucket.objects_of(record)) == 1)
        until(other, lambda: other.load(record) is LoadOutcome.LOADED)
        until(one, lambda: one.load(record) is LoadOutcome.LOADED)
        assert len(bucket.objects_of(record)) == 1


@pytest.mark.parametrize("scope", [EVERYTHING, Scope(b"", None), Scope(None, ROOT.fingerprint)])
def test_a_clear_holds_though_who_made_it_was_killed(
    server: Server, bucket: Bucket, scope: Scope
) -> None:
    """Its mark is there, and all that it means; nothing of that is found, and it goes."""
    chain = chain_of(ROOT, SMALL, text(1, 10))
    with driven(server.port) as tier:
        tier.keep(chain)
    now = max(int(name.split("/")[3][:12], 16) for name in bucket.names(f"{TOP}/r"))
    mark = tell(bucket, Message(now, OTHER, "clear", scope=scope))
    with driven(server.port) as tier:
        assert tier.find(chain[:2], chain[2].digests) == []
        until(tier, lambda: bucket.names(f"{TOP}/r") == [])
        assert tier.store(chain) == [StoreOutcome.STORED] * 3
        assert mark in bucket.names(), "a look that began later has to find nothing first"
    with driven(server.port) as tier:
        assert tier.find(chain[:2], chain[2].digests) == chain


def test_the_mark_of_a_clear_goes_when_all_that_it_means_is_gone(
    server: Server, bucket: Bucket
) -> None:
    """It is older than any store that may be under way."""
    chain = chain_of(ROOT, SMALL, text(1, 10))
    with driven(server.port) as tier:
        tier.keep(chain)
    for record in chain:
        renamed(bucket, record, 5)
    mark = tell(bucket, Message(6, OTHER, "clear", scope=EVERYTHING))
    with driven(server.port) as tier:
        assert tier.find(chain[:1]) == []
        until(tier, lambda: mark not in bucket.names())
        assert bucket.names(f"{TOP}/r") == []


def test_what_was_stored_before_is_found_by_who_starts_among_thousands_of_names(
    server: Server, bucket: Bucket
) -> None:
    """More than one answer lists; what is no name of ours is passed over."""
    chain = chain_of(ROOT, SMALL, text(1, 10))
    with driven(server.port) as tier:
        tier.keep(chain)
    for number in range(1100):
        obstore.put(bucket.store, f"{TOP}/r/000000000000.{number:04d}", b"")
    with driven(server.port) as tier:
        until(tier, lambda: tier.find(chain[:2], chain[2].digests) == chain)
