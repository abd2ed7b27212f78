"""Arms on a bucket, measured: each brings back what it put, and holds no more than it says."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from benchmarks.paths_s3 import CAP_BYTES_MIN, Objects, Popular, ReadyTier
from benchmarks.places import DEPTHS, HELD_ROUNDS, Arm, Memory, _warm
from kvtide.testing import object_servers
from kvtide.testing.object_servers import Server
from kvtide.units import MiB
from tests.tiers.s3_place import Bucket

ROUND_BYTES = 2 * MiB
PIECE_BYTES = MiB


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with object_servers.running("rclone", tmp_path_factory.mktemp("server")) as one:
        yield one


ARMS: dict[str, Callable[[Server, Memory, Path], Arm]] = {
    "plain": lambda server, memory, _: Objects(server, "p", memory, PIECE_BYTES, PIECE_BYTES),
    "cut": lambda server, memory, _: Objects(server, "c", memory, PIECE_BYTES, 300_000),
    "boto3": lambda server, memory, _: Popular(server, memory, PIECE_BYTES),
    "kvtide": lambda server, memory, path: ReadyTier(server, path / "tier", memory, PIECE_BYTES),
}


@pytest.mark.parametrize("name", ARMS)
def test_an_arm_brings_back_what_it_put_and_makes_room(
    server: Server, tmp_path: Path, name: str
) -> None:
    bucket = Bucket(server.port)
    bucket.clear()
    memory = Memory(ROUND_BYTES)
    arm = ARMS[name](server, memory, tmp_path)
    try:
        for depth in DEPTHS:
            for way in ("put", "get", "put", "put", "put"):
                _warm(name, arm, way, depth)
        held_bytes = CAP_BYTES_MIN if name == "kvtide" else HELD_ROUNDS * ROUND_BYTES
        assert ROUND_BYTES <= bucket.bytes_taken() <= held_bytes
    finally:
        arm.close()
