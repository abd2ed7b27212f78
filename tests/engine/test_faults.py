"""The node stands still, dies, is stopped, is short of memory: the engine serves on, and heals.

One engine for all of it, started while its node stood still. Every test leaves it with a node.
"""

import contextlib
import os
import statistics
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path

import pytest

from kvtide.bounds import T_ANSWER_MS
from kvtide.errors import KVTideError
from kvtide.testing.completions import Completion
from kvtide.testing.serving import ServedEngine
from kvtide.units import MiB
from tests.engine.answers import ask, assert_same, forget, is_same
from tests.engine.cgroups import Cgroup, limited_cgroup
from tests.engine.conftest import engine_on, in_soaks_only
from tests.engine.nodes import Node, assert_accounts, wait_until
from tests.engine.prompts import prompt

BLOCK = 128
T_HEAL_S = 7.0
"""Contract: two heartbeats and 5 s."""
ANSWER_MS_MAX = 500.0
"""What a silent node may add to a request: T_answer, and as much again for a busy machine."""
BREAKER_QUESTIONS = 5
CGROUP_BYTES = 1200 * MiB
LEFT_BYTES = 100 * MiB
"""What others leave of the group; a node keeps 256 MiB free if it can."""


@pytest.fixture(scope="module")
def first_answer() -> list[Completion]:
    """What the engine said before it had ever heard of its node."""
    return []


@pytest.fixture(scope="module")
def served(node: Node, logs: Path, first_answer: list[Completion]) -> Iterator[ServedEngine]:
    """An engine that starts while its node stands still."""
    node.serve()
    engine = engine_on(node, logs, "faults")
    with contextlib.ExitStack() as stack:
        with node.stopped():
            stack.enter_context(engine)
            first_answer.append(ask(engine, prompt("first", 300)))
        node.wait_on()
        yield engine


@pytest.fixture(autouse=True)
def is_whole(served: ServedEngine, node: Node) -> Iterator[None]:
    """Before and after each test the engine is on, and its node at rest."""
    node.wait_on()
    node.wait_at_rest()
    yield
    node.wait_on()
    assert_accounts(node.wait_at_rest())
    node.check()


@pytest.fixture
def known(served: ServedEngine, node: Node) -> "Known":
    """A prompt that the node holds now, and the two answers to it."""
    tokens = prompt(f"known {os.urandom(4).hex()}", 6 * BLOCK + 9)
    with node.storing(6):
        cold = ask(served, tokens)
    return Known(tokens, cold, ask(served, tokens))


class Known:
    """Answers that may be given to one prompt: computed, or from a hit of all of it."""

    def __init__(self, tokens: list[int], cold: Completion, own: Completion) -> None:
        self.tokens = tokens
        self.cold = cold
        self.own = own

    def is_right(self, answer: Completion) -> bool:
        return is_same(answer, self.cold) or is_same(answer, self.own)

    def hits(self, engine: ServedEngine) -> bool:
        """Whether the node still has it; asks for it, and checks the answer."""
        forget(engine)
        answer = ask(engine, self.tokens)
        assert self.is_right(answer)
        return answer.cached_tokens == self.own.cached_tokens


def test_an_engine_starts_and_serves_while_the_node_stands_still(
    served: ServedEngine, node: Node, first_answer: list[Completion]
) -> None:
    """Its first answer was computed; later ones come from the node."""
    assert [answer.cached_tokens for answer in first_answer] == [0]
    forget(served)
    with node.storing(2):
        assert is_same(ask(served, prompt("first", 300)), first_answer[0])
    own = ask(served, prompt("first", 300))
    forget(served)
    with node.loading(2):
        assert_same(ask(served, prompt("first", 300)), own)


