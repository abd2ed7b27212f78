"""Who listens: to another user nothing is said."""

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtide.errors import WireError
from kvtide.wire.command import ask
from kvtide.wire.peer import check_own, peer_of
from kvtide.wire.places import Places
from tests.wire.link_owner import Owner


@pytest.fixture
def listener(runtime_dir: Path) -> Iterator[socket.socket]:
    """Somebody in the node's place."""
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind(str(Places(runtime_dir).socket))
        sock.listen()
        sock.settimeout(10)
        yield sock


@pytest.fixture
def another_user(monkeypatch: pytest.MonkeyPatch) -> None:
    """We are another user than whoever listens."""
    uid = os.getuid() + 1
    monkeypatch.setattr(os, "getuid", lambda: uid)


def said_to(listener: socket.socket) -> bytes:
    """All that the next one to connect says."""
    sock, _ = listener.accept()
    with sock:
        sock.settimeout(10)
        return sock.recv(1 << 16)


def test_peer_is_who_listens(listener: socket.socket) -> None:
    with socket.socket(socket.AF_UNIX) as sock:
        sock.connect(listener.getsockname())
        peer = check_own(sock)
        assert peer == peer_of(sock)
        assert (peer.pid, peer.uid) == (os.getpid(), os.getuid())


@pytest.mark.usefixtures("another_user")
def test_command_is_not_given_to_another_user(listener: socket.socket, runtime_dir: Path) -> None:
    with pytest.raises(WireError, match=r"listens in place of a node of user \d+; remove its"):
        ask(Places(runtime_dir), "status")
    assert said_to(listener) == b""


@pytest.mark.usefixtures("another_user")
def test_hello_is_not_given_to_another_user(listener: socket.socket, runtime_dir: Path) -> None:
    """Nor is it taken for nobody, which would start a node in a directory that is not ours."""
    owner = Owner()
    link = owner.link(Places(runtime_dir))
    try:
        assert said_to(listener) == b""
        assert said_to(listener) == b"", "it is asked again"
    finally:
        link.close(5)
    assert not owner.calls
