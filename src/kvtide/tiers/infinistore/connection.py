"""One connection to a server: asks go out as they come, answers are read in the same order.

    ask ──► owed            send returns once the kernel has all of it
    answer ──► head, rest   a value's bytes go straight to where they belong

A connection that still owes an answer is not closed where that can be helped: a server ends, with
all that it holds, when a connection ends on which it is just sending a value. It is put aside, and
read out bit by bit (`is_clear`) whenever its session has something else to do.

Ownership: one thread's; it is woken from elsewhere by the descriptor that it was given.
"""

import select
import socket
import time
from collections import deque
from collections.abc import Sequence

from kvtide.errors import PlaceFailed
from kvtide.tiers.infinistore.frames import CODE, CODES, FINISH, NUMBER, Ask
from kvtide.units import KiB

PIECES_MAX = 512
"""Of one gathered write; the kernel takes 1024."""
THROWN_BYTES = 256 * KiB
"""How much is read at once of what nobody wants any more."""
STEP_S = 0.05
"""The shortest wait: a deadline may be missed by so much."""


class Refused(PlaceFailed):
    """The server has ended the connection."""


class Late(PlaceFailed):
    """The server did not answer in time, or the wait for it was interrupted."""


class Connection:
    """A socket, and what is owed on it."""

    def __init__(self, sock: socket.socket, stop: int) -> None:
        """`stop`: once it can be read, whoever waits gives up."""
        sock.setblocking(False)
        self._sock = sock
        self._stop = stop
        self._polls = {}
        for event in (select.POLLIN, select.POLLOUT):
            poll = select.poll()
            poll.register(sock, event)
            poll.register(stop, select.POLLIN)
            self._polls[event] = poll
        self._owed: deque[Ask] = deque()
        self._head = bytearray()
        self._left_bytes = 0
        self._until_s = 0.0
        self.is_broken = False
        """Whether it can be used no more: it has ended, or an ask was cut off in the middle."""

    def limit(self, until_s: float) -> None:
        """What is sent and read from now on has ended by then, on the monotonic clock."""
        self._until_s = until_s

    def close(self) -> None:
        """For good."""
        self._sock.close()

    @property
    def owes(self) -> bool:
        """Whether any of an answer is still to come."""
        return bool(self._owed or self._left_bytes)

    @property
    def is_stale(self) -> bool:
        """Whether an idle one was ended by the server, or said what nobody asked."""
        try:
            self._sock.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return False
        except OSError:
            return True
        return True  # a byte, or the end

    def is_clear(self) -> bool:
        """Read what has come of what it owes, without waiting; whether that was all."""
        self.limit(0.0)
        try:
            self.skip()
        except PlaceFailed:
            return False
        return True

    # ---- sending

    def send(self, ask: Ask, pieces: Sequence[bytes | memoryview]) -> None:
        """Send one ask, or several of one kind (see `owe`)."""
        self._owed.append(ask)
        self.is_broken = True  # until all of it is sent: what is cut off cannot be gone on with
        left = [memoryview(piece) for piece in pieces]
        at = 0
        while at < len(left):
            try:
                sent = self._sock.sendmsg(left[at : at + PIECES_MAX])
            except BlockingIOError:
                self._wait(select.POLLOUT)
                continue
            except OSError as error:
                raise Refused(f"it ended a connection: {error.strerror}") from error
            while at < len(left) and sent >= len(left[at]):
                sent -= len(left[at])
                at += 1
            if sent:
                left[at] = left[at][sent:]
        self.is_broken = False

    def owe(self, asks: Sequence[Ask]) -> None:
        """What was sent held these, too, in order behind the one it was sent as."""
        self._owed.extend(asks)

    # ---- reading

    def answer(self) -> tuple[int, int]:
        """The next answer's code, and its number or its value's length (0 where it has none); the
        value is to be read or skipped before anything else."""
        assert self._owed, "nothing was asked"
        assert not self._left_bytes, self._left_bytes
        self._fill(CODE.size)
        (code,) = CODE.unpack_from(self._head)
        if code not in CODES:
            self.is_broken = True
            raise PlaceFailed(f"it answers {code}, as no InfiniStore does")
        number = 0
        if code == FINISH and self._owed[0] is not Ask.PUT:
            self._fill(NUMBER.size)
            _, number = NUMBER.unpack_from(self._head)
        self._head.clear()
        if self._owed.popleft() is Ask.GET:
            self._left_bytes = number
        return code, number

    def read_into(self, memory: memoryview) -> None:
        """The next bytes of a value."""
        assert len(memory) <= self._left_bytes, (len(memory), self._left_bytes)
        rest = memory
        while rest:
            count = self._receive(rest)
            self._left_bytes -= count
            rest = rest[count:]

    def skip(self) -> None:
        """Read all that it owes, for nothing."""
        memory = memoryview(bytearray(THROWN_BYTES))
        while self.owes:
            while self._left_bytes:
                self._left_bytes -= self._receive(memory[: self._left_bytes])
            if self._owed:
                self.answer()

    def _fill(self, length: int) -> None:
        while len(self._head) < length:
            memory = bytearray(length - len(self._head))
            self._head += memory[: self._receive(memoryview(memory))]

    def _receive(self, memory: memoryview) -> int:
        while True:
            try:
                count = self._sock.recv_into(memory)
            except BlockingIOError:
                self._wait(select.POLLIN)
                continue
            except OSError as error:
                self.is_broken = True
                raise Refused(f"it ended a connection: {error.strerror}") from error
            if not count:
                self.is_broken = True
                raise Refused("it ended a connection")
            return count

    def _wait(self, event: int) -> None:
        left_s = self._until_s - time.monotonic()
        if left_s <= 0:
            raise Late("it did not answer in time")
        if event == select.POLLIN:
            # A server sends the second part of an answer, or a second answer, once the first was
            # acknowledged: in 40 ms, where the kernel waits for something to send along with it.
            self._sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_QUICKACK, 1)
        found = self._polls[event].poll(max(left_s, STEP_S) * 1000)
        if any(descriptor == self._stop for descriptor, _ in found):
            raise Late("it was interrupted")
