"""Preemption, abort and reset at every step of requests that load, compute, store and end."""

import time
from collections.abc import Callable

import pytest

from kvtide.testing.toy_engine import generated
from kvtide.testing.vllm_toy import VOCABULARY, ToyEngine, ToyOptions
from tests.engines.vllm.connector.toys import (
    Toys,
    assert_right,
    held_loads,
    own_hit,
    scheduler_of,
    stored,
    tokens,
    until,
    workers_of,
)

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("patient")]

BLOCK = 16
STEPS_MAX = 200
IDLE_STEPS_MAX = 3
"""In a row, in which requests wait for answers or loads."""
SCENE_S_MAX = 60.0
MODES = {
    "sync": {},
    "async": {"is_async": True},
    "async, late": {"is_async": True, "runs_late": True},
}


*LONG_MODES, QUICK_MODE = MODES
"""Quick tests have the one in which most is under way."""
in_each_mode = pytest.mark.parametrize(
    "mode", [*(pytest.param(mode, marks=pytest.mark.long) for mode in LONG_MODES), QUICK_MODE]
)


class Scene:
    """Three requests: two begin alike with what is stored already, one comes later."""

    def __init__(self, engine: ToyEngine, rest: Callable[[], None], weights: int = 0) -> None:
        self.engine = engine
        self.weights = weights
        self.base = base = tokens(70)
        assert_right(engine.generate(base, 2), 2, weights=weights)
        rest()
        assert engine.reset()
        self.counts = {}
        self.ids: list[str] = []
        self._later = tokens(37)
        self._add([*base, *tokens(45)], 20)
        self._add([*base[:48], *tokens(50)], 9)

    def _add(self, prompt: list[int], count: int) -> None:
        request_id = self.engine.add(prompt, count)
        self.ids.append(request_id)
        self.counts[request_id] = count

    def play(self, moment: int, act: Callable[["Scene"], None]) -> bool:
        """Run to the end, with `act` before one of the steps; whether there was such a step.

        Steps in which nothing comes are more on a busy machine: most of them do not count.
        """
        has_acted, step, idle, before = False, 0, 0, self._state()
        until_s = time.monotonic() + SCENE_S_MAX
        while time.monotonic() < until_s:
            if idle <= IDLE_STEPS_MAX:
                if step == 3:
                    self._add(self._later, 30)
                if step == moment:
                    has_acted = bool(self.engine.scheduler.requests)
                    act(self)
                step += 1
            is_busy = self.engine.step()
            if not is_busy and step > max(3, moment):
                return has_acted
            after = self._state()
            idle, before = idle + 1 if is_busy and after == before else 0, after
        raise AssertionError(f"a scene without end, at step {step}: {before}")

    def _state(self) -> list[object]:
        """What the engine has come to."""
        return [
            (one.request_id, one.status, one.num_computed_tokens, one.num_tokens)
            for one in self.engine.scheduler.requests.values()
        ]

    def check_update(self, name: str, before: int | None, weights: int) -> None:
        """Tokens up to the update are of the old weights, those behind it of the new ones."""
        result, count = self.engine.results[name], self.counts[name]
        old = generated(result.prompt, count, VOCABULARY, weights=self.weights)
        if before is None:
            before = 0 if weights != self.weights else count
        prompt = [*result.prompt, *old[:before]]
        new = generated(prompt, count - before, VOCABULARY, weights=weights)
        assert result.tokens == [*old[:before], *new]

    def check(self, *aborted: str) -> None:
        for request_id in self.ids:
            if request_id not in aborted:
                assert_right(self.engine.results[request_id], self.counts[request_id])


def moments(toys: Toys, options: ToyOptions, act: Callable[[Scene], None], *aborted: int) -> int:
    """Play a scene for each of its steps; how often `act` met something to act upon."""
    engine = toys.start(options)
    for moment in range(STEPS_MAX):
        scene = Scene(engine, toys.rest)
        has_acted = scene.play(moment, act)
        scene.check(*(scene.ids[i] for i in aborted))
        toys.check()
        again(engine, scene, aborted)
        if not has_acted:
            return moment
    raise AssertionError("a scene without end")


def again(engine: ToyEngine, scene: Scene, aborted: tuple[int, ...]) -> None:
    """What finished is found again, to the last block."""
    assert engine.reset()
    for number, request_id in enumerate(scene.ids):
        if number in aborted:
            continue
        old = engine.results[request_id]
        prompt = [*old.prompt, *old.tokens]
        result = engine.generate(prompt)
        assert_right(result, 1)
        assert result.hit == own_hit(len(prompt), len(prompt) - 1), number


