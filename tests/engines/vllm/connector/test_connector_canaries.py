"""Canaries: the end of a long hit is computed and compared; what differs ends the caching."""

import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvtide.core import messages as m
from kvtide.core.chain import Chain
from kvtide.core.reasons import OffReason
from kvtide.engines.vllm.canaries import Canaries
from kvtide.engines.vllm.metadata import StepPlan
from kvtide.engines.vllm.tracker import Load, Tracker
from kvtide.metrics import Counters
from kvtide.testing.vllm_toy import ToyEngine, ToyOptions
from tests.engines.vllm.connector.toys import (
    Toys,
    assert_right,
    held_loads,
    own_hit,
    scheduler_of,
    session,
    stored,
    tokens,
    until,
    workers_of,
)

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("patient")]

CHUNK = 64
LENGTH = 5 * CHUNK + 7
HIT = own_hit(LENGTH, LENGTH)
OPTIONS = ToyOptions(chunk_tokens=CHUNK, step_tokens=CHUNK, settings={"kvtide.canary_rate": 1.0})


@pytest.fixture
def verdicts(toys: Toys) -> Iterator[Callable[[str], int]]:
    """How many verdicts of one kind came since the test began; what a test leaves quarantined is
    cleared behind it."""

    def count(verdict: str) -> int:
        return toys.node.count(f"canaries.{verdict}")

    before = {verdict: count(verdict) for verdict in ("equal", "differs", "no_verdict")}
    yield lambda verdict: count(verdict) - before[verdict]
    if toys.node.status()["quarantined"]:
        toys.node.clear()


def counted(engine: ToyEngine) -> Counter[str]:
    """What the engine counts from now on."""
    link, seen = scheduler_of(engine)._link, Counter[str]()
    count = link.count

    def count_here(increments: Mapping[str, int]) -> None:
        seen.update(increments)
        count(increments)

    link.count = count_here
    return seen


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"is_async": True},
        {"workers": 2},
        {"workers": 2, "replicas": 2},
        {"step_tokens": 48},
        {"draft_tokens": 2},
    ],
)
def test_the_last_chunk_of_a_long_hit_is_computed_and_found_equal(
    toys: Toys, verdicts: Callable[[str], int], changes: dict[str, Any]
) -> None:
    """In each worker, once; the answer is right, and what was loaded counts as a hit."""
    options = ToyOptions(
        **{"chunk_tokens": CHUNK, "step_tokens": CHUNK, "settings": OPTIONS.settings, **changes}
    )
    engine = toys.start(options)
    shards = options.workers // options.replicas
    prompt = stored(toys, engine, LENGTH, shards=shards)
    counts = counted(engine)
    result = engine.generate(prompt, 3)
    assert_right(result, 3, shards=shards)
    assert result.external == HIT - CHUNK
    assert counts["miss.canary"] == 1
    until("all workers have said it", lambda: verdicts("equal") == options.workers)
    assert not verdicts("differs")
    assert not verdicts("no_verdict")


def test_short_hits_and_rates_of_nothing_are_left_alone(
    toys: Toys, verdicts: Callable[[str], int]
) -> None:
    engine = toys.start(OPTIONS)
    short = stored(toys, engine, 2 * CHUNK + 40)
    assert engine.generate(short).external == own_hit(len(short), len(short))
    never = toys.start(ToyOptions(chunk_tokens=CHUNK, settings={"kvtide.canary_rate": 0}))
    prompt = stored(toys, never, LENGTH)
    assert never.generate(prompt).external == HIT
    assert not verdicts("equal")


def test_what_the_engine_has_itself_does_not_make_a_hit_long(toys: Toys) -> None:
    """Two chunks are loaded behind three that are its own."""
    engine = toys.start(OPTIONS)
    prompt = stored(toys, engine, LENGTH)
    assert engine.generate(prompt[: 3 * CHUNK + 1]).external
    assert engine.generate(prompt).hit == HIT


# ---- layout corruption


