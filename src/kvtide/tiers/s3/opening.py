"""A bucket as an entry of `tiers` asks for it."""

import configparser
import os
from collections.abc import Callable, Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from kvtide.errors import ConfigError
from kvtide.tier_values import S3
from kvtide.tiers.registry import TierType
from kvtide.tiers.remote.census import Census
from kvtide.tiers.remote.session import CALL_S_MAX, CONNECT_S_MAX, PUT_S_MAX
from kvtide.tiers.remote.tier import RemoteTier
from kvtide.tiers.s3.client import Client
from kvtide.tiers.s3.mirror import Mirror
from kvtide.tiers.s3.names import VERSION
from kvtide.tiers.s3.session import Limits, S3Session

REGION = "us-east-1"
"""What most servers but Amazon's take for theirs, and what signatures name where nobody says."""
CREDENTIALS_S = 60
"""So long what a file said is believed: who rotates it leaves the old ones valid for longer."""
LIMITS = Limits(CALL_S_MAX, PUT_S_MAX)


def open_s3(
    options: Mapping[str, Any], wake: Callable[[], None], queue_bytes_max: int
) -> RemoteTier:
    """See `TierType`. A store that cannot be reached is for the tier's breaker.

    Raises:
        ConfigError: a file that is named cannot be used.
    """
    address, bytes_max = options["url"], options["bytes_max"]
    connection: dict[str, Any] = {"connect_timeout": timedelta(seconds=CONNECT_S_MAX)}
    if options["ca_file"] is not None:
        connection["root_certificate"] = _content(options["ca_file"], "ca_file")
    client = Client(
        address.bucket,
        place_of(options),
        connection,
        PUT_S_MAX,
        credentials_of(options["credentials_file"]),
    )
    mirrors: list[Mirror] = []  # the tier's census comes with its first session

    def open_session(census: Census) -> S3Session:
        if not mirrors:
            mirrors.append(Mirror(census, f"{address.prefix}/{VERSION}"))
        return S3Session(client, mirrors[0], bytes_max, LIMITS)

    return RemoteTier("s3", str(address), open_session, bytes_max, wake, queue_bytes_max)


def place_of(options: Mapping[str, Any]) -> dict[str, Any]:
    """Where the bucket is: in its server's path, or in the name of its host."""
    endpoint = options["endpoint"] or os.environ.get("AWS_ENDPOINT_URL_S3")
    endpoint = endpoint or os.environ.get("AWS_ENDPOINT_URL")
    region = options["region"] or os.environ.get("AWS_REGION")
    style = options["style"]
    is_host = style == "host" or (style == "auto" and endpoint is None)
    place: dict[str, Any] = {
        "region": region or os.environ.get("AWS_DEFAULT_REGION") or REGION,
        "virtual_hosted_style_request": is_host,
    }
    if endpoint is not None:
        scheme, _, host = endpoint.partition("://")
        bucket = f"{options['url'].bucket}." if is_host else ""
        place["endpoint"] = f"{scheme}://{bucket}{host}"
    return place


def credentials_of(path: Path | None) -> "FileCredentials | None":
    """What is signed with, from a file; None: the library finds it, in the environment or by
    asking the machine's own service, and again before it expires.

    Raises:
        ConfigError: a file that is named has none.
    """
    environment = os.environ
    if path is not None:
        found = FileCredentials(path)
        try:
            found()
        except ValueError as error:
            raise ConfigError(f"credentials_file {error}") from error
        return found
    if "AWS_ACCESS_KEY_ID" in environment or "AWS_WEB_IDENTITY_TOKEN_FILE" in environment:
        return None
    usual = environment.get("AWS_SHARED_CREDENTIALS_FILE") or "~/.aws/credentials"
    found = FileCredentials(Path(usual).expanduser())
    try:
        found()
    except ValueError:
        return None
    return found


class FileCredentials:
    """Keys as Amazon's tools write them, read again each minute: who rotates them writes a new
    file. The profile is `AWS_PROFILE`, or `default`."""

    refresh_threshold = timedelta(0)

    def __init__(self, path: Path) -> None:
        self._path = path

    def __call__(self) -> dict[str, Any]:
        """As the library wants them.

        Raises:
            ValueError: says why there are none, without a word of what the file holds.
        """
        parser = configparser.RawConfigParser()
        try:
            parser.read_string(self._path.read_text())
        except OSError as error:
            raise ValueError(f"{self._path} cannot be read: {error.strerror}") from None
        except (configparser.Error, UnicodeError):
            raise ValueError(f"{self._path} is not as ~/.aws/credentials is") from None
        profile = os.environ.get("AWS_PROFILE", "default")
        for name in ("aws_access_key_id", "aws_secret_access_key"):
            if not parser.has_option(profile, name):
                raise ValueError(f"{self._path} has no profile {profile!r} with {name}")
        return {
            "access_key_id": parser.get(profile, "aws_access_key_id"),
            "secret_access_key": parser.get(profile, "aws_secret_access_key"),
            "token": parser.get(profile, "aws_session_token", fallback=None),
            "expires_at": datetime.now(UTC) + timedelta(seconds=CREDENTIALS_S),
        }


def _content(path: Path, name: str) -> bytes:
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{name} {path} cannot be read: {error}") from error
    if b"-----BEGIN CERTIFICATE-----" not in content:
        raise ConfigError(f"{name} {path} holds no certificate")
    return content


TYPE = TierType(options=S3, open=open_s3, schemes=("s3",))
