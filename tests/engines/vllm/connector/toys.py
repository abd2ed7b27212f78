"""Toy engines on a real node, and what every test asks of both at the end.

Engines of equal options have equal fingerprints and share what the node keeps, so prompts are
random: a test never meets what another has stored. Waiting is for states, never for time.
"""

import contextlib
import itertools
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from kvtide.core.plan import StorePlan
from kvtide.core.reasons import DropReason
from kvtide.errors import KVTideError
from kvtide.testing.toy_engine import generated
from kvtide.testing.vllm_toy import VOCABULARY, ToyEngine, ToyOptions, ToyResult
from kvtide.wire.command import ask
from kvtide.wire.places import open_directory

HOST_BYTES = "64MiB"
WAIT_S_MAX = 20.0
PATIENT_MS = 60_000
"""Where a test is about what is found, a busy machine must not turn a slow answer into a miss."""

_seeds = itertools.count(int(time.time()) << 20)


def until(what: str, condition: Callable[[], object]) -> None:
    """Wait for a state."""
    until_s = time.monotonic() + WAIT_S_MAX
    while not condition():
        assert time.monotonic() < until_s, f"{WAIT_S_MAX:g} s passed before {what}"
        time.sleep(0.001)


def tokens(count: int) -> list[int]:
    """Random token ids that no other test has."""
    numbers = random.Random(next(_seeds))
    return [numbers.randrange(VOCABULARY) for _ in range(count)]


class Node:
    """Whatever node runs in one runtime directory: first one, after its death another."""

    def __init__(self, directory: Path) -> None:
        self.places = open_directory(directory / "run")
        self.environment = {
            name: value for name, value in os.environ.items() if not name.startswith("KVTIDE_")
        } | {
            "KVTIDE_RUNTIME_DIR": str(self.places.directory),
            "KVTIDE_HOST_BYTES": HOST_BYTES,
            "XDG_CONFIG_HOME": str(directory),
            "KVTIDE_CANARY_RATE": "0",  # hits are what a test expects; those of canaries set it
        }
        self._process: subprocess.Popen[bytes] | None = None

    def serve(self) -> None:
        """Start a node, and wait until it answers."""
        self.close()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "kvtide.node.main"],
            env=self.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        until("the node answers", lambda: self.pid == self._process.pid)

    def status(self) -> dict[str, Any]:
        """What it says of itself."""
        return ask(self.places, "status")

    @property
    def pid(self) -> int:
        """Its process; 0 where there is none."""
        with contextlib.suppress(KVTideError):
            pid: int = self.status()["node"]["pid"]
            return pid
        return 0

    def count(self, name: str) -> int:
        """One of its counters."""
        value: int = self.status()["counts"].get(name, 0)
        return value

    def is_at_rest(self) -> bool:
        """Whether nothing is lent, leased or read: contract C08."""
        status = self.status()
        host = status["host"]
        held = [host[name] for name in ("grants", "leases", "loads", "granted_bytes")]
        return not any(held) and not status["entries"]["storing"]

    def check(self) -> None:
        """Nothing is lost, and the node believes itself."""
        host = self.status()["host"]
        assert host["quarantine_bytes"] == host["pinned_bytes"] == 0, host
        assert host["free_bytes"] + host["evictable_bytes"] == host["allocated_bytes"], host
        ask(self.places, "check")

    def clear(self) -> None:
        """`kvtide clear`."""
        ask(self.places, "clear")

    def kill(self) -> None:
        """SIGKILL, and wait for the end."""
        assert self._process is not None
        self._process.kill()
        self._process.wait()

    @contextlib.contextmanager
    def stopped(self) -> Iterator[None]:
        """Inside, the process stands still."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)
        stat = Path(f"/proc/{self._process.pid}/stat")
        until("it stands still", lambda: stat.read_text().rpartition(")")[2].split()[0] == "T")
        try:
            yield
        finally:
            self._process.send_signal(signal.SIGCONT)

    def close(self) -> None:
        """End it, and the one that an engine has started."""
        if self._process is not None and self._process.poll() is None:
            self.kill()
        with contextlib.suppress(KVTideError):
            ask(self.places, "stop")


class Toys:
    """A node, and the engines that a test starts on it."""

    def __init__(self, node: Node, model: Path) -> None:
        self.node = node
        self.model = model
        self.engines: list[ToyEngine] = []

    def start(self, options: ToyOptions, *, wait: bool = True) -> ToyEngine:
        """An engine that is served and may store."""
        engine = ToyEngine(self.model, options, uuid.uuid4().hex)
        self.engines.append(engine)
        if options.connector and wait:
            self.wait_open(engine)
        return engine

    def wait_open(self, engine: ToyEngine) -> None:
        """Wait until the engine is on, in a node that has memory open to it."""
        name = engine.config.kv_transfer_config.engine_id[:8]

        def is_open() -> bool:
            with contextlib.suppress(Exception):
                regions = self.node.status()["host"]["regions"]
                return session(engine) is not None and any(
                    name in region["open_to"] for region in regions
                )
            return False

        until("the engine is served", is_open)

    def rest(self, *engines: ToyEngine) -> None:
        """Finish everything; then contract C08 must hold."""
        for engine in engines or self.engines:
            engine.run()
            assert not engine.scheduler.has_requests()
        until("the node is at rest", self.node.is_at_rest)

    def check(self) -> None:
        """At the end of each test: nothing is held by anybody, and the node believes itself."""
        self.rest()
        self.node.check()
        for engine in self.engines:
            if engine.connector is not None:
                assert not ours(engine.connector)._is_off, "an error of the scheduler role"
                assert not engine.connector.has_pending_push_work()
                assert not any(kept := remembered(engine)), kept
                assert not any(ours(one.connector)._is_off for one in engine.workers)

    def close(self) -> None:
        """End all engines."""
        while self.engines:
            self.engines.pop().close()


def ours(connector: Any) -> Any:
    """Our connector, alone or inside of one that combines several."""
    return getattr(connector, "sub_connectors", [connector])[0]


def scheduler_of(engine: ToyEngine) -> Any:
    """Our scheduler role."""
    return ours(engine.connector)._scheduler


def has_answer(engine: ToyEngine) -> bool:
    """Whether the node's word has come; it is read, and not taken in."""
    link = scheduler_of(engine)._link
    link._link.read_now(link._take_answer)
    return bool(link._answers.are_waiting)


