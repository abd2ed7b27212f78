"""Opens a directory to take damaged records out of it, while no node has it."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kvtide.errors import KVTideError
from kvtide.tiers.base import NO_CAP_BYTES
from kvtide.tiers.disk.tier import DiskTier

CLOSE_S_MAX = 60.0


@contextmanager
def opened(path: Path) -> Iterator[DiskTier]:
    """A tier that has the directory, in which a start has mended what rows and indexes lacked. A
    check may run beside it; its `remove` takes away what that finds.

    Raises:
        ConfigError: a node has the directory, or it cannot be used.
        KVTideError: at the end, where something that was taken away is still there.
    """
    tier = DiskTier(path, NO_CAP_BYTES, lambda: None, floor_bytes=0)
    try:
        yield tier
    finally:
        tier.close(CLOSE_S_MAX)
        tier.poll()
    if tier.unsaid_count:
        raise KVTideError(
            f"not removed: {tier.unsaid_count} of the damaged records in {path}, which takes no"
            " writes; see that it does, and repair it again"
        )
