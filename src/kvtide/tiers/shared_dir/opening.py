"""A shared directory as an entry of `tiers` asks for it."""

from collections.abc import Callable, Mapping
from typing import Any

from kvtide.tier_values import SHARED_DIR
from kvtide.tiers.registry import TierType
from kvtide.tiers.shared_dir.tier import SharedDirTier


def open_shared_dir(
    options: Mapping[str, Any], wake: Callable[[], None], queue_bytes_max: int
) -> SharedDirTier:
    """See `TierType`."""
    return SharedDirTier(
        options["path"], options["bytes_max"], wake, queue_bytes_max=queue_bytes_max
    )


TYPE = TierType(options=SHARED_DIR, open=open_shared_dir, schemes=("file",), url_option="path")
