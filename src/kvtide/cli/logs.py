"""`kvtide logs`: the end of the node's log, and what follows."""

import os
import time
from collections import deque
from collections.abc import Generator, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TextIO

import click

from kvtide.cli.here import find_places, pid_of_node, printable
from kvtide.errors import WireError
from kvtide.wire.places import Places

POLL_S = 0.2


@click.command()
@click.option("-n", "--lines", default=50, show_default=True, type=click.IntRange(min=0))
@click.option("-f", "--follow", is_flag=True, help="Go on as the log grows, until Ctrl-C.")
def command(lines: int, follow: bool) -> None:
    """Show the end of the node's log.

    A node that runs in the foreground (`kvtide serve`) logs to its own standard error instead;
    that there is one, and where it logs, is said on standard error.
    """
    places = find_places()
    elsewhere = _logs_elsewhere(places)
    if not places.log.exists():
        why = elsewhere or "no node was started by an engine yet"
        text = f"there is no log at {places.log}: {why}"
        if not follow:
            raise click.ClickException(text)
        click.echo(f"{text}; waiting for one, until Ctrl-C", err=True)
    elif elsewhere:
        click.echo(f"{elsewhere}; this is {places.log}, of one before it", err=True)
    with suppress(KeyboardInterrupt):
        for line in _lines(places, lines, follow):
            click.echo(line)


def _logs_elsewhere(places: Places) -> str:
    """Where the running node logs if not into the log; empty where it does, or cannot be seen."""
    try:
        pid = pid_of_node(places)
        names = os.listdir(f"/proc/{pid}/fd")
        place = os.readlink(f"/proc/{pid}/fd/2")
    except (OSError, WireError):  # nobody listens, or out of sight: a container, another user
        return ""
    opened = set()
    for name in names:
        with suppress(OSError):  # closed meanwhile: the node goes on
            opened.add(os.readlink(f"/proc/{pid}/fd/{name}"))
    if str(places.log.resolve()) in opened:
        return ""
    if place.startswith(("pipe:", "socket:")):
        place = "a pipe: to its service manager or container runtime (journalctl, kubectl logs)"
    return f"node {pid} runs in the foreground and logs to its standard error, {place}"


def _lines(places: Places, count: int, follow: bool) -> Iterator[str]:
    """The last lines of the log and of the one before it, then those that come."""
    last: deque[str] = deque(maxlen=count)
    file: TextIO | None = None
    with suppress(FileNotFoundError):
        file = _open(places.log)
    with suppress(FileNotFoundError), _open(_older(places)) as older:
        # Opened after the log: it may be that very file, if the node has begun another meanwhile.
        if file is None or not os.path.sameopenfile(older.fileno(), file.fileno()):
            last.extend(older)
    if file is not None:
        last.extend(file)
    yield from (_clean(line) for line in last)
    while follow:
        file = yield from _grown(places, file)
        time.sleep(POLL_S)
    if file is not None:
        file.close()


def _grown(places: Places, file: TextIO | None) -> Generator[str, None, TextIO | None]:
    """What has come since; returns the file to read on from, another one after a rotation."""
    if file is not None:
        yield from (_clean(line) for line in file)
    with suppress(FileNotFoundError):
        status = places.log.stat()
        if file is None or not _is_open(file, status.st_ino):
            if file is not None:
                yield from (_clean(line) for line in file)
                file.close()
            file = _open(places.log)
            yield from (_clean(line) for line in file)
    return file


def _is_open(file: TextIO, inode: int) -> bool:
    return Path(f"/proc/self/fd/{file.fileno()}").stat().st_ino == inode


def _older(places: Places) -> Path:
    return places.log.with_name(places.log.name + ".1")


def _open(path: Path) -> TextIO:
    return path.open(encoding="utf-8", errors="replace")


def _clean(line: str) -> str:
    return printable(line.rstrip("\n").expandtabs())
