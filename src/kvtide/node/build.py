"""Which tiers the settings ask for, opened, in the order in which they are asked.

An optional part cannot stop the start of a node that an engine waits for: where a place cannot be
used, the node says so and goes without it until it can be. Whoever serves in the foreground is
told instead. One that takes long to open is taken in when it has (`late.py`).
"""

import contextlib
import enum
import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from kvtide.core.lending import QUEUE_RATIO_MAX
from kvtide.core.tiering import TierPlan, WritePolicy
from kvtide.errors import ConfigError, KVTideError, no_thread
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
        opened = [_waited_for(opening, config, way) for opening in openings]
        stack.pop_all()
    return opened


def _give_up(openings: Sequence["Opening"]) -> None:
    """Close what is open; what is opened later is closed then."""
    tiers = [opening.take_back() for opening in openings]
    close_tiers([tier for tier in tiers if tier is not None])


def _waited_for(opening: "Opening", config: NodeConfig, way: Way) -> OpenTier:
    tier = None
    try:
        tier = opening.wait()
        if tier is None:
            logger.warning(
                "the tier %s has not answered for %g s: is its place well? The node serves without"
                " it until it has",
                opening.entry.shown,
                OPEN_S_MAX,
            )
    except (KVTideError, OSError):
        if way is Way.FOREGROUND:
            raise
    entry = opening.entry
    logger.info("tier %s", entry.shown)
    plan = TierPlan(entry.name, WritePolicy(entry.write), config.load_policy == "always")
    return OpenTier(plan, opening.late() if tier is None else tier)


def _nothing(tier: Tier) -> None:
    """For a tier that nobody has asked anything of."""


class Opening:
    """Opens a place on a thread of its own: a mount that hangs must not keep the node from
    serving, nor must code of another package that does.

    Ownership: `_tier`, `_error` and `_at_last` under `_lock`. A thread that hangs is left
    behind; should it come back, it closes what it has opened.
    """

    def __init__(
        self,
        entry: TierEntry,
        queue_bytes_max: int,
        wake: Callable[[], None],
        *,
        is_again: bool = False,
    ) -> None:
        """Begin; with `is_again`, what was a fault before is none worth a word."""
        self.entry = entry
        self._is_again = is_again
        self._queue_bytes_max = queue_bytes_max
        self._wake = wake
        self._lock = threading.Lock()
        self._tier: Tier | None = None
        self._error: Exception | None = None
        self._at_last: Callable[[Tier], None] | None = None  # there once nobody wants the tier
        self._until_s = time.monotonic() + OPEN_S_MAX
        self._thread = threading.Thread(target=self._open, name="kvtide-open", daemon=True)
        try:
            self._thread.start()
        except RuntimeError as error:
            self._error = no_thread(f"the tier {entry.name}", error)

    def wait(self) -> Tier | None:
        """The tier, None where it takes too long; what kept it from being opened is raised."""
        self._join(self._until_s - time.monotonic())
        return self.opened()

    def _join(self, timeout_s: float) -> None:
        if self._thread.ident is not None:  # it was started
            self._thread.join(max(0.0, timeout_s))

    def late(self) -> Tier:
        """What stands for the tier until it is open: this opening, then others like it."""
        again = partial(Opening, self.entry, self._queue_bytes_max, self._wake, is_again=True)
        return LateTier(self.entry.name, self, again, self._wake)

    def opened(self) -> Tier | None:
        """The tier, None while it is not open; what kept it from being opened is raised."""
        with self._lock:
            if self._error is not None:
                raise self._error
            return self._tier

    def take_back(
        self, timeout_s: float = 0.0, at_last: Callable[[Tier], None] = _nothing
    ) -> Tier | None:
        """The tier, if it is open within this time: the caller's to close.

        Else it is closed as soon as it is, after `at_last`.
        """
        self._join(timeout_s)
        with self._lock:
            self._at_last = at_last
            tier, self._tier = self._tier, None
        return tier

    def _open(self) -> None:
        tier, error = None, None
        try:
            tier = self._opened()
        except (KVTideError, OSError) as fault:
            error = fault
        except Exception as fault:
            if not self._is_again:
                logger.exception("a fault in kvtide, or in a tier of another package")
            error = ConfigError(f"the tier {self.entry.shown} cannot be opened: {fault!r}")
        with self._lock:
            at_last = self._at_last
            if at_last is None:
                self._tier, self._error = tier, error
        if at_last is None:
            self._wake()
        elif tier is not None:
            at_last(tier)
            tier.close(CLOSE_S_MAX)

    def _opened(self) -> Tier:
        tier_type = registry.load(self.entry.type)
        self.entry = registry.complete(self.entry, tier_type)
        tier = tier_type.open(self.entry.options, self._wake, self._queue_bytes_max)
        tier.name = self.entry.name
        return tier
