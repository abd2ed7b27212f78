"""A thread's connections to one server, and what is asked of it: of many names at once.

A server has one thread, answers one get at a time on a connection, and never a part of a value.
So gets are spread over a few connections; all else goes over the first, one ask behind another.

What the server gets wrong is kept from it here (see docs/decisions): a get behind a get, the end
of a connection of which a value is being sent, a name that is written over.

Ownership: one thread's; only `interrupt` comes from another, under `_lock`.
"""

import os
import socket
import threading
import time
from collections.abc import Iterator, Sequence

from kvtide.errors import PlaceFailed, reason_of
from kvtide.server_address import Address
from kvtide.tiers.infinistore import frames
from kvtide.tiers.infinistore.connection import Connection, Refused
from kvtide.tiers.infinistore.frames import FINISH, NO_ROOM, NOT_FOUND, Ask
from kvtide.tiers.remote.resolving import addresses_of
from kvtide.tiers.remote.session import CONNECT_S_MAX
from kvtide.units import KiB

CONNECTIONS = 8
"""Over which gets of small values are spread: each is a round trip."""
TOGETHER = 256
"""Asks that are sent before an answer is read: their answers fit what the kernel keeps."""
SMALL_BYTES_MAX = 64 * KiB
"""A value of ours that is no part is smaller; a larger one is not ours, and not read."""
ASIDE_MAX = 64
"""Connections that owe an answer which nobody wants. One more, and the oldest is closed."""
ASIDE_S_MAX = 60.0
"""A server that has sent nothing for so long is gone."""
CLOSE_S_MAX = 0.5
"""How long `close` goes on to read connections that owe an answer, which spares the server."""


