"""What makes two answers the same, and two worlds in one engine to get them from.

The oracle (contract, N_diff): an answer from kvtide's KV against the answer from the engine's own
prefix cache, hits of the same length, the shapes of all steps the same, also of those that made
the KV. Then tokens are equal and log-probabilities are bitwise equal: the bytes of the KV are.
Against a cold run they need not be.

A salt opens a world of its own, in the engine's cache and in kvtide alike, in which nothing has
happened yet. So one conversation is held twice: in one world the engine keeps its cache between
turns, in the other it is made to forget it.
"""

from typing import Any

from kvtide.testing.completions import Completion
from kvtide.testing.serving import ServedEngine
from tests.engine.prompts import prompt


def ask(engine: ServedEngine, asked: list[int], tokens: int = 8, **extra: Any) -> Completion:
    """A greedy answer of exactly so many tokens, with log-probabilities."""
    answer = engine.complete(asked, tokens, logprobs=True, ignore_eos=True, **extra)
    assert len(answer.token_ids) == len(answer.logprobs) == tokens, answer
    assert answer.prompt_tokens == len(asked)
    return answer


def forget(engine: ServedEngine) -> None:
    """Make the engine forget its own cache, and nothing else."""
    assert engine.reset_prefix_cache(), "the engine refused: blocks are in use"


def is_same(one: Completion, other: Completion) -> bool:
    """Tokens equal, log-probabilities bitwise."""
    return one.token_ids == other.token_ids and one.logprobs == other.logprobs


def assert_same(ours: Completion, own: Completion) -> None:
    """Equal, from hits of equal length."""
    assert ours.cached_tokens == own.cached_tokens, (ours.cached_tokens, own.cached_tokens)
    assert ours.token_ids == own.token_ids, (ours.token_ids, own.token_ids)
    assert ours.logprobs == own.logprobs, (ours.logprobs, own.logprobs)


def own_hit(engine: ServedEngine, tokens: list[int], length: int, **extra: Any) -> Completion:
    """The answer from a hit of the engine's own of the first `length` tokens, whole blocks.

    They are those of a prompt as long as this one: where a kernel is chosen by a batch's shape, a
    prompt of another length has other last bits in its KV. In the world of `extra` nothing of
    `tokens` has been asked before.
    """
    if length:
        ask(engine, [*tokens[:length], *prompt("behind it", len(tokens) - length)], **extra)
    answer = ask(engine, tokens, **extra)
    assert answer.cached_tokens == length
    return answer


def whole_blocks(tokens: int, block_tokens: int) -> int:
    """Tokens of the whole blocks that a prompt may take from a cache: one is left to compute."""
    return (tokens - 1) // block_tokens * block_tokens


TIE = 1e-3
"""Log-probabilities of float32 that batches of another shape may move: seen below 2e-5. Wrong KV
moves them by more than 0.01."""


def assert_close(ours: Completion, reference: Completion) -> None:
    """Equal but for rounding: for answers that were computed in the company of others.

    Where the two best tokens tie, either may be chosen; from there on the answers differ rightly.
    """
    assert len(ours.token_ids) == len(reference.token_ids)
    for position, (one, other) in enumerate(zip(ours.logprobs, reference.logprobs, strict=True)):
        assert abs(one - other) < TIE, (position, one, other)
        if ours.token_ids[position] != reference.token_ids[position]:
            return
