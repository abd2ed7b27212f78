"""Hits from disk beside hits from host memory, the engine's own, and computing: TTFT.

A round: the node is killed, so that nothing is in memory, and another one is started. Then each
prompt is asked for after the engine forgot it (from disk), again after it forgot (from host
memory), and once more (its own). Disk reads go past the page cache: there is none to drop. Cold is
a prompt of the same length that nobody sent before.
"""

import os
import signal
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from benchmarks.arms import DISK_NODE, DISK_SETTINGS, HOST_BYTES, Arm, serve
from benchmarks.prompts import Prompts
from benchmarks.report import Section
from benchmarks.reuse import reset
from benchmarks.stats import differences, spread
from kvtide.errors import KVTideError
from kvtide.testing.node_process import NodeProcess, node_pids, wait_dead
from kvtide.testing.serving import ServedEngine
from kvtide.wire.command import ask
from kvtide.wire.places import Places

OUTPUT_TOKENS = 4
ON_S_MAX = 30.0
WRITTEN_S_MAX = 30.0


@dataclass(frozen=True, slots=True)
class Size:
    """How much is measured."""

    lengths: Sequence[int]
    rounds: int
    warm_up_rounds: int


FULL = Size((508, 2008, 6008), rounds=12, warm_up_rounds=1)
QUICK = Size((508, 2008), rounds=2, warm_up_rounds=1)


@dataclass(slots=True)
class Taken:
    """TTFT of one length, in ms; entry n of all is of round n."""

    cold_ms: list[float] = field(default_factory=list)
    disk_ms: list[float] = field(default_factory=list)
    host_ms: list[float] = field(default_factory=list)
    own_ms: list[float] = field(default_factory=list)
    disk_tokens: set[int] = field(default_factory=set)
    own_tokens: set[int] = field(default_factory=set)


def run(size: Size) -> Section:
    """Measure, and make a section of it."""
    with serve([Arm.KVTIDE_DISK], "--max-model-len", "8192") as engines:
        table = _measure(size, engines[Arm.KVTIDE_DISK])
    return _section(size, table)


def _measure(size: Size, engine: ServedEngine) -> dict[int, Taken]:
    places = Places(engine.log.parent / DISK_NODE)
    prompts = Prompts(engine.tokenize, seed=5)
    kept = {length: prompts.make(length) for length in size.lengths}
    for prompt in kept.values():
        engine.complete(prompt, OUTPUT_TOKENS, ignore_eos=True)
    _wait_written(places)
    table = {length: Taken() for length in size.lengths}
    for number in range(size.warm_up_rounds + size.rounds):
        if number == size.warm_up_rounds:
            table = {length: Taken() for length in size.lengths}
        _kill_node(places)
        for length, prompt in kept.items():
            taken = table[length]
            for of_place, tokens in (
                (taken.disk_ms, taken.disk_tokens),
                (taken.host_ms, set[int]()),
                (taken.own_ms, taken.own_tokens),
            ):
                if of_place is not taken.own_ms:
                    reset(engine)
                engine.wait_idle()
                answer = engine.complete(prompt, OUTPUT_TOKENS, ignore_eos=True)
                of_place.append(answer.ttft_ms)
                tokens.add(answer.cached_tokens)
        print(f"  disk: round {number + 1} of {size.warm_up_rounds + size.rounds}", flush=True)
    for length, taken in table.items():
        for _ in range(min(7, size.rounds)):
            engine.wait_idle()
            cold = engine.complete(prompts.make(length), OUTPUT_TOKENS, ignore_eos=True)
            taken.cold_ms.append(cold.ttft_ms)
    return table


def _kill_node(places: Places) -> None:
    """Kill it, start another, and wait until the engine has that, and serves.

    (The engine would start one itself, but for nodes that die young again and again.)
    """
    (pid,) = node_pids(places.directory)
    os.kill(pid, signal.SIGKILL)
    assert wait_dead(pid, ON_S_MAX), pid
    settings = {name.removeprefix("KVTIDE_").lower(): v for name, v in DISK_SETTINGS.items()}
    disk_path = places.directory.parent / "disk"
    NodeProcess(places.directory, host_bytes=HOST_BYTES, disk_path=disk_path, **settings).launch()
    until_s = time.monotonic() + ON_S_MAX
    while time.monotonic() < until_s:
        time.sleep(0.1)
        with suppress(KVTideError):  # it is not up yet
            regions = ask(places, "status")["host"]["regions"]
            if any(region["open_to"] for region in regions):
                return
    raise AssertionError("no other node has come")


def _wait_written(places: Places) -> None:
    until_s = time.monotonic() + WRITTEN_S_MAX
    while time.monotonic() < until_s:
        status = ask(places, "status")
        is_storing = status["entries"]["storing"] or status["host"]["grants"]
        if not is_storing and not status["tiers"]["disk"]["queued_bytes"]:
            return
        time.sleep(0.1)
    raise AssertionError("the disk is still being written")


def _section(size: Size, table: dict[int, Taken]) -> Section:
    section = Section(
        title="Hits from disk",
        text=f"TTFT in ms, median and middle half of {size.rounds} rounds; added: the median"
        " difference to the engine's own hit, with its 95 % interval.",
        header=(
            *("tokens", "cold", "own hit", "host hit", "added", "disk hit", "added"),
            *("tokens hit on disk", "own"),
        ),
    )
    for length, taken in table.items():
        section.rows.append(
            (
                str(length),
                str(spread(taken.cold_ms)),
                str(spread(taken.own_ms)),
                str(spread(taken.host_ms)),
                differences(taken.host_ms, taken.own_ms).difference(),
                str(spread(taken.disk_ms)),
                differences(taken.disk_ms, taken.own_ms).difference(),
                "/".join(map(str, sorted(taken.disk_tokens))),
                "/".join(map(str, sorted(taken.own_tokens))),
            )
        )
        section.check(
            f"a hit from disk at {length}",
            "as long as the engine's own, and quicker than computing",
            f"{spread(taken.disk_ms).median:.0f} ms instead of {spread(taken.cold_ms).median:.0f}",
            taken.disk_tokens == taken.own_tokens
            and spread(taken.disk_ms).median < spread(taken.cold_ms).median,
        )
    section.data["taken"] = {
        str(length): {
            "cold_ms": taken.cold_ms,
            "disk_ms": taken.disk_ms,
            "host_ms": taken.host_ms,
            "own_ms": taken.own_ms,
        }
        for length, taken in table.items()
    }
    return section