def swaps_halves(engine: ToyEngine) -> None:
    """The injected fault: each cell that is stored from now on has its halves swapped."""
    for worker in workers_of(engine):
        mover = worker._mover
        store, half = mover.store, mover.payload_bytes // 2

        def swap(
            block_ids: Sequence[int],
            cells: Sequence[Any],
            store: Callable[..., None] = store,
            size: int = mover.cell_bytes,
            half: int = half,
        ) -> None:
            store(block_ids, cells)
            for place in cells:
                cell = place.region[place.cell * size :][: 2 * half]
                cell[:] = bytes(cell[half:]) + bytes(cell[:half])

        mover.store = swap


def alarmed(toys: Toys, engine: ToyEngine) -> bool:
    """Whether the engine is off because of a canary."""
    off = scheduler_of(engine)._link.off
    return (
        off is not None
        and off.reason is OffReason.CANARY
        and bool(toys.node.status()["quarantined"])
    )


@pytest.mark.parametrize("workers", [1, 2])
def test_a_corrupted_layout_is_found_within_one_hit(
    toys: Toys, verdicts: Callable[[str], int], workers: int
) -> None:
    """From then on nobody is served, so answers are right; after a clear everything is as before.

    The clear is what says that the fault has been mended.
    """
    options = ToyOptions(
        chunk_tokens=CHUNK, step_tokens=CHUNK, workers=workers, settings=OPTIONS.settings
    )
    engine, twin = toys.start(options), toys.start(options)
    good = {worker: worker._mover.store for worker in workers_of(engine)}
    swaps_halves(engine)
    prompt = stored(toys, engine, LENGTH, shards=workers)
    engine.generate(prompt)
    until("the alarm is raised", lambda: alarmed(toys, engine) and alarmed(toys, twin))
    assert verdicts("differs") >= 1
    for one in (engine, twin):
        result = one.generate(prompt)
        assert result.hit == 0, "its own cache has forgotten what was loaded, too"
        assert_right(result, 1, shards=workers)
    for worker, store in good.items():
        worker._mover.store = store
    toys.node.clear()
    for one in (engine, twin):
        until("it is served again", lambda one=one: session(one) is not None)  # type: ignore[misc]
    found = verdicts("differs")
    again = stored(toys, engine, LENGTH, shards=workers)
    result = engine.generate(again)
    assert_right(result, 1, shards=workers)
    assert result.external == HIT - CHUNK
    until("it is found equal", lambda: verdicts("equal") >= workers)
    assert verdicts("differs") == found


def test_requests_that_run_when_the_alarm_is_raised_leave_nothing_behind(toys: Toys) -> None:
    """Loads under way are reported as failed, and what such requests computed is not reused."""
    engine, twin = toys.start(OPTIONS), toys.start(OPTIONS)
    swaps_halves(engine)
    prompt = stored(toys, engine, LENGTH)
    with held_loads(twin):
        request_id = twin.add(prompt)
        while not scheduler_of(twin)._loads:
            twin.step()
        engine.generate(prompt)
        until("the alarm is raised", lambda: alarmed(toys, twin))
    twin.run()
    assert_right(twin.results[request_id], 1)
    toys.node.clear()


def test_a_load_that_ends_as_the_alarm_is_raised_is_not_used(toys: Toys) -> None:
    """The alarm comes between a step's work and its output."""
    engine = toys.start(OPTIONS)
    swaps_halves(engine)
    prompt = stored(toys, engine, LENGTH)
    (worker,) = workers_of(engine)
    side = scheduler_of(engine)

    def alarm() -> None:
        if side._loads and not worker._loads and not alarmed(toys, engine):
            worker._link.send(m.Compared(side._fingerprint, "differs", 1.0))
            until("the alarm is raised", lambda: alarmed(toys, engine))

    engine.before_output = alarm
    assert_right(engine.generate(prompt), 1)
    assert alarmed(toys, engine)
    toys.node.clear()


# ---- whatever happens to the request


def computing(engine: ToyEngine, prompt: list[int]) -> str:
    """A request whose load has ended, and whose canary is not computed yet."""
    request_id = engine.add(prompt, 2)
    until(
        "the load has ended",
        lambda: engine.step() and any(c.load_end for c in canaries_of(engine).values()),
    )
    return request_id


