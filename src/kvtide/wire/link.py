"""The engines' side of the socket: one thread that keeps a connection to the node alive.

    seeking ─connected─► greeting ─Welcome─► up ─end of file─► seeking (0.1 s, doubling to 5 s
                             │                                          while it ends soon again)
                             └─Refused─► refused (asks again after 5 s)

The link never makes its owner wait: `send` puts a frame into a bounded outbox and gives the socket
what it takes at once; a full outbox is a False. Everything that arrives is handed to the owner's
callbacks on the link's thread.

A node that is stopped or slow is told from one that is dead: death is seen through its pidfd,
slowness through silence, which opens the *breaker*: `is_usable` is False then.

A connection may end long before the process behind it does: a node closes its sockets first and
frees its memory then. So the pidfd is watched after the connection has ended, and the owner is
told when the death is proven; until then, for as long as a node may take to end, none is called
absent.

Ownership
    state of the connection     the link's thread
    socket, what is on its way  `Channel`, for any thread
"""

import contextlib
import enum
import logging
import os
import select
import socket
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from kvtide.bounds import HEARTBEAT_S, T_STOP_S
from kvtide.core.messages import Bye, Message, Ping, Pong, Refused, Stopping, Welcome
from kvtide.errors import WireError
from kvtide.processors import leave_binding
from kvtide.wire.breaker import Breaker
from kvtide.wire.channel import Channel
from kvtide.wire.frames import FrameReader, encode, receive
from kvtide.wire.peer import check_own

logger = logging.getLogger("kvtide.wire")

SEEK_S = 0.1
"""How often a process looks for the socket at first."""
RETRY_S_MAX = 5.0
"""Between two tries at most: T_heal has no more, besides two heartbeats."""
REFUSED_S = 5.0
"""A refusal has a reason that lasts (another version, an engine_id in use), but may end."""
GREETING_S_MAX = 10.0
"""From a hello to its answer: a slow node is better than none, one that hangs is not."""
DEATH_WAIT_S = 0.05
"""The kernel closes a dying process's sockets a moment before its pidfd tells."""
ENDING_S_MAX = T_STOP_S
"""T_stop: a node that has closed its connections is dead by then, or hangs."""
FAREWELL_S_MAX = 2.0
"""How long an ending link tries to get its good-bye through to a node that lives."""


class _Outcome(enum.Enum):
    """What became of one attempt to have a connection."""

    UP = enum.auto()
    """The node took it; it has ended since."""
    REFUSED = enum.auto()
    LOST = enum.auto()
    """Somebody listens, and it came to nothing."""
    ABSENT = enum.auto()
    """Nobody listens."""


class LinkOwner(Protocol):
    """Whom a link serves; all calls come on the link's thread and must not wait."""

    def hello(self) -> Message:
        """The first message of a new connection."""
        ...

    def on_up(self, welcome: Welcome) -> None:
        """The node has taken the connection."""
        ...

    def on_message(self, message: Message, descriptors: list[int]) -> None:
        """A message came; the descriptors are the owner's now."""
        ...

    def on_down(self, *, node_is_dead: bool) -> None:
        """The connection ended; the node is dead, or may live on.

        Called once more, with True, if its death is proven only later.
        """
        ...

    def on_refused(self, refused: Refused) -> None:
        """The node does not take this connection; it is asked again later."""
        ...

    def on_absent(self) -> None:
        """No node listens. Called again and again; the owner may start one."""
        ...

    def on_pulse(self) -> None:
        """About once a second has passed while the connection was up.

        Called too on a connection that is made for a good-bye alone: for what is owed till then.
        """
        ...


