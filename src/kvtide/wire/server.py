"""The node's side of the socket: accepts, reads, writes; decides nothing.

Raw non-blocking sockets in the owner's event loop, since asyncio's transports carry no
descriptors. A connection whose peer is another user, sends nonsense, or does not read what it is
sent loses that connection and nothing else; a good-bye that it said behind that is heard.

Ownership: everything here belongs to the thread of the loop.
"""

import asyncio
import contextlib
import os
import socket
from collections.abc import Callable
from pathlib import Path

from kvtide.core.messages import Bye, Message
from kvtide.errors import WireError, reason_of
from kvtide.wire.frames import FrameReader, Outbox, close_all, encode, receive
from kvtide.wire.peer import Peer, peer_of
from kvtide.wire.places import check_socket_path

CONNECTIONS_MAX = 4096
"""Each holds up to three descriptors and a reader's bytes: engines of a machine have hundreds."""
WAITING_MAX = 1024
"""Peers that may wait to be accepted; the workers of a large engine come all at once."""
ACCEPT_PAUSE_S = 1.0
"""When none can be accepted (no descriptors are left), it is tried again so much later."""
READS_MAX = 64
"""Of a dead peer's socket, which some child of it might keep open and write to."""
OUTBOX_BYTES_MAX = 64 << 20
"""Of one peer that does not read; it loses the connection then, and the node no memory."""


class Connection:
    """One accepted peer; deaf once it takes nothing more, though it may have said something."""

    def __init__(self, number: int, sock: socket.socket, peer_pid: int) -> None:
        self.number = number
        self.sock = sock
        self.peer_pid = peer_pid
        self.reader = FrameReader()
        self.outbox = Outbox(OUTBOX_BYTES_MAX)
        self.is_closing = False
        self.is_deaf = False


