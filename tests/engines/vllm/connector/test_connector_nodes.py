"""The node dies, stands still or comes back between any two hooks: the engine never notices.

Outputs are right all the time, no hook waits beyond its bound, and hits resume by themselves.
"""

import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from kvtide.core import messages as m
from kvtide.testing.vllm_toy import ToyEngine, ToyOptions
from kvtide.wire import link as link_module
from tests.engines.vllm.connector.toys import (
    WAIT_S_MAX,
    Node,
    Toys,
    assert_right,
    make_node,
    own_hit,
    scheduler_of,
    session,
    stored,
    tokens,
    until,
    watch,
    workers_of,
)

pytestmark = [pytest.mark.filterwarnings("ignore")]

SCHEDULER_HOOKS = (
    "on_new_request",
    "get_num_new_matched_tokens",
    "update_state_after_alloc",
    "build_connector_meta",
    "update_connector_output",
    "request_finished_all_groups",
    "has_pending_push_work",
)
WORKER_HOOKS = (
    "handle_preemptions",
    "start_load_kv",
    "wait_for_save",
    "get_transfer_results",
    "get_block_ids_with_load_errors",
    "build_connector_worker_meta",
)

in_both_modes = pytest.mark.parametrize(
    "is_async", [pytest.param(False, marks=pytest.mark.long), True]
)
OPTIONS = ToyOptions(step_tokens=40, chunk_tokens=32, settings={"kvtide.start_node": False})
HOOK_S_MAX = 0.25
"""Far above T_lookup (1 ms), for a machine that is busy with other things; far below waiting."""


@pytest.fixture(scope="module")
def node() -> Iterator[Node]:
    """Killed more often than others."""
    for made in make_node():
        made.serve()
        yield made


class Hooks:
    """Counts the hooks of both roles, acts before one of them, and measures them all."""

    def __init__(self, engine: ToyEngine) -> None:
        self.engine = engine
        self.count = 0
        self.longest_s = 0.0
        self.name = ""
        self._at = -1
        self._act: Callable[[], Any] = lambda: None
        watch(engine.connector, SCHEDULER_HOOKS, self._around)
        for worker in engine.workers:
            watch(worker.connector, WORKER_HOOKS, self._around)

    def arm(self, at: int, act: Callable[[], Any]) -> None:
        """Act before the hook with this number, counted from now."""
        self.count, self._at, self._act = 0, at, act
        self.longest_s = 0.0

    def _around(self, name: str, call: Callable[[], Any]) -> Any:
        if self.count == self._at:
            self.name = name
            self._act()
        self.count += 1
        began_s = time.monotonic()
        try:
            return call()
        finally:
            self.longest_s = max(self.longest_s, time.monotonic() - began_s)


def play(toys: Toys, engine: ToyEngine, hooks: Hooks, at: int, act: Callable[[], Any]) -> None:
    """One request is loaded, one computed, one comes later; `act` before one of the hooks."""
    toys.wait_open(engine)
    held = stored(toys, engine, 70)
    hooks.arm(at, act)
    prompts = [[*held, *tokens(30)], tokens(60), tokens(45)]
    ids = [engine.add(prompt, 12) for prompt in prompts[:2]]
    for _ in range(4):
        engine.step()
    ids.append(engine.add(prompts[2], 12))
    engine.run()
    hooks.arm(-1, lambda: None)
    for request_id in ids:
        assert_right(engine.results[request_id], 12)


def heals(toys: Toys, engine: ToyEngine) -> None:
    """Hits resume, without a restart of the engine."""
    toys.wait_open(engine)
    engine.reset()
    prompt = stored(toys, engine, 70)
    assert engine.generate(prompt).external == own_hit(70, 70)


QUICK = (0, 3, 5, 12, 20, 45)
ALL = [
    number if number in QUICK else pytest.param(number, marks=pytest.mark.slow)
    for number in range(160)
]


@pytest.mark.parametrize("state", ["stands still", "silent"])
def test_a_reset_needs_no_node(state: str, toys: Toys) -> None:
    """What was stored before is not found by a node that goes on afterwards."""
    engine = toys.start(OPTIONS)
    prompt = stored(toys, engine, 100)
    link = scheduler_of(engine)._link
    with toys.node.stopped():
        while state == "silent" and link.is_usable:
            link.note_silence()
        assert engine.reset(external=True)
    until("the node is heard again", lambda: link.is_usable)
    result = engine.generate(prompt)
    assert_right(result, 1)
    assert result.external == 0
    toys.rest(engine)
    engine.reset()
    assert engine.generate(prompt).external > 0, "what is stored from now on is"


@in_both_modes
@pytest.mark.parametrize("at", ALL)
def test_killed_before_a_hook(toys: Toys, node: Node, at: int, is_async: bool) -> None:
    """SIGKILL: loads that run end and verify, everything else is computed."""
    engine = toys.start(replace(OPTIONS, is_async=is_async))
    hooks = Hooks(engine)
    try:
        play(toys, engine, hooks, at, node.kill)
        assert hooks.longest_s < HOOK_S_MAX
        if hooks.name:
            until("the engine has noticed", lambda: session(engine) is None)
    finally:
        if not node.pid:
            node.serve()
    heals(toys, engine)


