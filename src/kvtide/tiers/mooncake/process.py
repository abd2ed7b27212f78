"""The program that has Mooncake's client in it: it does what its one socket asks for, in order.

    python -m kvtide.tiers.mooncake.process SOCKET MEMORY              descriptors

A request and an answer are JSON behind a length of four bytes; the bytes of values lie in MEMORY,
which both sides map. Calls of the client have no deadline, cannot be called back, hang for as long
as a server does, and may end their process (it aborts where it finds something wrong, and crashes
when it is used late). So they happen here: who asks waits as long as it likes, and then kills this
process, after which nothing of it writes anywhere. It ends with its socket, whatever hangs.

Its listeners (the client opens two, on all addresses, whatever it is told) answer only this
machine: nobody has to call a client that owns no memory of the store.
"""

import contextlib
import ctypes
import json
import mmap
import os
import select
import socket
import stat
import struct
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

MASTER_GONE = -900
LEASE_OVER = -707
"""What was asked for is not evicted for a while; that ended before the answer, or the bytes, had
come. What then came is not to be believed, but may be asked for again."""
LENGTH = struct.Struct("<I")
MESSAGE_BYTES_MAX = 64 << 20
CONNECT_S_MAX = 1.0
"""Whether there is a master at all is tried first: the client itself tries for seconds."""
LISTENS, TIME_WAIT = "0A", "06"
"""Of rows of /proc/net/tcp: nobody is connected."""


class Calls:
    """What may be asked for, by name."""

    def __init__(
        self, memory: mmap.mmap, host: str, port: int, metadata: str, protocol: str
    ) -> None:
        """Become a client that owns nothing of the store.

        Raises:
            ImportError: there is no client on this machine.
            OSError: the store does not take it, or is not there.
        """
        from mooncake.store import MooncakeDistributedStore

        socket.create_connection((host, port), CONNECT_S_MAX).close()
        master = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        self._store = MooncakeDistributedStore()
        self._at = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        code = self._store.setup("127.0.0.1", metadata, 0, 0, protocol, "", master)
        if code == 0:
            keep_listeners_inside()
            code = self._store.register_buffer(self._at, len(memory))
        if code != 0:
            raise ConnectionError(f"it takes no client (Mooncake's error {code})")

    def exist(self, names: Sequence[str]) -> list[int]:
        """Of each 1 or 0; negative: it cannot be told."""
        return self._asked(self._store.batch_is_exist, names)

    def heads(self, names: Sequence[str], length: int) -> list[int]:
        """The first bytes of each, one after the other in memory; this length, or why not."""
        codes = self._heads(names, list(range(len(names))), length)
        late = [number for number, code in enumerate(codes) if code == LEASE_OVER]
        again = self._heads([names[number] for number in late], late, length)
        for number, code in zip(late, again, strict=True):
            codes[number] = code
        return codes

    def _heads(self, names: Sequence[str], places: Sequence[int], length: int) -> list[int]:
        if not names:
            return []
        codes = self._asked(self._store.batch_get_session_start, names)
        there = [number for number, code in enumerate(codes) if code == 0]
        if not there:
            return codes
        begun = [names[number] for number in there]
        addresses = [[self._at + places[number] * length] for number in there]
        lengths, zeroes = [[length]] * len(there), [[0]] * len(there)
        got = self._store.batch_get_into_multi_buffer_ranges(begun, addresses, lengths, zeroes)
        self._store.batch_get_session_end(begun)
        for number, code in zip(there, got, strict=True):
            codes[number] = code
        return codes

    def begin_get(self, name: str) -> int:
        """Find out where it is; 0, or why not."""
        code = self._asked(self._store.batch_get_session_start, [name])[0]
        if code == LEASE_OVER:
            code = self._asked(self._store.batch_get_session_start, [name])[0]
        return code

    def get(self, name: str, start: int, length: int, place: int) -> int:
        """Bytes of it into memory, between `begin_get` and `end_get`; their length."""
        code = self._get(name, start, length, place)
        if code != LEASE_OVER:
            return code
        self.end_get(name)
        return self.begin_get(name) or self._get(name, start, length, place)

    def _get(self, name: str, start: int, length: int, place: int) -> int:
        address = self._at + place
        return self._one(
            self._store.batch_get_into_multi_buffer_ranges(
                [name], [[address]], [[length]], [[start]]
            )
        )

    def end_get(self, name: str) -> int:
        code: int = self._store.batch_get_session_end([name])
        return code

    def begin_put(self, name: str, length: int) -> int:
        """Set room aside for it; 0, or why not."""
        return self._asked(self._store.batch_put_session_start, [name], [length])[0]

    def put(self, name: str, start: int, length: int, place: int) -> int:
        """Bytes of it from memory, between `begin_put` and `end_put`; their length."""
        address = self._at + place
        return self._one(
            self._store.batch_put_from_multi_buffer_ranges(
                [name], [[address]], [[length]], [[start]]
            )
        )

    def end_put(self, name: str) -> int:
        """It is there from now on, whole."""
        return self._one(self._store.batch_put_session_end([name]))

    def revoke(self, name: str) -> int:
        """It will not be."""
        return self._one(self._store.batch_put_session_revoke([name]))

    def replace(self, names: Sequence[str], length: int) -> list[int]:
        """Small ones of one length, one after the other in memory; 0, or why not."""
        places = [self._at + number * length for number in range(len(names))]
        return self._asked(self._store.batch_upsert_from, names, places, [length] * len(names))

    def remove(self, names: Sequence[str]) -> list[int]:
        """Whoever reads them."""
        return self._asked(self._store.batch_remove, names, True)

    def remove_all(self, pattern: str) -> int:
        """Those whose names have this in them; how many there were, or why not."""
        return self._asked(lambda: [self._store.remove_by_regex(pattern, True)])[0]

    @staticmethod
    def _one(codes: Sequence[int]) -> int:
        return codes[0]

    @staticmethod
    def _asked(call: Callable[..., list[int]], *arguments: Any) -> list[int]:
        """What the master says. A connection that has ended since is noticed by a first call
        alone, which fails at once; the next one connects again."""
        codes = call(*arguments)
        return call(*arguments) if set(codes) == {MASTER_GONE} else codes


