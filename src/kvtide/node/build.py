"""Which tiers the settings ask for, opened, in the order in which they are asked.

An optional part cannot stop the start of a node that an engine waits for: where a place cannot be
used, the node goes without it and says so. Whoever serves in the foreground is told instead. One
that takes long to open is taken in when it has (`late.py`).
"""

import contextlib
import enum
import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvtide.core.lending import QUEUE_RATIO_MAX
from kvtide.core.tiering import TierPlan, WritePolicy
from kvtide.errors import ConfigError, KVTideError
from kvtide.node.late import LateTier
from kvtide.node.tiers import CLOSE_S_MAX, close_tiers
from kvtide.settings import NodeConfig
from kvtide.tier_entries import TierEntry
from kvtide.tiers import registry
from kvtide.tiers.base import Tier

logger = logging.getLogger("kvtide.node")

OPEN_S_MAX = 5.0
"""So long the start of a node waits for its places: a disk of a million records takes a second or
two. Those that take longer come later."""


class Way(enum.Enum):
    """Who waits for the node."""

    LAUNCHED = enum.auto()
    """Nobody: an engine started it; what it says goes into its log."""
    FOREGROUND = enum.auto()
    """Whoever ran `kvtide serve`."""


@dataclass(frozen=True, slots=True)
class OpenTier:
    """A tier, and what the machine is told of it."""

    plan: TierPlan
    tier: Tier


def open_tiers(
    config: NodeConfig, host_bytes: int, way: Way, wake: Callable[[], None]
) -> list[OpenTier]:
    """Open what is asked for; `wake` is what the tiers call, from any thread, to be polled.

    All are opened at the same time: several that hang cost no more than one.

    Raises:
        ConfigError: in the foreground, where a place cannot be used, or another node has it.
    """
    queue_bytes_max = int(host_bytes * QUEUE_RATIO_MAX)
    with contextlib.ExitStack() as stack:
        openings = [Opening(entry, queue_bytes_max, wake) for entry in config.places]
        stack.callback(_give_up, openings)
        opened = [_waited_for(opening, config, way, wake) for opening in openings]
        stack.pop_all()
    return [one for one in opened if one is not None]


def _give_up(openings: Sequence["Opening"]) -> None:
    """Close what is open; what is opened later is closed then."""
    tiers = [opening.take_back() for opening in openings]
    close_tiers([tier for tier in tiers if tier is not None])


def _waited_for(
    opening: "Opening", config: NodeConfig, way: Way, wake: Callable[[], None]
) -> OpenTier | None:
    try:
        tier = opening.wait() or _late(opening, wake)
    except (KVTideError, OSError) as error:
        if way is Way.FOREGROUND:
            raise
        logger.warning("the node goes without the tier %s: %s", opening.entry.name, error)
        return None
    entry = opening.entry
    logger.info("tier %s", entry.shown)
    plan = TierPlan(entry.name, WritePolicy(entry.write), config.load_policy == "always")
    return OpenTier(plan, tier)


def _late(opening: "Opening", wake: Callable[[], None]) -> Tier:
    logger.warning(
        "the tier %s has not answered for %g s: is its place well? The node serves without it"
        " until it has",
        opening.entry.shown,
        OPEN_S_MAX,
    )
    return LateTier(opening.entry.name, opening, wake)


class Opening:
    """Opens a place on a thread of its own: a mount that hangs must not keep the node from
    serving, nor must code of another package that does.

    Ownership: `_tier`, `_error` and `_is_given_up` under `_lock`. A thread that hangs is left
    behind; should it come back, it closes what it has opened.
    """

    def __init__(self, entry: TierEntry, queue_bytes_max: int, wake: Callable[[], None]) -> None:
        """Begin."""
        self.entry = entry
        self._queue_bytes_max = queue_bytes_max
        self._wake = wake
        self._lock = threading.Lock()
        self._tier: Tier | None = None
        self._error: Exception | None = None
        self._is_given_up = False
        self._until_s = time.monotonic() + OPEN_S_MAX
        self._thread = threading.Thread(target=self._open, name="kvtide-open", daemon=True)
        try:
            self._thread.start()
        except RuntimeError as error:
            self._error = ConfigError(
                f"no thread could be started for the tier {entry.name} ({error}); raise the limit"
                " of processes (ulimit -u, pids.max)"
            )

    def wait(self) -> Tier | None:
        """The tier, None where it takes too long; what kept it from being opened is raised."""
        if self._error is None:
            self._thread.join(max(0.0, self._until_s - time.monotonic()))
        return self.opened()

    def opened(self) -> Tier | None:
        """The tier, None while it is not open; what kept it from being opened is raised."""
        with self._lock:
            if self._error is not None:
                raise self._error
            return self._tier

    def take_back(self) -> Tier | None:
        """The tier, if it is open: the caller's to close. Else it is closed as soon as it is."""
        with self._lock:
            self._is_given_up = True
            tier, self._tier = self._tier, None
        return tier

    def _open(self) -> None:
        tier, error = None, None
        try:
            tier = self._opened()
        except (KVTideError, OSError) as fault:
            error = fault
        except Exception as fault:
            logger.exception("a fault in kvtide, or in a tier of another package")
            error = ConfigError(f"the tier {self.entry.shown} cannot be opened: {fault!r}")
        with self._lock:
            is_wanted = not self._is_given_up
            if is_wanted:
                self._tier, self._error = tier, error
        if is_wanted:
            self._wake()
        elif tier is not None:
            tier.close(CLOSE_S_MAX)

    def _opened(self) -> Tier:
        tier_type = registry.load(self.entry.type)
        self.entry = registry.complete(self.entry, tier_type)
        tier = tier_type.open(self.entry.options, self._wake, self._queue_bytes_max)
        tier.name = self.entry.name
        return tier
