"""The disk tier with real engines: what was computed survives all that had it in memory."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtide.testing.completions import Completion
from kvtide.testing.serving import ServedEngine
from tests.engine.answers import ask, assert_same, forget, is_same, whole_blocks
from tests.engine.conftest import engine_on, make_node
from tests.engine.nodes import Node, Status
from tests.engine.prompts import prompt

BLOCK = 128
LENGTHS = (BLOCK + 1, 3 * BLOCK + 5, 2000)


@pytest.fixture(scope="module")
def disk_node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    """A node that keeps what it holds on disk too."""
    for node in make_node():
        node.variables |= {
            "KVTIDE_DISK_PATH": str(tmp_path_factory.mktemp("disk")),
            "KVTIDE_DISK_BYTES_MAX": "2GiB",
        }
        yield node


def is_written(status: Status) -> bool:
    """Nothing is on its way to the disk, and something is there."""
    disk = status["tiers"]["disk"]
    return disk["records"] > 0 and disk["queued_bytes"] == 0


@pytest.fixture(scope="module")
def known(disk_node: Node, logs: Path) -> dict[int, Completion]:
    """Answers from the cache of an engine that was killed since, and its node with it."""
    with engine_on(disk_node, logs, "before") as engine:
        disk_node.wait_on()
        answers = {}
        for length in LENGTHS:
            ask(engine, prompt(f"disk {length}", length))
            answers[length] = ask(engine, prompt(f"disk {length}", length))
            assert answers[length].cached_tokens == whole_blocks(length, BLOCK)
        disk_node.wait_at_rest()
        disk_node.wait("all is on disk", is_written)
        disk_node.kill()
        engine.kill()
    return answers


@pytest.fixture(scope="module")
def served(disk_node: Node, known: dict[int, Completion], logs: Path) -> Iterator[ServedEngine]:
    """Another engine, with another node on the same disk."""
    with engine_on(disk_node, logs, "after") as engine:
        disk_node.wait_on()
        yield engine


@pytest.mark.parametrize("length", LENGTHS)
def test_hits_come_from_disk_after_node_and_engine_were_killed(
    served: ServedEngine, disk_node: Node, known: dict[int, Completion], length: int
) -> None:
    with disk_node.loading(whole_blocks(length, BLOCK) // BLOCK):
        ours = ask(served, prompt(f"disk {length}", length))
    assert_same(ours, known[length])
    assert disk_node.count("tier_loads.disk.loaded") > 0


def test_a_swapped_block_on_disk_shows(
    served: ServedEngine, disk_node: Node, known: dict[int, Completion]
) -> None:
    """The twin of the test above: an answer of other tokens is not the same."""
    ours = ask(served, prompt("disk other", LENGTHS[1]))
    assert not is_same(ours, known[LENGTHS[1]])


def test_an_engine_whose_node_was_killed_hits_from_disk_again(
    served: ServedEngine, disk_node: Node
) -> None:
    """The engine starts another node; nobody else does anything."""
    tokens = prompt("disk again", 5 * BLOCK + 3)
    ask(served, tokens)
    own = ask(served, tokens)
    disk_node.wait_at_rest()
    disk_node.wait("all is on disk", is_written)
    disk_node.kill()
    disk_node.wait_on()
    forget(served)
    with disk_node.loading(5):
        ours = ask(served, tokens)
    assert_same(ours, own)


def test_a_clear_clears_the_disk(served: ServedEngine, disk_node: Node) -> None:
    tokens = prompt("disk cleared", 2 * BLOCK + 3)
    ask(served, tokens)
    disk_node.wait_at_rest()
    disk_node.wait("all is on disk", is_written)
    disk_node.clear()
    forget(served)
    assert ask(served, tokens).cached_tokens == 0
