"""Prompts of random words from a fixed list, cut to an exact number of tokens.

Random, so that no two share a prefix unless they are to; words, so that the tokens are usual ones;
never one word again and again, which would make all prompts alike and any cache look good.
"""

import random
from collections.abc import Callable

_LINES = (
    "anchor basin bridge cabin canal candle carbon castle chapel circle cloud coast copper corner",
    "cotton desert dinner doctor dragon engine fabric falcon farmer ferry field finger flower",
    "forest garden glass golden hammer harbor hollow honey island jacket kettle kitchen ladder",
    "lantern leather letter library market meadow mirror monkey morning mountain needle ocean",
    "orange orchard palace paper pepper pillow planet pocket prairie rabbit ribbon river rocket",
    "saddle salmon school shadow signal silver sister soldier spring station stone summer table",
    "temple thunder tiger timber tower tunnel valley velvet village violin wagon walnut water",
    "weather whisper window winter wonder yellow",
)
WORDS = " ".join(_LINES).split()


class Prompts:
    """Makes prompts, each a list of token ids; the same ones for the same seed."""

    def __init__(self, tokenize: Callable[[str], list[int]], seed: int) -> None:
        """`tokenize` is an engine's: all arms serve the same model."""
        self._tokenize = tokenize
        self._random = random.Random(seed)

    def make(self, token_count: int) -> list[int]:
        """A prompt that was not made before, of exactly so many tokens."""
        # A word is one token at least, so as many words suffice.
        words = self._random.choices(WORDS, k=token_count)
        token_ids = self._tokenize(" " + " ".join(words))
        assert len(token_ids) >= token_count, (len(token_ids), token_count)
        return token_ids[:token_count]
