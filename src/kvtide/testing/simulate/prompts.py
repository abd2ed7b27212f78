"""What requests of a world ask for, and what every engine must answer."""

from functools import lru_cache

from kvtide.testing.simulate.blocks import Adapter
from kvtide.testing.toy_engine import generated

VOCABULARY = 97
SALTS = (None, None, None, "a", None, "b")
PATHS = ("/adapters/one", "/adapters/two")
ADAPTERS = (None, None, None, None, Adapter(1, PATHS[0]), Adapter(2, PATHS[1]))
FAMILIES = 4
WORDS_MAX = 90
"""Of its family, that a prompt begins with."""


def kv_number(weights: int, adapter: Adapter | None, version: int, salt: str | None) -> int:
    """What KV is computed with: weights, and which bytes of an adapter.

    A salt counts, too: so what it must keep apart is told apart.
    """
    adapted = (adapter.lora_int_id if adapter else 0) * 2 + version
    return (weights * 8 + adapted) * 4 + ((salt or " ").encode()[0] & 3)


@lru_cache(4096)
def stream(family: int) -> list[int]:
    """The words that the prompts of a family begin with."""
    found, state = [], family + 1
    for _ in range(WORDS_MAX):
        state = (state * 1103515245 + 12345) % (1 << 31)
        found.append(state // 65536 % VOCABULARY)
    return found


def prompt(family: int, length: int, more: int) -> list[int]:
    """A prompt: the beginning of its family's words, then some of its own."""
    shared = length % WORDS_MAX
    own = [(more >> shift) % VOCABULARY for shift in range(0, more % 24)]
    tokens = stream(family)[:shared] + own
    return tokens or [family + 1] * 4


@lru_cache(20_000)
def answer(tokens: tuple[int, ...], count: int, weights: int, shards: int) -> list[int]:
    """What every engine must answer; `weights` as `kv_number` says it."""
    return generated(tokens, count, VOCABULARY, shard_count=shards, weights=weights)
