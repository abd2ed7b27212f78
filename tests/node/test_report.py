"""What status says of a machine, without a process: faults must be seen, and sums be right."""

import random
import re
from pathlib import Path
from typing import Any

import pytest

from kvtide.core import messages as m
from kvtide.core.index import Entry
from kvtide.metrics import LABELS_MAX, METRICS, render
from kvtide.node import report
from tests.core.world import Engine, World, prompt


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


def test_values_of_labels_are_all_that_the_code_counts(world: World) -> None:
    """What is counted under another name would begin with 1, and no page would explain it."""
    counted = re.compile(r"\"(tokens|lookups)\.(\w+)\"")
    found: dict[str, set[str]] = {"tokens": set(), "lookups": set()}
    for path in Path(report.__file__).parents[1].rglob("*.py"):
        for name, value in counted.findall(path.read_text(encoding="utf-8")):
            found[name].add(value)
    assert found == {name: set(report.LABELS[f"{name}."]) for name in found}


def test_engines_that_are_off_are_counted_by_reason(world: World) -> None:
    """By their own word as well as by the node's."""
    one = Engine(world, "one")
    one.connect_scheduler()
    one.identify(off_reason="groups", off_detail="two of them")
    other = Engine(world, "other", cell_bytes=1024 * 1024)
    other.start()
    text = render(report.numbers(world.machine, {}, {}))
    assert 'kvtide_engines_off_total{reason="groups"} 1\n' in text
    assert 'kvtide_engines_off_total{reason="host_too_small"} 1\n' in text
    assert 'kvtide_engines_off_total{reason="device"} 0\n' in text


def test_how_long_a_store_took_is_counted_once_all_workers_have_copied_it(world: World) -> None:
    engine = Engine(world, workers=2).start()
    fine, failed = (engine.offer(prompt(part)).grants[0] for part in (1, 2))
    world.now_ms += 250
    engine.stored([fine], ranks=[0])
    engine.stored([failed], ranks=[0], ok=False)
    engine.stored([failed], ranks=[1])
    assert "kvtide_stored_after_seconds_count 0\n" in render(report.numbers(world.machine, {}, {}))
    engine.stored([fine], ranks=[1])
    text = render(report.numbers(world.machine, {}, {}))
    assert "kvtide_stored_after_seconds_sum 0.250000\n" in text
    assert "kvtide_stored_after_seconds_count 1\n" in text


def test_every_value_of_a_label_is_given_from_the_start(world: World) -> None:
    text = render(report.numbers(world.machine, {}, {}))
    for metric in METRICS:
        for value in report.LABELS.get(metric.source, ()):
            assert f'{metric.name}{{{metric.labels[0]}="{value}"}} 0\n' in text


def test_words_of_engines_crowd_none_of_ours_out(world: World) -> None:
    left = {f"miss.a{number}": 1 for number in range(LABELS_MAX * 2)}
    text = render(report.numbers(world.machine, left, {}))
    assert 'kvtide_misses_total{reason="waited_too_long"} 0\n' in text
    assert text.count("kvtide_misses_total{") == LABELS_MAX + 1


def counted(world: World) -> dict[str, int]:
    """The numbers that status gives, counted entry by entry."""
    entries = list(world.machine.index.entries.values())
    kept: set[Entry] = set()
    for entry in entries:
        node: Any = entry
        while isinstance(node, Entry) and (entry.pins or not entry.is_held):
            kept.add(node)
            node = node.parent
    return {
        "chunks": sum(entry.is_held and entry.is_whole for entry in entries),
        "tails": sum(entry.is_held and not entry.is_whole for entry in entries),
        "storing": sum(not entry.is_held for entry in entries),
        "evictable_bytes": sum(
            entry.blocks * entry.layout.block_bytes for entry in entries if entry not in kept
        ),
    }


@pytest.mark.parametrize("seed", range(3))
def test_running_sums_are_those_of_a_count_over_all_entries(world: World, seed: int) -> None:
    draw = random.Random(seed)
    engine = Engine(world).start()
    leases: list[int] = []
    for _ in range(400):
        world.now_ms += 1
        tokens = prompt(*draw.choices(range(1, 5), k=4), blocks=draw.randint(1, 4))
        tokens = tokens[: draw.randint(2, len(tokens))]
        step = draw.choice(["offer", "store", "store", "lease", "lease", "release", "answer"])
        if step == "offer":
            engine.offer(tokens)
        elif step == "store":
            engine.store(tokens)
        elif step == "lease":
            match = engine.lookup(tokens, keeps=True)
            assert isinstance(match, m.Match)
            leases.append(match.lease)
        elif step == "release" and leases:
            engine.say(m.LeaseRelease(leases.pop(draw.randrange(len(leases)))))
        elif step == "answer":
            engine.stored(
                draw.sample(list(world.machine.lending.grants), k=1)
                if world.machine.lending.grants
                else [],
                ok=draw.random() < 0.8,
            )
        if draw.random() < 0.01:
            world.machine.clear(None)
        status = report.status(world.machine, {}, 0, [], {})
        found = status["entries"] | {"evictable_bytes": status["host"]["evictable_bytes"]}
        assert found == counted(world)
