"""Redis tiers for tests, and what they leave on a server."""

import ssl
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from kvtide.core.records import Record
from kvtide.redis_address import Address
from kvtide.testing.redis_servers import Server
from kvtide.testing.tier_drive import DrivenTier
from kvtide.tiers.base import LoadOutcome, Tier
from kvtide.tiers.redis.index import VERSION, WriteIds
from kvtide.tiers.redis.routes import Limits
from kvtide.tiers.redis.session import RedisSession
from kvtide.tiers.remote import parts
from kvtide.tiers.remote.tier import RemoteTier
from kvtide.units import MiB

PREFIX = "kvtide"
PROGRAMS = ["valkey", pytest.param("redis", marks=pytest.mark.long)]
"""Valkey comes with what tests are run by; Redis, where it is, answers the same."""
QUEUE_BYTES_MAX = 8 * MiB
WAIT_S = 30.0
PATIENT = Limits(connect_s=10.0, silent_s=20.0, call_s=20.0, put_s=20.0)
"""For what does not measure waiting, on a machine that is busy."""


def open_redis(
    place: int | Address,
    wake: Callable[[], None] = lambda: None,
    bytes_max: int = 8 * MiB,
    *,
    limits: Limits = PATIENT,
    tls: ssl.SSLContext | None = None,
    prefix: str = PREFIX,
    session_type: type[RedisSession] = RedisSession,
) -> RemoteTier:
    """A tier on a port, or somewhere; it knows what is there, or that it does not answer."""
    address = Address((("127.0.0.1", place),)) if isinstance(place, int) else place
    known = WriteIds()
    heard = threading.Event()

    def wake_both() -> None:
        heard.set()
        wake()

    tier = RemoteTier(
        "redis",
        f"redis {address}",
        lambda census: session_type(address, tls, prefix, bytes_max, census, known, limits),
        bytes_max,
        wake_both,
        QUEUE_BYTES_MAX,
    )
    assert heard.wait(WAIT_S)
    tier.poll()
    return tier


def row_of(server: Server, record: Record, prefix: str = PREFIX) -> bytes:
    """What the index says of a record."""
    tag = f"{prefix}:{{{prefix}:{VERSION}}}:index".encode()
    row = server.ask(b"HGET", tag, record.key)
    assert isinstance(row, bytes), row
    return row


def part_names(server: Server, record: Record, prefix: str = PREFIX) -> list[bytes]:
    """Keys of its parts, in order."""
    write_id = row_of(server, record, prefix)[:16]
    count = len(parts.lengths_of(record))
    return [f"{prefix}:{VERSION}:{write_id.hex()}:{n}".encode() for n in range(count)]


@contextmanager
def driven(place: int | Address, bytes_max: int = 8 * MiB, **more: Any) -> Iterator[DrivenTier]:
    """A tier whose promises are watched; closed at the end."""
    woken = threading.Event()
    tier = DrivenTier(open_redis(place, woken.set, bytes_max, **more), woken, WAIT_S)
    try:
        yield tier
    finally:
        tier.close(WAIT_S)
    tier.check_quiet()


@contextmanager
def driving(tier: Tier) -> Iterator[DrivenTier]:
    """A tier that is there already, whose `wake` nobody hears: it is polled all the time."""
    woken = _Always()
    driven = DrivenTier(tier, woken, WAIT_S)
    try:
        yield driven
    finally:
        driven.close(WAIT_S)
    driven.check_quiet()


class _Always(threading.Event):
    """Set again and again."""

    def wait(self, timeout: float | None = None) -> bool:
        time.sleep(0.001)
        return True


def pass_calmly(tier: DrivenTier, ms: int) -> None:
    """The clock goes on once nothing runs: what does would seem to hang."""
    remote, deadline_s = tier.tier, time.monotonic() + WAIT_S
    assert isinstance(remote, RemoteTier)
    while remote._workers.running():
        assert time.monotonic() < deadline_s, remote.statistics()
        tier.poll_for(0.005)
    tier.pass_time(ms)


def heal(tier: DrivenTier, record: Record) -> None:
    """Let time pass until a record can be loaded again."""
    deadline_s = time.monotonic() + WAIT_S
    while tier.load(record) is not LoadOutcome.LOADED:
        assert time.monotonic() < deadline_s, tier.tier.statistics()
        tier.pass_time(5_000)
        tier.poll_for(0.05)


def well(tier: DrivenTier, record: Record) -> None:
    """Let time pass until its place is said to work; that loads and stores do, only they show."""
    deadline_s = time.monotonic() + WAIT_S
    while tier.tier.statistics().state != "on":
        assert time.monotonic() < deadline_s, tier.tier.statistics()
        tier.pass_time(5_000)
        tier.poll_for(0.05)
        tier.load(record)
        if "stores stop" in tier.tier.statistics().state:
            tier.store([record])
