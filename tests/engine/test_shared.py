"""Two engines, each with a node of its own, and between them one place that both share.

The place is killed, unmounted or emptied under them, too: that costs no answer and, beyond a
moment, no time; hits resume by themselves when it is there again.
"""

import json
import os
import statistics
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtide.testing.completions import Completion
from kvtide.testing.serving import ServedEngine
from tests.engine.answers import ask, assert_same, forget, is_same, own_hit, whole_blocks
from tests.engine.conftest import engine_on, make_node, together
from tests.engine.nodes import Node, Status, wait_until
from tests.engine.prompts import prompt
from tests.engine.shared_places import (
    SharedPlace,
    TierStatus,
    bucket_place,
    directory_place,
    server_place,
)

pytestmark = pytest.mark.places

BLOCK = 128
LENGTHS = (BLOCK + 1, 3 * BLOCK + 5, 2000)
BLOCKS = 5
"""Of a prompt whose place goes."""
T_HEAL_S = 7.0
"""Contract: two heartbeats and 5 s. A directory that is away is tried after 1, 2, 4 … s, so it may
take as long again as it was away."""
WAIT_MS_MAX = 500.0
"""What a place that is away may add to a request: nothing, but on a busy machine."""
BUSY_RATIO = 1.5
"""Whatever is asked takes so much longer or shorter there, from one moment to the next."""
ASKED_AWAY = 8
"""Requests meanwhile; more than it takes to open a breaker."""


