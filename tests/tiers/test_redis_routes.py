"""Ways to servers that are gone: what is asked for anew, and what an error must not keep."""

import gc
import socket
import threading
import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress

import pytest

from kvtide.errors import PlaceFailed
from kvtide.redis_address import Address
from kvtide.testing.redis_servers import Server, running
from kvtide.tiers.redis.routes import SLOTS, Limits, Routes
from kvtide.tiers.remote import resolving
from tests.tiers.redis_place import PATIENT

KEY = b"key"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with running("valkey", tmp_path_factory.mktemp("server")) as one:
        yield one


@pytest.fixture
def dead_port() -> int:
    """Nobody listens there."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port


@contextmanager
def routes_to(port: int) -> Iterator[Routes]:
    """In a call."""
    routes = Routes(Address((("127.0.0.1", port),)), None, PATIENT)
    routes.begin(PATIENT.call_s)
    yield routes
    routes.close()


def is_answered(routes: Routes) -> bool:
    """Whether somebody has the key now."""
    connection = routes.of(KEY)
    connection.send(b"EXISTS", KEY)
    return connection.read() == 0


def test_who_cannot_be_reached_may_have_a_follower(server: Server, dead_port: int) -> None:
    """After a failover nobody says MOVED: those that are left are not asked about its slots."""
    with routes_to(server.port) as routes:
        routes.of(KEY)
        routes._slots = [("127.0.0.1", dead_port)] * SLOTS
        with pytest.raises(PlaceFailed, match="cannot be reached"):
            routes.of(KEY)
        assert is_answered(routes)


def test_who_accepts_and_says_nothing_may_have_a_follower(server: Server) -> None:
    """A process that was stopped, or waits for its disk: others have its slots by now."""
    routes = Routes(Address((("127.0.0.1", server.port),)), None, HASTY)
    with silent_port(accepts=True) as silent:
        routes.begin(HASTY.call_s)
        routes.of(KEY)
        routes._slots = [("127.0.0.1", silent)] * SLOTS
        with pytest.raises(BlockingIOError):
            routes.of(KEY)
        routes.begin(HASTY.call_s)
        assert is_answered(routes)
    routes.close()


def test_a_slot_that_nobody_has_is_asked_for_again(server: Server) -> None:
    with routes_to(server.port) as routes:
        routes.of(KEY)
        routes._slots = [None] * SLOTS
        with pytest.raises(PlaceFailed, match="has no server"):
            routes.of(KEY)
        assert is_answered(routes)


def test_those_that_are_connected_know_what_the_url_does_not(
    server: Server, dead_port: int
) -> None:
    with routes_to(dead_port) as routes:
        with pytest.raises(PlaceFailed):
            routes.of(KEY)
        routes._connected(("127.0.0.1", server.port))
        assert is_answered(routes)


class Cells:
    """Whatever a caller holds while it connects."""


HASTY = Limits(connect_s=0.5, silent_s=0.5, call_s=1.0)


@contextmanager
def silent_port(*, accepts: bool) -> Iterator[int]:
    """Nobody answers there: as a process that was stopped, or a machine that is switched off."""
    with ExitStack() as stack:
        listener = stack.enter_context(socket.socket())
        listener.bind(("127.0.0.1", 0))
        listener.listen(16 if accepts else 0)
        for _ in range(0 if accepts else 4):  # more than its queue has room for
            full = stack.enter_context(socket.socket())
            full.setblocking(False)
            full.connect_ex(listener.getsockname())
        yield listener.getsockname()[1]


@pytest.mark.parametrize("accepts", [True, False])
def test_those_that_say_nothing_do_not_hide_the_next(server: Server, accepts: bool) -> None:
    """Two of a URL's three take all the time of a call: the next call begins with the third."""
    with silent_port(accepts=accepts) as one, silent_port(accepts=accepts) as other:
        hosts = tuple(("127.0.0.1", port) for port in (one, other, server.port))
        routes = Routes(Address(hosts), None, HASTY)
        for _ in range(8):
            routes.begin(HASTY.call_s)
            with suppress(PlaceFailed, OSError):
                assert is_answered(routes)
                break
        else:
            pytest.fail("the third was never asked")
        routes.close()


def test_an_error_of_connecting_keeps_nothing_of_its_callers(dead_port: int) -> None:
    """Where nobody collects cycles it would keep cells for ever, and their regions mapped."""
    with routes_to(dead_port) as routes:

        def call() -> "weakref.ref[Cells]":
            cells = Cells()
            with pytest.raises(PlaceFailed):
                routes.of(KEY)
            return weakref.ref(cells)

        gc.disable()
        try:
            assert call()() is None
        finally:
            gc.enable()


def test_an_answer_of_a_slow_resolver_waits_for_who_asks_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else one that takes longer than anybody waits would never be heard."""
    go, asked = threading.Event(), []

    def slow(name: str, *_: object, flags: int = 0, **__: object) -> list[object]:
        if flags:
            raise socket.gaierror
        asked.append(name)
        assert go.wait(30)
        return ["the address"]

    monkeypatch.setattr(socket, "getaddrinfo", slow)
    host = "slow.example", 6379
    with pytest.raises(TimeoutError):
        resolving.addresses_of(host, 0.001)
    lookup = resolving._running[host]
    go.set()
    assert lookup.has_ended.wait(30)
    assert resolving.addresses_of(host, 0.001) == ["the address"]
    assert asked == ["slow.example"]
    assert host not in resolving._running


def test_a_resolver_that_fails_in_any_way_is_asked_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken(*_: object, flags: int = 0, **__: object) -> list[object]:
        if flags:
            raise socket.gaierror
        raise MemoryError

    monkeypatch.setattr(socket, "getaddrinfo", broken)
    for _ in range(2):
        with pytest.raises(OSError, match="its resolver failed: MemoryError"):
            resolving.addresses_of(("broken.example", 1), 30)
    assert not resolving._running
