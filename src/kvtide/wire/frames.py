"""Frames: how messages and descriptors travel on a unix stream socket.

    ┌────────────┬─────────┬────────────────┬───────────────────────┐
    │ length u32 │ kind u8 │ descriptors u8 │ msgpack of the fields │
    └────────────┴─────────┴────────────────┴───────────────────────┘
                 └────────── what the length counts ────────────────┘

Descriptors are attached to a frame's first byte and arrive in order, never later than it, so a
frame that names n of them takes the n oldest that have come. How many a kind carries is fixed;
any others are closed with the connection, so that nobody can fill another's table. Lengths are
checked before anything is allocated, decoding is typed and runs no code, and whatever is wrong is
a `WireError` that costs the connection.
"""

import itertools
import os
import socket
import struct
from array import array
from collections import deque
from collections.abc import Iterable, Iterator
from typing import get_args

import msgspec

from kvtide.core import messages
from kvtide.core.messages import Message
from kvtide.errors import WireError

FRAME_BYTES_MAX = 4 << 20
"""The keys of a prompt of millions of tokens fit; whoever claims more is not one of ours."""
DESCRIPTORS_MAX = 8
"""Descriptors that may wait for their frame."""
RECEIVE_BYTES = 1 << 16
"""Taken from the socket at once: whoever sends much waits for the others in between."""
FRAME_COST_BYTES = 256
"""What a waiting frame takes besides its bytes; else tiny frames would outgrow every bound."""
FRAMES_A_CALL_MAX = 64
"""Given to the kernel at once; it takes up to a thousand."""

_HEAD = struct.Struct("<IBB")
_LENGTH = struct.Struct("<I")
_INT_BYTES = array("i").itemsize
_CONTROL_BYTES = socket.CMSG_LEN(DESCRIPTORS_MAX * _INT_BYTES)
_KINDS: tuple[type, ...] = get_args(Message)
_NUMBERS = {kind: number for number, kind in enumerate(_KINDS)}
_DECODERS: list[msgspec.msgpack.Decoder[Message]] = [
    msgspec.msgpack.Decoder(kind) for kind in _KINDS
]
_ENCODER = msgspec.msgpack.Encoder()
_DESCRIPTORS = {
    messages.SchedulerHello: 1,  # a pidfd of the sender
    messages.WorkerHello: 1,
    messages.Welcome: 1,
    messages.RegionOffer: 2,  # cells, generations
}

assert messages.WIRE_VERSION == 1, "kinds are numbered by their place: raise the version, too"


def encode(message: Message, descriptor_count: int = 0) -> bytes:
    """One frame. Raises WireError for a message that cannot be sent: too large, or too deep."""
    try:
        payload = _ENCODER.encode(message)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        text = f"a {type(message).__name__} that cannot be written: {error}"
        raise WireError(text) from None
    if len(payload) + 2 > FRAME_BYTES_MAX:
        raise WireError(
            f"a {type(message).__name__} of {len(payload)} bytes is too large; a frame holds"
            f" {FRAME_BYTES_MAX - 2}"
        )
    return _HEAD.pack(len(payload) + 2, _NUMBERS[type(message)], descriptor_count) + payload


class FrameReader:
    """Cuts what arrives into messages.

    What cannot be read stays in front, so nothing behind it is ever taken for a message.
    """

    def __init__(self) -> None:
        self._data = bytearray()
        self._descriptors: deque[int] = deque()

    def feed(self, data: bytes, descriptors: list[int]) -> Iterator[tuple[Message, list[int]]]:
        """Take bytes and descriptors in; yield what is complete.

        The receiver of a message owns its descriptors.
        """
        self._data += data
        self._descriptors.extend(descriptors)
        if len(self._descriptors) > DESCRIPTORS_MAX:
            raise self._unasked()
        while len(self._data) >= _HEAD.size:
            length, kind, count = _HEAD.unpack_from(self._data)
            if not 2 <= length <= FRAME_BYTES_MAX:
                raise WireError(
                    f"a frame of {length} bytes; at least 2, at most {FRAME_BYTES_MAX} are allowed"
                )
            if kind >= len(_KINDS) or count != _DESCRIPTORS.get(_KINDS[kind], 0):
                raise WireError(
                    f"a frame of kind {kind} with {count} descriptors; there are {len(_KINDS)}"
                    " kinds, each with its own number of them"
                )
            end = _LENGTH.size + length
            if len(self._data) < end:
                return
            if count > len(self._descriptors):
                raise WireError(f"a frame names {count} descriptors that did not come")
            message = _decode(kind, bytes(memoryview(self._data)[_HEAD.size : end]))
            del self._data[:end]
            yield message, [self._descriptors.popleft() for _ in range(count)]
        if self._descriptors and not self._data:
            raise self._unasked()

    def _unasked(self) -> WireError:
        return WireError(f"{len(self._descriptors)} descriptors came that no frame asked for")

    def close(self) -> None:
        """Drop what nobody took, and close its descriptors; a feed under way ends there."""
        self._data.clear()
        while self._descriptors:
            os.close(self._descriptors.popleft())


