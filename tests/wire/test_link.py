"""The engines' side of the socket: it heals by itself and never makes its owner wait."""

import errno
import os
import signal
import socket
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from kvtide.core import messages as m
from kvtide.testing.node_process import NodeProcess
from kvtide.wire import channel
from kvtide.wire import link as link_module
from kvtide.wire.breaker import SILENT_PINGS_MAX, SILENT_QUESTIONS_MAX
from kvtide.wire.command import ask
from kvtide.wire.frames import encode
from kvtide.wire.link import Link
from kvtide.wire.places import Places
from tests.node.fixtures import StartNode
from tests.wire.link_owner import MakeLink, Owner, wait_until
from tests.wire.raw import worker_hello

NEVER_BLOCKS_S = 0.5
"""A call that does not wait takes microseconds; on a busy machine it may be held up."""


def test_comes_up_and_speaks(running_node: NodeProcess, make_link: MakeLink) -> None:
    owner = Owner()
    link = make_link(owner, running_node.places)
    (welcome,) = owner.wait("up")
    assert welcome.pid == running_node.pid
    assert link.is_usable
    assert not owner.of("absent")


def test_pulses_about_once_a_second(running_node: NodeProcess, make_link: MakeLink) -> None:
    owner = Owner()
    make_link(owner, running_node.places)
    times = owner.wait("pulse", 3)
    assert 1.5 < times[2] - times[0] < 4


def test_absence_is_told_again_and_again(runtime_dir: Path, make_link: MakeLink) -> None:
    owner = Owner()
    link = make_link(owner, Places(runtime_dir))
    owner.wait("absent", 5)
    assert not link.is_usable
    assert not link.send(m.Counts({}))
    assert not owner.of("down")


def test_heals_after_a_restart_of_the_node(running_node: NodeProcess, make_link: MakeLink) -> None:
    """Killed: told so at once, absent then, and up again as soon as another listens."""
    owner = Owner()
    link = make_link(owner, running_node.places)
    first = owner.wait("up")[0]
    running_node.kill()
    assert owner.wait("down") == [True]
    assert not link.is_usable
    owner.wait("absent")
    running_node.start()
    second = owner.wait("up", 2)[1]
    assert second.node != first.node
    wait_until(lambda: link.is_usable, "it is not up")
    names = [name for name, _ in owner.calls if name != "pulse"]
    assert names[:4] == ["hello", "up", "down", "absent"]


def test_stop_on_purpose_is_told_apart(running_node: NodeProcess, make_link: MakeLink) -> None:
    """The owner learns that the node is dead, so that it lets go of the memory it mapped."""
    owner = Owner()
    link = make_link(owner, running_node.places)
    owner.wait("up")
    ask(running_node.places, "stop")
    wait_until(lambda: True in owner.of("down"), "its death was not told")
    assert link.stopped_on_purpose
    running_node.start()
    owner.wait("up", 2)
    assert not link.stopped_on_purpose


class SlowlyEnding:
    """A node that closes its connections and is not gone for a while: it frees its memory."""

    def __init__(self, places: Places) -> None:
        self._listener = socket.socket(socket.AF_UNIX)
        self._places = places
        self._listener.bind(str(places.socket))
        self._listener.listen()
        read, self._write = os.pipe()
        self.pid = os.fork()
        if not self.pid:
            os.close(self._write)
            os.read(read, 1)
            os._exit(0)
        os.close(read)

    def serve_once(self) -> None:
        """Welcome one link, with a pidfd of the process that is to end."""
        sock, _ = self._listener.accept()
        with sock:
            sock.recv(1 << 16)
            pidfd = os.pidfd_open(self.pid)
            welcome = encode(m.Welcome(1, b"node", self.pid, 1), 1)
            socket.send_fds(sock, [welcome + encode(m.Stopping(False))], [pidfd])
            os.close(pidfd)
        self._listener.close()
        self._places.socket.unlink()

    def end(self) -> None:
        """Now it dies."""
        os.close(self._write)
        os.waitpid(self.pid, 0)


