"""A store that says no, in the words of real ones; a proxy sends a tier to it and back. And what
gives keys to a container."""

import json
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from http.client import HTTPConnection
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
def served(server: ThreadingHTTPServer) -> Iterator[None]:
    """It answers within this."""
    with server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield
        finally:
            server.shutdown()
            thread.join()


@contextmanager
def refusing(proxy: Proxy, status: int, code: str) -> Iterator[Refusals]:
    """Within it whoever asks behind this proxy is refused."""
    target = proxy.target
    server = Refusals(status, code)
    with served(server):
        proxy.target = ("127.0.0.1", server.server_address[1])
        proxy.cut()
        try:
            yield server
        finally:
            proxy.target = target
            proxy.cut()


class Front(ThreadingHTTPServer):
    """Passes all on to a server but `DeleteObjects`, which it says it does not know."""

    def __init__(self, port: int) -> None:
        super().__init__(("127.0.0.1", 0), _Front)
        self.port = port
        self.refused = 0
        self.unreadable: str | tuple[str, ...] = "?"
        """Objects whose names end so cannot be got."""
        self.fault = (500, "InternalError")
        """What is said of these."""
        self.delay_s = 0.0
        """Each object takes so long to be got."""


class _Front(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Front

    def pass_on(self) -> None:
        content = self.rfile.read(int(self.headers.get("content-length", 0)))
        if self.command == "POST":
            self.server.refused += 1
            self.reply(501, {}, ERROR.format(code="NotImplemented").encode())
            return
        if self.command == "GET" and self.path.endswith(self.server.unreadable):
            status, code = self.server.fault
            self.reply(status, {}, ERROR.format(code=code).encode())
            return
        if self.command == "GET" and "?" not in self.path:
            time.sleep(self.server.delay_s)
        with closing(HTTPConnection("127.0.0.1", self.server.port)) as behind:
            behind.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
            for name, value in self.headers.items():
                behind.putheader(name, value)
            behind.endheaders(content)
            answer = behind.getresponse()
            self.reply(answer.status, dict(answer.getheaders()), answer.read())

    def reply(self, status: int, headers: Mapping[str, str], content: bytes) -> None:
        self.send_response(status)
        for name, value in headers.items():
            if name.lower() not in ("content-length", "transfer-encoding", "date", "server"):
                self.send_header(name, value)
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    do_GET = do_PUT = do_POST = do_DELETE = pass_on

    def log_message(self, format: str, *args: object) -> None:
        """Tests say enough."""


class Keys(ThreadingHTTPServer):
    """Gives keys that expire in a minute, as the agent of a container does; counts who asks."""

    def __init__(self, access_key: str, secret_key: str) -> None:
        super().__init__(("127.0.0.1", 0), _Keys)
        self.keys = {"AccessKeyId": access_key, "SecretAccessKey": secret_key, "Token": ""}
        self.asked = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/keys"


class _Keys(BaseHTTPRequestHandler):
    server: Keys

    def do_GET(self) -> None:
        self.server.asked += 1
        expires = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() + 60))
        content = json.dumps({**self.server.keys, "Expiration": expires}).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:
        """Tests say enough."""
