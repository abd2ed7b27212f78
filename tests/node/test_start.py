"""How a node starts, who it is, and how it ends."""

import os
import re
import resource
import signal
import socket
import stat
import subprocess
import sys
import textwrap
import time
from contextlib import suppress
from pathlib import Path

import pytest

from kvtide.errors import ConfigError, NodeError, NodeUnreachable
from kvtide.memory.probe import KernelFeatures
from kvtide.node import launch, main
from kvtide.node.supervise import NodeStarter
from kvtide.testing.fake_engine import FakeEngine
from kvtide.testing.node_process import NodeProcess, wait_dead
from kvtide.wire.command import ask
from kvtide.wire.places import Places, open_directory
from tests.node.fixtures import StartNode

START_S_MAX = 0.5


def run_main(runtime_dir: Path, **settings: str) -> subprocess.CompletedProcess[str]:
    """The node's program in the foreground of the test, its output caught."""
    variables = {f"KVTIDE_{name.upper()}": value for name, value in settings.items()}
    return subprocess.run(
        [sys.executable, "-m", "kvtide.node.main"],
        env=os.environ | {"KVTIDE_RUNTIME_DIR": str(runtime_dir)} | variables,
        capture_output=True,
        text=True,
        timeout=20,
        check=False,
    )


def idle_start_s(node: NodeProcess) -> float:
    """Start a node: how long its first answer would take if nobody else wanted the processors.

    What it waited for a processor does not count; what it slept, for a name server say, does.
    """
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    began_s = time.monotonic()
    node.launch()
    launched_s = time.monotonic()
    node.wait_answer()
    answered_s = time.monotonic()
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    launcher_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    text = Path(f"/proc/{node.pid}/schedstat").read_text(encoding="ascii")
    ran_s, waited_s = (int(word) / 1e9 for word in text.split()[:2])
    slept_s = max(0.0, answered_s - launched_s - ran_s - waited_s)
    print(f"{answered_s - began_s:.3f} s, of which {launcher_s + ran_s + slept_s:.3f} its own")
    return launcher_s + ran_s + slept_s


@pytest.mark.parametrize("host_bytes", ["16MiB", "auto", "2GiB"])
def test_first_answer_comes_within_half_a_second(new_node: StartNode, host_bytes: str) -> None:
    """Memory is allocated as it is used, so its size does not delay the start."""
    taken_s = []
    for _ in range(2):
        node = new_node(host_bytes=host_bytes)
        taken_s.append(idle_start_s(node))
        node.end()
    assert min(taken_s) <= START_S_MAX, taken_s


def test_http_does_not_delay_the_start(new_node: StartNode) -> None:
    """Nobody is asked for this machine's name: without a network that may take seconds."""
    node = new_node(http_address="127.0.0.1:0")
    assert idle_start_s(node) <= START_S_MAX


def test_second_node_leaves_politely(running_node: NodeProcess) -> None:
    done = run_main(running_node.places.directory)
    assert done.returncode == 0
    assert done.stderr.strip().endswith(
        f" INFO a node is running already, in {running_node.places.directory}"
    )
    assert running_node.status()["node"]["pid"] == running_node.pid


def test_racing_starts_give_one_node(new_node: StartNode) -> None:
    node = new_node()
    launches = [
        subprocess.Popen(
            [sys.executable, "-m", "kvtide.node.launch"],
            env=os.environ | node.environment | {"KVTIDE_RUNTIME_DIR": str(node.places.directory)},
        )
        for _ in range(4)
    ]
    assert [one.wait(20) for one in launches] == [0] * 4
    node.wait_answer()
    until_s = time.monotonic() + 20
    while len(node.pids()) > 1 and time.monotonic() < until_s:
        time.sleep(0.05)
    assert node.pids() == [node.status()["node"]["pid"]]


def test_starts_again_after_sigkill(running_node: NodeProcess) -> None:
    """What a killed node leaves behind, socket and lock, hinders nobody."""
    first = running_node.pid
    for _ in range(3):
        running_node.kill()
        assert running_node.places.socket.exists(), "the kernel does not remove it"
        running_node.start()
    assert running_node.pid != first


def test_ends_when_its_socket_is_gone(running_node: NodeProcess) -> None:
    running_node.places.socket.unlink()
    assert running_node.wait_gone(5)
    assert "is gone" in running_node.log()


def test_leaves_a_socket_that_is_not_its_own(running_node: NodeProcess) -> None:
    """The runtime directory was emptied and another node took the name."""
    running_node.places.socket.unlink()
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(running_node.places.socket))
        assert running_node.wait_gone(5)
        assert running_node.places.socket.exists()


