"""Arms on a Mooncake Store, measured: each brings back what it put, and holds no more."""

from collections.abc import Iterator

import pytest

from benchmarks.paths_mooncake import LEASE_MS, Binding, arms_of
from benchmarks.places import DEPTHS, HELD_ROUNDS, Memory, _warm, closing
from kvtide.testing import mooncake_servers
from kvtide.testing.mooncake_servers import Store
from kvtide.units import MiB
from tests.tiers.mooncake_place import needs_client

pytestmark = [needs_client, pytest.mark.long]
ROUND_BYTES = 8 * MiB
PIECE_BYTES = 2 * MiB
BESIDE_BYTES = MiB
"""Headers and small values of a round."""


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    with mooncake_servers.running(tmp_path_factory.mktemp("store"), 256 * MiB, LEASE_MS) as one:
        yield one


def test_arms_bring_back_what_they_put_and_hold_no_more(store: Store) -> None:
    memory = Memory(ROUND_BYTES)
    binding = Binding(store, memory)
    with closing(arms_of(store, binding, memory, PIECE_BYTES)) as arms:
        for depth in DEPTHS:
            for way in ("put", "get", "put", "put", "put"):
                for name, arm in arms.all().items():
                    _warm(name, arm, way, depth)
        held_bytes = HELD_ROUNDS * len(arms.all()) * (ROUND_BYTES + BESIDE_BYTES)
        assert ROUND_BYTES < store.numbers().bytes_used <= held_bytes
    binding.calls.close()
