"""What a store's client must do: one connection's worth of calls, all of which may block.

The frame (`RemoteTier`) opens a session for each of its threads and makes all calls of it there;
only `interrupt` comes from elsewhere. A session connects when it is first needed, and again after
a call has failed. It bounds each call by itself: whatever the place does, a call has ended after
`PUT_S_MAX` for a store and `CALL_S_MAX` for the others, and then neither reads nor writes its
cells any more. It reports what it learns of numbers to the `Census` it was given.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from kvtide.bounds import T_LOAD_MS, T_PUT_MS
from kvtide.core.records import Record
from kvtide.tiers.base import LoadOutcome, LookupJob, StoreOutcome
from kvtide.tiers.scope import Scope

CALL_S_MAX = T_LOAD_MS / 1000
"""Of a lookup or a load: nobody waits for longer; and so long a place may say nothing at all."""
PUT_S_MAX = T_PUT_MS / 1000
"""Of a store: whoever is slower takes less than is stored, and shall not hold cells for it."""
CONNECT_S_MAX = 1.0
"""One lost packet of a handshake is sent again within it."""


@dataclass(frozen=True, slots=True)
class Put:
    """What a store sends.

    Attributes:
        record: what it is.
        write_id: 16 random bytes, of this write alone; a session may take others instead.
        cells: for each shard, the memory of its blocks.
    """

    record: Record
    write_id: bytes
    cells: Sequence[memoryview]


class Session(Protocol):
    """A client of one place, for one thread. Each call raises PlaceFailed where the place does
    not do what it is asked to; it has no connection with an unread answer then."""

    knows_names: bool
    """Whether `find` answers from memory, without asking the place: then only what was loaded or
    stored tells that this works."""

    def find(self, job: LookupJob) -> tuple[list[Record], bool]:
        """The records and `may_go_on` of a `Found`; in one round trip at most."""

    def load(self, record: Record, cells: Sequence[memoryview]) -> LoadOutcome:
        """LOADED, and each byte is proven; ABSENT; or CORRUPT. In both latter cases the record
        and what lies behind it are gone."""

    def store(
        self, next_put: Callable[[], Put | None], ended: Callable[[Put, StoreOutcome], None]
    ) -> None:
        """Carry out stores as long as `next_put` gives some, and tell of each that has `ended`, in
        order, from within this call: STORED, HELD, NOT_ANCHORED, NO_ROOM, or FAILED (its name has
        other content). Several may be under way, so that the place never waits; when this raises,
        those that have not ended have failed. Nothing is sent of what is there. A record is found
        once it is complete and its parent is there, and evicts what it must."""

    def clear(self, scope: Scope) -> int | None:
        """None of these is found any more, by anybody; how many there were, if the place can tell
        that."""

    def sweep(self) -> bool:
        """Give back some of what clears have left; whether there is more."""

    def survey(self) -> None:
        """Ask for the numbers; proves that the place works."""

    def interrupt(self) -> None:
        """From another thread: a call that runs fails soon."""

    def close(self) -> None:
        """The last call."""
