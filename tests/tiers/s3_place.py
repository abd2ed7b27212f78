"""S3 tiers for tests, and what they leave in a bucket."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import obstore
import pytest
from obstore.store import S3Store

from kvtide.core.records import Record
from kvtide.testing import object_servers
from kvtide.testing.tier_drive import DrivenTier
from kvtide.tiers.remote.census import Census
from kvtide.tiers.remote.tier import SURVEY_MS, RemoteTier
from kvtide.tiers.s3 import names
from kvtide.tiers.s3.client import Client
from kvtide.tiers.s3.mirror import Mirror
from kvtide.tiers.s3.session import Limits, S3Session
from kvtide.units import MiB

PROGRAMS = [
    "rclone",
    pytest.param("moto", marks=pytest.mark.long),
    pytest.param("radosgw", marks=pytest.mark.slow),
]
"""Servers that tests run on."""
TOP = "kvtide/1"
QUEUE_BYTES_MAX = 8 * MiB
WAIT_S = 30.0
PATIENT = Limits(call_s=20.0, put_s=20.0)
"""For what does not measure waiting, on a machine that is busy."""


class Bucket:
    """As tests look at it, beside the tier."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.store = S3Store(
            object_servers.BUCKET,
            config=object_servers.config_for(port),
            client_options={"allow_http": True, "timeout": timedelta(seconds=30)},
        )

    def names(self, folder: str | None = None) -> list[str]:
        return sorted(one["path"] for one in obstore.list(self.store, folder).collect())

    def bytes_taken(self) -> int:
        """By all objects."""
        return sum(one["size"] for one in obstore.list(self.store).collect())

    def clear(self) -> None:
        found = self.names()
        if found:
            obstore.delete(self.store, found)

    def objects_of(self, record: Record) -> list[str]:
        """Names of all objects of all its writes."""
        heads = [names.parse_record(TOP, name) for name in self.names(f"{TOP}/r")]
        return [
            name
            for head in heads
            if head is not None and head.key == record.key
            for name in names.names_of(TOP, head, record.layout)
        ]

    def change(self, name: str) -> None:
        """One byte near its end."""
        content = bytearray(obstore.get(self.store, name).bytes())
        content[-5] ^= 1
        obstore.put(self.store, name, bytes(content))


def open_s3(
    port: int,
    wake: Callable[[], None] = lambda: None,
    bytes_max: int = 8 * MiB,
    *,
    limits: Limits = PATIENT,
    config: dict[str, Any] | None = None,
    connection: dict[str, Any] | None = None,
    mirrors: list[Mirror] | None = None,
    queue_bytes_max: int = QUEUE_BYTES_MAX,
) -> RemoteTier:
    """A tier on a port; it knows what is there, or that it does not answer. Its mirror is appended
    to `mirrors`."""
    client = Client(
        object_servers.BUCKET,
        object_servers.config_for(port) | (config or {}),
        connection or {},
        max(limits.call_s, limits.put_s),
    )
    made = [] if mirrors is None else mirrors
    heard = threading.Event()

    def open_session(census: Census) -> S3Session:
        if not made:
            made.append(Mirror(census, TOP))
        return S3Session(client, made[0], bytes_max, limits)

    def wake_both() -> None:
        heard.set()
        wake()

    tier = RemoteTier("s3", "s3", open_session, bytes_max, wake_both, queue_bytes_max)
    assert heard.wait(WAIT_S)
    tier.poll()
    return tier


@contextmanager
def driven(port: int, bytes_max: int = 8 * MiB, **more: Any) -> Iterator[DrivenTier]:
    """A tier whose promises are watched; its mirror fits together at the end."""
    woken = threading.Event()
    mirrors: list[Mirror] = more.setdefault("mirrors", [])
    tier = DrivenTier(open_s3(port, woken.set, bytes_max, **more), woken, WAIT_S)
    try:
        yield tier
    finally:
        tier.close(WAIT_S)
    tier.check_quiet()
    mirrors[0].check_integrity()


def until(tier: DrivenTier, is_so: Callable[[], bool]) -> None:
    """Let time pass, so that it looks into the bucket, until this is so and nothing runs."""
    remote = tier.tier
    assert isinstance(remote, RemoteTier)
    deadline_s = time.monotonic() + WAIT_S
    while not is_so() or remote._workers.running():
        assert time.monotonic() < deadline_s, remote.statistics()
        if not remote._workers.running():  # what runs shall not seem to hang
            tier.pass_time(SURVEY_MS)
        tier.poll_for(0.02)
