"""What commands have in common: the node that they speak to, which is that of this user's runtime
directory, and how they show what they are told.
"""

import socket
from pathlib import Path

import click

from kvtide import config
from kvtide.errors import ConfigError
from kvtide.wire.command import ANSWER_S_MAX
from kvtide.wire.peer import check_own
from kvtide.wire.places import Places, check_socket_path, open_directory


def find_places() -> Places:
    """As `look_for_places`. Other settings are read for the sake of whoever has misspelt one: that
    a node cannot be started by them must not keep anybody from ending the one that runs.
    """
    places = look_for_places()
    try:
        config.read()
    except ConfigError as error:
        click.echo(f"Warning: {error}", err=True)
    return places


def look_for_places() -> Places:
    """The runtime directory's places; looked at, but not made.

    Raises ConfigError where it is not ours alone or not for us to see, or its path too long.
    """
    directory = config.runtime_dir()
    places = Places(directory) if is_absent(directory) else open_directory(directory)
    check_socket_path(places.socket)
    return places


def pid_of_node(places: Places) -> int:
    """Of whoever listens, `UNSEEN` in a container that is out of sight; OSError if nobody does."""
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(ANSWER_S_MAX)
        sock.connect(str(places.socket))
        return check_own(sock).pid


def is_absent(path: Path) -> bool:
    """Whether nothing is there; false for what we may not look at, and for a link to nothing."""
    try:
        path.lstat()
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return False


def printable(text: object) -> str:
    """Text that somebody else chose, without what a terminal would obey."""
    return "".join(one if one.isprintable() else "?" for one in str(text))


def counted(number: int, what: str, plural: str = "") -> str:
    """So many of these; `plural` where it is not `what` with an s."""
    return f"{number:,} {what if number == 1 else plural or f'{what}s'}"
