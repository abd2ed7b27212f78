"""Hits from disk beside hits from host memory, the engine's own, and computing: TTFT.

Both arms live at once and take turns, round by round, the other idle. When a turn begins nothing
is in memory: kvtide's node is killed and another one started, LMCache's server is told to clear
its memory. Each prompt is then asked for after the engine forgot it (from disk), again after it
forgot (from host memory), and once more (its own). Both read past the page cache, and that they
do read is seen from outside: by what the kernel says that their processes had from the drive.

Cold is a prompt of the same length that nobody sent before.
"""

import os
import signal
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.arms import DISK_NODE, DISK_SETTINGS, HOST_BYTES, Arm, Running, run_all
from benchmarks.lmcache_server import CHUNK_TOKENS, LMCacheServer
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

ARMS = (Arm.KVTIDE_DISK, Arm.LMCACHE_DISK)
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


@dataclass(slots=True)
class Taken:
    """TTFT of one arm and length, in ms; entry n of disk, host and own is of round n."""

    cold_ms: list[float] = field(default_factory=list)
    disk_ms: list[float] = field(default_factory=list)
    host_ms: list[float] = field(default_factory=list)
    own_ms: list[float] = field(default_factory=list)
    disk_tokens: set[int] = field(default_factory=set)
    own_tokens: set[int] = field(default_factory=set)
    read_bytes: list[int] = field(default_factory=list)  # from the drive, of each hit from disk

    def added(self) -> Comparison:
        """What a hit from disk adds to the own one."""
        return differences(self.disk_ms, self.own_ms)


Table = dict[int, dict[Arm, Taken]]


def run(size: Size) -> Section:
    """Measure, and make a section of it."""
    with run_all(ARMS, "--max-model-len", "8192") as running:
        table = _measure(size, running)
    return _section(size, table)


def _measure(size: Size, running: Running) -> Table:
    ours = _Ours(running.engines[Arm.KVTIDE_DISK])
    theirs = _Theirs(running.engines[Arm.LMCACHE_DISK], running.servers[Arm.LMCACHE_DISK])
    arms: dict[Arm, _Ours | _Theirs] = {Arm.KVTIDE_DISK: ours, Arm.LMCACHE_DISK: theirs}
    prompts = Prompts(ours.engine.tokenize, seed=5)
    kept = {length: prompts.make(length) for length in size.lengths}
    for one in arms.values():
        for prompt in kept.values():
            _ask(one.engine, prompt)
        one.wait_written(size.lengths)
    table = _empty(size.lengths)
    for number in range(size.warm_up_rounds + size.rounds):
        if number == size.warm_up_rounds:
            table = _empty(size.lengths)
        for arm in rotated(ARMS, number):
            arms[arm].begin()
            for engine in running.engines.values():
                engine.wait_idle()
            _ask(arms[arm].engine, prompts.make(WAKE_TOKENS))
            for length, prompt in kept.items():
                _turn(arms[arm], prompt, table[length][arm])
        print(f"  disk: round {number + 1} of {size.warm_up_rounds + size.rounds}", flush=True)
    for _ in range(size.cold_rounds):
        for length in size.lengths:
            ours.engine.wait_idle()
            cold = _ask(ours.engine, prompts.make(length))
            table[length][Arm.KVTIDE_DISK].cold_ms.append(cold.ttft_ms)
    return table


def _empty(lengths: Sequence[int]) -> Table:
    return {length: {arm: Taken() for arm in ARMS} for length in lengths}


class _Ours:
    """kvtide, whose node is another one in every turn."""

    def __init__(self, engine: ServedEngine) -> None:
        self.engine = engine
        self._places = Places(engine.log.parent / DISK_NODE)

    def wait_written(self, lengths: Sequence[int]) -> None:
        """Wait until all is on disk."""
        del lengths  # the node knows what it has to write

        def is_written() -> bool:
            status = ask(self._places, "status")
            is_storing = status["entries"]["storing"] or status["host"]["grants"]
            return not is_storing and not status["tiers"]["disk"]["queued_bytes"]

        _wait("the disk is being written", is_written, WRITTEN_S_MAX)

    def begin(self) -> None:
        """Kill the node, start another, and wait until the engine has that, and serves.

        (The engine would start one itself, but for nodes that die young again and again.)
        """
        directory = self._places.directory
        (pid,) = node_pids(directory)
        os.kill(pid, signal.SIGKILL)
        assert wait_dead(pid, ON_S_MAX), pid
        settings = {name.removeprefix("KVTIDE_").lower(): v for name, v in DISK_SETTINGS.items()}
        disk_path = directory.parent / "disk"
        NodeProcess(directory, host_bytes=HOST_BYTES, disk_path=disk_path, **settings).launch()

        def is_on() -> bool:
            with suppress(KVTideError):  # it is not up yet
                regions = ask(self._places, "status")["host"]["regions"]
                return any(region["open_to"] for region in regions)
            return False

        _wait("no other node is on", is_on, ON_S_MAX)

    def readers(self) -> Collection[int]:
        """Processes that read the disk."""
        return node_pids(self._places.directory)


