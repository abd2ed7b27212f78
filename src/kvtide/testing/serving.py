"""A real `vllm serve` for tests, demo and benchmarks: started, asked, and gone afterwards.

    with ServedEngine(SMOLLM2, log=tmp_path / "engine.log", connector=KVTIDE) as engine:
        answer = engine.complete([1, 2, 3], max_tokens=8)

The engine runs under a leash, with what `leashed.py` promises. Its environment is made here, not
inherited: what VLLM_* and KVTIDE_* variables somebody has set must not change a test. Nothing here
starts a thread; one engine may be asked from several. After a failed start nothing of it runs.
"""

import contextlib
import getpass
import http.client
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.parse
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from kvtide.core.reasons import OffReason
from kvtide.testing.completions import (
    Address,
    Completion,
    ServingError,
    Stream,
    chat_body,
    completion_body,
    parse_metrics,
)
from kvtide.testing.leashed import End, LeashedProgram, ProgramError

MODELS = Path(sys.prefix) / "models"
SMOLLM2 = MODELS / "smollm2-135m-bf16"
TINY_LLAMA = MODELS / "tiny-llama"
TINY_LLAMA_B = MODELS / "tiny-llama-b"

KVTIDE: Mapping[str, object] = {"kv_connector": "KVTideConnector", "kv_role": "kv_both"}

SOCKET_PATH_BYTES_MAX = 107
SOCKET_NAME_BYTES = 36  # vLLM's in its temporary directory: a UUID

START_S_MAX = 300.0  # 10 to 30 s are usual; a first start on a busy machine compiles
KVTIDE_ON_S_MAX = 60.0  # the first start reads all weights to know what they are
KVTIDE_ON, KVTIDE_OFF = "kvtide on: ", "kvtide off: "
POLL_S = 0.05
QUICK_REPLY_S_MAX = 30.0  # of anything but a completion
NOT_INHERITED = ("VLLM_", "KVTIDE_", "LMCACHE_", "OMP_", "KMP_", "PYTHON")


def environment(**extra: str) -> dict[str, str]:
    """The environment that engines are started with; `extra` wins."""
    inherited = {
        name: value for name, value in os.environ.items() if not name.startswith(NOT_INHERITED)
    }
    return inherited | {
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "PYTHONWARNINGS": "ignore",
        "TORCH_LOGS": "-torch._library",
        # What torch has compiled outlives an engine, whose temporary directory goes with it.
        "TORCHINDUCTOR_CACHE_DIR": f"{tempfile.gettempdir()}/torchinductor_{getpass.getuser()}",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        # Without it an engine with a connector is given other cores than one without.
        "VLLM_CPU_OMP_THREADS_BIND": cores(),
        "VLLM_SERVER_DEV_MODE": "1",  # gives POST /reset_prefix_cache
        "VLLM_PLUGINS": "",  # none, also of those that happen to be installed
        **extra,
    }


def cores() -> str:
    """The cores of this process, as VLLM_CPU_OMP_THREADS_BIND wants them."""
    return ",".join(str(core) for core in sorted(os.sched_getaffinity(0)))


