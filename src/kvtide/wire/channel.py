"""One connection to the node, as all threads of an engine's process use it.

Any thread sends, without waiting, and may read: the link's thread may be late, since its engine
computes on processors that have no time for anybody else. And where it is in time, it takes the
interpreter and a processor from the engine. So a thread of the engine that asks reads the answers
itself (`read_now`), and the link's thread leaves the socket to it meanwhile (`leave_reading`).

Ownership
    opening, ending                           the link's thread
    reader, what others have left for it      under `_reading`, for which only the link's thread
                                              waits; held while what was read is handed over
    outbox, descriptor that wakes the thread,
    what of the socket it is woken by         any thread, under `_lock`; flushed without waiting
"""

import contextlib
import logging
import os
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence

from kvtide.core.messages import Message
from kvtide.errors import WireError
from kvtide.wire.frames import (
    RECEIVE_BYTES,
    FrameReader,
    Outbox,
    close_all,
    encode,
    receive,
)

logger = logging.getLogger("kvtide.wire")

OUTBOX_BYTES_MAX = 16 << 20
"""Of one engine's process, to a node that does not read: what does not fit is not sent."""


class Channel:
    """The connection that a link has, or none."""

    def __init__(self, heard: Callable[[], None]) -> None:
        """`heard` is called, by any thread, whenever the node has said something."""
        self._heard = heard
        self._lock = threading.Lock()
        self._outbox = Outbox(OUTBOX_BYTES_MAX)
        self._sock: socket.socket | None = None
        self._poll: select.epoll | None = None
        self._watched = 0
        """The events of the socket that wake the link's thread."""
        self._others_read = False
        self._reading = threading.Lock()
        self._reader: FrameReader | None = None
        self._left: deque[tuple[Message, list[int]]] = deque()
        """What others have read, and was not for them."""
        self.wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        """Readable when the link's thread shall look around; -1 at the end."""

    # ---- any thread

    @property
    def is_open(self) -> bool:
        """There is a connection that the node has taken."""
        return self._sock is not None

    @property
    def is_idle(self) -> bool:
        """Nothing waits to be sent."""
        return not self._outbox

    @property
    def others_read(self) -> bool:
        """Whether the link's thread leaves what comes to others, who read it."""
        return self._others_read

    def send_all(self, messages: Sequence[Message]) -> int:
        """Send in one piece, which wakes the node once; how many, from the first, can be sent."""
        frames: list[bytes] = []
        try:
            frames.extend(map(encode, messages))
        except WireError as error:
            logger.warning("kvtide: not sent: %s", error)
        with self._lock:
            if self._sock is None:
                return 0
            taken = 0
            while taken < len(frames) and self._outbox.add(frames[taken], []):
                taken += 1
            with contextlib.suppress(OSError):  # the link's thread meets the same
                self._outbox.flush(self._sock)
            if self._outbox:
                self._wake()
        return taken

    def leave_reading(self, others_read: bool) -> None:
        """Say whether the caller's thread reads what comes next, by `read_now`, and soon."""
        if others_read != self._others_read:
            with self._lock:
                self._others_read = others_read
                self._watch()

    def read_now(self, take: Callable[[Message], bool], wait_s: float = 0.0) -> None:
        """Read what has come, or comes within `wait_s`, until `take` has taken a message.

        `take` says of each message whether it was for the caller; the others are left to the
        link's thread, and so is whatever ends the connection. Where that thread hands over just
        now, it is waited for instead, and what it handed over may be what the caller wants.
        """
        if not self._reading.acquire(blocking=False):
            if self._reading.acquire(timeout=wait_s):
                self._reading.release()
            return
        try:
            if self._sock is None or self._reader is None:
                return
            try:
                self._read_for(take, self._sock, wait_s)
            except (OSError, WireError):
                self.wake()  # its thread meets the same, and ends the connection
            if self._left:
                self.wake()
        finally:
            self._reading.release()

    def _read_for(
        self, take: Callable[[Message], bool], sock: socket.socket, wait_s: float
    ) -> None:
        """Under `_reading`: see `read_now`."""
        until_s = time.monotonic() + wait_s
        is_taken = False
        while True:
            for message, own in self._arrived(sock):
                if not own and take(message):
                    is_taken = True
                else:
                    self._left.append((message, own))
            wait_ms = round((until_s - time.monotonic()) * 1000)  # the kernel would round up
            if is_taken or wait_ms <= 0:
                return
            poll = select.poll()  # not `select`, which knows no descriptor above 1023
            poll.register(sock, select.POLLIN)
            poll.poll(wait_ms)

    def _arrived(self, sock: socket.socket) -> Iterator[tuple[Message, list[int]]]:
        """Under `_reading`: what the kernel has now. Raises OSError at the end of the stream."""
        assert self._reader is not None
        is_more = True
        while is_more:
            try:
                data, descriptors = receive(sock)
            except BlockingIOError:
                return  # another thread was quicker
            if not data:
                raise ConnectionResetError("the node has closed it")
            self._heard()
            is_more = len(data) == RECEIVE_BYTES
            yield from self._reader.feed(data, descriptors)

    def wake(self) -> None:
        """Have the link's thread look around."""
        with self._lock:
            self._wake()

    def _wake(self) -> None:
        if self.wake_fd >= 0:
            with contextlib.suppress(BlockingIOError):
                os.eventfd_write(self.wake_fd, 1)

    def _watch(self) -> None:
        """Under the lock: what there is to do at the socket wakes the link's thread."""
        events = 0 if self._others_read else select.EPOLLIN
        if self._outbox:
            events |= select.EPOLLOUT
        if self._poll is not None and self._sock is not None and events != self._watched:
            self._poll.modify(self._sock, events)
            self._watched = events

    # ---- the link's thread

    def clear_wake(self) -> None:
        """It looks around now."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self.wake_fd)

    def close(self) -> None:
        """Nobody is to be woken any more; again changes nothing."""
        with self._lock:
            if self.wake_fd >= 0:
                os.close(self.wake_fd)
                self.wake_fd = -1

    def open(self, sock: socket.socket) -> None:
        """The node has taken this connection: it can be sent to."""
        sock.setblocking(False)
        with self._lock:
            self._sock = sock

    @contextlib.contextmanager
    def watched(self, sock: socket.socket, reader: FrameReader) -> Iterator[select.epoll]:
        """Inside, it can be read, and what it is woken by goes by what there is to do."""
        with select.epoll() as poll:
            poll.register(self.wake_fd, select.EPOLLIN)
            poll.register(sock, 0)
            with self._reading:
                self._reader = reader
            with self._lock:
                self._poll, self._watched, self._others_read = poll, 0, False
            try:
                yield poll
            finally:
                with self._lock:
                    self._poll = None

    def watch(self) -> None:
        """Before it sleeps: see what there is to wake for."""
        with self._lock:
            self._watch()

    def flush(self) -> None:
        """Send what waits, as far as the socket takes it. Raises OSError when the peer is gone."""
        with self._lock:
            if self._sock is not None:
                self._outbox.flush(self._sock)

    def take_left(self, take: Callable[[Message, list[int]], None]) -> None:
        """Hand over what other threads have left, and what came with the greeting."""
        with self._reading:
            assert self._reader is not None
            self._hand_over(self._reader.feed(b"", []), take)

    def take_arrived(self, take: Callable[[Message, list[int]], None]) -> None:
        """Hand over what other threads have left, then what the kernel has now.

        Raises OSError at the end of the stream.
        """
        with self._reading:
            assert self._sock is not None
            self._hand_over(self._arrived(self._sock), take)

    def _hand_over(
        self,
        arrived: Iterator[tuple[Message, list[int]]],
        take: Callable[[Message, list[int]], None],
    ) -> None:
        while self._left:
            take(*self._left.popleft())
        for message, own in arrived:
            take(message, own)

    def end(self, sock: socket.socket, reader: FrameReader) -> None:
        """Close the connection; what nobody has taken is gone."""
        with self._reading, self._lock:
            self._sock = self._reader = None
            self._outbox.close()
            while self._left:
                close_all(self._left.popleft()[1])
            reader.close()
            sock.close()
