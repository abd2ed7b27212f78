"""Answers and loads that take long: bounded by what happens, not by how slow the machine is."""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from kvtide.bounds import T_LOOKUP_S
from kvtide.engines.vllm import lookups as lookups_side
from kvtide.engines.vllm import worker as worker_side
from kvtide.engines.vllm.tracker import Tracker
from kvtide.testing.vllm_toy import ToyEngine, ToyOptions
from tests.engines.vllm.connector.toys import (
    WAIT_S_MAX,
    Toys,
    assert_right,
    has_answer,
    held_loads,
    own_hit,
    scheduler_of,
    stored,
    tokens,
    until,
    workers_of,
)

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("patient")]

LENGTH = 150
TRIES_MAX = 5
OPTIONS = ToyOptions(chunk_tokens=64, step_tokens=64)


def test_steps_longer_than_a_lease_do_not_ask_for_ever(
    toys: Toys, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each answer is too old when it can be used: the second one is used all the same."""
    engine = toys.start(OPTIONS)
    prompt = stored(toys, engine, LENGTH)
    monkeypatch.setattr(lookups_side, "FRESH_MS_MAX", 0)
    monkeypatch.setattr(lookups_side, "STEP_WAIT_S", 0.0)
    scheduler_of(engine)._lookups.next_step()
    result = engine.generate(prompt)
    assert_right(result, 1)
    assert result.external == own_hit(LENGTH, LENGTH)


def test_steps_longer_than_t_answer_see_all_answers(
    toys: Toys, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lookup's as well as the probe's: what counts is that it has come, not when we look."""
    engine = toys.start(OPTIONS)
    prompt = stored(toys, engine, LENGTH)
    scheduler = scheduler_of(engine)
    monkeypatch.setattr(lookups_side, "ANSWER_MS_MAX", 250)
    monkeypatch.setattr(lookups_side, "STEP_WAIT_S", 0.0)
    scheduler._lookups.next_step()
    clock = scheduler._lookups._clock = SimpleNamespace(now_ms=lambda: 0)
    with toys.node.stopped():  # all stood still: in the first look after that nothing has come yet
        request_id = engine.add(
            [*prompt[:100], *tokens(80)]
        )  # parts within a chunk: needs a probe
        clock.now_ms = lambda: 300
        engine.step()
    for now_ms in (600, 900, 1200):
        until(
            "the node has answered",
            lambda: has_answer(engine) or not scheduler._lookups._questions,
        )
        clock.now_ms = lambda now_ms=now_ms: now_ms
        engine.step()
    engine.run()
    assert engine.results[request_id].external == own_hit(100, 100)


def test_a_step_waits_once_for_all_that_ask(toys: Toys, monkeypatch: pytest.MonkeyPatch) -> None:
    """T_lookup is of the step, not of each request: a node that says nothing costs a moment."""
    engine = toys.start(OPTIONS)
    scheduler = scheduler_of(engine)
    now_s, waits = 0.0, []
    take_in = scheduler._lookups._take_in

    def noted(wait_s: float) -> None:
        nonlocal now_s
        now_s += wait_s
        waits.append(wait_s)
        take_in(0.0)

    with toys.node.stopped(), monkeypatch.context() as patch:
        patch.setattr(lookups_side, "time", SimpleNamespace(monotonic=lambda: now_s))
        patch.setattr(scheduler._lookups, "_take_in", noted)
        for _ in range(5):
            engine.add(tokens(LENGTH))
        engine.step()
        assert waits == [T_LOOKUP_S]
        engine.step()
        assert waits == [T_LOOKUP_S] * 2
    engine.run()


def test_a_step_without_a_forward_waits_for_a_running_load(
    toys: Toys, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the engine would spin until it ends; and one with a forward does not wait at all."""
    engine = toys.start(OPTIONS)
    prompt = stored(toys, engine, LENGTH)
    (worker,) = workers_of(engine)
    waits: list[float] = []
    ended = worker._ended

    def get(timeout: float) -> object:
        waits.append(timeout)
        return ended.get(timeout=timeout)

    queue = SimpleNamespace(get=get, get_nowait=ended.get_nowait, put=ended.put)
    monkeypatch.setattr(worker, "_ended", queue)
    with held_loads(engine):
        request_id = engine.add(prompt)
        until("its load is under way", lambda: engine.step() and worker._loads)
        waits.clear()
        engine.step()
        (waited_s,) = waits
        assert 0 < waited_s <= worker_side.IDLE_WAIT_S
        other = engine.add(tokens(20))
        waits.clear()
        while other not in engine.results:
            engine.step()
        assert not waits
    engine.run()
    assert engine.results[request_id].external == own_hit(LENGTH, LENGTH)


@contextlib.contextmanager
def standing_link(engine: ToyEngine) -> Iterator[None]:
    """Inside, the link's thread gets no processor, as beside engines that compute on all."""
    stands, may_go_on = threading.Event(), threading.Event()

    def stand() -> None:
        stands.set()
        assert may_go_on.wait(WAIT_S_MAX)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scheduler_of(engine)._link, "on_pulse", stand)
        assert stands.wait(WAIT_S_MAX)
        try:
            yield
        finally:
            may_go_on.set()


def test_answers_arrive_though_the_links_thread_stands_still(toys: Toys) -> None:
    """To offers, to lookups and to probes: the engine's own thread reads what it needs."""
    engine = toys.start(OPTIONS)
    with standing_link(engine):
        prompt = stored(toys, engine, LENGTH)
        assert engine.generate([*prompt[:100], *tokens(80)]).external == own_hit(100, 100)


def test_loads_that_wait_for_others_are_not_given_up(
    toys: Toys, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A burst takes longer than T_load in all, and something ends all the time."""
    bound_s = 0.3
    engine = toys.start(OPTIONS)
    prompts = [stored(toys, engine, LENGTH) for _ in range(8)]
    monkeypatch.setattr(worker_side, "LOAD_S_MAX", bound_s)
    (worker,) = workers_of(engine)
    worker._mover.load = slowed(worker._mover.load, bound_s / 2)
    began_s = time.monotonic()
    ids = [engine.add(prompt) for prompt in prompts]
    engine.run()
    assert time.monotonic() - began_s > bound_s
    for request_id in ids:
        assert_right(engine.results[request_id], 1)
        assert engine.results[request_id].external == own_hit(LENGTH, LENGTH)


def slowed(load: Callable[..., None], by_s: float) -> Callable[..., None]:
    """A mover of a slow machine."""
    never = threading.Event()

    def slow_load(*arguments: Any) -> None:
        never.wait(by_s)
        load(*arguments)

    return slow_load


def test_a_node_that_is_away_for_a_moment_is_asked_later(toys: Toys) -> None:
    """The request waits for its turn meanwhile: it has not missed anything."""
    engine = toys.start(OPTIONS)
    prompt = stored(toys, engine, LENGTH)
    lookups = scheduler_of(engine)._lookups
    link, lookups._link = lookups._link, SimpleNamespace(is_usable=False)
    request_id = engine.add(prompt)
    lookups._link = link
    engine.run()
    assert engine.results[request_id].external == own_hit(LENGTH, LENGTH)


def test_what_was_never_computed_is_not_stored(toys: Toys) -> None:
    """Blocks of a load that could not be planned hold anything; vLLM counts them as computed.

    The request is aborted before vLLM has heard that this load failed.
    """
    engine = toys.start(OPTIONS)
    prompts = (stored(toys, engine, LENGTH) for _ in range(TRIES_MAX))
    # On a busy machine the answer may come too late: then there is no load, and nothing to fail.
    prompt = next(prompt for prompt in prompts if aborted_unplanned(toys, engine, prompt))
    toys.rest()
    engine.reset()
    result = engine.generate(prompt)
    assert_right(result, 1)
    assert result.external == 0


def aborted_unplanned(toys: Toys, engine: ToyEngine, prompt: list[int]) -> bool:
    """Abort a request whose load cannot be planned; whether it had one."""
    scheduler = scheduler_of(engine)
    allocated = scheduler.allocated
    external: list[int] = []

    def without_its_answer(request: Any, block_ids: list[int], external_tokens: int) -> bool:
        external.append(external_tokens)
        scheduler._lookups.drop(scheduler._trackers[request.request_id])
        toys.node.clear()
        return bool(allocated(request, block_ids, external_tokens))

    scheduler.allocated = without_its_answer
    request_id = engine.add(prompt)
    engine.before_output = lambda: engine.abort(request_id)
    while request_id in engine.scheduler.requests:
        engine.step()
    del scheduler.allocated
    engine.before_output = lambda: None
    return external != [] and external[0] > 0  # none: aborted while it waited for the answer


def test_what_failed_to_load_is_stored_again(toys: Toys) -> None:
    """It was computed instead, and the node has lost it."""
    length = (
        2 * OPTIONS.chunk_tokens + 1
    )  # nothing stands behind what was held, to tell of its loss
    engine = toys.start(OPTIONS)
    prompt = stored(toys, engine, length)
    (worker,) = workers_of(engine)
    copy_in = worker._copy_in

    def lost(load: Any, block_ids: list[int], runs: Any) -> set[int]:
        toys.node.clear()
        return set(block_ids)

    worker._copy_in = lost
    assert engine.generate(prompt).external == 0
    worker._copy_in = copy_in
    toys.rest()
    engine.reset()
    result = engine.generate(prompt)
    assert_right(result, 1)
    assert result.external == own_hit(length, length)


def test_another_connectors_loads_count_once_their_outcome_is_known() -> None:
    """Steps overlap: the output that tells may come two steps later."""
    request = SimpleNamespace(num_in_flight_tokens=0)
    tracker = Tracker(request, 0.0)
    assert tracker.is_verified(10, has_sync_loads=False)
    assert not tracker.is_verified(64, has_sync_loads=True)
    request.num_in_flight_tokens = 64
    assert not tracker.is_verified(1, has_sync_loads=False)
    request.num_in_flight_tokens = 1
    assert tracker.is_verified(1, has_sync_loads=False)
