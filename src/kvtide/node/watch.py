"""Watches the memory around the node, so that it gives memory back before a limit is met.

A cgroup's limit is enforced by killing. So once a second the node compares what is still
available with a reserve, and lowers its own limit by what is missing; when there is room again, it
may grow back.
"""

from collections.abc import Callable

from kvtide.memory.probe import HostMemory, host_memory
from kvtide.units import MiB

RESERVE_BYTES_MIN = 256 * MiB
RESERVE_RATIO = 0.03
"""Left free: of the machine, or of the cgroup that limits."""
STEP_BYTES = 64 * MiB
"""Smaller changes of the limit are not worth saying."""


class MemoryWatch:
    """Turns looks at the machine into limits of the host tier."""

    def __init__(self, host_bytes: int, look: Callable[[], HostMemory] = host_memory) -> None:
        self._host_bytes = host_bytes
        self._look = look
        self._limit_bytes = host_bytes

    def limit(self, allocated_bytes: int) -> int | None:
        """The new limit of the host tier, or None where nothing changed enough.

        Raises HostMemoryError where nothing can be seen.
        """
        memory = self._look()
        whole_bytes = memory.limit.limit_bytes if memory.limit else memory.total_bytes
        reserve_bytes = max(RESERVE_BYTES_MIN, int(whole_bytes * RESERVE_RATIO))
        wanted = allocated_bytes + memory.available_bytes - reserve_bytes
        wanted = max(0, min(self._host_bytes, wanted))
        if abs(wanted - self._limit_bytes) < STEP_BYTES and wanted != self._host_bytes:
            return None
        if wanted == self._limit_bytes:
            return None
        self._limit_bytes = wanted
        return wanted
