"""What happens in a world: the actions of its plan, carried out on what is there by then."""

import functools
from typing import TYPE_CHECKING, TypeAlias, get_args

from kvtide.core import messages as m
from kvtide.core.keys import salt_digest
from kvtide.testing.simulate.engine import Engine
from kvtide.testing.simulate.engine_batches import Batches
from kvtide.testing.simulate.kernel import Process
from kvtide.testing.simulate.node import Node
from kvtide.testing.simulate.plan import Action
from kvtide.testing.simulate.prompts import ADAPTERS, FAMILIES, PATHS, SALTS, prompt

if TYPE_CHECKING:
    from kvtide.testing.simulate.world import World

FROM_SCHEDULER = (
    m.Identity,
    m.RegisterRoot,
    m.Lookup,
    m.Probe,
    m.LeaseRelease,
    m.LoadBegin,
    m.LoadEnd,
    m.StoreOffer,
    m.GrantReturn,
    m.Clear,
)
TO_SCHEDULER = (m.Welcome, m.Workers, m.Serving, m.Match, m.Pending, m.StoreAnswer, m.Clear)
FROM_RANK = (m.Stored, m.RegionOpen, m.RegionLeft)
TO_RANK = (m.Welcome, m.RegionOffer, m.RegionLeave)
Kinds: TypeAlias = tuple[tuple[type, ...], tuple[type, ...]]
"""Of messages: to a node, and by it."""
NUMBERS = {kind: number for number, kind in enumerate(get_args(m.Message))}
STALLS_US = (20_000, 400_000, 3_000_000, 6_000_000)