def keep_listeners_inside() -> None:
    """Bind all listening sockets of this process to the loopback device.

    Raises:
        OSError: they cannot be bound, or somebody was quicker, and is connected.
    """
    ports = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            duplicate = os.dup(int(name))
        except OSError:
            continue  # that of the list itself, or one that was closed meanwhile
        if not stat.S_ISSOCK(os.fstat(duplicate).st_mode):
            os.close(duplicate)
            continue
        with socket.socket(fileno=duplicate) as one:
            is_inet = one.family in (socket.AF_INET, socket.AF_INET6)
            if is_inet and one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                one.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, b"lo")
                ports.add(one.getsockname()[1])
    if ports & set(_connected_ports()):
        raise ConnectionError("somebody was connected to its client before that was closed to all")


def _connected_ports() -> Iterator[int]:
    """Ports of this machine that connections lead to, or are about to."""
    for table in ("/proc/self/net/tcp", "/proc/self/net/tcp6"):
        with contextlib.suppress(FileNotFoundError), open(table) as rows:
            for row in list(rows)[1:]:
                _, ours, _, state, *_ = row.split()
                if state not in (LISTENS, TIME_WAIT):
                    yield int(ours.rpartition(":")[2], 16)


def send(channel: socket.socket, message: Any) -> None:
    """One request or answer."""
    content = json.dumps(message).encode()
    channel.sendall(LENGTH.pack(len(content)) + content)


def receive(read: Callable[[int], bytes]) -> Any:
    """The next one, by what reads exactly so many bytes.

    Raises:
        ValueError: it is none.
    """
    (length,) = LENGTH.unpack(read(LENGTH.size))
    if length > MESSAGE_BYTES_MAX:
        raise ValueError(f"a message of {length} bytes")
    return json.loads(read(length))


def _end_with(channel: socket.socket) -> None:
    """End when nobody has the other end any more, whatever the client does: in order, that would
    take it a second, or crash."""
    poll = select.poll()
    poll.register(channel, select.POLLRDHUP)
    poll.poll()
    os._exit(0)


def main() -> None:
    """Serve until the socket ends."""
    channel = socket.socket(fileno=int(sys.argv[1]))
    threading.Thread(target=_end_with, args=(channel,), daemon=True).start()
    memory = mmap.mmap(int(sys.argv[2]), 0)
    stream = channel.makefile("rb")

    def read(length: int) -> bytes:
        content = stream.read(length)
        if len(content) < length:
            os._exit(0)
        return content

    try:
        calls = Calls(memory, *receive(read))
    except ImportError as error:
        send(channel, f"Mooncake's client cannot be used here: {error}")
        return
    except OSError as error:
        send(channel, str(error))
        return
    send(channel, "")
    while True:
        name, *arguments = receive(read)
        send(channel, getattr(calls, name)(*arguments))


if __name__ == "__main__":
    main()
