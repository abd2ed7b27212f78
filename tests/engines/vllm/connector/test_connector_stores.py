"""Which blocks of a request that is gone may still be copied, as `Stores` decides it.

Its neighbours are stubs: a node that answers when told to, and no engine.
"""

from types import SimpleNamespace
from typing import Any

import pytest

from kvtide.clock import MonotonicClock
from kvtide.core import messages as m
from kvtide.core.chain import Chain
from kvtide.core.plan import StorePlan
from kvtide.engines.vllm.metadata import StepPlan
from kvtide.engines.vllm.stores import Stores
from kvtide.metrics import Counters

BLOCK = 16
CHUNK = 4 * BLOCK
TOKENS = list(range(BLOCK))
BLOCK_ID = 7
GRANT = 1


class Link:
    """Takes everything; what the node would answer comes from the test."""

    is_usable = True

    def __init__(self) -> None:
        self.sent: list[m.Message] = []
        self.returned: list[int] = []

    def send(self, message: m.Message) -> bool:
        self.sent.append(message)
        return True

    def return_grants(self, grants: list[int]) -> None:
        self.returned += grants

    def grant(self) -> m.StoreAnswer:
        """The answer to the one question: yes."""
        (offer,) = [message for message in self.sent if isinstance(message, m.StoreOffer)]
        return m.StoreAnswer(offer.number, [""], [GRANT], [(1, 0, 1, 5)], [3])


class Scene:
    """A request of one block has ended; the node has not answered yet."""

    def __init__(self) -> None:
        self.link = Link()
        identity: Any = SimpleNamespace(block_tokens=BLOCK, chunk_tokens=CHUNK, step_tokens=64)
        numbers = iter(range(1, 100))
        self.stores = Stores(
            identity,
            self.link,  # type: ignore[arg-type]
            lambda: next(numbers),
            lambda root: True,
            MonotonicClock(),
            Counters(),
        )
        self.step(gives=[BLOCK_ID])
        store = StorePlan(Chain(bytes(32), BLOCK, CHUNK))
        request = SimpleNamespace(all_token_ids=TOKENS)
        tracker: Any = SimpleNamespace(store=store, root=object(), request=request)
        self.stores.left(tracker, BLOCK, [BLOCK_ID], has_ended=True)

    def step(self, gives: list[int], *, is_answered: bool = False) -> list[int]:
        """One step of the engine: what is copied before its forward."""
        if is_answered:
            self.stores.answered(self.link.grant())
        self.stores.given_out(gives)
        plan = StepPlan()
        self.stores.plan(plan)
        return [block_id for job in plan.rescues for block_id in job.block_ids]


@pytest.fixture
def scene() -> Scene:
    return Scene()


def test_a_block_that_nobody_was_given_is_copied(scene: Scene) -> None:
    scene.step(gives=[8])
    assert scene.step(gives=[], is_answered=True) == [BLOCK_ID]


def test_a_block_that_this_very_step_gives_out_is_copied_first(scene: Scene) -> None:
    assert scene.step(gives=[BLOCK_ID], is_answered=True) == [BLOCK_ID]


def test_a_block_that_an_earlier_step_gave_out_is_not(scene: Scene) -> None:
    scene.step(gives=[BLOCK_ID])
    assert scene.step(gives=[], is_answered=True) == []


def test_nor_is_one_that_this_step_names_again(scene: Scene) -> None:
    """vLLM names all blocks of a request once more when its load has ended."""
    scene.step(gives=[BLOCK_ID])
    assert scene.step(gives=[BLOCK_ID], is_answered=True) == []
    assert scene.link.returned == [GRANT]
