"""InfiniStore tiers for tests, on the real server or on the edge of one."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any, Protocol

import pytest

from kvtide.core.records import Record
from kvtide.errors import PlaceFailed
from kvtide.server_address import Address
from kvtide.testing import infinistore_servers
from kvtide.testing.tier_drive import DrivenTier
from kvtide.tiers.infinistore import frames, names
from kvtide.tiers.infinistore.client import Client
from kvtide.tiers.infinistore.frames import Ask
from kvtide.tiers.infinistore.names import Names, Note, part_names
from kvtide.tiers.infinistore.session import InfiniStoreSession
from kvtide.tiers.remote.tier import RemoteTier
from kvtide.units import MiB
from tests.tiers import infinistore_edge

PREFIX = "kvtide"
QUEUE_BYTES_MAX = 8 * MiB
WAIT_S = 60.0
PATIENT_S = 30.0
"""For what does not measure waiting, on a machine that is busy."""

needs_server = pytest.mark.skipif(
    infinistore_servers.missing() != "", reason=infinistore_servers.missing() or "all is there"
)
PLACES = ["edge", pytest.param("server", marks=[pytest.mark.long, needs_server])]
"""The real one has the last word; the edge of one is quick, and sees what a client must not do."""


class Place(Protocol):
    """What the two have in common."""

    port: int

    def start(self) -> None: ...

    def kill(self) -> None: ...

    def stopped(self) -> AbstractContextManager[None]: ...


@contextmanager
def running(kind: str, directory: Path) -> Iterator[Place]:
    """One of these, from start to end; of the edge, that it would have survived all of it."""
    if kind == "edge":
        with infinistore_edge.edge() as edge:
            yield edge
            assert edge.faults == []
    else:
        with infinistore_servers.running(directory / "server") as server:
            yield server
            assert server.process is None or not server.has_ended, server.log


class WarmSession(InfiniStoreSession):
    """Connected, if there is a server."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        with suppress(PlaceFailed):
            self.survey()


def open_infinistore(
    port: int,
    wake: Callable[[], None] = lambda: None,
    *,
    prefix: str = PREFIX,
    call_s: float = PATIENT_S,
    put_s: float = PATIENT_S,
    queue_bytes_max: int = QUEUE_BYTES_MAX,
) -> RemoteTier:
    """A tier on a port; it knows that somebody answers, or that nobody does."""
    address = Address("infinistore", "127.0.0.1", port)
    heard = threading.Event()

    def wake_both() -> None:
        heard.set()
        wake()

    tier = RemoteTier(
        "infinistore",
        str(address),
        lambda census: WarmSession(address, prefix, census, call_s, put_s),
        0,
        wake_both,
        queue_bytes_max,
    )
    assert heard.wait(WAIT_S)
    tier.poll()
    return tier


@contextmanager
def driven(port: int, **more: Any) -> Iterator[DrivenTier]:
    """A tier whose promises are watched; closed at the end."""
    woken = threading.Event()
    tier = DrivenTier(open_infinistore(port, woken.set, **more), woken, WAIT_S)
    try:
        yield tier
    finally:
        tier.close(WAIT_S)
    tier.check_quiet()


@contextmanager
def asking(port: int) -> Iterator[Client]:
    """A client, for a minute."""
    client = Client(Address("infinistore", "127.0.0.1", port))
    client.begin(time.monotonic() + WAIT_S)
    try:
        yield client
    finally:
        client.close()


def names_at(client: Client, record: Record) -> Names:
    """Of a record's kind, as of now."""
    nonces = client.read(names.clears_of(PREFIX, record.root))
    return Names(PREFIX, record.root, record.layout, names.cleared_by(nonces))


def note_at(client: Client, record: Record) -> Note:
    """Of a record that is there."""
    (content,) = client.read([names_at(client, record).note(record.key)])
    note = names.read_note(content, record.root, record.layout)
    assert note is not None, record
    return note


def names_of_parts(client: Client, record: Record) -> list[bytes]:
    """Of a record that is there."""
    note = note_at(client, record)
    return part_names(PREFIX, note.write_id, len(names.lengths_of(record)))


def flip(port: int, record: Record, part: int = -1, at: int = -5) -> None:
    """Change a byte of a part that is there."""
    with asking(port) as client:
        name = names_of_parts(client, record)[part]
        one = client.connection(0)
        one.send(Ask.GET, [frames.get(name)])
        _, length = one.answer()
        content = bytearray(length)
        one.read_into(memoryview(content))
        content[at] ^= 1
        client.remove([name])
        assert client.write(iter([(name, [bytes(content)])]))


def remove_parts(port: int, record: Record, *numbers: int) -> None:
    """As a server does when it is full."""
    with asking(port) as client:
        found = names_of_parts(client, record)
        client.remove([found[number] for number in numbers])
