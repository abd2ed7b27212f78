"""`kvtide stop`: end the node on purpose, so that no engine starts another."""

import os
import select
import time

import click

from kvtide.bounds import T_STOP_S
from kvtide.cli.here import find_places, is_absent, pid_of_node
from kvtide.errors import NodeUnreachable
from kvtide.wire.command import ask
from kvtide.wire.peer import UNSEEN
from kvtide.wire.places import Places, silent_node

END_S_MAX = T_STOP_S + 2.0
"""A node ends within T_stop; and a little, for a machine that is busy."""
POLL_S = 0.05


@click.command()
def command() -> None:
    """End the node; what its memory holds is lost, engines serve on.

    Engines that run now start no other: they join again when somebody does (a new engine, or
    `kvtide serve`).
    """
    places = find_places()
    try:
        pidfd = _pidfd_of_node(places)
    except (FileNotFoundError, ConnectionRefusedError, ProcessLookupError):
        click.echo(f"no node is running in {places.directory}")  # the last: it has just ended
        return
    except (TimeoutError, BlockingIOError):
        raise NodeUnreachable(silent_node(places)) from None
    try:
        try:
            pid = ask(places, "stop")["pid"]
        except NodeUnreachable:
            # One that was ending has closed its socket, and need not be asked.
            if pidfd is None or not _is_dead(pidfd, END_S_MAX * is_absent(places.socket)):
                raise
            click.echo(f"the node in {places.directory} has ended")
            return
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
    pid = pid_of_node(places)
    return os.pidfd_open(pid) if pid != UNSEEN else None


def _is_dead(pidfd: int, wait_s: float) -> bool:
    return bool(select.select([pidfd], [], [], wait_s)[0])


def _has_ended(places: Places, pidfd: int | None) -> bool:
    if pidfd is not None:
        return _is_dead(pidfd, END_S_MAX)
    until_s = time.monotonic() + END_S_MAX
    while places.socket.exists() and time.monotonic() < until_s:
        time.sleep(POLL_S)
    return not places.socket.exists()