@pytest.fixture(scope="module", params=["shared_dir", "redis", "s3"])
def place(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[SharedPlace]:
    """One of each type."""
    if request.param == "shared_dir":
        opened = directory_place()
    else:
        place_on = server_place if request.param == "redis" else bucket_place
        opened = place_on(tmp_path_factory.mktemp("server"))
    with opened as one:
        yield one


@pytest.fixture(scope="module")
def nodes(place: SharedPlace) -> Iterator[tuple[Node, Node]]:
    """Two nodes that share nothing but the place, as on two machines."""
    variables = {"KVTIDE_TIERS": json.dumps([place.entry]), "KVTIDE_LOAD_POLICY": "always"}
    for one in make_node():
        for other in make_node():
            for node in (one, other):
                node.variables |= variables
            yield one, other


@pytest.fixture(scope="module")
def engines(nodes: tuple[Node, Node], logs: Path) -> Iterator[tuple[ServedEngine, ServedEngine]]:
    """An engine for each."""
    here, there = engine_on(nodes[0], logs, "here"), engine_on(nodes[1], logs, "there")
    with together(here, there):
        for node in nodes:
            node.wait_on()
        yield here, there


def shared(status: Status) -> TierStatus:
    """What a status says of the place."""
    (tier,) = status["tiers"].values()
    return dict(tier)


def wait_sent(node: Node) -> Status:
    """Until nothing is on its way to the place any more."""
    node.wait_at_rest()
    return node.wait("all is sent", lambda status: not shared(status)["queued_bytes"])


def wait_seen(place: SharedPlace, node: Node, other: Node) -> None:
    """Until each of the two knows all that both have stored."""
    other.wait("it is seen", lambda there: place.is_seen(shared(node.status()), shared(there)))


def wait_written(place: SharedPlace, node: Node, other: Node) -> None:
    """Until what was computed is in the place, and the other one has seen it."""
    assert shared(wait_sent(node))["records"]
    wait_seen(place, node, other)


@pytest.mark.parametrize(
    ("way", "length"),
    [*(("here to there", length) for length in LENGTHS), ("there to here", LENGTHS[-1])],
)
def test_what_one_engine_computed_is_a_hit_on_the_other(
    engines: tuple[ServedEngine, ServedEngine],
    nodes: tuple[Node, Node],
    place: SharedPlace,
    way: str,
    length: int,
) -> None:
    first = 0 if way == "here to there" else 1
    tokens = prompt_of(f"{way} {length}", length)
    ask(engines[first], tokens)
    own = ask(engines[first], tokens)
    assert own.cached_tokens == whole_blocks(length, BLOCK)
    other = nodes[1 - first]
    wait_written(place, nodes[first], other)
    with other.loading(whole_blocks(length, BLOCK) // BLOCK):
        ours = ask(engines[1 - first], tokens)
    assert_same(ours, own)
    assert other.count(f"tier_loads.{place.entry['type']}.loaded") > 0
    assert not is_same(ours, ask(engines[first], prompt_of("another", length)))


def test_hits_outlive_the_node_that_stored_them(
    engines: tuple[ServedEngine, ServedEngine], nodes: tuple[Node, Node], place: SharedPlace
) -> None:
    """Killed, not ended: the other one reads what it left, and so does the one that follows it."""
    tokens = prompt_of("killed", 5 * BLOCK + 3)
    ask(engines[0], tokens)
    own = ask(engines[0], tokens)
    wait_written(place, *nodes)
    nodes[0].kill()
    with nodes[1].loading(5):
        assert_same(ask(engines[1], tokens), own)
    nodes[0].wait_on()
    wait_seen(place, *nodes)
    forget(engines[0])
    with nodes[0].loading(5):
        assert_same(ask(engines[0], tokens), own)


def test_only_the_same_salt_hits_on_the_other(
    engines: tuple[ServedEngine, ServedEngine], nodes: tuple[Node, Node], place: SharedPlace
) -> None:
    """Not a byte is even read for another one."""
    tokens = prompt_of("salted", BLOCKS * BLOCK + 3)
    ask(engines[0], tokens, cache_salt="mine")
    own = ask(engines[0], tokens, cache_salt="mine")
    wait_written(place, *nodes)
    loaded = f"tier_loads.{place.entry['type']}.loaded"
    before = nodes[1].count(loaded)
    for salt in ({"cache_salt": "yours"}, {}):
        with nodes[1].loading(0):
            assert ask(engines[1], tokens, **salt).cached_tokens == 0
    nodes[1].wait_at_rest()
    assert nodes[1].count(loaded) == before
    with nodes[1].loading(BLOCKS):
        assert_same(ask(engines[1], tokens, cache_salt="mine"), own)


# ---- the place goes, and comes back


def test_a_place_that_goes_costs_no_answer_and_hits_resume_when_it_is_back(
    engines: tuple[ServedEngine, ServedEngine], nodes: tuple[Node, Node], place: SharedPlace
) -> None:
    """It goes while a request asks for it. Engines and nodes live on; what it held is found again,
    and what was computed meanwhile gets there once it is used again."""
    here, there = engines
    under_way, missed, kept, late = (
        prompt_of(name, BLOCKS * BLOCK + 3) for name in ("under way", "missed", "kept", "late")
    )
    cold = {}
    for name, tokens in (("missed", missed), ("kept", kept), ("under way", under_way)):
        cold[name] = ask(here, tokens)
    own = ask(here, kept)
    wait_written(place, *nodes)
    lives = [node.pid for node in nodes], [engine.processes() for engine in engines]
    uncached = [ask(there, prompt_of(f"here {n}", 200), 2).ttft_ms for n in range(5)]
    nodes[1].wait_at_rest()
    with there.stream(under_way, 8, logprobs=True, ignore_eos=True) as stream:
        place.take_away()
        began_s = time.monotonic()
        assert_right(here, under_way, stream.finish())
    away = [ask(there, prompt_of(f"away {n}", 200), 2).ttft_ms for n in range(ASKED_AWAY)]
    assert statistics.median(away) <= BUSY_RATIO * statistics.median(uncached) + WAIT_MS_MAX
    nodes[1].wait("it is seen", lambda status: shared(status)["state"] != "on")
    answer = ask(there, missed)
    assert answer.cached_tokens == 0
    assert is_same(answer, cold["missed"])
    ask(here, late)
    place.give_back()
    is_server = place.entry["type"] != "shared_dir"
    heal_s = T_HEAL_S if is_server else T_HEAL_S + time.monotonic() - began_s
    for node in nodes:
        node.wait("it is back", lambda status: shared(status)["state"] == "on", heal_s)
    with nodes[1].loading(BLOCKS):
        assert_same(ask(there, kept), own)
    own = ask(here, late)
    forget(here)
    assert_same(ask(here, late), own)  # which offers it again
    wait_written(place, *nodes)
    with nodes[1].loading(BLOCKS):
        assert_same(ask(there, late), own)
    assert lives == ([node.pid for node in nodes], [engine.processes() for engine in engines])


def assert_right(engine: ServedEngine, tokens: list[int], answer: Completion) -> None:
    """What the engine says by a hit of its own of that length."""
    world = os.urandom(8).hex()
    assert_same(answer, own_hit(engine, tokens, answer.cached_tokens, cache_salt=world))


def test_a_clear_here_leaves_what_is_there(
    engines: tuple[ServedEngine, ServedEngine], nodes: tuple[Node, Node], place: SharedPlace
) -> None:
    """What was cleared is not found here, whoever stored it; the other goes on having its own.
    From now on the two do not see the same."""
    tokens = prompt_of("cleared", 2 * BLOCK + 3)
    ask(engines[1], tokens)
    wait_written(place, nodes[1], nodes[0])
    nodes[0].clear()
    assert ask(engines[0], tokens).cached_tokens == 0
    forget(engines[1])
    assert ask(engines[1], tokens).cached_tokens == 2 * BLOCK


def test_a_place_that_lost_all_has_misses_and_is_filled_anew(
    engines: tuple[ServedEngine, ServedEngine], nodes: tuple[Node, Node], place: SharedPlace
) -> None:
    """Hits resume both ways; nobody is started again."""
    tokens = prompt_of("lost", BLOCKS * BLOCK + 3)
    cold = ask(engines[0], tokens)
    wait_sent(nodes[0])
    lives = [node.pid for node in nodes]
    place.lose()
    answer = ask(engines[1], tokens)
    assert answer.cached_tokens == 0
    assert is_same(answer, cold)
    for first in (0, 1):

        def is_shared(first: int = first) -> bool:
            """Whether something that one computes now is a hit on the other."""
            anew, other = prompt_of(os.urandom(8).hex(), BLOCK + 3), nodes[1 - first]
            seen = shared(other.status())["records"]
            ask(engines[first], anew)
            wait_sent(nodes[first])
            if place.look_s:
                other.wait("it looks", lambda there: shared(there)["records"] != seen)
            return ask(engines[1 - first], anew).cached_tokens == BLOCK

        wait_until("hits resume", is_shared, T_HEAL_S + 3 * place.look_s)
    assert lives == [node.pid for node in nodes]


def prompt_of(name: str, length: int) -> list[int]:
    """Tokens of this name."""
    return prompt(f"shared {name}", length)
