"""HTTP, opt-in: `/healthz`, `/metrics` and `/status`.

The standard library's server in a thread of its own: pages are rare, and the owner's loop stays
free of HTTP. A page asks the owner by one call into its loop and waits a bounded time; `/healthz`
does so too, since a node whose loop hangs is not well.
"""

import asyncio
import concurrent.futures
import contextlib
import hmac
import json
import logging
import socket
import socketserver
import sys
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from kvtide.errors import reason_of
from kvtide.metrics import render
from kvtide.node.runtime import Runtime
from kvtide.settings import NodeConfig

logger = logging.getLogger("kvtide.node")

ANSWER_S_MAX = 2.0
"""How long a page waits for the owner; also the time a client may be silent in its request."""
REQUEST_S_MAX = 2 * ANSWER_S_MAX
"""From a connection's beginning to its end, however slowly its client sends and reads."""
TEXT = "text/plain; charset=utf-8"
NEEDS_TOKEN = "send the token of http_token: Authorization: Bearer TOKEN\n"
NEEDS_SETTING = "set http_token: this page is shown to whoever sends that\n"
PAGES_MAX = 16
"""Requests at one time; those above are closed unanswered."""


class _Pages(BaseHTTPRequestHandler):
    """One request. `timeout` is of one read; `HTTPPages.service_actions` bounds all of them."""

    timeout = ANSWER_S_MAX
    server: "HTTPPages"
    server_version = "kvtide"
    sys_version = ""
    error_content_type = TEXT
    error_message_format = "%(message)s; pages are had by GET or HEAD\n"

    def do_GET(self) -> None:
        """Answer one of the three pages."""
        path = self.path.partition("?")[0]
        if path == "/healthz":
            self._answer_with(TEXT, self.server.ask(self.server.health))
        elif path == "/metrics":
            kind = "text/plain; version=0.0.4; charset=utf-8"
            self._answer_with(kind, self.server.ask(self.server.metrics))
        elif path != "/status":
            self._answer(404, TEXT, "pages: /healthz /metrics /status\n")
        elif not self._may_see_status():
            self._answer(403, TEXT, NEEDS_TOKEN if self.server.token else NEEDS_SETTING)
        else:
            self._answer_with("application/json", self.server.ask(self.server.status))

    def do_HEAD(self) -> None:
        """The same without its body, as some balancers ask."""
        self.do_GET()

    def _may_see_status(self) -> bool:
        token = self.server.token
        scheme, _, given = self.headers.get("Authorization", "").partition(" ")
        is_it = token and hmac.compare_digest(given.encode("utf-8", "replace"), token.encode())
        return bool(is_it) and scheme.lower() == "bearer"

    def _answer_with(self, kind: str, body: str | None) -> None:
        if body is None:
            self._answer(503, TEXT, "the node does not answer\n")
        else:
            self._answer(200, kind, body)

    def _answer(self, code: int, kind: str, body: str) -> None:
        data = body.encode()
        self.send_response(code)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def log_message(self, format: str, *args: object) -> None:
        """Requests are not logged: scrapes would fill the log."""


class HTTPPages(ThreadingHTTPServer):
    """The listening server; owned by the `with` of `opened`."""

    daemon_threads = True
    request_queue_size = 4 * PAGES_MAX

    def __init__(
        self, config: NodeConfig, runtime: Runtime, loop: asyncio.AbstractEventLoop
    ) -> None:
        address = config.http_address
        assert address is not None, "HTTP is off"
        self.token = config.http_token
        self._runtime = runtime
        self._loop = loop
        self._free = threading.BoundedSemaphore(PAGES_MAX)
        self._lock = threading.Lock()
        self._ends: dict[socket.socket, float] = {}  # under the lock: when each is cut off
        if ":" in address.ip:
            self.address_family = socket.AF_INET6
        super().__init__((address.ip, address.port), _Pages)

    def server_bind(self) -> None:
        """Bind without asking who we are: the standard library's would wait for a name server."""
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = "kvtide", self.socket.getsockname()[1]

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer in a thread, if there are not too many."""
        if not self._free.acquire(blocking=False):
            self.shutdown_request(request)
            return
        with self._lock:
            self._ends[request] = time.monotonic() + REQUEST_S_MAX
        try:
            super().process_request(request, client_address)
        except RuntimeError:  # no thread can be started
            self._ended(request)
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """One request from beginning to end."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._ended(request)

    def _ended(self, request: Any) -> None:
        with self._lock:
            self._ends.pop(request, None)
        self._free.release()

    def service_actions(self) -> None:
        """In the thread that accepts, twice a second: cut off what takes too long."""
        with self._lock:
            late = [sock for sock, end_s in self._ends.items() if end_s <= time.monotonic()]
            for sock in late:
                with contextlib.suppress(OSError):  # closed meanwhile
                    sock.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that has gone, or a fault of ours; neither is the node's end."""
        logger.debug("a page was not answered: %r", sys.exc_info()[1])

    def ask(self, make: Callable[[], str]) -> str | None:
        """What `make` gives in the owner's thread; None where it gives nothing in time."""
        answer: concurrent.futures.Future[str] = concurrent.futures.Future()

        def call() -> None:
            try:
                answer.set_result(make())
            except Exception as error:
                logger.exception("a page cannot be made")
                answer.set_exception(error)

        with contextlib.suppress(Exception):  # the loop has ended, hangs, or `make` failed
            self._loop.call_soon_threadsafe(call)
            return answer.result(ANSWER_S_MAX)
        return None

    def health(self) -> str:
        """In the owner's thread: the page /healthz."""
        return self._runtime.health()

    def metrics(self) -> str:
        """In the owner's thread: the page /metrics."""
        return render(self._runtime.numbers())

    def status(self) -> str:
        """In the owner's thread: the page /status."""
        return json.dumps(self._runtime.status()) + "\n"

    @classmethod
    @contextlib.contextmanager
    def opened(
        cls, config: NodeConfig, runtime: Runtime, loop: asyncio.AbstractEventLoop
    ) -> Iterator[None]:
        """Serve pages inside the `with`; a port that is taken is one warning."""
        try:
            pages = cls(config, runtime, loop)
        except OSError as error:
            logger.warning(
                "no HTTP at %s (%s); the node serves engines all the same",
                config.http_address,
                reason_of(error),
            )
            yield
            return
        thread = threading.Thread(target=pages.serve_forever, name="kvtide-http", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:  # there is none to be had; without pages, not without cache
            logger.warning("no HTTP at %s (%s)", config.http_address, error)
            pages.server_close()
            yield
            return
        try:
            yield
        finally:
            pages.shutdown()
            pages.server_close()
            thread.join(ANSWER_S_MAX)
