"""The commands, as a user runs them, on a real node."""

import json
import os
import resource
import signal
import subprocess
import time
from pathlib import Path

import pytest

import kvtide
from kvtide.cli import page
from kvtide.cli.main import COMMANDS, main
from kvtide.core import messages as m
from kvtide.core.keys import salt_digest
from kvtide.errors import NodeError
from kvtide.node.launch import _environment
from kvtide.testing.fake_engine import FakeEngine, Loaded, Shape, make_tokens
from kvtide.testing.node_process import NodeProcess
from kvtide.units import format_bytes
from kvtide.wire import command
from kvtide.wire.command import ask
from tests.cli.runs import KVTIDE, Run, one_line
from tests.node.fixtures import StartNode

TOKENS = make_tokens(160, seed=1)
HELP_S_MAX = 0.15


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
    assert command.short_help is None, "the same words a third time"
    assert (command.help or "").splitlines()[0] == COMMANDS[name][1]
    result = run(name, "--help")
    assert result.exit_code == 0
    assert COMMANDS[name][1][:-1] in " ".join(result.output.split())


def test_unknown_commands_and_options_are_mistakes_of_usage(run: Run) -> None:
    assert run("nonsense").exit_code == 2
    assert "No such command 'statu'. Did you mean 'status'?" in run("statu").output
    assert run("status", "--nonsense").exit_code == 2
    assert run("logs", "-n", "-1").exit_code == 2


@pytest.mark.parametrize("name", COMMANDS)
def test_lists_of_commands_are_not_cut_short(run: Run, name: str) -> None:
    for line in run(name, "--help").output.splitlines():
        assert not line.endswith("...") or line.startswith("Usage: "), line


