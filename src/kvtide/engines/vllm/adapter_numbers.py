"""What the numbers of adapters stand for: the engine goes by them, and looks at no path meanwhile.

A number that stands for one path, and for what was read there first, has that adapter's digest;
one that is loaded in place, or goes by a second path, has none from then on.

Ownership: the scheduler's thread.
"""

import time
from typing import Any, NamedTuple

from kvtide.engines.vllm.adapters import ADAPTERS_MAX, AdapterDigests


class _Named(NamedTuple):
    """A number's path, empty where it stands for none; and when the engine was first asked for it,
    which is before it loads what it finds there."""

    path: str
    asked_s: float


class AdapterNumbers:
    """All numbers that requests have named."""

    def __init__(self) -> None:
        self._named: dict[int, _Named] = {}

    def note(self, lora: Any) -> bool:
        """Take note of what a request's adapter stands for, whether it is cached or not: the
        engine loads it. Whether its number still is one path, and what was read there first."""
        number, named = lora.lora_int_id, self._named
        if number not in named and len(named) < ADAPTERS_MAX:
            named[number] = _Named(lora.lora_path, time.monotonic())
        known = named.get(number)
        if known is None:
            return False
        if known.path == lora.lora_path and not getattr(lora, "load_inplace", False):
            return True
        named[number] = known._replace(path="")
        return False

    def digest(self, lora: Any, digests: AdapterDigests) -> bytes | None:
        """The digest of an adapter whose number stands for it; None: not known now, or never.

        Only a look that began after the engine was asked for this number tells what it loads: what
        lies there may just have been replaced.
        """
        return digests.digest(lora.lora_path, self._named[lora.lora_int_id].asked_s)
