"""A tier in memory for the machine's tests: it answers at once, or when the test says so."""

from typing import TYPE_CHECKING

from kvtide.core.effects import (
    AskTier,
    ClearTiers,
    Event,
    LoadFrom,
    StoreTo,
    TierFound,
    TierLoaded,
    TierStored,
)
from kvtide.core.keys import INNER_DIGEST_BYTES, KEY_BYTES

if TYPE_CHECKING:
    from kvtide.core.records import Record


class FakeTier:
    """Records by key; what it was asked for, and what it has not answered yet."""

    def __init__(self) -> None:
        self.records: dict[bytes, Record] = {}
        self.answers = True
        """Else everything waits in `waiting`, to be answered by `answer`."""
        self.loads_fail = False
        self.stores_as = "stored"
        self.waiting: list[AskTier | LoadFrom | StoreTo] = []
        self.cleared: list[int] = []
        """Stores that began before a clear: they end, and nothing is there."""
        self.asked: list[AskTier] = []
        self.loaded: list[LoadFrom] = []
        self.stored: list[StoreTo] = []

    def carry_out(self, effect: AskTier | LoadFrom | StoreTo) -> list[Event]:
        """What follows at once."""
        match effect:
            case AskTier():
                self.asked.append(effect)
            case LoadFrom():
                self.loaded.append(effect)
            case StoreTo():
                self.stored.append(effect)
        if not self.answers:
            self.waiting.append(effect)
            return []
        return [self.answer(effect)]

    def answer(self, effect: AskTier | LoadFrom | StoreTo) -> Event:
        """How a job ends."""
        match effect:
            case AskTier():
                return self._found(effect)
            case LoadFrom(_, number, record, _):
                is_ok = record.key in self.records and not self.loads_fail
                return TierLoaded(number, "loaded" if is_ok else "failed", is_ok)
            case StoreTo(_, number, record, _):
                outcome = "not_anchored" if number in self.cleared else self.stores_as
                if outcome == "stored":
                    self.records[record.key] = record
                return TierStored(number, outcome, outcome == "stored")

    def _found(self, ask: AskTier) -> TierFound:
        found: list[Record] = []
        parent = ask.parent
        for start in range(0, len(ask.keys), KEY_BYTES):
            record = self.records.get(ask.keys[start : start + KEY_BYTES])
            if record is None or (record.parent, record.root) != (parent, ask.root):
                break
            found.append(record)
            parent = record.key
        is_all = len(found) * KEY_BYTES == len(ask.keys)
        children = [record for record in self.records.values() if record.parent == parent]
        if is_all and ask.digests:
            best = max(
                children, key=lambda child: shared(child.digests, ask.digests), default=None
            )
            if best is not None and shared(best.digests, ask.digests):
                found.append(best)
        return TierFound(ask.number, found, bool(children) and not is_all)

    def clear(self, effect: ClearTiers) -> None:
        """Take away by salt and fingerprint."""

        def is_meant(record: "Record") -> bool:
            is_salt = effect.salt_digest in (None, record.root.salt_digest)
            return is_salt and effect.fingerprint in (None, record.root.fingerprint)

        for key, record in list(self.records.items()):
            if is_meant(record):
                del self.records[key]
        self.cleared += [
            job.number for job in self.waiting if isinstance(job, StoreTo) and is_meant(job.record)
        ]


def shared(mine: bytes, theirs: bytes) -> int:
    """Blocks that two runs of digests begin with alike."""
    count = 0
    for start in range(0, min(len(mine), len(theirs)), INNER_DIGEST_BYTES):
        end = start + INNER_DIGEST_BYTES
        if mine[start:end] != theirs[start:end]:
            break
        count += 1
    return count
