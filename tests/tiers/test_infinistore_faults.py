"""What an InfiniStore server does to its tier, and what a tier must not do to its server."""

import random
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from kvtide.testing import infinistore_servers
from kvtide.testing.infinistore_servers import POOL_GIB, Server
from kvtide.testing.tier_records import BLOCKS_PER_CHUNK, chain_of, layout_of, root_of, text
from kvtide.tiers.base import LoadOutcome, StoreOutcome
from kvtide.tiers.infinistore import frames, names
from kvtide.tiers.infinistore.client import Client
from kvtide.tiers.infinistore.frames import Ask
from kvtide.tiers.scope import Scope
from kvtide.units import GiB, MiB
from tests.tiers.infinistore_edge import edge
from tests.tiers.infinistore_place import (
    PLACES,
    PREFIX,
    WAIT_S,
    Place,
    asking,
    driven,
    flip,
    names_at,
    needs_server,
    note_at,
    remove_parts,
    running,
)
from tests.tiers.redis_place import heal

ROOT = root_of()
SMALL = layout_of(4096, 8192)
PARTS = layout_of(2 * MiB, 1 * MiB)
LATE_S_MAX = 10.0
"""Beyond a call's own limit: for threads to be scheduled on a busy machine."""


@pytest.fixture(params=PLACES)
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    with running(request.param, tmp_path) as one:
        yield one


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    """One that may end."""
    with infinistore_servers.running(tmp_path / "server") as one:
        yield one


# ---- what the suite leaves out


def test_its_numbers_add_up(place: Place) -> None:
    """What a node has stored itself, and every job by its outcome; of bytes nobody tells."""
    first, second, tail = chain_of(ROOT, SMALL, text(1, 10))
    with driven(place.port) as tier:
        tier.store([first, first, tail, second, tail])
        for record in (first, tail, chain_of(ROOT, SMALL, text(2, 4))[0]):
            tier.load(record)
        numbers = tier.tier.statistics()
        assert (numbers.state, numbers.records) == ("on", 3)
        assert numbers.stored == {"stored": 3, "held": 1, "not_anchored": 1}
        assert numbers.loaded == {"loaded": 2, "absent": 1}
        payload = sum(record.payload_bytes for record in (first, second, tail))
        assert numbers.stored_bytes == payload
        assert (numbers.bytes_used, numbers.bytes_max, numbers.evicted) == (0, 0, 0)


def test_stores_come_back_after_a_restart_of_the_node(place: Place) -> None:
    records = chain_of(ROOT, SMALL, text(1, 10))
    salted = chain_of(root_of(salt="secret"), layout_of(4096, 12288), text(1, 6))
    with driven(place.port) as tier:
        tier.keep(records + salted)
    for _ in range(2):
        with driven(place.port) as tier:
            assert tier.find(records[:2], records[2].digests) == records
            assert tier.find(salted[:1], salted[1].digests) == salted
            assert {tier.load(one) for one in records + salted} == {LoadOutcome.LOADED}
            assert tier.store(records[:1]) == [StoreOutcome.HELD]
    with driven(place.port) as tier:
        tier.tier.clear(salted[0].root.salt_digest)
    with driven(place.port) as tier:
        assert tier.find(salted[:1]) == [], "what was cleared does not come back"
        assert tier.load(salted[0]) is LoadOutcome.ABSENT
        assert tier.find(records[:2], records[2].digests) == records


def test_a_damaged_record_is_never_loaded_and_is_gone(place: Place) -> None:
    """What lies behind it is not found; once it is there again, all is."""
    first, second, tail = chain_of(ROOT, SMALL, text(1, 10))
    with driven(place.port) as tier:
        tier.keep([first, second, tail])
        flip(place.port, second)
        assert tier.load(second) is LoadOutcome.CORRUPT
        assert tier.find([first, second], tail.digests) == [first]
        assert tier.load(second) is LoadOutcome.ABSENT
        assert tier.store([tail]) == [StoreOutcome.NOT_ANCHORED]
        assert tier.store([second, tail]) == [StoreOutcome.STORED, StoreOutcome.HELD]
        assert tier.find([first, second], tail.digests) == [first, second, tail]


