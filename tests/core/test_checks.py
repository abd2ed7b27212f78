"""A wrong message costs only its connection: nothing has changed, the next valid call works."""

import ast
import dataclasses
import math
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvtide.core import checks
from kvtide.core import messages as m
from kvtide.core.effects import Close, Note, Received
from kvtide.core.reasons import OffReason
from tests.core.world import Engine, World, prompt

LONG = "x" * 5_000
FAR = 2**63 - 1

Make = Callable[[Engine], m.Message]


def hello(**changes: Any) -> Make:
    fields: dict[str, Any] = {
        "wire_version": m.WIRE_VERSION,
        "version": "0",
        "engine_id": "newcomer",
        "incarnation": b"new",
        "pid": 1,
        "label": "",
        "worker_count": 1,
    }
    return lambda engine: m.SchedulerHello(**(fields | changes))


def worker(**changes: Any) -> Make:
    changes = {"engine_id": "newcomer"} | changes
    return lambda engine: dataclasses.replace(engine.worker_hello(0), **changes)


def identity(**changes: Any) -> Make:
    return lambda engine: engine.identity(**changes)


def root(**changes: Any) -> Make:
    fields = {"root": bytes(32), "epoch": b"", "salt_digest": b""}
    return lambda engine: m.RegisterRoot(**(fields | changes))


def lookup(**changes: Any) -> Make:
    def make(engine: Engine) -> m.Lookup:
        fields: dict[str, Any] = {"number": 1, "root": engine.root, "keys": b"", "digests": b""}
        return m.Lookup(**(fields | changes))

    return make


def probe(**changes: Any) -> Make:
    def make(engine: Engine) -> m.Probe:
        fields: dict[str, Any] = {
            "number": 1,
            "root": engine.root,
            "parent": engine.root,
            "digests": b"",
        }
        return m.Probe(**(fields | changes))

    return make


def offer(**changes: Any) -> Make:
    def make(engine: Engine) -> m.StoreOffer:
        keys, digests = engine.chain(prompt(7, 8))
        fields: dict[str, Any] = {
            "number": 1,
            "root": engine.root,
            "parent": engine.root,
            "keys": keys,
            "digests": digests,
        }
        return m.StoreOffer(**(fields | changes))

    return make


FIRST = {
    "no engine_id": hello(engine_id=""),
    "a long engine_id": hello(engine_id=LONG),
    "no incarnation": hello(incarnation=b""),
    "a long incarnation": hello(incarnation=bytes(65)),
    "no workers": hello(worker_count=0),
    "less than no workers": hello(worker_count=-1),
    "too many workers": hello(worker_count=FAR),
    "a long label": hello(label=LONG),
    "a long version": hello(version=LONG),
    "a worker's: no engine_id": worker(engine_id=""),
    "a worker's: a long engine_id": worker(engine_id=LONG),
    "a worker's: no incarnation": worker(incarnation=b""),
    "a worker's: a rank below 0": worker(rank=-1),
    "a worker's: a far rank": worker(rank=FAR),
    "a worker's: a shard below 0": worker(shard=-1),
    "a worker's: a shard that is not there": worker(shard=1),
    "a worker's: no shards": worker(shard_count=0),
    "a worker's: too many shards": worker(shard_count=FAR),
    "a worker's: no cells": worker(cell_bytes=0),
    "a worker's: cells of odd size": worker(cell_bytes=4097),
    "a worker's: cells too large": worker(cell_bytes=1 << 50),
    "a worker's: another shard than before": lambda engine: engine.worker_hello(
        0, shard=1, shard_count=2
    ),
    "a worker's: other cells than before": lambda engine: engine.worker_hello(0, cell_bytes=8192),
    "a worker's: no writer any more": lambda engine: engine.worker_hello(0, is_writer=False),
    "a lookup before hello": lookup(),
    "a probe before hello": probe(),
    "an offer before hello": offer(),
    "an identity before hello": identity(),
    "a root before hello": root(),
    "a lease before hello": lambda engine: m.LeaseRelease(1),
    "a load before hello": lambda engine: m.LoadBegin(1),
    "the end of a load before hello": lambda engine: m.LoadEnd(1, 1),
    "a return before hello": lambda engine: m.GrantReturn([1]),
    "a clear before hello": lambda engine: m.Clear(bytes(32), b""),
    "counts before hello": lambda engine: m.Counts({}),
    "a region before hello": lambda engine: m.RegionOpen(100),
    "a failed region before hello": lambda engine: m.RegionFailed(100, ""),
    "a left region before hello": lambda engine: m.RegionLeft(100),
    "an answer before hello": lambda engine: m.Stored(1, ok=True),
    "a verdict before hello": lambda engine: m.Compared(bytes(32), "equal", 0.0),
    "a message of the node's": lambda engine: m.Welcome(1, b"", 1, 1),
    "a match": lambda engine: m.Match(1, 0, 0, [], 0),
}
"""As the first message of a new connection."""

