"""Which processors a thread of ours runs on.

An engine binds its threads to one processor each, and a new thread inherits the binding of the one
that made it. So every thread that kvtide starts inside an engine frees itself first: else it would
take its time from the one thread that computes.
"""

import contextlib
import logging
import os

logger = logging.getLogger("kvtide")


def processors_of_process() -> set[int]:
    """The processors that any thread of this process may use."""
    found: set[int] = set()
    with contextlib.suppress(OSError):  # no descriptor is left
        for thread in os.listdir("/proc/self/task"):
            with contextlib.suppress(OSError):  # it has ended
                found |= os.sched_getaffinity(int(thread))
    return found or os.sched_getaffinity(0)


def use_processors(processors: set[int]) -> None:
    """Let this thread run on these processors."""
    try:
        os.sched_setaffinity(0, processors)
    except OSError as error:
        logger.debug("kvtide: a thread keeps its processor: %s", error)


def leave_binding() -> None:
    """Let this thread run wherever any thread of this process may."""
    use_processors(processors_of_process())
