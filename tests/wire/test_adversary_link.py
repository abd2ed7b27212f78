"""Attacks of the second round on the link."""

import errno
import os
import socket
import time
from pathlib import Path

import pytest

from kvtide.wire import link as link_module
from kvtide.wire.places import open_directory
from tests.wire.link_owner import Owner


def test_a_link_outlives_a_moment_without_descriptors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """EMFILE at a (re)connection must cost that attempt, not the link's thread for ever."""
    directory = tmp_path / "run"
    directory.mkdir(mode=0o700)
    real, left = socket.socket, [1]

    def no_descriptors(*arguments: object, **more: object) -> socket.socket:
        if left[0]:
            left[0] -= 1
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return real(*arguments, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(link_module.socket, "socket", no_descriptors)
    owner = Owner()
    link = owner.link(open_directory(directory))
    try:
        time.sleep(0.5)
        assert link._thread.is_alive(), "the link's thread has ended; nothing ever reconnects"
        owner.wait("absent", timeout_s=3)
    finally:
        link.close(1.0)
