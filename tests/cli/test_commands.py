"""The commands, as a user runs them, on a real node."""

import json
import os
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

import kvtide
from kvtide.cli import page
from kvtide.cli.main import COMMANDS, main
from kvtide.core import messages as m
from kvtide.core.keys import salt_digest
from kvtide.errors import WireError
from kvtide.node.launch import _environment
from kvtide.testing.fake_engine import FakeEngine, Loaded, Shape, make_tokens
from kvtide.testing.node_process import NodeProcess, wait_dead
from kvtide.wire import command
from kvtide.wire.command import ask
from tests.node.fixtures import StartNode

Run = Callable[..., Result]

TOKENS = make_tokens(160, seed=1)
HELP_S_MAX = 0.15
KVTIDE = [sys.executable, "-m", "kvtide.cli.main"]


@pytest.fixture
def run(runtime_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs a command in the runtime directory of the test."""
    monkeypatch.setenv("KVTIDE_RUNTIME_DIR", str(runtime_dir))

    def run_it(*arguments: str, typed: str | None = None) -> Result:
        return CliRunner().invoke(main, arguments, input=typed)

    return run_it


def one_line(result: Result, code: int = 1) -> str:
    """What a command that fails says: one line, no traceback."""
    assert result.exit_code == code, result.output
    assert isinstance(result.exception, SystemExit)
    lines = result.stderr.strip().splitlines()
    assert len(lines) == 1, lines
    return lines[0]


# ---- the program


def test_version_and_help(run: Run) -> None:
    assert run("--version").output == f"kvtide, version {kvtide.__version__}\n"
    page_of_help = run("--help").output
    for name, (_, line) in COMMANDS.items():
        assert name in page_of_help
        assert line in page_of_help


@pytest.mark.parametrize("name", COMMANDS)
def test_table_of_commands_says_what_they_say(run: Run, name: str) -> None:
    command = main.get_command(None, name)  # type: ignore[arg-type]
    assert command is not None
    assert command.short_help == COMMANDS[name][1]
    result = run(name, "--help")
    assert result.exit_code == 0
    assert COMMANDS[name][1][:-1] in " ".join(result.output.split())


def test_unknown_commands_and_options_are_mistakes_of_usage(run: Run) -> None:
    assert run("nonsense").exit_code == 2
    assert run("status", "--nonsense").exit_code == 2
    assert run("logs", "-n", "-1").exit_code == 2


def test_help_is_there_at_once() -> None:
    """Processor time: other people's work on the machine does not count."""
    taken_s = []
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([*KVTIDE, "--help"], check=True, capture_output=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        taken_s.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    assert min(taken_s) < HELP_S_MAX, taken_s


@pytest.mark.parametrize("arguments", [["status"], ["clear"], ["config", "show"], ["logs"]])
def test_bad_settings_are_one_line(
    run: Run, monkeypatch: pytest.MonkeyPatch, arguments: list[str]
) -> None:
    monkeypatch.setenv("KVTIDE_HOST_BITES", "1GiB")
    assert "did you mean KVTIDE_HOST_BYTES?" in one_line(run(*arguments))


@pytest.mark.parametrize("arguments", [["status"], ["stop"], ["clear"], ["serve"], ["logs"]])
def test_directory_of_others_is_refused(run: Run, runtime_dir: Path, arguments: list[str]) -> None:
    runtime_dir.chmod(0o755)
    assert "chmod 700 it" in one_line(run(*arguments))


@pytest.mark.parametrize("arguments", [["status"], ["stop"], ["clear"], ["serve"]])
def test_too_long_a_path_is_refused(
    run: Run, runtime_dir: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str]
) -> None:
    monkeypatch.setenv("KVTIDE_RUNTIME_DIR", str(runtime_dir / ("x" * 100)))
    assert "the kernel allows 107" in one_line(run(*arguments))


@pytest.mark.parametrize("arguments", [["status"], ["status", "--json"], ["clear"]])
def test_no_node_is_one_line(run: Run, arguments: list[str]) -> None:
    line = one_line(run(*arguments))
    assert "no node of this version listens at" in line
    assert "`kvtide serve`" in line


def test_commands_make_no_directory(
    run: Run, runtime_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVTIDE_RUNTIME_DIR", str(runtime_dir / "new"))
    for arguments in (["status"], ["stop"], ["clear"], ["logs"], ["doctor"], ["config", "show"]):
        run(*arguments)
    assert not (runtime_dir / "new").exists()


# ---- status


def test_status_is_a_page_for_people(run: Run, running_node: NodeProcess) -> None:
    shape = Shape(weights=b"w", fields={"dtype": "bf16"})
    other = Shape(weights=b"w", fields={"dtype": "fp8"})
    with (
        FakeEngine(running_node.places, "one", shape) as one,
        FakeEngine(running_node.places, "two", other),
    ):
        one.store(TOKENS)
        one.load(TOKENS)
        counts = {"tokens.external": 160, "tokens.computed": 5_000, "miss.absent": 7}
        counts |= {"load.us.1000": 2, "load.us.sum": 1500, "loaded_bytes": 3 << 20}
        one.scheduler.link.send(m.Counts(counts))
        wait_count(running_node, "miss.absent")
        text = run("status").output
    for expected in (
        f"node        process {running_node.pid}, kvtide {kvtide.__version__}, up",
        str(running_node.places.directory),
        "host        64 MiB at most",
        "2 chunks, 1 tails, 0 being stored",
        "1 shard: ",
        "open to one",
        "one: on, process",
        "  tokens: computed 5,000, from kvtide 160",
        "  misses: absent 7",
        "fake engine two",
        "not shared  one and two have the same weights, but differ in",
        "dtype: bf16 ≠ fp8",
        "tokens      computed 5,000, from kvtide 160",
        "loads       10 blocks, 3 MiB, 2 copies in 0.0015 s, 2.1 GB/s",
        "stores      10 blocks, 0 B",
        "misses      absent 7",
        "drops       none",
        "evictions   none",
    ):
        assert expected in text, text
    assert max(len(line) for line in text.splitlines()) < 120


def wait_count(node: NodeProcess, name: str) -> None:
    """Wait until an engine's counter has arrived."""
    for _ in range(1_000):
        if name in node.status()["counts"]:
            return
        time.sleep(0.01)
    raise AssertionError(f"{name} never came")


def test_status_for_programs_is_the_nodes_own(run: Run, running_node: NodeProcess) -> None:
    told = json.loads(run("status", "--json").output)
    asked = running_node.status()
    for either in (told, asked):
        del either["node"]["uptime_s"]
    assert told == asked


def test_status_of_an_idle_node_is_calm(run: Run, running_node: NodeProcess) -> None:
    text = run("status").output
    assert "engines     none" in text
    assert "regions     none" in text
    assert "not shared" not in text


def test_words_of_others_do_not_reach_the_terminal(run: Run, running_node: NodeProcess) -> None:
    shape = Shape(fields={"a\x1b[2J": "b\r\n"})
    with FakeEngine(running_node.places, "evil\x1b[31m\nnode  none", shape):
        text = run("status").output
    assert "\x1b" not in text
    assert "evil?[31m?node  none: on" in text


def test_status_of_a_stopped_node_says_where_to_look(
    run: Run, running_node: NodeProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "ANSWER_S_MAX", 0.3)
    running_node.signal(signal.SIGSTOP)
    try:
        line = one_line(run("status"))
    finally:
        running_node.signal(signal.SIGCONT)
    assert "does not answer; its log is" in line
    assert str(running_node.places.log) in line


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0 s"), (59, "59 s"), (61, "1 min 1 s"), (7_200, "2 h"), (90_061, "1 d 1 h")],
)
def test_times_are_shown_in_two_units(seconds: int, text: str) -> None:
    assert page.duration(seconds) == text


# ---- stop


def test_stop_ends_the_node(run: Run, running_node: NodeProcess) -> None:
    pid = running_node.pid
    result = run("stop")
    assert result.output == f"node {pid} has ended\n"
    assert result.exit_code == 0
    assert wait_dead(pid, 0)


def test_stop_without_a_node_is_no_mistake(run: Run, runtime_dir: Path) -> None:
    result = run("stop")
    assert result.exit_code == 0
    assert result.output == f"no node is running in {runtime_dir}\n"
    with socket.socket(socket.AF_UNIX) as left_behind:
        left_behind.bind(str(runtime_dir / "node-1.sock"))
    assert run("stop").output == f"no node is running in {runtime_dir}\n"


# ---- clear


@pytest.fixture
def salted(running_node: NodeProcess) -> FakeEngine:
    """An engine with one chunk without a salt, and one each of two salts."""
    engine = FakeEngine(running_node.places, "one").start()
    scheduler = engine.scheduler
    plain = scheduler.root
    for salt in (None, "mine", "yours"):
        root = plain(salt)
        scheduler.link.send(m.RegisterRoot(root, b"", salt_digest(salt)))
        scheduler.root = lambda salt=None, root=root: root  # type: ignore[method-assign, misc]
        engine.store(make_tokens(64, seed=1))
    scheduler.root = plain  # type: ignore[method-assign]
    assert running_node.status()["entries"]["chunks"] == 3
    return engine


def test_clear_takes_everything(run: Run, salted: FakeEngine, running_node: NodeProcess) -> None:
    assert run("clear").output == "cleared 3 entries, all there were\n"
    assert running_node.status()["entries"]["chunks"] == 0
    assert salted.load(make_tokens(64, seed=1)) == Loaded(0, 0)
    salted.close()


@pytest.mark.parametrize("way", ["option", "stdin", "stdin with a line's end", "variable"])
def test_clear_takes_one_salts(
    run: Run,
    salted: FakeEngine,
    running_node: NodeProcess,
    monkeypatch: pytest.MonkeyPatch,
    way: str,
) -> None:
    if way == "option":
        result = run("clear", "--salt", "mine")
    elif way == "variable":
        monkeypatch.setenv("KVTIDE_SALT", "mine")
        result = run("clear")
    else:
        result = run("clear", "--salt", "-", typed="mine" + "\r\n" * ("end" in way))
    assert result.output == "cleared 1 entries of this salt\n"
    assert running_node.status()["entries"]["chunks"] == 2
    assert salted.load(make_tokens(64, seed=1)) == Loaded(4, 4)
    assert "mine" not in running_node.log()
    salted.close()


def test_clear_of_the_empty_salt_takes_those_without(
    run: Run, salted: FakeEngine, running_node: NodeProcess
) -> None:
    result = run("clear", "--salt", "")
    assert result.output == "cleared 1 entries of requests without a salt\n"
    assert running_node.status()["entries"]["chunks"] == 2
    salted.close()


def test_clear_of_a_salt_that_is_not_given_is_a_mistake(
    run: Run, running_node: NodeProcess
) -> None:
    """An empty pipe must not clear what has no salt."""
    result = run("clear", "--salt", "-", typed="\n")
    assert result.exit_code == 2
    assert "no salt on standard input" in result.output


def test_salt_is_not_inherited_by_a_node(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVTIDE_SALT", "mine")
    assert "KVTIDE_SALT" not in _environment(Path("/run/x"))


def test_node_refuses_a_digest_that_is_none(running_node: NodeProcess) -> None:
    for digest in ("mine", "00", "zz" * 32, "0" * 63):
        with pytest.raises(WireError, match="64 hex digits"):
            ask(running_node.places, "clear", {"salt_digest": digest})


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


def test_logs_without_a_log_says_so(run: Run) -> None:
    assert "there is no log at" in one_line(run("logs"))


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


# ---- config show


def test_config_shows_the_running_nodes_own(
    run: Run, new_node: StartNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = new_node(host_bytes="48MiB", http_address="127.0.0.1:0", http_token="hunter2")
    node.start()
    monkeypatch.setenv("KVTIDE_CHUNK_TOKENS", "64")
    monkeypatch.setenv("KVTIDE_HOST_BYTES", "1GiB")
    text = run("config", "show").output
    assert "those of the running node" in text
    lines = {line.split("  ")[0]: " ".join(line.split()) for line in text.splitlines()}
    assert lines["host_bytes"] == (
        "host_bytes 48 MiB (50331648 bytes) node environment KVTIDE_HOST_BYTES"
    )
    assert lines["chunk_tokens"] == "chunk_tokens 64 engine environment KVTIDE_CHUNK_TOKENS"
    assert "hunter2" not in text
    assert "set, not shown" in lines["http_token"]
    told = json.loads(run("config", "show", "--json").output)
    assert told["node_is_running"] is True
    assert {one["name"] for one in told["settings"]} >= {"host_bytes", "start_node"}
    assert "hunter2" not in json.dumps(told)


def test_config_without_a_node_shows_what_one_would_start_with(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVTIDE_LINGER_S", "5")
    result = run("config", "show", "--json")
    told = json.loads(result.output)
    assert told["node_is_running"] is False
    linger = next(one for one in told["settings"] if one["name"] == "linger_s")
    assert linger == {
        "name": "linger_s",
        "value": "5",
        "owner": "node",
        "source": "environment KVTIDE_LINGER_S",
        "default": "600",
    }


# ---- serve


def test_serve_runs_until_ctrl_c(new_node: StartNode, runtime_dir: Path) -> None:
    node = new_node()
    environment = os.environ | node.environment | {"KVTIDE_RUNTIME_DIR": str(runtime_dir)}
    with subprocess.Popen(
        [*KVTIDE, "serve"], stderr=subprocess.PIPE, text=True, env=environment
    ) as child:
        assert child.stderr is not None
        first = child.stderr.readline()
        assert f"serves at {node.places.socket}, host memory up to 64 MiB" in first
        with FakeEngine(node.places, "one") as engine:
            engine.store(TOKENS)
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
    assert line == f"Error: a node is running already, in {running_node.places.directory}"


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