def canaries_of(engine: ToyEngine) -> dict[str, Any]:
    kept: dict[str, Any] = scheduler_of(engine)._canaries._canaries
    return kept


def test_its_cells_are_kept_until_they_have_been_compared(toys: Toys) -> None:
    engine = toys.start(ToyOptions(chunk_tokens=CHUNK, step_tokens=32, settings=OPTIONS.settings))
    prompt = stored(toys, engine, LENGTH)
    computing(engine, prompt)
    assert toys.node.status()["host"]["loads"] == 1
    toys.rest()


@pytest.mark.parametrize("end", ["abort", "preempt", "reset", "alarm"])
def test_a_canary_ends_with_its_request(
    toys: Toys, verdicts: Callable[[str], int], end: str
) -> None:
    """Without a verdict, and without anything held."""
    options = ToyOptions(chunk_tokens=CHUNK, step_tokens=32, settings=OPTIONS.settings)
    engine = toys.start(options)
    prompt = stored(toys, engine, LENGTH)
    request_id = computing(engine, prompt)
    if end == "abort":
        engine.abort(request_id)
    elif end == "preempt":
        engine.preempt()
    elif end == "reset":
        engine.drain()
        scheduler_of(engine).reset_cache()
    else:
        worker = workers_of(engine)[0]
        fingerprint = scheduler_of(engine)._fingerprint
        worker._link.send(m.Compared(fingerprint, "differs", 1.0))
        until("the alarm is raised", lambda: alarmed(toys, engine))
    toys.rest()
    if end != "abort":
        assert_right(engine.results[request_id], 2)
    assert verdicts("differs") == (end == "alarm")


def test_a_load_that_fails_has_no_canary(toys: Toys, verdicts: Callable[[str], int]) -> None:
    engine = toys.start(OPTIONS)
    prompt = stored(toys, engine, LENGTH)
    (worker,) = workers_of(engine)

    def fail(*_: object) -> None:
        raise OSError("a fault")

    counts = counted(engine)
    load, worker._mover.load = worker._mover.load, fail
    assert_right(engine.generate(prompt), 1)
    worker._mover.load = load
    toys.rest()
    assert not verdicts("equal")
    assert not counts["miss.canary"]


def test_cells_that_were_taken_meanwhile_give_no_verdict(
    toys: Toys, verdicts: Callable[[str], int]
) -> None:
    """What is compared may be another's by then, whatever it looks like."""
    engine = toys.start(OPTIONS)
    prompt = stored(toys, engine, LENGTH)
    (worker,) = workers_of(engine)
    compare = worker._mover.compare

    def compare_late(*arguments: Any) -> float:
        (canary,) = canaries_of(engine).values()
        assert canary.load_end is not None
        scheduler_of(engine)._link.send(canary.load_end)
        until("nothing protects it", lambda: not toys.node.status()["host"]["loads"])
        toys.node.clear()
        other = toys.start(ToyOptions(chunk_tokens=CHUNK, settings={"kvtide.canary_rate": 0}))
        draw = random.Random(1)
        run = canary.runs[-1]
        with worker._regions.using({run.region}) as regions:
            generations = regions[run.region].generations
            while generations[run.first_cell] == run.generation:
                other.generate(tokens(1500 + draw.randrange(99)))
                toys.rest(other)
            del generations, regions
        return compare(*arguments)

    worker._mover.compare = compare_late
    assert_right(engine.generate(prompt), 1)
    until("it is told", lambda: verdicts("no_verdict") == 1)
    assert not verdicts("equal")
    assert not verdicts("differs")


def test_a_comparison_that_fails_costs_its_verdict(
    toys: Toys, verdicts: Callable[[str], int]
) -> None:
    engine = toys.start(OPTIONS)
    prompt = stored(toys, engine, LENGTH)
    (worker,) = workers_of(engine)

    def fail(*_: object) -> float:
        raise OSError("a fault")

    worker._mover.compare = fail
    assert_right(engine.generate(prompt), 1)
    until("it is told", lambda: verdicts("no_verdict") == 1)


# ---- which are drawn