SCHEDULERS = {
    "a second hello": lambda engine: hello(engine_id="engine")(engine),
    "a worker's hello": worker(),
    "a worker's answer": lambda engine: m.Stored(1, ok=True),
    "a worker's region": lambda engine: m.RegionOpen(100),
    "a worker's verdict": lambda engine: m.Compared(bytes(32), "equal", 0.0),
    "a short fingerprint": identity(fingerprint=bytes(31)),
    "no fingerprint": identity(fingerprint=b""),
    "a long weights digest": identity(weights=bytes(65)),
    "no block": identity(block_tokens=0),
    "a block below 0": identity(block_tokens=-2),
    "a chunk below a block": identity(chunk_tokens=1),
    "a chunk of parts of blocks": identity(chunk_tokens=9),
    "a chunk too large": identity(chunk_tokens=1 << 21),
    "a chunk of too many blocks": identity(block_tokens=1, chunk_tokens=513),
    "no shards": identity(cell_bytes=[]),
    "too many shards": identity(cell_bytes=[4096] * 2_000),
    "cells of odd size": identity(cell_bytes=[4095]),
    "cells below 0": identity(cell_bytes=[-4096]),
    "cells too large": identity(cell_bytes=[1 << 50]),
    "steps below 0": identity(step_tokens=-1),
    "an unknown reason": identity(off_reason="because"),
    "a long detail": identity(off_reason="kernel", off_detail=LONG),
    "too many fields": identity(fields={str(i): "" for i in range(2_000)}),
    "a long field": identity(fields={"a": LONG}),
    "a long name of a field": identity(fields={LONG: ""}),
    "a short root": root(root=bytes(31)),
    "no root": root(root=b""),
    "a long epoch": root(epoch=bytes(65)),
    "a long salt digest": root(salt_digest=bytes(65)),
    "a clear of no fingerprint": lambda engine: m.Clear(b"", b""),
    "a clear of a long salt digest": lambda engine: m.Clear(bytes(32), bytes(65)),
    "a root with another epoch": lambda engine: m.RegisterRoot(engine.root, b"other", b""),
    "a root with another salt": lambda engine: m.RegisterRoot(engine.root, b"", b"other"),
    "a root that is a chunk": lambda engine: m.RegisterRoot(
        engine.chain(prompt(1))[0][0], b"", b""
    ),
    "a lookup below an unknown root": lookup(root=bytes(32)),
    "a lookup below no root": lookup(root=b""),
    "a lookup of part of a key": lookup(keys=bytes(33)),
    "a lookup of part of a digest": lookup(digests=bytes(17)),
    "a lookup of more than one chunk's digests": lookup(digests=bytes(16 * 5)),
    "a probe below an unknown root": probe(root=bytes(32)),
    "a probe of part of a digest": probe(digests=bytes(15)),
    "a probe of more than one chunk's digests": probe(digests=bytes(16 * 5)),
    "an offer below an unknown root": offer(root=bytes(32)),
    "an offer of fewer digests than keys": lambda engine: offer(
        digests=engine.chain(prompt(7))[1]
    )(engine),
    "an offer of more digests than keys": lambda engine: offer(keys=engine.chain(prompt(7))[0])(
        engine
    ),
    "an offer of short keys": offer(keys=[bytes(31), bytes(31)]),
    "an offer of no blocks": offer(digests=[b"", b""]),
    "an offer of part of a digest": offer(digests=[bytes(63), bytes(64)]),
    "an offer of more than a chunk": offer(digests=[bytes(80), bytes(80)]),
    "an offer of a tail before its end": lambda engine: offer(
        keys=engine.chain(prompt(7, blocks=2))[0] * 2,
        digests=engine.chain(prompt(7, blocks=2))[1] * 2,
    )(engine),
    "an offer of keys that are not their digests'": lambda engine: offer(
        keys=engine.chain(prompt(7, 8))[0][::-1]
    )(engine),
    "a counter that goes back": lambda engine: m.Counts({"good": 1, "bad": -1}),
    "a counter with a long name": lambda engine: m.Counts({"good": 1, LONG: 1}),
    "too many counters": lambda engine: m.Counts({str(i): 1 for i in range(257)}),
}
"""From a scheduler that serves."""

