"""Many requests in an engine whose KV cache is far too small, on a node that is small as well.

A tiny model in float32, where the company of other requests moves nothing but the last bits: so
each answer can be held against the same request served alone, without kvtide.
"""

import os
import random
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from kvtide.testing.completions import Completion
from kvtide.testing.serving import TINY_LLAMA, ServedEngine
from kvtide.units import MiB
from tests.engine import cells
from tests.engine.answers import ask, assert_close, forget
from tests.engine.conftest import SOAK_S, engine_on, in_soaks_only
from tests.engine.nodes import Node, assert_accounts, wait_until
from tests.engine.prompts import prompt

BLOCK = 32
BLOCK_BYTES = BLOCK * 4096
POOL_BLOCKS = 128
SEQUENCES_MAX = 8
HOST_BYTES = 16 * MiB
"""Sixteen chunks: the least that this layout can do with."""
USERS = 8
ROUNDS_MAX = 8
OFF = {"kv_transfer_params": {"kvtide": "off"}}


@pytest.fixture(scope="module")
def served(node: Node, logs: Path) -> Iterator[ServedEngine]:
    """Room for 4,096 tokens in all; eight requests at a time."""
    arguments = (
        *("--dtype", "float32", "--block-size", str(BLOCK), "--max-model-len", "2048"),
        *("--num-gpu-blocks-override", str(POOL_BLOCKS)),
        *("--max-num-seqs", str(SEQUENCES_MAX), "--max-num-batched-tokens", "512"),
    )
    variables = {"KVTIDE_HOST_BYTES": str(HOST_BYTES)}
    with engine_on(node, logs, "pressure", *arguments, model=TINY_LLAMA, **variables) as engine:
        ask(engine, prompt("warm-up", 40), **OFF)
        node.wait_on()
        yield engine


@pytest.fixture(autouse=True)
def is_whole(served: ServedEngine, node: Node) -> Iterator[None]:
    """Contract C08, after each test."""
    node.wait_at_rest()
    yield
    wait_until("nobody is served", lambda: not in_state(served, "running", "waiting"))
    assert_accounts(node.wait_at_rest())
    node.check()


def in_state(engine: ServedEngine, *states: str) -> float:
    """Requests that are running, or waiting."""
    metrics = engine.metrics()
    return sum(metrics[f"vllm:num_requests_{state}"] for state in states)


def preemptions(engine: ServedEngine) -> float:
    return engine.metrics()["vllm:num_preemptions_total"]


def together(engine: ServedEngine, prompts: list[list[int]], tokens: int) -> list[Completion]:
    """All at once."""
    with ThreadPoolExecutor(len(prompts)) as pool:
        return list(pool.map(lambda one: ask(engine, one, tokens), prompts))


def alone(engine: ServedEngine, tokens: list[int], count: int) -> Completion:
    """The reference: nothing cached, nobody else, kvtide out of it."""
    salt = os.urandom(8).hex()
    answer = ask(engine, tokens, count, cache_salt=salt, **OFF)
    assert answer.cached_tokens == 0
    return answer


def test_a_swapped_block_shows(served: ServedEngine, node: Node) -> None:
    """The twin of all these tests: their oracle allows for rounding, and sees one wrong block."""
    memory = cells.NodeMemory(node.pid)
    before = memory.last_generation()
    mine = prompt("twin", 5 * BLOCK + 7)
    reference = alone(served, mine, 8)
    ask(served, mine)
    ask(served, prompt("another", BLOCK + 1))
    node.wait_at_rest()
    held = memory.cells(before)
    forget(served)
    with cells.swapped(held[0], held[-1]):
        wrong = ask(served, mine)
    assert wrong.cached_tokens == 5 * BLOCK
    with pytest.raises(AssertionError):
        assert_close(wrong, reference)
    forget(served)
    assert_close(ask(served, mine), reference)


def test_preempted_requests_are_resumed_rightly(served: ServedEngine, node: Node) -> None:
    """Eight requests that grow to 22 blocks each, in a pool of 128, until some that hit were
    preempted: how many run at the same time depends on when their loads arrive.
    """
    prompts = [prompt(f"preempted {i}", 400 + 7 * i) for i in range(8)]
    references = [alone(served, tokens, 260) for tokens in prompts]
    for _ in range(ROUNDS_MAX):
        forget(served)
        preempted = preemptions(served)
        hits = node.count("tokens.external")
        answers = together(served, prompts, 260)
        for answer, reference in zip(answers, references, strict=True):
            assert_close(answer, reference)
        node.wait_at_rest()
        if preemptions(served) > preempted and node.count("tokens.external") > hits:
            break
    else:
        pytest.fail(f"no request that hit was preempted in {ROUNDS_MAX} rounds")
    assert node.count("recomputed_tokens") > 0


