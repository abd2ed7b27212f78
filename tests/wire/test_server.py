"""The node's side of the socket, from outside: what one peer does costs that peer alone."""

import asyncio
import errno
import os
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path

import pytest

from kvtide.core import messages as m
from kvtide.testing.fake_engine import FakeEngine, Loaded, make_tokens
from kvtide.testing.node_process import NodeProcess
from kvtide.units import MiB
from kvtide.wire import frames
from kvtide.wire.command import ask
from kvtide.wire.frames import encode
from kvtide.wire.places import Places
from kvtide.wire.server import Connection, Server
from tests.node.fixtures import StartNode
from tests.wire.raw import RawPeer, descriptor_count, scheduler_hello, worker_hello

TOKENS = make_tokens(128, seed=1)
PONG_BYTES = len(encode(m.Pong()))


def wait_until(is_so: Callable[[], bool], what: str) -> None:
    """Wait for a state."""
    until_s = time.monotonic() + 20
    while not is_so():
        assert time.monotonic() < until_s, what
        time.sleep(0.01)


def settled_descriptors(node: NodeProcess, expected: int) -> None:
    """Wait until the node has as many descriptors as it should, and no more."""
    pid = node.pid
    wait_until(
        lambda: descriptor_count(pid) <= expected,
        f"{descriptor_count(pid)} descriptors, not {expected}: {node.descriptors()}",
    )


def test_peer_that_never_reads_loses_its_connection_only(running_node: NodeProcess) -> None:
    """It asks and asks; its answers fill its queue, a bounded one, and then it is out."""
    pings = encode(m.Ping()) * 50_000
    with FakeEngine(running_node.places, "one") as engine:
        engine.keep(TOKENS)
        with RawPeer(running_node.places) as peer, suppress(ConnectionError):
            while True:
                peer.sock.sendall(pings)
        assert engine.load(TOKENS) == Loaded(8, 8)
    assert running_node.resident_bytes("VmHWM") < 400 * MiB
    assert running_node.log().count("its peer does not read") == 1


def test_last_words_are_heard_though_the_peer_takes_no_answer(running_node: NodeProcess) -> None:
    """It asked, said good-bye and closed: the answer cannot be sent, and the good-bye counts."""
    with RawPeer(running_node.places) as peer:
        peer.hello(worker_hello())
        assert isinstance(peer.receive(), m.Welcome)
        running_node.signal(signal.SIGSTOP)
        peer.send(m.Ping())
        peer.send(m.Bye())
    running_node.signal(signal.SIGCONT)
    wait_until(lambda: not ask(running_node.places, "status")["engines"], "it is still known")


def test_slow_peer_is_served_to_the_end(running_node: NodeProcess) -> None:
    """One byte at a time, between the questions of others."""
    with FakeEngine(running_node.places, "one") as engine, RawPeer(running_node.places) as peer:
        for byte in encode(m.Command("status")):
            peer.sock.sendall(bytes([byte]))
            engine.match(TOKENS)
        answer = peer.receive()
    assert isinstance(answer, m.CommandAnswer)
    assert answer.values["engines"][0]["engine_id"] == "one"


