"""A hit is the engine's own, block for block and bit for bit.

All of these share one engine: SmolLM2, blocks of 128 tokens, chunks of two blocks.
"""

import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from kvtide.testing.completions import Completion
from kvtide.testing.serving import ServedEngine
from tests.engine import cells
from tests.engine.answers import ask, assert_same, forget, is_same, whole_blocks
from tests.engine.nodes import Node, Status, wait_until
from tests.engine.prompts import prompt

BLOCK = 128
CHUNK = 2 * BLOCK
TOKENS = 8
EDGES = (BLOCK - 1, BLOCK, BLOCK + 1, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK + 1, 3000)


@pytest.fixture(autouse=True)
def at_rest(engine: ServedEngine, shared_node: Node) -> None:
    """What a test counts is its own."""
    shared_node.wait_at_rest()


# ---- one turn


@pytest.mark.parametrize("length", EDGES)
def test_a_hit_equals_the_engines_own_at_every_edge(
    engine: ServedEngine, shared_node: Node, length: int
) -> None:
    """Cold, then from the engine's cache, then from kvtide after the engine forgot."""
    tokens = prompt(f"edge {length}", length)
    with shared_node.storing((length + TOKENS - 1) // BLOCK):
        assert ask(engine, tokens, TOKENS).cached_tokens == 0
    own = ask(engine, tokens, TOKENS)
    assert own.cached_tokens == whole_blocks(length, BLOCK)
    forget(engine)
    with shared_node.loading(own.cached_tokens // BLOCK):
        ours = ask(engine, tokens, TOKENS)
    assert_same(ours, own)


@pytest.mark.parametrize("length", [BLOCK + 1, 2 * CHUNK + 1])
def test_a_swapped_block_shows(engine: ServedEngine, shared_node: Node, length: int) -> None:
    """The twin of the test above: its oracle sees a single wrong block.

    The other block is of another prompt. Two of one prompt would not do: attention adds up over
    all of them, so their order changes nothing but the rounding.
    """
    memory = cells.NodeMemory(shared_node.pid)
    mine = prompt(f"twin {length}", length)
    before = memory.last_generation()
    ask(engine, mine, TOKENS)
    ask(engine, prompt(f"another {length}", BLOCK + 1), TOKENS)
    shared_node.wait_at_rest()
    own = ask(engine, mine, TOKENS)
    held = memory.cells(before)
    forget(engine)
    with cells.swapped(held[0], held[-1]):
        wrong = ask(engine, mine, TOKENS)
    assert wrong.cached_tokens == own.cached_tokens
    assert not is_same(wrong, own)
    forget(engine)
    assert_same(ask(engine, mine, TOKENS), own)


def test_a_load_that_fails_is_computed_anew(engine: ServedEngine, shared_node: Node) -> None:
    """The generation of the third of four blocks moves: as if the node had lent the cell again.

    Two blocks are good and verified, the rest is computed: the same as a hit of two blocks. The
    request is counted like that too, and the entry is still there for others.
    """
    length = 2 * CHUNK + 40
    tokens = prompt("fails", length)
    memory = cells.NodeMemory(shared_node.pid)
    before = memory.last_generation()
    ask(engine, tokens[: CHUNK + 1], TOKENS)
    own = ask(engine, tokens, TOKENS)
    assert own.cached_tokens == CHUNK
    shared_node.wait_at_rest()
    third = memory.cells(before)[2]
    forget(engine)
    counted = shared_node.counts_at_rest()
    cells.move_generation(shared_node.pid, third)
    with shared_node.loading(2):
        ours = ask(engine, tokens, TOKENS)
    assert is_same(ours, own)
    shared_node.wait(
        "the failure is counted",
        lambda status: status["counts"]["failed_blocks"] == counted["failed_blocks"] + 2,
    )
    assert shared_node.count("tokens.external") == counted["tokens.external"] + CHUNK


def test_the_same_prompt_twice_at_once_is_loaded_once(
    engine: ServedEngine, shared_node: Node
) -> None:
    """No stampede: whoever comes while a load runs waits for it, and hits in the engine."""
    length = 16 * CHUNK + 1
    tokens = prompt("stampede", length)
    ask(engine, tokens, 1)
    shared_node.wait_at_rest()
    forget(engine)
    with shared_node.loading(32), ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda _: ask(engine, tokens, 1), range(4)))
    assert [answer.cached_tokens for answer in answers] == [32 * BLOCK] * 4


# ---- later turns


