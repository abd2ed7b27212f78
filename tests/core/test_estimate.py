"""Loading or computing: decided by what was measured, and only where that is clear."""

import pytest

from kvtide.core import messages as m
from kvtide.core.effects import LoadFrom
from kvtide.core.estimate import KEPT_RATIO, SAMPLES_MIN, SLOWER_RATIO_MIN, TRY_EVERY, Choice, Rate
from kvtide.core.tiering import TierPlan
from kvtide.units import MiB
from tests.core.fake_tier import FakeTier
from tests.core.test_promotions import ask
from tests.core.world import CHUNK_BLOCKS, CHUNK_TOKENS, Engine, World, prompt


def rate(amount_per_ms: float, samples: int = SAMPLES_MIN) -> Rate:
    made = Rate()
    for _ in range(samples):
        made.add(amount_per_ms * 10, 10)
    return made


def choice(bytes_per_ms: float, samples: int = SAMPLES_MIN) -> Choice:
    made = Choice()
    made.loading = rate(bytes_per_ms, samples)
    return made


def test_a_rate_is_the_amount_over_the_time() -> None:
    assert rate(5).ms_for(100) == pytest.approx(20)


def test_a_rate_without_evidence_says_nothing() -> None:
    assert rate(5, SAMPLES_MIN - 1).ms_for(100) is None
    assert Rate().ms_for(0) is None
    assert rate(0).ms_for(100) is None


def test_a_rate_forgets() -> None:
    made = rate(5, 100)
    for _ in range(100):
        made.add(500, 10)
    assert made.ms_for(100) == pytest.approx(2, rel=2 * KEPT_RATIO**100)


@pytest.mark.parametrize(
    ("factor", "is_load"),
    [(0.1, True), (SLOWER_RATIO_MIN * 0.99, True), (SLOWER_RATIO_MIN * 1.01, False)],
)
def test_a_chain_is_left_alone_only_where_loading_is_clearly_slower(
    factor: float, is_load: bool
) -> None:
    """1,000 bytes a token, both at a token a millisecond, but for the factor."""
    assert choice(1_000 / factor).is_worth_loading(100_000, 100, rate(1)) is is_load


@pytest.mark.parametrize("samples", [(SAMPLES_MIN - 1, 99), (99, SAMPLES_MIN - 1)])
def test_without_evidence_it_is_loaded(samples: tuple[int, int]) -> None:
    slow = choice(1, samples[0])
    assert slow.is_worth_loading(10**9, 1, rate(1_000, samples[1]))


def test_now_and_then_one_is_loaded_to_measure_anew() -> None:
    slow = choice(1)
    outcomes = [slow.is_worth_loading(10**9, 1, rate(1_000)) for _ in range(2 * TRY_EVERY)]
    assert outcomes.count(True) == 2


def believed_ms(choice: Choice, amount: float) -> float | None:
    """What loading so much takes, by the measurements so far, however few."""
    choice.loading.samples = SAMPLES_MIN
    return choice.loading.ms_for(amount)


def test_a_tier_is_as_quick_as_what_it_loads_while_it_has_something_to_load() -> None:
    """Three loads, two of them at once; nothing is loaded between."""
    choice = Choice()
    choice.began(1, 1_000)
    choice.began(2, 1_010)
    choice.ended(1, 50, 1_030)
    choice.measure(1_030)
    choice.ended(2, 50, 1_040)
    choice.measure(1_040)
    choice.began(3, 9_000)
    choice.ended(3, 100, 9_040)
    choice.measure(9_040)
    choice.measure(9_050)
    assert choice.loading.samples == 3, "the last had nothing to add"
    assert believed_ms(choice, 100) == pytest.approx(40, rel=3 * (1 - KEPT_RATIO))


def test_a_load_that_hangs_counts_no_longer_than_anybody_waits() -> None:
    """The tier gives all others at once, for a minute; between them nobody asks."""
    choice = Choice()
    choice.began(0, 0)
    for number in range(1, 61):
        choice.began(number, number * 1_000)
        choice.ended(number, 100, number * 1_000 + 10)
        choice.measure(number * 1_000 + 10)
    assert choice.loading.ms_for(100) == pytest.approx(10, rel=0.5)


def test_loads_that_fail_cost_time() -> None:
    choice = Choice()
    choice.began(1, 0)
    choice.ended(1, 0, 100)
    choice.measure(100)
    choice.began(2, 200)
    choice.ended(2, 100, 300)
    choice.measure(300)
    assert believed_ms(choice, 100) == pytest.approx(200, rel=2 * (1 - KEPT_RATIO))


def test_prompts_that_share_a_prefix_do_not_make_a_tier_slow() -> None:
    """All wait for the chunks of the first; loading is four times as quick as computing."""
    tier = FakeTier()
    shared = [prompt(*range(1, 11), 100 + n) for n in range(16)]
    alone = [prompt(*range(first, first + 11)) for first in range(500, 660, 20)]
    before = Engine(World(64 * MiB, tiers=[tier])).start()
    for tokens in [*shared, *alone]:
        before.store(tokens)
    engine = Engine(World(64 * MiB, tiers=[tier])).start()
    for _ in range(SAMPLES_MIN):
        engine.say(m.Counts({"prefill_tokens": 11 * CHUNK_TOKENS, "prefill_us": 440_000}))
    tier.answers = False
    for asked in (shared, *([tokens] for tokens in alone)):
        for tokens in asked:
            ask(engine, tokens)
        while tier.waiting:
            job = tier.waiting.pop(0)
            engine.world.now_ms += 10 * isinstance(job, LoadFrom)
            engine.world.give(tier.answer(job))
    assert "promotions.slower_than_compute" not in engine.world.machine.counts
    assert [match.chunks for match in engine.heard(m.Match)] == [11] * 24


def slow_world(*, loads_always: bool) -> tuple[Engine, FakeTier]:
    """A tier that needs a second for each chain, below an engine that computes at once."""
    tier = FakeTier()
    before = Engine(World(tiers=[tier])).start()
    for part in range(1, SAMPLES_MIN + 3):
        before.store(prompt(part))
    world = World(tiers=[tier], loads_always=loads_always)
    engine = Engine(world).start()
    for _ in range(SAMPLES_MIN):
        engine.say(m.Counts({"prefill_tokens": 8_000, "prefill_us": 1_000}))
    tier.answers = False
    for part in range(1, SAMPLES_MIN + 1):
        keys, _ = engine.chain(prompt(part))
        engine.number += 1
        engine.say(m.Lookup(engine.number, engine.root, keys[0], b""))
        world.answer(tier)
        world.now_ms += 1_000
        world.answer(tier)
        assert engine.last(m.Match).chunks == 1
    tier.answers = True
    return engine, tier


def test_a_tier_that_is_slower_than_the_engine_is_left_alone() -> None:
    engine, tier = slow_world(loads_always=False)
    loaded = len(tier.loaded)
    assert engine.blocks_held(prompt(SAMPLES_MIN + 1)) == 0
    assert len(tier.loaded) == loaded
    assert engine.world.machine.counts["promotions.slower_than_compute"] > 0


def test_loads_always_means_always() -> None:
    engine, _ = slow_world(loads_always=True)
    assert engine.blocks_held(prompt(SAMPLES_MIN + 1)) == CHUNK_BLOCKS


def test_plans_estimate_unless_told_otherwise() -> None:
    assert not TierPlan("disk").loads_always
