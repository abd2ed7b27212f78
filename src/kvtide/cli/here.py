"""Which node the commands speak to: that of this user's runtime directory."""

from pathlib import Path

from kvtide import config
from kvtide.wire.places import Places, check_socket_path, open_directory


def find_places() -> Places:
    """The runtime directory's places; looked at, but not made.

    Raises ConfigError where it is not ours alone or not for us to see, or its path too long.
    """
    directory = config.read().runtime_dir
    places = Places(directory) if is_absent(directory) else open_directory(directory)
    check_socket_path(places.socket)
    return places


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
