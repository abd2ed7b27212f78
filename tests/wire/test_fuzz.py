"""Ten thousand frames that no engine sends, to a real node that serves another engine meanwhile.

Afterwards the node is the same process, believes its state, has the descriptors it had, has taken
no memory to speak of, and has served the other engine, bytes and all.
"""

import dataclasses
import os
import random
import socket
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any

import msgspec
import pytest

from kvtide.core import messages as m
from kvtide.errors import WireError
from kvtide.testing.fake_engine import FakeEngine, Loaded, make_tokens
from kvtide.testing.node_process import NodeProcess
from kvtide.units import MiB
from kvtide.wire import frames
from kvtide.wire.command import ask
from kvtide.wire.frames import encode
from tests.wire.frame_vectors import EXAMPLES
from tests.wire.raw import RawPeer, descriptor_count, scheduler_hello, worker_hello
from tests.wire.test_server import settled_descriptors

CONNECTIONS = 10_000
SEED = 20_260
FRAMES_A_CONNECTION = 4
MEMORY_GROWTH_BYTES_MAX = 64 * MiB
TOKENS = make_tokens(256, seed=1)
SAFE = [x for x in EXAMPLES if not isinstance(x, m.Command)] + [m.Command("status")]
"""Without commands that a user may well give: stop, clear."""
INTEGERS = (0, 1, -1, 2, 7, 63, 64, 255, 4096, 2**31, 2**32, 2**53, 2**63 - 1, -(2**63), 2**64 - 1)

Made = tuple[bytes, int]
"""Bytes to send, and how many descriptors with them."""


class Fuzz:
    """Makes frames; the same ones for the same seed."""

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)
        self.kinds: Sequence[Callable[[], Made]] = (
            self.noise,
            self.cut,
            self.wrong_length,
            self.wrong_kind,
            self.wrong_type,
            self.missing_field,
            self.wrong_descriptors,
            self.nested,
            self.flipped,
            self.strange,
            self.strange,
            self.strange,
        )

    def example(self) -> m.Message:
        """One that is well-formed."""
        return self.draw.choice(SAFE)

    def frame(self, kind: int, payload: bytes, count: int = 0) -> bytes:
        return struct.pack("<IBB", len(payload) + 2, kind & 255, count) + payload

    def noise(self) -> Made:
        """Any bytes."""
        return self.draw.randbytes(self.draw.randrange(1, 200)), 0

    def cut(self) -> Made:
        """A frame that ends too early, since the connection does."""
        data = encode(self.example())
        return data[: self.draw.randrange(1, len(data) + 1)], 0

    def wrong_length(self) -> Made:
        """A length that is not the payload's, up to 4 GiB."""
        data = bytearray(encode(self.example()))
        lengths = (0, 1, 2, 3, len(data), len(data) - 7, 4 << 20, (4 << 20) + 1, 2**31, 2**32 - 1)
        struct.pack_into("<I", data, 0, max(0, self.draw.choice(lengths)))
        return bytes(data), 0

    def wrong_kind(self) -> Made:
        """Another message's fields, or a message that only the node sends."""
        payload = encode(self.example())[6:]
        return self.frame(self.draw.randrange(0, 40), payload), 0

    def wrong_type(self) -> Made:
        """One field of another type."""
        message = self.example()
        fields = msgspec.to_builtins(message, builtin_types=(bytes,))
        if fields:
            name = self.draw.choice(list(fields))
            fields[name] = self.draw.choice(
                [None, 1.5, "x", b"x", [], {}, [[]], True, -1, {"a": {}}]
            )
        return self.frame(number_of(message), msgspec.msgpack.encode(fields)), 0

    def missing_field(self) -> Made:
        """A field too few, or fields that nobody knows."""
        message = self.example()
        fields = msgspec.to_builtins(message, builtin_types=(bytes,))
        if fields and self.draw.random() < 0.7:
            del fields[self.draw.choice(list(fields))]
        else:
            fields |= {f"unknown{n}": n for n in range(self.draw.randrange(1, 50))}
        return self.frame(number_of(message), msgspec.msgpack.encode(fields)), 0

    def wrong_descriptors(self) -> Made:
        """More or fewer than the frame says, or than its kind carries."""
        message = self.example()
        said = self.draw.choice((0, 1, 2, 3, 8, 9, 255))
        payload = encode(message)[6:]
        return self.frame(number_of(message), payload, said), self.draw.choice((0, 1, 2, 3, 8, 12))

    def nested(self) -> Made:
        """Lists in lists, maps in maps, with more announced than there is."""
        opening = self.draw.choice(
            (b"\x91", b"\x81\xa1a", b"\xdd\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff")
        )
        depth = self.draw.choice((1, 10, 900, 5_000))
        head = self.draw.choice((b"", b"\x81\xa5facts", b"\x82\xa6values"))
        number = self.draw.randrange(len(frames._KINDS))
        return self.frame(number, head + opening * depth), 0

    def flipped(self) -> Made:
        """One bit of a good frame."""
        data = bytearray(encode(self.example()))
        data[self.draw.randrange(len(data))] ^= 1 << self.draw.randrange(8)
        return bytes(data), 0

    def strange(self) -> Made:
        """Well-formed, with values that make no sense together."""
        message = self.example()
        changes = {
            one.name: self.value(getattr(message, one.name))
            for one in dataclasses.fields(message)
            if self.draw.random() < 0.5
        }
        if isinstance(message, m.Command):
            changes = {}
        try:
            return encode(dataclasses.replace(message, **changes)), 0
        except WireError:
            return encode(message), 0

    def value(self, like: Any) -> Any:
        """Another value of the same type."""
        if isinstance(like, bool):
            return self.draw.random() < 0.5
        if isinstance(like, int):
            return self.draw.choice(INTEGERS)
        if isinstance(like, bytes):
            return self.draw.randbytes(self.draw.choice((0, 1, 16, 31, 32, 33, 64, 4096)))
        if isinstance(like, str):
            return self.draw.choice(("", "x", "engine", "☃" * 300, "a\nb\x1b[31m", "stop"))
        if isinstance(like, tuple):
            return tuple(self.value(part) for part in like)
        if isinstance(like, list):
            part = like[0] if like else 1
            return [self.value(part) for _ in range(self.draw.choice((0, 1, 2, 50)))]
        if isinstance(like, dict):
            part = next(iter(like.values()), "x")
            return {self.value(""): self.value(part) for _ in range(self.draw.choice((0, 1, 9)))}
        return like


