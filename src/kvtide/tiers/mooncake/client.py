"""A client of the store in a process of its own, and the memory through which values pass.

    node thread ── request, answer ──► process ── Mooncake ──► master, owners
                └─ memory: two windows ─┘

Whatever the store or its library does, a call ends in time: by an answer, or by the end of the
process, which the next call starts again. Cells are touched by the node alone, so a call that is
given up can write into nobody's memory. The price is one copy of each byte, which is summed in the
same pass.

Ownership: one thread's, but for `interrupt`.
"""

import mmap
import os
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from kvtide.errors import PlaceFailed
from kvtide.server_address import Address
from kvtide.tiers.mooncake.process import receive, send
from kvtide.units import MiB

WINDOW_BYTES = 4 * MiB
"""Of a value, at once: long enough that a round trip does not count."""
WINDOWS = 2
"""One travels while the other is copied and summed."""
MEMORY_BYTES = WINDOWS * WINDOW_BYTES
PROGRAM = "kvtide.tiers.mooncake.process"
START_S_MAX = 20.0
"""A process that is not ready by then never will be."""
NOT_THERE = (-703, -704)
"""Being written, or no such name."""
UNREACHED = -800
NOT_GIVEN = (-600, -700, UNREACHED)
"""Of a value that is there: it does not come. Its master learns only after a while that an owner
has died. (The first is told by a client that has not known that owner alive.)"""
THERE_ALREADY = -705
NO_ROOM = -200
_WHY = {
    -600: "a parameter is wrong",
    -700: "the owner of its bytes is not there",
    -706: "it is leased",
    -707: "its lease ended before its bytes had come",
    -800: "the transfer failed",
    -900: "its master does not answer",
}
ENVIRONMENT = {
    "MC_STORE_CLIENT_SETUP_RETRIES": "1",
    "MC_STORE_CLIENT_METRIC": "0",
}
"""For the process: it neither tries for long by itself nor counts."""


@dataclass(frozen=True, slots=True)
class Place:
    """A store, and how it is spoken to.

    Attributes:
        address: of its master.
        metadata: as all of its clients are told: "P2PHANDSHAKE", or a server's URL.
        protocol: "tcp" or "rdma".
    """

    address: Address
    metadata: str = "P2PHANDSHAKE"
    protocol: str = "tcp"


def failed(code: int) -> PlaceFailed:
    """What a code says that is neither an answer nor a miss."""
    return PlaceFailed(f"Mooncake's error {code}: {_WHY.get(code, 'see its documentation')}")


