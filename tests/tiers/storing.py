"""A process that stores for as long as it lives: killed at any moment by `test_disk_restart`.

python storing.py PATH CAP SEED      says "number" once the chain of that number is stored
"""

import random
import sys
import threading
from pathlib import Path

from kvtide.testing.tier_drive import DrivenTier
from kvtide.testing.tier_records import chain_of, layout_of, root_of, text
from kvtide.tiers.base import StoreOutcome
from kvtide.tiers.disk.tier import DiskTier
from kvtide.units import KiB

LAYOUT = layout_of(4 * KiB, 8 * KiB)
ROOT = root_of()
CHAIN_BLOCKS = 10


def main() -> None:
    """Store chains, clear some, until the end comes."""
    path, cap, seed = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    draw = random.Random(seed)
    woken = threading.Event()
    tier = DiskTier(
        path,
        cap,
        woken.set,
        floor_bytes=0,
        segment_bytes=draw.choice([128 * KiB, 512 * KiB]),
        sync=draw.choice(["none", "sealed", "each"]),
    )
    driven = DrivenTier(tier, woken, 30)
    number = 1_000 * seed
    while True:
        records = chain_of(ROOT, LAYOUT, text(number, CHAIN_BLOCKS))
        jobs = [driven.submit_store(record) for record in records]
        if all(driven.stored(job) is StoreOutcome.STORED for job in jobs):
            print(number, flush=True)
        if draw.random() < 0.2:
            doomed = chain_of(root_of(salt="doomed"), LAYOUT, text(number, CHAIN_BLOCKS))
            driven.store(doomed)
            tier.clear(doomed[0].root.salt_digest)
        number += 1


if __name__ == "__main__":
    main()
