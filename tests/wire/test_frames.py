"""Frames: every message there and back, the bytes that are agreed on, and what is refused."""

import dataclasses
import os
import socket
import struct
from collections.abc import Iterator
from typing import Any, get_args

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtide.core import messages as m
from kvtide.errors import WireError
from kvtide.wire import frames
from kvtide.wire.frames import FrameReader, Outbox, encode, receive
from tests.wire.frame_vectors import EXAMPLES, GOLDEN

KINDS: tuple[type, ...] = get_args(m.Message)
DESCRIPTORS = {m.SchedulerHello: 1, m.WorkerHello: 1, m.Welcome: 1, m.RegionOffer: 2}

Integers = st.integers(-(2**63), 2**64 - 1)
Text = st.text(max_size=20)
Runs = st.builds(m.Run, Integers, Integers, Integers, Integers)
Plain = st.recursive(
    st.none() | st.booleans() | Integers | Text | st.binary(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(Text, inner, max_size=3),
    max_leaves=10,
)
st.register_type_strategy(int, Integers)
st.register_type_strategy(float, st.floats(allow_nan=False))  # it is not equal to itself


def of_type(hint: Any) -> st.SearchStrategy[Any]:
    """Values of a field."""
    if hint in (Any, dict[str, Any]):
        return st.dictionaries(Text, Plain, max_size=4)
    if hint == list[dict[str, Any]]:
        return st.lists(st.dictionaries(Text, Plain, max_size=3), max_size=3)
    if hint == list[m.Run]:
        return st.lists(Runs, max_size=5)
    return st.from_type(hint)


def messages_of(kind: type) -> st.SearchStrategy[Any]:
    """Messages of one kind."""
    hints = {one.name: one.type for one in dataclasses.fields(kind)}
    return st.builds(kind, **{name: of_type(hint) for name, hint in hints.items()})


def read_all(data: bytes, descriptors: list[int] | None = None) -> list[m.Message]:
    """The messages that a reader makes of it."""
    return [message for message, _ in FrameReader().feed(data, descriptors or [])]


@pytest.fixture
def descriptors() -> Iterator[list[int]]:
    """Nine descriptors of no meaning; closed ones are not closed again."""
    made = [os.open(os.devnull, os.O_RDONLY) for _ in range(9)]
    yield made
    for descriptor in made:
        try:
            os.close(descriptor)
        except OSError:
            continue


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
@given(data=st.data())
def test_every_message_comes_back_as_it_was(kind: type, data: st.DataObject) -> None:
    message = data.draw(messages_of(kind))
    count = DESCRIPTORS.get(kind, 0)
    reader = FrameReader()
    fed = list(reader.feed(encode(message, count), list(range(1_000, 1_000 + count))))
    assert fed == [(message, list(range(1_000, 1_000 + count)))]


@given(
    sent=st.lists(st.sampled_from([x for x in EXAMPLES if type(x) not in DESCRIPTORS])),
    data=st.data(),
)
def test_cuts_of_the_stream_do_not_matter(sent: list[m.Message], data: st.DataObject) -> None:
    stream = b"".join(encode(message) for message in sent)
    reader = FrameReader()
    got: list[m.Message] = []
    while stream:
        cut = data.draw(st.integers(1, len(stream)))
        got += [message for message, _ in reader.feed(stream[:cut], [])]
        stream = stream[cut:]
    assert got == sent


def test_there_is_an_example_of_each_kind() -> None:
    assert [type(example) for example in EXAMPLES] == list(KINDS)


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: type(example).__name__)
def test_bytes_are_those_agreed_on(example: m.Message) -> None:
    """Whoever changes a message raises WIRE_VERSION, and then these."""
    name = type(example).__name__
    assert encode(example, DESCRIPTORS.get(type(example), 0)).hex() == GOLDEN[name]


def test_golden_bytes_are_of_this_version() -> None:
    assert GOLDEN["version"] == str(m.WIRE_VERSION)


# ---- refused


def frame(kind: int, payload: bytes, count: int = 0) -> bytes:
    """A frame with a correct length."""
    return struct.pack("<IBB", len(payload) + 2, kind, count) + payload


@pytest.mark.parametrize("length", [0, 1, frames.FRAME_BYTES_MAX + 1, 2**31, 2**32 - 1])
def test_lengths_are_refused_before_anything_is_kept(length: int) -> None:
    with pytest.raises(WireError, match="at most"):
        read_all(struct.pack("<IBB", length, 0, 0))


def test_unknown_kind_is_refused() -> None:
    with pytest.raises(WireError, match=f"kind {len(KINDS)}"):
        read_all(frame(len(KINDS), b"\x80"))


def test_other_types_missing_and_nested_fields_are_refused() -> None:
    number = KINDS.index(m.Stored)
    pack = msgspec.msgpack.encode
    for payload in (
        pack({"grant": "1", "ok": True}),
        pack({"grant": 1}),
        pack([1, True]),
        pack(None),
        pack({"grant": 1.5, "ok": True}),
        pack({"grant": 1, "ok": 1}),
        b"",
        b"\xc1",
        b"\x91" * 100_000,
    ):
        with pytest.raises(WireError, match="Stored"):
            read_all(frame(number, payload))


def test_depth_is_refused_not_followed() -> None:
    number = KINDS.index(m.CommandAnswer)
    head = b"\x82\xa5error\xa0\xa6values\x81\xa1a"
    with pytest.raises(WireError, match="recursion"):
        read_all(frame(number, head + b"\x91" * 100_000 + b"\x90"))


