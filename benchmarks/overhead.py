"""Prompts that nobody sent before: what kvtide costs an engine that never hits.

A turn is one request of unique random words, a prefill step and then a token a step, once the
engines were seen to use no CPU. Compared is within one engine: requests that kvtide looks up and
stores, with requests that opted out of it, in turn, so that a machine that changes its pace
changes it for both. Two turns of a round are opted out: their mean is what kvtide is compared
with, and one against the other is the noise floor.

Engines without kvtide take their turns in the first rounds, and are shown. They decide nothing:
two engines of one kind differ for life, by a fifth and more in prefill on two cores of an AMD EPYC
(likely by where their memory lies), which no number of rounds takes away. What every step costs
besides, hit or not, is the time inside the hooks, which an engine of its own measures.

Before that kvtide's host tier is filled: memory that is allocated and mapped for the first time is
part of first use, not of the steady state.

Judged are steps, and whole requests besides: what a request adds to its prefill is in no step. A
comparison whose interval is wider than allowed decides nothing: more rounds are added, up to a
limit, and then the budget stays open.
"""

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from benchmarks.arms import HOOK_REPORTS, Arm, serve
from benchmarks.hook_reports import hook_us, read_reports
from benchmarks.prompts import Prompts
from benchmarks.report import Section
from benchmarks.stats import PAIRS_MIN, Comparison, ratios, rotated, spread
from kvtide.testing.serving import ServedEngine

PROMPT_TOKENS = 1000
OUTPUT_TOKENS = 65  # one comes from the prefill, the others take a step each
OVERHEAD_MAX = 1.03  # the upper end of the interval
HALF_WIDTH_MAX = 0.02
HOOK_SHARE_MAX = 0.01
HOOK_STEPS_MIN = 2000
FILL_PROMPTS = 160  # more than `arms.HOST_BYTES` hold


class Way(enum.Enum):
    """One kind of turn; the value is the row's title."""

    OFF = "kvtide's engine, request opted out"
    OFF_AGAIN = "the same once more"
    ON = "kvtide"
    OWN = "another engine, with its prefix cache only"
    NONE = "another engine, without a cache"
    LMCACHE = "another engine, with LMCache 0.5.6"


OTHERS = {Way.OWN: Arm.OWN, Way.NONE: Arm.NONE, Way.LMCACHE: Arm.LMCACHE}
OPTED_OUT = {"kv_transfer_params": {"kvtide": "off"}}


@dataclass(frozen=True, slots=True)
class Size:
    """How much is measured."""

    fill_prompts: int
    rounds: int
    attempts: int  # of so many rounds, until the interval is narrow enough
    hook_steps: int  # of the engine whose hooks are timed


FULL = Size(fill_prompts=FILL_PROMPTS, rounds=24, attempts=9, hook_steps=HOOK_STEPS_MIN)
QUICK = Size(fill_prompts=0, rounds=3, attempts=1, hook_steps=200)
WARM_UP_ROUNDS = 2


@dataclass(slots=True)
class Taken:
    """Measurements of one way; entry n of all ways is of round n, and some have no more."""

    prefill_ms: list[float] = field(default_factory=list)
    step_ms: list[float] = field(default_factory=list)
    total_ms: list[float] = field(default_factory=list)


def run(size: Size) -> Section:
    """Measure, and make a section of it."""
    section = _pairs(size)
    _hooks(size, section)
    return section


def _pairs(size: Size) -> Section:
    table = {way: Taken() for way in Way}
    with serve([Arm.KVTIDE], "--max-model-len", "4096") as engines:
        ours = engines[Arm.KVTIDE]
        prompts = Prompts(ours.tokenize, seed=3)
        for _ in range(size.fill_prompts):
            ours.complete(prompts.make(PROMPT_TOKENS), 1)
        with serve(tuple(OTHERS.values()), "--max-model-len", "4096") as others:
            _rounds(engines | others, prompts, WARM_UP_ROUNDS, {way: Taken() for way in Way})
            print(f"  overhead: {size.rounds} rounds beside other engines", flush=True)
            _rounds(engines | others, prompts, size.rounds, table)
        alone = {way: taken for way, taken in table.items() if way not in OTHERS}
        for attempt in range(1, size.attempts):
            if all(_is_exact(compared) for compared in _overheads(table).values()):
                break
            print(f"  overhead: {size.rounds} rounds, attempt {attempt + 1}", flush=True)
            _rounds(engines, prompts, size.rounds, alone)
        metrics = ours.metrics()
    return _section(table, metrics)


def _rounds(
    engines: Mapping[Arm, ServedEngine], prompts: Prompts, count: int, table: Mapping[Way, Taken]
) -> None:
    for number in range(count):
        for way in rotated(tuple(table), number):
            for engine in engines.values():
                engine.wait_idle()
            engine = engines[OTHERS.get(way, Arm.KVTIDE)]
            extra = OPTED_OUT if way in (Way.OFF, Way.OFF_AGAIN) else {}
            # The first request after a pause is slower than those that follow: it is not counted.
            engine.complete(prompts.make(16), 2, ignore_eos=True)
            prompt = prompts.make(PROMPT_TOKENS)
            answer = engine.complete(prompt, OUTPUT_TOKENS, ignore_eos=True, **extra)
            assert answer.cached_tokens == 0, answer.cached_tokens
            table[way].prefill_ms.append(answer.ttft_ms)
            table[way].step_ms.append(answer.step_ms)
            table[way].total_ms.append(answer.pieces[-1].at_ms)


