"""A link whose own thread is late: whoever needs an answer reads it, and nothing gets lost."""

import os
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import NamedTuple

import pytest

from kvtide.core import messages as m
from kvtide.testing.node_process import NodeProcess
from kvtide.wire import breaker
from kvtide.wire import link as link_module
from kvtide.wire.frames import RECEIVE_BYTES, encode
from kvtide.wire.link import Link
from kvtide.wire.places import Places
from tests.wire.link_owner import WAIT_S_MAX, MakeLink, Owner, wait_until


@pytest.fixture(autouse=True)
def quick_pulse(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody waits a second for each pulse."""
    monkeypatch.setattr(link_module, "HEARTBEAT_S", 0.1)


class Standing(Owner):
    """Its link's thread stands still from the first pulse on, as one that gets no processor."""

    def __init__(self) -> None:
        super().__init__()
        self.may_go_on = threading.Event()

    def on_pulse(self) -> None:
        super().on_pulse()
        assert self.may_go_on.wait(WAIT_S_MAX)


class Taker:
    """Takes what it is asked for out of a link, whatever the link's thread does."""

    def __init__(self, link: Link, kind: type) -> None:
        self._link = link
        self._kind = kind
        self.taken: list[m.Message] = []

    def has(self, count: int) -> bool:
        """Whether so many have come."""
        self._link.read_now(self._take)
        return len(self.taken) >= count

    def _take(self, message: m.Message) -> bool:
        if isinstance(message, self._kind):
            self.taken.append(message)
        return isinstance(message, self._kind)


def test_who_needs_an_answer_reads_it_though_the_links_thread_stands_still(
    running_node: NodeProcess, make_link: MakeLink
) -> None:
    owner = Standing()
    link = make_link(owner, running_node.places)
    owner.wait("pulse")
    taker = Taker(link, m.Pong)
    for _ in range(100):
        assert link.send(m.Ping())
    try:
        wait_until(lambda: taker.has(100), "the answers were not read")
    finally:
        owner.may_go_on.set()
    wait_until(lambda: link.send(m.Ping()), "it takes nothing any more")
    assert not owner.of("down")


class Scene(NamedTuple):
    """A link whose thread stands still, its owner, and the other end of its connection."""

    owner: Standing
    link: Link
    sock: socket.socket


def welcome(sock: socket.socket, pidfd: int) -> None:
    """Take a connection, as the node of this pidfd, which is closed."""
    socket.send_fds(sock, [encode(m.Welcome(1, b"node", os.getpid(), 1), 1)], [pidfd])
    os.close(pidfd)


@contextmanager
def standing(places: Places, make_link: MakeLink, node_pidfd: int = -1) -> Iterator[Scene]:
    """Inside, the link's thread stands still, unless it is told to go on.

    The node is this process, or the one of the pidfd, which is closed.
    """
    owner = Standing()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(places.socket))
        listener.listen()
        link = make_link(owner, places)
        sock, _ = listener.accept()
    with sock:
        welcome(sock, node_pidfd if node_pidfd >= 0 else os.pidfd_open(os.getpid()))
        owner.wait("pulse")
        try:
            yield Scene(owner, link, sock)
        finally:
            owner.may_go_on.set()


def test_what_is_not_for_the_reader_is_left_to_the_links_thread_in_order(
    runtime_dir: Path, make_link: MakeLink
) -> None:
    """Descriptors with it: whoever reads for an answer knows nothing of regions."""
    before = len(os.listdir("/proc/self/fd"))
    match = m.Match(1, 0, 0, [], 0)
    others: list[m.Message] = [m.Serving(), m.RegionOffer(1, 1, 4096), m.Serving("off", "why")]
    with standing(Places(runtime_dir), make_link) as (owner, link, sock):
        taker = Taker(link, m.Match)
        read, write = os.pipe()
        sock.sendall(encode(others[0]) + encode(match))
        socket.send_fds(sock, [encode(others[1], 2) + encode(match)], [read, write])
        sock.sendall(encode(others[2]) + encode(match)[:5])
        os.close(read)
        os.close(write)
        wait_until(lambda: taker.has(2), "the answers were not read")
        assert not owner.of("message")
        owner.may_go_on.set()
        assert owner.wait("message", 3) == others
        sock.sendall(encode(match)[5:])
        assert owner.wait("message", 4)[3] == match
    link.close(5)
    assert len(os.listdir("/proc/self/fd")) == before, "a descriptor is left"


