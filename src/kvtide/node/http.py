"""HTTP, opt-in: `/healthz`, `/metrics` and `/status`.

The standard library's server in a thread of its own: pages are rare, and the owner's loop stays
free of HTTP. A page asks the owner by one call into its loop and waits a bounded time.
"""

import asyncio
import concurrent.futures
import hmac
import json
import logging
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from kvtide.config import NodeConfig
from kvtide.metrics import render
from kvtide.node.runtime import Runtime

logger = logging.getLogger("kvtide.node")

ANSWER_S_MAX = 2.0
"""How long a page waits for the owner; also the time a client has to send its request."""


class _Pages(BaseHTTPRequestHandler):
    """One request."""

    timeout = ANSWER_S_MAX
    server: "HTTPPages"

    def do_GET(self) -> None:
        """Answer one of the three pages."""
        path = self.path.partition("?")[0]
        if path == "/healthz":
            self._answer(200, "text/plain; charset=utf-8", "ok\n")
        elif path == "/metrics":
            self._answer_with("text/plain; version=0.0.4; charset=utf-8", render)
        elif path != "/status":
            self._answer(404, "text/plain; charset=utf-8", "pages: /healthz /metrics /status\n")
        elif not self._may_see_status():
            self._answer(403, "text/plain; charset=utf-8", "needs the token of http_token\n")
        else:
            self._answer_with("application/json", lambda status: json.dumps(status) + "\n")

    def _may_see_status(self) -> bool:
        token = self.server.token
        given = self.headers.get("Authorization", "").encode("utf-8", "replace")
        return token is not None and hmac.compare_digest(given, b"Bearer " + token.encode())

    def _answer_with(self, kind: str, write: Callable[[dict[str, Any]], str]) -> None:
        try:
            body = write(self.server.ask_owner())
        except (concurrent.futures.TimeoutError, RuntimeError):
            self._answer(503, "text/plain; charset=utf-8", "the node does not answer\n")
        else:
            self._answer(200, kind, body)

    def _answer(self, code: int, kind: str, body: str) -> None:
        data = body.encode()
        self.send_response(code)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: object) -> None:
        """Requests are not logged: scrapes would fill the log."""


class HTTPPages(ThreadingHTTPServer):
    """The listening server; owned by the `with` of `opened`."""

    daemon_threads = True

    def __init__(
        self, config: NodeConfig, runtime: Runtime, loop: asyncio.AbstractEventLoop
    ) -> None:
        address = config.http_address
        assert address is not None, "HTTP is off"
        self.token = config.http_token
        self._runtime = runtime
        self._loop = loop
        if ":" in address.host:
            self.address_family = socket.AF_INET6
        super().__init__((address.host, address.port), _Pages)

    def ask_owner(self) -> dict[str, Any]:
        """The status, made in the owner's thread."""
        answer: concurrent.futures.Future[dict[str, Any]] = concurrent.futures.Future()
        self._loop.call_soon_threadsafe(lambda: answer.set_result(self._runtime.status()))
        return answer.result(ANSWER_S_MAX)

    @classmethod
    @contextmanager
    def opened(
        cls, config: NodeConfig, runtime: Runtime, loop: asyncio.AbstractEventLoop
    ) -> Iterator[None]:
        """Serve pages inside the `with`, where they are asked for; a taken port is one warning."""
        if config.http_address is None:
            yield
            return
        try:
            pages = cls(config, runtime, loop)
        except OSError as error:
            logger.warning(
                "no HTTP at %s (%s); the node serves engines all the same",
                config.http_address,
                error.strerror or error,
            )
            yield
            return
        thread = threading.Thread(target=pages.serve_forever, name="kvtide-http", daemon=True)
        thread.start()
        try:
            yield
        finally:
            pages.shutdown()
            pages.server_close()
            thread.join(ANSWER_S_MAX)
