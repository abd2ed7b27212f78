"""A machine with engines and nodes; what happens to them, and what must hold.

World(seed).run()
  act      the plan's requests and faults, each at its time
  calm     faults end; every request must end, and hits must come back
  idle     nothing is held, lent, open or waiting any more
  leave    engines end; nothing of the host tier is left that could not be freed
"""

import functools
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvtide.core.tiering import WritePolicy
from kvtide.testing.simulate.acts import Acts
from kvtide.testing.simulate.adapters import AdapterFiles
from kvtide.testing.simulate.blocks import Adapter, ToyRequest
from kvtide.testing.simulate.edges import installed, stand_ins
from kvtide.testing.simulate.engine import Engine, EngineShape
from kvtide.testing.simulate.engine_batches import Batches
from kvtide.testing.simulate.files import Names, SimPlaces, Table, fcntl_of, os_of, select_of
from kvtide.testing.simulate.kernel import Kernel, Process
from kvtide.testing.simulate.loop import SimLoop, asyncio_of
from kvtide.testing.simulate.memory import SimMapping, SimNodeMemory
from kvtide.testing.simulate.node import Node
from kvtide.testing.simulate.oracle import check_idle, check_left
from kvtide.testing.simulate.places import Places
from kvtide.testing.simulate.plan import Action, draw_plan
from kvtide.testing.simulate.prompts import answer, prompt
from kvtide.testing.simulate.sockets import Net, socket_of
from kvtide.testing.simulate.waiting import (
    SimClock,
    queue_of,
    secrets_of,
    threading_of,
    time_of,
)
from kvtide.units import KiB

BOOT_US_MAX = 150_000
CALM_S_MAX = 20.0
"""After the last fault: so long, at most, no request ends or gets a token while there are some."""
IDLE_S = 25.0
"""And nothing is held any more: leases, questions and grants have run out."""


@dataclass(frozen=True, slots=True)
class WorldShape:
    """What a world consists of."""

    homes: int = 1
    engines: tuple[EngineShape, ...] = (EngineShape(),)
    host_bytes: int = 1024 * KiB
    actions: int = 1500
    span_s: float = 20.0
    without: frozenset[str] = frozenset()
    below: tuple[str, ...] = ()
    """What lies below nodes: disk, server."""
    policy: WritePolicy = WritePolicy.THROUGH
    yield_ratio: float = 0.0


@dataclass(slots=True)
class Outcome:
    """What a world has seen."""

    machine_events: int = 0
    requests: int = 0
    tokens: int = 0
    hit_tokens: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    simulated_s: float = 0.0
    digest: str = ""


