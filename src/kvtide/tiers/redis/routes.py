"""Which server has a key, and a connection to it: a server alone, a master that Sentinels name, or
a cluster. What it is, the first server that answers says (HELLO); nobody has to configure it.

    alone      one connection
    Sentinels  asked at each connect who the master is: after a failover the old one is not used
    cluster    slots ─► masters, asked for at the first connect and when a server says MOVED

Ownership: one thread's; only `interrupt` comes from another.
"""

import binascii
import socket
import ssl
import threading
import time
from dataclasses import dataclass
from typing import Any, TypeAlias

from kvtide.errors import PlaceFailed, reason_of
from kvtide.redis_address import Address
from kvtide.tiers.redis.resp import Connection, Reply, ServerError
from kvtide.tiers.remote.resolving import addresses_of
from kvtide.tiers.remote.session import CALL_S_MAX, CONNECT_S_MAX, PUT_S_MAX
from kvtide.values import shown_host

SLOTS = 16384
REDIRECTS_MAX = 4
"""Of one call: a slot that moves is found with the first, a server that lags with another."""

Host: TypeAlias = tuple[str, int]


class Redirected(Exception):
    """A cluster's server says that another one has the key."""

    def __init__(self, key: bytes, host: Host | None, *, is_ask: bool) -> None:
        """With `is_ask` for this key and this time; else for its whole slot from now on."""
        super().__init__(key)
        self.key = key
        self.host = host
        self.is_ask = is_ask


@dataclass(frozen=True, slots=True)
class Limits:
    """How long a session waits: to connect, for the next byte, for a call, for a store."""

    connect_s: float = CONNECT_S_MAX
    silent_s: float = CALL_S_MAX
    call_s: float = CALL_S_MAX
    put_s: float = PUT_S_MAX


def slot_of(key: bytes) -> int:
    """Of a cluster: by what stands between the first { and the next }, if anything does."""
    start = key.find(b"{")
    end = key.find(b"}", start + 1)
    tag = key[start + 1 : end] if 0 <= start < end - 1 else key
    return binascii.crc_hqx(tag, 0) % SLOTS