@pytest.mark.parametrize("at", [3, 100])
def test_a_damaged_note_or_mark_is_a_miss(place: Place, at: int) -> None:
    """And so is one in the mark that a part begins with."""
    record = chain_of(ROOT, SMALL, text(1, 4))[0]
    with driven(place.port) as tier:
        tier.keep([record])
        flip(place.port, record, 0, at)
        assert tier.load(record) is LoadOutcome.CORRUPT
        assert tier.store([record]) == [StoreOutcome.STORED]
        with asking(place.port) as client:
            name = names_at(client, record).note(record.key)
            content = bytearray(note_at(client, record).packed())
            content[at] ^= 1
            assert client.replace([(name, bytes(content))])
        assert tier.find([record]) == []
        assert tier.load(record) is LoadOutcome.ABSENT
        assert tier.store([record]) == [StoreOutcome.STORED]
        assert tier.load(record) is LoadOutcome.LOADED


def test_another_roots_record_of_the_same_key_is_another(place: Place) -> None:
    """Which cannot be, as keys are made: its name has the root in it all the same."""
    record = chain_of(ROOT, SMALL, text(1, 4))[0]
    root = root_of("other")
    with driven(place.port) as tier:
        tier.keep([record, replace(record, root=root, parent=root.key)])
        assert tier.load(record) is LoadOutcome.LOADED


# ---- several nodes, records of many parts


@pytest.mark.long
def test_a_record_of_many_parts_brings_every_byte(place: Place) -> None:
    """Headers lie anywhere in parts, and are sent last."""
    chunk, tail = chain_of(ROOT, PARTS, text(1, 5))
    assert len(names.lengths_of(chunk)) > 4
    with driven(place.port, queue_bytes_max=64 * MiB) as tier:
        assert tier.store([chunk, tail]) == [StoreOutcome.STORED] * 2
        assert tier.find([chunk], tail.digests) == [chunk, tail]
        assert [tier.load(record) for record in (chunk, tail)] == [LoadOutcome.LOADED] * 2


@pytest.mark.long
@pytest.mark.parametrize("part", [0, 1, 4])
def test_a_record_of_which_a_part_is_gone_is_a_miss(place: Place, part: int) -> None:
    """At the lookup, where it is one of those that a server evicts first; at the load, else."""
    chunk = chain_of(ROOT, PARTS, text(1, 4))[0]
    with driven(place.port, queue_bytes_max=64 * MiB) as tier:
        tier.keep([chunk])
        remove_parts(place.port, chunk, part)
        assert tier.find([chunk]) == ([chunk] if part == 4 else [])
        assert tier.load(chunk) is LoadOutcome.ABSENT
        assert tier.find([chunk]) == []
        assert tier.store([chunk]) == [StoreOutcome.STORED]
        assert tier.load(chunk) is LoadOutcome.LOADED


def test_what_one_node_stored_another_finds_at_once_and_a_clear_is_for_all(place: Place) -> None:
    records = chain_of(ROOT, SMALL, text(1, 10))
    with driven(place.port) as one, driven(place.port) as other:
        for count, record in enumerate(records, start=1):
            one.keep([record])
            assert other.load(record) is LoadOutcome.LOADED
            assert len(other.find(records[:2], records[2].digests)) == count
        assert other.store(records) == [StoreOutcome.HELD] * 3
        other.tier.clear(None)
        assert one.find(records[:2], records[2].digests) == []
        assert one.store(records) == [StoreOutcome.STORED] * 3
        assert other.find(records[:2], records[2].digests) == records


