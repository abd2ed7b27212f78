"""Attacks of the second round on the connector."""

import contextlib
import socket
import threading
import time
from types import SimpleNamespace

import pytest

from kvtide.testing.vllm_toy import ToyOptions
from tests.engines.vllm.connector.toys import (
    Toys,
    assert_right,
    scheduler_of,
    tokens,
    until,
    workers_of,
)

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("patient")]


def options(**others: object) -> ToyOptions:
    return ToyOptions(chunk_tokens=64, step_tokens=64, **others)  # type: ignore[arg-type]


def test_a_grant_of_a_connection_not_yet_taken_in_is_answered(toys: Toys) -> None:
    """The worker is back, the node knows; its link's thread has not run `on_up` yet."""
    engine = toys.start(options())
    assert_right(engine.generate(tokens(150)), 1)
    toys.rest(engine)
    (side,) = workers_of(engine)
    gate, original = threading.Event(), side.on_up

    def late(welcome: object) -> None:
        assert gate.wait(20)
        original(welcome)

    side.on_up = late
    before = side._connection
    with side._link._lock:
        side._link._sock.shutdown(socket.SHUT_RDWR)
    until("the hello", lambda: side._connection is None)
    time.sleep(0.5)
    toys.wait_open(engine)
    prompt = tokens(150)
    assert_right(engine.generate(prompt), 1)
    gate.set()
    until("it is up", lambda: side._connection not in (None, before))
    del side.on_up
    until_s = time.monotonic() + 5
    while not toys.node.is_at_rest() and time.monotonic() < until_s:
        time.sleep(0.05)
    status = toys.node.status()
    print({k: status["host"][k] for k in ("grants", "granted_bytes")}, status["entries"])
    assert engine.reset()
    again = engine.generate(prompt)
    engine.run()
    print("external after storing again:", again.external)
    assert toys.node.is_at_rest(), "grants that nobody will ever answer"


def test_a_long_content_id_turns_nothing_off(toys: Toys) -> None:
    """A user's own id of an image may be of any length; one request must not end the cache."""
    engine = toys.start(options())
    side = scheduler_of(engine)
    position = SimpleNamespace(offset=3, length=20)
    feature = SimpleNamespace(mm_position=position, identifier="x" * 70_000)
    request = SimpleNamespace(
        request_id="image",
        kv_transfer_params=None,
        prompt_embeds=None,
        resumable=False,
        cache_salt="salt",
        mm_features=[feature],
        lora_request=None,
        skip_reading_prefix_cache=False,
        all_token_ids=tokens(150),
        num_tokens=150,
    )
    until("a session", lambda: (side._take_in(), side._fingerprint)[1])
    engine.connector.on_new_request(request)
    assert not engine.connector._is_off, "off for the engine's life"
    side._trackers.pop("image", None)


def test_one_step_copies_no_more_than_a_few_steps_compute(toys: Toys) -> None:
    """A node that was emptied: what the engine has in its own cache is stored again, at once."""
    engine = toys.start(options(block_count=256))
    prompt = tokens(3_000)
    assert_right(engine.generate(prompt), 1)
    toys.rest(engine)
    toys.node.clear()
    most = 0
    for side in workers_of(engine):
        original = side.wait_for_save

        def counted(plan: object, original: object = original) -> None:
            nonlocal most
            most = max(most, sum(len(job.block_ids) for job in plan.stores))  # type: ignore[attr-defined]
            original(plan)  # type: ignore[operator]

        side.wait_for_save = counted
    request = engine.add([*prompt, *tokens(20)], 20)
    while engine.step():
        time.sleep(0.002)
    assert_right(engine.results[request], 20)
    print("tokens copied in one step:", most * 16, "of steps of 64 tokens")
    assert most * 16 <= 8 * 64
