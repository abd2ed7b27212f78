"""A client of the OpenAI API that measures: streamed answers, with the moment each token came.

Standard library only, one connection a request, no thread: time to first token is the time from
before the connection is made to the first event that carries a token. Used by tests, the demo and
the benchmarks, so that all of them measure alike.
"""

import http.client
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

from kvtide.errors import KVTideError

REPLY_S_MAX = 300.0  # silence of an engine after which a request has failed
EVENT_BYTES_MAX = 16 * 1024 * 1024  # one line of a stream; an event holds a few tokens


class ServingError(KVTideError):
    """The engine refused a request, or broke its answer off; `status` is None in that case."""

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True, slots=True)
class Address:
    """Where an engine listens."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"http://{self.host}:{self.port}"


@dataclass(frozen=True, slots=True)
class Piece:
    """One event of an answer."""

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]  # of the chosen tokens; empty unless asked for
    at_ms: float  # since the request was begun


@dataclass(frozen=True, slots=True)
class Completion:
    """A whole answer."""

    pieces: tuple[Piece, ...]
    prompt_tokens: int
    cached_tokens: int  # of the prompt, from the engine's own cache or from outside
    finish_reason: str
    total_ms: float

    @property
    def text(self) -> str:
        """What the model said."""
        return "".join(piece.text for piece in self.pieces)

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The generated tokens."""
        return tuple(token for piece in self.pieces for token in piece.token_ids)

    @property
    def logprobs(self) -> tuple[float, ...]:
        """One for each generated token, exactly as the engine sent it; empty unless asked for."""
        return tuple(value for piece in self.pieces for value in piece.logprobs)

    @property
    def ttft_ms(self) -> float:
        """Time to the first token."""
        return self.pieces[0].at_ms

    @property
    def step_ms(self) -> float:
        """Mean time of a generated token after the first; needs two tokens at least."""
        first, last = self.pieces[0], self.pieces[-1]
        later_count = len(self.token_ids) - len(first.token_ids)
        assert later_count > 0, "one event has no time between tokens"
        return (last.at_ms - first.at_ms) / later_count


class Stream:
    """One request under way: iterate over its pieces, or `finish()`, or `abort()` it.

    The request has been sent when the constructor returns; nothing has been read yet.
    """

    def __init__(
        self, address: Address, path: str, body: Mapping[str, Any], *, reply_s: float = REPLY_S_MAX
    ) -> None:
        body = {
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_token_ids": True,
            **body,
        }
        data = json.dumps(body).encode()
        headers = {"Content-Type": "application/json", "Connection": "close"}
        self._began_s = time.perf_counter()
        self._connection = http.client.HTTPConnection(address.host, address.port, timeout=reply_s)
        self._response: http.client.HTTPResponse | None = None
        self._usage: dict[str, Any] = {}
        self._finish_reason = ""
        self._pieces: list[Piece] = []
        try:
            self._connection.request("POST", path, data, headers)
        except BaseException as error:
            self._connection.close()
            if isinstance(error, OSError):
                raise ServingError(f"{address} does not take requests: {error}") from error
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.abort()

    def abort(self) -> None:
        """Close the connection, which makes the engine abort the request if it still runs."""
        if self._response is not None:
            self._response.close()
        self._connection.close()

    def __iter__(self) -> Iterator[Piece]:
        try:
            for event in self._events():
                piece = self._piece(event)
                if piece is not None:
                    self._pieces.append(piece)
                    yield piece
        except (OSError, http.client.HTTPException) as error:
            raise ServingError(f"the answer broke off: {error!r}") from error
        finally:
            self.abort()

    def finish(self) -> Completion:
        """Read the rest, and return the whole answer."""
        for _ in self:
            pass
        total_ms = self._elapsed_ms()
        if not self._pieces or not self._usage:
            raise ServingError("the engine ended its answer without a token, or without its usage")
        details = self._usage.get("prompt_tokens_details") or {}
        return Completion(
            pieces=tuple(self._pieces),
            prompt_tokens=self._usage["prompt_tokens"],
            cached_tokens=details.get("cached_tokens") or 0,
            finish_reason=self._finish_reason,
            total_ms=total_ms,
        )

    def _elapsed_ms(self) -> float:
        return (time.perf_counter() - self._began_s) * 1000

    def _events(self) -> Iterator[dict[str, Any]]:
        """The JSON of each event; ends at `[DONE]`, fails where the stream ends before it."""
        self._response = response = self._connection.getresponse()
        if response.status != http.HTTPStatus.OK:
            raise ServingError(
                f"the engine answered {response.status}: "
                f"{response.read(2000).decode(errors='replace')}",
                response.status,
            )
        while line := response.readline(EVENT_BYTES_MAX):
            if not line.startswith(b"data:"):
                continue
            data = line.removeprefix(b"data:").strip()
            if data == b"[DONE]":
                return
            event = json.loads(data)
            if "error" in event:
                raise ServingError(f"the engine broke its answer off: {event['error']}")
            yield event
        raise ServingError("the answer broke off: no [DONE] at its end")

    def _piece(self, event: dict[str, Any]) -> Piece | None:
        """The tokens of an event; None for one that only carries the usage or the role."""
        self._usage = event.get("usage") or self._usage
        for choice in event["choices"]:
            self._finish_reason = choice.get("finish_reason") or self._finish_reason
            delta = choice.get("delta") or {}
            text = choice.get("text") or delta.get("content") or ""
            token_ids = tuple(choice.get("token_ids") or ())
            if text or token_ids:
                return Piece(text, token_ids, _logprobs(choice), self._elapsed_ms())
        return None


def _logprobs(choice: Mapping[str, Any]) -> tuple[float, ...]:
    """Of the chosen tokens; the two endpoints write them down differently."""
    found = choice.get("logprobs") or {}
    if "content" in found:
        return tuple(token["logprob"] for token in found["content"] or ())
    return tuple(found.get("token_logprobs") or ())


def completion_body(
    prompt: str | Sequence[int], max_tokens: int, *, logprobs: bool, **extra: object
) -> dict[str, object]:
    """The body of /v1/completions: greedy; log-probabilities of the chosen tokens if asked for."""
    body: dict[str, object] = {
        "prompt": prompt if isinstance(prompt, str) else list(prompt),
        "max_tokens": max_tokens,
        **extra,
    }
    if logprobs:
        body["logprobs"] = 0
    return body


def chat_body(
    messages: Sequence[Mapping[str, str]], max_tokens: int, *, logprobs: bool, **extra: object
) -> dict[str, object]:
    """The body of /v1/chat/completions, alike."""
    body: dict[str, object] = {"messages": list(messages), "max_tokens": max_tokens, **extra}
    if logprobs:
        body["logprobs"] = True
    return body


def parse_metrics(text: str) -> dict[str, float]:
    """Prometheus text as one number for each name and label set, e.g. `name{source="host"}`.

    The labels `engine` and `model_name`, which all of vLLM's carry, are left out, and what then
    has the same name is added up. Histograms keep their sum and count; `_created` says nothing.
    """
    values: dict[str, float] = {}
    for line in text.splitlines():
        series, _, value = line.rpartition(" ")
        if line.startswith("#") or not series:
            continue
        name, _, labels = series.partition("{")
        if name.endswith(("_bucket", "_created")):
            continue
        kept = [
            label
            for label in labels.removesuffix("}").split('",')
            if label and not label.startswith(("engine=", "model_name="))
        ]
        if kept:
            name += "{" + ",".join(label.removesuffix('"') + '"' for label in kept) + "}"
        values[name] = values.get(name, 0.0) + float(value)
    return values
