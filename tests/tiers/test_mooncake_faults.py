"""What a Mooncake Store does to its tier: is full, forgets, hangs, crashes in our hands."""

import ctypes
import os
import random
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from kvtide.testing import mooncake_servers
from kvtide.testing.mooncake_servers import OWNED_BYTES_MIN, Store, clients_of
from kvtide.testing.tier_records import BLOCKS_PER_CHUNK, chain_of, layout_of, root_of, text
from kvtide.tiers.base import LoadOutcome, StoreOutcome
from kvtide.tiers.mooncake.names import names_of
from kvtide.units import KiB
from tests.tiers.mooncake_place import PREFIX, WAIT_S, driven, needs_client
from tests.tiers.redis_place import heal

pytestmark = needs_client

ROOT = root_of()
SMALL = layout_of(4096, 8192)
LARGE = layout_of(64 * KiB)
LATE_S_MAX = 10.0
"""Beyond a call's own limit: for threads to be scheduled on a busy machine."""
PIDFD_GETFD = 438

LISTENS = """
import socket, sys
from kvtide.tiers.mooncake.process import keep_listeners_inside
addresses = [(socket.AF_INET, ""), (socket.AF_INET6, "::")]
listeners = [socket.create_server((host, 0), family=family) for family, host in addresses]
keep_listeners_inside()
names = [one.getsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, 16) for one in listeners]
assert names == [b"lo\\0"] * 2, names
caller = socket.create_connection(listeners[int(sys.argv[1])].getsockname()[:2])
try:
    keep_listeners_inside()
except ConnectionError as error:
    print(error)
"""

ASKS = """
import sys, time
from kvtide.mooncake_address import parse_address
from kvtide.tiers.mooncake.client import Client, Place
client = Client(Place(parse_address(sys.argv[1])))
client.limit(time.monotonic() + 600)
client.call("exist", ["ready"])
print(client._process.pid, flush=True)
sys.stdin.readline()
client.ask("exist", ["never answered"])
print("asked", flush=True)
client.answer()
"""


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with mooncake_servers.running(tmp_path / "store", OWNED_BYTES_MIN) as one:
        yield one


def clients_here() -> list[int]:
    """Of this process."""
    return clients_of(os.getpid())


def wait_for_end(pid: int, timeout_s: float = WAIT_S) -> None:
    """Until a process does nothing any more."""
    descriptor = os.pidfd_open(pid)
    with os.fdopen(descriptor):
        assert select.select([descriptor], [], [], timeout_s)[0], f"{pid} goes on"


def end_clients(number: int) -> None:
    """As if their library did."""
    for pid in clients_here():
        with suppress(ProcessLookupError):  # its tier has ended it just now
            os.kill(pid, number)
            wait_for_end(pid)


def listeners_of(pid: int) -> list[socket.socket]:
    """Duplicates of a process' listening sockets."""
    found = []
    with os.fdopen(os.pidfd_open(pid)) as process:
        for name in os.listdir(f"/proc/{pid}/fd"):
            duplicate = ctypes.CDLL(None).syscall(PIDFD_GETFD, process.fileno(), int(name), 0)
            with suppress(OSError):
                one = socket.socket(fileno=duplicate)
                listens = one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
                if listens and one.family != socket.AF_UNIX:
                    found.append(one)
                else:
                    one.close()
    return found


# ---- what the suite leaves out


def test_a_full_store_takes_what_is_new(store: Store) -> None:
    """Four times what fits, each found at once; what it evicted is a miss and no more."""
    chunks = [chain_of(ROOT, LARGE, text(n, BLOCKS_PER_CHUNK))[0] for n in range(256)]
    with driven(store) as tier:
        for chunk in chunks:
            assert tier.store([chunk]) == [StoreOutcome.STORED]
            assert tier.is_there(chunk)
        outcomes = {tier.load(chunk) for chunk in chunks}
        assert outcomes == {LoadOutcome.LOADED, LoadOutcome.ABSENT}


def test_a_damaged_record_is_never_loaded_and_is_gone(store: Store) -> None:
    """What lies behind it is not found; once it is there again, all is."""
    first, second, tail = chain_of(ROOT, SMALL, text(1, 10))
    with driven(store) as tier:
        tier.keep([first, second, tail])
        store.flip(names_of(PREFIX, second).record(second.key), -5)
        assert tier.load(second) is LoadOutcome.CORRUPT
        assert tier.find([first, second], tail.digests) == [first]
        assert tier.load(second) is LoadOutcome.ABSENT
        assert tier.store([tail]) == [StoreOutcome.NOT_ANCHORED]
        assert tier.store([second, tail]) == [StoreOutcome.STORED, StoreOutcome.HELD]
        assert tier.find([first, second], tail.digests) == [first, second, tail]


