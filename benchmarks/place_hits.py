"""Hits from a place below host memory beside hits from memory, the engine's own, and computing.

All arms live at once and take turns, round by round, the others idle. When a turn begins nothing
is in memory: kvtide's node is killed and another one started, LMCache's server is told to clear
its memory. Each prompt is then asked for after the engine forgot it (from the place), again after
it forgot (from host memory), and once more (its own). That it does come from the place is seen
from outside: by what the kernel says that their processes had from the drive, past the page cache,
or by what the server says that it has sent.

Cold is a prompt of the same length that nobody sent before.
"""

import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from benchmarks.arms import Arm, Running, run_all
from benchmarks.lmcache_server import CHUNK_TOKENS
from benchmarks.plain import BLOCK_TOKENS, LAYERS, PAGE_BYTES
from benchmarks.prompts import Prompts
from benchmarks.report import Section
from benchmarks.reuse import reset
from benchmarks.stats import PAIRS_MIN, Comparison, differences, rotated, spread
from kvtide.errors import KVTideError
from kvtide.testing.completions import Completion, ServingError
from kvtide.testing.node_process import NodeProcess, node_pids, wait_dead
from kvtide.testing.serving import ServedEngine
from kvtide.units import MiB
from kvtide.wire.command import ask
from kvtide.wire.places import Places

TOKEN_BYTES = LAYERS * PAGE_BYTES // BLOCK_TOKENS
OUTPUT_TOKENS = 4
WAKE_TOKENS = 32  # no whole block: no turn begins with an engine that has been idle
ON_S_MAX = 30.0
WRITTEN_S_MAX = 30.0


@dataclass(frozen=True, slots=True)
class Size:
    """How much is measured."""

    lengths: Sequence[int]
    rounds: int
    warm_up_rounds: int
    cold_rounds: int  # 7 s each at 6,008 tokens


FULL = Size((508, 2008, 6008), rounds=20, warm_up_rounds=1, cold_rounds=5)
QUICK = Size((508, 2008), rounds=2, warm_up_rounds=1, cold_rounds=1)


@dataclass(frozen=True, slots=True)
class Subject:
    """What one part of the benchmark is about.

    Attributes:
        title: of its table.
        place: in the words of the table's columns, such as "disk".
        arms: those that are compared; cold prompts go to the first.
        rivals: which of LMCache's arms each of ours is held against, where there is one.
    """

    title: str
    place: str
    arms: Sequence[Arm]
    rivals: Mapping[Arm, Arm | None]


@dataclass(slots=True)
class Taken:
    """TTFT of one arm and length, in ms; entry n of below, host and own is of round n."""

    cold_ms: list[float] = field(default_factory=list)
    below_ms: list[float] = field(default_factory=list)
    host_ms: list[float] = field(default_factory=list)
    own_ms: list[float] = field(default_factory=list)
    below_tokens: set[int] = field(default_factory=set)
    own_tokens: set[int] = field(default_factory=set)
    read_bytes: list[int] = field(default_factory=list)  # from the place, of each hit from there

    def added(self) -> Comparison:
        """What a hit from the place adds to the own one."""
        return differences(self.below_ms, self.own_ms)


Table = dict[int, dict[Arm, Taken]]


def run(size: Size, subject: Subject) -> Section:
    """Measure, and make a section of it."""
    with run_all(subject.arms, "--max-model-len", "8192") as running:
        table = _measure(size, subject, running)
    return section(size, subject, table)


def _measure(size: Size, subject: Subject, running: Running) -> Table:
    sides: dict[Arm, Ours | Theirs] = {
        arm: Ours(running, arm) if arm in subject.rivals else Theirs(running, arm)
        for arm in subject.arms
    }
    first = sides[subject.arms[0]]
    prompts = Prompts(first.engine.tokenize, seed=5)
    kept = {length: prompts.make(length) for length in size.lengths}
    for side in sides.values():
        for prompt in kept.values():
            _ask(side.engine, prompt)
        side.wait_written(size.lengths)
    table = _empty(size, subject)
    for number in range(size.warm_up_rounds + size.rounds):
        if number == size.warm_up_rounds:
            table = _empty(size, subject)
        for arm in rotated(subject.arms, number):
            sides[arm].begin()
            for engine in running.engines.values():
                engine.wait_idle()
            _ask(sides[arm].engine, prompts.make(WAKE_TOKENS))
            for length, prompt in kept.items():
                _turn(sides[arm], prompt, table[length][arm])
        print(f"  round {number + 1} of {size.warm_up_rounds + size.rounds}", flush=True)
    for _ in range(size.cold_rounds):
        for length in size.lengths:
            first.engine.wait_idle()
            cold = _ask(first.engine, prompts.make(length))
            table[length][subject.arms[0]].cold_ms.append(cold.ttft_ms)
    return table


