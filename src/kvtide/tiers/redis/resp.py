"""One connection that speaks RESP2, and moves large values from and into memory as it is.

    send  ──► commands and values, gathered by one system call         many may be under way
    read  ◄── replies, in the same order; a value straight into cells

Invariant: `unread` counts the replies that are still to come. Whoever cannot read them all closes
the connection, so that no reply is ever taken for another one's.
"""

import math
import socket
import ssl
import struct
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import TypeAlias

from kvtide.errors import CorruptRecord, KVTideError, PlaceFailed
from kvtide.units import KiB, MiB

Reply: TypeAlias = "bytes | int | list[Reply] | ServerError | None"

BUFFER_BYTES = 16 * KiB
"""Of replies read ahead: what a value begins with is copied from here, and no more of it."""
REPLY_BYTES_MAX = 64 * MiB
"""Of one reply that is not read into cells: rows of the longest prompt are a tenth of it."""
ITEMS_MAX = 1 << 20
DEPTH_MAX = 8
PIECES_MAX = 512
"""Of one gathered write; the kernel takes 1024."""
COPIED_BYTES = 4 * KiB
"""Values up to this size are copied into the command: cheaper than a piece of their own."""
HELD_BYTES_MAX = 64 * KiB
"""Commands are held back until they are so much, or an answer is waited for."""
TLS_BYTES = 256 * KiB
"""Of one encrypted write: it ends as a whole, so a deadline is looked at between them."""
STEPS_A_SECOND = 10
"""A deadline is met by so much: what a socket is told seldom changes, and is never none."""


class ServerError(KVTideError):
    """A reply that says no. Its first word says why."""

    @property
    def code(self) -> str:
        """Its first word."""
        return str(self).partition(" ")[0]


