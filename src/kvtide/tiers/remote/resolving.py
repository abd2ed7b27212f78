"""Addresses of a host's name, within a limit: the system's resolver has none that could be set.

Ownership: a lookup is a thread of its own, which nobody can break off, so nobody joins it. There
is one for a name at most, under `_lock`: whoever asks meanwhile waits for the same.
"""

import socket
import threading
from dataclasses import dataclass, field
from typing import Any

_lock = threading.Lock()
_running: "dict[tuple[str, int], _Lookup]" = {}


@dataclass(slots=True)
class _Lookup:
    """One question to the resolver; `addresses` or `error` are there once it `has_ended`."""

    has_ended: threading.Event = field(default_factory=threading.Event)
    addresses: list[Any] = field(default_factory=list)
    error: OSError | None = None


def addresses_of(host: tuple[str, int], timeout_s: float) -> list[Any]:
    """As `socket.getaddrinfo` gives them.

    Raises:
        OSError: there are none, or it does not say so in time.
    """
    try:
        return _asked(host, socket.AI_NUMERICHOST)
    except socket.gaierror:
        pass  # it is a name
    with _lock:
        lookup = _running.get(host)
        if lookup is None:
            lookup = _running[host] = _Lookup()
            thread = threading.Thread(target=_run, args=(host, lookup), daemon=True)
            try:
                thread.start()
            except RuntimeError as error:
                del _running[host]
                raise OSError(f"no thread for its resolver could be started: {error}") from error
    if not lookup.has_ended.wait(timeout_s):
        raise TimeoutError("its name was not resolved in time")
    with _lock:  # an answer that came late waits for whoever asks next
        if _running.get(host) is lookup:
            del _running[host]
    if lookup.error is not None:
        raise OSError(*lookup.error.args)
    return lookup.addresses


def _run(host: tuple[str, int], lookup: _Lookup) -> None:
    try:
        lookup.addresses = _asked(host, 0)
    except OSError as error:
        lookup.error = error.with_traceback(None)
    except Exception as error:
        lookup.error = OSError(f"its resolver failed: {error!r}")
    finally:
        lookup.has_ended.set()


def _asked(host: tuple[str, int], flags: int) -> list[Any]:
    try:
        return socket.getaddrinfo(*host, type=socket.SOCK_STREAM, flags=flags)
    except UnicodeError as error:
        raise OSError(f"it has no name that could be: {error}") from error
