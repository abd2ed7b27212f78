"""One node: the real runtime, server and machine, on a simulated loop, memory and sockets."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from kvtide.core.effects import Effect, Event, LoadFrom, StoreTo, TierLoaded, TierStored
from kvtide.core.machine import Machine
from kvtide.core.messages import Run
from kvtide.core.parts import MachineConfig
from kvtide.core.tiering import TierPlan
from kvtide.node.runtime import Runtime
from kvtide.testing.simulate.loop import SimLoop
from kvtide.testing.simulate.memory import MemoryFile, SimNodeMemory, Uses
from kvtide.tiers.base import Tier

LINGER_MS = 600_000
CHECK_EVENTS = 64
"""After so many events everything that the machine believes of itself is checked."""


class WatchedMachine(Machine):
    """The machine, with a look at it after each event."""

    def __init__(self, world: Any, config: MachineConfig) -> None:
        super().__init__(config)
        self._world = world
        self._jobs: dict[tuple[str, int], list[tuple[Uses, int]]] = {}
        self.files: Callable[[int], list[MemoryFile]]

    def handle(self, event: Event, now_ms: int) -> list[Effect]:
        world = self._world
        world.machine_events += 1
        world.kernel.log_bytes(type(event).__name__.encode())
        if world.kernel.keeps_lines:
            world.kernel.lines.append(f"{world.kernel.now_us} event {event}")
        effects = super().handle(event, now_ms)
        world.kernel.log_bytes(bytes([len(effects) & 255]))
        if self.config.tiers:
            self.watch(event, effects)
        self.check_caps()
        if world.machine_events % CHECK_EVENTS == 0:
            self.check_integrity()
        return effects

    def watch(self, event: Event, effects: list[Effect]) -> None:
        """The interval checker, for cells that a tier has: from its job until that has ended."""
        match event:
            case TierLoaded(number):
                self._let_go("written", number)
            case TierStored(number):
                self._let_go("read", number)
        for effect in effects:
            match effect:
                case LoadFrom(number=number, run=run):
                    self._jobs["written", number] = list(self._taken(run, "written"))
                case StoreTo(number=number, run=run):
                    self._jobs["read", number] = list(self._taken(run, "read"))

    def _let_go(self, use: str, number: int) -> None:
        for users, cell in self._jobs.pop((use, number)):
            users.remove(cell)

    def _taken(self, run: Run, use: str) -> Iterator[tuple[Uses, int]]:
        for file in self.files(run.region):
            for cell in range(run.first_cell, run.end_cell):
                yield file.take(cell, use), cell

    def check_caps(self) -> None:
        """What holds at every step, and is quick to see."""
        lending, host = self.lending, self.host
        assert host.allocated_bytes <= host.size_bytes, (host.allocated_bytes, host.size_bytes)
        assert 0 <= lending.granted_bytes <= host.size_bytes, lending.granted_bytes
        assert self.leases.pinned_bytes <= host.size_bytes, self.leases.pinned_bytes


class Node:
    """A node process, from its boot to its end."""

    def __init__(
        self,
        world: Any,
        home: str,
        host_bytes: int,
        open_tiers: Callable[["Node"], Sequence[tuple[TierPlan, Tier]]] = lambda node: (),
    ) -> None:
        self.world = world
        self.home = home
        kernel = world.kernel
        self.process = world.make_process(f"node.{home.strip('/')}.{world.kernel.next_pid()}")
        before, kernel.current = kernel.current, self.process
        self.loop = SimLoop(kernel, world.table, self.process)
        world.loops[self.process.pid] = self.loop
        self.tiers = open_tiers(self)
        config = MachineConfig(
            node=kernel.draw.randbytes(16),
            pid=self.process.pid,
            version="0",
            host_bytes=host_bytes,
            linger_ms=LINGER_MS,
            first_number=kernel.draw.randrange(1 << 40),
            tiers=tuple(plan for plan, _ in self.tiers),
        )
        self.machine = WatchedMachine(world, config)
        places = world.places(home)
        world.names.make(str(places.lock))
        world.names.locks[str(places.lock)] = self.process
        self.runtime = Runtime(
            self.machine, world.clock, places, [], [tier for _, tier in self.tiers]
        )
        memory: Any = self.runtime._memory
        assert isinstance(memory, SimNodeMemory)
        self.memory = memory
        self.machine.files = memory.shard_files
        self.loop.after_call = self._look
        self.loop.run(self.runtime.listen)
        kernel.current = before

    @property
    def is_alive(self) -> bool:
        """Whether its process lives."""
        return bool(self.process.is_alive)

    def _look(self) -> None:
        """A node that has ended is a process that ends."""
        if self.runtime.ended.is_set():
            self.world.kernel.kill(self.process)

    def wake(self) -> None:
        """A tier has something to tell."""
        if self.process.is_alive:
            self.runtime.wake()
