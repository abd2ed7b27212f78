"""A TCP proxy that disturbs what passes: any server behind it becomes a bad one, none is faked.

    client ◄──► Proxy ◄──► server        delay, stall, refuse, end at byte n, throttle

Faults hold from the moment they are set, for connections that are open too. `end_after` counts the
bytes of answers of all connections together.

Ownership: one thread for each direction of each connection, and one that accepts; settings are
single attributes, read before each piece is passed on.
"""

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

PIECE_BYTES = 64 * 1024
"""Passed on at once; smaller where bytes are counted or throttled."""


class Proxy:
    """Listens on a port of its own, on loopback."""

    def __init__(self, host: str, port: int) -> None:
        """Begin to pass on to this server."""
        self.delay_s = 0.0
        """Each piece of an answer waits for so long."""
        self.bytes_per_s = 0
        """Of answers, if not 0."""
        self.end_after: int | None = None
        """So many more bytes of answers pass; then their connection ends, and each new one."""
        self.accepted = 0
        """Connections so far."""
        self.target = (host, port)
        """Where new connections are passed on to."""
        self._passes = threading.Event()
        self._passes.set()
        self._refuses = False
        self._lock = threading.Lock()
        self._sockets: set[socket.socket] = set()
        self._listen(0)

    # ---- faults

    @contextmanager
    def stalled(self) -> Iterator[None]:
        """Within it nothing passes, and nobody is told."""
        self._passes.clear()
        try:
            yield
        finally:
            self._passes.set()

    @contextmanager
    def refusing(self) -> Iterator[None]:
        """Within it every connection ends, and each new one at once."""
        self._refuses = True
        self.cut()
        try:
            yield
        finally:
            self._refuses = False

    @contextmanager
    def absent(self) -> Iterator[None]:
        """Within it every connection ends, and nobody listens."""
        self._listener.shutdown(socket.SHUT_RDWR)  # or `accept` would go on
        self._thread.join()
        self._listener.close()
        self.cut()
        try:
            yield
        finally:
            self._listen(self.port)

    def cut(self) -> None:
        """End all connections."""
        with self._lock:
            for one in self._sockets:
                with suppress(OSError):
                    one.shutdown(socket.SHUT_RDWR)

    # ---- life

    def close(self) -> None:
        """End all."""
        self._passes.set()
        self._refuses = True
        self._listener.close()
        self.cut()

    def _listen(self, port: int) -> None:
        self._listener = socket.create_server(("127.0.0.1", port))
        self.port: int = self._listener.getsockname()[1]
        self._thread = threading.Thread(target=self._accept, name="proxy", daemon=True)
        self._thread.start()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return  # closed
            self.accepted += 1
            server = None
            with suppress(OSError):
                server = socket.create_connection(self.target)
            if self._refuses or server is None:
                client.close()
                if server is not None:
                    server.close()
                continue
            with self._lock:
                self._sockets |= {client, server}
            for source, into, is_answer in ((client, server, False), (server, client, True)):
                threading.Thread(
                    target=self._pass_on, args=(source, into, is_answer), daemon=True
                ).start()

    def _pass_on(self, source: socket.socket, into: socket.socket, is_answer: bool) -> None:
        with suppress(OSError):
            into.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            while not self._refuses:
                # Who waits to be acknowledged waits for the other end, not for this one.
                source.setsockopt(socket.IPPROTO_TCP, socket.TCP_QUICKACK, 1)
                piece = source.recv(PIECE_BYTES)
                self._passes.wait()
                if not piece or (is_answer and not self._let_through(into, piece)):
                    break
                if not is_answer:
                    into.sendall(piece)
        for one in (source, into):
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
        with self._lock:
            self._sockets.discard(source)
        source.close()

    def _let_through(self, into: socket.socket, piece: bytes) -> bool:
        """Pass on a piece of an answer; whether the connection goes on."""
        time.sleep(self.delay_s)
        if self.bytes_per_s:
            time.sleep(len(piece) / self.bytes_per_s)
        with self._lock:
            if self.end_after is not None:
                piece = piece[: self.end_after]
                self.end_after -= len(piece)
        into.sendall(piece)
        return self.end_after is None or self.end_after > 0
