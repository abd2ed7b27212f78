"""Is it quicker to load a chain from a tier, or to compute it? Asked only with clear evidence.

Both are measured where they happen: a tier's rate over the chains that were loaded from it, an
engine's over its steps of many tokens. Rates forget: what was measured counts half after so many
more measurements. Where loading looks slower by a factor that no noise explains, the chain is left
alone, and now and then one is loaded all the same, so that a tier which has become quicker is
seen to be.

Rejected: cutting a chain where loading its rest stops paying. Both costs grow with its length, so
it pays as a whole or not at all.
"""

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

    __slots__ = ("_left_alone", "loading")

    def __init__(self) -> None:
        self.loading = Rate()
        """Bytes of chains that were loaded from the tier."""
        self._left_alone = 0

    def is_worth_loading(self, size_bytes: int, tokens: int, prefill: Rate) -> bool:
        """Whether a chain of this size, which spares so many tokens, is to be loaded."""
        load_ms = self.loading.ms_for(size_bytes)
        compute_ms = prefill.ms_for(tokens)
        if load_ms is None or compute_ms is None or load_ms <= SLOWER_RATIO_MIN * compute_ms:
            return True
        self._left_alone += 1
        return self._left_alone % TRY_EVERY == 0