def test_a_node_that_stands_still_costs_a_moment_and_no_answer(
    served: ServedEngine, node: Node, known: Known
) -> None:
    """Five requests wait for T_answer, those behind them not at all; then hits resume.

    The five come at once: one after the other, on a busy machine, pings that nobody answers could
    open the breaker before all five have been asked for.
    """
    usual = statistics.median(ttfts_ms(served, "moving", at_once=1))
    usual_at_once = statistics.median(ttfts_ms(served, "moving", at_once=BREAKER_QUESTIONS))
    node.wait_at_rest()
    before = node.counts_at_rest()
    with node.stopped():
        asked = ttfts_ms(served, "asked", at_once=BREAKER_QUESTIONS)
        unasked = ttfts_ms(served, "unasked", at_once=1)
        assert known.is_right(ask(served, known.tokens))
    assert T_ANSWER_MS <= min(asked) <= usual_at_once + ANSWER_MS_MAX, (usual_at_once, asked)
    assert min(unasked) < usual + T_ANSWER_MS, (usual, unasked)
    wait_until("hits resume", lambda: known.hits(served), T_HEAL_S)
    counts = node.counts_at_rest()
    assert counts["miss.no_answer"] - before["miss.no_answer"] == len(asked)
    assert counts["miss.node_gone"] - before["miss.node_gone"] >= len(unasked)


def ttfts_ms(served: ServedEngine, name: str, *, at_once: int) -> list[float]:
    """Of five new prompts, each of one whole block and some more."""
    with ThreadPoolExecutor(at_once) as pool:
        prompts = [prompt(f"{name} {at_once} {i}", 200) for i in range(BREAKER_QUESTIONS)]
        return [one.ttft_ms for one in pool.map(lambda one: ask(served, one, 2), prompts)]


def test_a_request_under_way_survives_the_stop_of_the_node(
    served: ServedEngine, node: Node, known: Known
) -> None:
    """The node stops while a request is being served, and again while another one is loading."""
    with served.stream(known.tokens, 40, ignore_eos=True) as stream:
        pieces = iter(stream)
        next(pieces)
        with node.stopped():
            assert len(list(pieces)) == 39
    forget(served)
    with served.stream(known.tokens, 8, logprobs=True, ignore_eos=True) as stream, node.stopped():
        assert known.is_right(stream.finish())
    wait_until("hits resume", lambda: known.hits(served), T_HEAL_S)


def test_a_node_that_is_killed_costs_no_answer_and_another_takes_its_place(
    served: ServedEngine, node: Node, known: Known
) -> None:
    """Killed while requests run, one of them just looked up. The engine starts the next node."""
    forget(served)
    with served.stream(prompt("long", 150), 60, ignore_eos=True) as long:
        pieces = iter(long)
        next(pieces)
        with served.stream(known.tokens, 8, logprobs=True, ignore_eos=True) as short:
            dead = node.kill()
            assert len(short.finish().token_ids) == 8  # beside another: other shapes
        assert len(list(pieces)) == 59
    wait_until("there is another node", node.is_there, T_HEAL_S)
    assert node.pid != dead
    node.wait_on(wait_s_max=T_HEAL_S)
    wait_until("hits resume", lambda: known.hits(served), T_HEAL_S)


