"""Loading or computing: decided by what was measured, and only where that is clear."""

import pytest

from kvtide.core import messages as m
from kvtide.core.estimate import KEPT_RATIO, SAMPLES_MIN, SLOWER_RATIO_MIN, TRY_EVERY, Choice, Rate
from kvtide.core.tiering import TierPlan
from tests.core.fake_tier import FakeTier
from tests.core.world import CHUNK_BLOCKS, Engine, World, prompt


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