class Client:
    """See above. Every call raises PlaceFailed where the server does not do what it is asked."""

    def __init__(self, address: Address, connect_s: float = CONNECT_S_MAX) -> None:
        """Nothing is connected yet."""
        self._address = address
        self._connect_s = connect_s
        self._lock = threading.Lock()
        self._stop = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._is_closed = False
        self._open: list[Connection] = []
        self._aside: list[tuple[float, Connection]] = []
        self._until_s = 0.0

    # ---- calls of a session

    def begin(self, until_s: float) -> None:
        """A call begins, which has ended by then. While a server owes what others asked for, it is
        asked for little first: one that hangs costs each call one connection, and not several."""
        self.give_up()
        self._read_aside()
        for one in [one for one in self._open if one.is_stale]:
            self._open.remove(one)
            one.close()
        self._until_s = until_s
        for one in self._open:
            one.limit(until_s)
        if self._aside:
            self.exist([b"kvtide"])

    def give_up(self) -> None:
        """A call has failed: nobody reads what is still to come."""
        for one in self._open:
            if one.is_broken:
                one.close()
            elif one.owes:
                self._aside.append((time.monotonic() + ASIDE_S_MAX, one))
        self._open = [one for one in self._open if not one.is_broken and not one.owes]
        while len(self._aside) > ASIDE_MAX:
            self._aside.pop(0)[1].close()

    def settle(self) -> None:
        """Read what is still to come, for nothing."""
        for one in self._open:
            one.skip()

    def interrupt(self) -> None:
        """From another thread, once: all calls end, from now on."""
        with self._lock:
            if not self._is_closed:
                os.eventfd_write(self._stop, 1)

    def close(self) -> None:
        """The last call."""
        self.give_up()
        until_s = time.monotonic() + CLOSE_S_MAX
        while self._aside and time.monotonic() < until_s:
            self._read_aside()
            time.sleep(0.01)
        for one in [*self._open, *(one for _, one in self._aside)]:
            one.close()
        self._open, self._aside = [], []
        with self._lock:
            self._is_closed = True
            os.close(self._stop)

    def _read_aside(self) -> None:
        still = []
        for until_s, one in self._aside:
            if one.is_clear():
                self._open.append(one)
            elif one.is_broken or time.monotonic() > until_s:
                one.close()
            else:
                still.append((until_s, one))
        self._aside = still

    # ---- asking

    def exist(self, names: Sequence[bytes]) -> list[bool]:
        """Of each, whether it is there: by name alone, so it may be on its way yet."""
        found = []
        for begin in range(0, len(names), TOGETHER):
            asked = names[begin : begin + TOGETHER]
            self._send(Ask.EXIST, [frames.exist(name) for name in asked])
            for _ in asked:
                code, number = self._first.answer()
                self._judge(code)
                found.append(number == 0)
        return found

    def read(self, names: Sequence[bytes]) -> list[bytes | None]:
        """Small values; None: it is not there."""
        found: list[bytes | None] = []
        for begin in range(0, len(names), CONNECTIONS):
            asked = names[begin : begin + CONNECTIONS]
            used = [self.connection(number) for number in range(len(asked))]
            for one, name in zip(used, asked, strict=True):
                one.send(Ask.GET, [frames.get(name)])
            found += [self._small(one) for one in used]
        return found

    def _small(self, one: Connection) -> bytes | None:
        code, length = one.answer()
        if code == NOT_FOUND:
            return None
        self._judge(code)
        if length > SMALL_BYTES_MAX:
            one.skip()
            return None
        content = bytearray(length)
        one.read_into(memoryview(content))
        return bytes(content)

    def remove(self, names: Sequence[bytes]) -> None:
        """Take these away, if they are there."""
        for begin in range(0, len(names), TOGETHER):
            self._send(Ask.DELETE, [frames.delete(names[begin : begin + TOGETHER])])
            self._judge(self._first.answer()[0])

    def replace(self, values: Sequence[tuple[bytes, bytes]], *, is_whole: bool = True) -> bool:
        """Give names these small values, in order; False: there is no room for one of them.

        What is there is removed first: a name that is written over goes with what it held, when
        the server evicts that. Both asks and the value are sent at once, and fit a packet, since a
        server that is asked for a value of which only a part has come ends. Where not `is_whole`,
        what is there may be such a part: removing it would end the server, so it is written over.
        """
        for name, value in values:
            put = frames.put(name, len(value)) + value
            if is_whole:
                self._first.send(Ask.DELETE, [frames.delete([name]) + put])
                self._first.owe([Ask.PUT])
                self._judge(self._first.answer()[0])
            else:
                self._first.send(Ask.PUT, [put])
            if not self._is_taken():
                return False
        return True

    def write(self, parts: Iterator[tuple[bytes, Sequence[bytes | memoryview]]]) -> bool:
        """Large values, one behind another, under names that nothing had; False: no room."""
        owed = 0
        try:
            for name, pieces in parts:
                self._first.send(Ask.PUT, [frames.put(name, sum(map(len, pieces))), *pieces])
                owed += 1
                if owed == 2:  # one is written while the other one is made
                    owed -= 1
                    if not self._is_taken():
                        return False
        except Refused:
            if self._was_refused():
                return False
            raise
        return all(self._is_taken() for _ in range(owed))

    def _is_taken(self) -> bool:
        code, _ = self._first.answer()
        if code == NO_ROOM:
            self._first.is_broken = True  # the server takes the value for asks, and ends it
            self.give_up()
            return False
        self._judge(code)
        return True

    def _was_refused(self) -> bool:
        """Whether the first connection, which has ended, said before that there is no room."""
        one = self._first
        one.limit(0.0)
        try:
            while one.owes:
                if one.answer()[0] == NO_ROOM:
                    self.give_up()
                    return True
        except PlaceFailed:
            pass
        return False

    @staticmethod
    def _judge(code: int) -> None:
        if code != FINISH:
            raise PlaceFailed(f"it answers {code}")

    def _send(self, ask: Ask, asks: Sequence[bytes]) -> None:
        self._first.send(ask, [b"".join(asks)])
        self._first.owe([ask] * (len(asks) - 1))

    # ---- connections

    @property
    def _first(self) -> Connection:
        return self.connection(0)

    def connection(self, number: int) -> Connection:
        """One of `CONNECTIONS`, told apart by number within a call."""
        while len(self._open) <= number:
            self._open.append(self._connected())
        return self._open[number]

    def _connected(self) -> Connection:
        limit_s = min(self._connect_s, self._until_s - time.monotonic())
        until_s = time.monotonic() + limit_s
        failed: OSError | None = None
        try:
            found = addresses_of((self._address.host, self._address.port), max(limit_s, 0.001))
        except OSError as unknown:
            raise PlaceFailed(f"it cannot be reached: {reason_of(unknown)}") from unknown
        for family, kind, protocol, _, where in found:
            left_s = max(until_s - time.monotonic(), 0.001)
            sock = socket.socket(family, kind, protocol)
            try:
                sock.settimeout(left_s)
                sock.connect(where)
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            except OSError as error:
                sock.close()
                # Without its frames, which hold cells: a node never looks for cycles.
                failed = error.with_traceback(None)
                continue
            connection = Connection(sock, self._stop)
            connection.limit(self._until_s)
            return connection
        assert failed is not None, found
        raise PlaceFailed(f"it cannot be reached: {reason_of(failed)}") from failed
