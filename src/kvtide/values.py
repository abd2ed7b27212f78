"""Values of settings: how each is read from text, YAML or JSON, and how it is shown.

A parser takes whatever was given and raises ValueError, with what is wrong in words, for what
cannot be meant. `kvtide.config` adds which setting it is, and where it was given.
"""

import ipaddress
import math
import reprlib
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from kvtide.units import KiB, MiB, format_bytes, parse_bytes

HOST_BYTES_MIN = MiB  # below this, somebody has left out the unit
CHUNK_TOKENS_MIN, CHUNK_TOKENS_MAX = 16, 8192  # one block of the smallest engines; a long prompt
CHUNK_TOKENS_DEFAULT = 256
LOCALHOST = "localhost"
PORT_MAX = 65535
TOKEN_LENGTH_MAX = KiB  # of an HTTP header
SHOWN_CHARS_MAX = 400
_SHORT = reprlib.Repr()
_SHORT.maxlevel = 2
_SHORT.maxstring = _SHORT.maxother = _SHORT.maxlong = SHOWN_CHARS_MAX


def in_short(raw: object) -> str:
    """The beginning of a value as it was given, for an error: a few lines of YAML may stand for a
    gigabyte."""
    return _SHORT.repr(raw)


class WronglySet(ValueError):
    """What is wrong, where in the value, and what is accepted there: nothing is to be added."""


@dataclass(frozen=True, slots=True)
class HTTPAddress:
    """Where the node listens for HTTP: an IP address or `localhost`, and a port.

    Port 0 lets the kernel choose.
    """

    host: str
    port: int

    @property
    def ip(self) -> str:
        """The host as an IP address."""
        return "127.0.0.1" if self.host == LOCALHOST else self.host

    def __str__(self) -> str:
        return shown_host(self.host, self.port)


def shown_host(host: str, port: int) -> str:
    """`host:port`, an IPv6 address in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def parse_host_bytes(raw: object) -> int | None:
    """A size, or None for `auto`."""
    if raw == "auto":
        return None
    size = parse_bytes(raw)
    if size < HOST_BYTES_MIN:
        raise ValueError(f"{size} bytes is too little to be meant; write a unit, such as 16GiB")
    return size


def parse_seconds(raw: object) -> float:
    """A number of seconds, 0 or more."""
    seconds = math.nan
    if isinstance(raw, int | float | str) and not isinstance(raw, bool):
        with suppress(ValueError):
            seconds = float(raw)
    if not (math.isfinite(seconds) and seconds >= 0):
        raise ValueError("not a number of seconds")
    return seconds


def parse_share(raw: object) -> float:
    """A number from 0 to 1."""
    share = math.nan
    if isinstance(raw, int | float | str) and not isinstance(raw, bool):
        with suppress(ValueError):
            share = float(raw)
    if not 0 <= share <= 1:
        raise ValueError("not such a number")
    return share


def parse_address(raw: object) -> HTTPAddress:
    """address:port. A name would be asked for while engines wait for the node."""
    host, colon, port = raw.rpartition(":") if isinstance(raw, str) else ("", "", "")
    if not colon or not host or not (port.isascii() and port.isdecimal()):
        raise ValueError("not address:port")
    if int(port) > PORT_MAX:
        raise ValueError(f"no port is above {PORT_MAX}")
    if ":" in host and not (host.startswith("[") and host.endswith("]")):
        raise ValueError("not address:port (an IPv6 address stands in brackets)")
    try:
        if host.startswith("["):
            host = host[1:-1]
            ipaddress.IPv6Address(host)
        elif host != LOCALHOST:
            ipaddress.IPv4Address(host)
    except ValueError:
        raise ValueError(f"an IP address is wanted, or {LOCALHOST}") from None
    return HTTPAddress(host, int(port))


def parse_token(raw: object) -> str:
    """A bearer token."""
    is_text = isinstance(raw, str) and 0 < len(raw) <= TOKEN_LENGTH_MAX
    if not is_text or not all("!" <= character <= "~" for character in str(raw)):
        raise ValueError("not such a text (in YAML, digits alone need quotes)")
    return str(raw)


def parse_flag(raw: object) -> bool:
    """True or false."""
    if isinstance(raw, bool):
        return raw
    if isinstance(raw, str) and raw.lower() in ("true", "false"):
        return raw.lower() == "true"
    raise ValueError("neither true nor false")


def parse_chunk_tokens(raw: object) -> int:
    """A number of tokens."""
    tokens = int(raw) if isinstance(raw, str) and raw.isdecimal() else raw
    if type(tokens) is not int or not CHUNK_TOKENS_MIN <= tokens <= CHUNK_TOKENS_MAX:
        raise ValueError("not such a number")
    return tokens


def one_of(*words: str) -> Callable[[object], str]:
    """A parser of one of these words."""

    def parse(raw: object) -> str:
        if raw not in words:
            raise ValueError("not one of them")
        return str(raw)

    return parse


def show(value: object) -> str:
    """The value in words."""
    if value is None:
        return "not set"
    if isinstance(value, bool):
        return "true" if value else "false"
    return str(value).removesuffix(".0")


def show_bytes(value: object) -> str:
    """A size in both units, or what stands for one."""
    return f"{format_bytes(value)} ({value} bytes)" if isinstance(value, int) else show(value)


def show_host_bytes(value: object) -> str:
    """A size in both units, or `auto`."""
    return "auto" if value is None else show_bytes(value)


def show_secret(value: object) -> str:
    """Whether there is one."""
    return "not set" if value is None else "set, not shown"
