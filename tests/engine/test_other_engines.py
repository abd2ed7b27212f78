"""Engines beside the session's one, on its node: they share, come, go, and crash."""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtide.testing.completions import Completion
from kvtide.testing.serving import KVTIDE, ServedEngine
from tests.engine.answers import ask, assert_same, forget
from tests.engine.conftest import engine_on, together
from tests.engine.nodes import Node, Status, assert_accounts, is_at_rest
from tests.engine.prompts import prompt

BLOCK = 128
LEFT_BEHIND = prompt("left behind", 5 * BLOCK + 3)
ROLES = ("kv_consumer", "kv_producer")
DIGEST_S_MAX = 1.0
"""From the workers' coming to the engine's being on, where the weights were read before."""


class Watch:
    """When an engine's workers had come, and when it was on."""

    def __init__(self, node: Node, known: set[str]) -> None:
        self._node = node
        self._known = known
        self.workers_s: float | None = None
        self.on_s: float | None = None

    def look(self, elapsed_s: float = 0.0) -> None:
        """Look once."""
        for engine in self._node.status()["engines"]:
            if engine["engine_id"] in self._known:
                continue
            if engine["pid"] and engine["workers"]:
                self.workers_s = self.workers_s or time.monotonic()
            if engine["state"] == "on":
                self.on_s = self.on_s or time.monotonic()


@pytest.fixture(scope="module")
def watch(engine: ServedEngine, shared_node: Node) -> Watch:
    return Watch(shared_node, ids(shared_node.status()))


@pytest.fixture(scope="module")
def second(
    engine: ServedEngine, shared_node: Node, logs: Path, watch: Watch
) -> Iterator[ServedEngine]:
    """Another engine like the first; one test kills it."""
    other = engine_on(shared_node, logs, "second")
    other._on_wait = watch.look
    with other:
        yield other


@pytest.fixture(scope="module")
def left_behind(second: ServedEngine, shared_node: Node) -> Completion:
    """The answer to LEFT_BEHIND from a hit of the second engine, which alone has computed it."""
    with shared_node.storing(5):
        ask(second, LEFT_BEHIND)
    return ask(second, LEFT_BEHIND)


def test_weights_that_were_read_before_are_known_at_once(
    second: ServedEngine, shared_node: Node, watch: Watch
) -> None:
    shared_node.wait_on(2)
    watch.look()
    assert watch.workers_s is not None
    assert watch.on_s is not None
    assert watch.on_s - watch.workers_s < DIGEST_S_MAX


@pytest.mark.parametrize("length", [2 * BLOCK + 7, 9 * BLOCK])
def test_what_one_engine_computed_the_other_hits(
    engine: ServedEngine, second: ServedEngine, shared_node: Node, length: int
) -> None:
    """In both directions; the answer is the one that the first engine's own hit gives."""
    for name, one, other in (("to", engine, second), ("fro", second, engine)):
        tokens = prompt(f"{name} {length}", length)
        with shared_node.storing((length + 7) // BLOCK):
            ask(one, tokens)
        own = ask(one, tokens)
        with shared_node.loading((length - 1) // BLOCK):
            assert_same(ask(other, tokens), own)


def test_a_conversation_that_changes_engines_goes_on(
    engine: ServedEngine, second: ServedEngine, shared_node: Node
) -> None:
    """Each turn is in the other engine, which holds an older part of it in its own cache."""
    tokens, known = prompt("wanders", 200), 0
    for turn in range(4):
        answer = ask((engine, second)[turn % 2], tokens, 70)
        assert answer.cached_tokens == known // BLOCK * BLOCK
        known = len(tokens) + 69
        shared_node.wait_at_rest()
        tokens = [*tokens, *answer.token_ids, *prompt(f"wanders {turn}", 50)]


def test_a_crash_in_the_middle_of_stores_leaves_nothing_lent(
    engine: ServedEngine, second: ServedEngine, left_behind: Completion, shared_node: Node
) -> None:
    """SIGKILL for all of an engine's processes while grants of it are out (asserted)."""
    dead = shared_node.engine_of(second)["engine_id"]
    with second.stream(prompt("crash", 6000), 1):
        shared_node.wait("it has grants", lambda status: entry(status, dead)["grants"] > 1)
        assert second.kill().was_killed
    status = shared_node.wait(
        "the dead engine is gone and the node at rest",
        lambda status: dead not in ids(status) and is_at_rest(status),
    )
    assert_accounts(status)
    shared_node.check()
    tokens = prompt("after the crash", 300)
    own = [ask(engine, tokens) for _ in range(2)][1]
    forget(engine)
    assert_same(ask(engine, tokens), own)


@pytest.fixture(scope="module")
def roles(
    second: ServedEngine, left_behind: Completion, shared_node: Node, logs: Path
) -> Iterator[dict[str, ServedEngine]]:
    """In the place of the second engine, which is dead: one that only loads, one that only stores.

    Nobody who lives has ever computed LEFT_BEHIND.
    """
    second.kill()
    shared_node.wait_on(1)
    engines = {role: engine_on(shared_node, logs, role, connector=only(role)) for role in ROLES}
    with together(*engines.values()):
        shared_node.wait_on(3)
        yield engines


def test_an_engine_in_the_place_of_a_dead_one_hits_what_that_one_stored(
    roles: dict[str, ServedEngine], left_behind: Completion, shared_node: Node
) -> None:
    """From the host memory of the node, which lives on; the role kv_consumer stores nothing."""
    consumer = roles["kv_consumer"]
    with shared_node.loading(5):
        assert_same(ask(consumer, LEFT_BEHIND), left_behind)
    with shared_node.storing(0):
        ask(consumer, prompt("consumed", 2 * BLOCK + 3))
    shared_node.wait(
        "the blocks are counted as dropped", lambda status: status["counts"]["drop.role"] >= 2
    )


def test_an_engine_that_only_stores_never_loads(
    engine: ServedEngine, roles: dict[str, ServedEngine], shared_node: Node
) -> None:
    """The role kv_producer: others hit what it computes, it computes what others did."""
    producer = roles["kv_producer"]
    theirs = prompt("not for producers", 2 * BLOCK + 3)
    with shared_node.storing(2):
        ask(engine, theirs)
    with shared_node.loading(0):
        assert ask(producer, theirs).cached_tokens == 0
    shared_node.wait("it is counted", lambda status: status["counts"]["miss.role"])
    tokens = prompt("produced", 5 * BLOCK + 3)
    with shared_node.storing(5):
        ask(producer, tokens)
    own = ask(producer, tokens)
    with shared_node.loading(5):
        assert_same(ask(engine, tokens), own)


def only(role: str) -> dict[str, object]:
    """The connector in one of vLLM's roles."""
    return {**KVTIDE, "kv_role": role}


def entry(status: Status, engine_id: str) -> Status:
    """What a status says of one engine."""
    (found,) = [one for one in status["engines"] if one["engine_id"] == engine_id]
    return dict(found)


def ids(status: Status) -> set[str]:
    """The engines that a node knows."""
    return {one["engine_id"] for one in status["engines"]}