class Client:
    """See the module. Calls raise PlaceFailed, and the process is gone then."""

    def __init__(self, place: Place) -> None:
        """Begin to start the process: nobody waits for it here."""
        self._place = place
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: socket.socket | None = None
        self._started_s = 0.0
        self._is_ready = False
        self._is_interrupted = False
        self._until_s = 0.0
        self.due = 0
        """Answers that were asked for and not taken."""
        self._memory_fd = os.memfd_create("kvtide-mooncake", os.MFD_CLOEXEC)
        os.ftruncate(self._memory_fd, MEMORY_BYTES)
        self.memory = memoryview(mmap.mmap(self._memory_fd, MEMORY_BYTES))
        """What both sides see."""
        self._reason = ""
        self._came = ""
        """What an owner gave last, by name."""
        with suppress(OSError):  # the first call tries again, and tells
            self._start()

    def limit(self, until_s: float) -> None:
        """Calls have ended by then."""
        self._until_s = until_s

    def call(self, name: str, *arguments: Any) -> Any:
        """What a method of `Calls` answers."""
        self.ask(name, *arguments)
        return self.answer()

    def ask(self, name: str, *arguments: Any) -> None:
        """Have it begin; answers come in the order of these calls."""
        try:
            self._begin()
            assert self._channel is not None
            self._channel.settimeout(self._left_s())
            send(self._channel, (name, *arguments))
        except OSError as error:
            raise self._gone(error) from error
        self.due += 1

    def answer(self) -> Any:
        """The next answer that is due."""
        assert self.due > 0, self.due
        try:
            answer = self._received()
        except OSError as error:
            raise self._gone(error) from error
        self.due -= 1
        return answer

    def code(self, name: str, *arguments: Any, but: Sequence[int] = ()) -> int:
        """The one number that is answered; negative only where it is one of these."""
        code: int = self.call(name, *arguments)
        return self.judge(code, but)

    def codes(self, name: str, *arguments: Any, but: Sequence[int] = ()) -> list[int]:
        """The same of several."""
        codes: list[int] = self.call(name, *arguments)
        return [self.judge(code, but) for code in codes]

    def heads(self, names: Sequence[str], length: int, *, is_hint: bool = False) -> list[int]:
        """The first bytes of each, one after the other in memory: this length, or negative where
        it is not there, or lies with an owner that does not give it while another one does. What
        is but a hint is not there, whatever is wrong."""
        codes: list[int] = self.call("heads", names, length)
        came = [name for name, code in zip(names, codes, strict=True) if code >= 0]
        if came:
            self._came = came[-1]
        but: tuple[int, ...] = NOT_THERE
        if any(code in NOT_GIVEN for code in codes) and (
            is_hint or came or self._does_another_come()
        ):
            but = NOT_THERE + NOT_GIVEN
        for code in codes:
            self.judge(code, but)
        if UNREACHED in codes:
            self.end()  # it would try that owner for a second each time; another one knows at once
        return codes

    def _does_another_come(self) -> bool:
        return self._came != "" and self.call("heads", [self._came], 1) == [1]

    def judge(self, code: int, but: Sequence[int] = ()) -> int:
        """A number that was answered, unless it says that the place has failed."""
        if code < 0 and code not in but:
            raise failed(code)
        return code

    def give_up(self, name: str, *arguments: Any) -> None:
        """Ask for this as the last thing, whatever failed before; nobody waits for it long."""
        try:
            while self.due:
                self.answer()
            self.call(name, *arguments)
        except PlaceFailed:
            self.end()

    def interrupt(self) -> None:
        """From another thread: what runs fails, and all that is asked for later."""
        self._is_interrupted = True
        process = self._process
        if process is not None:
            process.kill()

    def drop(self) -> None:
        """After a failure: what was begun goes on no more."""
        if self._is_ready:
            self.end()

    def end(self) -> None:
        """Of the process: nothing of it writes anywhere from here on."""
        if self._channel is not None:
            self._channel.close()
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        self._channel, self._process, self._is_ready, self.due = None, None, False, 0

    def close(self) -> None:
        """The last call."""
        self.end()
        os.close(self._memory_fd)

    # ---- the process

    def _begin(self) -> None:
        """Have a process that is ready."""
        if self._is_interrupted:
            raise PlaceFailed("it is being closed")
        if self._process is not None and self._process.poll() is not None:
            self.end()  # it was refused, or has crashed, while nobody asked
        if self._is_ready:
            return
        if self._process is not None and self._is_refused():
            self.end()  # that was when it was started, maybe long ago
        if self._process is None:
            self._start()
            if self._is_refused():
                reason, self._reason = self._reason, ""
                self.end()
                raise PlaceFailed(reason)

    def _is_refused(self) -> bool:
        """Wait until it is ready; whoever is in a hurry leaves it to the next call."""
        try:
            self._reason = self._received()
        except TimeoutError:
            if time.monotonic() - self._started_s > START_S_MAX:
                raise
            raise PlaceFailed("its client is being started") from None
        except ConnectionError as error:
            self._reason = str(error)
        self._is_ready = not self._reason
        return not self._is_ready

    def _start(self) -> None:
        address, place = self._place.address, self._place
        ours, theirs = socket.socketpair()
        descriptors = (theirs.fileno(), self._memory_fd)
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", PROGRAM, *map(str, descriptors)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,  # it tells of each miss; what matters comes as codes
                env=ENVIRONMENT | dict(os.environ),
                pass_fds=descriptors,
                start_new_session=True,
            )
        except OSError:
            ours.close()
            raise
        finally:
            theirs.close()
        self._channel, self._started_s, self.due = ours, time.monotonic(), 0
        if self._is_interrupted:
            self._process.kill()
        send(ours, (address.host, address.port, place.metadata, place.protocol))

    # ---- the socket

    def _left_s(self) -> float:
        left_s = self._until_s - time.monotonic()
        if left_s <= 0:
            raise TimeoutError
        return left_s

    def _received(self) -> Any:
        channel = self._channel
        assert channel is not None

        def read(length: int) -> bytes:
            content = bytearray(length)
            rest = memoryview(content)
            while rest:
                channel.settimeout(self._left_s())
                count = channel.recv_into(rest)
                if count == 0:
                    raise ConnectionError("its client has ended")
                rest = rest[count:]
            return bytes(content)

        return receive(read)

    def _gone(self, error: OSError) -> PlaceFailed:
        code = None if self._process is None else self._process.poll()
        self.end()
        if self._is_interrupted:
            return PlaceFailed("it is being closed")
        if isinstance(error, TimeoutError):
            return PlaceFailed("it did not answer in time")
        return PlaceFailed(str(error) if code is None else f"its client ended with code {code}")
