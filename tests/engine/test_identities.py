"""Engines that must not share, on one node: it keeps them apart, and says what differs.

Tiny models, in bfloat16 where the type does not matter.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtide.testing.completions import Completion
from kvtide.testing.serving import TINY_LLAMA, TINY_LLAMA_B, ServedEngine
from tests.engine import cells
from tests.engine.answers import ask, assert_same, forget, is_same
from tests.engine.conftest import engine_on, together
from tests.engine.nodes import Node, Status
from tests.engine.prompts import prompt

BLOCK = 128
BLOCK_BYTES = BLOCK * 2048
"""Of a block of the tiny models in two-byte numbers, all shards together."""
LENGTH = 5 * BLOCK + 9
HIT_TRIES = 6
NAME = ("--served-model-name", "the-model")


@pytest.fixture(scope="module")
def single(node: Node, logs: Path) -> Iterator[ServedEngine]:
    """One worker, bfloat16, on one core: engine cores of one thread each answer to the bit as it
    does, which those of two threads need not."""
    arguments = ("--dtype", "bfloat16", *NAME)
    core = {"VLLM_CPU_OMP_THREADS_BIND": "0"}
    with engine_on(node, logs, "single", *arguments, model=TINY_LLAMA, **core) as engine:
        node.wait_on()
        yield engine


def stored(engine: ServedEngine, node: Node, name: str) -> list[int]:
    """A prompt that the node holds from now on.

    As in `hit`: where a grant came too late for the step that could have used it, and that was
    counted, the prompt is computed once more.
    """
    tokens = prompt(name, LENGTH)
    before = node.status()["host"]["held_bytes"]

    def is_held(status: Status) -> bool:
        held: int = status["host"]["held_bytes"]
        return held - before >= 5 * BLOCK_BYTES

    with node.storing(5, BLOCK_BYTES):
        for _ in range(HIT_TRIES):
            dropped = node.count("drop.too_old")
            ask(engine, tokens)
            status = node.wait(
                "the prompt is held, or dropped",
                lambda status, dropped=dropped: (
                    is_held(status) or status["counts"]["drop.too_old"] > dropped
                ),
            )
            if is_held(status):
                break
            forget(engine)
    return tokens


def assert_apart(one: ServedEngine, other: ServedEngine, node: Node) -> None:
    """Neither finds what the other has stored; each finds its own."""
    for mine, theirs in ((one, other), (other, one)):
        tokens = stored(theirs, node, f"apart {mine.log.name} {theirs.log.name}")
        own = ask(theirs, tokens)
        with node.loading(0):
            assert ask(mine, tokens).cached_tokens == 0
        node.wait_at_rest()
        with node.loading(5):
            assert_same(hit(theirs, node, tokens), own)


def not_shared(one: ServedEngine, other: ServedEngine, node: Node) -> list[Status]:
    """Where the status says that two engines would share but for some fields: the fields."""
    ids = {node.engine_of(engine)["engine_id"] for engine in (one, other)}
    pairs: list[Status] = node.status()["not_shared"]
    return [pair["fields"] for pair in pairs if set(pair["engines"]) == ids]


def differing(one: ServedEngine, other: ServedEngine, node: Node) -> set[str]:
    """The fields that keep two engines from sharing, as the status names them."""
    (fields,) = not_shared(one, other, node)
    for values in fields.values():
        assert values[0] != values[1]
    return set(fields)


@pytest.mark.parametrize(
    ("kind", "arguments"),
    [("tensor", ()), ("pipeline", ("--no-enforce-eager",))],  # vLLM's later stages fail if eager
    ids=["tensor", "pipeline"],
)
def test_two_ranks_hit_like_one_and_share_with_their_like_only(
    single: ServedEngine, node: Node, logs: Path, kind: str, arguments: tuple[str, ...]
) -> None:
    """Each rank, or stage, keeps its shard; one wrong block in one of them shows."""
    arguments += ("--dtype", "bfloat16", f"--{kind}-parallel-size", "2", *NAME)
    ranks = engine_on(
        node, logs, kind, *arguments, model=TINY_LLAMA, VLLM_CPU_OMP_THREADS_BIND="0|1"
    )
    with ranks:
        node.wait_on(2)
        memory = cells.NodeMemory(node.pid)
        before = memory.last_generation()
        tokens = stored(ranks, node, f"two ranks {kind}")
        own = ask(ranks, tokens)
        with node.loading(5):
            assert_same(hit(ranks, node, tokens), own)
        for shard in (0, 1):
            mine = memory.cells(before, shard)
            assert len(mine) == 5
            with cells.damaged(mine[1]):
                wrong = hit(ranks, node, tokens)
            assert wrong.cached_tokens == own.cached_tokens
            assert not is_same(wrong, own)
        assert_apart(single, ranks, node)
        assert any(f"{kind}_parallel" in name for name in differing(single, ranks, node))


def hit(ranks: ServedEngine, node: Node, tokens: list[int]) -> Completion:
    """What kvtide serves of a prompt that it holds.

    Two ranks and their scheduler on two cores: now and then a step takes longer than the node has
    to answer, and then its answer counts as missing. That alone is asked again.
    """
    for _ in range(HIT_TRIES):
        forget(ranks)
        missed = node.count("miss.no_answer")
        answer = ask(ranks, tokens)
        if answer.cached_tokens:
            return answer
        node.wait_count("miss.no_answer", above=missed)
    raise AssertionError(f"{HIT_TRIES} times the answer came too late")


def test_two_engine_cores_share_on_one_node(single: ServedEngine, node: Node, logs: Path) -> None:
    """Data parallel 2: what either core computes both can load; so can the engine beside them."""
    arguments = ("--dtype", "bfloat16", "--data-parallel-size", "2", *NAME)
    both = engine_on(
        node, logs, "cores", *arguments, model=TINY_LLAMA, VLLM_CPU_OMP_THREADS_BIND="0|1"
    )
    with both:
        node.wait_on(3)
        cores = node.engines_of(both)
        assert len(cores) == 2
        assert len({core["engine_id"] for core in cores}) == 2
        assert (
            len({core["fingerprint"] for core in cores} | {node.engine_of(single)["fingerprint"]})
            == 1
        )
        own = None
        for number in range(40):
            tokens = prompt(f"cores {number}", LENGTH)
            ask(single, tokens)
            own = ask(single, tokens)
            node.wait_at_rest()
            ours = ask(both, tokens)
            assert_same(ours, own)
            if all(loaded_tokens(core) for core in node.engines_of(both)):
                return
        raise AssertionError("one core has never loaded")


def loaded_tokens(core: Status) -> int:
    """What one engine core has loaded so far."""
    tokens: int = core["counts"]["tokens.external"]
    return tokens


@pytest.fixture(scope="module")
def others(single: ServedEngine, node: Node, logs: Path) -> Iterator[dict[str, ServedEngine]]:
    """Two that are like the first but for one thing each."""
    engines = {
        "weights": engine_on(
            node, logs, "other-weights", "--dtype", "bfloat16", *NAME, model=TINY_LLAMA_B
        ),
        "dtype": engine_on(
            node, logs, "other-dtype", "--dtype", "float16", *NAME, model=TINY_LLAMA
        ),
    }
    with together(*engines.values()):
        node.wait_on(3)
        yield engines


def test_two_weight_sets_under_one_name_are_two_models(
    single: ServedEngine, others: dict[str, ServedEngine], node: Node
) -> None:
    """Same shape, same name, other weights; the status does not call them look-alikes."""
    other = others["weights"]
    assert {node.engine_of(engine)["label"] for engine in (single, other)} == {"the-model"}
    assert_apart(single, other, node)
    assert not_shared(single, other, node) == []


def test_two_dtypes_are_kept_apart_and_the_status_names_the_field(
    single: ServedEngine, others: dict[str, ServedEngine], node: Node
) -> None:
    """Equal sizes, other meaning: float16 against bfloat16."""
    other = others["dtype"]
    assert_apart(single, other, node)
    fields = differing(single, other, node)
    assert any("dtype" in name for name in fields)
    assert not any("parallel" in name for name in fields)
