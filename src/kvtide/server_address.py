"""Where a server is whose URL says no more: `mooncake://host:port`, `infinistore://host:port`."""

from dataclasses import dataclass
from urllib.parse import urlsplit

from kvtide.values import shown_host

PORTS = {"mooncake": 50051, "infinistore": 22345}
"""By scheme: where a server (of Mooncake: the master) listens unless it is told otherwise."""


@dataclass(frozen=True, slots=True)
class Address:
    """Of a server."""

    scheme: str
    host: str
    port: int

    def __str__(self) -> str:
        return f"{self.scheme}://{shown_host(self.host, self.port)}"


def parse_address(scheme: str, raw: object) -> Address:
    """The server that a URL of this scheme names; raises ValueError for anything else."""
    if not isinstance(raw, str):
        raise ValueError("not a URL")  # noqa: TRY004 - as of all parsers
    parts = urlsplit(raw)
    port = parts.port  # says itself what is wrong with it
    is_all = not (parts.path.strip("/") or parts.query or parts.fragment or parts.username)
    if parts.scheme != scheme or not parts.hostname or not is_all:
        raise ValueError(f"not {scheme}://host:port")
    return Address(scheme, parts.hostname, PORTS[scheme] if port is None else port)
