"""Mooncake tiers for tests."""

import os
import select
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest

from kvtide.errors import ConfigError, PlaceFailed
from kvtide.server_address import Address
from kvtide.testing.mooncake_servers import Store, clients_of
from kvtide.testing.tier_drive import DrivenTier
from kvtide.tiers.mooncake.client import Place
from kvtide.tiers.mooncake.master import Master
from kvtide.tiers.mooncake.opening import require_client
from kvtide.tiers.mooncake.session import MooncakeSession
from kvtide.tiers.remote.tier import RemoteTier
from kvtide.units import MiB

PREFIX = "kvtide"
QUEUE_BYTES_MAX = 8 * MiB
WAIT_S = 60.0
PATIENT_S = 30.0
"""For what does not measure waiting, on a machine that is busy."""


def missing() -> str:
    """What has to be installed before a store can be used here."""
    try:
        require_client()
    except ConfigError as error:
        return str(error)
    return ""


needs_client = pytest.mark.skipif(missing() != "", reason=missing() or "all is there")


class WarmSession(MooncakeSession):
    """Its client is ready, if the store is."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        with suppress(PlaceFailed):
            self.survey()


def open_mooncake(
    store: Store,
    port: int | None = None,
    wake: Callable[[], None] = lambda: None,
    *,
    prefix: str = PREFIX,
    call_s: float = PATIENT_S,
    put_s: float = PATIENT_S,
    queue_bytes_max: int = QUEUE_BYTES_MAX,
) -> RemoteTier:
    """A tier, by another port of the master's; it knows what is there, or that nobody answers."""
    place = Place(Address("mooncake", "127.0.0.1", port or store.port))
    master = Master("127.0.0.1", store.metrics_port)
    heard = threading.Event()

    def wake_both() -> None:
        heard.set()
        wake()

    tier = RemoteTier(
        "mooncake",
        str(place.address),
        lambda census: WarmSession(place, master, prefix, census, call_s, put_s),
        0,
        wake_both,
        queue_bytes_max,
    )
    assert heard.wait(WAIT_S)
    tier.poll()
    return tier


@contextmanager
def driven(store: Store, port: int | None = None, **more: Any) -> Iterator[DrivenTier]:
    """A tier whose promises are watched; closed at the end."""
    woken = threading.Event()
    tier = DrivenTier(open_mooncake(store, port, woken.set, **more), woken, WAIT_S)
    try:
        yield tier
    finally:
        tier.close(WAIT_S)
    tier.check_quiet()


def clients_here() -> list[int]:
    """Of this process."""
    return clients_of(os.getpid())


def wait_for_end(pid: int, timeout_s: float = WAIT_S) -> None:
    """Until a process does nothing any more."""
    descriptor = os.pidfd_open(pid)
    with os.fdopen(descriptor):
        assert select.select([descriptor], [], [], timeout_s)[0], f"{pid} goes on"


def end_clients(number: int) -> None:
    """As if their library did."""
    for pid in clients_here():
        with suppress(ProcessLookupError):  # its tier has ended it just now
            os.kill(pid, number)
            wait_for_end(pid)
