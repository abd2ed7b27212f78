"""The one tree of operating failures. A message says what happened, the value, and what to do.

Misses, drops and full queues are values, not exceptions; broken beliefs are assertions.
"""


class KVTideError(Exception):
    """Any failure that kvtide reports; catching it catches all of them."""


class ConfigError(KVTideError):
    """A setting is unknown, unusable, or contradicts another one."""


class WireError(KVTideError):
    """A peer sent what the protocol does not allow; its connection ends, nothing else."""


class HostMemoryError(KVTideError):
    """The machine does not give the memory that was asked for."""


class NodeError(KVTideError):
    """A node cannot be here though no setting is wrong, or cannot do what it was asked to."""


class NodeUnreachable(KVTideError):
    """No node answers at the socket of this user."""


class CorruptRecord(KVTideError):
    """Bytes from below the host did not prove to be what they should be; nobody gets them."""


class UnknownFormat(KVTideError):
    """Bytes from below the host are of another version of kvtide: left alone, never guessed at."""


class PlaceFailed(KVTideError):
    """A server below the host did not do what it was asked to, or did not answer in time."""


def no_thread(what: str, error: RuntimeError) -> ConfigError:
    """What is to be said where the machine grants no thread for something."""
    return ConfigError(
        f"no thread could be started for {what} ({error}); raise the limit of processes"
        " (ulimit -u, pids.max)"
    )


def bare(error: Exception) -> Exception:
    """An error without the frames that it came through: those hold cells, and the node, which
    does not collect cycles, would keep them for ever."""
    error.__cause__ = error.__context__ = None
    return error.with_traceback(None)


def reason_of(error: OSError) -> str:
    """Why, for people: without a number, and without what the caller says itself."""
    return error.strerror or str(error)