WORKERS = {
    "a second hello": lambda engine: engine.worker_hello(0),
    "a scheduler's hello": hello(),
    "a lookup": lookup(),
    "an offer": offer(),
    "a lease": lambda engine: m.LeaseRelease(1),
    "counts": lambda engine: m.Counts({}),
    "a verdict on no fingerprint": lambda engine: m.Compared(b"", "equal", 0.0),
    "an unknown verdict": lambda engine: m.Compared(bytes(32), LONG, 0.0),
    "a difference below 0": lambda engine: m.Compared(bytes(32), "equal", -1.0),
    "a difference that is no number": lambda engine: m.Compared(bytes(32), "equal", math.nan),
    "a message of the node's": lambda engine: m.RegionLeave(100),
}
"""From a worker that serves."""


@pytest.fixture
def world() -> World:
    return World()


@pytest.fixture
def engine(world: World) -> Engine:
    """With something of everything: held chunks, a lease, a grant."""
    engine = Engine(world).start()
    engine.store(prompt(1, 2, blocks=3))
    engine.lookup(prompt(1, 2), keeps=True)
    engine.offer(prompt(3))
    Engine(world, "bystander").start()
    return engine


def check_costs_only_its_connection(world: World, connection: int, message: m.Message) -> None:
    """No state of the machine has changed: neither the message nor half of it was taken."""
    before = pickle.dumps(world.machine)
    effects = world.machine.handle(Received(connection, message), world.now_ms)
    assert pickle.dumps(world.machine) == before
    assert [type(effect) for effect in effects] == [Note, Close]
    assert effects[-1] == Close(connection)
    note = effects[0]
    assert isinstance(note, Note)
    assert note.text.startswith(f"connection {connection} is closed: ")
    assert len(note.text) <= 500
    world.machine.check_integrity()


def test_what_is_refused_is_said_with_the_limit() -> None:
    """Value; limit, or what to do: whoever reads the log has not read the code."""
    tree = ast.parse(Path(checks.__file__).read_text(encoding="utf-8"))
    raised = [ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Raise)]
    assert len(raised) > 20
    assert [text for text in raised if ";" not in text] == []


def test_a_limit_is_the_one_that_holds(world: World, engine: Engine) -> None:
    for make, said in (
        (hello(worker_count=FAR), f"an engine of {FAR} workers; 1 to 1024 are taken"),
        (worker(cell_bytes=4097), "a cell of 4097 bytes; multiples of 4096 are taken"),
    ):
        note, _ = world.machine.handle(Received(world.connect(), make(engine)), world.now_ms)
        assert isinstance(note, Note)
        assert said in note.text


