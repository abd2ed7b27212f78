"""The same things with a real vLLM and no connector: one start, all that tests rely on."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtide.testing import leash
from kvtide.testing.completions import ServingError
from kvtide.testing.leashed import End
from kvtide.testing.serving import SMOLLM2, ServedEngine

pytestmark = [pytest.mark.engine, pytest.mark.timeout(400)]

BLOCK_TOKENS = 128


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedEngine]:
    engine = ServedEngine(
        SMOLLM2,
        log=tmp_path_factory.mktemp("vllm") / "log",
        arguments=["--max-model-len", "1024"],
    )
    with engine:
        yield engine
        session = engine.session
        assert engine.stop() == End(0, was_killed=False)
        assert leash.processes_of_session(session) == []
        assert not engine.scratch.exists()


def test_hits_are_whole_blocks_and_answers_from_the_cache_are_bitwise_equal(
    engine: ServedEngine,
) -> None:
    prompt = engine.tokenize("The quick brown fox jumps over the lazy dog. " * 60)[:300]
    cold = engine.complete(prompt, 8, logprobs=True, cache_salt="one")
    assert (cold.prompt_tokens, cold.cached_tokens) == (300, 0)
    hits = [engine.complete(prompt, 8, logprobs=True, cache_salt="one") for _ in range(2)]
    assert [hit.cached_tokens for hit in hits] == [2 * BLOCK_TOKENS] * 2
    assert hits[0].token_ids == hits[1].token_ids
    assert hits[0].logprobs == hits[1].logprobs
    assert len(hits[0].logprobs) == 8
    assert engine.complete(prompt, 8, cache_salt="two").cached_tokens == 0


def test_a_reset_makes_the_engine_forget(engine: ServedEngine) -> None:
    prompt = engine.tokenize("All work and no play makes Jack a dull boy. " * 30)[:200]
    engine.complete(prompt, 1)
    assert engine.reset_prefix_cache()
    assert engine.complete(prompt, 1).cached_tokens == 0


def test_counters_move_with_the_request_that_has_just_ended(engine: ServedEngine) -> None:
    before = engine.metrics()
    answer = engine.complete([5, 6, 7] * 50, 3, ignore_eos=True)
    after = engine.metrics()
    name = 'vllm:prompt_tokens_by_source_total{source="local_compute"}'
    assert after[name] - before[name] == answer.prompt_tokens == 150
    assert len(answer.token_ids) == 3


def test_a_chat_has_tokens_and_log_probabilities(engine: ServedEngine) -> None:
    """What is said depends on the machine: tokens may tie within bfloat16's rounding."""
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    answer = engine.chat(messages, 8, logprobs=True)
    assert answer.text
    assert engine.detokenize(answer.token_ids).startswith(answer.text)
    assert len(answer.logprobs) == len(answer.token_ids)


def test_an_aborted_request_leaves_the_engine_idle(engine: ServedEngine) -> None:
    with engine.stream([9] * 40, 900, ignore_eos=True) as stream:
        next(iter(stream))
        assert engine.metrics()["vllm:num_requests_running"] == 1
    engine.wait_idle()
    assert engine.metrics()["vllm:num_requests_running"] == 0


def test_a_prompt_that_is_too_long_is_refused(engine: ServedEngine) -> None:
    with pytest.raises(ServingError, match="maximum context length") as caught:
        engine.complete([1] * 2000, 1)
    assert caught.value.status == 400


def test_its_processes_have_names(engine: ServedEngine) -> None:
    commands = " ".join(engine.processes().values())
    assert "VLLM::EngineCore" in commands
    assert "VLLM::Worker" in commands


def test_its_sockets_and_files_are_where_they_go_with_it(engine: ServedEngine) -> None:
    """A killed vLLM removes none of them."""
    paths = [path for pid in engine.processes() for path in unix_sockets(pid)]
    assert {path.parent for path in paths} == {engine.scratch}
    assert any(path.name.startswith("vllm_dist_") for path in engine.scratch.iterdir())


def unix_sockets(pid: int) -> list[Path]:
    """Paths of the sockets that a process has bound or accepted from."""
    with_path = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()[1:]]
    paths = {fields[6]: Path(fields[7]) for fields in with_path if fields[7:]}
    opened = [str(entry.readlink()) for entry in Path(f"/proc/{pid}/fd").iterdir()]
    inodes = [target[8:-1] for target in opened if target.startswith("socket:")]
    return [paths[inode] for inode in inodes if inode in paths]