@pytest.mark.parametrize(
    ("length", "generated"),
    [(100, 60), (250, 20), (600, 3), (CHUNK, BLOCK + 1)],
)
def test_a_conversation_hits_as_if_the_engine_had_kept_it(
    engine: ServedEngine, shared_node: Node, length: int, generated: int
) -> None:
    """Three turns in two worlds; in the second the engine forgets everything between turns.

    Later turns reuse tokens that were generated, and nothing else runs in between: so the tail of
    the only request of an idle engine has been stored.
    """
    turns = hold(engine, shared_node, f"{length} {generated}", length, generated, forgets=False)
    known = [len(turn) + generated - 1 for turn, _ in turns[:-1]]
    cached = [own.cached_tokens for _, own in turns]
    assert cached == [0, *(tokens // BLOCK * BLOCK for tokens in known)]
    again = hold(engine, shared_node, f"{length} {generated}", length, generated, forgets=True)
    for (turn, own), (turn_again, ours) in zip(turns, again, strict=True):
        assert turn == turn_again
        assert_same(ours, own)


def hold(
    engine: ServedEngine, node: Node, name: str, length: int, generated: int, *, forgets: bool
) -> list[tuple[list[int], Completion]]:
    """Three turns of one conversation: what was asked, and the answer."""
    turns = []
    tokens = prompt(name, length)
    for number in range(3):
        answer = ask(engine, tokens, generated, cache_salt=f"{name} {forgets}")
        turns.append((tokens, answer))
        tokens = [*tokens, *answer.token_ids, *prompt(f"{name} {number}", 30 + 70 * number)]
        if forgets:
            node.wait_at_rest()
            forget(engine)
    return turns


# ---- who shares with whom


def test_only_the_same_salt_hits(engine: ServedEngine, shared_node: Node) -> None:
    """What one tenant computed is hit by that tenant alone, whatever the others ask."""
    tokens = prompt("salts", CHUNK + 50)
    with shared_node.storing(2):
        ask(engine, tokens, cache_salt="mine")
    own = ask(engine, tokens, cache_salt="mine")
    forget(engine)
    for salt in ({"cache_salt": "yours"}, {}):
        with shared_node.storing(2), shared_node.loading(0):
            assert ask(engine, tokens, **salt).cached_tokens == 0
    forget(engine)
    with shared_node.loading(2):
        assert_same(ask(engine, tokens, cache_salt="mine"), own)


def test_a_request_that_opts_out_is_neither_looked_up_nor_stored(
    engine: ServedEngine, shared_node: Node
) -> None:
    off = {"kv_transfer_params": {"kvtide": "off"}}
    tokens = prompt("opts out", CHUNK + 50)
    count = shared_node.count("miss.opted_out")
    with shared_node.storing(0):
        ask(engine, tokens, **off)
    forget(engine)
    with shared_node.storing(2):
        assert ask(engine, tokens).cached_tokens == 0
    forget(engine)
    with shared_node.loading(0):
        assert ask(engine, tokens, **off).cached_tokens == 0
    shared_node.wait(
        "both are counted",
        lambda status: status["counts"]["miss.opted_out"] == count + 2,
    )


def test_prompt_log_probabilities_skip_reading_but_are_stored(
    engine: ServedEngine, shared_node: Node
) -> None:
    tokens = prompt("skips", CHUNK + 50)
    with shared_node.storing(2), shared_node.loading(0):
        ask(engine, tokens, prompt_logprobs=0)
    forget(engine)
    with shared_node.loading(0):
        assert ask(engine, tokens, prompt_logprobs=0).cached_tokens == 0
    assert shared_node.wait_at_rest()["host"]["leases"] == 0
    forget(engine)
    with shared_node.loading(2):
        assert ask(engine, tokens).cached_tokens == CHUNK


# ---- requests that go


def test_a_client_that_leaves_while_its_blocks_load_leaves_nothing_behind(
    engine: ServedEngine, shared_node: Node
) -> None:
    """Aborts at all moments of a load of 92 MB; some meet it (asserted), and it ends in order."""
    tokens = prompt("leaves", 32 * BLOCK - 20)
    ask(engine, tokens, 1)
    shared_node.wait_at_rest()
    orphans_wanted = orphaned_loads(shared_node.status()) + 2
    delay_ms = 0
    while orphaned_loads(shared_node.status()) < orphans_wanted:
        assert delay_ms < 1000, "no abort met a load"
        forget(engine)
        with engine.stream(tokens, 4):
            time.sleep(delay_ms % 100 / 1000)  # a moment of its life, not a state to wait for
        wait_until("the request has gone", lambda: not request_count(engine))
        shared_node.wait_at_rest()
        delay_ms += 3
    own = ask(engine, tokens)
    forget(engine)
    assert_same(ask(engine, tokens), own)


def orphaned_loads(status: Status) -> int:
    """Loads whose request went away: the worker counts them, the scheduler does not."""
    counts = status["counts"]

    def observed(name: str) -> int:
        prefix, total = f"{name}.us.", f"{name}.us.sum"
        return sum(n for key, n in counts.items() if key.startswith(prefix) and key != total)

    return observed("load") - observed("retrieve")


def request_count(engine: ServedEngine) -> float:
    """Requests in the engine."""
    metrics = engine.metrics()
    return metrics["vllm:num_requests_running"] + metrics["vllm:num_requests_waiting"]
