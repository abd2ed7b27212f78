"""What tests of real nodes share: a short directory, nodes in it, none left behind."""

import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvtide.testing.node_process import NodeProcess

HOST_BYTES = "64MiB"

StartNode = Callable[..., NodeProcess]


@pytest.fixture
def runtime_dir() -> Iterator[Path]:
    """A runtime directory whose path is short enough for a socket, which pytest's often is not."""
    directory = Path(tempfile.mkdtemp(prefix="kvt-", dir="/tmp"))
    yield directory
    shutil.rmtree(directory, ignore_errors=True)


@pytest.fixture
def new_node(runtime_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[StartNode]:
    """Makes a node of these settings, not started; whatever runs at the end is ended."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(runtime_dir / "config"))
    made: list[NodeProcess] = []

    def make(**settings: object) -> NodeProcess:
        made.append(NodeProcess(runtime_dir, **({"host_bytes": HOST_BYTES} | settings)))
        return made[-1]

    yield make
    NodeProcess(runtime_dir).end()


@pytest.fixture
def running_node(new_node: StartNode) -> NodeProcess:
    """A node with little memory that answers."""
    node = new_node()
    node.start()
    return node
