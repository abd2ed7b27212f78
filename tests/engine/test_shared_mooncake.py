"""Two engines that share a Mooncake Store: what others share by other places, and its own loss.

A store holds all in memory, so one that was away is empty when it is back: what was there is
computed again, and is a hit from then on.
"""

import os
import statistics
from collections.abc import Iterator

import pytest

from kvtide.testing import mooncake_servers
from kvtide.testing.mooncake_servers import Store
from kvtide.testing.serving import ServedEngine
from kvtide.units import GiB
from tests.engine import test_shared as shared
from tests.engine.answers import ask, assert_same, is_same
from tests.engine.nodes import Node, Status, wait_until
from tests.engine.shared_places import SharedPlace
from tests.engine.test_shared import ASKED_AWAY, BLOCK, BLOCKS, T_HEAL_S, WAIT_MS_MAX, prompt_of
from tests.tiers.mooncake_place import needs_client

pytestmark = [pytest.mark.places, needs_client]


class StorePlace:
    """A store, killed and started again on its ports; it holds nothing then."""

    look_s = 0.0

    def __init__(self, store: Store) -> None:
        self.entry: dict[str, object] = {
            "type": "mooncake",
            "url": str(store.address),
            "metrics_port": store.metrics_port,
        }
        self._store = store

    def is_seen(self, here: Status, there: Status) -> bool:
        return True  # it is asked each time

    def take_away(self) -> None:
        self._store.kill()

    def give_back(self) -> None:
        self._store.start()
        self._store.add_owner(GiB)

    def lose(self) -> None:
        self.take_away()
        self.give_back()


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SharedPlace]:
    with mooncake_servers.running(tmp_path_factory.mktemp("store"), GiB) as store:
        yield StorePlace(store)


nodes, engines = shared.nodes, shared.engines
test_what_one_engine_computed = shared.test_what_one_engine_computed_is_a_hit_on_the_other
test_hits_outlive_the_node = shared.test_hits_outlive_the_node_that_stored_them
test_only_the_same_salt_hits = shared.test_only_the_same_salt_hits_on_the_other


def test_a_store_that_goes_costs_no_answer_and_hits_resume_when_it_is_back(
    engines: tuple[ServedEngine, ServedEngine], nodes: tuple[Node, Node], place: SharedPlace
) -> None:
    """It goes while a request asks for it. Engines and nodes live on."""
    here, there = engines
    under_way, missed = (prompt_of(name, BLOCKS * BLOCK + 3) for name in ("under way", "missed"))
    cold = ask(here, missed)
    ask(here, under_way)
    shared.wait_sent(nodes[0])
    lives = [node.pid for node in nodes], [engine.processes() for engine in engines]
    uncached = [ask(there, prompt_of(f"here {n}", 200), 2).ttft_ms for n in range(5)]
    nodes[1].wait_at_rest()
    with there.stream(under_way, 8, logprobs=True, ignore_eos=True) as stream:
        place.take_away()
        shared.assert_right(here, under_way, stream.finish())
    away = [ask(there, prompt_of(f"away {n}", 200), 2).ttft_ms for n in range(ASKED_AWAY)]
    assert statistics.median(away) <= statistics.median(uncached) + WAIT_MS_MAX
    nodes[1].wait("it is seen", lambda status: shared.shared(status)["state"] != "on")
    answer = ask(there, missed)
    assert answer.cached_tokens == 0
    assert is_same(answer, cold)
    place.give_back()
    assert_hits_resume(engines, nodes)
    assert lives == ([node.pid for node in nodes], [engine.processes() for engine in engines])


def test_a_store_that_was_started_again_is_filled_anew(
    engines: tuple[ServedEngine, ServedEngine], nodes: tuple[Node, Node], place: SharedPlace
) -> None:
    """What it held is computed by whoever asks for it."""
    tokens = prompt_of("lost", BLOCKS * BLOCK + 3)
    cold = ask(engines[0], tokens)
    shared.wait_sent(nodes[0])
    place.lose()
    answer = ask(engines[1], tokens)
    assert answer.cached_tokens == 0
    assert is_same(answer, cold)
    assert_hits_resume(engines, nodes)


def assert_hits_resume(
    engines: tuple[ServedEngine, ServedEngine], nodes: tuple[Node, Node]
) -> None:
    """What one computes is a hit on the other, both ways, by what it has itself."""
    for first in (0, 1):
        other = engines[1 - first]

        def is_shared(first: int = first, other: ServedEngine = other) -> bool:
            anew = prompt_of(os.urandom(8).hex(), BLOCK + 3)
            ask(engines[first], anew)
            own = ask(engines[first], anew)
            shared.wait_sent(nodes[first])
            ours = ask(other, anew)
            if ours.cached_tokens:
                assert_same(ours, own)
            return ours.cached_tokens == BLOCK

        wait_until("hits resume", is_shared, T_HEAL_S)
