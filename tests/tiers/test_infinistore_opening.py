"""What entries of `tiers` say of an InfiniStore server, and what becomes of them."""

import gc
import socket
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import pytest

from kvtide import tier_values
from kvtide.errors import PlaceFailed
from kvtide.server_address import Address
from kvtide.testing.tier_records import chain_of, layout_of, root_of, text
from kvtide.tiers import registry
from kvtide.tiers.base import LoadOutcome, StoreOutcome, Tier
from kvtide.tiers.infinistore.session import InfiniStoreSession
from kvtide.tiers.remote.census import Census
from kvtide.units import MiB
from tests.tiers.infinistore_edge import edge
from tests.tiers.redis_place import driving

CHAIN = chain_of(root_of(), layout_of(4096, 8192), text(1, 10))


def opened(**options: Any) -> Tier:
    """The tier that an entry asks for."""
    (entry,) = tier_values.parse_tiers([{"type": "infinistore", **options}])
    return registry.load("infinistore").open(entry.options, lambda: None, 8 * MiB)


def test_an_entry_opens_a_tier() -> None:
    """Nodes of another prefix have nothing of it."""
    with edge() as server:
        url = f"infinistore://127.0.0.1:{server.port}"
        with driving(opened(url=url, prefix="p")) as tier, driving(opened(url=url)) as other:
            assert tier.store(CHAIN) == [StoreOutcome.STORED] * 3
            assert tier.find(CHAIN[:2], CHAIN[2].digests) == CHAIN
            assert other.find(CHAIN[:2]) == []
            assert {name.split(b":")[0] for name in server.values} == {b"p", b"kvtide"}
            assert tier.tier.statistics().records == 3


@pytest.mark.long
def test_a_server_that_is_away_costs_a_start_nothing() -> None:
    """Refused, or an address that nobody has: the tier is there at once, and says what it is."""
    for url in ("infinistore://127.0.0.1:1", "infinistore://192.0.2.1"):
        began_s = time.monotonic()
        tier = opened(url=url)
        assert time.monotonic() - began_s < 2.0
        with driving(tier) as driven:
            assert driven.load(CHAIN[0]) is LoadOutcome.FAILED
            assert "it has not worked yet" in tier.statistics().state
            assert driven.find(CHAIN[:1]) == []


@contextmanager
def answering(said: bytes) -> Iterator[int]:
    """The port of a server of another kind, which says the same to everybody."""
    connections: list[socket.socket] = []
    with socket.create_server(("127.0.0.1", 0)) as listener, ExitStack() as stack:

        def serve() -> None:
            with suppress(OSError):
                while True:
                    connections.append(listener.accept()[0])
                    connections[-1].sendall(said)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield listener.getsockname()[1]
        listener.shutdown(socket.SHUT_RDWR)
        thread.join()
        for one in connections:
            stack.enter_context(one)


@pytest.mark.parametrize("said", [b"-ERR unknown command\r\n", b"HTTP/1.1 400 Bad Request\r\n"])
def test_a_server_of_another_kind_is_told_apart(said: bytes) -> None:
    """By the first that it answers."""
    with answering(said) as port, driving(opened(url=f"infinistore://127.0.0.1:{port}")) as tier:
        assert tier.load(CHAIN[0]) is LoadOutcome.FAILED
        assert "as no InfiniStore does" in tier.tier.statistics().state


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"url": "infinistore://"}, "infinistore://host:port"),
        ({"url": "redis://host:1"}, "not infinistore://host:port"),
        ({"url": "infinistore://host:port"}, "Port could not be cast"),
        ({"url": "infinistore://host/path"}, "infinistore://host:port"),
        ({"url": "infinistore://user@host"}, "infinistore://host:port"),
        ({"url": "infinistore://host", "prefix": "a:b"}, "prefix 'a:b'"),
        ({"url": "infinistore://host", "bytes_max": "1GiB"}, "bytes_max"),
    ],
)
def test_what_cannot_be_meant_is_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        tier_values.parse_tiers([{"type": "infinistore", **options}])


def test_an_address_is_shown_as_it_is_given() -> None:
    for url, shown in (
        ("infinistore://host:1", "infinistore://host:1"),
        ("infinistore://host", "infinistore://host:22345"),
        ("infinistore://[::1]:7", "infinistore://[::1]:7"),
    ):
        (entry,) = tier_values.parse_tiers([{"type": "infinistore", "url": url}])
        assert str(entry.options["url"]) == shown


def test_what_a_failed_call_had_is_given_back_at_once() -> None:
    """A node looks for no cycles, so cells in one would stay mapped for as long as it runs."""

    class Cells(bytearray):
        pass

    def call() -> "weakref.ref[Cells]":
        cells = Cells(4096)
        address = Address("infinistore", "127.0.0.1", 1)
        session = InfiniStoreSession(address, "kvtide", Census(), 1.0)
        with pytest.raises(PlaceFailed, match="cannot be reached"):
            session.load(CHAIN[0], [memoryview(cells)])
        session.close()
        return weakref.ref(cells)

    gc.disable()
    try:
        assert call()() is None
    finally:
        gc.enable()