def _empty(size: Size, subject: Subject) -> Table:
    return {length: {arm: Taken() for arm in subject.arms} for length in size.lengths}


class Ours:
    """kvtide, whose node is another one in every turn."""

    def __init__(self, running: Running, arm: Arm) -> None:
        self.engine = running.engines[arm]
        self._node = running.nodes[arm]
        self._places = Places(self._node.directory)
        self._place = running.places[arm]

    def wait_written(self, lengths: Sequence[int]) -> None:
        """Wait until all is in the place."""
        del lengths  # the node knows what it has to write

        def is_written() -> bool:
            status = ask(self._places, "status")
            is_storing = status["entries"]["storing"] or status["host"]["grants"]
            (tier,) = status["tiers"].values()
            return not is_storing and not tier["queued_bytes"]

        _wait("kvtide is writing chunks", is_written, WRITTEN_S_MAX)

    def begin(self) -> None:
        """Kill the node, start another, and wait until the engine has that, and serves.

        It knows by then what is in the place: a tier that mirrors that is on only afterwards.
        (The engine would start one itself, but for nodes that die young again and again.)
        """
        (pid,) = node_pids(self._places.directory)
        os.kill(pid, signal.SIGKILL)
        assert wait_dead(pid, ON_S_MAX), pid
        NodeProcess(self._places.directory, **self._node.settings).launch()

        def is_on() -> bool:
            with suppress(KVTideError):  # it is not up yet
                status = ask(self._places, "status")
                is_open = any(region["open_to"] for region in status["host"]["regions"])
                return is_open and all(tier["state"] == "on" for tier in status["tiers"].values())
            return False

        _wait("no other node is on", is_on, ON_S_MAX)

    def read_bytes(self) -> int:
        """What came from the place so far."""
        return self._place.read_bytes(node_pids(self._places.directory))


