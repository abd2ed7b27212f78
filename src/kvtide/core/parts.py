"""What the machine consists of, put together once; all of it belongs to one machine."""

from dataclasses import dataclass, field

from kvtide.core import messages as m
from kvtide.core.effects import ClearTiers, Effect, Send
from kvtide.core.host import Host
from kvtide.core.index import Index
from kvtide.core.leases import Leases
from kvtide.core.lending import Lending
from kvtide.core.lookups import Lookups
from kvtide.core.promotions import Promotions
from kvtide.core.regions import Regions
from kvtide.core.tiering import TierPlan
from kvtide.core.writes import Writes
from kvtide.metrics import duration_counts


@dataclass(frozen=True, slots=True)
class MachineConfig:
    """What the machine is told once."""

    node: bytes
    """This node's incarnation: random bytes."""
    pid: int
    version: str
    host_bytes: int
    linger_ms: int
    """End so long after the last engine has left; 0: never."""
    first_number: int
    """Regions, grants and leases are numbered from here: random, so no other node gave them."""
    settings: dict[str, str] = field(default_factory=dict)
    tiers: tuple[TierPlan, ...] = ()
    """Below the host, in the order in which they are asked; effects name them by number."""


class Parts:
    """The parts, what they have to say, and the time of the event that is being handled."""

    def __init__(self, config: MachineConfig) -> None:
        self.config = config
        self.now_ms = 0
        self.effects: list[Effect] = []
        self.counts: dict[str, int] = {}
        self.quarantined: dict[bytes, str] = {}
        """Fingerprints that nobody is served under, each with why, in words."""
        self.index = Index()
        self.host = Host(config.host_bytes, config.first_number)
        self.lending = Lending(self.index, self.host, self.emit, config.first_number)
        self.leases = Leases(self.index, self.lending, config.first_number)
        self.regions = Regions(self.host, self.index, self.lending, self.leases, self.emit)
        self.writes = Writes(
            config.tiers, self.index, self.host, self.lending, self.emit, self.count
        )
        self.promotions = Promotions(
            config.tiers,
            self.index,
            self.host,
            self.lending,
            self.emit,
            self.send,
            self.count,
            self.now,
        )
        self.lookups = Lookups(
            self.index,
            self.host,
            self.leases,
            self.promotions,
            self.writes,
            self.send,
            self.count,
            self.now,
        )
        self.promotions.answer = self.lookups.promoted

    def now(self) -> int:
        """The time of the event that is being handled, in ms."""
        return self.now_ms

    def emit(self, effect: Effect) -> None:
        """Have something done, after all that was emitted before."""
        self.effects.append(effect)

    def send(self, connection: int | None, message: m.Message) -> None:
        """Say something to somebody; nothing where nobody is connected."""
        if connection is not None:
            self.emit(Send(connection, message))

    def clear(self, salt_digest: bytes | None, fingerprint: bytes | None = None) -> int:
        """Clear all entries, or those of one salt or fingerprint; how many memory had."""
        if self.config.tiers:
            self.emit(ClearTiers(salt_digest, fingerprint))
        return self.lending.clear(salt_digest, fingerprint)

    def count(self, name: str, increment: int) -> None:
        """Raise one of the node's own counters."""
        self.counts[name] = self.counts.get(name, 0) + increment

    def observe_ms(self, name: str, ms: int) -> None:
        """Count one of the node's own durations."""
        for counter, increment in duration_counts(name, ms * 1000):
            self.count(counter, increment)