class Link:
    """A connection to the node that comes back by itself."""

    def __init__(self, socket_path: Path, owner: LinkOwner, name: str) -> None:
        self._path = str(socket_path)
        self._owner = owner
        self._stop = threading.Event()
        self._owes_bye = False
        """The node knows of us, and has not been told good-bye."""
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._node_pidfd = -1
        self._node_left_s = 0.0
        self._breaker = Breaker()
        self._channel = Channel(self._breaker.heard)
        self._fault = ""  # the one that was said last
        self.fault_count = 0
        """Sessions that ended, or never began, by a fault on our side."""
        self.stopped_on_purpose = False

    # ---- any thread

    def start(self) -> None:
        """Begin to look for the node."""
        self._thread.start()

    @property
    def is_usable(self) -> bool:
        """Connected, and the node answers."""
        return self._channel.is_open and not self._breaker.is_open

    def send(self, message: Message) -> bool:
        """Send without waiting; False where it cannot be sent: no connection, or no room."""
        return self.send_all([message]) == 1

    def send_all(self, messages: Sequence[Message]) -> int:
        """Send in one piece, which wakes the node once; how many, from the first, can be sent."""
        return self._channel.send_all(messages)

    def leave_reading(self, others_read: bool) -> None:
        """Say whether the caller's thread reads what comes next, by `read_now`, and soon.

        Until the next pulse at most: it may have no time.
        """
        self._channel.leave_reading(others_read)

    def read_now(self, take: Callable[[Message], bool], wait_s: float = 0.0) -> None:
        """Read answers in the caller's thread; see `Channel.read_now`."""
        self._channel.read_now(take, wait_s)

    def note_silence(self) -> None:
        """A question was not answered in time."""
        self._breaker.question_is_silent()

    def close(self, timeout_s: float) -> None:
        """Say good-bye and end the thread; calling it again does nothing.

        The thread sees to it that the good-bye arrives, if that takes longer than `timeout_s`: the
        process may live on, and what it was lent must not stay lent.
        """
        self._stop.set()
        self._channel.wake()
        if self._thread.is_alive():
            self._thread.join(timeout_s)
        if not self._thread.is_alive():
            self._channel.close()

    # ---- the link's thread

    def _run(self) -> None:
        leave_binding()
        retry_s = SEEK_S
        while not self._stop.is_set():
            began_s = time.monotonic()
            outcome = self._attempt()
            if outcome is _Outcome.UP and time.monotonic() - began_s >= RETRY_S_MAX:
                retry_s = SEEK_S
                self._fault = ""
            elif outcome is _Outcome.REFUSED:
                retry_s = REFUSED_S
            elif outcome is _Outcome.ABSENT:
                retry_s = SEEK_S if not self.stopped_on_purpose else HEARTBEAT_S
            is_absent = self._is_node_gone() and outcome is _Outcome.ABSENT
            if is_absent and not self._stop.is_set():
                self._call(self._owner.on_absent)
            self._stop.wait(retry_s)
            retry_s = min(retry_s * 2, RETRY_S_MAX)
        self._call(self._say_farewell)
        self._forget_node()

    def _attempt(self) -> _Outcome:
        """A session, whatever goes wrong in it: a fault costs this attempt, never the thread."""
        try:
            return self._session()
        except Exception as error:  # no descriptors, no memory
            self._note_fault(error)
            return _Outcome.LOST

    def _note_fault(self, error: Exception) -> None:
        """Count what ended a session or kept it from beginning; the same is said once."""
        self.fault_count += 1
        if repr(error) != self._fault:
            self._fault = repr(error)
            logger.error(
                "kvtide: the connection to the node is given up, and made anew", exc_info=error
            )

    def _connected(self) -> socket.socket | _Outcome:
        """A socket that leads to a node of our own user; or why there is none: ABSENT or LOST."""
        with contextlib.ExitStack() as failed:
            sock = failed.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
            sock.settimeout(HEARTBEAT_S)
            try:
                sock.connect(self._path)
                check_own(sock)
            except WireError as error:
                logger.warning("kvtide: %s", error)
                return _Outcome.LOST
            except OSError as error:
                # A node that is stopped listens all the same, until its queue is full.
                is_there = isinstance(error, BlockingIOError | TimeoutError)
                return _Outcome.LOST if is_there else _Outcome.ABSENT
            failed.pop_all()
            return sock

    def _session(self) -> _Outcome:
        """One connection from beginning to end."""
        sock = self._connected()
        if isinstance(sock, _Outcome):
            return sock
        reader = FrameReader()
        was_up = False
        try:
            greeted = self._greet(sock, reader)
            if isinstance(greeted, Refused):
                self._owner.on_refused(greeted)
                return _Outcome.REFUSED
            if greeted is None:
                return _Outcome.LOST
            was_up = True
            self._owner.on_up(greeted)
            self._serve(sock, reader)
        except (OSError, WireError) as error:
            logger.debug("kvtide: the connection to the node ended: %s", error)
        except Exception as error:
            self._note_fault(error)
        finally:
            self._channel.end(sock, reader)
            if was_up and self._owes_bye:
                self._ended()
        return _Outcome.UP if was_up else _Outcome.LOST

    def _call(self, callback: Callable[..., None], **arguments: bool) -> None:
        """A callback outside a session; what it raises ends nothing."""
        try:
            callback(**arguments)
        except Exception:
            logger.exception("kvtide: %s failed; the engine goes on", callback.__name__)

    def _greet(
        self, sock: socket.socket, reader: FrameReader, *, is_farewell: bool = False
    ) -> Welcome | Refused | None:
        own_pidfd = os.pidfd_open(os.getpid())
        try:
            hello = memoryview(encode(self._owner.hello(), 1))
            sent = socket.send_fds(sock, [hello], [own_pidfd])
            if sent < len(hello):
                sock.sendall(hello[sent:])
        finally:
            os.close(own_pidfd)
        poll = select.poll()
        poll.register(self._channel.wake_fd, select.POLLIN)
        poll.register(sock, select.POLLIN)
        deadline_s = time.monotonic() + (FAREWELL_S_MAX if is_farewell else GREETING_S_MAX)
        while (left_s := deadline_s - time.monotonic()) > 0:
            if self._stop.is_set() and not is_farewell:
                break
            if sock.fileno() not in dict(poll.poll(left_s * 1000)):
                self._channel.clear_wake()
                continue
            data, descriptors = receive(sock)
            if not data:
                return None
            for message, own in reader.feed(data, descriptors):
                if isinstance(message, Refused):
                    return message
                if isinstance(message, Welcome):
                    self._welcomed(sock, own)
                    return message
        return None

    def _welcomed(self, sock: socket.socket, descriptors: list[int]) -> None:
        self._forget_node()
        self._node_pidfd = descriptors[0] if descriptors else -1
        self._breaker.heard()
        self.stopped_on_purpose = False
        self._owes_bye = True
        self._channel.open(sock)

    def _serve(self, sock: socket.socket, reader: FrameReader) -> None:
        """Read until the connection ends; first what came together with the greeting."""
        channel = self._channel
        next_ping = next_pulse = time.monotonic() + HEARTBEAT_S
        with channel.watched(sock, reader) as poll:
            if self._node_pidfd >= 0:
                poll.register(self._node_pidfd, select.EPOLLIN)
            while True:
                channel.take_left(self._take)
                if self._stop.is_set():
                    self._flush_bye(sock)
                    return
                channel.watch()
                pause_s = max(0.0, min(next_ping, next_pulse) - time.monotonic())
                ready = dict(poll.poll(pause_s + 0.001))
                if channel.wake_fd in ready:
                    channel.clear_wake()
                if ready.get(sock.fileno(), 0) & select.EPOLLOUT:
                    with contextlib.suppress(ConnectionError):  # the end of the stream is read
                        channel.flush()
                if ready.get(sock.fileno(), 0) & ~select.EPOLLOUT:
                    channel.take_arrived(self._take)
                elif self._node_pidfd in ready:
                    if not channel.others_read:  # dead, and everything it said has been read
                        channel.take_left(self._take)
                        return
                    channel.leave_reading(False)
                if time.monotonic() >= next_ping:
                    next_ping = time.monotonic() + self._ping()
                if time.monotonic() >= next_pulse:
                    next_pulse = time.monotonic() + HEARTBEAT_S
                    channel.leave_reading(False)
                    self._owner.on_pulse()

    def _say_farewell(self) -> None:
        """Where the connection was gone when the link was closed, come once more to say good-bye.

        Nothing is owed to a node that is dead, or that never answered.
        """
        if not self._owes_bye or self._node_pidfd < 0 or self._is_node_dead(0):
            return
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
            sock.settimeout(FAREWELL_S_MAX)
            reader = FrameReader()
            try:
                sock.connect(self._path)
                if isinstance(self._greet(sock, reader, is_farewell=True), Welcome):
                    self._call(self._owner.on_pulse)
                    self._flush_bye(sock)
            except (OSError, WireError) as error:
                logger.debug("kvtide: the node was not told good-bye: %s", error)
            finally:
                self._channel.end(sock, reader)

    def _flush_bye(self, sock: socket.socket) -> None:
        """Good-bye, behind everything that is still to be sent; OSError where nobody hears it."""
        poll = select.poll()
        poll.register(sock, select.POLLOUT)
        deadline_s = time.monotonic() + FAREWELL_S_MAX
        is_queued = False
        while (left_s := deadline_s - time.monotonic()) > 0:
            is_queued = is_queued or self.send(Bye())
            self._channel.flush()
            if is_queued and self._channel.is_idle:
                self._owes_bye = False
                return
            poll.poll(left_s * 1000)

    def _ping(self) -> float:
        """Send a ping; seconds until the next one."""
        if self._channel.is_idle:
            self.send(Ping())
        return self._breaker.pinged()

    def _take(self, message: Message, descriptors: list[int]) -> None:
        if isinstance(message, Ping):
            self.send(Pong())
        elif isinstance(message, Stopping):
            self.stopped_on_purpose = message.on_purpose
        elif not isinstance(message, Pong):
            self._owner.on_message(message, descriptors)

    def _ended(self) -> None:
        """A session is over: say so, and whether the node is over too."""
        is_dead = self._is_node_dead(DEATH_WAIT_S)
        if is_dead:
            self._forget_node()
        self._node_left_s = time.monotonic()
        self._call(self._owner.on_down, node_is_dead=is_dead)

    def _is_node_gone(self) -> bool:
        """Whether the node we knew is dead, or has had all the time it may take to end.

        Where its death is proven only now, the owner is told.
        """
        if self._node_pidfd < 0:
            return True
        if self._is_node_dead(0):
            self._forget_node()
            self._call(self._owner.on_down, node_is_dead=True)
            return True
        return time.monotonic() - self._node_left_s >= ENDING_S_MAX

    def _is_node_dead(self, wait_s: float) -> bool:
        if self._node_pidfd < 0:
            return False
        poll = select.poll()
        poll.register(self._node_pidfd, select.POLLIN)
        return bool(poll.poll(wait_s * 1000))

    def _forget_node(self) -> None:
        if self._node_pidfd >= 0:
            os.close(self._node_pidfd)
            self._node_pidfd = -1
