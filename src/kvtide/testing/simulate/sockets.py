"""Stream sockets of the simulated machine, with what stands for `socket`.

They carry the very bytes of real frames, with descriptors attached to them as the kernel does.
What is sent arrives later, in order; a socket holds so many bytes that wait, so senders see short
writes and full buffers. A connection can be cut at any byte: both ends read what has arrived, and
then the end of the stream.
"""

import errno
import os
import select
import socket
import struct
from array import array
from collections import deque
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from kvtide.testing.simulate.files import File, Names, Table, wait_ready
from kvtide.testing.simulate.kernel import Kernel, Process

KIND_AT = 4
"""Where a frame says of which kind it is."""


class Listener(File):
    """A listening socket."""

    def __init__(self) -> None:
        super().__init__()
        self.waiting: deque[Stream] = deque()
        self.is_open = True

    def ready(self) -> int:
        return select.POLLIN if self.waiting else 0

    def closed(self) -> None:
        self.is_open = False
        while self.waiting:
            self.waiting.popleft().cut()


class Stream(File):
    """One end of a connection. `process` is whose it is that connected."""

    def __init__(self, net: "Net", process: Process, bytes_max: int) -> None:
        super().__init__()
        self.net = net
        self.process = process
        self.bytes_max = bytes_max
        self.peer: Stream | None = None
        self.arrived: deque[tuple[memoryview, list[File]]] = deque()
        self.waiting_bytes = 0
        """On their way to us, and arrived: what our buffer holds."""
        self.is_ended = False
        """Nothing more comes."""
        self.is_cut = False
        self.is_over_there = False
        """We know that the peer has closed it, or that it broke."""
        self.fuse = 0
        """Sends left until the connection breaks with what is sent then; 0: it does not."""
        self.doomed_kind = -1
        """The kind of message with which the connection breaks; none where negative."""
        self._free_us = 0

    def ready(self) -> int:
        found = select.POLLIN if self.arrived or self.is_ended else 0
        if self.is_ended:
            found |= select.POLLHUP
        peer = self.peer
        if (
            self.is_over_there
            or peer is None
            or peer.is_cut
            or peer.waiting_bytes < peer.bytes_max
        ):
            found |= select.POLLOUT
        return found

    def send(self, frames: Sequence[memoryview], files: list[File]) -> int:
        """Have bytes arrive at the peer's, of one frame or several; how many its buffer takes."""
        peer = self.peer
        if self.is_cut or self.is_over_there or peer is None:
            raise BrokenPipeError(errno.EPIPE, "the peer has closed it")
        if peer.is_cut:
            return sum(map(len, frames))  # it has just closed: we do not know yet
        room = peer.bytes_max - peer.waiting_bytes
        if room <= 0:
            raise BlockingIOError
        if self._breaks_with(frames):
            self.lose()
            return sum(map(len, frames))
        sent = b"".join(frames)[:room]
        self.net.kernel.log_bytes(sent)
        peer.waiting_bytes += len(sent)
        for file in files:
            file.references += 1
        kernel = self.net.kernel
        # In order: nothing overtakes what was sent before.
        self._free_us = max(self._free_us, kernel.now_us + self.net.delay_us())
        item = (memoryview(sent), files)
        kernel.at(self._free_us, lambda: peer.take(item))
        return len(sent)

    def _breaks_with(self, frames: Sequence[memoryview]) -> bool:
        """Whether the connection ends with what is sent now: then nobody gets it."""
        if any(len(one) > KIND_AT and one[KIND_AT] == self.doomed_kind for one in frames):
            return True
        if not self.fuse:
            return False
        self.fuse -= 1
        return not self.fuse

    def take(self, item: tuple[memoryview, list[File]]) -> None:
        """Bytes have arrived."""
        if self.is_cut or self.is_ended:
            self.net.drop(item[1])
            return
        self.arrived.append(item)
        self.changed()

    def receive(self, bytes_max: int) -> tuple[bytes, list[File]]:
        """What has arrived, up to the first bytes with descriptors; b"" at the end."""
        if not self.arrived:
            if self.is_ended or self.is_cut:
                return b"", []
            raise BlockingIOError
        parts: list[memoryview] = []
        files: list[File] = []
        while self.arrived and not files and bytes_max > 0:
            data, own = self.arrived[0]
            if own and parts:
                break
            taken = data[:bytes_max]
            files = own
            parts.append(taken)
            bytes_max -= len(taken)
            if len(taken) == len(data):
                self.arrived.popleft()
            else:
                self.arrived[0] = (data[len(taken) :], [])
        received = b"".join(parts)
        self.waiting_bytes -= len(received)
        if self.peer is not None:
            self.peer.changed()
        return received, files

    def end(self) -> None:
        """The end of the stream has arrived."""
        self.is_ended = self.is_over_there = True
        self.changed()

    def cut(self) -> None:
        """This end is closed; the other learns of it as of everything that was sent."""
        if self.is_cut:
            return
        self.is_cut = True
        for _, files in self.arrived:
            self.net.drop(files)
        self.arrived.clear()
        peer = self.peer
        if peer is not None and not peer.is_cut:
            kernel = self.net.kernel
            self._free_us = max(self._free_us, kernel.now_us + self.net.delay_us())
            kernel.at(self._free_us, peer.end)
        self.net.forget(self)

    def lose(self) -> None:
        """The connection breaks, whatever is on its way: both ends see it now."""
        for one in (self, self.peer):
            if one is not None:
                one.end()
        self.net.forget(self)

    def closed(self) -> None:
        self.cut()


