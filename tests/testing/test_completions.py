"""The measuring client against a stub that streams as vLLM does."""

import threading
from collections.abc import Iterator
from http.server import ThreadingHTTPServer

import pytest

from kvtide.testing.completions import (
    Address,
    ServingError,
    Stream,
    chat_body,
    completion_body,
    parse_metrics,
)
from tests.testing.stub_engine import METRICS, WORDS, Handler


@pytest.fixture(scope="module")
def address() -> Iterator[Address]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield Address("127.0.0.1", server.server_address[1])
        server.shutdown()
        thread.join()


def completion(address: Address, prompt: str, max_tokens: int = 4, **options: bool) -> Stream:
    body = completion_body(prompt, max_tokens, logprobs=options.get("logprobs", False))
    return Stream(address, "/v1/completions", body)


def test_a_streamed_answer_is_put_together(address: Address) -> None:
    answer = completion(address, "hello", logprobs=True).finish()
    assert answer.text == "".join(WORDS)
    assert answer.token_ids == (0, 1, 2, 3)
    assert answer.logprobs == (0.0, -0.5, -1.0, -1.5)
    assert (answer.prompt_tokens, answer.cached_tokens) == (9, 8)
    assert answer.finish_reason == "length"
    assert 0 < answer.ttft_ms <= answer.pieces[-1].at_ms <= answer.total_ms
    assert answer.step_ms * 3 == pytest.approx(answer.pieces[-1].at_ms - answer.ttft_ms)


def test_a_chat_is_put_together_and_its_first_role_is_no_token(address: Address) -> None:
    messages = [{"role": "user", "content": "hello"}]
    body = chat_body(messages, 2, logprobs=True)
    answer = Stream(address, "/v1/chat/completions", body).finish()
    assert answer.text == "".join(WORDS[:2])
    assert len(answer.pieces) == 2
    assert answer.logprobs == (0.0, -0.5)


def test_log_probabilities_are_only_there_when_asked_for(address: Address) -> None:
    assert completion(address, "hello").finish().logprobs == ()


def test_a_refusal_carries_its_status_and_what_the_engine_said(address: Address) -> None:
    with pytest.raises(ServingError, match="too long") as caught:
        completion(address, "refuse").finish()
    assert caught.value.status == 400


def test_an_error_in_the_middle_of_an_answer_is_an_error(address: Address) -> None:
    with pytest.raises(ServingError, match="the engine died") as caught:
        completion(address, "break").finish()
    assert caught.value.status is None


def test_an_answer_that_is_cut_off_is_an_error(address: Address) -> None:
    with pytest.raises(ServingError, match="broke off"):
        completion(address, "cut").finish()


def test_nobody_listening_is_an_error() -> None:
    with pytest.raises(ServingError, match="does not take requests"):
        completion(Address("127.0.0.1", 1), "hello")


def test_an_aborted_request_can_be_aborted_again(address: Address) -> None:
    with completion(address, "hello") as stream:
        assert next(iter(stream)).text == WORDS[0]
        stream.abort()


def test_metrics_are_added_up_over_engines_and_keep_other_labels() -> None:
    assert parse_metrics(METRICS) == {
        "vllm:prompt_tokens_total": 7.0,
        'vllm:by_source_total{source="host"}': 5.0,
        "vllm:ttft_sum": 0.25,
        "up": 1.0,
    }
