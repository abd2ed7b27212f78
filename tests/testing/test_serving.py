"""Engines under the leash, a stub in the place of vLLM: how they start, end, and are ended."""

import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from kvtide.testing import leash, serving
from kvtide.testing.leashed import End, ProgramError
from kvtide.testing.serving import ServedEngine

STUB = Path(__file__).with_name("stub_engine.py")
START_S_MAX = 30.0

Make = Callable[..., ServedEngine]


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Make:
    """Makes engines whose `vllm` is the stub; grace is short, since some are deaf."""
    package = tmp_path / "path" / "vllm" / "entrypoints" / "cli"
    package.mkdir(parents=True)
    for directory in (package, *package.parents[:2]):
        (directory / "__init__.py").touch()  # a real package, or the installed one goes first
    shutil.copy(STUB, package / "main.py")
    monkeypatch.setattr(leash, "TRACKER_GRACE_S", 0.3)

    def make_engine(manners: str = "") -> ServedEngine:
        variables = {"PYTHONPATH": str(tmp_path / "path"), "STUB": manners}
        engine = ServedEngine(Path("model"), log=tmp_path / "log", variables=variables)
        engine._grace_s = 0.3
        return engine

    return make_engine


def left(engine: ServedEngine) -> list[leash.Process]:
    return leash.processes_of_session(engine.session)


def test_an_engine_serves_and_ends_in_order(make: Make) -> None:
    with make() as engine:
        assert engine.complete("hello", 4).text == "The tide comes in"
        assert engine.chat([{"role": "user", "content": "hello"}], 1).text == "The"
        assert engine.tokenize("one three") == [3, 5]
        assert engine.metrics()["up"] == 1.0
        assert not engine.reset_prefix_cache()
        assert engine.reset_prefix_cache(external=True)
        assert len(engine.processes()) == 1
        assert engine.is_alive()
        engine.wait_idle()
        assert engine.stop() == End(0, was_killed=False)
        assert not engine.is_alive()
    assert left(engine) == []


def test_the_log_is_this_engines_only(make: Make) -> None:
    for _ in range(2):
        with make() as engine:
            assert engine.log_lines() == ["the stub starts, STUB: "]


def test_an_engine_whose_weights_are_being_read_is_waited_for(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That off passes by itself; any other is an error at once."""
    engine = make()
    log = ["kvtide off: weights_hashing (1 MiB of 2 MiB read)"]
    monkeypatch.setattr(engine, "log_lines", lambda: list(log))
    monkeypatch.setattr(engine, "_on_wait", lambda _: log.append("kvtide on: node 1"))
    assert engine.wait_kvtide() == "node 1"
    log[:] = ["kvtide off: groups (two)"]
    with pytest.raises(ProgramError, match="uncached: kvtide off: groups"):
        engine.wait_kvtide()


def test_an_engine_that_ends_at_its_start_is_an_error_with_its_last_words(make: Make) -> None:
    engine = make("ends")
    engine.start()
    with pytest.raises(ProgramError, match="no such model"):
        engine.wait_ready(START_S_MAX)
    assert engine.stop().exit_code == 3


def test_an_engine_that_takes_too_long_is_ended(make: Make) -> None:
    engine = make()
    engine.start()
    with pytest.raises(ProgramError, match="needs over 0 s"):
        engine.wait_ready(0)
    assert left(engine) == []


def test_progress_is_reported_while_the_engine_starts(make: Make) -> None:
    seen: list[float] = []
    engine = make()
    engine._on_wait = seen.append
    with engine:
        assert seen == sorted(seen)
        assert seen


def test_ctrl_c_while_the_engine_starts_leaves_nothing(make: Make) -> None:
    def interrupt(elapsed_s: float) -> None:
        signal.raise_signal(signal.SIGINT)

    engine = make()
    engine._on_wait = interrupt
    with pytest.raises(KeyboardInterrupt):
        engine.__enter__()
    assert left(engine) == []


def test_ctrl_c_during_the_end_is_delivered_after_it(make: Make) -> None:
    engine = make()
    engine.__enter__()

    def order(process: subprocess.Popen[bytes]) -> None:
        signal.raise_signal(signal.SIGINT)
        process.terminate()

    with pytest.raises(KeyboardInterrupt):
        engine._end(order)
    assert left(engine) == []


@pytest.mark.parametrize("manners", ["deaf", "litters"])
def test_what_does_not_end_is_killed_and_that_is_told(make: Make, manners: str) -> None:
    with make(manners) as engine:
        assert engine.stop().was_killed
    assert left(engine) == []


def test_a_crash_ends_all_at_once(make: Make) -> None:
    with make("litters") as engine:
        assert engine.kill() == End(128 + signal.SIGKILL, was_killed=True)
    assert left(engine) == []


@pytest.mark.parametrize("end", [ServedEngine.stop, ServedEngine.kill])
def test_sockets_that_an_engine_leaves_go_with_it(
    make: Make, end: Callable[[ServedEngine], End]
) -> None:
    with make() as engine:
        (left_behind,) = engine.scratch.iterdir()
        assert left_behind.is_socket()
        end(engine)
        assert not engine.scratch.exists()


def test_engines_have_their_sockets_apart(make: Make) -> None:
    with make() as one, make() as other:
        assert one.stop().exit_code == 0
        assert len(list(other.scratch.iterdir())) == 1


def test_a_place_for_sockets_with_too_long_a_name_is_told(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / ("long" * 20)))
    with pytest.raises(ProgramError, match="set TMPDIR to a shorter one"):
        make().start()


def test_an_engine_whose_owner_is_killed_ends_too(make: Make, tmp_path: Path) -> None:
    """The owner is a process of its own, killed by SIGKILL, so it can do nothing about it."""
    engine = make("litters")
    code = f"""
import time
from pathlib import Path
from kvtide.testing.serving import ServedEngine
log = Path({str(engine.log)!r})
engine = ServedEngine(Path("model"), log=log, variables={engine._variables!r})
engine._grace_s = 0.3
engine.__enter__()
print(engine.session, engine.scratch, flush=True)
time.sleep(60)
"""
    owner = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert owner.stdout is not None
    with owner.stdout:
        words = owner.stdout.readline().decode().split()
    session, scratch = int(words[0]), Path(words[1])
    assert scratch.is_dir()
    assert len(leash.processes_of_session(session)) == 3  # leash, stub, its litter
    leash_end = os.pidfd_open(session)
    owner.kill()
    owner.wait()
    assert select.select([leash_end], [], [], START_S_MAX)[0], "the leash did not end"
    os.close(leash_end)
    assert leash.processes_of_session(session) == []
    assert not scratch.exists()


def test_the_environment_is_not_inherited_but_what_is_given_wins(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "DEBUG")
    monkeypatch.setenv("KVTIDE_HOST_BYTES", "1GiB")
    made = serving.environment(VLLM_CPU_KVCACHE_SPACE="2")
    assert "VLLM_LOGGING_LEVEL" not in made
    assert "KVTIDE_HOST_BYTES" not in made
    assert made["VLLM_CPU_KVCACHE_SPACE"] == "2"
    assert made["PATH"] == os.environ["PATH"]