def test_what_a_node_has_stored_it_takes_away_when_it_is_cleared() -> None:
    """All but what tells of the clear; what another salt has stays."""
    records = chain_of(ROOT, SMALL, text(1, 42))
    salted = chain_of(root_of(salt="secret"), SMALL, text(1, 6))
    with edge() as server, driven(server.port) as tier:
        tier.keep(salted)
        before = set(server.values)
        tier.keep(records)
        assert tier.tier.clear(ROOT.salt_digest) == len(records)
        for other in salted:
            assert tier.store([other]) == [StoreOutcome.HELD]  # what is cleared goes ahead of it
        deadline_s = time.monotonic() + WAIT_S
        while set(server.values) != before | {
            names.clear_of(PREFIX, Scope(ROOT.salt_digest, None))
        }:
            assert time.monotonic() < deadline_s, sorted(server.values)
            time.sleep(0.005)
        assert server.faults == []


def test_what_is_being_stored_at_a_clear_is_taken_back(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the node that stores it, when that has ended: the one that clears cannot see it yet."""
    record = chain_of(ROOT, SMALL, text(1, 4))[0]
    at_end, go_on = threading.Event(), threading.Event()
    replaced = Client.replace

    def held_up(client: Client, values: list[tuple[bytes, bytes]]) -> bool:
        if len(values) == 3:  # what tells of a record
            at_end.set()
            assert go_on.wait(WAIT_S)
        return replaced(client, values)

    with driven(place.port) as one, driven(place.port) as other:
        monkeypatch.setattr(Client, "replace", held_up)
        job = one.submit_store(record)
        assert at_end.wait(WAIT_S)
        other.tier.clear(None)
        go_on.set()
        assert one.stored(job) is StoreOutcome.NOT_ANCHORED
        assert one.find([record]) == other.find([record]) == []
        with asking(place.port) as client:
            assert client.exist([names.life_of(PREFIX)]) == [True]


@pytest.mark.long
def test_nodes_that_store_the_same_at_once_never_give_wrong_bytes(place: Place) -> None:
    """The second writes it again, under a name of its own."""
    chains = [chain_of(ROOT, SMALL, text(number, 10)) for number in range(20)]
    with driven(place.port) as one, driven(place.port) as other:
        jobs = [
            (tier, tier.submit_store(record))
            for chain in chains
            for record in chain
            for tier in (one, other)
        ]
        for chain in chains:
            one.submit_load(chain[0])
            other.ask(chain[:2], chain[2].digests)
        outcomes = {tier.stored(job) for tier, job in jobs}
        assert outcomes <= {StoreOutcome.STORED, StoreOutcome.HELD, StoreOutcome.NOT_ANCHORED}
        for chain in chains:
            one.store(chain)
            assert other.find(chain[:2], chain[2].digests) == chain
            assert {other.load(record) for record in chain} == {LoadOutcome.LOADED}


def test_chunks_of_too_many_blocks_are_not_kept(place: Place) -> None:
    """Their notes would not fit a packet, and half of one ends a server that is asked for it."""
    many = replace(layout_of(4096), chunk_tokens=64 * layout_of(4096).block_tokens)
    record = chain_of(ROOT, many, text(1, 64))[0]
    with driven(place.port) as tier:
        assert tier.store([record]) == [StoreOutcome.NO_ROOM]


# ---- the server goes away, hangs, is full


def test_a_server_that_was_started_again_is_empty_and_is_used_again(place: Place) -> None:
    records = chain_of(ROOT, SMALL, text(1, 10))
    with driven(place.port) as tier:
        tier.keep(records)
        place.kill()
        assert tier.load(records[0]) is LoadOutcome.FAILED
        place.start()
        assert tier.load(records[0]) is LoadOutcome.ABSENT
        tier.pass_time(60_000)  # a survey is due
        assert tier.store(records) == [StoreOutcome.STORED] * len(records)
        assert tier.find(records[:2], records[2].digests) == records
        assert {tier.load(record) for record in records} == {LoadOutcome.LOADED}
        assert tier.tier.statistics().records == len(records)


@pytest.mark.long
def test_a_server_that_hangs_costs_its_time_and_no_more(place: Place) -> None:
    """What comes late is read by nobody, and the server outlives it."""
    chunk = chain_of(ROOT, PARTS, text(1, 4))[0]
    with driven(place.port, call_s=1.0, put_s=1.0, queue_bytes_max=64 * MiB) as tier:
        tier.keep([chunk])
        for _ in range(3):
            with place.stopped():
                begin_s = time.monotonic()
                assert tier.load(chunk) is LoadOutcome.FAILED
                assert time.monotonic() - begin_s < 1.0 + LATE_S_MAX
            heal(tier, chunk)


@pytest.mark.long
def test_a_load_that_is_given_up_inside_a_value_reads_it_out_later() -> None:
    """Into nothing, before its connection is used again or closed."""
    chunk = chain_of(ROOT, PARTS, text(1, 4))[0]
    with edge() as server:
        with driven(server.port, call_s=0.2, put_s=30.0, queue_bytes_max=64 * MiB) as tier:
            tier.keep([chunk])
            server.drips = True
            assert tier.load(chunk) is LoadOutcome.FAILED
            server.drips = False
            heal(tier, chunk)
        assert server.faults == []


@pytest.mark.long
def test_a_server_without_room_says_so_and_keeps_nothing() -> None:
    """Values are not taken, until there is room again."""
    big, small = chain_of(ROOT, PARTS, text(1, 4))[0], chain_of(ROOT, SMALL, text(1, 4))[0]
    with edge() as server, driven(server.port, queue_bytes_max=64 * MiB) as tier:
        server.room_bytes = MiB
        assert tier.store([big]) == [StoreOutcome.NO_ROOM]
        assert tier.store([small]) == [StoreOutcome.STORED]
        assert tier.find([big]) == []
        server.room_bytes = GiB
        assert tier.store([big]) == [StoreOutcome.STORED]
        assert tier.load(big) is LoadOutcome.LOADED
        assert server.faults == []


@needs_server
@pytest.mark.long
def test_a_real_server_that_has_not_so_much_memory_says_so(server: Server) -> None:
    """It takes what was sent for other asks, and ends the connection; nothing else ends."""
    with asking(server.port) as client:
        for _ in range(3):
            value = [names.MARK, *[bytes(64 * MiB)] * (16 * POOL_GIB + 1)]
            assert not client.write(iter([(b"too much", value)]))
            assert client.exist([b"too much"]) == [False]
            assert client.write(iter([(b"fits", [names.MARK])]))
            client.remove([b"fits"])


@pytest.mark.long
def test_no_answer_waits_for_the_kernel_to_acknowledge_another(place: Place) -> None:
    """Small answers, and answers of two parts, come at once: not 40 ms later each."""
    count = 50
    with asking(place.port) as client:
        begin_s = time.monotonic()
        for _ in range(count):
            assert client.replace([(b"small", b"value")])
            assert client.read([b"small"] * 2) == [b"value"] * 2
        assert time.monotonic() - begin_s < count * 0.04


@pytest.mark.long
def test_what_a_cut_off_store_left_is_given_back() -> None:
    """A server keeps what did not all come, for ever, and ends if it is asked for it."""
    chunk = chain_of(ROOT, PARTS, text(1, 4))[0]
    with edge() as server:
        with driven(server.port, queue_bytes_max=64 * MiB) as tier:
            server.cuts = True
            assert tier.store([chunk]) == [StoreOutcome.FAILED]
            assert None in server.values.values()
            server.cuts = False
            assert tier.store([chunk]) == [StoreOutcome.STORED]
            assert None not in server.values.values()
        assert server.faults == []


@needs_server
@pytest.mark.long
def test_a_full_server_takes_what_is_new(server: Server) -> None:
    """Others fill it twice: what it evicted is a miss and no more, and what is new is there."""
    large = layout_of(4 * MiB)
    chunks = [chain_of(ROOT, large, text(n, BLOCKS_PER_CHUNK))[0] for n in range(12)]
    with driven(server.port, queue_bytes_max=64 * MiB) as tier:
        tier.keep(chunks[:6])
        with asking(server.port) as client:
            fill = [(f"{n}".encode(), [bytes(32 * MiB)]) for n in range(64 * POOL_GIB)]
            assert client.write(iter(fill))
        assert not any(tier.is_there(chunk) for chunk in chunks[:6])
        for chunk in chunks[::-1]:
            assert tier.load(chunk) is LoadOutcome.ABSENT
            assert tier.store([chunk]) == [StoreOutcome.STORED]
            assert tier.is_there(chunk)
            assert tier.load(chunk) is LoadOutcome.LOADED
    assert not server.has_ended, server.log


@pytest.mark.long
@pytest.mark.parametrize("seed", range(3))
def test_whatever_fails_every_byte_is_right_and_it_works_again(place: Place, seed: int) -> None:
    """Two nodes store, load, look up and clear, while the server hangs, or is started anew."""
    chaos = random.Random(seed)
    chains = [chain_of(ROOT, SMALL, text(number, 10)) for number in range(6)]
    big = chain_of(ROOT, PARTS, text(9, 4))[0]

    def restart() -> None:
        place.kill()
        work()
        place.start()

    def hang() -> None:
        with place.stopped():
            work()

    def work() -> None:
        for _ in range(8):
            tier, chain = chaos.choice(tiers), chaos.choice([*chains, [big]])
            for record in chain:
                tier.submit_store(record)
                tier.submit_load(record)
            tier.ask(chain[:1], chain[-1].digests)
            if chaos.random() < 0.1:
                tier.tier.clear(None)
            tier.pass_time(5_000)
            tier.poll()

    more = {"call_s": 0.5, "put_s": 1.0, "queue_bytes_max": 64 * MiB}
    with driven(place.port, **more) as one, driven(place.port, **more) as two:
        tiers = [one, two]
        for fault in chaos.sample([restart, hang, restart, hang], 4):
            work()
            fault()
        for tier in tiers:
            deadline_s = time.monotonic() + WAIT_S
            while any(tier.load(record) is not LoadOutcome.LOADED for record in chains[0]):
                assert time.monotonic() < deadline_s, tier.tier.statistics()
                tier.store(chains[0])
                tier.pass_time(5_000)


# ---- what ends a server: why the client is as it is


@needs_server
@pytest.mark.long
def test_the_real_server_ends_when_it_is_asked_for_what_has_not_all_come(server: Server) -> None:
    with asking(server.port) as client, asking(server.port) as other:
        client.connection(0).send(Ask.PUT, [frames.put(b"half", MiB), bytes(MiB // 2)])
        while not other.exist([b"half"])[0]:
            time.sleep(0.01)
        one = other.connection(0)
        one.send(Ask.GET, [frames.get(b"half")])
        assert server.process is not None
        assert server.process.wait(WAIT_S)


@needs_server
@pytest.mark.long
def test_the_real_server_ends_with_a_connection_on_which_it_sends_a_value(server: Server) -> None:
    """Not with each, but soon: it gives back twice what it had for it. So whoever gives up a load
    reads it out, and closes then."""
    with asking(server.port) as client:
        assert client.write(iter([(b"much", [bytes(64 * MiB)])]))
        deadline_s = time.monotonic() + WAIT_S
        while not server.has_ended:
            assert time.monotonic() < deadline_s, "this version survives it: adjust the client"
            with suppress(OSError), socket.create_connection(("127.0.0.1", server.port)) as one:
                one.sendall(frames.get(b"much"))
                one.recv(8)


@needs_server
@pytest.mark.long
def test_the_real_server_forgets_what_a_name_was_given_anew(server: Server) -> None:
    """When it evicts what the name held before. Not so where that was removed first."""
    with asking(server.port) as client:

        def fill(name: str) -> None:
            some = [(f"{name}:{n}".encode(), [bytes(32 * MiB)]) for n in range(16 * POOL_GIB)]
            assert client.write(iter(some))

        for name in (b"over", b"anew"):
            assert client.write(iter([(name, [names.MARK])]))
        fill("first")
        assert client.write(iter([(b"over", [names.MARK])]))
        assert client.replace([(b"anew", names.MARK)])
        fill("second")
        assert client.exist([b"first:0", b"over", b"anew", b"second:0"]) == [
            False,
            False,
            True,
            True,
        ]
