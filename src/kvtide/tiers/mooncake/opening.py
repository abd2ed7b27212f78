"""A store as an entry of `tiers` asks for it."""

import ctypes
import importlib.util
from collections.abc import Callable, Mapping
from typing import Any

from kvtide.errors import ConfigError
from kvtide.tier_values import MOONCAKE
from kvtide.tiers.mooncake.client import Place
from kvtide.tiers.mooncake.master import Master
from kvtide.tiers.mooncake.session import MooncakeSession
from kvtide.tiers.registry import TierType
from kvtide.tiers.remote.tier import RemoteTier

CLIENT = "mooncake"
VERBS = "libibverbs.so.1"


def open_mooncake(
    options: Mapping[str, Any], wake: Callable[[], None], queue_bytes_max: int
) -> RemoteTier:
    """See `TierType`. A store that cannot be reached is for the tier's breaker.

    Raises:
        ConfigError: its client cannot be used on this machine.
    """
    require_client()
    address, prefix = options["url"], options["prefix"]
    place = Place(address, options["metadata"], options["protocol"])
    master = Master(address.host, options["metrics_port"])
    return RemoteTier(
        "mooncake",
        str(address),
        lambda census: MooncakeSession(place, master, prefix, census),
        0,
        wake,
        queue_bytes_max,
    )


def require_client() -> None:
    """Whether Mooncake's client is there; it is not loaded here, where it could end the node.

    Raises:
        ConfigError: it is not.
    """
    if importlib.util.find_spec(CLIENT) is None:
        raise ConfigError(
            "a mooncake tier needs Mooncake's client: pip install 'kvtide[mooncake]'"
        )
    try:
        ctypes.CDLL(VERBS)
    except OSError as error:
        raise ConfigError(
            f"Mooncake's client needs {VERBS}, for TCP too ({error}); on Debian:"
            " apt-get install libibverbs1"
        ) from error


TYPE = TierType(options=MOONCAKE, open=open_mooncake, schemes=("mooncake",))