def _decode(kind: int, payload: bytes) -> Message:
    try:
        return _DECODERS[kind].decode(payload)
    except (msgspec.DecodeError, RecursionError) as error:
        raise WireError(f"a {_KINDS[kind].__name__} that cannot be read: {error}") from None


def receive(sock: socket.socket) -> tuple[bytes, list[int]]:
    """What the kernel has now; empty bytes at the end of the stream. Raises BlockingIOError."""
    # Not socket.recv_fds, which drops its flags: an engine's child would inherit the descriptors.
    data, controls, flags, _ = sock.recvmsg(RECEIVE_BYTES, _CONTROL_BYTES, socket.MSG_CMSG_CLOEXEC)
    descriptors = array("i")
    for level, kind, content in controls:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            descriptors.frombytes(content[: len(content) // _INT_BYTES * _INT_BYTES])
    if flags & socket.MSG_CTRUNC:
        close_all(descriptors)
        raise WireError(
            f"more descriptors came at once than a frame may carry; at most {DESCRIPTORS_MAX}"
        )
    return data, list(descriptors)


def close_all(descriptors: Iterable[int]) -> None:
    """Close what nobody takes over."""
    for number in descriptors:
        os.close(number)


class Outbox:
    """Frames waiting for a socket to take them; bounded, in order, with their descriptors."""

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._frames: deque[tuple[memoryview, list[int]]] = deque()
        self._waiting_bytes = 0

    def __bool__(self) -> bool:
        return bool(self._frames)

    def add(self, frame: bytes, descriptors: list[int]) -> bool:
        """Queue a frame; False where the queue is full. Descriptors are duplicated.

        Raises OSError where this process may have no more descriptors.
        """
        if self._waiting_bytes + len(frame) + FRAME_COST_BYTES > self._bytes_max:
            return False
        self._frames.append((memoryview(frame), _duplicates(descriptors)))
        self._waiting_bytes += len(frame) + FRAME_COST_BYTES
        return True

    def flush(self, sock: socket.socket) -> None:
        """Send what the socket takes without waiting. Raises OSError when the peer is gone."""
        while self._frames:
            try:
                if self._frames[0][1]:
                    sent = socket.send_fds(sock, [self._frames[0][0]], self._frames[0][1])
                else:  # all at once, so that the peer wakes once
                    sent = sock.sendmsg(self._plain_frames())
            except BlockingIOError:
                return
            self._waiting_bytes -= sent
            while sent:
                frame, descriptors = self._frames.popleft()
                close_all(descriptors)
                if sent < len(frame):
                    self._frames.appendleft((frame[sent:], []))
                    break
                sent -= len(frame)
                self._waiting_bytes -= FRAME_COST_BYTES

    def _plain_frames(self) -> list[memoryview]:
        """The first frames, up to one that carries descriptors."""
        first = itertools.islice(self._frames, FRAMES_A_CALL_MAX)
        plain = itertools.takewhile(lambda queued: not queued[1], first)
        return [frame for frame, _ in plain]

    def close(self) -> None:
        """Drop everything that waits."""
        while self._frames:
            close_all(self._frames.popleft()[1])
        self._waiting_bytes = 0


def _duplicates(descriptors: list[int]) -> list[int]:
    """Copies of all of them, or none."""
    copies: list[int] = []
    try:
        for number in descriptors:
            copies.append(os.dup(number))  # noqa: PERF401 - what there is must be closed
    except OSError:
        close_all(copies)
        raise
    return copies
