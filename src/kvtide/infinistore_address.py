"""Where an InfiniStore server is, as one URL says it."""

from dataclasses import dataclass
from urllib.parse import urlsplit

from kvtide.values import shown_host

SERVICE_PORT = 22345
"""Where a server listens that is told nothing."""


@dataclass(frozen=True, slots=True)
class Address:
    """Of a server."""

    host: str
    port: int = SERVICE_PORT

    def __str__(self) -> str:
        return f"infinistore://{shown_host(self.host, self.port)}"


def parse_address(raw: object) -> Address:
    """The server that `infinistore://host:port` names; raises ValueError for anything else."""
    if not isinstance(raw, str):
        raise ValueError("not a URL")  # noqa: TRY004 - as of all parsers
    parts = urlsplit(raw)
    port = parts.port  # says itself what is wrong with it
    is_all = not (parts.path.strip("/") or parts.query or parts.fragment or parts.username)
    if parts.scheme != "infinistore" or not parts.hostname or not is_all:
        raise ValueError("not infinistore://host:port")
    return Address(parts.hostname, SERVICE_PORT if port is None else port)
