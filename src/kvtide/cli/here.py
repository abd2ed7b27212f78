"""Which node the commands speak to: that of this user's runtime directory."""

from kvtide import config
from kvtide.wire.places import Places, check_socket_path, open_directory


def find_places() -> Places:
    """The runtime directory's places; looked at, but not made.

    Raises ConfigError where it is not ours alone, or its path too long.
    """
    directory = config.read().runtime_dir
    places = open_directory(directory) if directory.exists() else Places(directory)
    check_socket_path(places.socket)
    return places


def printable(text: object) -> str:
    """Text that somebody else chose, without what a terminal would obey."""
    return "".join(one if one.isprintable() else "?" for one in str(text))
