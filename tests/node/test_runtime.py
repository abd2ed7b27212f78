"""The owner when something is broken on purpose: it ends, or it goes on, never in between."""

import asyncio
import os
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvtide import config
from kvtide.clock import MonotonicClock
from kvtide.core import messages as m
from kvtide.core.effects import Tick
from kvtide.core.layout import KVLayout
from kvtide.core.machine import Machine
from kvtide.core.parts import MachineConfig
from kvtide.errors import NodeError
from kvtide.memory.probe import HostMemory, reserve_bytes
from kvtide.node import main, memory, report, runtime
from kvtide.node.build import Way
from kvtide.testing.fake_engine import FakeEngine, Loaded, make_tokens
from kvtide.testing.node_process import NodeProcess
from kvtide.units import GiB, KiB, MiB
from kvtide.wire.command import ask
from kvtide.wire.places import Places
from tests.node.fixtures import StartNode
from tests.wire.link_owner import wait_until

LAYOUT = KVLayout(2, 8, (4 * KiB,))
TOKENS = make_tokens(128, seed=1)
BROKEN = """
    from kvtide.core import machine
    real = machine.Machine.handle
    def handle(self, event, now_ms):
        message = getattr(event, "message", None)
        if type(message).__name__ == "Lookup":
            {fault}
        return real(self, event, now_ms)
    machine.Machine.handle = handle
"""


@contextmanager
def broken_node(node: NodeProcess, patch: str) -> Iterator[subprocess.Popen[bytes]]:
    """A node whose program is changed by `patch` before it starts."""
    program = textwrap.dedent(patch) + textwrap.dedent("""
        import sys
        from kvtide.node.main import main
        sys.exit(main())
    """)
    environment = os.environ | node.environment
    environment["KVTIDE_RUNTIME_DIR"] = str(node.places.directory)
    child = subprocess.Popen([sys.executable, "-c", program], env=environment)
    try:
        node.wait_answer()
        yield child
    finally:
        child.terminate()
        child.wait(20)


@pytest.mark.parametrize(
    "fault",
    [
        "assert False, 'a belief'",
        "raise KeyError('a surprise')",
        "self._effects.append(machine.Close); return [None.nothing]",
        "from kvtide.core import effects as fx, messages as m;"
        " return [fx.SetGenerations(m.Run(99, 0, 1, 1))]",
    ],
    ids=["assertion", "surprise", "nonsense", "impossible effect"],
)
def test_state_that_is_not_believed_ends_the_node(new_node: StartNode, fault: str) -> None:
    """Code 70, the reason and the place in the log; the engine is told that it is dead."""
    node = new_node()
    with (
        broken_node(node, BROKEN.format(fault=fault)) as child,
        FakeEngine(node.places, "one") as engine,
    ):
        assert engine.store(TOKENS).written == 2
        engine.scheduler.link.send(m.Lookup(1_000, engine.scheduler.root(), b"", b""))
        assert child.wait(10) == main.EXIT_FAULT
        assert engine.scheduler.wait_for(lambda: True in engine.scheduler.downs)
        assert not engine.scheduler.link.stopped_on_purpose, "another may be started"
    log = node.log()
    assert "the node's state is broken, seen at Received" in log
    assert "Traceback" in log
    assert not node.places.socket.exists()


def test_page_that_cannot_be_made_costs_the_page(new_node: StartNode) -> None:
    node = new_node()
    patch = """
        from kvtide.node import runtime
        real = runtime.status
        def status(machine, *more):
            if machine.index.entries:
                raise ZeroDivisionError("a bug in the page")
            return real(machine, *more)
        runtime.status = status
    """
    with broken_node(node, patch), FakeEngine(node.places, "one") as engine:
        engine.keep(TOKENS)
        with pytest.raises(NodeError, match="cannot answer this: ZeroDivisionError"):
            node.status()
        assert engine.load(TOKENS) == Loaded(8, 8)
        ask(node.places, "clear")
        assert node.status()["engines"]