@in_both_modes
@pytest.mark.parametrize("at", ALL)
def test_restarted_before_a_hook(toys: Toys, node: Node, at: int, is_async: bool) -> None:
    """A new node is there before the engine takes its next step."""
    engine = toys.start(replace(OPTIONS, is_async=is_async))
    hooks = Hooks(engine)

    def restart() -> None:
        old = session(engine)
        node.kill()
        node.serve()
        until("the engine is served again", lambda: session(engine) not in (None, old))

    play(toys, engine, hooks, at, restart)
    assert hooks.longest_s < HOOK_S_MAX
    heals(toys, engine)


@in_both_modes
@pytest.mark.parametrize("at", ALL)
def test_cut_off_before_a_hook(toys: Toys, at: int, is_async: bool) -> None:
    """The scheduler's connection ends and is made anew, once: nothing said on it is refused."""
    engine = toys.start(replace(OPTIONS, is_async=is_async))
    hooks = Hooks(engine)
    after = None

    def cut() -> None:
        nonlocal after
        before = session(engine)
        scheduler_of(engine)._link._link._channel._sock.shutdown(socket.SHUT_RDWR)
        until("the engine is served again", lambda: session(engine) not in (None, before))
        after = session(engine)

    play(toys, engine, hooks, at, cut)
    until("the node is at rest, though the engine takes no step", toys.node.is_at_rest)
    assert after is None or session(engine) is after
    heals(toys, engine)


@in_both_modes
@pytest.mark.parametrize("at", ALL)
def test_stopped_before_a_hook(toys: Toys, node: Node, at: int, is_async: bool) -> None:
    """SIGSTOP until all requests have ended: T_answer bounds what they wait for it."""
    engine = toys.start(replace(OPTIONS, is_async=is_async))
    hooks = Hooks(engine)
    stopped = node.stopped()
    try:
        play(toys, engine, hooks, at, stopped.__enter__)
        assert hooks.longest_s < HOOK_S_MAX
    finally:
        if hooks.name:
            stopped.__exit__(None, None, None)
    heals(toys, engine)


def test_a_grant_that_comes_before_the_workers_welcome_is_answered(
    toys: Toys, patient: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The node knows that the worker is back, and the worker's link has not told it yet."""
    engine = toys.start(OPTIONS)
    stored(toys, engine, 70)
    (side,) = workers_of(engine)
    gate, on_up, before = threading.Event(), side.on_up, side._connection

    def late(welcome: m.Welcome) -> None:
        assert gate.wait(WAIT_S_MAX)
        on_up(welcome)

    monkeypatch.setattr(side, "on_up", late)
    side._link._channel._sock.shutdown(socket.SHUT_RDWR)
    until("it has said hello", lambda: side._connection is None)
    toys.wait_open(engine)
    assert_right(engine.generate(tokens(70)), 1)
    assert not toys.node.is_at_rest(), "nothing was granted meanwhile"
    gate.set()
    until("it is welcome", lambda: side._connection not in (None, before))
    until("its grants are answered", toys.node.is_at_rest)
    heals(toys, engine)


def test_answers_that_found_no_room_are_sent_later(
    toys: Toys, patient: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A node that was stopped goes on, and makes nobody connect anew: its cells come back."""
    engine = toys.start(OPTIONS)
    stored(toys, engine, 70)
    (side,) = workers_of(engine)
    send_all, connection = side._link.send_all, side._connection

    def without_room(messages: list[m.Message]) -> int:
        return 0 if messages and isinstance(messages[0], m.Stored) else int(send_all(messages))

    with monkeypatch.context() as patch:
        patch.setattr(side._link, "send_all", without_room)
        assert_right(engine.generate(tokens(70)), 1)
        assert side._unsent
    until("its grants are answered", toys.node.is_at_rest)
    assert side._connection == connection


@pytest.mark.long
def test_ends_of_loads_that_found_no_room_are_said_later(
    toys: Toys, patient: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else what was loaded is kept from being evicted for as long as the connection lasts."""
    engine = toys.start(OPTIONS)
    prompt = stored(toys, engine, 70)
    link = scheduler_of(engine)._link._link
    send, refused = link.send, []

    def without_room(message: m.Message) -> bool:
        if isinstance(message, m.LoadEnd):
            refused.append(message)
            return False
        return bool(send(message))

    with monkeypatch.context() as patch:
        patch.setattr(link, "send", without_room)
        result = engine.generate(prompt)
        assert_right(result, 1)
        assert result.external == own_hit(70, 70)
        assert refused
    until("nothing is kept for it", toys.node.is_at_rest)


@pytest.mark.long
def test_what_is_to_be_cleared_is_said_before_a_good_bye(
    toys: Toys, patient: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An adapter is found replaced while the connection is gone, and the engine ends before there
    is another: nobody else would ever know."""
    other = toys.start(OPTIONS)
    monkeypatch.setattr(link_module, "SEEK_S", 3600.0)  # it does not come back by itself
    engine = toys.start(OPTIONS)
    prompt = stored(toys, engine, 70)
    link = scheduler_of(engine)._link
    link._link._channel._sock.shutdown(socket.SHUT_RDWR)
    until("it is cut off", lambda: session(engine) is None)
    link.clear({b""})
    toys.engines.remove(engine)
    engine.close()
    result = other.generate(prompt)
    assert_right(result, 1)
    assert result.external == 0
