"""A node in the foreground, its end by order, and its log, as a user sees them."""

import fcntl
import os
import re
import select
import signal
import socket
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TextIO

import pytest

from kvtide.cli import logs, stop
from kvtide.testing.fake_engine import FakeEngine, Loaded, make_tokens
from kvtide.testing.node_process import NodeProcess, wait_dead
from kvtide.wire.places import Places
from tests.cli.runs import KVTIDE, Run, one_line
from tests.node.fixtures import StartNode

TOKENS = make_tokens(160, seed=1)


# ---- stop


def test_stop_ends_the_node(run: Run, running_node: NodeProcess) -> None:
    pid = running_node.pid
    result = run("stop")
    assert result.output == f"node {pid} has ended\n"
    assert result.exit_code == 0
    assert wait_dead(pid, 0)
    assert running_node.places.stopped.exists(), "engines that were not connected start none"
    when = r"it was stopped on purpose at \d{4}-\d\d-\d\d \d\d:\d\d\. `kvtide serve`, or an engine"
    assert re.search(when, one_line(run("status")))
    running_node.start()
    assert not running_node.places.stopped.exists(), "somebody has started one"


def test_stop_without_a_node_is_no_mistake(run: Run, runtime_dir: Path) -> None:
    result = run("stop")
    assert result.exit_code == 0
    assert result.output == f"no node is running in {runtime_dir}\n"
    with socket.socket(socket.AF_UNIX) as left_behind:
        left_behind.bind(str(runtime_dir / "node-1.sock"))
    assert run("stop").output == f"no node is running in {runtime_dir}\n"