class Net:
    """The unix sockets of one machine."""

    def __init__(self, kernel: Kernel, table: Table, names: Names) -> None:
        self.kernel = kernel
        self.table = table
        self.names = names
        self.listeners: dict[str, Listener] = {}
        self.streams: dict[Stream, None] = {}
        self.slow_us = 0
        """Added to every delivery while the machine is busy."""

    def delay_us(self) -> int:
        """From a send to its arrival."""
        return 5 + int(self.kernel.draw.expovariate(1 / 25)) + self.slow_us

    def forget(self, stream: Stream) -> None:
        """Nothing more is carried by it, nor by its peer."""
        for one in (stream, stream.peer):
            if one is not None:
                self.streams.pop(one, None)

    def calm(self) -> None:
        """Nothing breaks any more."""
        self.slow_us = 0
        for stream in self.streams:
            for end in (stream, stream.peer):
                if end is not None:
                    end.fuse, end.doomed_kind = 0, -1

    def drop(self, files: Sequence[File]) -> None:
        """Descriptors that nobody took."""
        for file in files:
            self.table.let_go(file)

    def connect(self, path: str, process: Process) -> Stream:
        """A connection to whoever listens there. Raises as `socket.connect`."""
        listener = self.listeners.get(path)
        if listener is None or not listener.is_open:
            raise ConnectionRefusedError(errno.ECONNREFUSED, "nobody listens")
        draw = self.kernel.draw
        sizes = (600, 4_000, 200_000, 200_000)
        mine = Stream(self, process, draw.choice(sizes))
        theirs = Stream(self, process, draw.choice(sizes))
        mine.peer, theirs.peer = theirs, mine
        self.streams[mine] = None
        listener.waiting.append(theirs)
        listener.changed()
        return mine


