"""Canaries of a real engine: what it computes again is what is kept, but for rounding; and bytes
that are kept wrongly end its caching, until a clear."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtide.movers.compare import DIFFERENCE_MAX
from kvtide.testing.serving import ServedEngine
from tests.engine import cells
from tests.engine.answers import ask, assert_same, forget
from tests.engine.conftest import engine_on
from tests.engine.nodes import Node
from tests.engine.prompts import prompt

BLOCK, CHUNK = 128, 256
LENGTH = 4 * CHUNK + 9
PROMPTS = 4


@pytest.fixture(scope="module")
def served(node: Node, logs: Path) -> Iterator[ServedEngine]:
    """SmolLM2 in bfloat16, with a canary in each long hit."""
    with engine_on(node, logs, "canary", KVTIDE_CANARY_RATE="1") as engine:
        node.wait_on()
        yield engine


def test_a_chunk_computed_again_is_near_to_the_one_that_is_kept(
    served: ServedEngine, node: Node
) -> None:
    """Though the steps that computed them had other shapes: far below what raises an alarm."""
    for number in range(PROMPTS):
        tokens = prompt(f"canary {number}", LENGTH)
        with node.storing(LENGTH // BLOCK):
            ask(served, tokens)
        forget(served)
        with node.loading((LENGTH - CHUNK) // BLOCK):
            assert ask(served, tokens).cached_tokens == LENGTH // BLOCK * BLOCK - CHUNK
        node.wait_count("canaries.equal", number)
    status = node.status()
    assert status["counts"]["canaries.equal"] == status["counts"]["miss.canary"] == PROMPTS
    assert not status["counts"]["canaries.differs"]
    assert not status["counts"]["canaries.no_verdict"]
    assert status["canary_difference"] < DIFFERENCE_MAX / 4


def test_a_corrupted_layout_ends_the_caching_within_one_hit(
    served: ServedEngine, node: Node
) -> None:
    """The halves of every block's cell are swapped, as by a mover that took one order for another.

    The engine serves on, uncached and rightly; a clear lets it begin anew.
    """
    memory = cells.NodeMemory(node.pid)
    before = memory.last_generation()
    tokens = prompt("corrupted", LENGTH)
    with node.storing(LENGTH // BLOCK):
        right = ask(served, tokens)
    forget(served)
    for cell in memory.cells(before):
        data = cells.read(cell)
        half = cell.size_bytes // 2
        cells.write(cell, data[half:] + data[:half])
    ask(served, tokens)
    node.wait("the alarm is raised", lambda status: status["quarantined"])
    node.wait("it is off", lambda status: [e["state"] for e in status["engines"]] == ["off"])
    again = ask(served, tokens)
    assert again.cached_tokens == 0, "its own cache has forgotten what was loaded, too"
    assert_same(again, right)
    assert node.status()["counts"]["canaries.differs"] == 1
    node.clear()
    node.wait_on()
    with node.storing(LENGTH // BLOCK):
        ask(served, [*tokens, 1])
    assert not node.status()["quarantined"]