def number_of(message: m.Message) -> int:
    return frames._KINDS.index(type(message))


@pytest.fixture
def null() -> Iterator[int]:
    """A descriptor to be sent."""
    descriptor = os.open(os.devnull, os.O_RDONLY)
    yield descriptor
    os.close(descriptor)


def greet(peer: RawPeer, draw: random.Random) -> None:
    """Come as a scheduler, as a worker, or as nobody at all."""
    engine_id = f"fuzz{draw.randrange(3)}"
    match draw.randrange(4):
        case 0:
            peer.hello(scheduler_hello(engine_id, incarnation=b"fuzz", worker_count=2))
        case 1:
            rank = draw.randrange(2)
            peer.hello(worker_hello(engine_id, incarnation=b"%d" % rank, rank=rank))


def test_ten_thousand_frames_cost_their_connections_only(
    running_node: NodeProcess, null: int
) -> None:
    node, pid = running_node, running_node.pid
    fuzz = Fuzz(SEED)
    with FakeEngine(node.places, "one") as engine:
        engine.keep(TOKENS)
        before = descriptor_count(pid)
        resident = node.resident_bytes()
        for number in range(CONNECTIONS):
            with RawPeer(node.places) as peer, suppress(OSError):  # it is closed, as it should
                greet(peer, fuzz.draw)
                for _ in range(FRAMES_A_CONNECTION):
                    data, count = fuzz.draw.choice(fuzz.kinds)()
                    peer.send_bytes(data, [null] * count)
            if number % 500 == 0:
                found = engine.load(TOKENS)
                assert found.blocks == found.verified, f"connection {number} of seed {SEED}"
        engine.keep(TOKENS)
        assert engine.load(TOKENS) == Loaded(16, 16)
        assert ask(node.places, "check")["entries"] >= 4
        assert node.pid == pid
        # Each of its three engines is watched through a pidfd a process: this one, all in all.
        settled_descriptors(node, before + 3 * 3)
        assert node.resident_bytes() - resident < MEMORY_GROWTH_BYTES_MAX
        assert not engine.scheduler.downs, "the other engine's connection ended"
    assert "CRITICAL" not in node.log()


def test_pieces_of_huge_frames_are_bounded(running_node: NodeProcess) -> None:
    """Many peers each begin a frame of 4 MiB and never end it."""
    resident = running_node.resident_bytes()
    peers = [RawPeer(running_node.places) for _ in range(16)]
    head = struct.pack("<IBB", frames.FRAME_BYTES_MAX, 3, 0)
    try:
        for peer in peers:
            peer.send_bytes(head + b"x" * (frames.FRAME_BYTES_MAX - 100))
        assert running_node.status()["node"]["pid"] == running_node.pid
        grown = running_node.resident_bytes() - resident
        assert grown < 16 * 1.5 * frames.FRAME_BYTES_MAX
    finally:
        for peer in peers:
            peer.close()


def test_strange_messages_of_an_engine_that_is_on(running_node: NodeProcess) -> None:
    """Identified, mapped and served, it turns mad: the core refuses, or takes it, and holds."""
    node = running_node
    fuzz = Fuzz(SEED + 1)
    kinds = (m.Lookup, m.Probe, m.StoreOffer, m.Stored, m.RegionOpen, m.RegionLeft, m.GrantReturn)
    kinds += (m.LoadBegin, m.LoadEnd, m.LeaseRelease, m.RegionFailed, m.Counts, m.Identity)
    examples = [x for x in EXAMPLES if isinstance(x, kinds)]
    with FakeEngine(node.places, "one") as sane:
        sane.keep(TOKENS)
        for round_number in range(20):
            with FakeEngine(node.places, f"mad{round_number}") as mad:
                mad.keep(make_tokens(128, seed=2))
                offered = mad.offer(make_tokens(64, seed=100 + round_number))
                links = [mad.scheduler.link, *(worker.link for worker in mad.workers)]
                for _ in range(50):
                    message = fuzz.draw.choice(examples)
                    changes = {
                        one.name: fuzz.value(getattr(message, one.name))
                        for one in dataclasses.fields(message)
                        if fuzz.draw.random() < 0.3
                    }
                    if isinstance(message, m.Stored | m.GrantReturn) and offered.grants:
                        changes = {}
                    fuzz.draw.choice(links).send(dataclasses.replace(message, **changes))
            ask(node.places, "check")
        found = sane.load(TOKENS)
        assert found.blocks == found.verified
        assert not sane.scheduler.downs


def test_connections_that_say_nothing_are_bounded_by_descriptors(
    running_node: NodeProcess,
) -> None:
    before = descriptor_count(running_node.pid)
    peers = []
    for _ in range(200):
        sock = socket.socket(socket.AF_UNIX)
        sock.connect(str(running_node.places.socket))
        peers.append(sock)
    assert running_node.status()["node"]["pid"] == running_node.pid
    for sock in peers:
        sock.close()
    settled_descriptors(running_node, before)
