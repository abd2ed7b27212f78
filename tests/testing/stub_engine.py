"""Stands in for `vllm serve` in quick tests: the URLs that `ServedEngine` uses, and bad manners.

Copied by the tests to where `python -m vllm.entrypoints.cli.main` finds it. What it does is said
by the environment: STUB=ends (says why and ends), deaf (ignores SIGTERM), litters (leaves a child
behind). Whatever it does, it leaves a socket in the temporary directory, as a killed vLLM does.
"""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import uuid
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

WORDS = ["The", " tide", " comes", " in"]
METRICS = """\
# HELP vllm:prompt_tokens_total all
vllm:prompt_tokens_total{engine="0",model_name="m"} 3.0
vllm:prompt_tokens_total{engine="1",model_name="m"} 4.0
vllm:by_source_total{engine="0",model_name="m",source="host"} 5.0
vllm:ttft_bucket{engine="0",le="1.0"} 1.0
vllm:ttft_sum{engine="0"} 0.25
vllm:ttft_created{engine="0"} 1.7e+09
up 1.0
"""


class Handler(BaseHTTPRequestHandler):
    """Answers four words to everything; prompts `refuse`, `break` and `cut` say how not to."""

    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *arguments: object) -> None:
        pass

    def do_GET(self) -> None:
        self._send(METRICS if self.path == "/metrics" else "")

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers.get("Content-Length", 0))) or "{}")
        if self.path.startswith("/reset_prefix_cache"):
            self._send(json.dumps({"success": self.path.endswith("reset_external=true")}))
        elif self.path == "/tokenize":
            self._send(json.dumps({"tokens": [len(word) for word in body["prompt"].split()]}))
        elif body.get("prompt") == "refuse":
            self._send('{"error": {"message": "too long"}}', 400)
        else:
            with contextlib.suppress(ConnectionError):  # the client may abort
                self._stream(body)

    def _send(self, text: str, status: int = 200) -> None:
        data = text.encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def _stream(self, body: dict) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        is_chat = "messages" in body
        if is_chat:
            self._event({"choices": [{"delta": {"role": "assistant", "content": ""}}]})
        for index, word in enumerate(WORDS[: body["max_tokens"]]):
            choice: dict = {"token_ids": [index], "finish_reason": None}
            choice |= {"delta": {"content": word}} if is_chat else {"text": word}
            if body.get("logprobs") is not None:
                value = -0.5 * index
                choice["logprobs"] = (
                    {"content": [{"token": word, "logprob": value}]}
                    if is_chat
                    else {"tokens": [word], "token_logprobs": [value]}
                )
            self._event({"choices": [choice]})
            if body.get("prompt") == "break":
                self._event({"error": {"message": "the engine died"}})
            if body.get("prompt") == "cut":
                self.connection.close()
                return
        self._event({"choices": [{"text": "", "delta": {}, "finish_reason": "length"}]})
        usage = {"prompt_tokens": 9, "prompt_tokens_details": {"cached_tokens": 8}}
        self._event({"choices": [], "usage": usage})
        self._chunk(b": a comment\n\ndata: [DONE]\n\n")
        self._chunk(b"")

    def _event(self, event: dict) -> None:
        self._chunk(b"data: " + json.dumps(event).encode() + b"\n\n")

    def _chunk(self, data: bytes) -> None:
        self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))


def main() -> None:
    manners = os.environ.get("STUB", "")
    print("the stub starts, STUB:", manners, flush=True)
    if manners == "ends":
        print("no such model", flush=True)
        sys.exit(3)
    if manners == "deaf":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    else:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    if manners == "litters":
        code = "import signal; signal.signal(15, signal.SIG_IGN); signal.pause()"
        subprocess.Popen([sys.executable, "-c", code])
    socket.socket(socket.AF_UNIX).bind(f"{tempfile.gettempdir()}/{uuid.uuid4()}")
    port = int(sys.argv[sys.argv.index("--port") + 1])
    ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()


if __name__ == "__main__":
    main()
