"""A server as an entry of `tiers` asks for it."""

from collections.abc import Callable, Mapping
from typing import Any

from kvtide.tier_values import INFINISTORE
from kvtide.tiers.infinistore.session import InfiniStoreSession
from kvtide.tiers.registry import TierType
from kvtide.tiers.remote.tier import RemoteTier


def open_infinistore(
    options: Mapping[str, Any], wake: Callable[[], None], queue_bytes_max: int
) -> RemoteTier:
    """See `TierType`. A server that cannot be reached is for the tier's breaker."""
    address, prefix = options["url"], options["prefix"]
    return RemoteTier(
        "infinistore",
        str(address),
        lambda census: InfiniStoreSession(address, prefix, census),
        0,
        wake,
        queue_bytes_max,
    )


TYPE = TierType(options=INFINISTORE, open=open_infinistore, schemes=("infinistore",))
