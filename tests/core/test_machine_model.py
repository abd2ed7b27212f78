"""The whole machine against a plain model of the memory (node_model.py), under any history."""

import random
from collections.abc import Callable
from typing import TypeAlias

import pytest
from hypothesis import settings

from kvtide.core import lending as lending_module
from tests.core.node_model import SALTS, SHAPES, NodeModel
from tests.core.tiered_model import TieredNodeModel
from tests.core.world import prompt

Step: TypeAlias = Callable[[], None]

HISTORY_STEPS = 10_000  # at least

NodeModel.TestCase.settings = settings(stateful_step_count=50)
TestNodeModel = NodeModel.TestCase
TieredNodeModel.TestCase.settings = NodeModel.TestCase.settings
TestTieredNodeModel = TieredNodeModel.TestCase


def weighted_steps(model: NodeModel, draw: random.Random) -> list[tuple[int, Step]]:
    """What may happen next, and how often."""

    def any_prompt() -> list[int]:
        parts = [draw.randint(1, 4) for _ in range(draw.randint(1, 3))]
        return prompt(*parts, blocks=draw.randint(1, 4))

    def which() -> int:
        return draw.randrange(10**6)

    def salt() -> str | None:
        return draw.choice(SALTS)

    steps: list[tuple[int, Step]] = [
        (20, lambda: model.store(which(), any_prompt(), salt(), draw.choice([0, 0, 1, 2]))),
        (20, lambda: model.look_up(which(), [which()], draw.randint(-3, 3))),
        (8, lambda: model.use_match(which(), which(), draw.choice(["release", "begin", "end"]))),
        (6, lambda: model.offer(which(), any_prompt(), salt(), draw.random() < 0.5)),
        (6, lambda: model.plan(which(), which())),
        (2, lambda: model.give_back(which(), which())),
        (6, lambda: model.write(which(), which(), which(), draw.random() < 0.75)),
        (4, lambda: model.write_all(which())),
        (6, lambda: model.get_round_to_it(which(), which(), draw.random() < 0.8)),
        (2, lambda: model.dawdle(which(), draw.random() < 0.5)),
        (4, lambda: model.tick(draw.choice([1, 10, 500, 2_000, 11_000]))),
        (1, lambda: model.press(draw.randint(3, 8), draw.choice([None, 64]), draw.random() < 0.5)),
        (3, lambda: model.trouble(which(), which(), draw.choice(["break", "replace"]))),
        (1, lambda: model.trouble(which(), which(), "kill")),
        (6, lambda: model.mend(which())),
        (3, lambda: model.start(draw.randrange(3), draw.randrange(5), draw.random() < 0.5)),
        (1, lambda: model.clear(salt(), draw.random() < 0.2)),
    ]
    if isinstance(model, TieredNodeModel):
        steps += [
            (90, lambda: model.tier_answers(which(), draw.choice(["good", "good", "bad"]))),
            (4, model.tier_answers_all),
            (2, lambda: model.tier_forgets(which())),
            (4, lambda: model.look_behind(which(), which(), draw.random() < 0.1)),
            (2, model.host_forgets),
        ]
    return steps


def what_is_missing(model: NodeModel) -> str:
    """What has not yet happened often enough for a history to prove something, or nothing.

    How often things happen is the draw's luck: a history goes on until it has them all.
    """
    lending = model.world.machine.lending
    if lending.stored_blocks <= 500:
        return "was stored"
    if model.matches <= (50 if isinstance(model, TieredNodeModel) else 200):
        return "was found"
    if isinstance(model, TieredNodeModel):
        return "" if sum(model.promoted) > 20 < 4 * min(model.promoted) else "came back"
    return "" if min(lending.evicted.values()) > 10 else "was evicted"


@pytest.mark.parametrize("model_type", [NodeModel, TieredNodeModel])
@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(seed, marks=pytest.mark.long) for seed in (1, 2))]
)
def test_the_model_holds_through_a_long_history(
    seed: int, model_type: type[NodeModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As above, but on and on: what Hypothesis cannot shorten, the seed repeats.

    What is cleared goes as slowly as that of a node that holds a million chunks.
    """
    monkeypatch.setattr(lending_module, "CLEARED_VISITS_MAX", 1 + seed)
    draw = random.Random(seed)
    model = model_type()
    model.begin([draw.randrange(len(SHAPES)) for _ in range(3)], [])
    steps = weighted_steps(model, draw)
    chances = [weight for weight, _ in steps]
    for done in range(10 * HISTORY_STEPS):
        if done >= HISTORY_STEPS and done % 1_000 == 0 and not what_is_missing(model):
            break
        _, step = draw.choices(steps, chances)[0]
        step()
    assert not (missing := what_is_missing(model)), f"too little {missing} to prove anything"
    model.teardown()
