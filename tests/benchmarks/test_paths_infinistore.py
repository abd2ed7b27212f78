"""Arms on an InfiniStore server, measured: each brings back what it put."""

from pathlib import Path

import pytest

from benchmarks.paths_infinistore import arms_of
from benchmarks.places import DEPTHS, Memory, _warm, closing
from kvtide.testing import infinistore_servers
from kvtide.units import MiB
from tests.tiers.infinistore_place import needs_server

ROUND_BYTES = 16 * MiB
PIECE_BYTES = 4 * MiB


@needs_server
@pytest.mark.long
def test_arms_bring_back_what_they_put(tmp_path: Path) -> None:
    memory = Memory(ROUND_BYTES)
    with (
        infinistore_servers.running(tmp_path / "server") as server,
        closing(arms_of(server, memory, PIECE_BYTES)) as arms,
    ):
        for depth in DEPTHS:
            for way in ("put", "get", "put", "put", "put"):
                for name, arm in arms.all().items():
                    _warm(name, arm, way, depth)
