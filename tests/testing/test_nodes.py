"""Nodes are found by their socket and end, whether they obey or not."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtide.testing import nodes

LISTENER = """
import socket, sys
listener = socket.socket(socket.AF_UNIX)
listener.bind(sys.argv[1])
listener.listen()
print("listens", flush=True)
while True:
    listener.accept()  # and never an answer
"""


@pytest.fixture
def silent_node(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process that listens where a node would, and does nothing else."""
    command = [sys.executable, "-c", LISTENER, str(tmp_path / "node-1.sock")]
    process = subprocess.Popen(command, stdout=subprocess.PIPE)
    assert process.stdout is not None
    with process.stdout:
        process.stdout.readline()
        yield process
    process.kill()
    process.wait()


def test_a_node_is_found_by_who_listens(
    silent_node: subprocess.Popen[bytes], tmp_path: Path
) -> None:
    assert nodes.node_pids(tmp_path) == [silent_node.pid]


def test_a_node_that_does_not_obey_is_killed_and_that_is_told(
    silent_node: subprocess.Popen[bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nodes, "STOP_S_MAX", 1.0)
    assert not nodes.stop_nodes(tmp_path, {"KVTIDE_RUNTIME_DIR": str(tmp_path)})
    silent_node.wait()
    assert nodes.node_pids(tmp_path) == []


def test_where_no_node_listens_there_is_nothing_to_stop(tmp_path: Path) -> None:
    (tmp_path / "node-1.sock").touch()
    assert nodes.stop_nodes(tmp_path, {"KVTIDE_RUNTIME_DIR": str(tmp_path)})


@pytest.mark.parametrize("program", ["kvtide.node.launch", "kvtide.node.main"])
def test_a_node_that_does_not_listen_yet_is_ended(tmp_path: Path, program: str) -> None:
    """An engine that was interrupted had just launched it: it would outlive the directory."""
    waits = "import time; print('is there', flush=True); time.sleep(60)"
    command = [sys.executable, "-c", waits, "-m", program]
    environment = os.environ | {"KVTIDE_RUNTIME_DIR": str(tmp_path)}
    other = os.environ | {"KVTIDE_RUNTIME_DIR": f"{tmp_path}-of-others"}
    starting, of_others = (
        subprocess.Popen(command, env=env, stdout=subprocess.PIPE) for env in (environment, other)
    )
    for process in (starting, of_others):
        assert process.stdout is not None
        with process.stdout:
            process.stdout.readline()
    assert not nodes.stop_nodes(tmp_path, {"KVTIDE_RUNTIME_DIR": str(tmp_path)})
    assert starting.wait(10) == -signal.SIGKILL
    assert of_others.poll() is None
    of_others.kill()
    of_others.wait()