def test_memory_that_cannot_be_watched_is_one_warning(new_node: StartNode) -> None:
    node = new_node()
    patch = """
        from kvtide.node import watch
        from kvtide.errors import HostMemoryError
        def limit(self, charged_bytes):
            open("/proc/self/comm", "w").write("watched")
            raise ValueError("a strange /proc")
        watch.MemoryWatch.limit = limit
    """
    with broken_node(node, patch) as child, FakeEngine(node.places, "one") as engine:
        comm = Path(f"/proc/{child.pid}/comm")
        wait_until(lambda: comm.read_text(encoding="ascii") == "watched\n", "nobody looks")
        wait_until(lambda: node.status()["node"]["uptime_s"] >= 3, "it has ended")
        engine.keep(TOKENS)
        assert engine.load(TOKENS) == Loaded(8, 8)
    assert node.log().count("the memory around the node cannot be watched: a strange /proc") == 1


def test_fault_outside_the_machine_ends_the_node_too(new_node: StartNode) -> None:
    """A callback of the loop that raises: asyncio alone would log it and go on."""
    node = new_node()
    patch = """
        from kvtide.node import runtime
        def _made(self, number, done):
            raise RuntimeError("a surprise in a callback")
        runtime.Runtime._made = _made
    """
    with broken_node(node, patch) as child:
        engine = FakeEngine(node.places, "one")
        engine.scheduler.link.start()
        engine.workers[0].start()
        try:
            assert child.wait(20) == main.EXIT_FAULT
        finally:
            engine.close()
    assert "a surprise in a callback" in node.log()


def test_a_check_that_finds_broken_state_says_so_and_ends_nothing(new_node: StartNode) -> None:
    """What the check believes may be what is wrong: whoever asked for it decides."""
    node = new_node()
    patch = """
        from kvtide.core.machine import Machine
        def check_integrity(self):
            assert 1 == 2, "a cell is lent twice"
        Machine.check_integrity = check_integrity
    """
    with broken_node(node, patch) as child:
        with pytest.raises(NodeError, match="state is broken: a cell is lent twice"):
            ask(node.places, "check")
        assert "a cell is lent twice" in node.log()
        assert ask(node.places, "stop") == {"pid": child.pid}
        assert child.wait(20) == 0


def test_frees_its_memory_within_the_time_it_has_to_stop(new_node: StartNode) -> None:
    """A kernel that takes for ever: it ends all the same, and says so."""
    node = new_node()
    patch = """
        import threading
        from kvtide.node import memory, runtime
        runtime.STOP_S_MAX = 0.5
        memory.RegionFiles.close = lambda files: threading.Event().wait(60)
    """
    patch += """
        import kvtide.node.main, logging, os, sys
        code = kvtide.node.main.main()
        logging.shutdown()
        os._exit(code)
    """
    with broken_node(node, patch) as child, FakeEngine(node.places, "one") as engine:
        engine.keep(TOKENS)
        child.terminate()
        assert child.wait(8) == 0
    assert "memory is still being freed after 0.5 s" in node.log()


def test_thread_that_allocates_is_there_from_the_start(running_node: NodeProcess) -> None:
    """Later there may be no number left for one."""
    assert len(os.listdir(f"/proc/{running_node.pid}/task")) == 2