class World:
    """One simulated machine."""

    def __init__(self, seed: int, shape: WorldShape, plan: Sequence[Action] | None = None) -> None:
        self.seed = seed
        self.shape = shape
        if plan is None:
            plan = draw_plan(seed, shape.actions, int(shape.span_s * 1e6), shape.without)
        self.plan = plan
        self.kernel = Kernel(seed)
        self.kernel.yield_ratio = shape.yield_ratio
        self.clock = SimClock(self.kernel)
        self.names = Names(self.kernel)
        self.table = Table(self.kernel)
        self.net = Net(self.kernel, self.table, self.names)
        self.pids: dict[int, Process] = {}
        self.loops: dict[int, SimLoop] = {}
        self.below = Places(self.kernel, shape.below, shape.policy)
        self.adapters = AdapterFiles(self.kernel)
        self.nodes: dict[str, Node] = {}
        self.engines: list[Engine] = []
        self.shapes: list[EngineShape] = []
        self.outcome = Outcome()
        self.machine_events = 0
        self.live: dict[int, tuple[Engine, ToyRequest]] = {}
        """Requests that have not ended."""
        self.is_ending = False
        self._next_request = 0
        self._next_engine = 0
        self.acts = Acts(self)

    # ---- parts

    def make_process(self, name: str) -> Process:
        """A process; all it has open is closed when it dies."""
        process = Process(self.kernel, name)
        self.pids[process.pid] = process
        process.on_death.append(lambda: self.table.bury(process))
        return process

    def places(self, home: str) -> SimPlaces:
        """The runtime directory of a home."""
        return SimPlaces(self.names, home)

    def _given(self) -> dict[str, Any]:
        """What stands for modules and classes, in this world."""
        kernel, table, names = self.kernel, self.table, self.names
        return {
            "os": os_of(table, names, self.pids),
            "socket": socket_of(self.net),
            "select": select_of(table),
            "threading": threading_of(kernel),
            "queue": queue_of(kernel),
            "time": time_of(kernel),
            "secrets": secrets_of(kernel),
            "asyncio": asyncio_of(kernel, self.loops),
            "fcntl": fcntl_of(table, names),
            "Places": lambda directory: self.places(str(directory)),
            "start_node": self._launched,
            "NodeMemory": lambda host_bytes, has_tiers: SimNodeMemory(kernel, table),
            "MappedRegion": lambda *arguments: SimMapping(table, *arguments),
        }

    def _launched(self, directory: Any, settings: dict[str, str]) -> None:
        """An engine starts a node."""
        at_us = self.kernel.now_us + self.kernel.draw.randrange(BOOT_US_MAX)
        self.kernel.at(at_us, lambda: self._boot(str(directory)))

    def _boot(self, home: str) -> None:
        node = self.nodes.get(home)
        if node is None or not node.is_alive:
            self.nodes[home] = Node(self, home, self.shape.host_bytes, self.below.open)

    def start_engine(self, index: int, shape: EngineShape) -> Engine:
        self._next_engine += 1
        home = f"/home{index % self.shape.homes}"
        engine_id = f"engine {index}.{self.kernel.draw.randrange(3)}"
        return Engine(self, f"engine{index}.{self._next_engine}", engine_id, home, shape)

    # ---- its life

    def run(self) -> Outcome:
        """From boot to the end; raises what does not hold."""
        with installed(stand_ins(self.kernel, self.table, self._given())):
            try:
                self._live()
            finally:
                self.kernel.end()
        self.outcome.digest = self.kernel.digest
        self.outcome.machine_events = self.machine_events
        self.outcome.simulated_s = self.kernel.now_us / 1e6
        return self.outcome

    def _live(self) -> None:
        kernel = self.kernel
        self.shapes = list(self.shape.engines)
        self.engines = [self.start_engine(i, shape) for i, shape in enumerate(self.shapes)]
        start_us = kernel.now_us
        for action in self.plan:
            kernel.at(start_us + action.at_us, functools.partial(self.acts.act, action))
        kernel.run_until(start_us + int(self.shape.span_s * 1e6))
        self.acts.calm()
        self._wait_for(lambda: not self.live, CALM_S_MAX, "requests have not ended")
        self._heal()
        kernel.run_until(kernel.now_us + int(IDLE_S * 1e6))
        check_idle(self)
        self.is_ending = True
        for engine in self.engines:
            engine.close()
        self._wait_for(self._all_left, 10.0, "engines have not ended")
        kernel.run_until(kernel.now_us + 1_000_000)
        check_left(self)

    def _all_left(self) -> bool:
        return all(engine.has_left for engine in self.engines)

    def _wait_for(self, is_so: Callable[[], bool], time_s: float, otherwise: str) -> None:
        """Let time pass until something is so; never so long without any progress."""
        kernel = self.kernel
        before: list[int] | None = None
        until_us = 0
        while not is_so():
            left = [len(request.all_token_ids) for _, request in self.live.values()]
            if left != before:
                before, until_us = left, kernel.now_us + int(time_s * 1e6)
            if kernel.now_us >= until_us:
                late = [
                    (engine.name, request.request_id, request.status.name)
                    for engine, request in list(self.live.values())[:5]
                ]
                raise kernel.broken(f"{otherwise} within {time_s:g} s: {late}")
            kernel.run_until(kernel.now_us + 50_000)

    def ask_for(
        self,
        engine: Engine,
        tokens: list[int],
        max_tokens: int,
        salt: str | None = None,
        adapter: Adapter | None = None,
        priority: int = 0,
    ) -> ToyRequest:
        """A request comes to an engine."""
        self._next_request += 1
        request = ToyRequest(
            self._next_request, tokens, max_tokens, salt=salt, adapter=adapter, priority=priority
        )
        self.live[request.request_id] = (engine, request)

        def add(batches: Batches) -> None:
            engine.compute_with(request)
            batches.add(request)

        engine.ask(add)
        return request

    def request_ended(self, engine: Engine, request: ToyRequest) -> None:
        """Whatever it has generated must be what it generates with the cache off."""
        if self.live.pop(request.request_id, None) is None:
            return
        prompt_tokens = tuple(request.all_token_ids[: request.num_prompt_tokens])
        wanted = answer(prompt_tokens, request.max_tokens, request.weights, engine.shape.shards)
        found = request.generated
        if found != wanted[: len(found)] and not request.is_doubtful:
            raise self.kernel.broken(
                f"request {request.request_id} of {engine.name}: {found} instead of {wanted}"
            )
        outcome = self.outcome
        outcome.requests += 1
        outcome.tokens += request.num_prompt_tokens
        outcome.hit_tokens += request.external_tokens
        self.kernel.log("ended", request.request_id, request.external_tokens, found)

    def _heal(self) -> None:
        """Contract T_heal: hits resume. Twice the same of each engine, and the second one hits."""
        self.kernel.run_until(self.kernel.now_us + 10_000_000)
        for number, engine in enumerate(self.engines):
            if not engine.is_alive or engine.is_closing:
                continue
            tokens = [number, *prompt(0, 40, 1)][:33]
            hits = []
            for _ in range(2):
                request = self.ask_for(engine, list(tokens), 2)
                self._wait_for(lambda: not self.live, CALM_S_MAX, "requests have not ended")
                self.kernel.run_until(self.kernel.now_us + 500_000)
                hits.append(request.external_tokens)
                engine.ask(lambda batches: batches.blocks.forget())
            if not hits[1] and engine.may_hit:
                off = engine.session.off if engine.session else None
                raise self.kernel.broken(f"{engine.name} hits no more: {off}")
