"""Prompts sent again after the engine forgot them: what a hit from outside costs.

All arms live at once and take turns; before each turn the others are seen to use no CPU. A turn of
an arm with a cache from outside is: own hit, reset, external hit, own hit, reset, external hit.
What a hit *adds* is the external hit's TTFT minus that of the own hit just before it, in the same
engine. The noise floor is an arm against itself: the second own hit of a turn minus the first. The
first pairs of an arm and length warm up (first use of memory and code): left out.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from benchmarks.arms import Arm, serve
from benchmarks.plain import BLOCK_TOKENS, PlainCopy
from benchmarks.prompts import Prompts
from benchmarks.report import Section
from benchmarks.stats import (
    PAIRS_MIN,
    Comparison,
    differences,
    rotated,
    spread,
)
from kvtide.testing.completions import Completion, ServingError
from kvtide.testing.serving import ServedEngine

EXTERNAL = (Arm.LMCACHE, Arm.KVTIDE)
EXTERNAL_HITS = "vllm:external_prefix_cache_hits_total"
RESET_S_MAX = 10.0
OUTPUT_TOKENS = 4

COPIES_MAX, FIXED_MS_MAX = 1.25, 8.0
RIVAL_RATIO_MAX, RIVAL_LENGTHS = 0.5, (508, 2008, 6008)
SPEED_UP_RATIO_MIN, SPEED_UP_LENGTH = 0.85, 2008


@dataclass(frozen=True, slots=True)
class Size:
    """How much is measured."""

    lengths: Sequence[int]
    turns: int  # of two pairs each
    warm_up_turns: int
    cold_turns: int  # of the arm without a cache: 7 s each at 6,008 tokens


FULL = Size((300, 508, 2008, 6008), turns=11, warm_up_turns=1, cold_turns=7)
QUICK = Size((508, 2008), turns=2, warm_up_turns=1, cold_turns=2)
QUICK_ARMS = (Arm.OWN, Arm.KVTIDE)
ARMS = (Arm.NONE, Arm.OWN, Arm.LMCACHE, Arm.KVTIDE)


@dataclass(slots=True)
class Taken:
    """Measurements of one arm at one length."""

    cold_ms: list[float] = field(default_factory=list)
    own_ms: list[float] = field(default_factory=list)
    external_ms: list[float] = field(default_factory=list)
    own_tokens: set[int] = field(default_factory=set)
    external_tokens: set[int] = field(default_factory=set)

    def added(self) -> Comparison:
        """What an external hit adds to the own one."""
        return differences(self.external_ms, self.own_ms)

    def noise(self) -> Comparison:
        """What the second own hit of a turn adds to the first."""
        return differences(self.own_ms[1::2], self.own_ms[::2])


Table = dict[int, dict[Arm, Taken]]


def run(size: Size, arms: Sequence[Arm] = ARMS) -> Section:
    """Measure, and make a section of it."""
    with serve(arms, "--max-model-len", "8192") as engines:
        table, copies_ms = _measure(size, engines)
    return _section(size, table, copies_ms)


def _measure(
    size: Size, engines: Mapping[Arm, ServedEngine]
) -> tuple[Table, dict[int, dict[int, float]]]:
    prompts = Prompts(next(iter(engines.values())).tokenize, seed=1)
    plain = PlainCopy()
    table: Table = {}
    copies_ms: dict[int, dict[int, float]] = {}
    for length in size.lengths:
        print(f"  reuse: {length} tokens", flush=True)
        prompt = prompts.make(length)
        table[length] = {arm: Taken() for arm in engines}
        for number in range(size.warm_up_turns + size.turns):
            is_warm_up = number < size.warm_up_turns
            if number == size.warm_up_turns:
                table[length] = {arm: Taken() for arm in engines}
            for arm in rotated(tuple(engines), number):
                _wait_others_idle(engines, arm)
                taken = table[length][arm]
                if arm == Arm.NONE:
                    if is_warm_up or len(taken.cold_ms) < size.cold_turns:
                        taken.cold_ms.append(_ask(engines[arm], prompt).ttft_ms)
                else:
                    _turn(engines[arm], prompt, taken, is_external=arm in EXTERNAL)
        _wait_others_idle(engines, None)
        blocks = (length - 1) // BLOCK_TOKENS
        copies_ms[length] = {threads: plain.load_ms(blocks, threads) for threads in (1, 2)}
    return table, copies_ms


def _turn(engine: ServedEngine, prompt: list[int], taken: Taken, *, is_external: bool) -> None:
    """Two pairs; the first request of a turn makes sure that the engine has the prompt itself."""
    _ask(engine, prompt)
    for _ in range(2):
        own = _ask(engine, prompt)
        taken.own_ms.append(own.ttft_ms)
        taken.own_tokens.add(own.cached_tokens)
        if not is_external:
            continue
        reset(engine)
        before = engine.metrics()[EXTERNAL_HITS]
        external = _ask(engine, prompt)
        taken.external_ms.append(external.ttft_ms)
        hits = int(engine.metrics()[EXTERNAL_HITS] - before)
        assert hits == external.cached_tokens, (hits, external.cached_tokens)
        taken.external_tokens.add(hits)


def reset(engine: ServedEngine) -> None:
    """Make the engine forget; it refuses as long as a connector still holds blocks."""
    until_s = time.monotonic() + RESET_S_MAX
    while not engine.reset_prefix_cache():
        if time.monotonic() > until_s:
            raise ServingError(f"the engine refused to reset its cache for {RESET_S_MAX:g} s")
        time.sleep(0.01)


def _ask(engine: ServedEngine, prompt: list[int]) -> Completion:
    return engine.complete(prompt, OUTPUT_TOKENS, ignore_eos=True)


def _wait_others_idle(engines: Mapping[Arm, ServedEngine], arm: Arm | None) -> None:
    for other, engine in engines.items():
        if other != arm:
            engine.wait_idle()


def _section(size: Size, table: Table, copies_ms: Mapping[int, Mapping[int, float]]) -> Section:
    section = Section(
        title="Reuse after a reset",
        text=f"TTFT in ms, median and middle half; prompts of random words. Own hit: from the "
        f"engine's own cache. External hit: after `reset_prefix_cache`. Added: external minus "
        f"own, median of {size.turns * 2} interleaved pairs with its 95 % interval. Noise: the "
        "second own hit of a turn minus the first, likewise: what an arm adds to itself. Plain "
        "copy: the same pages by one thread / by two.",
        header=(
            *("tokens", "arm", "cold", "own hit", "tokens hit", "noise"),
            *("external hit", "tokens hit", "added", "plain copy"),
        ),
    )
    for length, by_arm in table.items():
        copy = copies_ms[length]
        for arm, taken in by_arm.items():
            section.rows.append(
                (
                    *(str(length), arm.value, _shown(taken.cold_ms), _shown(taken.own_ms)),
                    _counts(taken.own_tokens),
                    taken.noise().difference() if taken.own_ms else "",
                    *(_shown(taken.external_ms), _counts(taken.external_tokens)),
                    taken.added().difference() if taken.external_ms else "",
                    f"{copy[1]:.1f} / {copy[2]:.1f}" if arm in EXTERNAL else "",
                )
            )
        _check_length(section, length, by_arm, copy)
    section.data["lengths"] = {
        length: {arm.value: _raw(taken) for arm, taken in by_arm.items()}
        for length, by_arm in table.items()
    }
    section.data["plain_copy_ms"] = copies_ms
    return section


def _check_length(
    section: Section, length: int, by_arm: Mapping[Arm, Taken], copy: Mapping[int, float]
) -> None:
    ours = by_arm.get(Arm.KVTIDE)
    if ours is None:
        return
    section.check(
        f"{length}: tokens hit",
        f"the engine's own, {_counts(ours.own_tokens)}",
        _counts(ours.external_tokens),
        ours.external_tokens == ours.own_tokens,
    )
    added = ours.added()
    is_enough = added.spread.count >= PAIRS_MIN
    # Two threads are the faster copy, so the stricter measure.
    limit_ms = COPIES_MAX * min(copy.values()) + FIXED_MS_MAX
    section.check(
        f"{length}: added by a hit",
        f"≤ {limit_ms:.1f} ms (1.25 plain copies + 8 ms)",
        f"{added.difference()} ms",
        added.spread.median <= limit_ms if is_enough else None,
    )
    theirs = by_arm.get(Arm.LMCACHE)
    if theirs is not None and length in RIVAL_LENGTHS:
        limit_ms = RIVAL_RATIO_MAX * theirs.added().spread.median
        section.check(
            f"{length}: added by a hit, against LMCache",
            f"≤ {limit_ms:.1f} ms (half of LMCache's)",
            f"{added.spread.median:.1f} ms",
            added.spread.median <= limit_ms if is_enough else None,
        )
    cold = by_arm.get(Arm.NONE)
    if cold is not None and length == SPEED_UP_LENGTH:
        ratio = spread(ours.own_ms).median / spread(ours.external_ms).median
        cold_ms = spread(cold.cold_ms).median
        section.check(
            f"{length}: speed-up over cold",
            "≥ 0.85 of the own hit's",
            f"{ratio:.2f} ({cold_ms / spread(ours.external_ms).median:.1f} times)",
            ratio >= SPEED_UP_RATIO_MIN if is_enough else None,
        )


def _shown(values_ms: Sequence[float]) -> str:
    return str(spread(values_ms)) if values_ms else ""


def _counts(counts: set[int]) -> str:
    return ", ".join(str(count) for count in sorted(counts))


def _raw(taken: Taken) -> dict[str, object]:
    return {
        "cold_ms": taken.cold_ms,
        "own_ms": taken.own_ms,
        "external_ms": taken.external_ms,
        "own_tokens": sorted(taken.own_tokens),
        "external_tokens": sorted(taken.external_tokens),
    }
