"""What the machine knows of the tiers below it: their names, what goes there, what is under way.

The machine never touches a tier: it emits what is wanted and is told how it ended. So tiers are
numbers here, in the order in which they are asked.
"""

import enum
from dataclasses import dataclass

from kvtide.core.index import Entry
from kvtide.core.records import Record


class WritePolicy(enum.StrEnum):
    """When a chunk is written to a tier."""

    THROUGH = "through"  # as soon as it is held
    ON_REUSE = "on_reuse"  # when it is matched for the first time
    ON_EVICTION = "on_eviction"  # when memory becomes short, before it would be evicted


@dataclass(frozen=True, slots=True)
class TierPlan:
    """One tier below the host."""

    name: str
    policy: WritePolicy = WritePolicy.THROUGH
    loads_always: bool = False
    """Load what it has, however slow it looks beside computing."""


def record_of(entry: Entry) -> Record:
    """What an attached entry is called below."""
    assert entry.parent is not None, "a detached entry is nobody's record"
    return Record(entry.root.name, entry.parent.key, entry.key, entry.digests, entry.layout)
