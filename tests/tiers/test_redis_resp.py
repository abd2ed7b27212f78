"""The RESP client: what is sent and read however it comes, and what no server should say."""

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtide.errors import CorruptRecord, PlaceFailed
from kvtide.tiers.redis.resp import (
    ITEMS_MAX,
    REPLY_BYTES_MAX,
    Connection,
    Reply,
    ServerError,
)


class Wire:
    """A connection and the far end of it."""

    def __init__(self) -> None:
        mine, self.theirs = socket.socketpair()
        self.connection = Connection(mine, 5.0)
        self.connection.limit(time.monotonic() + 5.0)

    def say(self, content: bytes, *, pieces: int = 1) -> None:
        """From a thread: as many pieces as asked for, then the end."""

        def send() -> None:
            step = -(-len(content) // pieces) or 1
            with suppress(OSError):  # the reader may have had enough
                for at in range(0, len(content), step):
                    self.theirs.sendall(content[at : at + step])
                self.theirs.shutdown(socket.SHUT_WR)

        self.connection.unread += 100
        threading.Thread(target=send, daemon=True).start()

    def close(self) -> None:
        self.connection.close()
        self.theirs.close()


@pytest.fixture
def wire() -> Iterator[Wire]:
    one = Wire()
    yield one
    one.close()


def packed(reply: Reply) -> bytes:
    """As a server sends it."""
    match reply:
        case None:
            return b"$-1\r\n"
        case int():
            return b":%d\r\n" % reply
        case bytes():
            return b"$%d\r\n%b\r\n" % (len(reply), reply)
        case list():
            return b"*%d\r\n" % len(reply) + b"".join(map(packed, reply))
    raise AssertionError(reply)


replies = st.recursive(
    st.none() | st.integers(-(1 << 62), 1 << 62) | st.binary(max_size=300),
    lambda inner: st.lists(inner, max_size=5),
    max_leaves=20,
)


@given(st.lists(replies, min_size=1, max_size=8), st.integers(1, 40))
def test_replies_are_read_as_sent_however_they_come(said: list[Reply], pieces: int) -> None:
    wire = Wire()
    wire.say(b"".join(map(packed, said)), pieces=pieces)
    assert [wire.connection.read() for _ in said] == said
    assert wire.connection.unread == 100 - len(said)
    wire.close()


@given(st.lists(st.binary(max_size=70_000), max_size=4), st.integers(1, 9), st.integers(1, 4))
def test_values_come_into_memory_byte_for_byte(values: list[bytes], pieces: int, cut: int) -> None:
    wire = Wire()
    wire.say(b"+OK\r\n" + b"".join(map(packed, values)) + b":7\r\n", pieces=pieces)
    assert wire.connection.read() == b"OK"
    for value in values:
        memory = memoryview(bytearray(len(value)))
        step = -(-len(value) // cut) or 1
        views = [memory[at : at + step] for at in range(0, len(value), step)]
        assert wire.connection.read_into(views)
        assert memory == value
    assert wire.connection.read() == 7
    wire.close()


@given(st.lists(st.binary(max_size=20_000), min_size=1, max_size=5))
def test_commands_are_sent_whole_and_in_pieces(arguments: list[bytes]) -> None:
    wire = Wire()
    got = bytearray()

    def receive() -> None:
        while piece := wire.theirs.recv(1000):
            got.extend(piece)

    thread = threading.Thread(target=receive)
    thread.start()
    views = [memoryview(one) for one in arguments]
    wire.connection.send(b"SET", *arguments, views)
    wire.connection.flush()
    wire.connection.close()
    thread.join()
    wire.theirs.close()
    assert bytes(got) == packed([b"SET", *arguments, b"".join(arguments)])


def test_an_error_is_told_apart_and_a_missing_value_too(wire: Wire) -> None:
    wire.say(b"-WRONGTYPE it is a list\r\n$-1\r\n-ERR no\r\n$3\r\nabc\r\n$-1\r\n$0\r\n\r\n")
    with pytest.raises(ServerError) as refused:
        wire.connection.read_into([memoryview(bytearray(3))])
    assert refused.value.code == "WRONGTYPE"
    assert not wire.connection.read_into([memoryview(bytearray(3))])
    said = wire.connection.read()
    assert isinstance(said, ServerError)
    assert said.code == "ERR"
    assert wire.connection.read_into([memoryview(bytearray(3))])
    assert [wire.connection.read() for _ in range(2)] == [None, b""]
    assert wire.connection.unread == 94


@pytest.mark.parametrize("length", [0, 2, 4, 1 << 40])
def test_a_value_of_another_length_is_not_read(wire: Wire, length: int) -> None:
    """And the connection counts as unread: it is closed."""
    wire.say(b"$%d\r\nabcd" % length)
    with pytest.raises(CorruptRecord):
        wire.connection.read_into([memoryview(bytearray(3))])
    assert wire.connection.unread == 100


@pytest.mark.parametrize(
    "said",
    [
        b"",
        b"HTTP/1.1 400 Bad Request\r\n",
        b"\x15\x03\x01\x00\x02\x02\n\r\n",
        b"$x\r\n",
        b"$-2\r\n",
        b"$%d\r\n" % (REPLY_BYTES_MAX + 1),
        b"*%d\r\n" % (ITEMS_MAX + 1),
        b"*1\r\n" * 20,
        b"$3\r\nabcd\r\n",
        b"$3\r\nab",
        b"x" * 40_000,
        b"\r\n",
        b":\r\n",
    ],
)
def test_what_is_no_answer_ends_the_call(wire: Wire, said: bytes) -> None:
    """No length is believed before it is checked, and nothing is waited for in vain."""
    wire.say(said)
    with pytest.raises(PlaceFailed):
        wire.connection.read()
    assert wire.connection.unread == 100


def test_a_connection_that_has_ended_or_speaks_unasked_is_stale(wire: Wire) -> None:
    assert not wire.connection.is_stale
    wire.theirs.sendall(b"+hello\r\n")
    assert wire.connection.is_stale
    other = Wire()
    other.theirs.close()
    assert other.connection.is_stale
    other.close()


def test_a_reply_drop_by_drop_ends_at_the_deadline(wire: Wire) -> None:
    """Each byte comes in time; the whole does not."""
    wire.connection.limit(time.monotonic() + 0.3)
    ended = threading.Event()

    def drip() -> None:
        wire.theirs.sendall(b"$1000\r\n")
        while not ended.wait(0.02):
            wire.theirs.sendall(b"x")

    thread = threading.Thread(target=drip)
    thread.start()
    wire.connection.unread = 1
    with pytest.raises((PlaceFailed, TimeoutError)):
        wire.connection.read()
    ended.set()
    thread.join()
