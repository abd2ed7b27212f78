"""A server as an entry of `tiers` asks for it."""

import ssl
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from kvtide.errors import ConfigError, reason_of
from kvtide.tier_values import REDIS
from kvtide.tiers.redis.index import WriteIds
from kvtide.tiers.redis.routes import Limits
from kvtide.tiers.redis.session import RedisSession
from kvtide.tiers.registry import TierType
from kvtide.tiers.remote.tier import RemoteTier

PASSWORD_BYTES_MAX = 4096


def open_redis(
    options: Mapping[str, Any], wake: Callable[[], None], queue_bytes_max: int
) -> RemoteTier:
    """See `TierType`. A server that cannot be reached is for the tier's breaker.

    Raises:
        ConfigError: a file that is named cannot be used.
    """
    address = options["url"]
    if options["password_file"] is not None:
        address = replace(address, password=read_password(options["password_file"]))
    tls = None
    if address.is_tls:
        tls = tls_context(options["ca_file"], options["cert_file"], options["key_file"])
    known = WriteIds()
    bytes_max, prefix = options["bytes_max"], options["prefix"]
    return RemoteTier(
        "redis",
        f"redis {address}",
        lambda census: RedisSession(address, tls, prefix, bytes_max, census, known, Limits()),
        bytes_max,
        wake,
        queue_bytes_max,
    )


def read_password(path: Path) -> str:
    """The first line of a file, as secrets are mounted.

    Raises:
        ConfigError: there is none.
    """
    try:
        with path.open("rb") as file:
            text = file.read(PASSWORD_BYTES_MAX).decode().split("\n")[0].rstrip("\r")
    except OSError as error:
        raise ConfigError(f"password_file {path} cannot be read: {reason_of(error)}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"password_file {path} cannot be read: it is not text") from error
    if not text:
        raise ConfigError(f"password_file {path} is empty")
    return text


def tls_context(
    ca_file: Path | None, cert_file: Path | None, key_file: Path | None
) -> ssl.SSLContext:
    """What is trusted, and who we are; certificates are verified, whatever is given.

    Raises:
        ConfigError: a file cannot be used.
    """
    try:
        context = ssl.create_default_context(cafile=None if ca_file is None else str(ca_file))
        if cert_file is not None:
            context.load_cert_chain(cert_file, key_file)
    except (OSError, ValueError) as error:  # ssl.SSLError is both
        reason = reason_of(error) if isinstance(error, OSError) else str(error)
        raise ConfigError(f"a file for TLS cannot be used: {reason}") from error
    return context


TYPE = TierType(options=REDIS, open=open_redis, schemes=("redis", "rediss", "unix"))