def test_what_cannot_be_written_is_a_wire_error() -> None:
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(WireError, match="too large"):
        encode(m.Command("x" * frames.FRAME_BYTES_MAX))
    with pytest.raises(WireError, match="cannot be written"):
        encode(m.CommandAnswer({"number": 1 << 64}))
    with pytest.raises(WireError, match="cannot be written"):
        encode(m.CommandAnswer({"deep": deep}))
    while deep:  # one level at a time: else its end would recurse, too
        deep = deep.pop()


# ---- descriptors


@pytest.mark.parametrize("count", [0, 2, 8, 255])
def test_hello_carries_one_descriptor(count: int, descriptors: list[int]) -> None:
    payload = msgspec.msgpack.encode(EXAMPLES[0])
    with pytest.raises(WireError, match=f"kind 0 with {count} descriptors"):
        read_all(frame(0, payload, count), descriptors[: min(count, 8)])


@pytest.mark.parametrize("kind", [m.Ping, m.Command, m.Bye, m.Stored, m.Lookup])
def test_most_messages_carry_none(kind: type, descriptors: list[int]) -> None:
    example = next(x for x in EXAMPLES if type(x) is kind)
    with pytest.raises(WireError, match="with 1 descriptors"):
        read_all(encode(example, 1), descriptors[:1])
    with pytest.raises(WireError, match="1 descriptors came that no frame asked for"):
        read_all(encode(example), descriptors[:1])


def test_named_descriptors_must_have_come(descriptors: list[int]) -> None:
    with pytest.raises(WireError, match="did not come"):
        read_all(encode(EXAMPLES[0], 1))


def test_reader_closes_what_nobody_took(descriptors: list[int]) -> None:
    reader = FrameReader()
    with pytest.raises(WireError, match="9 descriptors"):
        list(reader.feed(b"", descriptors))
    reader.close()
    for descriptor in descriptors:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(descriptor)


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    """Two ends, which do not wait."""
    one, other = socket.socketpair()
    one.setblocking(False)
    other.setblocking(False)
    with one, other:
        yield one, other


def test_received_descriptors_are_not_inherited(
    pair: tuple[socket.socket, socket.socket], descriptors: list[int]
) -> None:
    """An engine that starts a program meanwhile must not hand it the node's memory."""
    one, other = pair
    socket.send_fds(one, [b"x"], descriptors[:2])
    _, received = receive(other)
    assert len(received) == 2
    for descriptor in received:
        assert not os.get_inheritable(descriptor)
        os.close(descriptor)


def test_more_descriptors_than_any_frame_carries_are_refused(
    pair: tuple[socket.socket, socket.socket], descriptors: list[int]
) -> None:
    one, other = pair
    socket.send_fds(one, [b"x"], descriptors)
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(WireError, match="than a frame may carry"):
        receive(other)
    assert len(os.listdir("/proc/self/fd")) == before


# ---- outbox


def test_outbox_keeps_order_and_descriptors_through_a_full_socket(
    pair: tuple[socket.socket, socket.socket], descriptors: list[int]
) -> None:
    one, other = pair
    box = Outbox(64 << 20)
    offer = m.RegionOffer(7, 1, 4096)
    sent: list[m.Message] = []
    for number in range(200):
        sent.append(m.Command("x" * 20_000, {"number": str(number)}))
        sent.append(offer)
        assert box.add(encode(sent[-2]), [])
        assert box.add(encode(offer, 2), descriptors[:2])
    reader, got = FrameReader(), []
    while box or len(got) < len(sent):
        box.flush(one)
        for message, own in reader.feed(*receive(other)):
            assert len(own) == (2 if message == offer else 0)
            for descriptor in own:
                os.close(descriptor)
            got.append(message)
    assert got == sent


def test_outbox_is_bounded_in_bytes_and_in_frames() -> None:
    box = Outbox(1 << 20)
    frame = encode(m.Pong())
    count = 0
    while box.add(frame, []):
        count += 1
    assert count * frames.FRAME_COST_BYTES <= 1 << 20, "tiny frames count by what they cost"
    box.close()
    assert box.add(b"x" * (1 << 19), [])
    assert not box.add(b"x" * (1 << 19), [])


def test_outbox_gives_room_back_as_it_sends(pair: tuple[socket.socket, socket.socket]) -> None:
    one, other = pair
    box = Outbox(1 << 16)
    for _ in range(5_000):
        assert box.add(encode(m.Pong()), [])
        box.flush(one)
        other.recv(1 << 16)


def test_outbox_without_descriptors_left_keeps_none(
    monkeypatch: pytest.MonkeyPatch, descriptors: list[int]
) -> None:
    made: list[int] = []
    real = os.dup

    def dup(number: int) -> int:
        if made:
            raise OSError(24, "Too many open files")
        made.append(real(number))
        return made[-1]

    monkeypatch.setattr(os, "dup", dup)
    box = Outbox(1 << 16)
    with pytest.raises(OSError, match="Too many open files"):
        box.add(b"x", descriptors[:2])
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(made[0])
    assert not box


def test_closed_outbox_closes_its_descriptors(descriptors: list[int]) -> None:
    before = len(os.listdir("/proc/self/fd"))
    box = Outbox(1 << 16)
    box.add(b"x", descriptors[:2])
    box.close()
    assert len(os.listdir("/proc/self/fd")) == before