def test_socket_of_the_same_number_is_not_taken_for_its_own(running_node: NodeProcess) -> None:
    """File systems give the number of a removed file to the next one: the node holds its own."""
    path = running_node.places.socket
    inode = path.stat().st_ino
    path.unlink()
    made = []
    for number in range(50):
        sock = socket.socket(socket.AF_UNIX)
        sock.bind(f"{path}.{number}")
        made.append(sock)
        assert Path(f"{path}.{number}").stat().st_ino != inode
    for sock in made:
        sock.close()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_signal_ends_it_in_time_and_removes_the_socket(
    running_node: NodeProcess, number: signal.Signals
) -> None:
    with FakeEngine(running_node.places, "one") as engine:
        running_node.signal(number)
        assert running_node.wait_gone(10)
        assert engine.scheduler.wait_for(lambda: engine.scheduler.downs)
        assert not engine.scheduler.link.stopped_on_purpose, "an engine may start another"
    assert not running_node.places.socket.exists()
    assert not running_node.places.stopped.exists()


def test_signal_to_a_node_in_the_foreground_is_on_purpose(runtime_dir: Path) -> None:
    node = NodeProcess(runtime_dir)
    environment = os.environ | {"KVTIDE_RUNTIME_DIR": str(runtime_dir)}
    environment |= {"KVTIDE_HOST_BYTES": "64MiB"}
    command = [sys.executable, "-m", "kvtide.cli.main", "serve"]
    node.places.stopped.write_text("")
    with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE) as child:
        node.wait_answer()
        assert not node.places.stopped.exists(), "somebody has started one"
        with FakeEngine(node.places, "one") as engine:
            child.terminate()
            assert child.wait(10) == 0
            assert engine.scheduler.wait_for(lambda: engine.scheduler.link.stopped_on_purpose)
    assert node.places.stopped.read_text() == "SIGTERM\n"


def test_launcher_says_why_there_is_no_place_for_a_node(new_node: StartNode) -> None:
    node = new_node()
    node.places.directory.chmod(0o755)
    with pytest.raises(subprocess.CalledProcessError) as raised:
        node.launch()
    assert raised.value.returncode == launch.EXIT_CONFIG
    assert "is open to others" in raised.value.stderr
    starter = NodeStarter(node.places.directory)
    starter.absent(0.0)
    assert "is open to others" in starter.error


def test_survives_the_process_group_that_started_it(new_node: StartNode) -> None:
    """An engine's whole group is killed, as a container runtime or a shell does."""
    node = new_node()
    program = f"""
        import pathlib, time
        from kvtide.node.launch import start_node
        start_node(pathlib.Path({str(node.places.directory)!r}), {node.environment!r})
        print("started", flush=True)
        time.sleep(60)
    """
    parent = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(program)],
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    assert parent.stdout is not None
    with parent.stdout:
        assert parent.stdout.readline() == b"started\n"
        node.wait_answer()
        os.killpg(parent.pid, signal.SIGKILL)
        parent.wait()
    assert node.status()["node"]["pid"] == node.pid
    assert os.getsid(node.pid) not in (parent.pid, os.getsid(0))