class Acts:
    """One method for each kind of action, with the action's numbers."""

    def __init__(self, world: "World") -> None:
        self._world = world
        self._kernel = world.kernel

    def act(self, action: Action) -> None:
        self._kernel.log("act", action.kind)
        if action.kind not in ("request", "abort"):
            self._world.outcome.faults[action.kind] += 1
        getattr(self, action.kind)(*action.numbers)

    def _engine(self, which: int) -> Engine:
        return self._world.engines[which % len(self._world.engines)]

    def request(self, which: int, family: int, length: int, more: int) -> None:
        engine = self._engine(which)
        if not engine.is_alive or engine.is_closing or engine.batches is None:
            return
        tokens = prompt(family % FAMILIES, length, more)
        salt = SALTS[(more >> 8) % len(SALTS)]
        adapter = ADAPTERS[(more >> 12) % len(ADAPTERS)]
        self._world.ask_for(engine, tokens, 1 + (more >> 16) % 12, salt, adapter, (more >> 20) % 3)

    def abort(self, which: int, *_: int) -> None:
        if not self._world.live:
            return
        engine, request = list(self._world.live.values())[which % len(self._world.live)]

        def abort(batches: Batches) -> None:
            if request.request_id in batches.requests:
                batches.finish(request)
            self._world.request_ended(engine, request)

        engine.ask(abort)

    def cut(self, which: int, sends: int, end: int, *_: int) -> None:
        """A scheduler's connection."""
        self._cut(".scheduler", (FROM_SCHEDULER, TO_SCHEDULER), which, sends, end)

    def cut_rank(self, which: int, sends: int, end: int, *_: int) -> None:
        """A rank's connection. What only it loses, and so all that is made good by its hello, is
        known by worlds that cut others alone."""
        self._cut(".rank", (FROM_RANK, TO_RANK), which, sends, end)

    def _cut(self, whose: str, kinds: Kinds, which: int, sends: int, end: int) -> None:
        """Now, with what one of its ends sends soon, or with its next message of some kind."""
        streams = [one for one in self._world.net.streams if whose in one.process.name]
        if not streams:
            return
        stream = streams[which % len(streams)]
        by_node = end % 2
        one = stream.peer if stream.peer is not None and by_node else stream
        match sends % 3:
            case 0:
                stream.lose()
            case 1:
                one.fuse = 1 + sends // 3 % 12
            case 2:
                kind = kinds[by_node][sends // 3 % len(kinds[by_node])]
                one.doomed_kind = NUMBERS[kind]

    def _process(self, which: int) -> Process | None:
        living = [process for process in self._world.pids.values() if process.is_alive]
        return living[which % len(living)] if living else None

    def stall(self, which: int, span: int, *_: int) -> None:
        process = self._process(which)
        if process is not None:
            self._kernel.stall(process, STALLS_US[span % len(STALLS_US)])

    def kill_node(self, which: int, fuse: int, *_: int) -> None:
        nodes = [node for node in self._world.nodes.values() if node.is_alive]
        if nodes:
            nodes[which % len(nodes)].process.fuse = 1 + fuse % 200

    def kill_engine(self, which: int, member: int, fuse: int, wait: int) -> None:
        index = which % len(self._world.engines)
        engine = self._world.engines[index]
        if engine.is_alive and not engine.is_closing:
            engine.processes[member % len(engine.processes)].fuse = 1 + fuse % 300
            self._replace_when_dead(index, wait)

    def leave(self, which: int, wait: int, *_: int) -> None:
        index = which % len(self._world.engines)
        engine = self._world.engines[index]
        if engine.is_alive and not engine.is_closing:
            for owner, request in list(self._world.live.values()):
                if owner is engine:
                    self._world.live.pop(request.request_id)
            engine.close()
            self._replace_when_dead(index, wait)

    def _replace_when_dead(self, index: int, wait: int) -> None:
        """Another engine starts once this one is gone."""
        engine = self._world.engines[index]
        if engine.is_awaited:
            return
        engine.is_awaited = True

        def look() -> None:
            if self._world.is_ending:
                return
            if engine.has_left:
                for process in engine.processes:
                    self._kernel.kill(process)
            if any(process.is_alive for process in engine.processes):
                self._kernel.at(self._kernel.now_us + 100_000, look)
                return
            for owner, request in list(self._world.live.values()):
                if owner is engine:
                    self._world.live.pop(request.request_id)
            self._world.engines[index] = self._world.start_engine(index, self._world.shapes[index])

        self._kernel.at(self._kernel.now_us + 1 + wait % 400_000, look)

    def reset(self, which: int, *_: int) -> None:
        self._engine(which).ask(lambda batches: batches.reset_cache())

    def weights(self, which: int, *_: int) -> None:
        self._engine(which).replace_weights()

    def adapter(self, which: int, *_: int) -> None:
        """The files of one are replaced. A server may not have noted a clear, and be asked."""
        living = [one for one in self._world.engines if one.is_alive]
        is_safe = "server" not in self._world.shape.below
        is_safe = is_safe and not any(one.is_closing or one.is_awaited for one in living)
        path = PATHS[which % len(PATHS)]
        if is_safe and self._world.adapters.replace(path, living):
            for engine in living:
                engine.replace_adapter(path)

    def clear(self, which: int, salt: int, *_: int) -> None:
        for node in list(self._world.nodes.values()):
            if node.is_alive:
                digest = None if salt % 3 == 0 else salt_digest(SALTS[salt % len(SALTS)]).hex()
                before, self._kernel.current = self._kernel.current, node.process
                node.runtime._clear(digest)
                self._kernel.current = before

    def shrink(self, which: int, share: int, span: int, *_: int) -> None:
        for node in list(self._world.nodes.values()):
            node.memory.limit_bytes = self._world.shape.host_bytes * (share % 100) // 100
            self._kernel.at(
                self._kernel.now_us + span % 5_000_000, functools.partial(self._grow, node)
            )

    def _grow(self, node: Node) -> None:
        node.memory.limit_bytes = self._world.shape.host_bytes

    def short(self, which: int, span: int, *_: int) -> None:
        for node in list(self._world.nodes.values()):
            node.memory.is_short = True

            def enough(node: Node = node) -> None:
                node.memory.is_short = False

            self._kernel.at(self._kernel.now_us + span % 5_000_000, enough)

    def slow_rank(self, which: int, member: int, *_: int) -> None:
        engine = self._engine(which)
        name = engine.ranks[member % len(engine.ranks)].process.name
        engine.slow ^= {name}

    def slow_net(self, which: int, span: int, *_: int) -> None:
        self._world.net.slow_us = 1_000 + which % 200_000

        def quick() -> None:
            self._world.net.slow_us = 0

        self._kernel.at(self._kernel.now_us + span % 2_000_000, quick)

    def preempt(self, which: int, *_: int) -> None:
        self._engine(which).ask(lambda batches: batches.preempt_last())

    def tier(self, kind: int, which: int, how: int, span: int) -> None:
        self._world.below.trouble(kind, which, how, span)

    def calm(self) -> None:
        """Faults end."""
        for process in self._world.pids.values():
            process.stalled_until_us = min(process.stalled_until_us, self._kernel.now_us)
            process.fuse = 0
        self._world.net.calm()
        self._world.below.calm()
        self._kernel.yield_ratio = 0.0
        for node in self._world.nodes.values():
            node.memory.is_short = False
            self._grow(node)
        for engine in self._world.engines:
            engine.slow.clear()
