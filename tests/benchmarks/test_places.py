"""Places below the host, measured: arms bring back what they put, and cells are judged rightly."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from benchmarks.outside import Directory, Valkey
from benchmarks.paths_disk import Taken
from benchmarks.paths_redis import Plain, Popular
from benchmarks.paths_shared_dir import Files
from benchmarks.places import (
    AGAIN,
    FULL,
    QUICK,
    TIER,
    Arm,
    Cell,
    Here,
    Memory,
    Tier,
    _warm,
    judge,
)
from kvtide.testing import redis_servers
from kvtide.testing.redis_servers import Server
from kvtide.units import MiB

PIECE_BYTES = MiB
CAP_BYTES = 64 * MiB


@pytest.fixture(scope="module")
def memory() -> Memory:
    """Of small rounds."""
    return Memory(8 * PIECE_BYTES)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with redis_servers.running("valkey", tmp_path_factory.mktemp("server")) as one:
        yield one


def redis_tier(server: Server, memory: Memory) -> Tier:
    url = f"redis://127.0.0.1:{server.port}"
    return Tier(memory, PIECE_BYTES, type="redis", url=url, bytes_max=CAP_BYTES)


ARMS: dict[str, Callable[[Server, Memory, Path], Arm]] = {
    "values": lambda server, memory, _: Plain(server, "v", memory, PIECE_BYTES, 300_000),
    "whole": lambda server, memory, _: Plain(server, "w", memory, PIECE_BYTES),
    "two": lambda server, memory, _: Plain(server, "t", memory, PIECE_BYTES, connections=2),
    "redis-py": lambda server, memory, _: Popular(server, memory, PIECE_BYTES),
    "redis": lambda server, memory, _: redis_tier(server, memory),
    "files": lambda _, memory, path: Files(path / "files", memory, PIECE_BYTES),
    "shared_dir": lambda _, memory, path: Tier(
        memory, PIECE_BYTES, type="shared_dir", path=str(path / "kv"), bytes_max=CAP_BYTES
    ),
}


@pytest.mark.parametrize("depth", [1, 4])
@pytest.mark.parametrize("name", ARMS)
def test_an_arm_brings_back_what_it_has_put(
    server: Server, memory: Memory, tmp_path: Path, name: str, depth: int
) -> None:
    """All of it, round after round."""
    arm = ARMS[name](server, memory, tmp_path)
    for _ in range(3):
        _warm(name, arm, "put", depth)
    _warm(name, arm, "get", depth)
    arm.close()
    assert memory.is_whole()


class Idle(Here):
    """Does nothing, very quickly."""

    def put(self, depth: int) -> None: ...

    def get(self, depth: int) -> None: ...

    def close(self) -> None: ...


def test_an_arm_that_does_nothing_is_not_measured() -> None:
    with pytest.raises(AssertionError, match="does not bring back"):
        _warm("idle", Idle(Memory(PIECE_BYTES)), "get", 1)


def cell(tier_s: float, rounds: int = 21) -> Cell:
    """Rounds that become slower for all; the second plain loop is the faster one."""
    paces = [1 + number / 10 for number in range(rounds)]

    def taken(wall_s: float, every: int = 1) -> Taken:
        return Taken([wall_s * pace for pace in paces[::every]], [0.1 for _ in paces[::every]])

    arms = {"plain": taken(0.5), "whole": taken(0.4), AGAIN: taken(0.5), TIER: taken(tier_s)}
    return Cell(MiB, "get", 4, ("plain", "whole"), arms | {"other": taken(0.8, every=3)})


@pytest.mark.parametrize(("tier_s", "is_met"), [(0.5, True), (0.51, False)])
def test_the_tier_is_judged_by_the_fastest_plain_loop(
    tier_s: float, *, is_met: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    one = cell(tier_s)
    assert one.fastest == "whole"
    assert one.is_met is is_met
    assert judge({"valkey": [one]}, QUICK) == 0
    assert judge({"valkey": [one]}, FULL) == (0 if is_met else 1)
    shown = capsys.readouterr().out
    assert ("0.80 " if is_met else "0.78*") in shown
    assert sum("missed" in line for line in one.lines()) == (0 if is_met else 1)


def test_who_takes_part_in_every_third_round_is_compared_with_those() -> None:
    ratio = cell(0.5).ratio("other")
    assert ratio.spread.count == 7
    assert ratio.interval.low == pytest.approx(0.5)
    assert ratio.interval.high == pytest.approx(0.5)


def test_what_a_server_has_sent_is_seen_from_outside(server: Server, memory: Memory) -> None:
    outside, arm = Valkey(server), Plain(server, "seen", memory, PIECE_BYTES)
    arm.put(1)
    before = outside.read_bytes([])
    assert outside.read_bytes([]) - before < PIECE_BYTES
    arm.get(1)
    assert 0 <= outside.read_bytes([]) - before - 8 * PIECE_BYTES < PIECE_BYTES
    arm.close()


def test_what_a_process_had_from_its_drive_is_seen_from_outside(
    memory: Memory, tmp_path: Path
) -> None:
    """This process: each read of it goes past the page cache."""
    arm = Files(tmp_path / "files", memory, PIECE_BYTES)
    arm.put(1)
    outside, me = Directory(tmp_path), [os.getpid()]
    before = outside.read_bytes(me)
    arm.get(1)
    arm.close()
    if outside.read_bytes(me) == before:
        pytest.skip("the directory is in memory: nothing comes from a drive")
    assert outside.read_bytes(me) - before >= 8 * PIECE_BYTES
