"""An error of ours, wherever it happens, turns caching off in that process and nothing else.

The engine goes on; loads that were planned already are still reported exactly once.
"""

import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from kvtide.bounds import T_STOP_CONNECTOR_S
from kvtide.core import messages as m
from kvtide.core.reasons import Off, OffReason
from kvtide.engines.vllm import lookups as lookups_side
from kvtide.engines.vllm.metadata import LoadJob, StepPlan
from kvtide.engines.vllm.worker import PREFILL_TOKENS_MIN
from kvtide.testing.vllm_toy import ToyEngine, ToyOptions
from tests.engines.vllm.connector.toys import (
    Toys,
    assert_right,
    held_loads,
    scheduler_of,
    stored,
    tokens,
    until,
    watch,
    workers_of,
)

pytestmark = [pytest.mark.filterwarnings("ignore")]

OPTIONS = ToyOptions(chunk_tokens=32, step_tokens=40)
SCHEDULER_CALLS = (
    "on_new_request",
    "matched_tokens",
    "allocated",
    "build_plan",
    "loads_ended",
    "request_finished",
    "worker_counts",
    "take_stats",
)
WORKER_CALLS = ("handle_preemptions", "wait_for_save")


@pytest.fixture
def alone(toys: Toys) -> Toys:
    """The engine that is broken on purpose is not asked whether it is well.

    But it has given everything back, though its process lives.
    """

    def check() -> None:
        until("the node is at rest", toys.node.is_at_rest)
        toys.node.check()

    toys.check = check  # type: ignore[method-assign]
    return toys


class Breaks:
    """Lets one call of a method fail, the so manieth."""

    def __init__(self, target: Any, name: str, at: int) -> None:
        self.has_broken = False
        self._call = getattr(target, name)
        self._left = at
        setattr(target, name, self)

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        self._left -= 1
        if self._left == -1:
            self.has_broken = True
            raise RuntimeError("broken on purpose")
        return self._call(*arguments, **keywords)


def play(engine: ToyEngine, held: list[int]) -> None:
    """One request is loaded, one computed, one is preempted; all must be right."""
    ids = [engine.add([*held, *tokens(30)], 12), engine.add(tokens(60), 12)]
    for _ in range(6):
        engine.step()
    engine.preempt()
    ids.append(engine.add([*held, *tokens(7)], 12))
    engine.run()
    for request_id in ids:
        assert_right(engine.results[request_id], 12)
    assert not engine.scheduler.has_requests()


@pytest.mark.parametrize("at", range(4))
@pytest.mark.parametrize("name", SCHEDULER_CALLS)
def test_an_error_in_the_scheduler_role(alone: Toys, name: str, at: int) -> None:
    """Off, and said once; everything is computed from then on."""
    engine = alone.start(OPTIONS)
    held = stored(alone, engine, 70)
    broken = Breaks(scheduler_of(engine), name, at)
    play(engine, held)
    assert broken.has_broken == engine.connector._is_off
    assert broken.has_broken or at > 0, "it was to fail"
    if broken.has_broken:
        assert not engine.connector.has_pending_push_work()
        engine.reset()
        result = engine.generate(held)
        assert_right(result, 1)
        assert result.external == 0