class Connection:
    """A socket, its deadline, and what was read ahead."""

    def __init__(self, sock: socket.socket, silent_s: float) -> None:
        """Without a byte in `silent_s`, whatever the deadline, the server counts as gone."""
        self.unread = 0
        self._sock = sock
        self._is_tls = isinstance(sock, ssl.SSLSocket)
        self._silent_s = silent_s
        self._until_s = time.monotonic() + silent_s
        if not self._is_tls:
            sock.setblocking(True)  # the kernel keeps the time, and fills memory by one call
        self._bytes = bytearray(BUFFER_BYTES)
        self._buffer = memoryview(self._bytes)
        self._start = self._end = 0
        self._text = bytearray()
        self._pieces: list[bytearray | memoryview] = []
        self._held_bytes = 0
        self._set_s: dict[int, float] = {}

    # ---- life

    def limit(self, until_s: float) -> None:
        """What is sent and read from now on has ended by then, on the monotonic clock."""
        self._until_s = until_s

    @property
    def is_stale(self) -> bool:
        """Whether an idle connection was ended by the server, or said what nobody asked."""
        if self.unread or self._start < self._end:
            return True
        try:
            if self._is_tls:
                self._sock.settimeout(0)
                self._sock.recv(1)
            else:
                self._sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except (BlockingIOError, ssl.SSLWantReadError):
            return False
        except OSError:
            return True
        return True  # a byte, or the end

    def interrupt(self) -> None:
        """From another thread: whoever waits for it is told that it has ended."""
        with suppress(OSError):  # it has ended by itself
            # Not that of an SSLSocket, which first takes its encryption away from who is sending.
            socket.socket.shutdown(self._sock, socket.SHUT_RDWR)

    def close(self) -> None:
        """For good; memory that was to be sent is not referred to any more."""
        self._pieces = []
        self._sock.close()

    def _limit_next(self, which: int) -> None:
        """The next system call that sends or receives ends by the deadline."""
        left_s = self._until_s - time.monotonic()
        if left_s <= 0:
            raise PlaceFailed("it did not answer in time")
        left_s = min(math.ceil(left_s * STEPS_A_SECOND) / STEPS_A_SECOND, self._silent_s)
        if self._is_tls:
            self._sock.settimeout(left_s)
        elif self._set_s.get(which) != left_s:
            self._set_s[which] = left_s
            whole_s = int(left_s)
            interval = struct.pack("ll", whole_s, int((left_s - whole_s) * 1e6))
            self._sock.setsockopt(socket.SOL_SOCKET, which, interval)

    # ---- sending

    def send(self, *command: bytes | Sequence[memoryview], goes_on: bool = False) -> None:
        """Send a command, at the latest when an answer is read; an argument that is a sequence is
        one value, in pieces, which do not change until then. With `goes_on` it waits for the next
        one, which comes at once: both leave, and are heard of, together."""
        text = self._text
        text += b"*%d\r\n" % len(command)
        for argument in command:
            if isinstance(argument, bytes):
                text += b"$%d\r\n" % len(argument)
                text += argument
            else:
                text += b"$%d\r\n" % sum(map(len, argument))
                for piece in argument:
                    if len(piece) <= COPIED_BYTES:
                        text += piece
                    else:
                        self._pieces += (text, piece)
                        self._held_bytes += len(piece)
                        text = self._text = bytearray()
            text += b"\r\n"
        self.unread += 1
        if self._held_bytes + len(text) >= HELD_BYTES_MAX and not goes_on:
            self.flush()

    def flush(self) -> None:
        """Send what was held back."""
        if self._pieces or self._text:
            pieces = [*self._pieces, self._text]
            self._pieces, self._text, self._held_bytes = [], bytearray(), 0
            self._send_all(pieces)

    def _send_all(self, pieces: list[bytearray | memoryview]) -> None:
        if self._is_tls:
            for piece in pieces:
                rest = memoryview(piece)
                while rest:
                    self._limit_next(socket.SO_SNDTIMEO)
                    rest = rest[self._sock.send(rest[:TLS_BYTES]) :]
            return
        at = 0
        while at < len(pieces):
            self._limit_next(socket.SO_SNDTIMEO)
            sent = self._sock.sendmsg(pieces[at : at + PIECES_MAX])
            while at < len(pieces) and sent >= len(pieces[at]):
                sent -= len(pieces[at])
                at += 1
            if sent:
                pieces[at] = memoryview(pieces[at])[sent:]

    # ---- reading

    def read(self) -> Reply:
        """The next reply. An error is given, not raised: it ends nothing."""
        self.flush()
        reply = self._read(0)
        self.unread -= 1
        return reply

    def _read(self, depth: int) -> Reply:
        line = self._line()
        kind, rest = line[:1], line[1:]
        if kind == b"+":
            return rest
        if kind == b"-":
            return ServerError(rest.decode(errors="replace"))
        number = _number(rest)
        if kind == b":":
            return number
        if number == -1:
            return None
        if kind == b"$" and 0 <= number <= REPLY_BYTES_MAX:
            end = self._start + number
            if end <= self._end:
                value = self._buffer[self._start : end].tobytes()
                self._start = end
            else:
                memory = bytearray(number)
                self._fill(memoryview(memory))
                value = bytes(memory)
            self._line_end()
            return value
        if kind == b"*" and 0 <= number <= ITEMS_MAX and depth < DEPTH_MAX:
            return [self._read(depth + 1) for _ in range(number)]
        raise PlaceFailed(f"it answered what is no RESP: {line[:40]!r}")

    def read_into(self, pieces: Sequence[memoryview]) -> bool:
        """The next reply, a value of just this length; False: there is none.

        Raises:
            CorruptRecord: it has another length; the connection cannot be used any more.
            ServerError: the server says no.
        """
        self.flush()
        line = self._line()
        if line[:1] == b"-":
            self.unread -= 1
            raise ServerError(line[1:].decode(errors="replace"))
        if line[:1] != b"$":
            raise PlaceFailed(f"it answered what is no value: {line[:40]!r}")
        number = _number(line[1:])
        if number != -1:
            wanted = sum(map(len, pieces))
            if number != wanted:
                raise CorruptRecord(f"a part has {number} bytes, expected {wanted}")
            for piece in pieces:
                self._fill(piece)
            self._line_end()
        self.unread -= 1
        return number != -1

    def _line(self) -> bytes:
        """Up to the next end of line, without it."""
        while True:
            at = self._bytes.find(b"\r\n", self._start, self._end)
            if at >= 0:
                line = self._buffer[self._start : at].tobytes()
                self._start = at + 2
                return line
            ahead = self._buffer[self._start : self._end].tobytes()
            if len(ahead) == BUFFER_BYTES:
                raise PlaceFailed(f"it answered without an end: {ahead[:40]!r}")
            self._buffer[: len(ahead)] = ahead
            self._start, self._end = 0, len(ahead)
            self._end += self._received(self._buffer[self._end :], 0)

    def _line_end(self) -> None:
        if self._line():
            raise PlaceFailed("a value did not end where it should")

    def _fill(self, into: memoryview) -> None:
        """The next bytes, as many as fit."""
        done = min(len(into), self._end - self._start)
        into[:done] = self._buffer[self._start : self._start + done]
        self._start += done
        while done < len(into):
            done += self._received(into[done:], 0 if self._is_tls else socket.MSG_WAITALL)

    def _received(self, into: memoryview, flags: int) -> int:
        self._limit_next(socket.SO_RCVTIMEO)
        count = self._sock.recv_into(into, 0, flags)
        if not count:
            raise PlaceFailed("it ended the connection")
        return count


def _number(text: bytes) -> int:
    try:
        return int(text)
    except ValueError:
        raise PlaceFailed(f"it answered what is no number: {text[:40]!r}") from None