@pytest.mark.parametrize("make", FIRST.values(), ids=FIRST)
def test_a_wrong_first_message_costs_only_its_connection(
    world: World, engine: Engine, make: Make
) -> None:
    check_costs_only_its_connection(world, world.connect(), make(engine))
    assert engine.blocks_held(prompt(1, 2)) == 7


@pytest.mark.parametrize("make", SCHEDULERS.values(), ids=SCHEDULERS)
def test_a_wrong_message_of_a_scheduler_costs_only_its_connection(
    world: World, engine: Engine, make: Make
) -> None:
    check_costs_only_its_connection(world, engine.scheduler, make(engine))
    assert engine.blocks_held(prompt(1, 2)) == 7


@pytest.mark.parametrize("make", WORKERS.values(), ids=WORKERS)
def test_a_wrong_message_of_a_worker_costs_only_its_connection(
    world: World, engine: Engine, make: Make
) -> None:
    check_costs_only_its_connection(world, engine.workers[0], make(engine))
    assert engine.blocks_held(prompt(1, 2)) == 7


def test_messages_of_a_connection_that_was_replaced_are_refused(
    world: World, engine: Engine
) -> None:
    """The engine has a new connection; what still comes on the old one is not taken."""
    scheduler, (worker_connection,) = engine.scheduler, engine.workers
    engine.connect_scheduler()
    engine.connect_worker(0)
    check_costs_only_its_connection(world, scheduler, m.Counts({}))
    check_costs_only_its_connection(world, worker_connection, m.Stored(1, ok=True))


@pytest.mark.parametrize("role", ["scheduler", "worker"])
def test_messages_of_a_connection_that_ended_are_refused(
    world: World, engine: Engine, role: str
) -> None:
    connection = engine.scheduler if role == "scheduler" else engine.workers[0]
    engine.disconnect(connection)
    check_costs_only_its_connection(world, connection, m.Counts({}))


@pytest.mark.parametrize(
    "message",
    [
        m.LeaseRelease(-1),
        m.LeaseRelease(FAR),
        m.LoadBegin(0),
        m.LoadEnd(FAR, 1),
        m.LoadEnd(0, -FAR),
        m.GrantReturn([]),
        m.GrantReturn([-1, 0, FAR]),
        m.Counts({}),
        m.Counts({"tokens": FAR}),
    ],
)
def test_numbers_that_name_nothing_are_no_error(
    world: World, engine: Engine, message: m.Message
) -> None:
    """Late words about what has ended already are usual: they change nothing."""
    leases, grants = world.machine.leases.counts(), list(world.machine.lending.grants)
    assert engine.say(message) == []
    assert world.machine.leases.counts() == leases
    assert list(world.machine.lending.grants) == grants
    assert world.machine.counts.get("loaded_blocks", 0) >= 0


def test_counters_of_an_engine_add_up(world: World, engine: Engine) -> None:
    engine.say(m.Counts({"hit.host": 5, "miss.absent": 1}))
    engine.say(m.Counts({"hit.host": 2}))
    assert world.machine.instances["engine"].counts == {"hit.host": 7, "miss.absent": 1}


def test_no_more_counters_are_taken_over_several_messages(world: World, engine: Engine) -> None:
    engine.say(m.Counts({str(i): 1 for i in range(checks.COUNT_NAMES_MAX)}))
    engine.say(m.Counts({"0": 1}))
    check_costs_only_its_connection(world, engine.scheduler, m.Counts({"one more": 1}))


@pytest.mark.parametrize("reason", list(OffReason))
def test_every_reason_to_be_off_is_taken(world: World, engine: Engine, reason: str) -> None:
    engine.identify(off_reason=reason, off_detail="why")
    assert str(world.machine.instances["engine"].off) == f"{reason} (why)"
