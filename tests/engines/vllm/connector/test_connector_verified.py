"""Weights that count by the names of their files: nothing is stored until these are verified.

Whatever was stored may be found after the engine's end, when nobody can tell any more that it is
wrong. The engines here have blobs of one name, so they are of one fingerprint.
"""

import hashlib
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvtide.core.reasons import DropReason, OffReason
from kvtide.engines.vllm import assemble
from kvtide.engines.vllm.weights import LocalWeights
from kvtide.testing.vllm_toy import ToyEngine, ToyOptions
from tests.engines.vllm.checkpoints import HeldReads, a_snapshot, an_hour_ahead
from tests.engines.vllm.connector.toys import (
    Toys,
    accounts,
    assert_right,
    own_hit,
    scheduler_of,
    stored,
    tokens,
    until,
)

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("patient")]

OPTIONS = ToyOptions(step_tokens=40)
NAMED = b"what the name says"
LENGTH = 100
BLOCKS = LENGTH // OPTIONS.block_tokens

Start = Callable[[HeldReads, bytes], ToyEngine]


@pytest.fixture
def start(toys: Toys, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Start:
    """Starts an engine whose blob has the one name and this content."""
    monkeypatch.setattr(assemble, "process_began_ns", an_hour_ahead)
    name = hashlib.sha256(NAMED).hexdigest()

    def start(reads: HeldReads, content: bytes) -> ToyEngine:
        hub = tmp_path / f"hub {len(toys.engines)}"
        weights = SimpleNamespace(model=LocalWeights(a_snapshot(hub, content, name)), draft=None)
        monkeypatch.setattr(assemble, "engine_weights", lambda _: weights)
        monkeypatch.setattr(assemble, "FileDigests", lambda _: reads)
        return toys.start(OPTIONS)

    return start


@pytest.fixture
def held(tmp_path: Path, toys: Toys) -> Iterator[HeldReads]:
    """Reads that wait: until they are let go, the names are not verified."""
    reads = HeldReads(tmp_path / "held")
    yield reads
    reads.go.set()


@pytest.fixture
def neighbour(start: Start, tmp_path: Path) -> ToyEngine:
    """An engine whose weights are verified."""
    reads = HeldReads(tmp_path / "cache")
    reads.go.set()
    engine = start(reads, NAMED)
    until_verified(engine)
    return engine


def until_verified(engine: ToyEngine) -> None:
    link = scheduler_of(engine)._link
    until("the names are verified", lambda: link.are_weights_verified)


def test_what_an_engine_computes_whose_weights_are_misnamed_is_found_by_nobody(
    toys: Toys, start: Start, held: HeldReads, neighbour: ToyEngine
) -> None:
    """Neither before the lie is found, as after a kill, nor later; what is right stays."""
    liar = start(held, b"a block of the drive has rotted")
    link, right = scheduler_of(liar)._link, scheduler_of(neighbour)._link
    assert link.session.fingerprint == right.session.fingerprint
    liar.load_weights(1)
    prompt = tokens(LENGTH)
    assert_right(liar.generate(prompt, 40), 40, weights=1)
    toys.rest()
    result = neighbour.generate(prompt)
    assert_right(result, 1)
    assert result.external == 0
    toys.rest()
    held.go.set()
    until("the lie is found", lambda: link.session is None)
    assert link.off.reason is OffReason.WEIGHTS_CHANGE
    assert neighbour.reset()
    result = neighbour.generate(prompt)
    assert_right(result, 1)
    assert result.external == own_hit(LENGTH, LENGTH)


def test_until_its_weights_are_verified_an_engine_loads_and_stores_nothing(
    toys: Toys, start: Start, held: HeldReads, neighbour: ToyEngine
) -> None:
    """Then it also stores what its own cache still has."""
    theirs, prompt = stored(toys, neighbour, LENGTH), tokens(LENGTH)
    engine = start(held, NAMED)
    assert engine.generate(theirs).external == own_hit(LENGTH, LENGTH)
    with accounts() as taken:
        engine.generate(prompt)
        toys.rest(engine)
    assert taken == [{DropReason.WEIGHTS_UNVERIFIED: BLOCKS}]
    held.go.set()
    until_verified(engine)
    assert engine.generate(prompt).external == 0
    toys.rest(engine)
    result = neighbour.generate(prompt)
    assert_right(result, 1)
    assert result.external == own_hit(LENGTH, LENGTH)


def test_a_request_that_runs_when_the_weights_are_verified_is_stored_whole(
    toys: Toys, start: Start, held: HeldReads
) -> None:
    engine = start(held, NAMED)
    prompt = tokens(LENGTH)
    request_id = engine.add(prompt, 40)
    while not engine.results[request_id].tokens:
        engine.step()
    held.go.set()
    until_verified(engine)
    engine.run()
    toys.rest(engine)
    assert engine.reset()
    known = [*prompt, *engine.results[request_id].tokens]
    assert engine.generate(known).external == own_hit(len(known), len(known) - 1)