class Drawn:
    """The scheduler's part alone: canaries that are drawn from a match of five chunks."""

    def __init__(self, rate: float, **changes: Any) -> None:
        self.ended: list[m.LoadEnd] = []
        link: Any = SimpleNamespace(
            session=SimpleNamespace(fingerprint=bytes(32)),
            are_weights_verified=True,
            alarms=0,
            end_load=lambda load_end: self.ended.append(load_end),
        )
        identity: Any = SimpleNamespace(chunk_tokens=64, block_tokens=16, drops_last_block=False)
        for name, value in changes.items():
            setattr(link if hasattr(link, name) else identity, name, value)
        self.canaries = Canaries(identity, rate, link, Counters())
        self.chain = Chain(bytes(32), 16, 64)
        self.chain.extend(range(321))
        runs = [m.Run(1, 4 * chunk, 4, 9) for chunk in range(5)]
        self.match = m.Match(1, 5, 0, runs, 7)

    def is_cut(self, request_id: str, adapter: object = None) -> bool:
        request = SimpleNamespace(
            request_id=request_id, num_tokens=321, lora_request=adapter, num_preemptions=0
        )
        self.request = request
        tracker = Tracker(request, 0.0, chain=self.chain)
        match = self.canaries.cut(tracker, self.match)
        assert (match.chunks, match.blocks) in ((5, 0), (4, 0))
        assert self.canaries.cut(tracker, self.match) == match, "asked again it says the same"
        return match.chunks == 4


def test_so_many_are_drawn_as_were_asked_for_and_always_the_same() -> None:
    """A prefix that all requests share is drawn as often as one that nobody shares."""
    ids = [f"request {number}" for number in range(2_000)]
    one, other = Drawn(0.05), Drawn(0.05)
    drawn = [request_id for request_id in ids if one.is_cut(request_id)]
    assert 60 < len(drawn) < 140
    assert drawn == [request_id for request_id in ids if other.is_cut(request_id)]
    assert not any(Drawn(0.0).is_cut(request_id) for request_id in ids[:100])
    assert all(Drawn(1.0).is_cut(request_id) for request_id in ids[:100])


def test_what_may_differ_for_another_reason_is_not_drawn() -> None:
    """Adapters may have been replaced, weights be others, and a draft model looks ahead."""
    assert not Drawn(1.0).is_cut("one", adapter=SimpleNamespace())
    assert not Drawn(1.0, are_weights_verified=False).is_cut("one")
    assert not Drawn(1.0, drops_last_block=True).is_cut("one")
    assert not Drawn(1.0, session=None).is_cut("one")


def test_a_load_of_another_length_has_no_canary() -> None:
    """Whatever the engine has allocated for: only the end of what was loaded is compared."""
    scene = Drawn(1.0)
    assert scene.is_cut("one")
    scene.canaries.load_ended("one", Load(7, list(range(12)), scene.chain, 0), 12)
    assert not scene.canaries._canaries
    assert scene.is_cut("two")
    scene.canaries.load_ended("two", Load(7, list(range(16)), scene.chain, 0), 16)
    assert scene.canaries._canaries


def test_a_request_that_was_preempted_has_no_canary_whatever_it_computes_then() -> None:
    """Its next blocks need not be asked for: its engine may have all of them."""
    scene = Drawn(1.0)
    assert scene.is_cut("one")
    scene.canaries.load_ended("one", Load(7, list(range(16)), scene.chain, 0), 16)
    scene.canaries.plan(StepPlan(), lambda request_id: [])
    assert not scene.ended
    scene.request.num_preemptions = 1
    scene.canaries.plan(StepPlan(), lambda request_id: [])
    assert scene.ended == [m.LoadEnd(7, 16)]
    assert not scene.canaries._canaries


def test_pages_of_toys_are_compared_as_those_of_cpu_attention(toys: Toys) -> None:
    """Keys and values apart."""
    (worker,) = workers_of(toys.start(OPTIONS))
    for numbers, page in zip(worker._facts.numbers, worker._facts.pages, strict=True):
        assert numbers.dtype == "bfloat16"
        assert np.prod(page.shape) == numbers.plane_bytes, "half of two bytes for each number"
