"""A store that says no, in the words of real ones; a proxy sends a tier to it and back."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from kvtide.testing.proxy import Proxy

ERROR = """<?xml version="1.0" encoding="UTF-8"?>
<Error><Code>{code}</Code><Message>{code}</Message></Error>"""


class Refusals(ThreadingHTTPServer):
    """Answers each request with one status and code; counts them."""

    def __init__(self, status: int, code: str) -> None:
        super().__init__(("127.0.0.1", 0), _Refusal)
        self.status = status
        self.content = ERROR.format(code=code).encode()
        self.asked = 0


class _Refusal(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Refusals

    def answer(self) -> None:
        self.server.asked += 1
        self.rfile.read(int(self.headers.get("content-length", 0)))
        self.send_response(self.server.status)
        self.send_header("content-type", "application/xml")
        self.send_header("content-length", str(len(self.server.content)))
        self.end_headers()
        self.wfile.write(self.server.content)

    do_GET = do_PUT = do_POST = do_DELETE = answer

    def log_message(self, format: str, *args: object) -> None:
        """Tests say enough."""


@contextmanager
def refusing(proxy: Proxy, status: int, code: str) -> Iterator[Refusals]:
    """Within it whoever asks behind this proxy is refused."""
    target = proxy.target
    with Refusals(status, code) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        proxy.target = ("127.0.0.1", server.server_address[1])
        proxy.cut()
        try:
            yield server
        finally:
            proxy.target = target
            proxy.cut()
            server.shutdown()
            thread.join()
