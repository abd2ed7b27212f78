"""Who is at the other end of a unix socket, as the kernel saw it when that end began to listen, or
connected."""

import os
import socket
import struct
from dataclasses import dataclass

from kvtide.errors import WireError

UNSEEN = 0
"""The number of a process in a namespace that is not below ours."""

_CREDENTIALS = struct.Struct("3i")


@dataclass(frozen=True, slots=True)
class Peer:
    """The process, as our namespaces number it and its user."""

    pid: int
    uid: int


def peer_of(sock: socket.socket) -> Peer:
    """Of a connected unix socket; raises OSError where it is none."""
    raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _ = _CREDENTIALS.unpack(raw)
    return Peer(pid, uid)


def check_own(sock: socket.socket) -> Peer:
    """The peer, which must be of our own user: to nobody else a question or descriptor is given.

    Raises:
        WireError: it is somebody else's.
    """
    peer = peer_of(sock)
    if peer.uid != os.getuid():
        raise WireError(
            f"process {peer.pid} of user {peer.uid} listens in place of a node of user"
            f" {os.getuid()}; remove its socket, or set KVTIDE_RUNTIME_DIR to another directory"
        )
    return peer