@in_each_mode
def test_preempted_at_every_step(toys: Toys, mode: str) -> None:
    """As when blocks run out, but at any step."""
    count = 0

    def preempt(scene: Scene) -> None:
        nonlocal count
        count += scene.engine.preempt() is not None

    options = ToyOptions(step_tokens=40, chunk_tokens=32, **MODES[mode])
    assert moments(toys, options, preempt) > 20
    assert count > 10, "nothing was preempted"


@in_each_mode
@pytest.mark.parametrize("victim", [0, 1])
def test_aborted_at_every_step(toys: Toys, mode: str, victim: int) -> None:
    """While it waits for the answer, loads, computes, generates, and when it has ended."""
    options = ToyOptions(step_tokens=40, chunk_tokens=32, **MODES[mode])
    abort = lambda scene: scene.engine.abort(scene.ids[victim])  # noqa: E731
    assert moments(toys, options, abort, victim) > 15


@in_each_mode
@pytest.mark.parametrize("running", [False, True])
def test_the_engines_cache_reset_at_every_step(toys: Toys, mode: str, running: bool) -> None:
    """What kvtide keeps stays; while a load runs, vLLM itself refuses to reset all requests."""
    refusals = resets = 0

    def reset(scene: Scene) -> None:
        nonlocal refusals, resets
        if running:
            scene.engine.drain()  # steps that run hold blocks, too
        try:
            resets += scene.engine.reset(running=running)
        except RuntimeError:
            refusals += 1

    options = ToyOptions(step_tokens=40, chunk_tokens=32, **MODES[mode])
    assert moments(toys, options, reset) > 20
    assert resets > 0
    assert running or not refusals


@in_each_mode
def test_a_reset_of_all_is_refused_while_a_load_runs(toys: Toys, mode: str) -> None:
    """By vLLM; whoever asked sees it, and the engine goes on."""
    engine = toys.start(ToyOptions(step_tokens=40, chunk_tokens=32, **MODES[mode]))
    prompt = stored(toys, engine, 100)
    with held_loads(engine):
        request_id = engine.add(prompt, 3)
        until("its load is under way", lambda: engine.step() and workers_of(engine)[0]._loads)
        engine.drain()
        with pytest.raises(RuntimeError):
            engine.reset(running=True)
    engine.run()
    assert_right(engine.results[request_id], 3)
    assert engine.results[request_id].external > 0


@in_each_mode
def test_new_weights_at_every_step(toys: Toys, mode: str) -> None:
    """The trainer resets everything and goes on: nothing computed before is ever used again."""
    engine = toys.start(ToyOptions(step_tokens=40, chunk_tokens=32, **MODES[mode]))
    weights = 0
    for moment in range(STEPS_MAX):
        scene = Scene(engine, toys.rest, weights)
        before: dict[str, int] = {}

        def update(scene: Scene, before: dict[str, int] = before) -> None:
            nonlocal weights
            while True:
                engine.drain()
                try:
                    engine.reset(running=True, external=True)
                    break
                except RuntimeError:  # a load runs
                    engine.step()
            before.update({name: len(engine.results[name].tokens) for name in scene.ids})
            weights += 1
            engine.load_weights(weights)

        has_acted = scene.play(moment, update)
        for name in scene.ids:
            scene.check_update(name, before.get(name), weights)
        toys.check()
        assert engine.reset()
        result = engine.generate(scene.base)
        assert_right(result, 1, weights=weights)
        assert result.external == 0, "stored before the update, found after it"
        toys.rest()
        assert engine.reset()
        assert engine.generate(scene.base).external == own_hit(len(scene.base), len(scene.base))
        if not has_acted:
            return
    raise AssertionError("a scene without end")


@in_each_mode
def test_reset_external_in_the_middle_of_a_load(toys: Toys, mode: str) -> None:
    """vLLM cannot reset then, and says so; what is being loaded is not used all the same."""
    engine = toys.start(ToyOptions(step_tokens=40, chunk_tokens=32, **MODES[mode]))
    for weights, has_ended in enumerate([False, True] * 3, 1):
        prompt = tokens(100)
        assert_right(engine.generate(prompt, 2), 2, weights=weights - 1)
        toys.rest()
        assert engine.reset()
        with held_loads(engine):
            request_id = engine.add(prompt, 3)
            while not scheduler_of(engine)._loads:
                engine.step()
            engine.drain()  # the worker knows of it, too
            if not has_ended:
                assert not engine.reset(external=True)
        if has_ended:  # with steps that overlap, the report is on its way
            until("the load has ended", lambda: not workers_of(engine)[0]._ended.empty())
            if engine.options.is_async:
                engine.step()
            assert not engine.reset(external=True)
        assert scheduler_of(engine)._loads
        engine.load_weights(weights)
        engine.run()
        result = engine.results[request_id]
        assert_right(result, 3, weights=weights)
        assert result.hit == 0
        toys.check()
