"""What is known of all records of one root and layout."""

from dataclasses import dataclass, field

from kvtide.codec.record import stored_bytes
from kvtide.tiers.kinds import Kind


@dataclass(slots=True)
class KindState:
    """A kind, and what is there of it.

    Attributes:
        records: how many can be found.
        tops: those that stand right below the root.
        users: stores on their way.
        is_retired: it was cleared; what is left of it is being taken away.
    """

    kind: Kind
    records: int = 0
    tops: int = 0
    users: int = 0
    is_retired: bool = False
    lengths: dict[int, int] = field(default_factory=dict)
    """Stored bytes by number of blocks."""

    def length_bytes(self, blocks: int) -> int:
        """Bytes at rest of a record with so many blocks."""
        known = self.lengths.get(blocks)
        if known is None:
            known = self.lengths[blocks] = stored_bytes(self.kind.layout, blocks)
        return known
