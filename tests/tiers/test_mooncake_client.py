"""The client of a Mooncake Store, beside its node: it crashes, is reached, and ends with it."""

import ctypes
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from kvtide.testing import mooncake_servers
from kvtide.testing.mooncake_servers import OWNED_BYTES_MIN, Store
from kvtide.testing.tier_records import chain_of, layout_of, root_of, text
from kvtide.tiers.base import LoadOutcome
from tests.tiers.mooncake_place import (
    clients_here,
    driven,
    end_clients,
    needs_client,
    wait_for_end,
)

pytestmark = needs_client

ROOT = root_of()
SMALL = layout_of(4096, 8192)
END_S_MAX = 10.0
"""For a process to be scheduled, on a busy machine."""
PIDFD_GETFD = 438

ASKS = """
import sys, time
from kvtide.server_address import parse_address
from kvtide.tiers.mooncake.client import Client, Place
client = Client(Place(parse_address("mooncake", sys.argv[1])))
client.limit(time.monotonic() + 600)
client.call("exist", ["ready"])
print(client._process.pid, flush=True)
sys.stdin.readline()
client.ask("exist", ["never answered"])
print("asked", flush=True)
client.answer()
"""

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


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with mooncake_servers.running(tmp_path / "store", OWNED_BYTES_MIN) as one:
        yield one


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


@pytest.mark.parametrize(
    "number",
    [
        signal.SIGKILL,
        *(pytest.param(one, marks=pytest.mark.long) for one in (signal.SIGSEGV, signal.SIGABRT)),
    ],
)
def test_a_client_that_died_is_started_again(store: Store, number: signal.Signals) -> None:
    """As its library crashes or aborts: nobody else does."""
    record = chain_of(ROOT, SMALL, text(1, 4))[0]
    with driven(store) as tier:
        tier.keep([record])
        assert tier.load(record) is LoadOutcome.LOADED
        end_clients(number)
        assert tier.load(record) is LoadOutcome.LOADED
        assert tier.find([record]) == [record]


@pytest.mark.long
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


@pytest.mark.long
def test_clients_end_with_their_tier(store: Store) -> None:
    with driven(store):
        assert clients_here()
    assert not clients_here()


@pytest.mark.long
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
            wait_for_end(pid, END_S_MAX)  # the call itself ends half a minute later