def _overheads(table: Mapping[Way, Taken]) -> dict[str, Comparison]:
    """Against those of the same round that opted out, by what is compared."""
    ours, theirs = table[Way.ON], _opted_out(table)
    return {
        "step": ratios(ours.step_ms, theirs.step_ms),
        "whole request": ratios(ours.total_ms, theirs.total_ms),
    }


def _is_exact(compared: Comparison) -> bool:
    """Whether it may decide something."""
    return compared.spread.count >= PAIRS_MIN and compared.interval.half_width <= HALF_WIDTH_MAX


def _opted_out(table: Mapping[Way, Taken]) -> Taken:
    """The mean of a round's two."""
    one, other = table[Way.OFF], table[Way.OFF_AGAIN]
    return Taken(
        _means(one.prefill_ms, other.prefill_ms),
        _means(one.step_ms, other.step_ms),
        _means(one.total_ms, other.total_ms),
    )


def _means(some: Sequence[float], others: Sequence[float]) -> list[float]:
    return [(one + other) / 2 for one, other in zip(some, others, strict=True)]


def _section(table: Mapping[Way, Taken], metrics: Mapping[str, float]) -> Section:
    opted_out = _opted_out(table)
    section = Section(
        title="Unique prompts",
        text=f"{PROMPT_TOKENS} tokens in, {OUTPUT_TOKENS} out; median and middle half in ms, and "
        f"the median ratio of {len(opted_out.total_ms)} interleaved pairs to requests of the same "
        "engine that opted out (the mean of two turns; the second against the first is the noise "
        "floor), with its 95 % interval. Engines without kvtide are shown and decide nothing: "
        "two engines of one kind differ for as long as they live, most in prefill and in either "
        "direction, likely by where their memory lies.",
        header=("requests", "prefill", "", "step", "", "whole request", ""),
    )
    for way, taken in table.items():
        cells = [way.value]
        base = table[Way.OFF] if way is Way.OFF_AGAIN else opted_out
        for ours, theirs in (
            (taken.prefill_ms, base.prefill_ms),
            (taken.step_ms, base.step_ms),
            (taken.total_ms, base.total_ms),
        ):
            compared = ratios(ours, theirs[: len(ours)])
            cells += [str(spread(ours)), "" if way is Way.OFF else compared.percent()]
        section.rows.append(cells)
    for name, compared in _overheads(table).items():
        section.check(
            f"overhead by {name}, against {Way.OFF.value}",
            "upper end ≤ +3 %, interval within ±2 %",
            compared.percent(),
            compared.interval.high <= OVERHEAD_MAX if _is_exact(compared) else None,
        )
    section.data["taken"] = {
        way.value: {
            "prefill_ms": taken.prefill_ms,
            "step_ms": taken.step_ms,
            "total_ms": taken.total_ms,
        }
        for way, taken in table.items()
    }
    section.data["kvtide_metrics"] = {
        name: value for name, value in metrics.items() if "kvtide" in name
    }
    return section


def _hooks(size: Size, section: Section) -> None:
    """Time inside kvtide's hooks, in an engine of its own that times them."""
    with serve([Arm.KVTIDE_TIMED], "--max-model-len", "4096") as engines:
        engine = engines[Arm.KVTIDE_TIMED]
        reports = engine.log.parent / HOOK_REPORTS
        prompts = Prompts(engine.tokenize, seed=4)
        for _ in range(WARM_UP_ROUNDS):
            engine.complete(prompts.make(PROMPT_TOKENS), OUTPUT_TOKENS, ignore_eos=True)
        print(f"  overhead: {size.hook_steps} steps with timed hooks", flush=True)
        before = read_reports(reports)
        spent_ms, steps = 0.0, 0
        while steps < size.hook_steps:
            answer = engine.complete(prompts.make(PROMPT_TOKENS), OUTPUT_TOKENS, ignore_eos=True)
            spent_ms += answer.pieces[-1].at_ms
            steps += OUTPUT_TOKENS  # the prompt fits one step
        by_hook = hook_us(before, read_reports(reports))
    step_us = spent_ms / steps * 1000
    share = sum(by_hook.values()) / step_us
    is_enough = steps >= HOOK_STEPS_MIN
    section.check(
        "time inside the hooks",
        f"≤ 1 % of step time over ≥ {HOOK_STEPS_MIN} steps",
        f"{share:.2%} of {step_us / 1000:.1f} ms over {steps} steps; most: {_most(by_hook)}",
        share <= HOOK_SHARE_MAX if is_enough else None,
    )
    section.data["hook_us_per_step"] = by_hook


def _most(by_hook: Mapping[str, float]) -> str:
    """The three hooks that take longest."""
    longest = sorted(by_hook.items(), key=lambda item: -item[1])[:3]
    return ", ".join(f"{name} {took_us:.0f} µs" for name, took_us in longest)
