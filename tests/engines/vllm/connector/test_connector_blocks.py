"""Blocks that have changed hands: copied while they still hold what was computed, else dropped."""

import contextlib
from collections.abc import Iterator, Sequence

import pytest

from kvtide.engines.vllm.metadata import StoreJob
from kvtide.testing.vllm_toy import ToyEngine, ToyOptions
from tests.engines.vllm.connector.toys import (
    Toys,
    accounts,
    assert_right,
    has_answer,
    own_hit,
    scheduler_of,
    tokens,
    until,
    workers_of,
)

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("patient")]

BLOCK = 16
LENGTH = 8 * BLOCK + 3  # whole chunks: all of them are in one question


@contextlib.contextmanager
def ended(toys: Toys, engine: ToyEngine, prompt: list[int]) -> Iterator[None]:
    """Inside, the node stands still, and a request has ended: its last question is open."""
    request_id = engine.add(prompt)
    lookup_is_answered(engine, request_id)
    with toys.node.stopped():
        while request_id in engine.scheduler.requests:
            engine.step()
        assert_right(engine.results[request_id], 1)
        yield


def lookup_is_answered(engine: ToyEngine, request_id: str) -> None:
    """Wait for the whole answer, to a probe as well, and take it in."""
    scheduler = scheduler_of(engine)
    tracker = scheduler._trackers[request_id]

    def is_answered() -> bool:
        scheduler._take_in(0.0)
        return tracker.question.match is not None

    until("the lookup is answered", is_answered)


def answer_is_there(engine: ToyEngine) -> None:
    """Wait for the node's word, without taking it in."""
    until("the node has answered", lambda: has_answer(engine))


def found_right(toys: Toys, engine: ToyEngine, prompt: list[int]) -> int:
    """How much of a prompt is found, which must be right."""
    toys.rest()
    engine.reset()
    result = engine.generate(prompt)
    assert_right(result, 1)
    toys.rest()
    return result.external


@pytest.mark.parametrize("is_async", [False, True])
def test_reused_in_the_step_that_copies_them(toys: Toys, is_async: bool) -> None:
    """They are given away in this very step: copied before its forward."""
    engine = toys.start(ToyOptions(block_count=11, step_tokens=256, is_async=is_async))
    prompt, other = tokens(LENGTH), tokens(LENGTH)
    with ended(toys, engine, prompt):
        pass
    answer_is_there(engine)
    second = engine.add(other)
    with accounts() as taken:
        engine.run()
    assert not any("source_gone" in outcomes for outcomes in taken), taken
    assert_right(engine.results[second], 1)
    assert found_right(toys, engine, prompt) == own_hit(LENGTH, LENGTH)
    assert found_right(toys, engine, other) == own_hit(LENGTH, LENGTH)


@pytest.mark.parametrize("is_async", [False, True])
def test_reused_in_a_step_before(toys: Toys, is_async: bool) -> None:
    """They were given away, and written, before the grant came: dropped, `source_gone`."""
    engine = toys.start(ToyOptions(block_count=11, step_tokens=256, is_async=is_async))
    prompt, other = tokens(LENGTH), tokens(LENGTH)
    with ended(toys, engine, prompt):
        second = engine.add(other, prompt_logprobs=1)  # asks nothing, so it need not wait
        while not engine.results[second].tokens:
            engine.step()
    answer_is_there(engine)
    with accounts() as taken:
        engine.run()
    toys.rest()
    assert any("source_gone" in outcomes for outcomes in taken)
    assert found_right(toys, engine, prompt) < own_hit(LENGTH, LENGTH)
    assert found_right(toys, engine, other) == own_hit(LENGTH, LENGTH)


def test_blocks_that_another_request_shares_are_still_copied(toys: Toys) -> None:
    """A hit of the engine's own cache gives nothing away: shared blocks are as they were."""
    engine = toys.start(ToyOptions(block_count=40, step_tokens=256))
    prompt = tokens(LENGTH)
    longer = [*prompt, *tokens(40)]
    with ended(toys, engine, prompt):
        second = engine.add(longer, 5, prompt_logprobs=None, extra_args=OFF)
        while not engine.results[second].tokens:
            engine.step()
        assert engine.results[second].local == own_hit(LENGTH, LENGTH)
    answer_is_there(engine)
    engine.run()
    assert found_right(toys, engine, prompt) == own_hit(LENGTH, LENGTH)


OFF = {"kv_transfer_params": {"kvtide": "off"}}


@pytest.mark.parametrize("is_async", [False, True])
def test_what_a_preempted_request_computed_is_kept(toys: Toys, is_async: bool) -> None:
    """Also its tail, where nobody has taken its blocks yet."""
    engine = toys.start(ToyOptions(step_tokens=256, is_async=is_async))
    prompt = tokens(LENGTH)
    request_id = engine.add(prompt, 40)
    while len(engine.results[request_id].tokens) < 20:
        engine.step()
    assert engine.preempt() == request_id
    sofar = [*prompt, *engine.results[request_id].tokens]
    engine.abort(request_id)
    assert found_right(toys, engine, sofar) == own_hit(len(sofar), len(sofar) - 1)


def test_preempted_and_admitted_in_one_step(toys: Toys) -> None:
    """A reset of running requests: old blocks and new ones are not mixed up."""
    engine = toys.start(ToyOptions(step_tokens=32, block_count=64))
    prompts = [tokens(LENGTH), tokens(LENGTH + 20)]
    ids = [engine.add(prompt, 60) for prompt in prompts]
    step = 0
    while engine.step():
        step += 1
        if step % 3 == 0:
            try:
                engine.reset(running=True)
            except RuntimeError:  # a load runs
                continue
        assert step < 2000
    for request_id in ids:
        assert_right(engine.results[request_id], 60)
    for request_id, prompt in zip(ids, prompts, strict=True):
        whole = [*prompt, *engine.results[request_id].tokens]
        assert found_right(toys, engine, whole) == own_hit(len(whole), len(whole) - 1)


def test_a_step_copies_no_more_than_two_steps_compute(toys: Toys) -> None:
    """A node was emptied: what the engine still has is stored again, without stalling it."""
    engine = toys.start(ToyOptions(block_count=256, step_tokens=64))
    prompt = tokens(3_000)
    assert_right(engine.generate(prompt), 1)
    toys.rest(engine)
    toys.node.clear()
    copied: list[int] = []
    (side,) = workers_of(engine)
    store_all = side._store_all

    def counted(jobs: Sequence[StoreJob]) -> None:
        copied.append(sum(len(job.block_ids) for job in jobs))
        store_all(jobs)

    side._store_all = counted
    request_id = engine.add([*prompt, *tokens(20)], 60)
    engine.run()
    assert_right(engine.results[request_id], 60)
    assert max(copied) * BLOCK <= 2 * 64
    assert found_right(toys, engine, prompt) == own_hit(3_000, 3_000)
