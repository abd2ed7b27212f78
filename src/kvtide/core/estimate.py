"""Is it quicker to load a chain from a tier, or to compute it? Asked only with clear evidence.

Both are measured where they happen: a tier's rate over the time in which it had something to load,
an engine's over its steps of many tokens. Rates forget: what was measured counts half after eleven
more measurements. Where loading looks slower by a factor that no noise explains, the chain is left
alone, and now and then one is loaded all the same, so that a tier which has become quicker is seen
to be.

Many lookups share what is loaded, wait for one another's loads, and load at the same time. So a
tier's bytes are counted once, and so is its time, whoever waits for it: what it gives to all of
them, as a computing engine's steps do. A measurement ends with the loads of a lookup.

Rejected: cutting a chain where loading its rest stops paying. Both costs grow with its length, so
it pays as a whole or not at all. And how long a lookup has waited: for loads of others, memory.
"""

from kvtide.bounds import T_LOAD_MS

SAMPLES_MIN = 8
"""Fewer measurements are no evidence."""
SLOWER_RATIO_MIN = 2.0
"""Loading must look this many times slower than computing before it is left alone."""
TRY_EVERY = 16
"""Of the chains that would be left alone, one in so many is loaded, to measure anew."""
KEPT_RATIO = 1 - 1 / 16
"""What a rate still counts after one more measurement."""


class Rate:
    """An amount per millisecond: bytes loaded, tokens computed."""

    __slots__ = ("_amount", "_ms", "samples")

    def __init__(self) -> None:
        self.samples = 0
        self._amount = 0.0
        self._ms = 0.0

    def add(self, amount: float, ms: float) -> None:
        """One measurement: so much in so many milliseconds."""
        self.samples += 1
        self._amount = self._amount * KEPT_RATIO + amount
        self._ms = self._ms * KEPT_RATIO + ms

    def ms_for(self, amount: float) -> float | None:
        """How many milliseconds so much takes; None without evidence."""
        if self.samples < SAMPLES_MIN or not self._amount:
            return None
        return amount * self._ms / self._amount


class Choice:
    """The choice between loading and computing, for one tier."""

    __slots__ = ("_busy_ms", "_left_alone", "_loaded_bytes", "_running", "_since_ms", "loading")

    def __init__(self) -> None:
        self.loading = Rate()
        """Bytes that the tier has loaded."""
        self._left_alone = 0
        self._running: dict[int, int] = {}  # when each load began, by its number; oldest first
        self._since_ms = 0
        self._busy_ms = 0
        self._loaded_bytes = 0

    def began(self, number: int, now_ms: int) -> None:
        """A load has been handed to the tier."""
        self._pass_time(now_ms)
        self._running[number] = now_ms

    def ended(self, number: int, loaded_bytes: int, now_ms: int) -> None:
        """It has ended, well with so many bytes, or with none."""
        self._pass_time(now_ms)
        del self._running[number]
        self._loaded_bytes += loaded_bytes

    def measure(self, now_ms: int) -> None:
        """The loads of a lookup have ended, or it waits no longer: a measurement, if any."""
        self._pass_time(now_ms)
        if self._loaded_bytes or self._busy_ms:
            self.loading.add(self._loaded_bytes, max(1, self._busy_ms))
            self._loaded_bytes = self._busy_ms = 0

    def _pass_time(self, now_ms: int) -> None:
        """Count what the tier has worked; of a load that hangs, no more than anybody waits."""
        if self._running:
            until_ms = next(reversed(self._running.values())) + T_LOAD_MS
            self._busy_ms += max(0, min(now_ms, until_ms) - self._since_ms)
        self._since_ms = now_ms

    def is_worth_loading(self, size_bytes: int, tokens: int, prefill: Rate) -> bool:
        """Whether a chain of this size, which spares so many tokens, is to be loaded."""
        load_ms = self.loading.ms_for(size_bytes)
        compute_ms = prefill.ms_for(tokens)
        if load_ms is None or compute_ms is None or load_ms <= SLOWER_RATIO_MIN * compute_ms:
            return True
        self._left_alone += 1
        return self._left_alone % TRY_EVERY == 0