class Server:
    """Listens on one path and hands over whole messages."""

    def __init__(
        self,
        on_message: Callable[[Connection, Message, list[int]], None],
        on_closed: Callable[[int], None],
        on_refused: Callable[[str], None],
    ) -> None:
        self._on_message = on_message
        self._on_closed = on_closed
        self._on_refused = on_refused
        self._connections: dict[int, Connection] = {}
        self._next_number = 1
        self._listener: socket.socket | None = None
        self._loop = asyncio.get_running_loop()

    def listen(self, path: Path) -> None:
        """Open the socket, for this user alone. The caller holds the lock that makes it ours."""
        check_socket_path(path)
        path.unlink(missing_ok=True)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        listener.bind(str(path))
        path.chmod(0o600)
        listener.listen(WAITING_MAX)
        self._listener = listener
        self._loop.add_reader(listener, self._accept)

    def _accept(self) -> None:
        assert self._listener is not None
        try:
            sock, _ = self._listener.accept()
        except BlockingIOError:
            return
        except OSError as error:
            # It would be ready at once again: the loop must not spin, nor the log fill.
            self._on_refused(f"a connection could not be accepted: {reason_of(error)}")
            self._loop.remove_reader(self._listener)
            self._loop.call_later(ACCEPT_PAUSE_S, self._accept_again)
            return
        sock.setblocking(False)
        peer = peer_of(sock)
        if fault := self._refusal(peer):
            self._on_refused(
                f"process {peer.pid} of user {peer.uid} was refused a connection: {fault}"
            )
            sock.close()
            return
        connection = Connection(self._next_number, sock, peer.pid)
        self._next_number += 1
        self._connections[connection.number] = connection
        self._loop.add_reader(sock, self._readable, connection)

    def _refusal(self, peer: Peer) -> str:
        """Why this peer gets no connection; empty where it does."""
        if peer.uid != os.getuid():
            return f"this node serves user {os.getuid()} alone; start one of that user's"
        if len(self._connections) >= CONNECTIONS_MAX:
            return f"{CONNECTIONS_MAX} are open, as many as are taken; end engines"
        return ""

    def _accept_again(self) -> None:
        if self._listener is not None:
            self._loop.add_reader(self._listener, self._accept)

    def _readable(self, connection: Connection) -> None:
        try:
            data, descriptors = receive(connection.sock)
            if not data:
                close_all(descriptors)
                self.drop(connection.number)
                return
            for message, own in connection.reader.feed(data, descriptors):
                if connection.is_closing and not isinstance(message, Bye):
                    close_all(own)
                else:
                    self._on_message(connection, message, own)
        except BlockingIOError:
            return
        except WireError as error:
            self._end(connection.number, str(error))
        except OSError:
            self.drop(connection.number)

    def read_rest(self, number: int) -> None:
        """Take in what a process sent before it died; its connection is over then."""
        for _ in range(READS_MAX):
            connection = self._connections.get(number)
            if connection is None:
                return
            self._readable(connection)
        self.drop(number)

    def send(self, number: int, message: Message, descriptors: list[int] | None = None) -> None:
        """Send, or queue until the peer reads; a peer that never does loses the connection.

        So does one to which this cannot be said: facts too large for one frame, say.
        """
        connection = self._connections.get(number)
        if connection is None or connection.is_closing or connection.is_deaf:
            return
        own = descriptors or []
        fault = "its peer does not read"
        try:
            if connection.outbox.add(encode(message, len(own)), own):
                self._flush(connection)
                return
        except (WireError, OSError) as error:
            fault = str(error)
        self._end(number, fault)

    def _flush(self, connection: Connection) -> None:
        try:
            connection.outbox.flush(connection.sock)
        except ConnectionError:
            # It has closed; what it said before, a good-bye or its last answers, is still to read.
            connection.is_deaf = True
            connection.outbox.close()
        except OSError as error:
            # No buffers, or too many descriptors on their way. The peer lives: it comes back, and
            # is told anew what it did not get.
            self._end(connection.number, str(error))
            return
        if connection.outbox:
            self._loop.add_writer(connection.sock, self._flush, connection)
            return
        self._loop.remove_writer(connection.sock)
        if connection.is_closing:
            self.drop(connection.number)

    def close_after_sending(self, number: int) -> None:
        """End a connection once what was sent before is out."""
        connection = self._connections.get(number)
        if connection is not None:
            connection.is_closing = True
            self._flush(connection)

    def _end(self, number: int, fault: str) -> None:
        """End a connection for a fault, and say so."""
        self._on_refused(f"connection {number} is closed: {fault}")
        self.drop(number)

    def drop(self, number: int) -> None:
        """End a connection now; a good-bye in it that was not read yet is heard all the same."""
        connection = self._connections.pop(number, None)
        if connection is None:
            return
        self._loop.remove_reader(connection.sock)
        self._loop.remove_writer(connection.sock)
        says_bye = _says_bye(connection)
        connection.sock.close()
        connection.reader.close()
        connection.outbox.close()
        self._on_closed(number)
        if says_bye:  # not now: whoever drops a connection may be in the midst of something
            self._loop.call_soon(self._on_message, connection, Bye(), [])

    def broadcast(self, message: Message) -> None:
        """Send to everybody."""
        for number in list(self._connections):
            self.send(number, message)

    def close(self) -> None:
        """Stop listening and end all connections."""
        if self._listener is not None:
            self._loop.remove_reader(self._listener)
            self._listener.close()
            self._listener = None
        for number in list(self._connections):
            self.drop(number)


def _says_bye(connection: Connection) -> bool:
    """Whether a good-bye stands in what has come and was not read; nothing more can come then.

    Its peer believes it said, and may live on: then nothing else would ever tell that it has gone.
    """
    data: bytes = b""
    descriptors: list[int] = []
    with contextlib.suppress(OSError, WireError):
        connection.sock.shutdown(socket.SHUT_RD)
        while True:
            for message, own in connection.reader.feed(data, descriptors):
                close_all(own)
                if isinstance(message, Bye):
                    return True
            data, descriptors = receive(connection.sock)
            if not data:
                close_all(descriptors)
                break
    return False