class _Theirs:
    """LMCache, whose server stays."""

    def __init__(self, engine: ServedEngine, server: LMCacheServer) -> None:
        self.engine = engine
        self._server = server

    def wait_written(self, lengths: Sequence[int]) -> None:
        """Wait until each chunk has its file, and the server has nothing to do any more."""
        wanted = sum(length // CHUNK_TOKENS for length in lengths)
        files = self._server.files
        assert files is not None

        def is_written() -> bool:
            return len([path for path in files.rglob("*.data") if path.is_file()]) == wanted

        _wait("LMCache is writing chunks", is_written, WRITTEN_S_MAX)
        self._server.wait_idle()

    def begin(self) -> None:
        """Clear the server's memory."""
        self._server.clear()

    def readers(self) -> Collection[int]:
        """Processes that read the disk."""
        return self._server.processes()


def _turn(arm: _Ours | _Theirs, prompt: list[int], taken: Taken) -> None:
    """From disk, as its processes prove, from host memory, and the engine's own."""
    engine, readers = arm.engine, arm.readers()
    reset(engine)
    before = _read_bytes(readers)
    disk = _ask(engine, prompt)
    read_bytes = _read_bytes(readers) - before
    wanted_bytes = disk.cached_tokens * TOKEN_BYTES
    assert read_bytes >= wanted_bytes, f"{read_bytes} of {wanted_bytes} bytes came from the drive"
    reset(engine)
    host = _ask(engine, prompt)
    assert host.cached_tokens == disk.cached_tokens, (host.cached_tokens, disk.cached_tokens)
    own = _ask(engine, prompt)
    taken.disk_ms.append(disk.ttft_ms)
    taken.host_ms.append(host.ttft_ms)
    taken.own_ms.append(own.ttft_ms)
    taken.disk_tokens.add(disk.cached_tokens)
    taken.own_tokens.add(own.cached_tokens)
    taken.read_bytes.append(read_bytes)


def _read_bytes(pids: Iterable[int]) -> int:
    """What processes have had from drives since they started."""
    lines = [line for pid in pids for line in Path(f"/proc/{pid}/io").read_text().splitlines()]
    return sum(int(line.split()[1]) for line in lines if line.startswith("read_bytes:"))


def _ask(engine: ServedEngine, prompt: list[int]) -> Completion:
    return engine.complete(prompt, OUTPUT_TOKENS, ignore_eos=True)


def _section(size: Size, table: Mapping[int, Mapping[Arm, Taken]]) -> Section:
    section = Section(
        title="Hits from disk",
        text=f"TTFT in ms, median and middle half of {size.rounds} rounds; added: the median"
        " difference to the engine's own hit, with its 95 % interval. Read: MiB that came from the"
        " drive for a hit, by the kernel's count.",
        header=(
            *("tokens", "arm", "cold", "own hit", "tokens hit", "host hit", "added"),
            *("disk hit", "tokens hit", "added", "read"),
        ),
    )
    for length, by_arm in table.items():
        for arm, taken in by_arm.items():
            section.rows.append(_row(length, arm, taken))
        _check_length(section, length, by_arm)
    section.data["lengths"] = {
        length: {arm.value: _raw(taken) for arm, taken in by_arm.items()}
        for length, by_arm in table.items()
    }
    return section


def _row(length: int, arm: Arm, taken: Taken) -> tuple[str, ...]:
    read_mib = [count / MiB for count in taken.read_bytes]
    return (
        *(str(length), arm.value, str(spread(taken.cold_ms)) if taken.cold_ms else ""),
        *(str(spread(taken.own_ms)), _counts(taken.own_tokens)),
        *(str(spread(taken.host_ms)), differences(taken.host_ms, taken.own_ms).difference()),
        *(str(spread(taken.disk_ms)), _counts(taken.disk_tokens)),
        *(taken.added().difference(), f"{spread(read_mib).median:.1f}"),
    )


def _check_length(section: Section, length: int, by_arm: Mapping[Arm, Taken]) -> None:
    ours, theirs = by_arm[Arm.KVTIDE_DISK], by_arm[Arm.LMCACHE_DISK]
    disk, cold = spread(ours.disk_ms), spread(ours.cold_ms)
    section.check(
        f"{length}: a hit from disk",
        "as long as the engine's own, and quicker than computing",
        f"{disk.median:.0f} ms instead of {cold.median:.0f}",
        ours.disk_tokens == ours.own_tokens and disk.median < cold.median,
    )
    added, limit = ours.added().spread, theirs.added().spread
    section.check(
        f"{length}: added by a hit from disk, against LMCache",
        f"≤ {limit.median:.1f} ms (LMCache's)",
        f"{added.median:.1f} ms",
        added.median <= limit.median if added.count >= PAIRS_MIN else None,
    )


def _counts(counts: set[int]) -> str:
    return ", ".join(str(count) for count in sorted(counts))


def _raw(taken: Taken) -> dict[str, object]:
    return {
        "cold_ms": taken.cold_ms,
        "disk_ms": taken.disk_ms,
        "host_ms": taken.host_ms,
        "own_ms": taken.own_ms,
        "read_bytes": taken.read_bytes,
        "disk_tokens": sorted(taken.disk_tokens),
        "own_tokens": sorted(taken.own_tokens),
    }


def _wait(what: str, holds: Callable[[], bool], wait_s_max: float) -> None:
    until_s = time.monotonic() + wait_s_max
    while not holds():
        if time.monotonic() > until_s:
            raise ServingError(f"{what}, still after {wait_s_max:g} s")
        time.sleep(0.1)