class ServedEngine(LeashedProgram):
    """One engine process group. Not started by the constructor, but by `with` or `start()`.

    Its `processes()` have names: `VLLM::EngineCore`, `VLLM::Worker` (with more than one:
    `VLLM::Worker_TP0` …); the first is the API server.
    """

    def __init__(
        self,
        model: Path,
        *,
        log: Path,
        connector: Mapping[str, object] | None = None,
        arguments: Sequence[str] = (),
        variables: Mapping[str, str] | None = None,
        python: Path = Path(sys.executable),
        on_wait: Callable[[float], None] = lambda elapsed_s: None,
    ) -> None:
        """Choose what to start.

        Args:
            model: a model directory; see `SMOLLM2` and the others.
            log: where all output of the engine goes, appended.
            connector: vLLM's `--kv-transfer-config`; `KVTIDE`, or None for no connector.
            arguments: more arguments of `vllm serve`; they win over those given here.
            variables: more environment variables; they win as well.
            python: of another virtual environment, if that is to serve.
            on_wait: called about every 50 ms while the engine starts, with the seconds so far.
        """
        super().__init__(log)
        self.model = model
        self.address = Address("127.0.0.1", 0)
        self._connector = connector
        self._arguments = tuple(arguments)
        self._variables = dict(variables or {})
        self._python = python
        self._on_wait = on_wait
        self._port: socket.socket | None = None

    # Life

    def __enter__(self) -> Self:
        self.start()
        self.wait_ready()
        return self

    def start(self) -> None:
        """Start the process; returns at once."""
        self._check_socket_paths()
        # Bound, never listening, for as long as the engine lives: nobody else is given the port,
        # and vLLM, which sets SO_REUSEADDR too, may listen on it.
        self._port = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        self._port.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._port.bind((self.address.host, 0))
        self.address = Address(self.address.host, self._port.getsockname()[1])
        plugins = {} if self._connector is None else {"VLLM_PLUGINS": "kvtide"}
        self.launch(self._command(), environment(**plugins | self._variables))

    def _check_socket_paths(self) -> None:
        """Raise ProgramError where the path of a socket would be too long for the kernel."""
        length = len(os.fsencode(self.scratch)) + 1 + SOCKET_NAME_BYTES
        if length > SOCKET_PATH_BYTES_MAX:
            raise ProgramError(
                f"sockets in {self.scratch} would have paths of {length} bytes, and"
                f" {SOCKET_PATH_BYTES_MAX} is the most; set TMPDIR to a shorter one"
            )

    def _command(self) -> list[str]:
        command = [
            *(str(self._python), "-m", "vllm.entrypoints.cli.main", "serve", str(self.model)),
            *("--host", self.address.host, "--port", str(self.address.port)),
            *("--uvicorn-log-level", "warning", "--enable-prompt-tokens-details"),
            # With the default of 0 vLLM kills its own children 0.3 s after a SIGTERM.
            *("--enforce-eager", "--shutdown-timeout", "5"),
        ]
        if self._connector is not None:
            command += ["--kv-transfer-config", json.dumps(self._connector)]
        return [*command, *self._arguments]

    def wait_ready(self, start_s_max: float = START_S_MAX) -> None:
        """Wait until the engine answers; whatever goes wrong, it is gone before this raises."""
        try:
            self._poll_until_ready(start_s_max)
        except BaseException:
            self.kill()
            raise

    def _poll_until_ready(self, start_s_max: float) -> None:
        began_s = time.monotonic()
        while not self._is_healthy():
            elapsed_s = time.monotonic() - began_s
            code = self._running().poll()
            if code is not None:  # 128 + n and more, or -n: somebody sent it signal n
                raise ProgramError(f"the engine ended at its start with {code}; {self.log_end()}")
            if elapsed_s > start_s_max:
                raise ProgramError(f"the engine needs over {start_s_max:g} s; {self.log_end()}")
            self._on_wait(elapsed_s)
            time.sleep(POLL_S)

    def wait_kvtide(self, on_s_max: float = KVTIDE_ON_S_MAX) -> str:
        """Wait until kvtide is on in this engine; returns what it says of itself.

        Raises ProgramError if it is off, or says nothing in time. While its weights are read for
        the first time it is off, and that passes.
        """
        began_s = time.monotonic()
        while time.monotonic() - began_s < on_s_max:
            for line in reversed(self.log_lines()):
                _, is_on, text = line.partition(KVTIDE_ON)
                if is_on:
                    return text
                _, is_off, reason = line.partition(KVTIDE_OFF)
                if reason.startswith(OffReason.WEIGHTS_HASHING):
                    break
                if is_off:
                    raise ProgramError(f"the engine serves uncached: {line}")
            self._on_wait(time.monotonic() - began_s)
            time.sleep(POLL_S)
        raise ProgramError(f"kvtide is not on after {on_s_max:g} s; {self.log_end()}")

    def _end(self, order: Callable[[subprocess.Popen[bytes]], object]) -> End:
        try:
            return super()._end(order)
        finally:
            if self._port is not None:
                self._port.close()

    # Requests

    def complete(
        self,
        prompt: str | Sequence[int],
        max_tokens: int,
        *,
        logprobs: bool = False,
        **extra: object,
    ) -> Completion:
        """A greedy completion of a text or of token ids.

        `extra` is passed on: `cache_salt`, `kv_transfer_params`, `ignore_eos`, `priority`, …
        """
        with self.stream(prompt, max_tokens, logprobs=logprobs, **extra) as stream:
            return stream.finish()

    def stream(
        self,
        prompt: str | Sequence[int],
        max_tokens: int,
        *,
        logprobs: bool = False,
        **extra: object,
    ) -> Stream:
        """The same, under way: to be read piece by piece, or aborted."""
        body = completion_body(prompt, max_tokens, logprobs=logprobs, **extra)
        return Stream(self.address, "/v1/completions", body)

    def chat(
        self,
        messages: Sequence[Mapping[str, str]],
        max_tokens: int,
        *,
        logprobs: bool = False,
        **extra: object,
    ) -> Completion:
        """The greedy next message of a chat."""
        body = chat_body(messages, max_tokens, logprobs=logprobs, **extra)
        with Stream(self.address, "/v1/chat/completions", body) as stream:
            return stream.finish()

    def embed(self, prompt: Sequence[int]) -> list[float]:
        """The embedding of token ids, by a model that makes such."""
        answer = json.loads(self._ask("POST", "/v1/embeddings", {"input": list(prompt)}))
        embedding: list[float] = answer["data"][0]["embedding"]
        return embedding

    def tokenize(self, text: str) -> list[int]:
        """A text as the engine's tokens, without special ones."""
        answer = self._ask("POST", "/tokenize", {"prompt": text, "add_special_tokens": False})
        tokens: list[int] = json.loads(answer)["tokens"]
        return tokens

    def detokenize(self, token_ids: Sequence[int]) -> str:
        """Tokens as text."""
        answer = self._ask("POST", "/detokenize", {"tokens": list(token_ids)})
        return str(json.loads(answer)["prompt"])

    def reset_prefix_cache(self, *, external: bool = False) -> bool:
        """Make the engine forget its cache, with `external` the connector too.

        False if the engine refused, as it does while blocks are in use.
        """
        query = urllib.parse.urlencode({"reset_external": str(external).lower()})
        answer = json.loads(self._ask("POST", f"/reset_prefix_cache?{query}"))
        return bool(answer["success"])

    def metrics(self) -> dict[str, float]:
        """The engine's counters now; see `parse_metrics` for the names."""
        return parse_metrics(self._ask("GET", "/metrics").decode())

    def _is_healthy(self) -> bool:
        with contextlib.suppress(ServingError):
            self._ask("GET", "/health")
            return True
        return False

    def _ask(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> bytes:
        """One short request; raises ServingError unless the answer is 200."""
        connection = http.client.HTTPConnection(
            self.address.host, self.address.port, timeout=QUICK_REPLY_S_MAX
        )
        data = None if body is None else json.dumps(body).encode()
        try:
            connection.request(method, path, data, {"Content-Type": "application/json"})
            response = connection.getresponse()
            answer = response.read()
        except (OSError, http.client.HTTPException) as error:
            raise ServingError(f"{self.address}{path} does not answer: {error!r}") from error
        finally:
            connection.close()
        if response.status != http.HTTPStatus.OK:
            raise ServingError(
                f"{path} answered {response.status}: {answer[:2000].decode(errors='replace')}",
                response.status,
            )
        return answer