class Theirs:
    """LMCache, whose server stays."""

    def __init__(self, running: Running, arm: Arm) -> None:
        self.engine = running.engines[arm]
        self._server = running.servers[arm]
        self._place = running.places[arm]

    def wait_written(self, lengths: Sequence[int]) -> None:
        """Wait until each chunk is there, and the server has nothing to do any more."""
        wanted = sum(length // CHUNK_TOKENS for length in lengths)

        def is_written() -> bool:
            return self._place.chunk_count() == wanted

        _wait("LMCache is writing chunks", is_written, WRITTEN_S_MAX)
        self._server.wait_idle()

    def begin(self) -> None:
        """Clear the server's memory."""
        self._server.clear()

    def read_bytes(self) -> int:
        """What came from the place so far."""
        return self._place.read_bytes(self._server.processes())


def _turn(side: Ours | Theirs, prompt: list[int], taken: Taken) -> None:
    """From the place, as is proven, from host memory, and the engine's own."""
    engine = side.engine
    reset(engine)
    before = side.read_bytes()
    below = _ask(engine, prompt)
    read_bytes = side.read_bytes() - before
    wanted_bytes = below.cached_tokens * TOKEN_BYTES
    assert read_bytes >= wanted_bytes, f"{read_bytes} of {wanted_bytes} bytes came from the place"
    reset(engine)
    host = _ask(engine, prompt)
    assert host.cached_tokens == below.cached_tokens, (host.cached_tokens, below.cached_tokens)
    own = _ask(engine, prompt)
    taken.below_ms.append(below.ttft_ms)
    taken.host_ms.append(host.ttft_ms)
    taken.own_ms.append(own.ttft_ms)
    taken.below_tokens.add(below.cached_tokens)
    taken.own_tokens.add(own.cached_tokens)
    taken.read_bytes.append(read_bytes)


def _ask(engine: ServedEngine, prompt: list[int]) -> Completion:
    return engine.complete(prompt, OUTPUT_TOKENS, ignore_eos=True)


def section(size: Size, subject: Subject, table: Mapping[int, Mapping[Arm, Taken]]) -> Section:
    """The table, and the budgets."""
    made = Section(
        title=subject.title,
        text=f"TTFT in ms, median and middle half of {size.rounds} rounds; added: the median"
        " difference to the engine's own hit, with its 95 % interval. Read: MiB that came from the"
        f" {subject.place} for a hit, as was seen from outside.",
        header=(
            *("tokens", "arm", "cold", "own hit", "tokens hit", "host hit", "added"),
            *(f"{subject.place} hit", "tokens hit", "added", "read"),
        ),
    )
    for length, by_arm in table.items():
        made.rows += [_row(length, arm, taken) for arm, taken in by_arm.items()]
        for ours, theirs in subject.rivals.items():
            cold_ms = by_arm[subject.arms[0]].cold_ms
            _check_whole(made, f"{length}: a hit of {ours.value}", by_arm[ours], cold_ms)
            if theirs is not None:
                name = f"{length}: added by {ours.value}, against {theirs.value}"
                _check_rival(made, name, by_arm[ours], by_arm[theirs])
    made.data["lengths"] = {
        length: {arm.value: _raw(taken) for arm, taken in by_arm.items()}
        for length, by_arm in table.items()
    }
    return made


def _row(length: int, arm: Arm, taken: Taken) -> tuple[str, ...]:
    read_mib = [count / MiB for count in taken.read_bytes]
    return (
        *(str(length), arm.value, str(spread(taken.cold_ms)) if taken.cold_ms else ""),
        *(str(spread(taken.own_ms)), _counts(taken.own_tokens)),
        *(str(spread(taken.host_ms)), differences(taken.host_ms, taken.own_ms).difference()),
        *(str(spread(taken.below_ms)), _counts(taken.below_tokens)),
        *(taken.added().difference(), f"{spread(read_mib).median:.1f}"),
    )


def _check_whole(made: Section, name: str, taken: Taken, cold_ms: Sequence[float]) -> None:
    below, cold = spread(taken.below_ms), spread(cold_ms)
    made.check(
        name,
        "as long as the engine's own, and quicker than computing",
        f"{below.median:.0f} ms instead of {cold.median:.0f}",
        taken.below_tokens == taken.own_tokens and below.median < cold.median,
    )


def _check_rival(made: Section, name: str, ours: Taken, theirs: Taken) -> None:
    added, limit = ours.added().spread, theirs.added().spread
    made.check(
        name,
        f"≤ {limit.median:.1f} ms (LMCache's)",
        f"{added.median:.1f} ms",
        added.median <= limit.median if added.count >= PAIRS_MIN else None,
    )


def _counts(counts: set[int]) -> str:
    return ", ".join(str(count) for count in sorted(counts))


def _raw(taken: Taken) -> dict[str, object]:
    return {
        "cold_ms": taken.cold_ms,
        "below_ms": taken.below_ms,
        "host_ms": taken.host_ms,
        "own_ms": taken.own_ms,
        "read_bytes": taken.read_bytes,
        "below_tokens": sorted(taken.below_tokens),
        "own_tokens": sorted(taken.own_tokens),
    }


def _wait(what: str, holds: Callable[[], bool], wait_s_max: float) -> None:
    until_s = time.monotonic() + wait_s_max
    while not holds():
        if time.monotonic() > until_s:
            raise ServingError(f"{what}, still after {wait_s_max:g} s")
        time.sleep(0.1)


DISK = Subject(
    "Hits from disk",
    "disk",
    (Arm.KVTIDE_DISK, Arm.LMCACHE_DISK),
    {Arm.KVTIDE_DISK: Arm.LMCACHE_DISK},
)
REMOTE = Subject(
    "Hits from what machines share",
    "place",
    (Arm.KVTIDE_REDIS, Arm.KVTIDE_SHARED, Arm.KVTIDE_S3, Arm.LMCACHE_RESP),
    {Arm.KVTIDE_REDIS: Arm.LMCACHE_RESP, Arm.KVTIDE_SHARED: None, Arm.KVTIDE_S3: None},
)