@pytest.mark.parametrize("when", ["connected", "asked"])
def test_node_that_ends_by_itself_meanwhile_is_a_success(
    run: Run, running_node: NodeProcess, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    open_pidfd = os.pidfd_open

    def opens_late(pid: int) -> int:
        pidfd = open_pidfd(pid)
        os.kill(pid, signal.SIGKILL)
        assert select.select([pidfd], [], [], 10)[0]
        if when == "asked":
            return pidfd
        os.close(pidfd)
        raise ProcessLookupError(3, "No such process")

    monkeypatch.setattr(stop.os, "pidfd_open", opens_late)
    result = run("stop")
    assert result.exit_code == 0, result.output
    directory = running_node.places.directory
    said = f"the node in {directory} has ended" if when == "asked" else f"in {directory}\n"
    assert said in result.output


def test_stop_of_a_node_that_takes_nobody_in_says_so(run: Run, runtime_dir: Path) -> None:
    """Its queue of peers is full: the command does not wait for ever."""
    with socket.socket(socket.AF_UNIX) as hung, ExitStack() as stack:
        hung.bind(str(Places(runtime_dir).socket))
        hung.listen(0)
        for _ in range(4):
            peer = stack.enter_context(socket.socket(socket.AF_UNIX))
            peer.setblocking(False)
            with suppress(BlockingIOError):
                peer.connect(hung.getsockname())
        assert "does not answer; `kvtide logs` shows its log" in one_line(run("stop"))


# ---- serve


def test_stalled_terminal_holds_up_nothing(new_node: StartNode) -> None:
    """Standard error is a pipe that is full, and that nobody reads."""
    node = new_node()
    unread, full = os.pipe()
    fcntl.fcntl(full, fcntl.F_SETPIPE_SZ, 4096)
    os.write(full, b"x" * 4096)
    environment = os.environ | node.environment
    environment["KVTIDE_RUNTIME_DIR"] = str(node.places.directory)
    with subprocess.Popen([*KVTIDE, "serve"], env=environment, stderr=full) as child:
        node.wait_answer()
        child.terminate()
        assert child.wait(10) == 0
    os.close(full)
    os.close(unread)


def test_serve_runs_until_ctrl_c(new_node: StartNode, runtime_dir: Path) -> None:
    node = new_node()
    environment = os.environ | node.environment | {"KVTIDE_RUNTIME_DIR": str(runtime_dir)}
    with subprocess.Popen(
        [*KVTIDE, "serve"], stderr=subprocess.PIPE, text=True, env=environment
    ) as child:
        assert child.stderr is not None
        first = child.stderr.readline()
        assert f"serves at {node.places.socket}, host memory up to 64 MiB" in first
        assert "64 MiB of host memory is little" in child.stderr.readline()
        with FakeEngine(node.places, "one") as engine:
            engine.keep(TOKENS)
            assert engine.load(TOKENS) == Loaded(10, 10)
        settings = {one["name"]: one for one in node.status()["node"]["settings"]}
        assert settings["linger_s"]["value"].startswith("never")
        child.send_signal(signal.SIGINT)
        assert child.wait(10) == 0
        rest = child.stderr.read()
    assert "ends: SIGINT" in rest
    assert "Traceback" not in rest
    assert not node.places.log.exists()


def test_serve_beside_a_running_node_is_one_line(run: Run, running_node: NodeProcess) -> None:
    line = one_line(run("serve"))
    assert line == (
        f"Error: a node is running already, in {running_node.places.directory}:"
        " `kvtide status` shows it, `kvtide stop` ends it"
    )


def test_serve_with_too_much_memory_is_one_line(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    environment = os.environ | {"KVTIDE_HOST_BYTES": "900TiB"}
    done = subprocess.run(
        [*KVTIDE, "serve"],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=20,
    )
    assert done.returncode == 1
    assert done.stderr.startswith("Error: host_bytes asks for 900 TiB, but only")
    assert len(done.stderr.splitlines()) == 1


# ---- logs


def test_logs_shows_the_end(run: Run, running_node: NodeProcess) -> None:
    running_node.end()
    text = run("logs").output
    assert "serves at" in text
    assert text.splitlines()[-1].endswith("ends: SIGTERM")
    assert len(run("logs", "-n", "1").output.splitlines()) == 1
    assert run("logs", "-n", "0").output == ""


def test_logs_reads_on_in_the_older_file(run: Run, running_node: NodeProcess) -> None:
    log = running_node.places.log
    running_node.end()
    log.with_name(log.name + ".1").write_text("older 1\nolder 2\n")
    log.write_text("newer \x1b[2J\n")
    assert run("logs", "-n", "2").output == "older 2\nnewer ?[2J\n"


def test_logs_loses_nothing_to_a_rotation_between_its_two_files(
    run: Run, runtime_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = runtime_dir / "node-1.log"
    log.with_name("node-1.log.1").write_text("older\n")
    log.write_text("newer\n")
    open_file, opened = logs._open, []

    def opens(path: Path) -> TextIO:
        if opened:
            log.rename(f"{log}.1")
            log.write_text("newest\n")
        opened.append(path)
        return open_file(path)

    monkeypatch.setattr(logs, "_open", opens)
    assert run("logs").output == "newer\n"
    assert len(opened) == 2


@contextmanager
def ended(child: "subprocess.Popen[bytes]") -> Iterator[None]:
    """On the way out it is killed, should it live: else its own `with` waits for ever."""
    try:
        yield
    finally:
        if child.poll() is None:
            child.kill()


def test_logs_of_a_node_in_the_foreground_says_where_they_are(
    run: Run, new_node: StartNode, runtime_dir: Path, tmp_path: Path
) -> None:
    node = new_node()
    environment = os.environ | node.environment | {"KVTIDE_RUNTIME_DIR": str(runtime_dir)}
    place = tmp_path / "own.log"
    with (
        place.open("w") as file,
        subprocess.Popen([*KVTIDE, "serve"], stderr=file, env=environment) as child,
        ended(child),
    ):
        node.wait_answer()
        where = f"node {child.pid} runs in the foreground and logs to its standard error, {place}"
        assert where in one_line(run("logs"))
        child.send_signal(signal.SIGSTOP)
        assert where in one_line(run("logs")), "of one that does not answer, too"
        child.send_signal(signal.SIGCONT)
        node.places.log.write_text("older\n")
        result = run("logs")
        assert (result.exit_code, result.stdout) == (0, "older\n")
        assert where in result.stderr
        child.terminate()
        assert child.wait(10) == 0
    assert run("logs").stderr == ""


def test_logs_of_a_node_that_an_engine_started_are_here(
    run: Run, running_node: NodeProcess
) -> None:
    result = run("logs")
    assert "serves at" in result.stdout
    assert result.stderr == ""


def test_logs_without_a_log_says_so(run: Run) -> None:
    assert "there is no log at" in one_line(run("logs"))


def test_logs_that_waits_for_a_log_says_so(runtime_dir: Path) -> None:
    environment = os.environ | {"KVTIDE_RUNTIME_DIR": str(runtime_dir)}
    with (
        subprocess.Popen(
            [*KVTIDE, "logs", "-f"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        ) as child,
        ended(child),
    ):
        assert child.stdout is not None
        assert child.stderr is not None
        assert "yet; waiting for one, until Ctrl-C" in child.stderr.readline()
        (runtime_dir / "node-1.log").write_text("first\n")
        assert child.stdout.readline() == "first\n"


def test_logs_follows_through_a_rotation(runtime_dir: Path) -> None:
    log = runtime_dir / "node-1.log"
    log.write_text("first\n")
    environment = os.environ | {"KVTIDE_RUNTIME_DIR": str(runtime_dir)}
    command = [*KVTIDE, "logs", "-n", "1", "--follow"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "first\n"
        with log.open("a") as file:
            file.write("second\n")
            file.flush()
            assert child.stdout.readline() == "second\n"
            file.write("third\n")
        log.rename(f"{log}.1")
        log.write_text("fourth\n")
        assert child.stdout.readline() == "third\n"
        assert child.stdout.readline() == "fourth\n"
        child.send_signal(signal.SIGINT)
        assert child.wait(10) == 0