def test_burst_of_one_peer_does_not_hold_up_another(running_node: NodeProcess) -> None:
    """Answers come within T_answer (250 ms) while somebody sends as fast as it can."""
    pongs = encode(m.Pong()) * 10_000  # which nobody answers
    with FakeEngine(running_node.places, "one") as engine, RawPeer(running_node.places) as peer:
        peer.sock.setblocking(False)
        taken_s = []
        sent = 0
        for _ in range(30):
            try:
                while True:
                    sent += peer.sock.send(pongs[sent % PONG_BYTES :])
            except BlockingIOError:
                pass
            began_s = time.monotonic()
            engine.match(TOKENS)
            taken_s.append(time.monotonic() - began_s)
            try:
                while peer.sock.recv(1 << 20):
                    pass
            except BlockingIOError:
                pass
    assert sorted(taken_s)[len(taken_s) // 2] < 0.25, taken_s


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become somebody else")
def test_other_users_are_refused(running_node: NodeProcess) -> None:
    """Even one who gets at the socket (here root opened the directory for a moment)."""
    directory = running_node.places.directory
    directory.chmod(0o711)
    running_node.places.socket.chmod(0o666)
    program = f"""
import os, socket
os.setgroups([]); os.setgid(65534); os.setuid(65534)
with socket.socket(socket.AF_UNIX) as sock:
    sock.connect({str(running_node.places.socket)!r})
    try:
        sock.sendall({encode(m.Command("stop"))!r})
        print(sock.recv(100))
    except ConnectionError:
        print(b"")
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=20, check=True
    )
    assert done.stdout.strip() == "b''"
    assert "of user 65534 was refused a connection: this node serves" in running_node.log()
    assert running_node.status()["node"]["pid"] == running_node.pid


@pytest.mark.parametrize(
    ("fault", "count"),
    [
        (m.Stored(1, True), 0),
        (scheduler_hello("another"), 1),
        (m.Welcome(1, b"node", 1, 1), 1),
        (m.Command("x"), 0),
    ],
    ids=["of the other role", "a second hello", "of the node", "a command"],
)
@pytest.mark.parametrize(
    "gap_bytes", [0, frames.RECEIVE_BYTES], ids=["read with it", "not read yet"]
)
def test_good_bye_behind_what_costs_the_connection_is_heard(
    running_node: NodeProcess, fault: m.Message, count: int, gap_bytes: int
) -> None:
    """Its process lives on and believes it said, so nothing else would tell that it has gone."""
    gap = encode(m.Pong()) * (gap_bytes // PONG_BYTES)
    with RawPeer(running_node.places) as peer:
        peer.hello(scheduler_hello())
        assert isinstance(peer.receive(), m.Welcome)
        running_node.signal(signal.SIGSTOP)
        pidfd = os.pidfd_open(os.getpid())
        peer.send_bytes(encode(fault, count) + gap + encode(m.Bye()), [pidfd] * count)
        os.close(pidfd)
        running_node.signal(signal.SIGCONT)
        assert peer.is_closed()
        wait_until(lambda: not running_node.status()["engines"], "it is still known")


@pytest.mark.parametrize(
    "answer",
    [m.Command("x" * (3 << 20)), m.CommandAnswer({"number": 1 << 64})],
    ids=["not taken", "not to be written"],
)
def test_good_bye_behind_a_question_whose_answer_costs_the_connection_is_heard(
    runtime_dir: Path, answer: m.Message
) -> None:
    """The connection ends while something is sent to it, which may be at any moment."""
    heard: list[m.Message] = []

    async def live() -> None:
        is_heard, closed = asyncio.Event(), asyncio.Event()

        def on_message(connection: Connection, message: m.Message, _: list[int]) -> None:
            heard.append(message)
            if message == m.Bye():
                is_heard.set()
            else:
                server.send(connection.number, answer)

        server = Server(on_message, lambda _: closed.set(), lambda _: None)
        server.listen(Places(runtime_dir).socket)
        with closing(server), RawPeer(Places(runtime_dir)) as peer:
            peer.send_bytes(encode(m.Ping()) * 100 + encode(m.Bye()))
            async with asyncio.timeout(20):
                await closed.wait()
                await is_heard.wait()

    asyncio.run(live())
    assert len(heard) < 101, "questions behind the end are not answered"


def test_a_send_that_fails_though_the_peer_lives_ends_the_connection(
    runtime_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It sees the end and comes back; else it would wait for ever for what it did not get."""
    said: list[str] = []

    def flush(outbox: frames.Outbox, sock: socket.socket) -> None:
        raise OSError(errno.ETOOMANYREFS, "too many references")

    async def live() -> None:
        closed = asyncio.Event()
        server = Server(
            lambda connection, *_: server.send(connection.number, m.Pong()),
            lambda _: closed.set(),
            said.append,
        )
        server.listen(Places(runtime_dir).socket)
        with closing(server), RawPeer(Places(runtime_dir)) as peer:
            monkeypatch.setattr(frames.Outbox, "flush", flush)
            peer.send(m.Ping())
            async with asyncio.timeout(20):
                await closed.wait()
            assert peer.is_closed()

    asyncio.run(live())
    (line,) = said
    assert "too many references" in line


def test_nothing_behind_what_cannot_be_read_is_believed(running_node: NodeProcess) -> None:
    """A good-bye lends out what its sender was lent: whoever may be alive must not lose it so."""
    with RawPeer(running_node.places) as peer:
        peer.hello(scheduler_hello())
        assert isinstance(peer.receive(), m.Welcome)
        unreadable = bytearray(encode(m.Stored(1, True)))
        unreadable[6] = 0xC1
        peer.send_bytes(bytes(unreadable) + encode(m.Bye()))
        assert peer.is_closed()
    assert [engine["engine_id"] for engine in running_node.status()["engines"]] == ["raw"]


def test_nothing_behind_the_last_words_is_heard(running_node: NodeProcess) -> None:
    """A good-bye ends the connection: a hello in the same packet must not bring it back."""
    with RawPeer(running_node.places) as peer:
        pidfd = os.pidfd_open(os.getpid())
        peer.send_bytes(encode(m.Bye()) + encode(scheduler_hello(), 1), [pidfd])
        os.close(pidfd)
        assert peer.is_closed()
    assert running_node.status()["engines"] == []


def test_descriptors_that_no_message_carries_are_closed(running_node: NodeProcess) -> None:
    before = descriptor_count(running_node.pid)
    with open(os.devnull, "rb") as null:
        for message in (m.Ping(), m.Command("status"), m.Bye(), m.Stored(1, True)):
            for _ in range(20):
                with RawPeer(running_node.places) as peer:
                    peer.send_bytes(encode(message, 4), [null.fileno()] * 4)
                    assert peer.is_closed()
                with RawPeer(running_node.places) as peer:
                    peer.send_bytes(encode(message), [null.fileno()] * 4)
                    assert peer.is_closed()
    settled_descriptors(running_node, before)


def test_refused_hellos_leave_nothing_behind(running_node: NodeProcess) -> None:
    """An engine whose engine_id is in use asks every five seconds, for days."""
    with FakeEngine(running_node.places, "one"):
        before = descriptor_count(running_node.pid)
        for number in range(50):
            with RawPeer(running_node.places) as peer:
                version = m.WIRE_VERSION + number % 2
                peer.hello(scheduler_hello("one", wire_version=version))
                assert isinstance(peer.receive(), m.Refused)
                assert peer.is_closed()
        settled_descriptors(running_node, before)


def test_process_that_comes_again_and_again_is_watched_once(running_node: NodeProcess) -> None:
    with RawPeer(running_node.places) as first:
        first.hello(worker_hello("raw"))
        assert isinstance(first.receive(), m.Welcome)
    before = descriptor_count(running_node.pid)
    for _ in range(50):
        with RawPeer(running_node.places) as peer:
            peer.hello(worker_hello("raw"))
            assert isinstance(peer.receive(), m.Welcome)
    settled_descriptors(running_node, before)


def test_death_is_seen_through_the_last_of_many_connections(running_node: NodeProcess) -> None:
    """The process reconnected before it died: its one pidfd must still tell."""
    program = f"""
import os, sys
from pathlib import Path
from kvtide.wire.places import Places
from tests.wire.raw import RawPeer, worker_hello
places = Places(Path({str(running_node.places.directory)!r}))
peers = []
for _ in range(5):
    peers.append(RawPeer(places))
    peers[-1].hello(worker_hello("raw"))
    peers[-1].receive()
    if len(peers) % 2:
        peers[-1].close()
print("ready", flush=True)
sys.stdin.read()
"""
    command = [sys.executable, "-c", program]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"ready\n"
        assert [e["engine_id"] for e in running_node.status()["engines"]] == ["raw"]
        child.kill()
        child.wait()
    wait_until(lambda: not running_node.status()["engines"], "the engine is still there")


def test_facts_too_large_for_one_frame_cost_their_engine_only(running_node: NodeProcess) -> None:
    """Each worker's facts fit into a frame; all of them, which its scheduler is sent, do not."""
    facts = {"x": "y" * (3 * MiB)}
    with FakeEngine(running_node.places, "one") as engine:
        with (
            RawPeer(running_node.places) as scheduler,
            RawPeer(running_node.places) as first,
            RawPeer(running_node.places) as second,
        ):
            scheduler.hello(scheduler_hello("raw", worker_count=2))
            assert isinstance(scheduler.receive(), m.Welcome)
            for rank, peer in enumerate((first, second)):
                hello = worker_hello(
                    "raw",
                    rank=rank,
                    shard=rank,
                    shard_count=2,
                    facts=facts,
                    incarnation=b"%d" % rank,
                )
                peer.hello(hello)
                assert isinstance(peer.receive(), m.Welcome)
            assert scheduler.is_closed()
            assert first.is_alive()
        engine.keep(TOKENS)
        assert engine.load(TOKENS) == Loaded(8, 8)
    assert "a Workers of" in running_node.log()


def test_facts_too_deep_to_be_passed_on_cost_their_engine_only(running_node: NodeProcess) -> None:
    deep: list[object] = []
    for _ in range(900):
        deep = [deep]
    with FakeEngine(running_node.places, "one") as engine:
        with RawPeer(running_node.places) as scheduler, RawPeer(running_node.places) as worker:
            scheduler.hello(scheduler_hello("raw"))
            worker.hello(worker_hello("raw", facts={"x": deep}))
            assert isinstance(worker.receive(), m.Welcome)
        engine.keep(TOKENS)
        assert engine.load(TOKENS) == Loaded(8, 8)


def test_pidfd_must_be_of_whoever_speaks(running_node: NodeProcess) -> None:
    other = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    pidfd = os.pidfd_open(other.pid)
    try:
        with RawPeer(running_node.places) as peer, open(os.devnull, "rb") as null:
            peer.send(scheduler_hello(), [null.fileno()])
            assert peer.is_closed()
        with RawPeer(running_node.places) as peer:
            peer.send(scheduler_hello(), [pidfd])
            assert peer.is_closed()
    finally:
        os.close(pidfd)
        other.communicate()
    assert f"handed over a pidfd of process {other.pid}" in running_node.log()
    assert running_node.status()["engines"] == []


def test_second_hello_is_refused(running_node: NodeProcess) -> None:
    with RawPeer(running_node.places) as peer:
        peer.hello(scheduler_hello())
        assert isinstance(peer.receive(), m.Welcome)
        peer.hello(worker_hello())
        assert peer.is_closed()


def test_node_without_descriptors_left_neither_spins_nor_fills_its_log(
    new_node: StartNode,
) -> None:
    """Connections wait until others have gone; those that are there are served meanwhile."""
    node = new_node()
    node.start()
    with FakeEngine(node.places, "one") as engine:
        limit = descriptor_count(node.pid) + 10
        resource.prlimit(node.pid, resource.RLIMIT_NOFILE, (limit, limit))
        peers = []
        for _ in range(40):
            sock = socket.socket(socket.AF_UNIX)
            sock.connect(str(node.places.socket))
            peers.append(sock)
        before = cpu_ticks(node.pid)
        wait_until(lambda: "could not be accepted" in node.log(), "it has enough")
        time.sleep(2.2)
        assert cpu_ticks(node.pid) - before < 100, "it spins"
        assert node.log().count("could not be accepted") <= 5
        engine.keep(TOKENS)
        assert engine.load(TOKENS) == Loaded(8, 8)
        for sock in peers:
            sock.close()
        assert ask(node.places, "status")["engines"]


def cpu_ticks(pid: int) -> int:
    """Processor time, in hundredths of a second on every machine that we know."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])


def test_state_that_is_not_believed_ends_the_node(running_node: NodeProcess) -> None:
    """Any surprise in the machine, not only an assertion: see tests/node/test_runtime.py too."""
    assert ask(running_node.places, "check") == {"entries": 0}


def test_answers_keep_coming_while_a_node_is_stopped_for_a_moment(
    running_node: NodeProcess,
) -> None:
    with RawPeer(running_node.places) as peer:
        running_node.signal(signal.SIGSTOP)
        for _ in range(50):
            peer.send(m.Ping())
        running_node.signal(signal.SIGCONT)
        assert [peer.receive() for _ in range(50)] == [m.Pong()] * 50


def test_frame_of_the_largest_size_is_taken(running_node: NodeProcess) -> None:
    room = frames.FRAME_BYTES_MAX - len(encode(m.Command("")))
    with RawPeer(running_node.places) as peer:
        peer.send(m.Command("x" * (room - 10)))
        answer = peer.receive()
    assert isinstance(answer, m.CommandAnswer)
    assert "knows no command" in answer.error