def test_help_is_there_at_once() -> None:
    """Processor time: other people's work on the machine does not count."""
    taken_s = []
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([*KVTIDE, "--help"], check=True, capture_output=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        taken_s.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    assert min(taken_s) < HELP_S_MAX, taken_s


def test_bad_settings_are_one_line(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVTIDE_HOST_BITES", "1GiB")
    assert "did you mean KVTIDE_HOST_BYTES?" in one_line(run("serve"))


@pytest.mark.parametrize("name", ["KVTIDE_HOST_BITES", "KVTIDE_CONFIG_FILE"])
def test_bad_settings_keep_nobody_from_the_node_that_runs(
    run: Run, running_node: NodeProcess, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """It was started by better ones; these commands need its place alone."""
    monkeypatch.setenv(name, "nonsense")
    for arguments in (["status"], ["clear"], ["logs"], ["stop"]):
        result = run(*arguments)
        assert result.exit_code == 0, result.output
        assert result.stderr.startswith("Warning: "), result.stderr
        assert name in result.stderr
        assert len(result.stderr.splitlines()) == 1
        assert result.stdout
    assert running_node.wait_gone(0)


def test_runtime_directory_that_cannot_be_meant_is_one_line(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVTIDE_RUNTIME_DIR", "here")
    for arguments in (["status"], ["clear"], ["logs"], ["stop"]):
        assert "KVTIDE_RUNTIME_DIR is 'here'" in one_line(run(*arguments))


@pytest.mark.parametrize("arguments", [["status"], ["stop"], ["clear"], ["serve"], ["logs"]])
def test_directory_of_others_is_refused(run: Run, runtime_dir: Path, arguments: list[str]) -> None:
    runtime_dir.chmod(0o755)
    assert "chmod 700 it" in one_line(run(*arguments))


@pytest.mark.parametrize("arguments", [["status"], ["stop"], ["clear"], ["serve"], ["logs"]])
def test_directory_that_may_not_be_seen_is_refused(
    run: Run, monkeypatch: pytest.MonkeyPatch, arguments: list[str]
) -> None:
    def forbidden(path: Path) -> os.stat_result:
        raise PermissionError(13, "Permission denied", str(path))

    for name in ("stat", "lstat"):
        monkeypatch.setattr(Path, name, forbidden)
    assert "cannot be used (Permission denied)" in one_line(run(*arguments))


@pytest.mark.parametrize("arguments", [["status"], ["stop"], ["clear"], ["serve"]])
def test_too_long_a_path_is_refused(
    run: Run, runtime_dir: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str]
) -> None:
    monkeypatch.setenv("KVTIDE_RUNTIME_DIR", str(runtime_dir / ("x" * 100)))
    assert "the kernel allows 107" in one_line(run(*arguments))


@pytest.mark.parametrize("arguments", [["status"], ["status", "--json"], ["clear"]])
def test_no_node_is_one_line(run: Run, arguments: list[str]) -> None:
    line = one_line(run(*arguments))
    assert line.startswith("Error: no node is running in ")
    assert line.endswith(". `kvtide serve`, or the next engine, starts one")


def test_a_node_of_another_version_is_named_where_none_of_ours_is(
    run: Run, runtime_dir: Path
) -> None:
    (runtime_dir / "node-0.sock").touch()
    said = one_line(run("status"))
    assert "no node of this version (there is node-0.sock) is running in" in said


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
        one.keep(TOKENS)
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
        "2 chunks, 1 tail, 0 being stored",
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
    assert f"the node at {running_node.places.socket} does not answer" in line
    assert line.endswith("; `kvtide logs` shows its log, or says where that is")


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0 s"), (59, "59 s"), (61, "1 min 1 s"), (7_200, "2 h"), (90_061, "1 d 1 h")],
)
def test_times_are_shown_in_two_units(seconds: int, text: str) -> None:
    assert page.duration(seconds) == text


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
        engine.keep(make_tokens(64, seed=1))
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
    assert result.output == "cleared 1 entry of this salt\n"
    assert running_node.status()["entries"]["chunks"] == 2
    assert salted.load(make_tokens(64, seed=1)) == Loaded(4, 4)
    assert "mine" not in running_node.log()
    salted.close()


def test_clear_of_the_empty_salt_takes_those_without(
    run: Run, salted: FakeEngine, running_node: NodeProcess
) -> None:
    result = run("clear", "--salt", "")
    assert result.output == "cleared 1 entry of requests without a salt\n"
    assert running_node.status()["entries"]["chunks"] == 2
    salted.close()


def test_clear_with_an_empty_variable_clears_nothing(
    run: Run, salted: FakeEngine, running_node: NodeProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever sets the variable from another one that is not set does not mean everything."""
    monkeypatch.setenv("KVTIDE_SALT", "")
    result = run("clear")
    assert result.exit_code == 2
    assert "KVTIDE_SALT is empty: unset it to clear everything" in result.output
    assert running_node.status()["entries"]["chunks"] == 3
    assert run("clear", "--salt", "").output == "cleared 1 entry of requests without a salt\n"
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


def test_a_node_is_told_where_keys_of_a_store_are_but_no_keys(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("AWS_WEB_IDENTITY_TOKEN_FILE", "/run/token")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    monkeypatch.setenv("AWS_SESSION_TOKEN", "secret")
    environment = _environment(Path("/run/x"))
    assert environment["AWS_WEB_IDENTITY_TOKEN_FILE"] == "/run/token"
    assert "secret" not in environment.values()


def test_node_refuses_a_digest_that_is_none(running_node: NodeProcess) -> None:
    for digest in ("mine", "00", "zz" * 32, "0" * 63):
        with pytest.raises(NodeError, match=r"64 hex digits.*`kvtide logs` says more"):
            ask(running_node.places, "clear", {"salt_digest": digest})


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
        "host_bytes 48 MiB (50331648 bytes) node the node's environment KVTIDE_HOST_BYTES"
    )
    assert lines["chunk_tokens"] == "chunk_tokens 64 engine environment KVTIDE_CHUNK_TOKENS"
    assert "hunter2" not in text
    assert "set, not shown" in lines["http_token"]
    told = json.loads(run("config", "show", "--json").output)
    assert told["node_is_running"] is True
    assert {one["name"] for one in told["settings"]} >= {"host_bytes", "start_node"}
    assert "hunter2" not in json.dumps(told)


def test_config_shows_what_auto_has_come_to(run: Run, new_node: StartNode) -> None:
    node = new_node(host_bytes="auto")
    node.start()
    (line,) = [one for one in run("config", "show").output.splitlines() if "host_bytes" in one]
    size = format_bytes(node.status()["host"]["size_bytes"])
    assert " ".join(line.split()).startswith(f"host_bytes {size} (auto) node")


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


@pytest.mark.parametrize("options", [[], ["--json"]])
def test_config_shows_what_can_be_read_and_then_what_cannot(
    run: Run, monkeypatch: pytest.MonkeyPatch, options: list[str]
) -> None:
    """It is asked by whoever looks for what is wrong."""
    monkeypatch.setenv("KVTIDE_HOST_BITES", "1GiB")
    monkeypatch.setenv("KVTIDE_LINGER_S", "soon")
    monkeypatch.setenv("KVTIDE_LOAD_POLICY", "always")
    result = run("config", "show", *options)
    assert result.exit_code == 1
    assert "environment KVTIDE_LOAD_POLICY" in result.stdout
    first, second = result.stderr.splitlines()
    assert first.startswith("Error: the environment's KVTIDE_HOST_BITES is not a setting")
    assert second.startswith("Error: environment KVTIDE_LINGER_S sets linger_s to 'soon': not a")
    if options:
        told = [f"Error: {fault}" for fault in json.loads(result.stdout)["faults"]]
        assert told == [first, second]