class Routes:
    """Connections of one thread to one deployment."""

    def __init__(self, address: Address, tls: ssl.SSLContext | None, limits: Limits) -> None:
        self._address = address
        self._tls = tls
        self._limits = limits
        self._lock = threading.Lock()
        self._connections: dict[Host, Connection] = {}
        self._asks: dict[bytes, Host] = {}
        self._asked: list[tuple[bytes, Connection]] = []
        self._is_cluster = False
        self._slots: list[Host | None] = []
        self._first: Host | None = None
        self._failed_s: dict[Host, float] = {}
        self._until_s = 0.0
        self._is_interrupted = False

    # ---- for a call

    def begin(self, limit_s: float) -> None:
        """A call begins, which has ended in so long. What has gone stale meanwhile is closed."""
        for host, connection in list(self._connections.items()):
            if connection.is_stale:
                self._forget(host)
        self.limit(time.monotonic() + limit_s)
        if not self._connections:
            self._first = None  # where it was may not be where it is
        self._forget_asks()

    def limit(self, until_s: float) -> None:
        """What is asked from now on has ended by then, on the monotonic clock."""
        self._until_s = until_s
        for connection in self._connections.values():
            connection.limit(until_s)
        for _, asked in self._asked:
            asked.limit(until_s)

    def of(self, key: bytes) -> Connection:
        """The connection to whoever has this key.

        Raises:
            PlaceFailed: nobody can be reached, or has it.
        """
        asked = self._asks.get(key)
        if asked is not None:
            return self._asking(key, asked)
        if self._first is None:
            self._first = self._discovered()
        if not self._slots:
            return self._connected(self._first)
        host = self._slots[slot_of(key)]
        if host is None:
            self._forget_places()  # it may have one by the next call
            raise PlaceFailed(f"slot {slot_of(key)} of the cluster has no server")
        return self._connected(host)

    def _asking(self, key: bytes, host: Host) -> Connection:
        """A connection for this key alone, since leave to ask holds for one command; another one,
        where answers are still to come."""
        idle = (one for asked, one in self._asked if asked == key and not one.unread)
        connection = next(idle, None)
        if connection is None:
            connection = self._opened(host)
            self._asked.append((key, connection))
            self._greet(connection)
        connection.send(b"ASKING")
        _expect_ok(connection.read())
        return connection

    @property
    def are_one(self) -> bool:
        """Whether all keys are on one server."""
        return not self._slots

    def judge(self, key: bytes, error: ServerError) -> Exception:
        """What an error reply to a command about this key means for the call."""
        if error.code in ("MOVED", "ASK"):
            host, _, port = str(error).rpartition(" ")[2].rpartition(":")
            where = (host, int(port)) if host and port.isdecimal() else None
            return Redirected(key, where, is_ask=error.code == "ASK")
        if error.code == "READONLY":
            self.close()  # a master that is none any more
        return PlaceFailed(str(error))

    def redirected(self, error: Redirected) -> None:
        """Go by what a server has said."""
        self.drop_busy()
        if error.is_ask and error.host is not None:
            self._asks[error.key] = error.host
            return
        self._forget_places()

    def drop_busy(self) -> None:
        """Close the connections that have replies which nobody will read."""
        for host, connection in list(self._connections.items()):
            if connection.unread:
                self._forget(host)
        for _, asked in self._asked:
            if asked.unread:
                asked.close()
        self._asked = [one for one in self._asked if not one[1].unread]

    # ---- life

    def interrupt(self) -> None:
        """From another thread: what runs fails soon, and nothing is connected any more."""
        with self._lock:
            self._is_interrupted = True
            for connection in self._connections.values():
                connection.interrupt()

    def close(self) -> None:
        """All connections; the next call connects again."""
        self._forget_asks()
        for host in list(self._connections):
            self._forget(host)
        self._forget_places()

    def _forget_asks(self) -> None:
        for _, asked in self._asked:
            asked.close()
        self._asked.clear()
        self._asks.clear()

    def _forget(self, host: Host) -> None:
        with self._lock:
            self._connections.pop(host).close()

    # ---- connecting

    def _discovered(self) -> Host:
        """Find out what is there; the server that has all, or one of the cluster."""
        address = self._address
        if address.path:
            return address.path, 0
        failed: list[str] = []
        # A URL may name only what is gone by now: those that it led to know the others.
        known = () if address.watched else tuple(self._connections)
        hosts = list(dict.fromkeys((*address.hosts, *known)))
        # Who failed last is asked last: a call may end before all have been, and the next goes on.
        self._failed_s = {host: self._failed_s.get(host, 0.0) for host in hosts}
        for host in sorted(hosts, key=self._failed_s.__getitem__):
            if failed and time.monotonic() >= self._until_s:
                break
            try:
                return self._master_by(host) if address.watched else self._seen(host)
            except (PlaceFailed, OSError) as error:
                failed.append(failure_of(error))
                self._failed_s[host] = time.monotonic()
        raise PlaceFailed("; ".join(dict.fromkeys(failed)))

    def _seen(self, host: Host) -> Host:
        connection = self._connected(host)
        if self._is_cluster:
            connection.send(b"CLUSTER", b"SLOTS")
            reply = connection.read()
            if isinstance(reply, ServerError):
                raise PlaceFailed(str(reply))
            self._slots = _slots(reply, host)
        return host

    def _master_by(self, host: Host) -> Host:
        """The master that a Sentinel names."""
        sentinel = self._opened(host)
        try:
            self._greet(sentinel, is_sentinel=True)
            name = self._address.watched.encode()
            sentinel.send(b"SENTINEL", b"GET-MASTER-ADDR-BY-NAME", name)
            reply = sentinel.read()
        finally:
            sentinel.close()
        if isinstance(reply, ServerError):
            raise PlaceFailed(f"a Sentinel says {reply}")
        match reply:
            case [bytes() as name, bytes() as port] if port.isdigit():
                master = name.decode(errors="replace"), int(port)
                self._connected(master)
                return master
        raise PlaceFailed(f"{shown_host(*host)} watches no {self._address.watched!r}")

    def _connected(self, host: Host) -> Connection:
        connection = self._connections.get(host)
        if connection is None:
            try:
                connection = self._greeted(host)
            except (PlaceFailed, OSError):  # it may also accept, and then say nothing
                self._forget_places()  # another one may have by now what it had
                raise
            with self._lock:
                self._connections[host] = connection
        if self._is_interrupted:
            raise PlaceFailed("it is being closed")
        return connection

    def _forget_places(self) -> None:
        self._slots, self._first = [], None

    def _greeted(self, host: Host) -> Connection:
        connection = self._opened(host)
        try:
            self._greet(connection)
        except BaseException:
            connection.close()
            raise
        return connection

    def _opened(self, host: Host) -> Connection:
        """A connection that nothing was said on."""
        try:
            sock = self._socket(host)
        except OSError as error:  # ssl.SSLError is one
            where = self._address.path or shown_host(*host)
            raise PlaceFailed(f"{where} cannot be reached: {reason_of(error)}") from error
        connection = Connection(sock, self._limits.silent_s)
        connection.limit(self._until_s)
        return connection

    def _socket(self, host: Host) -> socket.socket:
        if self._address.path:
            return self._reached(socket.AF_UNIX, self._address.path, host)
        failed: OSError | None = OSError("its name has no address")
        for family, _, _, _, where in addresses_of(host, self._connect_s()):
            try:
                return self._reached(family, where, host)
            except OSError as error:
                failed = error.with_traceback(None)
        try:
            assert failed is not None
            raise failed
        finally:
            failed = None  # or it and its frames, which hold cells, would keep each other for ever

    def _connect_s(self) -> float:
        """So long the next step of connecting may take."""
        return min(self._limits.connect_s, max(0.001, self._until_s - time.monotonic()))

    def _reached(self, family: int, where: Any, host: Host) -> socket.socket:
        sock = socket.socket(family)
        try:
            sock.settimeout(self._connect_s())
            sock.connect(where)
            if family != socket.AF_UNIX:
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if not self._address.is_tls:
                return sock
            assert self._tls is not None, "an address with TLS, and nothing to verify it with"
            sock.settimeout(self._connect_s())
            return self._tls.wrap_socket(sock, server_hostname=host[0])
        except BaseException:
            sock.close()
            raise

    def _greet(self, connection: Connection, *, is_sentinel: bool = False) -> None:
        """Say who we are, and see who it is."""
        address = self._address
        hello = [b"HELLO", b"2"]
        if address.password:
            user = address.username or "default"
            hello += [b"AUTH", user.encode(), address.password.encode()]
        connection.send(*hello)
        reply = connection.read()
        if is_sentinel and isinstance(reply, ServerError) and address.password:
            connection.send(b"HELLO", b"2")  # Sentinels may have no such user
            reply = connection.read()
        if isinstance(reply, ServerError):
            raise PlaceFailed(str(reply))
        said = dict(zip(reply[::2], reply[1::2], strict=False)) if isinstance(reply, list) else {}
        mode = said.get(b"mode")
        if is_sentinel and mode != b"sentinel":
            raise PlaceFailed("it is no Sentinel; leave the name out of the url")
        if not is_sentinel and mode == b"sentinel":
            raise PlaceFailed("it is a Sentinel; end the url with the name of what it watches")
        self._is_cluster = mode == b"cluster"
        if said.get(b"role") == b"replica" and not (is_sentinel or self._is_cluster):
            raise PlaceFailed("it is a replica, which takes nothing; name its master")
        if address.database and not is_sentinel:
            connection.send(b"SELECT", b"%d" % address.database)
            _expect_ok(connection.read())


def failure_of(error: PlaceFailed | OSError) -> str:
    """What failed, in words; TimeoutError is an OSError, and ssl.SSLError."""
    if isinstance(error, TimeoutError | BlockingIOError):
        return "it did not answer in time"
    return reason_of(error) if isinstance(error, OSError) else str(error)


def _expect_ok(reply: Reply) -> None:
    if isinstance(reply, ServerError):
        raise PlaceFailed(str(reply))


def _slots(reply: Reply, seed: Host) -> list[Host | None]:
    """CLUSTER SLOTS as a table; a server that does not know its own name is the one we asked."""
    table: list[Host | None] = [None] * SLOTS
    for entry in reply if isinstance(reply, list) else []:
        match entry:
            case [int(first), int(last), [name, int(port), *_], *_] if 0 <= first <= last < SLOTS:
                host = name.decode(errors="replace") if isinstance(name, bytes) else ""
                known = host if host and host != "?" else seed[0]
                table[first : last + 1] = [(known, port)] * (last + 1 - first)
    if not any(table):
        raise PlaceFailed("the cluster has no servers for its slots")
    return table
