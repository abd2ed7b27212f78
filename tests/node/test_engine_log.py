"""What the node says of engines: a line when one comes, changes or leaves, and never many."""

import os

import pytest

from kvtide.core import messages as m
from kvtide.core.instances import Instance, Worker
from kvtide.core.layout import KVLayout
from kvtide.core.reasons import Off, OffReason
from kvtide.node.engine_log import LINE_CHARS_MAX, LINES_MAX, MINUTE_MS, EngineLog
from kvtide.testing.fake_engine import FakeEngine
from kvtide.testing.node_process import NodeProcess
from tests.node.test_engines import wait_status

LAYOUT = KVLayout(16, 64, (4096,))
FINGERPRINT = bytes.fromhex("ab12cd34") + bytes(28)
IS_ON = f"on, fingerprint ab12cd34, layout {LAYOUT.name} (blocks of 16, chunks of 64, 1 worker)"


def worker_of(engine_id: str, rank: int = 0) -> Worker:
    """A worker process."""
    hello = m.WorkerHello(1, engine_id, b"", 5, rank, rank, 1, True, 4096, {}, [], [], b"")
    return Worker(rank + 2, hello)


def engine(engine_id: str = "0123456789abcdef", label: str = "tiny") -> Instance:
    """An engine that is on."""
    instance = Instance(engine_id, 0)
    instance.hello = m.SchedulerHello(1, "", engine_id, b"", 4711, label, 1)
    instance.is_scheduler_alive = instance.is_identified = True
    instance.connection = 1
    instance.workers[0] = worker_of(engine_id)
    instance.identity = m.Identity(FINGERPRINT, b"", {}, 16, 64, [4096], 256)
    instance.layout = LAYOUT
    return instance


@pytest.fixture
def lines() -> list[str]:
    """What was said."""
    return []


@pytest.fixture
def log(lines: list[str]) -> EngineLog:
    """A log that says nothing yet."""
    return EngineLog(lines.append)


WHO = "engine 4711 ('tiny', '01234567')"


def test_an_engine_comes_and_leaves(log: EngineLog, lines: list[str]) -> None:
    """Twice a line, however often it is looked at; the first process to go says why."""
    one = engine()
    for now_ms in range(0, 5_000, 1_000):
        log.look(one, now_ms)
    log.process_left(one.workers[0], "has ended", 6_000, is_last=False)
    log.process_left(one, "said good-bye", 6_000, is_last=True)
    assert lines == [
        f"{WHO} has come: {IS_ON}",
        f"{WHO} has left: its worker of rank 0 has ended",
    ]


def test_what_becomes_of_an_engine_is_said(log: EngineLog, lines: list[str]) -> None:
    """Not how its weights' reading goes on, nor what it is while nobody knows."""
    one = engine()
    one.identity, one.layout = None, None
    log.look(one, 0)
    for left_s in (9, 8):
        one.off = Off(OffReason.WEIGHTS_HASHING, f"{left_s} s to go")
        log.look(one, 0)
    one.off, one.identity, one.layout = None, engine().identity, LAYOUT
    log.look(one, 0)
    one.connection = None
    log.look(one, 0)
    one.connection = 7
    log.look(one, 0)
    assert lines == [
        f"{WHO} has come: off, weights_hashing (9 s to go)",
        f"{WHO} is now: {IS_ON}",
        f"{WHO} is now: away, its process lives",
        f"{WHO} is back: {IS_ON}",
    ]


def test_what_never_was_an_engine_leaves_in_silence(log: EngineLog, lines: list[str]) -> None:
    """Its scheduler never came, or ended before anybody knew what it is."""
    one = engine()
    one.hello, one.connection, one.is_scheduler_alive = None, None, False
    log.look(one, 0)
    log.process_left(one.workers[0], "has ended", 0, is_last=True)
    assert not lines


def test_engines_that_come_and_go_do_not_fill_the_log(log: EngineLog, lines: list[str]) -> None:
    """What is left out is counted, and what an engine chose is cut."""
    for number in range(LINES_MAX):
        one = engine(f"{number:08}", "x\n" * LINE_CHARS_MAX)
        log.look(one, 1_000)
        log.process_left(one, "has ended", 1_000, is_last=True)
    assert len(lines) == LINES_MAX
    assert all(len(line) <= LINE_CHARS_MAX + 1 and "\n" not in line for line in lines)
    log.look(engine(), 1_000 + MINUTE_MS)
    assert lines[LINES_MAX:] == [
        f"{WHO} has come: {IS_ON} (before this, {LINES_MAX} such lines were left out)"
    ]


def test_a_real_node_says_who_came_and_went(running_node: NodeProcess) -> None:
    with FakeEngine(running_node.places, "one") as fake:
        shown = fake.shape.fingerprint.hex()[:8]
    wait_status(running_node, lambda status: not status["engines"])
    came, left = [line for line in running_node.log().splitlines() if " engine " in line]
    assert f"INFO engine {os.getpid()} (" in came
    assert f"has come: on, fingerprint {shown}, layout " in came
    assert "has left: its " in left
    assert left.endswith(" said good-bye")
