"""A process that stores in a shared directory until it is killed, at any moment.

python sharing.py PATH CAP SEED      says "number" once the chain of that number is stored
"""

import signal
import sys
from pathlib import Path

from kvtide.testing.tier_records import chain_of, text
from tests.tiers.shared_place import ROOT, SMALL, driven

CHAINS_MAX = 16
"""Fewer than the cap has room for: none is evicted before the kill comes."""


def main() -> None:
    """Chains of two chunks and a tail each, one after the other."""
    path, cap, seed = sys.argv[1:]
    with driven(Path(path), int(cap)) as tier:
        for number in range(int(seed), int(seed) + CHAINS_MAX):
            tier.keep(chain_of(ROOT, SMALL, text(number, 10)))
            print(number, flush=True)
        signal.pause()


if __name__ == "__main__":
    main()