def test_inherits_nothing(new_node: StartNode, tmp_path: Path) -> None:
    """No descriptor, variable, mask of processors or signals, memory policy of whoever asked."""
    secret = tmp_path / "secret"
    secret.write_text("")
    node = new_node()
    program = f"""
        import ctypes, os, pathlib, signal
        os.set_inheritable(os.open({str(secret)!r}, os.O_RDONLY), True)
        os.environ["AWS_SECRET_ACCESS_KEY"] = "hunter2"
        os.environ["KVTIDE_SALT"] = "hunter3"
        os.sched_setaffinity(0, {{0}})
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM, signal.SIGUSR1])
        ctypes.CDLL(None).syscall(238, 2, ctypes.byref(ctypes.c_ulong(1)), 64)  # MPOL_BIND
        from kvtide.node import launch
        directory = pathlib.Path({str(node.places.directory)!r})
        launch.start_node(directory, {node.environment!r})
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(program)], check=True, timeout=20)
    node.wait_answer()
    assert not [name for name in node.descriptors() if str(tmp_path) in name]
    environ = Path(f"/proc/{node.pid}/environ").read_bytes()
    assert b"hunter" not in environ
    assert len(os.sched_getaffinity(node.pid)) == os.cpu_count()
    lines = Path(f"/proc/{node.pid}/status").read_text(encoding="ascii").splitlines()
    assert next(line for line in lines if line.startswith("SigBlk:")).split()[1] == "0" * 16
    with suppress(FileNotFoundError):  # a kernel without NUMA
        maps = Path(f"/proc/{node.pid}/numa_maps").read_text(encoding="ascii")
        assert all(line.split()[1] == "default" for line in maps.splitlines())
    assert Path(f"/proc/{node.pid}/cwd").readlink() == Path("/")


def test_launcher_closes_descriptors_beyond_a_thousand(
    new_node: StartNode, tmp_path: Path
) -> None:
    """Run without subprocess's help, with a high descriptor that is inherited."""
    secret = tmp_path / "secret"
    secret.write_text("")
    node = new_node()
    program = f"""
        import os, pathlib, sys
        descriptor = os.open({str(secret)!r}, os.O_RDONLY)
        os.dup2(descriptor, 1500, inheritable=True)
        from kvtide.node import launch
        environment = launch._environment(pathlib.Path({str(node.places.directory)!r}))
        environment |= {node.environment!r}
        os.execve(sys.executable, [sys.executable, "-m", "kvtide.node.launch"], environment)
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(program)], check=True, timeout=20)
    node.wait_answer()
    assert not [name for name in node.descriptors() if str(tmp_path) in name]


def test_paths_relative_to_the_engine_reach_the_node(
    new_node: StartNode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The node starts in the root directory: a relative path must not change its meaning."""
    (tmp_path / "my.yaml").write_text("linger_s: 77\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("KVTIDE_CONFIG_FILE", "my.yaml")
    monkeypatch.setenv("PYTHONPATH", "lib")
    node = new_node()
    node.start()
    settings = {one["name"]: one for one in node.status()["node"]["settings"]}
    assert settings["linger_s"]["value"] == "77"
    assert settings["linger_s"]["source"] == f"{tmp_path / 'my.yaml'}, line 1"
    environ = Path(f"/proc/{node.pid}/environ").read_text(encoding="utf-8").split("\0")
    assert f"PYTHONPATH={tmp_path / 'lib'}" in environ


def test_the_cache_is_what_memory_shortage_takes_first(running_node: NodeProcess) -> None:
    score = int(Path(f"/proc/{running_node.pid}/oom_score_adj").read_text(encoding="ascii"))
    assert score >= main.OOM_SCORE_ADJ
    assert score > int(Path("/proc/self/oom_score_adj").read_text(encoding="ascii"))


def test_may_have_as_many_descriptors_as_the_machine_allows(running_node: NodeProcess) -> None:
    limits = Path(f"/proc/{running_node.pid}/limits").read_text(encoding="ascii")
    line = next(line for line in limits.splitlines() if line.startswith("Max open files"))
    soft, hard = line.split()[3:5]
    assert soft == hard


def test_lingers_and_ends_after_its_last_engine(new_node: StartNode) -> None:
    node = new_node(linger_s=0.5)
    node.start()
    pid = node.pid
    while node.status()["node"]["uptime_s"] < 2:  # longer than it lingers, but nobody has come yet
        assert not wait_dead(pid, 0.1)
    command = [sys.executable, "-m", "kvtide.testing.fake_engine", node.places.directory, "one"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as engine:
        assert engine.stdout is not None
        assert engine.stdout.readline() == b"ready\n"
        engine.kill()
    assert wait_dead(pid, 5)
    assert "linger_s" in node.log()


def test_linger_of_zero_means_at_once_not_never(new_node: StartNode) -> None:
    node = new_node(linger_s=0)
    node.start()
    pid = node.pid
    command = [sys.executable, "-m", "kvtide.testing.fake_engine", node.places.directory, "one"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as engine:
        assert engine.stdout is not None
        assert engine.stdout.readline() == b"ready\n"
        engine.kill()
    assert wait_dead(pid, 3)


# ---- what is refused


def test_open_directory_is_refused(runtime_dir: Path) -> None:
    runtime_dir.chmod(0o750)
    with pytest.raises(ConfigError, match=r"open to others \(mode 750\): .* or chmod 700 it"):
        open_directory(runtime_dir)
    done = run_main(runtime_dir)
    assert done.returncode == launch.EXIT_CONFIG
    assert "chmod 700" in done.stderr
    assert "Traceback" not in done.stderr


def test_nobody_is_told_to_close_a_directory_that_is_everybodys(runtime_dir: Path) -> None:
    """Such as /tmp: root would do as it is told."""
    runtime_dir.chmod(0o1777)
    with pytest.raises(ConfigError, match=f"below it, such as {runtime_dir}/kvtide$"):
        open_directory(runtime_dir)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can make a directory of somebody else")
def test_directory_of_somebody_else_is_refused(runtime_dir: Path) -> None:
    os.chown(runtime_dir, 12345, 12345)
    with pytest.raises(ConfigError, match="belongs to user 12345, not to 0"):
        open_directory(runtime_dir)


def test_file_in_place_of_the_directory_is_refused(runtime_dir: Path) -> None:
    place = runtime_dir / "file"
    place.write_text("")
    with pytest.raises(ConfigError, match="is not a directory: set KVTIDE_RUNTIME_DIR"):
        open_directory(place)
    with pytest.raises(ConfigError, match="cannot be used"):
        open_directory(place / "below")


def test_link_in_place_of_the_directory_is_refused(runtime_dir: Path) -> None:
    """Who may write to /tmp could lead us to a directory of ours that is meant for others."""
    (runtime_dir / "ours").mkdir(0o700)
    link = runtime_dir / "link"
    link.symlink_to(runtime_dir / "ours")
    with pytest.raises(ConfigError, match="is a symbolic link"):
        open_directory(link)
    (runtime_dir / "ours").rmdir()
    with pytest.raises(ConfigError, match="is a symbolic link"):
        open_directory(link)


def test_directory_is_made_for_its_user_alone(runtime_dir: Path) -> None:
    places = open_directory(runtime_dir / "a" / "b")
    assert stat.S_IMODE(places.directory.stat().st_mode) == 0o700


def test_too_long_a_path_is_refused_with_both_lengths(runtime_dir: Path) -> None:
    done = run_main(runtime_dir / ("x" * 100))
    assert done.returncode == launch.EXIT_CONFIG
    assert "the kernel allows 107" in done.stderr
    assert list(runtime_dir.iterdir()) == [], "made for nothing"
    with pytest.raises(ConfigError, match="107"):
        ask(Places(runtime_dir / ("x" * 100)), "status")


def test_more_memory_than_there_is_is_refused_with_both_sizes(runtime_dir: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "kvtide.cli.main", "serve"],
        env=os.environ | {"KVTIDE_RUNTIME_DIR": str(runtime_dir), "KVTIDE_HOST_BYTES": "900TiB"},
        capture_output=True,
        text=True,
        timeout=20,
        check=False,
    )
    assert done.returncode == 1
    assert "host_bytes asks for 900 TiB, but only" in done.stderr
    assert "available: ask for less" in done.stderr
    with pytest.raises(NodeUnreachable, match=f"no node is running in {runtime_dir}"):
        ask(Places(runtime_dir), "status")


def test_node_of_an_engine_takes_what_memory_there_is(new_node: StartNode) -> None:
    """It may follow one that crashed, when the machine is fuller than it was."""
    node = new_node(host_bytes="900TiB")
    node.start()
    assert "WARNING host_bytes asks for 900 TiB, but only" in node.log()
    assert 0 < node.status()["host"]["size_bytes"] < 900 << 40


def test_kernel_that_lacks_something_is_no_wrong_setting(
    runtime_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVTIDE_RUNTIME_DIR", str(runtime_dir))
    features = KernelFeatures(True, False, True)
    monkeypatch.setattr(main.probe, "kernel_features", lambda: features)
    with pytest.raises(
        NodeError, match=r"lacks pidfd_open \(Linux 5.3\): use a newer one, or allow"
    ):
        main.become_node(main.Way.FOREGROUND)


def test_socket_that_cannot_be_is_no_wrong_setting(
    runtime_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def serve(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setenv("KVTIDE_RUNTIME_DIR", str(runtime_dir))
    monkeypatch.setattr(main, "serve", serve)
    monkeypatch.setattr(main, "prepare_process", lambda: None)
    with pytest.raises(NodeError, match=r"cannot serve at .*No space left on device"):
        main.become_node(main.Way.FOREGROUND)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"linger_s": "soon"}, "environment KVTIDE_LINGER_S sets linger_s to 'soon'"),
        ({"lingers": "1"}, "did you mean KVTIDE_LINGER_S?"),
        ({"http_token": "secret"}, "but http_address is not set"),
    ],
)
def test_unusable_settings_are_said(
    runtime_dir: Path, settings: dict[str, str], said: str
) -> None:
    done = run_main(runtime_dir, **settings)
    assert done.returncode == launch.EXIT_CONFIG
    assert re.match(r"\d{4}-\d\d-\d\d .* CRITICAL ", done.stderr), "as the log's lines"
    assert said in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert "secret" not in done.stderr


def test_last_words_of_a_broken_interpreter_are_in_the_log(
    new_node: StartNode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The node cannot even be imported: the log, which engines name, must say why."""
    (tmp_path / "kvtide").mkdir()
    for name in ("__init__.py", "errors.py"):
        source = Path(launch.__file__).parents[1] / name
        (tmp_path / "kvtide" / name).write_text(source.read_text(encoding="utf-8"))
    for name in ("node", "wire", "core"):
        (tmp_path / "kvtide" / name).symlink_to(Path(launch.__file__).parents[1] / name)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    node = new_node()
    node.launch()
    wait_log(node, "ImportError: cannot import name")


def wait_log(node: NodeProcess, text: str) -> None:
    """Wait until it has said so: a process that was just launched is not the node yet."""
    until_s = time.monotonic() + 20
    while text not in node.log():
        assert time.monotonic() < until_s, node.log()
        time.sleep(0.02)