def test_a_damaged_header_is_a_miss(store: Store) -> None:
    record = chain_of(ROOT, SMALL, text(1, 4))[0]
    with driven(store) as tier:
        tier.keep([record])
        store.flip(names_of(PREFIX, record).record(record.key), 100)
        assert tier.find([record]) == []
        assert tier.load(record) is LoadOutcome.CORRUPT
        assert tier.store([record]) == [StoreOutcome.STORED]
        assert tier.load(record) is LoadOutcome.LOADED


def test_another_roots_record_of_the_same_key_is_another(store: Store) -> None:
    """It cannot be; each gives its own bytes."""
    record = chain_of(ROOT, SMALL, text(1, 4))[0]
    root = root_of("other")
    with driven(store) as tier:
        tier.keep([record, replace(record, root=root, parent=root.key)])
        assert tier.load(record) is LoadOutcome.LOADED


def test_small_values_that_are_gone_are_put_back_with_a_store(store: Store) -> None:
    """The store evicts each value by itself; a record that stayed is found by its blocks again."""
    record = chain_of(ROOT, SMALL, text(1, 3))[0]
    with driven(store) as tier:
        tier.keep([record])
        known = names_of(PREFIX, record)
        store.remove([*known.blocks(record.digests), known.children(record.parent)])
        assert not tier.is_there(record)
        assert tier.store([record]) == [StoreOutcome.HELD]
        assert tier.is_there(record)


# ---- the store goes away


def test_a_master_that_comes_back_is_empty_and_is_used_again(store: Store) -> None:
    """It knows nothing; owners come back to it by themselves."""
    records = chain_of(ROOT, SMALL, text(1, 10))
    with driven(store) as tier:
        tier.keep(records)
        store.kill_master()
        assert tier.load(records[0]) is LoadOutcome.FAILED
        store.start()
        store.wait_for_owners()
        assert tier.load(records[0]) is LoadOutcome.ABSENT
        assert tier.store(records) == [StoreOutcome.STORED] * len(records)
        assert tier.find(records[:2], records[2].digests) == records
        assert {tier.load(record) for record in records} == {LoadOutcome.LOADED}


def test_what_an_owner_took_with_it_fails_and_another_takes_what_is_new(store: Store) -> None:
    """Until its master has noticed, what it had is there by name, and fails; then it is absent."""
    record = chain_of(ROOT, SMALL, text(1, 4))[0]
    with driven(store) as tier:
        tier.keep([record])
        store.kill_owners()
        assert tier.load(record) in (LoadOutcome.FAILED, LoadOutcome.ABSENT)
        other = chain_of(ROOT, SMALL, text(2, 4))[0]
        assert not tier.store([other])[0].is_kept
        assert tier.find([other]) == []
        store.add_owner(OWNED_BYTES_MIN)
        deadline_s = time.monotonic() + WAIT_S
        while not tier.store([record])[0].is_kept or tier.load(record) is not LoadOutcome.LOADED:
            assert time.monotonic() < deadline_s, tier.tier.statistics()
            tier.pass_time(5_000)
            tier.poll_for(0.05)


def test_one_owner_of_several_that_dies_costs_what_it_had(store: Store) -> None:
    """Lookups end where its values begin, and nothing else stops, though its master tells of them
    for another ten seconds."""
    chains = [chain_of(ROOT, SMALL, text(number, 10)) for number in range(30)]
    store.add_owner(OWNED_BYTES_MIN)
    with driven(store) as tier:
        for chain in chains:
            tier.keep(chain)
        owner = store.owners.pop()
        owner.kill()
        owner.wait()
        counts = []
        for chain in chains:
            found = tier.find(chain[:2], chain[2].digests)
            assert found == chain[: len(found)]
            assert {tier.load(record) for record in found} <= {LoadOutcome.LOADED}
            counts.append(len(found))
        assert tier.tier.statistics().state == "on"
        assert 0 < sum(counts) < sum(len(chain) for chain in chains), counts


def test_a_store_that_hangs_costs_its_time_and_no_more(store: Store) -> None:
    """Its client ends with the call: nothing of it is written when the store goes on."""
    record = chain_of(ROOT, SMALL, text(1, 4))[0]
    with driven(store, call_s=2.0, put_s=2.0) as tier:
        tier.keep([record])
        heal(tier, record)
        with store.stopped():
            begin_s = time.monotonic()
            assert tier.load(record) is LoadOutcome.FAILED
            assert time.monotonic() - begin_s < 2.0 + LATE_S_MAX
        heal(tier, record)