@pytest.mark.parametrize("nonsense", [b"\xff" * 100, b""], ids=["nonsense", "its end"])
def test_end_of_a_connection_that_a_reader_meets_is_left_to_the_links_thread(
    runtime_dir: Path, make_link: MakeLink, nonsense: bytes
) -> None:
    with standing(Places(runtime_dir), make_link) as (owner, link, sock):
        taker = Taker(link, m.Match)
        sock.sendall(encode(m.Match(1, 0, 0, [], 0)) + nonsense)
        if not nonsense:
            sock.close()
        wait_until(lambda: taker.has(1), "the answer was not read")
        for _ in range(3):
            assert not taker.has(2)
        assert not owner.of("down")
        owner.may_go_on.set()
        assert owner.wait("down") == [False]
    link.close(5)
    assert not taker.has(2)


def last_pulse(owner: Standing, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the link's thread go on, and not look around by itself any more."""
    monkeypatch.setattr(link_module, "HEARTBEAT_S", 3600.0)
    owner.may_go_on.set()
    owner.wait("pulse", 2)


def test_who_reads_answers_itself_does_not_wake_the_links_thread(
    runtime_dir: Path, make_link: MakeLink, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has the socket to itself while the link's thread sleeps: until its next pulse."""
    match = m.Match(1, 0, 0, [], 0)
    with standing(Places(runtime_dir), make_link) as (owner, link, sock):
        taker = Taker(link, m.Match)
        last_pulse(owner, monkeypatch)
        link.leave_reading(True)
        for number in range(1, 20):
            sock.sendall(encode(match))
            wait_until(partial(taker.has, number), "the answer was not read")
        assert not owner.of("message"), "the link's thread was quicker"
        link.leave_reading(False)
        sock.sendall(encode(match))
        assert owner.wait("message") == [match]


def test_what_nobody_reads_is_read_at_the_next_pulse(
    runtime_dir: Path, make_link: MakeLink
) -> None:
    """Whoever wanted to read it may have no time."""
    with standing(Places(runtime_dir), make_link) as (owner, link, sock):
        owner.may_go_on.set()
        owner.wait("pulse", 2)
        link.leave_reading(True)
        sock.sendall(encode(m.Serving()))
        assert owner.wait("message", timeout_s=5) == [m.Serving()]
        owner.wait("pulse", 3)


@pytest.mark.parametrize("wait_s", [0.0, 20.0])
def test_an_answer_is_waited_for_by_whoever_needs_it(
    runtime_dir: Path, make_link: MakeLink, wait_s: float
) -> None:
    """What else comes is left to the link's thread; and the wait ends with the answer."""
    match = m.Match(1, 0, 0, [], 0)
    with standing(Places(runtime_dir), make_link) as (owner, link, sock):
        taken: list[m.Message] = []
        has_returned = threading.Event()

        def take(message: m.Message) -> bool:
            if isinstance(message, m.Match):
                taken.append(message)
            return isinstance(message, m.Match)

        def say() -> None:
            sock.sendall(encode(m.Serving()))
            has_returned.wait(0.05 if wait_s else WAIT_S_MAX)
            sock.sendall(encode(match))

        node = threading.Thread(target=say)
        node.start()
        began_s = time.monotonic()
        link.read_now(take, wait_s)
        took_s = time.monotonic() - began_s
        has_returned.set()
        node.join()
        assert took_s < WAIT_S_MAX / 2
        assert taken == ([match] if wait_s else [])
        owner.may_go_on.set()
        assert owner.wait("message")[0] == m.Serving()


def test_a_dead_nodes_last_words_are_read_though_others_wanted_to(
    runtime_dir: Path, make_link: MakeLink
) -> None:
    with subprocess.Popen(["sleep", "60"]) as node:
        pidfd = os.pidfd_open(node.pid)
        with standing(Places(runtime_dir), make_link, pidfd) as (owner, link, sock):
            owner.may_go_on.set()
            owner.wait("pulse", 2)
            link.leave_reading(True)
            sock.sendall(encode(m.Serving()))
            node.kill()
            assert owner.wait("message", timeout_s=5) == [m.Serving()]
            assert owner.wait("down", timeout_s=5) == [True]


def test_many_messages_go_out_in_one_piece(runtime_dir: Path, make_link: MakeLink) -> None:
    """The node wakes once for all; what the outbox has no room for is not sent, and said."""
    with standing(Places(runtime_dir), make_link) as (_, link, sock):
        answers = [m.Stored(number, True) for number in range(50)]
        sock.setblocking(False)
        with suppress(BlockingIOError):
            while sock.recv(1 << 20):  # the hello, and a ping
                pass
        assert link.send_all(answers) == 50
        assert sock.recv(1 << 20) == b"".join(map(encode, answers))
        large = [m.Command("x" * (3 << 20)) for _ in range(8)]
        assert 0 < link.send_all(large) < 8


def test_all_that_has_come_is_read(runtime_dir: Path, make_link: MakeLink) -> None:
    """However much it is: the link's thread leaves all of it to whoever reads."""
    match = m.Match(1, 0, 0, [m.Run(1, 0, 4, 5)] * 100, 0)
    count = 2 * RECEIVE_BYTES // len(encode(match))
    with standing(Places(runtime_dir), make_link) as (_, link, sock):
        taker = Taker(link, m.Match)
        sock.sendall(encode(match) * count)
        assert taker.has(count)


def test_nonsense_that_a_reader_meets_ends_the_connection_at_once(
    runtime_dir: Path, make_link: MakeLink, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though the link's thread sleeps, and the kernel has nothing more to wake it for."""
    monkeypatch.setattr(breaker, "HEARTBEAT_S", 3600.0)
    with standing(Places(runtime_dir), make_link) as (owner, link, sock):
        last_pulse(owner, monkeypatch)
        link.leave_reading(True)
        sock.sendall(b"\xff" * 100)
        taker = Taker(link, m.Match)
        wait_until(lambda: taker.has(1) or bool(owner.of("down")), "it is not ended")


def test_words_of_a_dead_node_that_another_thread_has_read_are_handed_over(
    runtime_dir: Path, make_link: MakeLink
) -> None:
    """It reads them just before the link's thread hears of the death."""
    with subprocess.Popen(["sleep", "60"]) as node:
        pidfd = os.pidfd_open(node.pid)
        with standing(Places(runtime_dir), make_link, pidfd) as (owner, link, sock):
            channel, sleep = link._channel, link._channel.watch

            def read_and_die() -> None:
                """As the link's thread is about to sleep."""
                channel.watch = sleep  # type: ignore[method-assign]
                sock.sendall(encode(m.Serving()))
                assert not Taker(link, m.Match).has(1)
                node.kill()
                node.wait()
                channel.clear_wake()  # it has looked around already, or will be late
                sleep()

            channel.watch = read_and_die  # type: ignore[method-assign]
            owner.may_go_on.set()
            assert owner.wait("down") == [True]
            assert owner.of("message") == [m.Serving()]


def test_a_reader_waits_for_the_links_thread_that_is_reading(
    runtime_dir: Path, make_link: MakeLink
) -> None:
    """What that hands over may be the answer; and if it is not, there is time left to read."""
    with standing(Places(runtime_dir), make_link) as (owner, link, sock):
        is_reading, may_end = threading.Event(), threading.Event()

        def on_message(message: m.Message, descriptors: list[int]) -> None:
            is_reading.set()
            assert may_end.wait(WAIT_S_MAX)
            Owner.on_message(owner, message, descriptors)

        owner.on_message = on_message  # type: ignore[method-assign]
        owner.may_go_on.set()
        sock.sendall(encode(m.Serving()))
        assert is_reading.wait(WAIT_S_MAX)
        link.read_now(lambda _: False, 0.01)
        assert not owner.of("message"), "it was let finish"
        threading.Timer(0.05, may_end.set).start()
        link.read_now(lambda _: False, WAIT_S_MAX)
        assert owner.of("message") == [m.Serving()]


def test_a_reader_waits_no_longer_than_it_may(runtime_dir: Path, make_link: MakeLink) -> None:
    """The kernel waits whole milliseconds, and rounds up: a step's last tenth is not one."""
    with standing(Places(runtime_dir), make_link) as (_, link, _):
        waits_s = []
        for _ in range(50):
            began_s = time.monotonic()
            link.read_now(lambda _: False, 0.0001)
            waits_s.append(time.monotonic() - began_s)
        assert min(waits_s) < 0.001


def test_reading_that_was_left_while_nobody_was_there_is_taken_up(
    runtime_dir: Path, make_link: MakeLink, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a step that did not know yet: else the new connection's first words lay there."""
    monkeypatch.setattr(link_module, "HEARTBEAT_S", 3600.0)
    places, owner = Places(runtime_dir), Owner()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(places.socket))
        listener.listen()
        link = make_link(owner, places)
        for count in (1, 2):
            sock, _ = listener.accept()
            with sock:
                welcome(sock, os.pidfd_open(os.getpid()))
                owner.wait("up", count)
                sock.sendall(encode(m.Serving()))
                owner.wait("message", count, timeout_s=5)
            owner.wait("down", count)
            link.leave_reading(True)
    link.close(5)