def test_a_conversation_outlives_the_node_that_knew_its_beginning(
    served: ServedEngine, node: Node
) -> None:
    """Stores are anchored: what the engine kept from before the kill goes to the new node too."""
    first = prompt("outlives", 3 * BLOCK + 20)
    turn = ask(served, first, 40)
    node.wait_at_rest()
    node.kill()
    node.wait_on(wait_s_max=T_HEAL_S)
    second = [*first, *turn.token_ids, *prompt("outlives more", 100)]
    with node.storing((len(second) + 7) // BLOCK):
        assert ask(served, second).cached_tokens == 3 * BLOCK
    own = ask(served, second)
    forget(served)
    with node.loading((len(second) - 1) // BLOCK):
        assert_same(ask(served, second), own)


def test_after_kvtide_stop_the_engine_serves_and_starts_nothing(
    served: ServedEngine, node: Node, known: Known
) -> None:
    """Somebody else starts the next node, which the engine joins by itself."""
    node.stop()
    forget(served)
    for _ in range(3):
        assert is_same(ask(served, known.tokens), known.cold)
        assert not node.is_there()
        forget(served)
    with pytest.raises(KVTideError, match="no node"):
        node.status()
    node.serve()
    node.wait_on(wait_s_max=T_HEAL_S)
    assert not known.hits(served)
    wait_until("hits resume", lambda: known.hits(served), T_HEAL_S)


def test_a_node_in_a_small_cgroup_stays_below_its_limit_and_gives_memory_back(
    served: ServedEngine, node: Node
) -> None:
    """It sizes itself by what the group leaves, evicts instead of growing, and is never killed.

    Then others in the group need memory: the node's limit goes down, and the memory with it.
    """
    node.stop()
    with limited_cgroup(CGROUP_BYTES) as group:
        if group is None:
            node.serve()
            pytest.skip("no memory cgroup may be made here")
        pid = node.serve(group, KVTIDE_HOST_BYTES="auto")
        try:
            uses_what_the_group_leaves(served, node, group)
            assert node.pid == pid, "the node was killed"
        finally:
            node.stop()
            node.serve()


def uses_what_the_group_leaves(served: ServedEngine, node: Node, group: Cgroup) -> None:
    """What the test above asserts, once the node is in its group."""
    size_bytes = node.status()["host"]["size_bytes"]
    assert size_bytes < CGROUP_BYTES / 4
    node.wait_on(wait_s_max=T_HEAL_S)
    fills = count()

    def evicts() -> bool:  # what comes quicker than memory grows is dropped meanwhile
        ask(served, prompt(f"fills {next(fills)}", 3000), 1)  # 68 MB
        status = node.status()
        assert status["host"]["allocated_bytes"] <= size_bytes
        return bool(status["evicted"]["room"])

    wait_until("it evicts", evicts)
    with group.ballast(CGROUP_BYTES - group.used_bytes() - LEFT_BYTES):
        node.wait(
            "memory goes back",
            lambda s: (
                s["host"]["allocated_bytes"] <= s["host"]["limit_bytes"] < size_bytes * 2 // 3
            ),
        )
        assert ask(served, prompt("under pressure", 3000), 1).cached_tokens == 0
    node.wait("it may grow again", lambda s: s["host"]["limit_bytes"] == size_bytes)

    def holds_it_all() -> bool:
        fits = prompt("fits", 3000)
        ask(served, fits, 1)
        node.wait_at_rest()
        forget(served)
        return ask(served, fits, 1).cached_tokens == 3000 // BLOCK * BLOCK

    wait_until("it has grown again", holds_it_all)


# ---- resets, which are the last: this engine does not reach anything afterwards


def test_an_external_reset_in_the_middle_of_a_request_keeps_it_from_being_stored(
    served: ServedEngine, node: Node
) -> None:
    """The engine refuses to reset its own cache then, and says so; ours has been reset."""
    tokens = prompt("reset in the middle", 3 * BLOCK)
    with node.storing(3):
        ask(served, tokens, 1)
    with (
        node.storing(0),
        served.stream(tokens, 2 * BLOCK, ignore_eos=True) as stream,
    ):
        pieces = iter(stream)
        next(pieces)
        assert not served.reset_prefix_cache(external=True)
        assert len(list(pieces)) == 2 * BLOCK - 1
    forget(served)
    with node.loading(0):
        assert ask(served, tokens, 1).cached_tokens == 0


@pytest.mark.slow
@in_soaks_only
@pytest.mark.timeout(1500)
def test_an_external_reset_in_the_middle_of_a_load_fails_the_load(
    served: ServedEngine, node: Node
) -> None:
    """Resets at all moments of a load, until one meets it (asserted): computed anew, rightly."""
    tokens = prompt("reset a load", 24 * BLOCK + 1)
    cold = ask(served, tokens)
    own = ask(served, tokens)
    failed = node.count("failed_blocks")
    for delay_ms in [*range(0, 60, 2)] * 4:
        node.wait_at_rest()
        forget(served)
        with served.stream(tokens, 8, logprobs=True, ignore_eos=True) as stream:
            time.sleep(delay_ms / 1000)  # a moment of its life, not a state to wait for
            served.reset_prefix_cache(external=True)
            answer = stream.finish()
        assert is_same(answer, cold) or is_same(answer, own)
        node.wait_at_rest()
        if node.count("failed_blocks") > failed:
            return
        forget(served)
        assert is_same(ask(served, tokens), cold)
    raise AssertionError("no reset met a load")


def test_after_an_external_reset_nothing_stored_before_is_found(
    served: ServedEngine, node: Node, known: Known
) -> None:
    """What is stored from then on is."""
    assert known.hits(served)
    assert served.reset_prefix_cache(external=True)
    with node.storing(6), node.loading(0):
        assert is_same(ask(served, known.tokens), known.cold)
    forget(served)
    with node.loading(6):
        assert_same(ask(served, known.tokens), known.own)