# ---- its client, in our hands


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV, signal.SIGABRT])
def test_a_client_that_died_is_started_again(store: Store, number: signal.Signals) -> None:
    """As its library crashes or aborts: nobody else does."""
    record = chain_of(ROOT, SMALL, text(1, 4))[0]
    with driven(store) as tier:
        tier.keep([record])
        assert tier.load(record) is LoadOutcome.LOADED
        end_clients(number)
        assert tier.load(record) is LoadOutcome.LOADED
        assert tier.find([record]) == [record]


def test_a_client_that_dies_in_a_call_costs_that_call(store: Store) -> None:
    record = chain_of(ROOT, SMALL, text(1, 4))[0]
    with driven(store) as tier:
        tier.keep([record])
        assert {tier.loaded(tier.submit_load(record)) for _ in range(4)} == {LoadOutcome.LOADED}
        with store.stopped():
            loads = [tier.submit_load(record) for _ in range(2)]
            assert not tier.has_ended(loads[0])
            end_clients(signal.SIGKILL)
            assert {tier.loaded(load) for load in loads} <= {
                LoadOutcome.FAILED,
                LoadOutcome.LOADED,
            }
        assert tier.load(record) is LoadOutcome.LOADED


def test_nobody_from_outside_reaches_its_clients(store: Store) -> None:
    """They listen on all addresses, but on the loopback device alone."""
    record = chain_of(ROOT, SMALL, text(1, 4))[0]
    with driven(store) as tier:
        tier.keep([record])
        assert tier.find([record]) == [record]
        assert tier.load(record) is LoadOutcome.LOADED
        listeners = [one for pid in clients_here() for one in listeners_of(pid)]
        assert listeners
        for one in listeners:
            with one:
                device = one.getsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, 16)
                assert device.rstrip(b"\0") == b"lo", one


@pytest.mark.parametrize("family", [0, 1], ids=["IPv4", "IPv6"])
def test_who_connects_before_a_listener_is_bound_is_noticed(family: int) -> None:
    """Accepted or not. Its client ends then, before it has anything to give."""
    command = [sys.executable, "-c", LISTENS, str(family)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.stdout.startswith("somebody was connected"), ended


def test_clients_end_with_their_tier(store: Store) -> None:
    with driven(store):
        assert clients_here()
    assert not clients_here()


def test_a_client_that_hangs_ends_with_a_node_that_was_killed(store: Store) -> None:
    """It cannot see that nobody asks any more; a thread of it does."""
    asks = subprocess.Popen(
        [sys.executable, "-c", ASKS, str(store.address)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with asks:
        assert asks.stdin is not None
        assert asks.stdout is not None
        pid = int(asks.stdout.readline())
        with store.stopped():
            asks.stdin.write("\n")
            asks.stdin.flush()
            assert asks.stdout.readline() == "asked\n"
            asks.kill()
            wait_for_end(pid, LATE_S_MAX)  # the call itself ends half a minute later


@pytest.mark.long
@pytest.mark.parametrize("seed", range(3))
def test_whatever_dies_every_byte_is_right_and_it_works_again(store: Store, seed: int) -> None:
    """Two nodes store, load and look up, while clients, owner and master die or hang."""
    chaos = random.Random(seed)
    chains = [chain_of(ROOT, SMALL, text(number, 10)) for number in range(6)]

    def restart_master() -> None:
        store.kill_master()
        store.start()
        store.wait_for_owners()

    def replace_owner() -> None:
        store.kill_owners()
        store.add_owner(OWNED_BYTES_MIN)

    def hang() -> None:
        with store.stopped():
            work()

    def work() -> None:
        for _ in range(8):
            tier, chain = chaos.choice(tiers), chaos.choice(chains)
            for record in chain:
                tier.submit_store(record)
                tier.submit_load(record)
            tier.ask(chain[:2], chain[2].digests)
            tier.pass_time(5_000)
            tier.poll()

    faults = [lambda: end_clients(signal.SIGKILL), restart_master, replace_owner, hang]
    with driven(store, call_s=2.0, put_s=4.0) as one, driven(store, call_s=2.0, put_s=4.0) as two:
        tiers = [one, two]
        for fault in chaos.sample(faults, len(faults)):
            work()
            fault()
        for tier in tiers:
            deadline_s = time.monotonic() + WAIT_S
            while any(tier.load(record) is not LoadOutcome.LOADED for record in chains[0]):
                assert time.monotonic() < deadline_s, tier.tier.statistics()
                tier.store(chains[0])
                tier.pass_time(5_000)
