"""Which blocks are copied in which step, also of a request that is gone, as `Stores` decides it.

Its neighbours are stubs: a node that answers when told to, and no engine.
"""

from types import SimpleNamespace
from typing import Any

import pytest

from kvtide.clock import MonotonicClock
from kvtide.core import messages as m
from kvtide.core.chain import Chain
from kvtide.core.plan import Granted, StorePlan
from kvtide.engines.vllm.metadata import StepPlan
from kvtide.engines.vllm.stores import ANSWER_MS_MAX, Stores
from kvtide.metrics import Counters

BLOCK = 16
CHUNK = 4 * BLOCK
TOKENS = list(range(BLOCK))
BLOCK_ID = 7
GRANT = 1


class Link:
    """Takes everything; what the node would answer comes from the test."""

    is_usable = are_weights_verified = True

    def __init__(self) -> None:
        self.sent: list[m.Message] = []
        self.returned: list[int] = []

    def ask(self, message: m.Message) -> bool:
        self.sent.append(message)
        return True

    def abandon(self, number: int) -> None:
        """Nobody waits for this answer any more."""

    def return_grants(self, grants: list[int]) -> None:
        self.returned += grants

    def grant(self) -> m.StoreAnswer:
        """The answer to the one question: yes."""
        (offer,) = [message for message in self.sent if isinstance(message, m.StoreOffer)]
        return m.StoreAnswer(offer.number, [""], [GRANT], [m.Run(1, 0, 1, 5)], [3])


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


class Long:
    """A request of many chunks that are all computed and granted: a node has lost them."""

    CHUNKS = 9
    PER_STEP = 2  # chunks: two step budgets of one chunk

    def __init__(self) -> None:
        self.link = Link()
        self.now_ms = 0
        clock: Any = SimpleNamespace(now_ms=lambda: self.now_ms)
        identity: Any = SimpleNamespace(block_tokens=BLOCK, chunk_tokens=CHUNK, step_tokens=CHUNK)
        self.blocks = list(range(100, 100 + 4 * self.CHUNKS))
        self.stores = Stores(
            identity,
            self.link,  # type: ignore[arg-type]
            iter(range(1, 100)).__next__,
            lambda root: True,
            clock,
            Counters(),
        )
        self.stores.bind(SimpleNamespace(get_block_ids=lambda _: [self.blocks]))
        count = self.CHUNKS * CHUNK
        request = SimpleNamespace(
            request_id="long",
            all_token_ids=list(range(count)),
            num_tokens=count,
            num_prompt_tokens=count,
            num_computed_tokens=count,
        )
        self.store = StorePlan(Chain(bytes(32), BLOCK, CHUNK))
        self.tracker: Any = SimpleNamespace(
            store=self.store,
            root=object(),
            request=request,
            storable_tokens=count,
            prefill_end_block=4 * self.CHUNKS,
        )
        self.stores.admitted(self.tracker)
        (offer,) = self.link.sent
        assert isinstance(offer, m.StoreOffer)
        runs = [m.Run(1, 4 * chunk, 4, 5) for chunk in range(self.CHUNKS)]
        grants = list(range(1, self.CHUNKS + 1))
        self.stores.answered(m.StoreAnswer(offer.number, [""] * self.CHUNKS, grants, runs, [3]))

    def step(self, gives: list[int]) -> list[int]:
        """The grants that one step copies."""
        if self.tracker.store is not None:
            self.stores.computed(self.tracker)
        self.stores.given_out(gives)
        plan = StepPlan()
        self.stores.plan(plan)
        return [job.grant for job in [*plan.stores, *plan.rescues]]

    def end(self) -> None:
        """The request ends; its blocks are free."""
        self.stores.left(self.tracker, self.CHUNKS * CHUNK, self.blocks, has_ended=True)


def test_a_step_copies_no_more_than_two_steps_compute() -> None:
    """And nothing is lost by it: the rest follows, in order."""
    long = Long()
    assert [long.step([]) for _ in range(6)] == [[1, 2], [3, 4], [5, 6], [7, 8], [9], []]
    assert long.link.returned == []


def test_so_it_is_behind_the_end_of_the_request() -> None:
    """Steps go on for it until nothing is left."""
    long = Long()
    long.step([])
    long.end()
    assert [long.step([]) for _ in range(3)] == [[3, 4], [5, 6], [7, 8]]
    assert long.stores.has_work
    assert long.step([]) == [9]
    assert not long.stores.has_work
    assert long.link.returned == []


def test_what_this_step_gives_out_is_copied_beyond_that() -> None:
    long = Long()
    long.end()
    assert long.step([long.blocks[-1], long.blocks[-5]]) == [1, 2, 8, 9]
    assert long.step([]) == [3, 4]


def test_what_this_step_gives_out_is_copied_beyond_that_no_more_than_once_again() -> None:
    """A load of a long prompt takes all its blocks in one step; the others are gone then."""
    long = Long()
    long.end()
    assert long.step(long.blocks) == [1, 2, 3, 4]
    assert [long.step([]) for _ in range(4)] == [[]] * 4
    assert long.link.returned == [5, 6, 7, 8, 9]


def test_at_the_deadline_of_an_ended_request_as_much_again_is_copied() -> None:
    """The rest goes back: this step shall not hold up the engine for longer than others."""
    long = Long()
    long.end()
    assert long.step([]) == [1, 2]
    long.now_ms += ANSWER_MS_MAX
    assert long.step([]) == [3, 4, 5, 6]
    assert sorted(long.link.returned) == [7, 8, 9]
    assert not long.stores.has_work


def test_all_that_is_late_in_one_step_shares_one_budget() -> None:
    long = Long()
    long.end()
    other = StorePlan(Chain(bytes(32), BLOCK, CHUNK))
    other.granted.extend(Granted(grant, [3], m.Run(1, 0, 4, 5), 0) for grant in (21, 22))
    long.tracker.store = other
    long.end()
    long.now_ms += ANSWER_MS_MAX
    assert long.step([]) == [1, 2, 3, 4]
    assert sorted(long.link.returned) == [5, 6, 7, 8, 9, 21, 22]


def test_a_node_that_falls_silent_loses_an_ended_request_nothing_that_is_granted() -> None:
    """Its memory is still there; each step copies what it may."""
    long = Long()
    long.end()
    assert long.step([]) == [1, 2]
    long.link.is_usable = False
    assert [long.step([]) for _ in range(4)] == [[3, 4], [5, 6], [7, 8], [9]]
    assert long.link.returned == []
    assert not long.stores.has_work