def test_no_thread_to_free_memory_is_not_the_nodes_fault(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its end frees it all the same."""

    def refuse(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    async def live() -> int:
        node = runtime.Runtime(fresh_machine(), MonotonicClock(), Places(tmp_path), [])
        node._memory._allocator.shutdown()
        monkeypatch.setattr(node._loop, "run_in_executor", refuse)
        node.ended.set()
        return await node.run()

    assert asyncio.run(live()) == 0
    assert "memory is freed by ending: can't start new thread" in caplog.text


def test_files_in_use_are_kept_fresh(tmp_path: Path) -> None:
    """Else whoever cleans up /tmp takes the lock and the log away after ten days."""
    places = Places(tmp_path)
    for path in (places.lock, places.log):
        path.touch()
        os.utime(path, (1e9, 1e9))
    node = SimpleNamespace(socket_path=places.socket, places=places)
    runtime.Runtime._keep_fresh(node)  # type: ignore[arg-type]
    assert places.lock.stat().st_mtime > 1e9
    assert places.log.stat().st_atime > 1e9


# ---- settings of the node


def read(**variables: str) -> config.Config:
    """Settings from an environment."""
    return config.read(environ={"HOME": "/nonexistent", **variables})


def test_node_in_the_foreground_stays_unless_told_otherwise() -> None:
    assert main.linger_ms(read(), Way.LAUNCHED) == 600_000
    assert main.linger_ms(read(), Way.FOREGROUND) == 0
    assert main.linger_ms(read(KVTIDE_LINGER_S="5"), Way.FOREGROUND) == 5_000
    shown = {one["name"]: one["value"] for one in main.shown_settings(read(), Way.FOREGROUND)}
    assert shown["linger_s"].startswith("never")


@pytest.mark.parametrize(("up_ms", "had_engine"), [(59_999, False), (60_000, False), (1, True)])
def test_end_of_a_node_that_nobody_came_to_says_so(up_ms: int, had_engine: bool) -> None:
    ends: list[str] = []
    node = SimpleNamespace(
        clock=SimpleNamespace(now_ms=lambda: up_ms),
        started_ms=0,
        _had_engine=had_engine,
        stop=lambda why, on_purpose: ends.append(why),
    )
    runtime.Runtime._end(node, "linger_s", on_purpose=False)  # type: ignore[arg-type]
    said = ["linger_s"] if had_engine else ["no engine has come in 60 s (linger_s, 60 at least)"]
    assert ends == (said if had_engine or up_ms >= 60_000 else [])


def test_size_that_the_host_has_come_to_is_shown() -> None:
    shown = main.shown_settings(read(), Way.LAUNCHED)
    (told,) = [one for one in main.with_size(shown, None, 16 * GiB) if one["name"] == "host_bytes"]
    assert told["value"] == "16 GiB (auto)"
    (told, *_) = main.with_size(shown, 900 * GiB, 16 * GiB)
    assert told["value"] == "16 GiB (asked for 900 GiB)"
    assert main.with_size(shown, GiB, GiB) == shown
    assert shown[0]["value"] == "auto", "what engines compare with their own"


def test_linger_of_nothing_is_not_for_ever() -> None:
    """To the machine 0 means never, to the user at once."""
    assert main.linger_ms(read(KVTIDE_LINGER_S="0"), Way.LAUNCHED) == 1
    assert main.linger_ms(read(KVTIDE_LINGER_S="0.0001"), Way.LAUNCHED) == 1


def test_host_bytes_are_a_quarter_of_what_is_available(monkeypatch: pytest.MonkeyPatch) -> None:
    assert host_bytes_of(monkeypatch, 80 * GiB, None) == 20 * GiB
    assert host_bytes_of(monkeypatch, 1024 * GiB, None) == 64 * GiB
    assert host_bytes_of(monkeypatch, 1024 * GiB, 200 * GiB) == 200 * GiB


def host_bytes_of(
    monkeypatch: pytest.MonkeyPatch,
    available_bytes: int,
    wanted: int | None,
    way: Way = Way.FOREGROUND,
) -> int:
    """The size on a machine of 1 TiB of which so much is available."""
    memory = HostMemory(1024 * GiB, available_bytes, None)
    monkeypatch.setattr(main.probe, "host_memory", lambda: memory)
    return main.host_bytes(wanted, way)


RESERVE_BYTES = reserve_bytes(1024 * GiB)


def test_more_than_there_is_to_spare_is_refused_to_whoever_asks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    available = RESERVE_BYTES + 100 * MiB
    assert host_bytes_of(monkeypatch, available, 100 * MiB) == 100 * MiB
    with pytest.raises(config.ConfigError, match="only 100 MiB are to spare here, of 30"):
        host_bytes_of(monkeypatch, available, 101 * MiB)
    assert host_bytes_of(monkeypatch, available, None) == 100 * MiB, "a quarter is not to spare"


def test_node_of_an_engine_makes_do_with_what_there_is(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It may follow one that crashed, on a machine that is fuller by now."""
    available = RESERVE_BYTES + 100 * MiB
    assert host_bytes_of(monkeypatch, available, 101 * MiB, Way.LAUNCHED) == 100 * MiB
    assert "asks for 101 MiB, but only 100 MiB are to spare here" in caplog.text


@pytest.mark.parametrize("way", Way)
def test_nothing_to_spare_is_no_node(monkeypatch: pytest.MonkeyPatch, way: Way) -> None:
    with pytest.raises(NodeError, match="no room for a cache: 0 B are to spare"):
        host_bytes_of(monkeypatch, RESERVE_BYTES - MiB, None, way)


@pytest.mark.parametrize("error", [OSError(1, "a filter"), ValueError("a strange /proc")])
def test_region_that_cannot_be_made_is_refused_and_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def refuse(*_: object) -> None:
        raise error

    before = set(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(memory, "GenerationMemory", refuse)
    assert memory.allocate(1, LAYOUT, 4) == str(error)
    assert set(os.listdir("/proc/self/fd")) == before


def fresh_machine() -> Machine:
    """One with 1 GiB."""
    return Machine(
        MachineConfig(node=b"n", pid=1, version="0", host_bytes=GiB, linger_ms=0, first_number=1)
    )


def test_watch_counts_memory_from_made_to_freed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A region that the kernel has not taken back yet is not gone, nor one being made there."""
    charged: list[int] = []
    may_end = threading.Event()
    close = memory.RegionFiles.close

    def close_slowly(files: memory.RegionFiles) -> None:
        assert may_end.wait(20)
        close(files)

    async def live() -> None:
        node = runtime.Runtime(fresh_machine(), MonotonicClock(), Places(tmp_path), [])
        monkeypatch.setattr(node._memory._watch, "limit", charged.append)
        monkeypatch.setattr(memory.RegionFiles, "close", close_slowly)
        made = node._memory.make(1, LAYOUT, 4)
        node._look_at_memory()
        files = await asyncio.wrap_future(made)
        assert isinstance(files, memory.RegionFiles)
        node._memory.add(1, files)
        node._is_looking = False
        node._memory.free(1)
        node._look_at_memory()
        await asyncio.sleep(0)
        may_end.set()
        node.ended.set()
        await node.run()

    asyncio.run(live())
    assert charged == [4 * 4 * KiB, 0]


@pytest.mark.parametrize(
    "value", ["2026-13-45", "2026-01-01 99:99:99", "!!int x", "!!float x", "[" * 5_000]
)
def test_values_that_yaml_itself_cannot_make_are_said(tmp_path: Path, value: str) -> None:
    file = tmp_path / "kvtide.yaml"
    file.write_text(f"linger_s: {value}\n", encoding="utf-8")
    with pytest.raises(config.ConfigError) as raised:
        read(KVTIDE_CONFIG_FILE=str(file))
    assert str(file) in str(raised.value)


def test_counts_of_engines_that_left_are_bounded() -> None:
    left: dict[str, int] = {}
    for number in range(report.LEFT_NAMES_MAX * 2):
        report.add_left(left, {f"name {number}": 1})
    assert len(left) <= report.LEFT_NAMES_MAX + 1
    assert sum(left.values()) == report.LEFT_NAMES_MAX * 2
    machine = fresh_machine()
    machine.handle(Tick(), 1)
    assert report.totals(machine, {"name": 1 << 70})["name"] == report.COUNT_MAX
