"""The three pages: off by default, and never the node's end."""

import json
import signal
import socket
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from kvtide import config
from kvtide.core import messages as m
from kvtide.metrics import LABELS_MAX, METRICS, Counters, render
from kvtide.node import http
from kvtide.testing.fake_engine import FakeEngine, make_tokens
from kvtide.testing.fake_worker import FakeWorker
from kvtide.testing.node_process import NodeProcess
from kvtide.wire.command import ask
from tests.node.fixtures import HOST_BYTES, StartNode

TOKEN = "correct-horse"


def free_port(host: str = "127.0.0.1") -> int:
    """A port that nobody uses now."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.bind((host, 0))
        port: int = probe.getsockname()[1]
    return port


@pytest.fixture
def address(new_node: StartNode) -> str:
    """Of a node with pages and a token."""
    address = f"127.0.0.1:{free_port()}"
    node = new_node(http_address=address, http_token=TOKEN)
    node.start()
    wait_page(address)
    return address


@pytest.fixture(scope="module")
def shared_address() -> Iterator[str]:
    """The same of one node, for all who do no more than ask it: it must bear them all."""
    address = f"127.0.0.1:{free_port()}"
    with tempfile.TemporaryDirectory(prefix="kvt-", dir="/tmp") as directory:
        node = NodeProcess(
            Path(directory), host_bytes=HOST_BYTES, http_address=address, http_token=TOKEN
        )
        node.environment["XDG_CONFIG_HOME"] = directory
        with node:
            wait_page(address)
            yield address


def wait_page(address: str) -> None:
    """Wait until somebody listens: the socket for engines opens a moment earlier."""
    for _ in range(500):
        try:
            get(address, "/healthz")
        except urllib.error.URLError as error:
            if isinstance(error, urllib.error.HTTPError):
                raise
            time.sleep(0.01)
        else:
            return
    raise AssertionError(f"nobody listens at {address}")


def get(address: str, path: str, **headers: str) -> tuple[int, str]:
    """A page."""
    request = urllib.request.Request(f"http://{address}{path}", headers=headers)
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(request, timeout=10) as answer:
        return answer.status, answer.read().decode()


def refusal(address: str, path: str, **headers: str) -> int:
    """The code of a page that is not given."""
    with pytest.raises(urllib.error.HTTPError) as raised:
        get(address, path, **headers)
    raised.value.close()
    return raised.value.code


def test_nothing_listens_by_default(running_node: NodeProcess) -> None:
    with open(f"/proc/{running_node.pid}/net/tcp", encoding="ascii") as table:
        listening = {line.split()[9] for line in table if line.split()[3] == "0A"}
    held = {name.removeprefix("socket:[")[:-1] for name in running_node.descriptors()}
    assert not held & listening


def test_health_and_metrics_need_no_token(shared_address: str) -> None:
    assert get(shared_address, "/healthz") == (200, "ok\n")
    assert get(shared_address, "/metrics?x=1")[0] == 200


def test_health_tells_of_an_alarm_and_keeps_its_code(new_node: StartNode) -> None:
    """Whoever restarts what is not healthy would restart the node, and the alarm be gone."""
    address = f"127.0.0.1:{free_port()}"
    node = new_node(http_address=address)
    node.start()
    wait_page(address)
    with FakeEngine(node.places, "one") as engine:
        (worker,) = engine.workers
        assert isinstance(worker, FakeWorker)
        worker.link.send(m.Compared(engine.shape.fingerprint, "differs", 1.41))
        scheduler = engine.scheduler
        assert scheduler.wait_for(lambda: bool(scheduler.serving and scheduler.serving.off_reason))
        code, body = get(address, "/healthz")
        assert code == 200
        assert body.startswith(f"alarm: fingerprint {engine.shape.fingerprint.hex()[:8]}")
        metrics = get(address, "/metrics")[1]
        assert "kvtide_fingerprints_quarantined 1\n" in metrics
        assert 'kvtide_canaries_total{verdict="differs"} 1\n' in metrics
        ask(node.places, "clear")
        assert get(address, "/healthz") == (200, "ok\n")


def test_status_needs_the_token(shared_address: str) -> None:
    assert refusal(shared_address, "/status") == 403
    assert refusal(shared_address, "/status", Authorization="Bearer wrong") == 403
    assert refusal(shared_address, "/status", Authorization=TOKEN) == 403
    assert refusal(shared_address, "/status", Authorization="Bearer \xff\xfe") == 403
    assert get(shared_address, "/status", Authorization=f"bearer {TOKEN}")[0] == 200
    code, body = get(shared_address, "/status", Authorization=f"Bearer {TOKEN}")
    assert code == 200
    status = json.loads(body)
    assert status["node"]["settings"]
    assert TOKEN not in body, "the token is not shown"


def test_status_is_refused_without_a_token_to_ask_for(new_node: StartNode) -> None:
    address = f"127.0.0.1:{free_port()}"
    new_node(http_address=address).start()
    wait_page(address)
    assert refusal(address, "/status", Authorization="Bearer ") == 403
    assert refusal(address, "/status", Authorization="Bearer None") == 403
    with pytest.raises(urllib.error.HTTPError) as caught:
        get(address, "/status")
    with caught.value as answer:
        assert answer.read() == b"set http_token: this page is shown to whoever sends that\n"


def test_other_pages_and_methods_are_refused(shared_address: str) -> None:
    assert refusal(shared_address, "/") == 404
    assert refusal(shared_address, "/../etc/passwd") == 404
    request = urllib.request.Request(f"http://{shared_address}/healthz", data=b"x", method="POST")
    with pytest.raises(urllib.error.HTTPError) as raised:
        urllib.request.urlopen(request, timeout=10)
    with raised.value as answer:
        assert answer.code == 501
        assert answer.read() == b"Unsupported method ('POST'); pages are had by GET or HEAD\n"


def test_head_is_a_page_without_its_body(shared_address: str) -> None:
    with socket.create_connection(shared_address.split(":"), timeout=10) as sock:
        sock.sendall(b"HEAD /healthz HTTP/1.0\r\n\r\n")
        head = b"".join(iter(lambda: sock.recv(4096), b"")).decode()
    assert head.startswith("HTTP/1.0 200 ")
    assert "Content-Length: 3\r\n" in head
    assert head.endswith("\r\n\r\n")


@pytest.mark.parametrize(
    "words",
    [
        b"",
        b"\r\n\r\n",
        b"GET /healthz",
        b"nonsense\r\n\r\n",
        b"GET /metrics HTTP/9.9\r\n\r\n",
        b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\n\r\n",
        b"GET /healthz HTTP/1.1\r\n" + b"a: b\r\n" * 1_000 + b"\r\n",
        b"GET /status HTTP/1.1\r\nAuthorization: " + b"\xff" * 100 + b"\r\n\r\n",
        bytes(range(256)) * 64,
    ],
)
def test_bad_request_costs_only_itself(shared_address: str, words: bytes) -> None:
    host, port = shared_address.split(":")
    with socket.create_connection((host, int(port)), timeout=10) as sock:
        try:
            sock.sendall(words)
            sock.shutdown(socket.SHUT_WR)
            while sock.recv(65536):
                pass
        except OSError:  # closed by the node, perhaps before all was said
            pass
    assert get(shared_address, "/healthz")[0] == 200


def test_clients_that_say_nothing_are_bounded(shared_address: str) -> None:
    """So many are kept for two seconds, others are closed at once; afterwards all is well."""
    host, port = shared_address.split(":")
    with ExitStack() as stack:
        silent = [
            stack.enter_context(socket.create_connection((host, int(port)), timeout=10))
            for _ in range(http.PAGES_MAX * 3)
        ]
        ends = [sock.recv(1) for sock in silent]
        assert ends == [b""] * len(silent)
    wait_page(shared_address)


def test_clients_that_trickle_are_cut_off(shared_address: str) -> None:
    """A byte now and then is no silence: as many as are served at once, and still others are."""
    host, port = shared_address.split(":")
    with ExitStack() as stack:
        slow = [
            stack.enter_context(socket.create_connection((host, int(port)), timeout=10))
            for _ in range(http.PAGES_MAX)
        ]
        until_s = time.monotonic() + 3 * http.REQUEST_S_MAX
        while slow and time.monotonic() < until_s:
            time.sleep(0.2)
            slow = [sock for sock in slow if is_fed(sock)]
        assert not slow
    assert get(shared_address, "/healthz") == (200, "ok\n")


def is_fed(sock: socket.socket) -> bool:
    try:
        sock.send(b"x")
    except OSError:
        return False
    return True


def test_taken_port_is_one_warning(new_node: StartNode) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        node = new_node(http_address=f"127.0.0.1:{other.getsockname()[1]}")
        node.start()
        tokens = make_tokens(64, seed=1)
        with FakeEngine(node.places, "one") as engine:
            engine.keep(tokens)
            assert engine.load(tokens).verified == 4
        warnings = [line for line in node.log().splitlines() if "WARNING" in line]
        assert len(warnings) == 1
        assert "no HTTP at 127.0.0.1" in warnings[0]
        assert "the node serves engines all the same" in warnings[0]


def test_no_thread_for_pages_is_one_warning(
    new_node: StartNode, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(http.threading.Thread, "start", refuse)
    found = config.read(environ={"HOME": "/", "KVTIDE_HTTP_ADDRESS": "localhost:0"})
    with http.HTTPPages.opened(found.node, None, None):  # type: ignore[arg-type]
        assert "no HTTP at localhost:0 (can't start new thread)" in caplog.text


def test_address_that_is_not_here_is_one_warning(new_node: StartNode) -> None:
    node = new_node(http_address="203.0.113.1:9470")
    node.start()
    assert node.log().count("no HTTP at 203.0.113.1:9470") == 1


def test_pages_by_ipv6(new_node: StartNode) -> None:
    try:
        port = free_port("::1")
    except OSError:
        pytest.skip("this machine has no IPv6")
    new_node(http_address=f"[::1]:{port}").start()
    wait_page(f"[::1]:{port}")
    assert get(f"[::1]:{port}", "/healthz") == (200, "ok\n")


def test_health_is_of_the_node_not_of_its_pages(address: str, new_node: StartNode) -> None:
    """A node that is stopped does not answer at all; a hung loop is a 503 (tested below)."""
    node = new_node()
    node.signal(signal.SIGSTOP)
    try:
        with pytest.raises((TimeoutError, OSError)):
            urllib.request.urlopen(f"http://{address}/healthz", timeout=0.5)
    finally:
        node.signal(signal.SIGCONT)


# ---- metrics


def samples(text: str) -> dict[str, float]:
    """All samples as Prometheus's own parser reads them, by name and labels."""
    return {
        f"{sample.name}{sorted(sample.labels.items())}": sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_metrics_are_what_prometheus_reads_and_agree_with_status(
    new_node: StartNode, address: str
) -> None:
    node = new_node()
    tokens = make_tokens(200, seed=1)
    counters = Counters()
    counters.add("tokens.computed", 200)
    counters.add("miss.absent")
    for taken_s in (1e-5, 0.002, 7.0):
        counters.observe_s("lookup", taken_s)
    with FakeEngine(node.places, "one") as engine:
        engine.keep(tokens)
        engine.load(tokens)
        engine.scheduler.link.send(m.Counts(counters.take()))
        status = wait_count(node, "tokens.computed")
        found = samples(get(address, "/metrics")[1])
    host = status["host"]
    for name in ("size", "allocated", "held", "free", "granted", "quarantine"):
        assert found[f"kvtide_host_{name}_bytes[]"] == host[f"{name}_bytes"], name
    assert found["kvtide_engines[]"] == 1
    assert found["kvtide_stored_blocks_total[]"] == 12
    assert found["kvtide_loaded_blocks_total[]"] == 12
    assert found["kvtide_prompt_tokens_total[('source', 'computed')]"] == 200
    assert found["kvtide_misses_total[('reason', 'absent')]"] == 1
    assert found["kvtide_lookup_seconds_count[]"] == 3
    assert found["kvtide_lookup_seconds_bucket[('le', '0.0001')]"] == 1
    assert found["kvtide_lookup_seconds_bucket[('le', '3')]"] == 2
    assert found["kvtide_lookup_seconds_bucket[('le', '+Inf')]"] == 3
    assert found["kvtide_lookup_seconds_sum[]"] == pytest.approx(7.00201)


def wait_count(node: NodeProcess, name: str) -> dict[str, Any]:
    """The status once an engine's counter has arrived."""
    for _ in range(500):
        status = node.status()
        if name in status["counts"]:
            return status
        time.sleep(0.01)
    raise AssertionError(f"{name} never came")


def test_absurd_counters_break_nothing(new_node: StartNode, address: str) -> None:
    """Names that are no words, far too many of them, numbers beyond 64 bits."""
    node = new_node()
    with FakeEngine(node.places, "one") as engine:
        send = engine.scheduler.link.send
        send(m.Counts({f"miss.reason_{n}": 1 for n in range(LABELS_MAX + 50)}))
        send(m.Counts({'miss."} 1\nkvtide_engines 99\n': 1, "miss.\\": 1, "tokens.": 1}))
        send(m.Counts({"stored_bytes": (1 << 63) - 1, "loaded_bytes": (1 << 63) - 1}))
        send(m.Counts({"stored_bytes": (1 << 63) - 1, "done": 1}))
        send(m.Counts({"stored_bytes": (1 << 63) - 1, "done": 1}))
        wait_count(node, "done")
        assert node.status()["counts"]["stored_bytes"] == (1 << 63) - 1
        text = get(address, "/metrics")[1]
    found = samples(text)
    assert found["kvtide_engines[]"] == 1
    reasons = {n: value for n, value in found.items() if n.startswith("kvtide_misses_total")}
    assert len(reasons) <= LABELS_MAX + 1
    assert reasons["kvtide_misses_total[('reason', 'other')]"] > 50
    assert sum(reasons.values()) == LABELS_MAX + 52, "none is lost"
    assert found["kvtide_stored_bytes_total[]"] == pytest.approx(2**63)


def test_every_metric_is_given_from_the_start(address: str, new_node: StartNode) -> None:
    text = get(address, "/metrics")[1]
    for metric in METRICS:
        assert f"# TYPE {metric.name} {metric.kind}" in text
    families = {family.name for family in text_string_to_metric_families(text)}
    assert {metric.name.removesuffix("_total") for metric in METRICS} == families


def test_pages_of_a_hung_owner_are_answered_503(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pages' thread waits a bounded time; here there is no owner at all."""
    monkeypatch.setattr(http, "ANSWER_S_MAX", 0.05)

    class NoLoop:
        def call_soon_threadsafe(self, call: object) -> None:
            """Never comes to it."""

    pages = http.HTTPPages.__new__(http.HTTPPages)
    pages._loop = NoLoop()  # type: ignore[assignment]
    assert pages.ask(lambda: "never") is None


def test_status_of_the_command_line_is_the_same(address: str, new_node: StartNode) -> None:
    node = new_node()
    body = json.loads(get(address, "/status", Authorization=f"Bearer {TOKEN}")[1])
    asked = ask(node.places, "status")
    for either in (body, asked):
        del either["node"]["uptime_s"]
    assert body == asked


def test_sums_are_exact() -> None:
    """Rates are differences: six digits would hide a load of 0.1 s behind 100,000 s."""
    host = dict.fromkeys([metric.source for metric in METRICS if metric.kind == "gauge"], 0)
    numbers = {"host": host, "engines": 0, "counts": {"load.us.sum": 123_456_789_000_001}}
    text = render(numbers | {"evicted": {}, "tiers": {}})
    assert "kvtide_load_seconds_sum 123456789.000001\n" in text


def test_render_takes_numbers_without_engines() -> None:
    host = dict.fromkeys([metric.source for metric in METRICS if metric.kind == "gauge"], 0)
    text = render({"host": host, "engines": 0, "counts": {}, "evicted": {"room": 3}, "tiers": {}})
    assert samples(text)["kvtide_evictions_total[('cause', 'room')]"] == 3
