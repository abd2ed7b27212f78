"""S3 tiers for tests."""

import threading
from collections.abc import Callable
from typing import Any

from kvtide.testing import object_servers
from kvtide.tiers.remote.census import Census
from kvtide.tiers.remote.tier import RemoteTier
from kvtide.tiers.s3.client import Client
from kvtide.tiers.s3.mirror import Mirror
from kvtide.tiers.s3.session import Limits, S3Session
from kvtide.units import MiB

TOP = "kvtide/1"
QUEUE_BYTES_MAX = 8 * MiB
WAIT_S = 30.0
PATIENT = Limits(call_s=20.0, put_s=20.0)
"""For what does not measure waiting, on a machine that is busy."""


def open_s3(
    port: int,
    wake: Callable[[], None] = lambda: None,
    bytes_max: int = 8 * MiB,
    *,
    limits: Limits = PATIENT,
    top: str = TOP,
    config: dict[str, Any] | None = None,
    connection: dict[str, Any] | None = None,
) -> RemoteTier:
    """A tier on a port; it knows what is there, or that it does not answer."""
    client = Client(
        object_servers.BUCKET,
        object_servers.config_for(port) | (config or {}),
        connection or {},
        max(limits.call_s, limits.put_s),
    )
    mirrors: list[Mirror] = []
    heard = threading.Event()

    def open_session(census: Census) -> S3Session:
        if not mirrors:
            mirrors.append(Mirror(census, top))
        return S3Session(client, mirrors[0], bytes_max, limits)

    def wake_both() -> None:
        heard.set()
        wake()

    tier = RemoteTier("s3", "s3", open_session, bytes_max, wake_both, QUEUE_BYTES_MAX)
    assert heard.wait(WAIT_S)
    tier.poll()
    return tier