def test_clients_that_leave_in_any_state_leave_nothing(served: ServedEngine, node: Node) -> None:
    """Half of the requests are aborted, waiting as well as decoding; the others are right."""
    prompts = [prompt(f"leaving {i % 4}", 300 + 40 * i) for i in range(16)]
    references = [alone(served, tokens, 30) for tokens in prompts[1::2]]
    streams = [served.stream(tokens, 30, logprobs=True, ignore_eos=True) for tokens in prompts]
    wait_until("some wait", lambda: in_state(served, "waiting"))
    pieces = [iter(stream) for stream in streams]
    next(pieces[0])
    assert in_state(served, "waiting")
    for stream in streams[::2]:
        stream.abort()
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda stream: stream.finish(), streams[1::2]))
    for answer, reference in zip(answers, references, strict=True):
        assert_close(answer, reference)
    assert node.count("stored_blocks") > 0


# ---- soak


class User:
    """Somebody who chats, leaves now and then, and starts over when it has become long."""

    def __init__(self, number: int, engine: ServedEngine, until_s: float) -> None:
        self.source = random.Random(f"user {number}")
        self.engine = engine
        self.until_s = until_s
        self.answers: list[tuple[list[int], Completion]] = []
        """The last answer of each conversation, and what was asked."""
        self.left_count = 0

    def run(self) -> None:
        """Chat until the time is over."""
        number = 0
        while time.monotonic() < self.until_s:
            number += 1
            self._chat(f"{self.source.random()}", {"cache_salt": "s"} if number % 3 else {})

    def _chat(self, name: str, extra: dict[str, str]) -> None:
        tokens = prompt("greeting", 70) + prompt(name, self.source.randrange(20, 400))
        last: tuple[list[int], Completion] | None = None
        while len(tokens) < 1400 and (last is None or time.monotonic() < self.until_s):
            count = self.source.randrange(1, 70)
            if self.source.random() < 0.15:
                self._leave(tokens, count, extra)
            answer = ask(self.engine, tokens, count, **extra)
            last = (tokens, answer)
            more = prompt(f"{name} {len(tokens)}", self.source.randrange(1, 150))
            tokens = [*tokens, *answer.token_ids, *more]
        if last is not None:
            self.answers.append(last)

    def _leave(self, tokens: list[int], count: int, extra: dict[str, str]) -> None:
        self.left_count += 1
        with self.engine.stream(tokens, count, ignore_eos=True, **extra) as stream:
            if self.source.random() < 0.5:
                next(iter(stream))


def soak(engine: ServedEngine) -> list[User]:
    """Everybody chats until the time is over; then nobody is served any more."""
    users = [User(number, engine, time.monotonic() + SOAK_S) for number in range(USERS)]
    with ThreadPoolExecutor(USERS) as pool:
        for done in [pool.submit(user.run) for user in users]:
            done.result()
    wait_until("nobody is served", lambda: not in_state(engine, "running", "waiting"))
    assert all(user.left_count for user in users)
    return users


def assert_right(users: list[User], engine: ServedEngine) -> None:
    """The ends of each user's last conversations against the same turns served alone."""
    for user in users:
        assert user.answers
        for tokens, answer in user.answers[-3:]:
            assert_close(answer, alone(engine, tokens, len(answer.token_ids)))


@pytest.mark.slow
@pytest.mark.timeout(SOAK_S + 400)
def test_after_a_soak_every_answer_was_right_and_nothing_is_lost(
    served: ServedEngine, node: Node
) -> None:
    """Several times more KV than engine and node can hold: preemptions, aborts, evictions and
    hits all the time (asserted).
    """
    before = node.status()
    preempted = preemptions(served)
    users = soak(served)
    after = node.wait_at_rest()
    assert_accounts(after)
    node.check()
    assert preemptions(served) > preempted
    assert after["evicted"]["room"] > before["evicted"]["room"]
    assert after["counts"]["tokens.external"] > before["counts"]["tokens.external"]
    assert_right(users, served)


@pytest.mark.slow
@in_soaks_only
@pytest.mark.timeout(SOAK_S + 400)
def test_a_soak_in_bad_weather_is_as_right(served: ServedEngine, node: Node) -> None:
    """The node is killed and started anew, stands still, and is cleared, again and again."""
    stop = threading.Event()
    source = random.Random("weather")
    kills = 0

    def weather() -> None:
        nonlocal kills
        while not stop.wait(source.uniform(1, 5)):
            node.clear()
            with node.stopped():
                stop.wait(source.uniform(0.05, 1))
            if source.random() < 0.3:
                kills += 1
                node.kill()
                node.serve(KVTIDE_HOST_BYTES=str(HOST_BYTES))
            node.wait_on()

    with ThreadPoolExecutor(1) as pool:
        done = pool.submit(weather)
        try:
            users = soak(served)
        finally:
            stop.set()
        done.result()
    assert kills
    node.wait_on()
    assert_right(users, served)
