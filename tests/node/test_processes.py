"""Whether a pidfd is of the peer, also where the peer lives in another container."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtide.node.processes import pidfd_fault
from kvtide.testing.fake_engine import FakeEngine, Loaded, make_tokens
from kvtide.testing.node_process import NodeProcess

MINE = os.getpid()
DEATH_S_MAX = 20.0


@pytest.fixture
def own_pidfd() -> Iterator[int]:
    descriptor = os.pidfd_open(MINE)
    yield descriptor
    os.close(descriptor)


class FakeProc:
    """A recorded /proc: what it says of one pidfd, and which namespace it shows."""

    def __init__(self, root: Path) -> None:
        self.root = root
        (root / "self-of-us" / "fdinfo").mkdir(parents=True)
        self.shows(MINE)

    def shows(self, own_pid: int) -> None:
        """Our number in the namespace of this /proc."""
        link = self.root / "self"
        link.unlink(missing_ok=True)
        place = self.root / str(own_pid)
        if not place.exists():
            place.symlink_to("self-of-us")
        link.symlink_to(str(own_pid))

    def says(self, text: str) -> None:
        """What fdinfo of descriptor 9 holds."""
        (self.root / "self-of-us" / "fdinfo" / "9").write_text(text, encoding="ascii")


@pytest.fixture
def proc(tmp_path: Path) -> FakeProc:
    return FakeProc(tmp_path)


PIDFD = "pos:\t0\nflags:\t02000002\nmnt_id:\t4\nino:\t382\nPid:\t{}\nNSpid:\t{}\n"


def test_pidfd_of_the_peer_is_taken(own_pidfd: int) -> None:
    assert pidfd_fault(own_pidfd, MINE) == ""


def test_pidfd_of_somebody_else_is_refused(own_pidfd: int) -> None:
    fault = pidfd_fault(own_pidfd, MINE + 1)
    assert fault == f"process {MINE + 1} handed over a pidfd of process {MINE}"


def test_pidfd_of_a_dead_process_is_refused() -> None:
    child = subprocess.Popen([sys.executable, "-c", ""])
    descriptor = os.pidfd_open(child.pid)
    child.wait()
    try:
        assert "has ended" in pidfd_fault(descriptor, child.pid)
    finally:
        os.close(descriptor)


def test_other_descriptors_are_refused(tmp_path: Path) -> None:
    with (tmp_path / "file").open("w") as file:
        assert pidfd_fault(file.fileno(), MINE) == "the descriptor of a hello is no pidfd"
    assert "cannot be looked at" in pidfd_fault(987_654, MINE)


def test_engine_in_a_container_that_the_node_cannot_see_is_taken(proc: FakeProc) -> None:
    """Both numbers are 0: the kernel names nobody who is outside the reader's namespace."""
    proc.says(PIDFD.format(0, 0))
    assert pidfd_fault(9, 0, proc.root) == ""


@pytest.mark.parametrize(("pid", "peer"), [(0, 4711), (4711, 0)])
def test_numbers_of_which_one_is_unknown_are_not_compared(
    proc: FakeProc, pid: int, peer: int
) -> None:
    proc.says(PIDFD.format(pid, pid))
    assert pidfd_fault(9, peer, proc.root) == ""


def test_numbers_of_another_namespace_are_not_compared(proc: FakeProc) -> None:
    """A container with the host's /proc: the peer is 7 to us, but 4711 to /proc."""
    proc.says(PIDFD.format(4711, "4711\t7"))
    assert "handed over" in pidfd_fault(9, 7, proc.root)
    proc.shows(MINE + 1000)
    assert pidfd_fault(9, 7, proc.root) == ""


def unshare(*arguments: object) -> list[str]:
    """A command that runs in a pid namespace of its own, with a /proc of its own."""
    own = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc", "--"]
    return [*own, *map(str, arguments)]


def can_unshare() -> bool:
    done = subprocess.run(unshare("true"), capture_output=True, check=False)
    return done.returncode == 0


@pytest.mark.skipif(not can_unshare(), reason="no pid namespace may be made here")
class TestContainers:
    """Real pid namespaces, as two containers that share the runtime directory have."""

    def test_engine_in_a_namespace_below_the_node(self, running_node: NodeProcess) -> None:
        self.check(running_node)

    def test_engine_beside_the_node(self, running_node: NodeProcess, runtime_dir: Path) -> None:
        """Neither sees the other: the node runs in a namespace of its own, too."""
        running_node.end()
        program = "import os, sys; os.execv(sys.executable, [sys.executable, *sys.argv[1:]])"
        environment = os.environ | running_node.environment
        environment["KVTIDE_RUNTIME_DIR"] = str(runtime_dir)
        command = unshare(sys.executable, "-c", program, "-m", "kvtide.node.main")
        with subprocess.Popen(command, env=environment) as contained:
            try:
                running_node.wait_answer()
                self.check(running_node)
            finally:
                running_node.end()
                contained.wait(10)

    def check(self, node: NodeProcess) -> None:
        """An engine elsewhere stores; one here finds it; the node sees the first one die."""
        command = unshare(
            *(sys.executable, "-m", "kvtide.testing.fake_engine", node.places.directory),
            *("elsewhere", 64, 1),
        )
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as elsewhere:
            assert elsewhere.stdout is not None
            assert elsewhere.stdout.readline() == b"ready\n"
            with FakeEngine(node.places, "here") as engine:
                assert engine.load(make_tokens(64, seed=1)) == Loaded(4, 4)
                assert engines(node) == {"here", "elsewhere"}
                elsewhere.kill()
                elsewhere.wait()
                until_s = time.monotonic() + DEATH_S_MAX
                while "elsewhere" in engines(node):
                    assert time.monotonic() < until_s, "its death is not seen"
                    time.sleep(0.01)
                assert engines(node) == {"here"}


def engines(node: NodeProcess) -> set[str]:
    """Who is there."""
    return {engine["engine_id"] for engine in node.status()["engines"]}
