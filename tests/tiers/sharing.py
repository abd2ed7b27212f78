"""A process that stores in a shared directory for as long as it lives: killed at any moment.

python sharing.py PATH CAP SEED      says "number" once the chain of that number is stored
"""

import sys
from itertools import count
from pathlib import Path

from kvtide.testing.tier_records import chain_of, text
from tests.tiers.shared_place import ROOT, SMALL, driven


def main() -> None:
    """Chains of two chunks and a tail each, one after the other."""
    path, cap, seed = sys.argv[1:]
    with driven(Path(path), int(cap)) as tier:
        for number in count(int(seed)):
            tier.keep(chain_of(ROOT, SMALL, text(number, 10)))
            print(number, flush=True)


if __name__ == "__main__":
    main()
