"""A hit is as long as the engine's own prefix cache would make it, and changes no output.

vLLM's own scheduler and KVTideConnector as vLLM builds it, over the toy model, in which one wrong
byte of KV changes every token behind it.
"""

import itertools
import uuid
from typing import Any

import pytest

from kvtide.testing.vllm_toy import ToyOptions
from tests.engines.vllm.connector.toys import (
    Toys,
    accounts,
    assert_right,
    blocks_of,
    own_hit,
    tokens,
)

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("patient")]

BLOCK = 16
GENERATED = 3


def edges(chunk_blocks: int) -> list[int]:
    """Lengths from one token to four chunks, around every block's edge."""
    ends = range(BLOCK, (4 * chunk_blocks + 1) * BLOCK, BLOCK)
    return [1, *itertools.chain.from_iterable((end - 1, end, end + 1) for end in ends)]


def slices(chunk_blocks: int) -> list[int]:
    """Step budgets: one block, odd ones, one chunk and more, everything at once."""
    chunk = chunk_blocks * BLOCK
    return sorted({BLOCK, BLOCK + 8, 2 * BLOCK, 3 * BLOCK, chunk, chunk + BLOCK, 4 * chunk + 1})


QUICK = [(1, 16), (3, 24), (4, 64)]
ALL = [(chunk, step) for chunk in range(1, 9) for step in slices(chunk)]
SLOW = [case for case in ALL if case not in QUICK]


quick_and_slow = pytest.mark.parametrize(
    ("chunk_blocks", "step_tokens"),
    [*QUICK, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW)],
)


def options(chunk_blocks: int, step_tokens: int, **others: Any) -> ToyOptions:
    """An engine that never runs out of blocks."""
    return ToyOptions(
        chunk_tokens=chunk_blocks * BLOCK, step_tokens=step_tokens, block_count=4096, **others
    )


@pytest.mark.parametrize("is_async", [False, True])
@quick_and_slow
def test_a_hit_equals_the_engines_own_at_every_length(
    toys: Toys, chunk_blocks: int, step_tokens: int, is_async: bool
) -> None:
    """Cold; from the engine's own cache; from kvtide after a reset. All blocks have an outcome."""
    engine = toys.start(options(chunk_blocks, step_tokens, is_async=is_async))
    prompts = [tokens(length) for length in edges(chunk_blocks)]
    with accounts() as taken:
        for prompt in prompts:
            assert_right(engine.generate(prompt, GENERATED), GENERATED)
    toys.rest()
    assert blocks_of(taken) == sum((len(prompt) + GENERATED - 1) // BLOCK for prompt in prompts)
    own = [engine.generate(prompt, GENERATED).local for prompt in prompts]
    assert own == [own_hit(len(prompt), len(prompt)) for prompt in prompts]
    assert engine.reset()
    for prompt, hit in zip(prompts, own, strict=True):
        result = engine.generate(prompt, GENERATED)
        assert_right(result, GENERATED)
        assert (result.external, result.local) == (hit, 0), len(prompt)


@pytest.mark.parametrize("is_async", [False, True])
@quick_and_slow
def test_later_turns_hit_as_in_an_engine_that_forgets_nothing(
    toys: Toys, chunk_blocks: int, step_tokens: int, is_async: bool
) -> None:
    """Conversations grow by what was generated and asked; one engine forgets between turns.

    Each has a salt: what follows one token of a toy is the same for all who begin with it.
    """
    engine = toys.start(options(chunk_blocks, step_tokens, is_async=is_async))
    twin = toys.start(options(chunk_blocks, step_tokens, is_async=is_async, connector=False))
    for first in range(1, 3 * BLOCK, 5):
        prompt, salt = tokens(first), uuid.uuid4().hex
        for turn, count in enumerate((BLOCK - 1, 3, chunk_blocks * BLOCK + 1, 1)):
            result, own = (one.generate(prompt, count, salt=salt) for one in (engine, twin))
            assert_right(result, count)
            assert result.hit == own.local, (first, turn)
            assert result.local == 0, "the engine forgot"
            prompt = [*prompt, *result.tokens, *tokens(7 + turn)]
            toys.rest(engine)
            assert engine.reset()


OFF = {"kv_transfer_params": {"kvtide": "off"}}


@pytest.mark.parametrize("chunk_blocks", [1, 3])
def test_a_hit_goes_on_behind_what_the_engine_has(toys: Toys, chunk_blocks: int) -> None:
    """Every number of blocks in the engine's own cache beside every number that kvtide holds: what
    is there is left alone, and each other block is loaded once.
    """
    engine = toys.start(options(chunk_blocks, 64))
    for held in range(1, 2 * chunk_blocks + 2):
        prompt = tokens(held * BLOCK + 1)
        assert_right(engine.generate(prompt), 1)
        toys.rest()
        for local in range(held + 1):
            assert engine.reset()
            if local:
                assert_right(engine.generate(prompt[: local * BLOCK + 1], extra_args=OFF), 1)
            before = toys.node.count("loaded_blocks")
            result = engine.generate([*prompt, *tokens(8)])
            assert_right(result, 1)
            assert (result.local, result.external) == (local * BLOCK, (held - local) * BLOCK)
            toys.rest()
            assert toys.node.count("loaded_blocks") - before == held - local
