"""Prompts that nobody sent before: what kvtide costs an engine that never hits.

Four engines live at once and take turns: without kvtide, without kvtide once more, with a
connector that does nothing, with kvtide. A turn is one request of unique random words, a prefill
step and then a token a step; before it all engines are seen to use no CPU. Compared are the times
of one round, so that a machine that changes its pace changes it for all. The two engines without
kvtide give the noise floor, the empty connector what vLLM itself spends on having one.

Before that kvtide's host tier is filled: memory that is allocated and mapped for the first time is
part of first use, not of the steady state.

A comparison whose interval is wider than allowed decides nothing: more rounds are added, up to a
limit, and then the budget stays open.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from benchmarks.arms import HOOK_REPORTS, Arm, serve
from benchmarks.hook_reports import hook_us, read_reports
from benchmarks.prompts import Prompts
from benchmarks.report import Section
from benchmarks.stats import PAIRS_MIN, Comparison, ratios, rotated, spread
from kvtide.testing.serving import ServedEngine

ARMS = (Arm.OWN, Arm.OWN_AGAIN, Arm.EMPTY, Arm.KVTIDE)
PROMPT_TOKENS = 1000
OUTPUT_TOKENS = 65  # one comes from the prefill, the others take a step each
OVERHEAD_MAX = 1.03  # the upper end of the interval
HALF_WIDTH_MAX = 0.02
HOOK_SHARE_MAX = 0.01
HOOK_STEPS_MIN = 2000
FILL_PROMPTS = 160  # more than `arms.HOST_BYTES` hold


@dataclass(frozen=True, slots=True)
class Size:
    """How much is measured."""

    fill_prompts: int
    rounds: int
    attempts: int  # of so many rounds, until the interval is narrow enough
    hook_steps: int  # of the engine whose hooks are timed


FULL = Size(fill_prompts=FILL_PROMPTS, rounds=24, attempts=3, hook_steps=HOOK_STEPS_MIN)
QUICK = Size(fill_prompts=0, rounds=3, attempts=1, hook_steps=200)
WARM_UP_ROUNDS = 2


@dataclass(slots=True)
class Taken:
    """Measurements of one arm; entry n of all arms is of round n."""

    prefill_ms: list[float] = field(default_factory=list)
    step_ms: list[float] = field(default_factory=list)
    total_ms: list[float] = field(default_factory=list)


def run(size: Size) -> Section:
    """Measure, and make a section of it."""
    section = _pairs(size)
    _hooks(size, section)
    return section


def _pairs(size: Size) -> Section:
    with serve(ARMS, "--max-model-len", "4096") as engines:
        prompts = Prompts(engines[Arm.OWN].tokenize, seed=3)
        for _ in range(size.fill_prompts):
            engines[Arm.KVTIDE].complete(prompts.make(PROMPT_TOKENS), 1)
        for _ in range(WARM_UP_ROUNDS):
            _rounds(engines, prompts, 1, {arm: Taken() for arm in ARMS})
        table = {arm: Taken() for arm in ARMS}
        for attempt in range(size.attempts):
            print(f"  overhead: {size.rounds} rounds, attempt {attempt + 1}", flush=True)
            _rounds(engines, prompts, size.rounds, table)
            if _whole(table, Arm.KVTIDE, Arm.OWN).interval.half_width <= HALF_WIDTH_MAX:
                break
        metrics = engines[Arm.KVTIDE].metrics()
    return _section(table, metrics)


def _rounds(
    engines: Mapping[Arm, ServedEngine], prompts: Prompts, count: int, table: Mapping[Arm, Taken]
) -> None:
    for number in range(count):
        for arm in rotated(ARMS, number):
            for engine in engines.values():
                engine.wait_idle()
            # The first request after a pause is slower than those that follow: it is not counted.
            engines[arm].complete(prompts.make(16), 2, ignore_eos=True)
            answer = engines[arm].complete(
                prompts.make(PROMPT_TOKENS), OUTPUT_TOKENS, ignore_eos=True
            )
            assert answer.cached_tokens == 0, answer.cached_tokens
            table[arm].prefill_ms.append(answer.ttft_ms)
            table[arm].step_ms.append(answer.step_ms)
            table[arm].total_ms.append(answer.pieces[-1].at_ms)


def _whole(table: Mapping[Arm, Taken], ours: Arm, theirs: Arm) -> Comparison:
    return ratios(table[ours].total_ms, table[theirs].total_ms)


def _section(table: Mapping[Arm, Taken], metrics: Mapping[str, float]) -> Section:
    base = table[Arm.OWN]
    section = Section(
        title="Unique prompts",
        text=f"{PROMPT_TOKENS} tokens in, {OUTPUT_TOKENS} out; median and middle half in ms, and "
        f"the median ratio of {len(base.total_ms)} interleaved pairs to the engine without "
        "kvtide, with its 95 % interval. The second engine without kvtide is the noise floor; the "
        "empty connector shows what vLLM spends on having one.",
        header=("arm", "prefill", "", "step", "", "whole request", ""),
    )
    for arm, taken in table.items():
        cells = [arm.value]
        for ours, theirs in (
            (taken.prefill_ms, base.prefill_ms),
            (taken.step_ms, base.step_ms),
            (taken.total_ms, base.total_ms),
        ):
            cells += [str(spread(ours)), "" if arm == Arm.OWN else ratios(ours, theirs).percent()]
        section.rows.append(cells)
    for other in (Arm.OWN, Arm.OWN_AGAIN, Arm.EMPTY):
        _check(section, _whole(table, Arm.KVTIDE, other), other)
    section.data["taken"] = {
        arm.value: {
            "prefill_ms": taken.prefill_ms,
            "step_ms": taken.step_ms,
            "total_ms": taken.total_ms,
        }
        for arm, taken in table.items()
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


def _check(section: Section, compared: Comparison, other: Arm) -> None:
    is_exact = (
        compared.spread.count >= PAIRS_MIN and compared.interval.half_width <= HALF_WIDTH_MAX
    )
    section.check(
        f"overhead against {other.value}",
        "upper end ≤ +3 %, interval within ±2 %",
        compared.percent(),
        compared.interval.high <= OVERHEAD_MAX if is_exact else None,
    )