class SimSocket:
    """As `socket.socket`, of as much as `kvtide.wire` uses."""

    def __init__(self, net: Net, file: File | None = None) -> None:
        self._net = net
        self._timeout_s: float | None = None
        self._file = file
        self._number = -1 if file is None else net.table.add(file)
        self._path = ""

    # ---- making connections

    def settimeout(self, timeout_s: float | None) -> None:
        self._timeout_s = timeout_s

    def setblocking(self, blocking: bool) -> None:
        self._timeout_s = None if blocking else 0.0

    def connect(self, path: str) -> None:
        kernel = self._net.kernel
        kernel.edge()
        kernel.sleep(self._net.delay_us() / 1e6)
        self._file = self._net.connect(path, self._net.table.process())
        self._number = self._net.table.add(self._file)

    def bind(self, path: str) -> None:
        self._path = path
        self._net.names.make(path)
        self._file = Listener()
        self._number = self._net.table.add(self._file)

    def listen(self, count: int) -> None:
        assert isinstance(self._file, Listener), count
        self._net.listeners[self._path] = self._file

    def accept(self) -> tuple["SimSocket", None]:
        assert isinstance(self._file, Listener)
        if not self._file.waiting:
            raise BlockingIOError
        return SimSocket(self._net, self._file.waiting.popleft()), None

    def getsockopt(self, level: int, option: int, size: int) -> bytes:
        assert (level, option) == (socket.SOL_SOCKET, socket.SO_PEERCRED), option
        peer = self._stream.process
        return struct.pack("3i", peer.pid, os.getuid(), 0)[:size]

    # ---- bytes

    @property
    def _stream(self) -> Stream:
        assert isinstance(self._file, Stream), "not connected"
        return self._file

    def fileno(self) -> int:
        return self._number

    def send(self, data: Any) -> int:
        return self.send_files([memoryview(data)], [])

    def sendmsg(self, frames: Sequence[memoryview]) -> int:
        return self.send_files(frames, [])

    def send_files(self, frames: Sequence[memoryview], files: list[File]) -> int:
        kernel = self._net.kernel
        while True:
            kernel.edge()
            try:
                return self._stream.send(frames, files)
            except BlockingIOError:
                self._wait(select.POLLOUT)

    def sendall(self, data: memoryview) -> None:
        while data:
            data = data[self.send(data) :]

    def recvmsg(self, size: int, control: int, flags: int) -> tuple[bytes, list[Any], int, None]:
        self._net.kernel.edge()
        while True:
            try:
                data, files = self._stream.receive(size)
                break
            except BlockingIOError:
                self._wait(select.POLLIN)
        numbers = array("i")
        for file in files:
            numbers.append(self._net.table.add(file))
            self._net.table.let_go(file)
        controls = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, numbers.tobytes())] if files else []
        assert len(files) <= control, flags
        return data, controls, 0, None

    def _wait(self, wanted: int) -> None:
        """For what is not ready; as long as the socket's timeout says."""
        timeout_s = self._timeout_s
        if timeout_s == 0.0 or self._net.kernel.thread is None:
            raise BlockingIOError
        if not wait_ready(self._net.kernel, [(self._stream, wanted)], timeout_s):
            raise TimeoutError("timed out")

    def shutdown(self, how: int) -> None:
        self._stream.is_ended = True

    def close(self) -> None:
        if self._number >= 0:
            self._net.table.close(self._number)
            self._number = -1

    def __enter__(self) -> "SimSocket":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def socket_of(net: Net) -> SimpleNamespace:
    """What stands for `socket`."""
    names = ["AF_UNIX", "SOCK_STREAM", "SOCK_NONBLOCK", "SOL_SOCKET", "SCM_RIGHTS", "SHUT_RD"]
    names += ["MSG_CMSG_CLOEXEC", "MSG_CTRUNC", "SO_PEERCRED"]
    table = net.table

    def send_fds(sock: SimSocket, buffers: list[Any], numbers: list[int]) -> int:
        (data,) = buffers
        return sock.send_files([memoryview(data)], [table.file(number) for number in numbers])

    def made(family: int, kind: int) -> SimSocket:
        assert family == socket.AF_UNIX, kind
        return SimSocket(net)

    return SimpleNamespace(
        socket=made, send_fds=send_fds, **{name: getattr(socket, name) for name in names}
    )
