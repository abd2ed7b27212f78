"""Prompts of random tokens: every block of every prompt is different from all others."""

import random

TOKEN_FIRST, TOKEN_END = 1_000, 48_000
"""Ordinary tokens of SmolLM2's vocabulary, far from the special ones."""


def prompt(seed: int | str, length: int) -> list[int]:
    """Always the same tokens for the same seed; a longer one begins with a shorter one's."""
    source = random.Random(f"kvtide {seed}")
    return [source.randrange(TOKEN_FIRST, TOKEN_END) for _ in range(length)]
