"""`kvtide doctor`: all well, and each thing that may be wrong, with what to do."""

import datetime
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from kvtide.cli import examine
from kvtide.cli.examine import NOTE, OK, WRONG, Finding
from kvtide.cli.main import main
from kvtide.core import messages as m
from kvtide.errors import HostMemoryError
from kvtide.memory.probe import CgroupLimit, HostMemory, KernelFeatures, Pressure
from kvtide.testing.fake_engine import FakeEngine, FakeScheduler, Shape
from kvtide.testing.fake_worker import FakeWorker
from kvtide.testing.node_process import NodeProcess
from kvtide.units import GiB, MiB
from kvtide.wire import command
from kvtide.wire.places import Places
from tests.node.fixtures import StartNode
from tests.wire.link_owner import wait_until

Doctor = Callable[[], Result]


@pytest.fixture
def doctor(runtime_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Doctor:
    """Runs the command in the test's runtime directory."""
    monkeypatch.setenv("KVTIDE_RUNTIME_DIR", str(runtime_dir))
    return lambda: CliRunner().invoke(main, ["doctor"])


def line(result: Result, what: str) -> str:
    """The line about one thing."""
    found = [one for one in result.output.splitlines() if one[6:].startswith(f"{what} ")]
    assert len(found) == 1, result.output
    return found[0]


def verdicts(findings: object) -> list[str]:
    """Of several findings."""
    return [finding.verdict for finding in findings]  # type: ignore[attr-defined]


def only(findings: object) -> Finding:
    """The one finding."""
    (found,) = findings  # type: ignore[misc]
    assert isinstance(found, Finding)
    return found


def test_all_is_well_without_a_node(doctor: Doctor, runtime_dir: Path) -> None:
    result = doctor()
    assert result.exit_code == 0, result.output
    assert (
        line(result, "node")
        == f"ok    node         no node is running in {runtime_dir}. `kvtide serve`, or the next"
        " engine, starts one"
    )
    assert f"{runtime_dir}, yours alone" in line(result, "directory")
    assert "of 107 bytes" in line(result, "socket path")
    assert "`auto` would take up to" in line(result, "memory")
    assert list(runtime_dir.iterdir()) == [], "it changes nothing"


def test_the_engine_beside_the_command_is_looked_for_by_its_version(doctor: Doctor) -> None:
    """And not imported: that would take seconds."""
    said = line(doctor(), "vllm")
    assert said.startswith("ok ")
    assert said.endswith("a version that kvtide was tested with")
    asked = "import sys, kvtide.cli.doctor; print({'torch', 'vllm'} & set(sys.modules))"
    command = [sys.executable, "-c", asked]
    found = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    assert found.stdout.strip() == "set()"


@pytest.mark.parametrize(
    ("version", "is_any_version", "verdict", "said"),
    [
        (None, False, NOTE, f"none in {sys.prefix}"),
        ("0.30.1", False, WRONG, "0.30.1 was not tested; 0.32 was: caching is off"),
        ("0.30.1", True, NOTE, "on, because any_engine_version is set"),
        ("0.32.9+cpu", False, OK, "0.32.9+cpu, a version that kvtide was tested with"),
    ],
)
def test_what_becomes_of_a_version_of_the_engine_is_told(
    version: str | None, is_any_version: bool, verdict: str, said: str
) -> None:
    found = examine.vllm(version, is_any_version=is_any_version)
    assert (found.verdict, said in found.text) == (verdict, True), found


def test_all_is_well_with_a_node(doctor: Doctor, running_node: NodeProcess) -> None:
    with FakeEngine(running_node.places, "engine-one"):
        result = doctor()
    assert result.exit_code == 0, result.output
    assert f"process {running_node.pid}, kvtide" in line(result, "node")
    assert "all in order" in line(result, "integrity")
    assert "on, process" in line(result, "engine engine-o")
    assert "no errors in" in line(result, "log")
    assert "of at most 64 MiB" in line(result, "memory")


def test_directory_that_may_not_be_seen_is_wrong(
    doctor: Doctor, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forbidden(path: Path) -> os.stat_result:
        raise PermissionError(13, "Permission denied", str(path))

    for name in ("stat", "lstat"):
        monkeypatch.setattr(Path, name, forbidden)
    assert line(doctor(), "directory").startswith(WRONG)


def test_wrong_things_end_it_with_code_1(doctor: Doctor, runtime_dir: Path) -> None:
    runtime_dir.chmod(0o777)
    result = doctor()
    assert result.exit_code == 1
    assert line(result, "directory").startswith("WRONG directory")
    assert "chmod 700 it" in line(result, "directory")
    assert "1 of" in result.stderr


def test_wrong_settings_are_told_first(doctor: Doctor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVTIDE_LINGER_S", "soon")
    result = doctor()
    assert result.exit_code == 1
    assert "give seconds, 0 or more" in line(result, "settings")
    assert "Traceback" not in result.output


def test_wrong_settings_hide_nothing_else(
    doctor: Doctor, running_node: NodeProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVTIDE_LINGER_S", "soon")
    result = doctor()
    assert f"process {running_node.pid}, kvtide" in line(result, "node")
    assert "of at most 64 MiB" in line(result, "memory")
    assert "1 of" in result.stderr
    monkeypatch.setenv("KVTIDE_RUNTIME_DIR", "here")
    result = doctor()
    assert "'here'" in line(result, "directory")
    monkeypatch.delenv("KVTIDE_LINGER_S")
    result = doctor()
    assert "'here'" in line(result, "settings")
    assert "1 of" in result.stderr, "told once"
    assert "available" in line(result, "memory")


def test_after_a_stop_nobody_is_told_that_a_running_engine_starts_a_node(
    doctor: Doctor, running_node: NodeProcess
) -> None:
    for arguments in (["stop"], ["status"]):
        told = CliRunner().invoke(main, arguments).output
    for said in (told, line(doctor(), "node")):
        assert "`kvtide serve`, or an engine that is started now, starts the next" in said
        assert "first engine" not in said


def test_too_long_a_path_is_wrong(
    doctor: Doctor, runtime_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVTIDE_RUNTIME_DIR", str(runtime_dir / ("x" * 100)))
    result = doctor()
    assert result.exit_code == 1
    assert "the kernel allows 107" in line(result, "directory")


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a directory away")
def test_directory_of_somebody_else_is_wrong(doctor: Doctor, runtime_dir: Path) -> None:
    os.chown(runtime_dir, 1234, 1234)
    result = doctor()
    assert result.exit_code == 1
    assert "belongs to user 1234" in line(result, "directory")


def test_more_memory_than_there_is_is_wrong(
    doctor: Doctor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVTIDE_HOST_BYTES", "900TiB")
    result = doctor()
    assert result.exit_code == 1
    assert "host_bytes asks for 900 TiB" in line(result, "memory")


def test_node_that_hangs_is_wrong(
    doctor: Doctor, running_node: NodeProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "ANSWER_S_MAX", 0.3)
    running_node.signal(signal.SIGSTOP)
    try:
        result = doctor()
    finally:
        running_node.signal(signal.SIGCONT)
    assert result.exit_code == 1
    assert "does not answer" in line(result, "node")
    assert "kill it: engines serve on" in line(result, "node")


def test_socket_of_a_killed_node_is_wrong_until_the_next_starts(
    doctor: Doctor, running_node: NodeProcess
) -> None:
    running_node.kill()
    result = doctor()
    assert result.exit_code == 1
    assert "no node is running in" in line(result, "node")
    assert line(result, "node").endswith("A socket is left: the last one was killed")


def test_node_of_another_version_is_a_note(
    running_node: NodeProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(examine.kvtide, "__version__", "99.0")
    findings, _ = examine.node(running_node.places)
    assert findings[0].verdict == NOTE
    assert "this is 99.0: after `kvtide stop`" in findings[0].text


def test_node_of_another_wire_version_is_a_note(runtime_dir: Path) -> None:
    (runtime_dir / "node-7.sock").touch()
    findings, status = examine.node(Places(runtime_dir))
    assert verdicts(findings) == [NOTE, OK]
    assert "node-7.sock" in findings[0].text
    assert status is None


def test_engine_that_is_off_is_a_note_with_the_reason(running_node: NodeProcess) -> None:
    engine = FakeEngine(running_node.places, "one", Shape(cell_bytes=64 * MiB))
    engine.scheduler.link.start()
    engine.workers[0].start()
    try:
        assert engine.scheduler.wait_for(lambda: engine.scheduler.serving is not None)
        findings, _ = examine.node(running_node.places)
    finally:
        engine.close()
    found = only(finding for finding in findings if finding.what == "engine one")
    assert found.verdict == NOTE
    assert "host_too_small" in found.text


def test_an_alarm_is_wrong_until_a_clear(doctor: Doctor, running_node: NodeProcess) -> None:
    """A canary differed: `doctor` and `status` say so, each in a line, and what ends it."""
    with FakeEngine(running_node.places, "one") as engine:
        scheduler, (worker,) = engine.scheduler, engine.workers
        assert isinstance(worker, FakeWorker)
        differs = m.Compared(engine.shape.fingerprint, "differs", 1.41)
        assert worker.link.send(differs)
        assert scheduler.wait_for(lambda: is_off(scheduler))
        result = doctor()
        assert result.exit_code == 1
        assert "quarantined until `kvtide clear`" in line(result, "canary")
        status = CliRunner().invoke(main, ["status"]).output
        assert f"fingerprint {engine.shape.fingerprint.hex()[:8]} is quarantined" in status
        assert "canaries    differs 1" in status
        assert CliRunner().invoke(main, ["clear"]).exit_code == 0
        assert scheduler.wait_for(lambda: not is_off(scheduler))
        assert "canary " not in doctor().output
    assert " ERROR " in running_node.log()


def is_off(scheduler: FakeScheduler) -> bool:
    assert scheduler.serving is not None
    return scheduler.serving.off_reason == "canary"


def test_a_tier_that_does_not_work_is_a_note_with_what_it_says(
    new_node: StartNode, tmp_path: Path
) -> None:
    away = {"type": "redis", "url": "redis://127.0.0.1:1", "bytes_max": "256MiB"}
    disk = {"type": "disk", "path": str(tmp_path / "disk"), "bytes_max": "256MiB"}
    node = new_node(tiers=json.dumps([disk, away]))
    node.start()

    def found() -> dict[str, Finding]:
        return {one.what: one for one in examine.node(node.places)[0]}

    wait_until(lambda: "Connection refused" in found()["tier redis"].text, "said")
    assert found()["tier redis"].verdict == NOTE
    assert found()["tier disk"] == Finding(OK, "tier disk", "on")


def test_what_tries_a_tier_of_the_settings_is_told_where_no_node_has_it(
    doctor: Doctor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The page opens none, so it does not say that all is well."""
    monkeypatch.setenv("KVTIDE_DISK_PATH", "/proc/nowhere")
    monkeypatch.setenv("KVTIDE_DISK_BYTES_MAX", "1GiB")
    said = line(doctor(), "tier disk")
    assert said.startswith("note  tier disk")
    assert "path /proc/nowhere" in said
    assert said.endswith("`kvtide tier test disk` tries it")


def test_broken_state_is_wrong(running_node: NodeProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    real = examine.ask

    def ask(places: Places, name: str) -> object:
        if name == "check":
            raise examine.NodeError("the node's state is broken: a cell is lent twice")
        return real(places, name)

    monkeypatch.setattr(examine, "ask", ask)
    findings, _ = examine.node(running_node.places)
    found = only(finding for finding in findings if finding.what == "integrity")
    assert found.verdict == WRONG
    assert "a cell is lent twice; please report it with the node's log" in found.text
    assert "kvtide stop" in found.text


def test_errors_in_the_log_are_told_with_their_time(runtime_dir: Path) -> None:
    places = Places(runtime_dir)
    now = datetime.datetime.now()
    old = now - datetime.timedelta(days=3)
    places.log.write_text(f"{old:%Y-%m-%d %H:%M:%S},123 ERROR something old\n2000 ERROR no time\n")
    assert only(examine.log(places)).verdict == OK
    with places.log.open("a") as file:
        file.write(f"{now:%Y-%m-%d %H:%M:%S},123 CRITICAL the state is broken\n")
        file.write(f"{now:%Y-%m-%d %H:%M:%S},123 INFO all is well\n")
    found = only(examine.log(places))
    assert found.verdict == NOTE
    assert found.text.startswith(f"2 errors, the last at {now:%Y-%m-%d %H:%M:%S}: the state is")


@pytest.mark.parametrize(
    ("features", "verdict", "text"),
    [
        (KernelFeatures(True, True, True), OK, "populating"),
        (KernelFeatures(True, True, False), NOTE, "Linux 5.14"),
        (KernelFeatures(False, True, True), WRONG, "F_SEAL_FUTURE_WRITE"),
        (KernelFeatures(True, False, True), WRONG, "pidfd_open"),
    ],
)
def test_kernel(
    monkeypatch: pytest.MonkeyPatch, features: KernelFeatures, verdict: str, text: str
) -> None:
    monkeypatch.setattr(examine.probe, "kernel_features", lambda: features)
    found = only(examine.kernel())
    assert found.verdict == verdict
    assert text in found.text


def test_limits_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    limit = CgroupLimit(Path("/sys/fs/cgroup/x"), 4 * GiB, GiB)
    memory = HostMemory(32 * GiB, 16 * GiB, limit)
    monkeypatch.setattr(examine.probe, "host_memory", lambda: memory)
    monkeypatch.setattr(examine.probe, "memlock_bytes", lambda: 64 << 10)
    monkeypatch.setattr(examine.probe, "pressure", lambda: Pressure(0.5, 0.1))
    cgroup, memlock, pressure = examine.limits()
    assert "at most 4 GiB, 1 GiB used (/sys/fs/cgroup/x)" in cgroup.text
    assert memlock.verdict == NOTE
    assert "ulimit -l unlimited" in memlock.text
    assert "50% of the last 10 s" in pressure.text
    monkeypatch.setattr(examine.probe, "memlock_bytes", lambda: None)
    monkeypatch.setattr(examine.probe, "pressure", lambda: None)
    assert verdicts(examine.limits()) == [OK, OK]


def test_memory_that_cannot_be_read_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    def blind() -> HostMemory:
        raise HostMemoryError("mount /proc")

    monkeypatch.setattr(examine.probe, "host_memory", blind)
    assert only(examine.limits()).text == "mount /proc"
    monkeypatch.setattr(examine.probe, "available_bytes", blind)
    assert verdicts(examine.memory(None, None)) == [WRONG]


def test_little_memory_is_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(examine.probe, "available_bytes", lambda: GiB)
    monkeypatch.setattr(examine, "host_bytes", lambda wanted, way: 256 * MiB)
    found = only(examine.memory(None, None))
    assert found.verdict == NOTE
    assert "`auto` would take up to 256 MiB: little" in found.text
    assert "512 MiB for one of 8B parameters" in found.text


def test_node_with_little_memory_is_a_note() -> None:
    sizes = {"allocated_bytes": MiB, "limit_bytes": 256 * MiB, "size_bytes": 256 * MiB}
    found = only(examine.memory(None, {"host": sizes}))
    assert found.verdict == NOTE
    assert "512 MiB for one of 8B parameters" in found.text
    sizes |= {"limit_bytes": 512 * MiB, "size_bytes": 512 * MiB}
    assert only(examine.memory(None, {"host": sizes})).verdict == OK


def test_node_that_gives_memory_back_is_a_note() -> None:
    host = {"allocated_bytes": GiB, "limit_bytes": 2 * GiB, "size_bytes": 4 * GiB}
    found = only(examine.memory(None, {"host": host}))
    assert found.verdict == NOTE
    assert "at most 2 GiB: it gives memory back, asked for 4 GiB" in found.text


def test_full_disk_is_a_note(runtime_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = type("Usage", (), {"free": MiB})
    monkeypatch.setattr(examine.shutil, "disk_usage", lambda _: usage)
    found = list(examine.runtime_directory(Places(runtime_dir)))[-1]
    assert (found.verdict, found.what) == (NOTE, "disk")