def session(engine: ToyEngine) -> object:
    """Whether, and by which life of a node, the engine is served."""
    return scheduler_of(engine)._link.session


def workers_of(engine: ToyEngine) -> list[Any]:
    """Our worker roles."""
    return [ours(worker.connector)._worker for worker in engine.workers]


def remembered(engine: ToyEngine) -> list[object]:
    """What both roles keep of requests: all of it is empty once they have ended."""
    side = scheduler_of(engine)
    kept = [side._trackers, side._loads, side._loading, side._new_loads]
    kept += [side._lookups._questions, side._canaries._canaries]
    kept += [side._stores._asking, side._stores._left, side._stores._due, side._stores._rescues]
    for worker in workers_of(engine):
        kept += [worker._loads, worker._held, worker._load_errors]
    return kept


def stored(
    toys: Toys, engine: ToyEngine, length: int, *, weights: int = 0, shards: int = 1
) -> list[int]:
    """A prompt that the node holds and the engine has forgotten."""
    prompt = tokens(length)
    assert_right(engine.generate(prompt), 1, shards=shards, weights=weights)
    toys.rest(engine)
    assert engine.reset()
    return prompt


@contextlib.contextmanager
def held_loads(engine: ToyEngine) -> Iterator[None]:
    """Inside, loads begin, and end only behind it."""
    gate = threading.Event()
    with pytest.MonkeyPatch.context() as patch:
        for worker in workers_of(engine):
            patch.setattr(worker._mover, "load", _behind(gate, worker._mover.load))
        try:
            yield
        finally:
            gate.set()


def _behind(gate: threading.Event, load: Callable[..., None]) -> Callable[..., None]:
    def wait_and_load(*arguments: Any) -> None:
        assert gate.wait(WAIT_S_MAX), "the gate was not opened"
        load(*arguments)

    return wait_and_load


def assert_right(result: ToyResult, count: int, *, shards: int = 1, weights: int = 0) -> None:
    """The oracle: what is generated depends on every byte of KV."""
    assert result.finish_reason is not None
    right = generated(result.prompt, count, VOCABULARY, shard_count=shards, weights=weights)
    assert result.tokens == right


def own_hit(length: int, stored: int, block_tokens: int = 16) -> int:
    """What an engine's own prefix cache gives: whole blocks, and one token is left to compute."""
    return min(length - 1, stored) // block_tokens * block_tokens


@contextlib.contextmanager
def accounts() -> Iterator[list[dict[str, int]]]:
    """What became of each request's blocks, request by request, as it is counted."""
    taken: list[dict[str, int]] = []
    original = StorePlan.outcomes

    def outcomes(self: StorePlan, end_block: int, otherwise: DropReason) -> dict[str, int]:
        taken.append(original(self, end_block, otherwise))
        return taken[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StorePlan, "outcomes", outcomes)
        yield taken


def blocks_of(outcomes: Sequence[dict[str, int]]) -> int:
    """All blocks that have an outcome."""
    return sum(sum(counts.values()) for counts in outcomes)


def watch(
    target: Any, hooks: Iterable[str], around: Callable[[str, Callable[[], Any]], Any]
) -> None:
    """Have each call of a connector's hooks go through `around(name, call)`."""
    for name in hooks:
        setattr(target, name, _watched(name, getattr(target, name), around))


def _watched(
    name: str, hook: Callable[..., Any], around: Callable[[str, Callable[[], Any]], Any]
) -> Callable[..., Any]:
    def call(*arguments: Any, **keywords: Any) -> Any:
        return around(name, lambda: hook(*arguments, **keywords))

    return call


def make_node() -> Iterator[Node]:
    """A node in a runtime directory with a short name, which goes with the fixture."""
    directory = Path(tempfile.mkdtemp(prefix="kvt-"))
    node = Node(directory)
    with pytest.MonkeyPatch.context() as patch:
        for name in ("RUNTIME_DIR", "HOST_BYTES", "CANARY_RATE"):
            patch.setenv(f"KVTIDE_{name}", node.environment[f"KVTIDE_{name}"])
        patch.setenv("XDG_CONFIG_HOME", node.environment["XDG_CONFIG_HOME"])
        try:
            yield node
        finally:
            node.close()
            shutil.rmtree(directory, ignore_errors=True)
