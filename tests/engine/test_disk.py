"""The disk tier with real engines: what was computed survives all that had it in memory, what was
damaged since is computed anew, and neither ever changes an answer."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtide.testing.completions import Completion
from kvtide.testing.serving import ServedEngine
from tests.engine import records
from tests.engine.answers import ask, assert_same, forget, is_same, own_hit, whole_blocks
from tests.engine.conftest import engine_on, make_node
from tests.engine.nodes import Node, Status
from tests.engine.prompts import prompt

BLOCK = 128
CHUNK = 2 * BLOCK
LENGTHS = (BLOCK + 1, CHUNK, CHUNK + 1, 3 * BLOCK + 5, 2000)
"""From a tail alone to eight chunks; of a chunk of which one block may be taken, too."""

CHUNKS = 3
TEXT = prompt("disk chain", CHUNKS * CHUNK + 40)
"""Its chunks, and nothing behind them that a tail would be made of."""
LOADED, CORRUPT = "tier_loads.disk.loaded", "tier_loads.disk.corrupt"


@pytest.fixture(scope="module")
def disk_node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    """A node that keeps what it holds on disk too."""
    for node in make_node():
        node.variables |= {
            "KVTIDE_DISK_PATH": str(tmp_path_factory.mktemp("disk")),
            "KVTIDE_DISK_BYTES_MAX": "2GiB",
        }
        yield node


def wait_written(node: Node) -> None:
    """Wait until all that was computed is on disk."""

    def is_written(status: Status) -> bool:
        disk = status["tiers"]["disk"]
        return disk["records"] > 0 and disk["queued_bytes"] == 0

    node.wait_at_rest()
    node.wait("all is on disk", is_written)


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
        wait_written(disk_node)
        disk_node.kill()
        engine.kill()
    return answers


@pytest.fixture(scope="module")
def served(disk_node: Node, known: dict[int, Completion], logs: Path) -> Iterator[ServedEngine]:
    """Another engine, with another node on the same disk."""
    with engine_on(disk_node, logs, "after") as engine:
        disk_node.wait_on()
        yield engine


# ---- what survives


@pytest.mark.parametrize("length", LENGTHS)
def test_hits_come_from_disk_after_node_and_engine_were_killed(
    served: ServedEngine, disk_node: Node, known: dict[int, Completion], length: int
) -> None:
    before = disk_node.count(LOADED)
    with disk_node.loading(whole_blocks(length, BLOCK) // BLOCK):
        ours = ask(served, prompt(f"disk {length}", length))
    assert_same(ours, known[length])
    assert disk_node.count(LOADED) > before


def test_an_engine_whose_node_was_killed_hits_from_disk_again(
    served: ServedEngine, disk_node: Node
) -> None:
    """The engine starts another node; nobody else does anything."""
    tokens = prompt("disk again", 5 * BLOCK + 3)
    ask(served, tokens)
    own = ask(served, tokens)
    wait_written(disk_node)
    disk_node.kill()
    disk_node.wait_on()
    forget(served)
    with disk_node.loading(5):
        ours = ask(served, tokens)
    assert_same(ours, own)


# ---- what was damaged


@pytest.fixture(scope="module")
def own(served: ServedEngine) -> list[Completion]:
    """Answers to TEXT from the engine's own hits: of no chunk, of one, … of all."""
    return [
        own_hit(served, TEXT, chunks * CHUNK, cache_salt=f"own {chunks}")
        for chunks in range(CHUNKS + 1)
    ]


@pytest.fixture(scope="module")
def own_anew(served: ServedEngine, own: list[Completion]) -> list[Completion]:
    """The same once more, each in its world: now of all chunks, some computed behind a hit."""
    return [ask(served, TEXT, cache_salt=f"own {chunks}") for chunks in range(CHUNKS)]


@pytest.fixture(scope="module")
def damaged(served: ServedEngine, disk_node: Node, own_anew: list[Completion]) -> None:
    """TEXT on disk, under a salt for each kind of damage that was done while no node ran."""
    salts = [f"flipped {chunk}" for chunk in range(CHUNKS)]
    for salt in [*salts, "exchanged"]:
        ask(served, TEXT, cache_salt=salt)
    ask(served, prompt("disk other", CHUNK + 1), cache_salt="other")
    disk = Path(disk_node.variables["KVTIDE_DISK_PATH"])
    wait_written(disk_node)
    disk_node.stop()
    for chunk, salt in enumerate(salts):
        chain = records.chain_of(disk, salt)
        assert [one.record and one.record.blocks for one in chain] == [CHUNK // BLOCK] * CHUNKS
        records.flip(disk, chain[chunk], block=chunk % 2)
    (other,) = records.chain_of(disk, "other")
    records.put(disk, records.chain_of(disk, "exchanged")[1], 1, other, 1)
    disk_node.serve()
    disk_node.wait_on()
    forget(served)


@pytest.mark.usefixtures("damaged")
@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_a_hit_ends_before_a_chunk_that_was_damaged_on_disk(
    served: ServedEngine, disk_node: Node, own: list[Completion], chunk: int
) -> None:
    """One bit of 6 MB: a miss that is counted, computed from there on, and answered rightly."""
    before = disk_node.count(CORRUPT)
    with disk_node.loading(chunk * CHUNK // BLOCK):
        ours = ask(served, TEXT, cache_salt=f"flipped {chunk}")
    assert_same(ours, own[chunk])
    assert disk_node.count(CORRUPT) == before + 1


@pytest.mark.usefixtures("damaged")
def test_an_exchanged_block_on_disk_shows(served: ServedEngine, own: list[Completion]) -> None:
    """The twin of all these tests: their oracle sees a single wrong block of six. Its checksum is
    right, or it would be a miss."""
    wrong = ask(served, TEXT, cache_salt="exchanged")
    assert wrong.cached_tokens == own[CHUNKS].cached_tokens
    assert not is_same(wrong, own[CHUNKS])


@pytest.mark.usefixtures("damaged")
def test_what_was_damaged_on_disk_is_stored_anew(
    served: ServedEngine, disk_node: Node, own_anew: list[Completion]
) -> None:
    """Once it was computed, the next node finds all of it."""
    salts = [f"flipped {chunk}" for chunk in range(CHUNKS)]
    for salt in salts:
        ask(served, TEXT, cache_salt=salt)
    wait_written(disk_node)
    disk_node.stop()
    disk_node.serve()
    disk_node.wait_on()
    forget(served)
    for salt, own in zip(salts, own_anew, strict=True):
        with disk_node.loading(CHUNKS * CHUNK // BLOCK):
            ours = ask(served, TEXT, cache_salt=salt)
        assert_same(ours, own)


# ---- what was cleared, which is the last: nothing is there afterwards


def test_a_clear_clears_the_disk(served: ServedEngine, disk_node: Node) -> None:
    tokens = prompt("disk cleared", 2 * BLOCK + 3)
    ask(served, tokens)
    wait_written(disk_node)
    disk_node.clear()
    forget(served)
    assert ask(served, tokens).cached_tokens == 0
