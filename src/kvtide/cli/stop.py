"""`kvtide stop`: end the node on purpose, so that no engine starts another."""

import os
import select
import socket
import struct
import time

import click

from kvtide.cli.here import find_places
from kvtide.errors import NodeUnreachable
from kvtide.wire.command import ask
from kvtide.wire.places import Places

END_S_MAX = 12.0
"""T_stop and a little: a node ends within 10 s."""
POLL_S = 0.05
UNSEEN = 0
_CREDENTIALS = struct.Struct("iii")


@click.command(short_help="End the node; what it holds is lost, engines serve on.")
def command() -> None:
    """End the node; what it holds is lost, engines serve on without.

    No engine starts another one: they join again when somebody does (a new engine, or `kvtide
    serve`).
    """
    places = find_places()
    try:
        pidfd = _pidfd_of_node(places)
    except (FileNotFoundError, ConnectionRefusedError):
        click.echo(f"no node is running in {places.directory}")
        return
    try:
        pid = ask(places, "stop")["pid"]
        if not _has_ended(places, pidfd):
            raise NodeUnreachable(
                f"node {pid} has not ended after {END_S_MAX:g} s; see {places.log}, then kill it"
            )
        click.echo(f"node {pid} has ended")
    finally:
        if pidfd is not None:
            os.close(pidfd)


def _pidfd_of_node(places: Places) -> int | None:
    """Of whoever listens; None where it lives in a container that we cannot see into."""
    with socket.socket(socket.AF_UNIX) as sock:
        sock.connect(str(places.socket))
        raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, _, _ = _CREDENTIALS.unpack(raw)
    return os.pidfd_open(pid) if pid != UNSEEN else None


def _has_ended(places: Places, pidfd: int | None) -> bool:
    if pidfd is not None:
        return bool(select.select([pidfd], [], [], END_S_MAX)[0])
    until_s = time.monotonic() + END_S_MAX
    while places.socket.exists() and time.monotonic() < until_s:
        time.sleep(POLL_S)
    return not places.socket.exists()