def test_death_that_comes_later_is_told_later(runtime_dir: Path, make_link: MakeLink) -> None:
    """Until then nobody is called absent: the lock of the runtime directory is held still."""
    places = Places(runtime_dir)
    node = SlowlyEnding(places)
    owner = Owner()
    make_link(owner, places)
    node.serve_once()
    assert owner.wait("down") == [False]
    time.sleep(0.5)
    assert not owner.of("absent")
    assert owner.of("down") == [False]
    node.end()
    assert owner.wait("down", 2) == [False, True]
    owner.wait("absent")
    assert owner.of("down") == [False, True], "once is enough"


def test_node_that_never_ends_is_called_absent_in_the_end(
    runtime_dir: Path, make_link: MakeLink, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(link_module, "ENDING_S_MAX", 0.5)
    places = Places(runtime_dir)
    node = SlowlyEnding(places)
    owner = Owner()
    make_link(owner, places)
    node.serve_once()
    owner.wait("absent")
    assert owner.of("down") == [False]
    node.end()
    assert owner.wait("down", 2) == [False, True]


def test_five_questions_without_an_answer_open_the_breaker_and_one_ping_closes_it(
    running_node: NodeProcess, make_link: MakeLink
) -> None:
    owner = Owner()
    link = make_link(owner, running_node.places)
    owner.wait("up")
    running_node.signal(signal.SIGSTOP)
    for _ in range(SILENT_QUESTIONS_MAX - 1):
        link.note_silence()
    assert link.is_usable
    link.note_silence()
    assert not link.is_usable
    running_node.signal(signal.SIGCONT)
    wait_until(lambda: link.is_usable, "no ping healed it", 5)
    assert owner.of("down") == []


def test_three_pings_without_an_answer_open_it_too(
    running_node: NodeProcess, make_link: MakeLink
) -> None:
    """An engine that has no questions learns that the node is stopped."""
    owner = Owner()
    link = make_link(owner, running_node.places)
    owner.wait("up")
    began_s = time.monotonic()
    running_node.signal(signal.SIGSTOP)
    try:
        wait_until(lambda: not link.is_usable, "it believes a stopped node")
        assert time.monotonic() - began_s > SILENT_PINGS_MAX - 1.5
    finally:
        running_node.signal(signal.SIGCONT)
    wait_until(lambda: link.is_usable, "no ping healed it")
    assert owner.of("down") == []


@pytest.mark.slow
def test_busy_node_is_not_taken_for_a_silent_one(
    running_node: NodeProcess, make_link: MakeLink
) -> None:
    owner = Owner()
    link = make_link(owner, running_node.places)
    for _ in owner.wait("pulse", 5):
        assert link.is_usable


def test_send_never_waits_and_is_bounded_while_the_node_is_stopped(
    running_node: NodeProcess, make_link: MakeLink, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner = Owner()
    link = make_link(owner, running_node.places)
    owner.wait("up")
    link.send(m.RegionFailed(1, "x"))  # any message is taken, whatever the node makes of it
    owner.wait("up", 2)
    running_node.signal(signal.SIGSTOP)
    message = m.Command("x" * (1 << 20))
    taken = 0
    slowest_s = 0.0
    for _ in range(40):
        began_s = time.monotonic()
        taken += link.send(message)
        slowest_s = max(slowest_s, time.monotonic() - began_s)
    assert taken <= channel.OUTBOX_BYTES_MAX >> 20
    assert taken > 5
    assert slowest_s < NEVER_BLOCKS_S
    running_node.signal(signal.SIGCONT)
    wait_until(lambda: link.send(m.Pong()), "it takes nothing any more")


def test_close_is_bounded_while_the_node_is_stopped(
    running_node: NodeProcess, make_link: MakeLink
) -> None:
    for is_up in (True, False):
        owner = Owner(incarnation=b"a life" if is_up else b"another")
        if not is_up:
            running_node.signal(signal.SIGSTOP)
        link = make_link(owner, running_node.places)
        owner.wait("up" if is_up else "hello")
        running_node.signal(signal.SIGSTOP)
        began_s = time.monotonic()
        link.close(2)
        assert time.monotonic() - began_s < 2 * NEVER_BLOCKS_S, f"up: {is_up}"
        assert not link._thread.is_alive()
        running_node.signal(signal.SIGCONT)


def test_good_bye_is_said_though_the_connection_is_gone(
    running_node: NodeProcess, make_link: MakeLink, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process lives on, so its death would never tell: what it was lent would stay lent."""
    monkeypatch.setattr(link_module, "SEEK_S", 3600.0)  # it does not come back by itself
    owner = Owner()
    link = make_link(owner, running_node.places)
    owner.wait("up")
    assert ask(running_node.places, "status")["engines"]
    link.send(m.Stored(1, True))  # not for a scheduler to say: the node closes the connection
    owner.wait("down")
    pulses = len(owner.of("pulse"))
    link.close(5)
    assert not link._thread.is_alive()
    assert len(owner.of("pulse")) == pulses + 1, "for what it has to say first"
    wait_until(lambda: not ask(running_node.places, "status")["engines"], "it is still known")


def test_close_again_and_send_afterwards_do_nothing(
    running_node: NodeProcess, make_link: MakeLink
) -> None:
    owner = Owner()
    before = len(os.listdir("/proc/self/fd"))
    link = make_link(owner, running_node.places)
    owner.wait("up")
    link.close(5)
    assert not link.send(m.Pong())
    link.close(5)
    assert len(os.listdir("/proc/self/fd")) == before, "a descriptor is left"


def test_link_that_was_never_started_closes(runtime_dir: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    link = Link(Places(runtime_dir).socket, Owner(), "test")
    link.close(1)
    assert len(os.listdir("/proc/self/fd")) == before


def test_other_version_is_refused_with_both_versions(
    running_node: NodeProcess, make_link: MakeLink
) -> None:
    owner = Owner(wire_version=m.WIRE_VERSION + 1, version="9.9")
    link = make_link(owner, running_node.places)
    (refused,) = owner.wait("refused")
    assert refused.reason == "wire_version"
    assert f"speaks version {m.WIRE_VERSION}" in refused.detail
    assert f"the engine (kvtide 9.9) version {m.WIRE_VERSION + 1}" in refused.detail
    assert not link.is_usable


def test_message_that_is_too_large_is_not_sent_and_raises_nothing(
    running_node: NodeProcess, make_link: MakeLink
) -> None:
    owner = Owner()
    link = make_link(owner, running_node.places)
    owner.wait("up")
    assert not link.send(m.Command("x" * (5 << 20)))
    assert link.send(m.Pong())


@pytest.mark.parametrize("callback", ["hello", "up", "down", "absent", "pulse", "refused"])
def test_fault_of_the_owner_does_not_end_the_link(
    new_node: StartNode, make_link: MakeLink, callback: str, caplog: pytest.LogCaptureFixture
) -> None:
    """It is logged, and the link heals; a thread that ends would leave the engine without."""
    node = new_node()
    owner = Owner(wire_version=m.WIRE_VERSION + (callback == "refused"))
    owner.raises_in = {callback}
    link = make_link(owner, node.places)
    owner.wait("absent")
    node.start()
    owner.wait("refused" if callback == "refused" else "hello")
    if callback == "down":
        owner.wait("up")
        node.kill()
        node.start()
    owner.wait(callback)
    owner.raises_in = set()
    if callback != "refused":
        wait_until(lambda: link.is_usable, "it has not healed")
    assert link._thread.is_alive()
    wait_until(lambda: "a fault of the owner" in caplog.text, "it is not logged")


def test_session_that_ends_at_once_again_and_again_is_tried_less_often(
    running_node: NodeProcess, make_link: MakeLink
) -> None:
    owner = Owner()
    owner.raises_in = {"up"}
    make_link(owner, running_node.places)
    began_s = time.monotonic()
    owner.wait("up", 5)
    assert time.monotonic() - began_s > 0.1 + 0.2 + 0.4 + 0.8


def test_stopped_node_with_a_full_queue_is_not_absent(
    runtime_dir: Path, make_link: MakeLink
) -> None:
    """Nobody accepts any more; but to start another node would be wrong."""
    with socket.socket(socket.AF_UNIX) as listener:
        places = Places(runtime_dir)
        listener.bind(str(places.socket))
        listener.listen(0)
        waiting: list[socket.socket] = []
        with suppress(BlockingIOError):
            while len(waiting) < 10:
                waiting.append(socket.socket(socket.AF_UNIX))
                waiting[-1].setblocking(False)
                waiting[-1].connect(str(places.socket))
        assert len(waiting) < 10, "its queue is not full"
        owner = Owner()
        make_link(owner, places)
        time.sleep(0.5)
        assert owner.calls == []
        for sock in waiting:
            sock.close()
    places.socket.unlink()
    owner.wait("absent")


def test_hello_larger_than_the_sockets_room_arrives(
    running_node: NodeProcess, make_link: MakeLink
) -> None:
    class Large(Owner):
        def hello(self) -> m.Message:
            return worker_hello(facts={"x": "y" * (3 << 20)})

    owner = Large()
    make_link(owner, running_node.places)
    owner.wait("up")


def test_garbage_from_the_node_costs_the_connection_only(
    runtime_dir: Path, make_link: MakeLink
) -> None:
    places = Places(runtime_dir)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(places.socket))
        listener.listen()
        owner = Owner()
        link = make_link(owner, places)
        for _ in range(3):
            sock, _ = listener.accept()
            with sock:
                sock.sendall(b"\xff" * 100)
        assert link._thread.is_alive()
        assert owner.of("up") == []


def test_many_threads_may_send_at_once(running_node: NodeProcess, make_link: MakeLink) -> None:
    """Frames never mix: the node would end the connection."""
    owner = Owner()
    link = make_link(owner, running_node.places)
    owner.wait("up")
    message = m.Counts({f"name {number}": number for number in range(200)})

    def send() -> None:
        for _ in range(200):
            while not link.send(message):
                time.sleep(0.001)

    threads = [threading.Thread(target=send) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    counts = wait_counts(running_node, "name 1", 800)
    assert counts["name 199"] == 800 * 199
    assert owner.of("down") == []


def wait_counts(node: NodeProcess, name: str, value: int) -> dict[str, int]:
    """The node's counts once one of them has come so far."""
    found: dict[str, int] = {}
    for _ in range(2_000):
        found = node.status()["counts"]
        if found.get(name) == value:
            return found
        time.sleep(0.01)
    raise AssertionError(found.get(name))


def test_a_moment_without_descriptors_costs_an_attempt_not_the_thread(
    runtime_dir: Path, make_link: MakeLink, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, refusals_left = socket.socket, [1]

    def no_descriptors(*arguments: Any, **more: Any) -> socket.socket:
        if refusals_left[0]:
            refusals_left[0] -= 1
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return real(*arguments, **more)

    monkeypatch.setattr(link_module.socket, "socket", no_descriptors)
    owner = Owner()
    link = make_link(owner, Places(runtime_dir))
    owner.wait("absent")
    assert link.fault_count == 1


def test_a_fault_that_comes_again_is_counted_each_time_and_said_once(
    runtime_dir: Path,
    make_link: MakeLink,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def no_descriptors(*_: Any, **__: Any) -> socket.socket:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(link_module.socket, "socket", no_descriptors)
    link = make_link(Owner(), Places(runtime_dir))
    wait_until(lambda: link.fault_count == 3, "three attempts")
    assert [record.message for record in caplog.records if "given up" in record.message] == [
        "kvtide: the connection to the node is given up, and made anew"
    ]


@pytest.mark.skipif(len(os.sched_getaffinity(0)) == 1, reason="needs two processors")
def test_a_link_does_not_share_the_processor_of_the_thread_that_made_it(
    runtime_dir: Path, make_link: MakeLink
) -> None:
    used: list[set[int]] = []

    class Noting(Owner):
        def on_absent(self) -> None:
            used.append(os.sched_getaffinity(0))
            super().on_absent()

    owner = Noting()

    def bound() -> None:
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
        make_link(owner, Places(runtime_dir))

    thread = threading.Thread(target=bound)
    thread.start()
    thread.join()
    owner.wait("absent")
    assert used[0] == os.sched_getaffinity(os.getpid())
