"""Two engines, each with a node of its own, and between them one place that both share."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtide.testing import redis_servers
from kvtide.testing.serving import ServedEngine
from tests.engine.answers import ask, assert_same, forget, is_same, whole_blocks
from tests.engine.conftest import engine_on, make_node
from tests.engine.nodes import Node, Status
from tests.engine.prompts import prompt

BLOCK = 128
LENGTHS = (BLOCK + 1, 3 * BLOCK + 5, 2000)


@pytest.fixture(scope="module", params=["shared_dir", "redis"])
def place(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, object]]:
    """An entry of `tiers`."""
    directory = tmp_path_factory.mktemp("all")
    entry = {"type": request.param, "bytes_max": 2**31}
    if request.param == "shared_dir":
        yield entry | {"path": str(directory)}
        return
    with redis_servers.running("valkey", directory) as server:
        yield entry | {"url": f"redis://127.0.0.1:{server.port}"}


@pytest.fixture(scope="module")
def nodes(place: dict[str, object]) -> Iterator[tuple[Node, Node]]:
    """Two nodes that share nothing but the place, as on two machines."""
    variables = {"KVTIDE_TIERS": json.dumps([place]), "KVTIDE_LOAD_POLICY": "always"}
    for one in make_node():
        for other in make_node():
            for node in (one, other):
                node.variables |= variables
            yield one, other


@pytest.fixture(scope="module")
def engines(nodes: tuple[Node, Node], logs: Path) -> Iterator[tuple[ServedEngine, ServedEngine]]:
    """An engine for each."""
    with engine_on(nodes[0], logs, "here") as here, engine_on(nodes[1], logs, "there") as there:
        for node in nodes:
            node.wait_on()
        yield here, there


def shared(status: Status) -> Status:
    """What a status says of the place."""
    (tier,) = status["tiers"].values()
    return dict(tier)


def is_written(status: Status) -> bool:
    """Nothing is on its way to the place, and something is there."""
    return bool(shared(status)["records"]) and not shared(status)["queued_bytes"]


def wait_written(node: Node, other: Node) -> None:
    """Until what was computed is in the place, and the other one has seen it."""
    node.wait_at_rest()
    status = node.wait("all is written", is_written)
    if "shared_dir" in status["tiers"]:  # a server is asked each time
        count = shared(status)["records"]
        other.wait("it is seen", lambda status: shared(status)["records"] == count)


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("way", ["here to there", "there to here"])
def test_what_one_engine_computed_is_a_hit_on_the_other(
    engines: tuple[ServedEngine, ServedEngine],
    nodes: tuple[Node, Node],
    place: dict[str, object],
    way: str,
    length: int,
) -> None:
    first = 0 if way == "here to there" else 1
    tokens = prompt_of(f"{way} {length}", length)
    ask(engines[first], tokens)
    own = ask(engines[first], tokens)
    assert own.cached_tokens == whole_blocks(length, BLOCK)
    other = nodes[1 - first]
    wait_written(nodes[first], other)
    with other.loading(whole_blocks(length, BLOCK) // BLOCK):
        ours = ask(engines[1 - first], tokens)
    assert_same(ours, own)
    assert other.count(f"tier_loads.{place['type']}.loaded") > 0
    assert not is_same(ours, ask(engines[first], prompt_of("another", length)))


def test_hits_outlive_the_node_that_stored_them(
    engines: tuple[ServedEngine, ServedEngine], nodes: tuple[Node, Node]
) -> None:
    """Killed, not ended: the other one reads what it left, and so does the one that follows it."""
    tokens = prompt_of("killed", 5 * BLOCK + 3)
    ask(engines[0], tokens)
    own = ask(engines[0], tokens)
    wait_written(*nodes)
    nodes[0].kill()
    with nodes[1].loading(5):
        assert_same(ask(engines[1], tokens), own)
    nodes[0].wait_on()
    forget(engines[0])
    with nodes[0].loading(5):
        assert_same(ask(engines[0], tokens), own)


def test_a_clear_here_leaves_what_is_there(
    engines: tuple[ServedEngine, ServedEngine], nodes: tuple[Node, Node]
) -> None:
    """What was cleared is not found here, whoever stored it; the other goes on having its own."""
    tokens = prompt_of("cleared", 2 * BLOCK + 3)
    ask(engines[1], tokens)
    wait_written(nodes[1], nodes[0])
    nodes[0].clear()
    assert ask(engines[0], tokens).cached_tokens == 0
    forget(engines[1])
    assert ask(engines[1], tokens).cached_tokens == 2 * BLOCK


def prompt_of(name: str, length: int) -> list[int]:
    """Tokens of this name."""
    return prompt(f"shared {name}", length)
