"""Where a server is, as one URL says it.

redis://user:password@host:6379/0          rediss:// with TLS
redis://host,host,host                      any of a cluster's servers, or of one's Sentinels,
redis://host:26379,host:26379/name          the latter with the name of what they watch
unix:///run/redis.sock                      unix:///run/redis.sock?1 for another database
"""

import re
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import unquote

from kvtide.values import shown_host

PORT = 6379
_HOST = re.compile(
    r"(?:\[(?P<six>[0-9A-Fa-f:.]+)\]|(?P<name>[^:\[\]/@?#,\s]+))(?::(?P<port>\d+))?"
)
_FORMS = "redis://host:port, rediss://host:port or unix:///path"


@dataclass(frozen=True, slots=True)
class Address:
    """One deployment, whatever it is made of.

    Attributes:
        hosts: host and port of each server named, tried in order; none for a unix socket.
        path: of the unix socket.
        is_tls: whether connections are encrypted.
        username, password: empty where none is given.
        database: its number.
        watched: what Sentinels call it; empty where no Sentinels are asked.
    """

    hosts: tuple[tuple[str, int], ...]
    path: str = ""
    is_tls: bool = False
    username: str = ""
    password: str = field(default="", repr=False)
    database: int = 0
    watched: str = ""

    def __str__(self) -> str:
        """For people: without the password."""
        user = f"{self.username}@" if self.username else ""
        if self.path:
            return f"unix://{user}{self.path}" + (f"?{self.database}" if self.database else "")
        hosts = ",".join(shown_host(host, port) for host, port in self.hosts)
        end = f"/{self.watched}" if self.watched else f"/{self.database}" if self.database else ""
        return f"{'rediss' if self.is_tls else 'redis'}://{user}{hosts}{end}"


def parse_address(raw: object) -> Address:
    """The deployment that a URL names.

    Raises ValueError, whose words repeat nothing of what was given: it may hold a secret.
    """
    scheme, mark, rest = raw.partition("://") if isinstance(raw, str) else ("", "", "")
    if not mark or scheme not in ("redis", "rediss", "unix"):
        raise ValueError(f"not a URL such as {_FORMS}")
    userinfo, _, rest = rest.rpartition("@")
    username, colon, password = userinfo.partition(":")
    if userinfo and not colon:
        raise ValueError("a user without a password; write user:password@ or :password@")
    username, password = unquote(username), unquote(password)
    if scheme == "unix":
        path, _, database = rest.partition("?")
        if not Path(path).is_absolute() or (database and not database.isdecimal()):
            raise ValueError("not unix:///path, with ?number for another database")
        number = int(database or 0)
        return Address((), path, username=username, password=password, database=number)
    hosts, _, end = rest.partition("/")
    is_number = end.isascii() and end.isdecimal()
    if "/" in end or "?" in end or "#" in end:
        raise ValueError("more behind the host than a database's number or a Sentinels' name")
    return Address(
        tuple(_parsed_host(host) for host in hosts.split(",")),
        is_tls=scheme == "rediss",
        username=username,
        password=password,
        database=int(end) if is_number else 0,
        watched="" if is_number else unquote(end),
    )


def _parsed_host(raw: str) -> tuple[str, int]:
    match = _HOST.fullmatch(raw)
    port = int(match["port"] or PORT) if match else 0
    if match is None or not 0 < port < 65536:
        raise ValueError("not host:port (reserved characters of a password are %-encoded)")
    return match["six"] or match["name"], port
