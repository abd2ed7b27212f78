"""Engines and nodes that tests share: a start costs seconds, so there are few.

Each node has a runtime directory of its own, so that the user's node is never touched, and goes
with the fixture that made it. After every test the shared node must be at rest and whole.
"""

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType

import pytest

from kvtide.testing.leashed import End
from kvtide.testing.serving import KVTIDE, SMOLLM2, ServedEngine
from tests.engine.nodes import Node

TEST_S_MAX = 300
"""Starts on a busy machine are slow; what must be quick says so itself."""

SOAK_S = float(os.environ.get("SOAK_S", "60"))
"""How long each soak takes."""

in_soaks_only = pytest.mark.skipif("SOAK_S" not in os.environ, reason="scripts/soak runs it")
"""For what takes long, or needs luck to meet."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """All of this folder needs a real engine."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.engine)
            item.add_marker(pytest.mark.timeout(TEST_S_MAX))


@pytest.fixture(scope="session")
def logs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the engines of this run write."""
    return tmp_path_factory.mktemp("engines")


def make_node() -> Iterator[Node]:
    """A runtime directory with a short name: the path of a socket has 107 bytes at most."""
    directory = Path(tempfile.mkdtemp(prefix="kvt-"))
    node = Node(directory)
    try:
        yield node
    finally:
        node.close()
        shutil.rmtree(directory, ignore_errors=True)


@pytest.fixture(scope="session")
def shared_node() -> Iterator[Node]:
    """The node of the session's engine, and of those that are started beside it."""
    yield from make_node()


@pytest.fixture(scope="module")
def node() -> Iterator[Node]:
    """A node of this module's own."""
    yield from make_node()


class PassingEngine(ServedEngine):
    """Killed where its `with` ends: an end in order takes vLLM five seconds, and is shown by the
    session's engine."""

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.kill()


@contextlib.contextmanager
def together(*engines: ServedEngine) -> Iterator[None]:
    """`with` for several engines, which start at the same time: a start is three processes one
    after the other, each of which needs one core."""
    with contextlib.ExitStack() as stack:
        for engine in engines:
            engine.start()
            stack.push(engine)
        for engine in engines:
            engine.wait_ready()
        yield


def engine_on(
    node: Node,
    logs: Path,
    name: str,
    *arguments: str,
    model: Path = SMOLLM2,
    connector: Mapping[str, object] = KVTIDE,
    **variables: str,
) -> PassingEngine:
    """An engine, not started yet, whose node is this one."""
    return PassingEngine(
        model,
        log=logs / f"{name}.log",
        connector=connector,
        arguments=arguments,
        variables=node.variables | variables,
    )


@pytest.fixture(scope="session")
def engine(shared_node: Node, logs: Path) -> Iterator[ServedEngine]:
    """SmolLM2 in bfloat16, blocks of 128 tokens, chunks of 256. It ends in order."""
    with engine_on(shared_node, logs, "shared") as served:
        shared_node.wait_on()
        yield served
        assert served.stop() == End(0, was_killed=False)