@pytest.mark.parametrize("at", range(4))
@pytest.mark.parametrize("name", WORKER_CALLS)
def test_an_error_in_the_worker_role(
    alone: Toys, name: str, at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same; whatever loads is still planned fails, and is reported."""
    # The node promises what the worker seems to be still mapping; so long need nobody wait here.
    monkeypatch.setattr(lookups_side, "PENDING_MS_MAX", 100)
    engine = alone.start(OPTIONS)
    held = stored(alone, engine, 70)
    (side,) = workers_of(engine)
    broken = Breaks(side, name, at)
    play(engine, held)
    assert broken.has_broken
    assert engine.workers[0].connector._is_off


@pytest.mark.parametrize("kind", [m.LoadBegin, m.LoadEnd, m.StoreOffer, m.Lookup, m.RegisterRoot])
def test_an_error_while_a_message_is_sent(alone: Toys, kind: type) -> None:
    """In the middle of a hook: a load that was half planned fails, once."""
    engine = alone.start(OPTIONS)
    held = stored(alone, engine, 70)
    link = scheduler_of(engine)._link._link
    send, broken = link.send, []

    def fail(message: Any) -> bool:
        if isinstance(message, kind):
            broken.append(message)
            raise RuntimeError("broken on purpose")  # noqa: TRY004 - not about types
        return bool(send(message))

    link.send = fail
    if kind is m.RegisterRoot:
        scheduler_of(engine)._roots.clear()
    play(engine, held)
    assert len(broken) == 1
    assert engine.connector._is_off


def test_it_is_said_once(alone: Toys, caplog: pytest.LogCaptureFixture) -> None:
    """One line with the trace, however many hooks follow."""
    engine = alone.start(OPTIONS)
    Breaks(scheduler_of(engine), "build_plan", 0)
    assert_right(engine.generate(tokens(100), 10), 10)
    assert sum("kvtide off" in record.getMessage() for record in caplog.records) == 1


@pytest.mark.parametrize("role", ["scheduler", "worker"])
def test_loads_that_run_when_caching_turns_off_are_reported(alone: Toys, role: str) -> None:
    """A worker that turns off reports what waits behind its movers as failed."""
    engine = alone.start(OPTIONS)
    prompts = [stored(alone, engine, 100) for _ in range(5)]
    (side,) = workers_of(engine)
    with held_loads(engine):
        ids = [engine.add(prompt) for prompt in prompts]
        while len(scheduler_of(engine)._loads) < len(ids):
            engine.step()
        if role == "worker":
            Breaks(side, "wait_for_save", 0)
        else:
            Breaks(scheduler_of(engine), "build_plan", 0)
        engine.step()
    engine.run()
    for request_id in ids:
        assert_right(engine.results[request_id], 1)


def test_an_error_in_an_idle_engine_is_told_to_its_workers(alone: Toys) -> None:
    """They hold grants and memory, and hear of it only with a step, which is asked for."""
    engine = alone.start(OPTIONS)
    Breaks(scheduler_of(engine), "reset_cache", 0)
    assert not engine.scheduler.has_requests()
    assert engine.connector.reset_cache()
    assert engine.connector._is_off
    engine.run()
    assert engine.workers[0].connector._is_off
    until("the node knows nothing of it", lambda: not alone.node.status()["engines"])


def test_a_reset_holds_for_loads_that_run_though_caching_is_off(alone: Toys) -> None:
    """Their blocks were of the weights before."""
    engine = alone.start(OPTIONS)
    prompt = stored(alone, engine, 100)
    with held_loads(engine):
        request_id = engine.add(prompt, 3)
        while not scheduler_of(engine)._loads:
            engine.step()
        Breaks(scheduler_of(engine), "on_new_request", 0)
        other = engine.add(tokens(40))
        assert engine.connector._is_off
        assert not engine.reset(external=True)  # vLLM refuses while a load runs, but told us
    engine.load_weights(1)
    engine.run()
    assert_right(engine.results[request_id], 3, weights=1)
    assert_right(engine.results[other], 1, weights=1)


def test_an_error_while_a_load_is_handed_over_is_that_loads(toys: Toys) -> None:
    """vLLM waits for its report, so it must have one."""
    engine = toys.start(OPTIONS)
    held = stored(toys, engine, 100)
    (side,) = workers_of(engine)
    broken = Breaks(side, "_cut", 0)
    result = engine.generate(held)
    assert_right(result, 1)
    assert broken.has_broken
    assert not result.external


class NoGroups:
    """The blocks of a model without KV cache groups, as vLLM hands them over."""

    def get_block_ids(self) -> tuple[list[int], ...]:
        return ()


def test_a_model_without_kv_cache_groups_is_served(toys: Toys) -> None:
    """Encoders have none: caching is off there, and the hooks are called all the same."""
    engine = toys.start(OPTIONS)
    allocate(engine)
    assert not engine.connector._is_off


def allocate(engine: ToyEngine) -> None:
    engine.connector.update_state_after_alloc(SimpleNamespace(request_id="a"), NoGroups(), 0)


def bind(engine: ToyEngine) -> None:
    engine.connector.bind_kv_cache_manager(engine.scheduler.kv_cache_manager)


@pytest.mark.parametrize(("name", "call"), [("bind", bind), ("allocated", allocate)])
def test_a_hook_whose_side_fails_ends_no_engine(
    alone: Toys, name: str, call: Callable[[ToyEngine], None]
) -> None:
    engine = alone.start(OPTIONS)
    Breaks(scheduler_of(engine), name, 0)
    call(engine)
    assert engine.connector._is_off
    assert_right(engine.generate(tokens(40)), 1)


def test_counts_of_a_worker_that_cannot_be_taken_end_no_engine(alone: Toys) -> None:
    engine = alone.start(OPTIONS)
    (side,) = workers_of(engine)
    side.counters = SimpleNamespace()
    assert engine.workers[0].connector.build_connector_worker_meta() is None


@pytest.mark.parametrize("part", ["adapters", "weights", "counts", "regions", "link of a worker"])
def test_shutdown_ends_every_part_whatever_becomes_of_the_others(alone: Toys, part: str) -> None:
    """What does not end says no good-bye, and what it was lent stays lent."""
    engine = alone.start(OPTIONS)
    side, (worker,) = scheduler_of(engine), workers_of(engine)
    match part:
        case "adapters":
            broken = Breaks(side._adapters, "close", 0)
        case "weights":
            broken = Breaks(side._link._identity.weights[0], "close", 0)
        case "counts":
            broken = Breaks(side._link, "_send_counts", 0)
        case "regions":
            broken = Breaks(worker._regions, "close", 0)
        case _:
            broken = Breaks(worker._link, "close", 0)
    engine.close()
    assert broken.has_broken
    until("it is asked once more", lambda: _closed(worker))
    until("the node knows nothing of it", lambda: not alone.node.status()["engines"])
    alone.engines.remove(engine)


def _closed(worker: Any) -> bool:
    """End what was broken on purpose."""
    worker._link.close(1.0)
    worker._regions.close(1.0)
    return not worker._link._thread.is_alive()


def test_a_load_given_to_a_worker_that_has_ended_fails(alone: Toys) -> None:
    """Each job is reported, once, also after `shutdown`."""
    engine = alone.start(OPTIONS)
    (side,) = workers_of(engine)
    side.close(1.0)
    side.start_loads(StepPlan(loads=[LoadJob("a", [3, 4], []), LoadJob("b", [5], [])]))
    ended: list[str] = []

    def have_ended() -> bool:
        ended.extend(side.take_ended())
        return len(ended) == 2

    until("both have ended", have_ended)
    assert sorted(ended) == ["a", "b"]
    assert side.take_load_errors() == {3, 4, 5}
    assert not side.take_ended()


def test_shutdown_at_any_moment(alone: Toys) -> None:
    """Both roles end in bounded time, with loads running and copies to be planned."""
    took_s: list[float] = []

    def timed(_: str, shutdown: Callable[[], Any]) -> Any:
        began_s = time.monotonic()
        shutdown()
        took_s.append(time.monotonic() - began_s)

    for moment in range(8):
        engine = alone.start(OPTIONS)
        for role in (engine.connector, *(worker.connector for worker in engine.workers)):
            watch(role, ["shutdown"], timed)
        held = stored(alone, engine, 100)
        engine.add([*held, *tokens(20)], 9)
        for _ in range(moment):
            engine.step()
        with held_loads(engine):
            engine.close()
        engine.run()
        alone.engines.remove(engine)
    assert len(took_s) == 16
    assert max(took_s) < T_STOP_CONNECTOR_S + 0.4, "vLLM kills after 4 to 5 s"


def test_a_reason_that_only_a_later_node_knows_is_said_as_it_came(alone: Toys) -> None:
    """It raised on the link's thread, which then came back every few seconds to hear it again."""
    engine = alone.start(OPTIONS)
    link = scheduler_of(engine)._link
    for hear in (
        lambda: link.on_message(m.Serving("moon_phase", "waning"), []),
        lambda: link.on_refused(m.Refused("moon_phase", "waning")),
    ):
        link.off = None
        hear()
        assert link.off.reason is OffReason.WIRE_VERSION
        assert "moon_phase: waning" in link.off.detail


@pytest.mark.usefixtures("patient")
def test_weights_that_are_not_what_they_seemed_void_loads(alone: Toys) -> None:
    """A blob did not hold what its name says; what others stored under that name stays."""
    engine = alone.start(OPTIONS)
    prompt = stored(alone, engine, 100)
    link = scheduler_of(engine)._link
    engine.load_weights(1)
    with held_loads(engine):
        request_id = engine.add(prompt, 3)
        while not scheduler_of(engine)._loads:
            engine.step()
        link._identity.weights[0]._state = Off(OffReason.WEIGHTS_CHANGE, "a blob lies")
        until("it is off", lambda: link.session is None)
        engine.step()
    engine.run()
    assert_right(engine.results[request_id], 3, weights=1)
    until("it is said", lambda: "weights_change" in str(alone.node.status()["engines"]))
    assert not engine.connector._is_off
    other = alone.start(OPTIONS)
    assert other.generate(prompt).external


def test_each_reason_for_being_off_is_said(alone: Toys) -> None:
    """Weights that are being read end as something else, which the node must hear too."""
    engine = alone.start(OPTIONS)
    link = scheduler_of(engine)._link
    weights = link._identity.weights[0]
    for reason in (OffReason.WEIGHTS_HASHING, OffReason.WEIGHTS_CHANGE):
        weights._state = Off(reason, "")
        until(
            f"the node shows {reason}",
            lambda reason=reason: str(reason) in str(alone.node.status()["engines"]),
        )


def test_what_a_forward_takes_is_told_to_the_node(alone: Toys) -> None:
    """It weighs loads against computing by that; small steps say nothing of it."""
    engine = alone.start(OPTIONS)
    (side,) = workers_of(engine)
    side.close(1.0)  # nobody takes its counts any more
    side.counters.take()
    for count in (PREFILL_TOKENS_MIN - 1, PREFILL_TOKENS_MIN, 1_000):
        side.handle_preemptions(StepPlan(token_count=count))
        side._forward_began_s -= 0.01
        side.start_loads(StepPlan(token_count=count))
    counts = side.counters.take()
    assert counts["prefill_tokens"] == PREFILL_TOKENS_MIN + 1_000
    assert counts["prefill_us"] >= 20_000
