"""Watches the memory around the node, so that it gives memory back before a limit is met.

A cgroup's limit is enforced by killing. So once a second the node looks at what the machine and
its cgroups have to spare beyond their reserve, and holds at most that much more than it has. Down
at once, by however little: the reserve is never short for longer than a region takes to go back.
Up only by steps worth saying.
"""

from collections.abc import Callable

from kvtide.memory.probe import HostMemory, host_memory
from kvtide.units import MiB

STEP_BYTES = 64 * MiB
"""The limit rises by no less, but for the last step to the full size."""


class MemoryWatch:
    """Turns looks at the machine into limits of the host tier."""

    def __init__(self, host_bytes: int, look: Callable[[], HostMemory] = host_memory) -> None:
        self._host_bytes = host_bytes
        self._look = look
        self._limit_bytes = host_bytes

    def limit(self, charged_bytes: int) -> int | None:
        """The new limit of the host tier, or None where nothing changed enough.

        `charged_bytes` is what the node has of the machine at this very moment: what is being made
        or freed meanwhile would count twice, or not at all.

        Raises HostMemoryError where nothing can be seen.
        """
        wanted = charged_bytes + self._look().spare_bytes
        wanted = max(0, min(self._host_bytes, wanted))
        risen_bytes = wanted - self._limit_bytes
        if risen_bytes == 0 or (0 < risen_bytes < STEP_BYTES and wanted != self._host_bytes):
            return None
        self._limit_bytes = wanted
        return wanted
