"""One question to a node from the command line."""

import socket
from typing import Any

from kvtide.core.messages import Command, CommandAnswer
from kvtide.errors import NodeError, NodeUnreachable, reason_of
from kvtide.wire.frames import FrameReader, encode, receive
from kvtide.wire.peer import check_own
from kvtide.wire.places import Places, check_socket_path, no_node, silent_node

ANSWER_S_MAX = 5.0
"""For a person who waits at a terminal; a node answers within milliseconds, or hangs."""


def ask(places: Places, name: str, arguments: dict[str, str] | None = None) -> dict[str, Any]:
    """Send a command and wait for its answer.

    Raises:
        ConfigError: the runtime directory has too long a path.
        NodeUnreachable: no node listens here, or it does not answer in time.
        NodeError: the node cannot do it, or does not know it.
        WireError: whoever listens is of another user, or speaks nonsense.
    """
    check_socket_path(places.socket)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    with sock:
        sock.settimeout(ANSWER_S_MAX)
        try:
            sock.connect(str(places.socket))
            check_own(sock)
            sock.sendall(encode(Command(name, arguments or {})))
            answer = _answer(sock)
        except (TimeoutError, BlockingIOError):  # the latter when its queue of peers is full
            raise NodeUnreachable(silent_node(places)) from None
        except (FileNotFoundError, ConnectionRefusedError):
            raise NodeUnreachable(no_node(places)) from None
        except OSError as error:
            raise NodeUnreachable(
                f"the node at {places.socket} cannot be reached: {reason_of(error)}"
            ) from None
    if answer.error:
        raise NodeError(f"{answer.error}; `kvtide logs` says more")
    return answer.values


def _answer(sock: socket.socket) -> CommandAnswer:
    reader = FrameReader()
    try:
        while True:
            data, descriptors = receive(sock)
            if not data:
                raise NodeUnreachable("the node ended, or refused us, without an answer")
            for message, _ in reader.feed(data, descriptors):
                if isinstance(message, CommandAnswer):
                    return message
    finally:
        reader.close()
