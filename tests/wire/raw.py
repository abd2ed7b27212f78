"""A peer without `Link`: says exactly what the test wants, well-formed or not."""

import os
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvtide.core import messages as m
from kvtide.wire.frames import FrameReader, encode, receive
from kvtide.wire.places import Places

ANSWER_S_MAX = 20.0


class RawPeer:
    """One connection."""

    def __init__(self, places: Places) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        try:
            self.sock.connect(str(places.socket))  # waits while the node's queue is full
        except OSError:
            self.sock.close()
            raise
        self.sock.settimeout(ANSWER_S_MAX)
        self._reader = FrameReader()
        self._arrived: list[m.Message] = []

    def __enter__(self) -> "RawPeer":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the connection."""
        self._reader.close()
        self.sock.close()

    def send(self, message: m.Message, descriptors: Sequence[int] = ()) -> None:
        """Send a message with descriptors."""
        self.send_bytes(encode(message, len(descriptors)), descriptors)

    def send_bytes(self, data: bytes, descriptors: Sequence[int] = ()) -> None:
        """Send anything."""
        sent = socket.send_fds(self.sock, [data], list(descriptors)) if descriptors else 0
        if sent < len(data):
            self.sock.sendall(data[sent:])

    def hello(self, message: m.Message) -> None:
        """Send a hello with a pidfd of this process."""
        pidfd = os.pidfd_open(os.getpid())
        try:
            self.send(message, [pidfd])
        finally:
            os.close(pidfd)

    def receive(self) -> m.Message | None:
        """The next message; None at the end of the stream. Descriptors are closed."""
        while not self._arrived:
            data, descriptors = receive(self.sock)
            if not data:
                return None
            for message, own in self._reader.feed(data, descriptors):
                for descriptor in own:
                    os.close(descriptor)
                self._arrived.append(message)
        return self._arrived.pop(0)

    def is_alive(self) -> bool:
        """Whether the node still answers here."""
        try:
            self.send(m.Ping())
            return isinstance(self.receive(), m.Pong)
        except OSError:
            return False

    def is_closed(self) -> bool:
        """Whether the node ends the connection, whatever it says before."""
        try:
            while self.receive() is not None:
                pass
        except ConnectionError:
            pass
        return True


def scheduler_hello(engine_id: str = "raw", **changes: Any) -> m.SchedulerHello:
    """What a scheduler says first."""
    fields: dict[str, Any] = {
        "wire_version": m.WIRE_VERSION,
        "version": "0",
        "engine_id": engine_id,
        "incarnation": b"a life",
        "pid": os.getpid(),
        "label": "a raw peer",
        "worker_count": 1,
    }
    return m.SchedulerHello(**(fields | changes))


def worker_hello(engine_id: str = "raw", **changes: Any) -> m.WorkerHello:
    """What a worker says first."""
    fields: dict[str, Any] = {
        "wire_version": m.WIRE_VERSION,
        "engine_id": engine_id,
        "incarnation": b"a worker's life",
        "pid": os.getpid(),
        "rank": 0,
        "shard": 0,
        "shard_count": 1,
        "is_writer": True,
        "cell_bytes": 4096,
        "facts": {},
        "grants_held": [],
        "regions_mapped": [],
        "node": b"",
    }
    return m.WorkerHello(**(fields | changes))


def descriptor_count(pid: int) -> int:
    """Open descriptors of a process."""
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))
