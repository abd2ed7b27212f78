"""The edge of an InfiniStore server: its frames on a socket, and what would have ended it.

    faults    what a client did that the real one does not survive
              (docs/decisions/infinistore-by-its-protocol.md)

For quick tests, and for disturbances that the real server cannot be made to show; whether the tier
keeps its promises, the real one decides. Tables are read by their own offsets, not by the shape
that ours have.
"""

import select
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

HEAD = struct.Struct("<IcI")
PIECE_BYTES = 64 * 1024
ENDED = (ConnectionError, EOFError)


class Edge:
    """Listens on a port of its own, on loopback; `values` by name, None while one comes."""

    def __init__(self) -> None:
        self.values: dict[bytes, bytes | None] = {}
        self.faults: list[str] = []
        self.room_bytes = 1 << 40
        """A put that is longer than this finds no room."""
        self.passes = threading.Event()
        self.passes.set()
        """While it is not set, nothing is answered."""
        self.drips = False
        """Whether of each value only the first half is sent until it is not set any more."""
        self.cuts = False
        """Whether a connection ends inside the value that is put."""
        self.port = 0
        self._sockets: set[socket.socket] = set()
        self.start()

    def start(self) -> None:
        """On the same port as before."""
        self._listener = socket.create_server(("127.0.0.1", self.port))
        self.port = self._listener.getsockname()[1]
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self._thread.start()

    def kill(self) -> None:
        """With all it holds."""
        self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._listener.close()
        self.values.clear()
        self.cut()

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """Within it nobody answers, and nobody has gone."""
        self.passes.clear()
        try:
            yield
        finally:
            self.passes.set()

    def cut(self) -> None:
        """All connections end."""
        for one in list(self._sockets):
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.passes.set()
        self.kill()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                one = self._listener.accept()[0]
                self._sockets.add(one)
                threading.Thread(target=self._serve, args=(one,), daemon=True).start()

    def _serve(self, one: socket.socket) -> None:
        with suppress(*ENDED, OSError), one:
            while True:
                magic, operation, length = HEAD.unpack(_exactly(one, HEAD.size))
                if magic != 0xDEADBEEF:
                    return
                body = _exactly(one, length)
                self.passes.wait()
                self._answer(one, operation, body)

    def _answer(self, one: socket.socket, operation: bytes, body: bytes) -> None:
        if operation == b"C":
            one.sendall(struct.pack("<ii", 200, body not in self.values))
        elif operation == b"X":
            names = read_names(body)
            self.faults += [f"removed in part: {n!r}" for n in names if self._is_coming(n)]
            count = sum(self.values.pop(name, b"") != b"" for name in names)
            one.sendall(struct.pack("<ii", 200, count))
        else:
            name, value_bytes, asked = read_payload(body)
            (self._put if asked == b"P" else self._get)(one, name, value_bytes)

    def _put(self, one: socket.socket, name: bytes, length: int) -> None:
        if length > self.room_bytes:
            one.sendall(struct.pack("<i", 507))  # and goes on to read the value as an ask
            return
        self.values[name] = None
        if self.cuts:
            _exactly(one, length // 2)
            raise EOFError
        self.values[name] = _exactly(one, length)
        one.sendall(struct.pack("<i", 200))

    def _get(self, one: socket.socket, name: bytes, _: int) -> None:
        if self._is_coming(name):
            self.faults.append(f"got in part: {name!r}")
        value = self.values.get(name)
        if value is None:
            one.sendall(struct.pack("<i", 404))
            return
        half = len(value) // 2
        try:
            one.sendall(struct.pack("<iI", 200, len(value)) + value[:half])
            while self.drips:
                if select.select([one], [], [], 0.005)[0]:  # it asks, or ends: it must not
                    raise EOFError
            one.sendall(value[half:])
        except ENDED:
            self.faults.append("asked or ended inside a value")
            raise

    def _is_coming(self, name: bytes) -> bool:
        return name in self.values and self.values[name] is None


@contextmanager
def edge() -> Iterator[Edge]:
    """One, from start to end."""
    one = Edge()
    try:
        yield one
    finally:
        one.close()


def _exactly(one: socket.socket, length: int) -> bytes:
    content = bytearray()
    while len(content) < length:
        piece = one.recv(min(PIECE_BYTES, length - len(content)))
        if not piece:
            raise EOFError
        content += piece
    return bytes(content)


def _field(body: bytes, number: int) -> int:
    """Where a field of the root table is, as the format says."""
    (table,) = struct.unpack_from("<I", body)
    (back,) = struct.unpack_from("<i", body, table)
    (offset,) = struct.unpack_from("<H", body, table - back + 4 + 2 * number)
    assert offset, number
    return int(table + offset)


def _string(body: bytes, at: int) -> bytes:
    (offset,) = struct.unpack_from("<I", body, at)
    (length,) = struct.unpack_from("<I", body, at + offset)
    text = body[at + offset + 4 :][: length + 1]
    assert text[-1:] == b"\0", text
    return text[:-1]


def read_payload(body: bytes) -> tuple[bytes, int, bytes]:
    name = _string(body, _field(body, 0))
    (length,) = struct.unpack_from("<i", body, _field(body, 1))
    at = _field(body, 2)
    return name, length, body[at : at + 1]


def read_names(body: bytes) -> list[bytes]:
    at = _field(body, 0)
    at += struct.unpack_from("<I", body, at)[0]
    (count,) = struct.unpack_from("<I", body, at)
    return [_string(body, at + 4 * number) for number in range(1, count + 1)]
