"""What status says of a machine, without a process: faults must be seen, and sums be right."""

import pytest

from kvtide.core import messages as m
from kvtide.node import report
from tests.core.world import Engine, World


@pytest.fixture
def world() -> World:
    return World()


def test_memory_that_the_machine_refused_is_shown_with_its_reason(world: World) -> None:
    world.memory_cells = 16
    engine = Engine(world).start()
    assert report.host(world.machine)["refusal"] == ""
    for part in range(1, 5):
        engine.store([part] * 8)
    host = report.host(world.machine)
    assert (host["refusal"], host["reachable_bytes"]) == ("no more memory", 16 * 4096)
    assert host["limit_bytes"] == host["size_bytes"]


def test_a_region_that_a_worker_could_not_map_is_shown_with_its_reason(world: World) -> None:
    engine = Engine(world)
    engine.maps = False
    engine.start()
    engine.tell(0, m.RegionFailed(100, "no locked memory left"))
    first, second = report.host(world.machine)["regions"]
    wanted = "process 2000 (rank 0) cannot map region 100: no locked memory left"
    assert first["refused"] == [wanted]
    assert second["refused"] == []
