"""A link whose own thread is late: whoever needs an answer reads it, and nothing gets lost."""

import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import pytest

from kvtide.core import messages as m
from kvtide.testing.node_process import NodeProcess
from kvtide.wire.frames import encode
from kvtide.wire.link import Link
from kvtide.wire.places import Places
from tests.wire.link_owner import WAIT_S_MAX, MakeLink, Owner, wait_until


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


@contextmanager
def standing(places: Places, make_link: MakeLink) -> Iterator[Scene]:
    """Inside, the link's thread stands still, unless it is told to go on."""
    owner = Standing()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(places.socket))
        listener.listen()
        link = make_link(owner, places)
        sock, _ = listener.accept()
    with sock:
        pidfd = os.pidfd_open(os.getpid())
        socket.send_fds(sock, [encode(m.Welcome(1, b"node", os.getpid(), 1), 1)], [pidfd])
        os.close(pidfd)
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
