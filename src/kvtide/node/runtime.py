"""The owner: one asyncio thread that feeds the machine and carries its effects out.

    socket ─► Received ─► machine.handle ─► effects ─► socket, memory, log

Whatever the machine or this file does not expect ends the node: engines serve on without it and
start another, which beats going on with a state that nobody believes.

A process is watched through the pidfd that its hello brings, once, whatever number of connections
it makes: by the last of them that the machine knows it by.

Ownership
    machine, server, memory files   the loop's thread; nobody else touches them
    allocating and freeing memory   NodeMemory's thread
    reading and writing tiers       the tiers' threads
"""

import asyncio
import contextlib
import logging
import os
import traceback
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from kvtide.clock import Clock
from kvtide.core import effects as fx
from kvtide.core import messages as m
from kvtide.core.keys import KEY_BYTES
from kvtide.core.layout import KVLayout
from kvtide.core.machine import Machine
from kvtide.errors import WireError
from kvtide.node.engine_log import EngineLog
from kvtide.node.launch import EXIT_FAULT
from kvtide.node.memory import Look, NodeMemory, RegionFiles
from kvtide.node.processes import pidfd_fault
from kvtide.node.report import add_left, config_values, numbers, quarantined, status
from kvtide.node.tiers import Tiers
from kvtide.tiers.base import Tier
from kvtide.wire.frames import close_all
from kvtide.wire.places import Places
from kvtide.wire.server import Connection, Server

logger = logging.getLogger("kvtide.node")

TICK_S = 0.1
"""While something waits for time to pass, it is told of it so often."""
PULSE_S = 1.0
"""And in any case: time has passed, look at memory, at the socket's path. No oftener: whatever
wakes takes a processor from an engine that computes on all of them."""
FRESH_PULSES = 3_600
"""Every so many pulses, an hour: files in use are marked as such."""
STOP_S_MAX = 4.0
"""Of T_stop: so long the end waits for memory to be freed; tiers have the rest."""
NAME_CHARS_SHOWN = 64
"""Of a command that nobody knows: who sends it chose the name."""
FIRST_ENGINE_S = 60.0
"""A node that no engine has come to yet waits at least this long for the one that started it."""


class Runtime:
    """One running node."""

    def __init__(
        self,
        machine: Machine,
        clock: Clock,
        places: Places,
        shown: list[dict[str, str]],
        tiers: Sequence[Tier] = (),
    ) -> None:
        """The tiers call `wake`, from any thread, to be polled; they are closed at the end."""
        self.machine = machine
        self.clock = clock
        self.places = places
        self.socket_path = places.socket
        self.started_ms = clock.now_ms()
        self.ended = asyncio.Event()
        self.exit_code = 0
        self._shown = shown
        self._server = Server(self._on_message, self._on_closed, logger.warning)
        self._memory = NodeMemory(machine.config.host_bytes, has_tiers=bool(tiers))
        self._is_looking = False
        self._processes: dict[int, int] = {}  # pidfd by the connection that handed it over
        self._had_engine = False
        self._engine_log = EngineLog(lambda line: logger.info("%s", line))
        self._left: dict[str, int] = {}  # counts of engines that have left
        self._own_pidfd = os.pidfd_open(os.getpid())
        self._loop = asyncio.get_running_loop()
        self._events: deque[fx.Event] = deque()
        self._pulses = 0
        self._is_ticking = False
        self._path_fd = -1
        self._watch_fault = ""
        self._tiers = Tiers(tiers, self._memory.cells, self._feed)

    # ---- life

    def listen(self) -> None:
        """Be there for engines; with a limit that the memory around the node allows."""
        self._loop.set_exception_handler(self._on_exception)
        self._looked(self._memory.look_now())
        self._server.listen(self.socket_path)
        # Held open, the socket keeps its number: no other file can be taken for it.
        self._path_fd = os.open(self.socket_path, os.O_PATH | os.O_CLOEXEC)
        with contextlib.suppress(OSError):
            self.places.stopped.unlink(missing_ok=True)
        self._tick()
        self._loop.call_later(PULSE_S, self._pulse)

    async def run(self) -> int:
        """Serve until told to end; the process's exit code."""
        await self.ended.wait()
        try:
            await self._close_tiers()
            await self._memory.close(STOP_S_MAX)
        except RuntimeError as error:
            logger.warning("memory is freed by ending: %s", error)  # no thread can be started
        except TimeoutError:
            logger.warning("memory is still being freed after %g s; ends without", STOP_S_MAX)
        return self.exit_code

    async def _close_tiers(self) -> None:
        if not self._tiers:
            return
        try:
            await self._loop.run_in_executor(None, self._tiers.close)
        except RuntimeError:
            raise  # no thread can be started
        except Exception:
            logger.exception("a tier could not be closed in order; its next start mends that")

    def stop(self, why: str, *, on_purpose: bool, exit_code: int = 0) -> None:
        """End: say so to everybody, close, remove the socket. Again changes nothing."""
        if self.ended.is_set():
            return
        logger.info("ends: %s", why)
        self.exit_code = exit_code
        if on_purpose:  # for engines that do not hear it: connecting, refused, in a pause
            with contextlib.suppress(OSError):
                self.places.stopped.write_text(f"{why}\n", encoding="utf-8")
        self._server.broadcast(m.Stopping(on_purpose))
        self.ended.set()
        self._server.close()
        if self._path_is_ours():
            self.socket_path.unlink(missing_ok=True)
        for number in list(self._processes):
            self._forget_process(number)

    def _begin_ticking(self) -> None:
        """Something waits for time to pass: from now on it is told of it."""
        self._is_ticking = True
        self._loop.call_later(TICK_S, self._tick)
        self._tiers.tick(self.clock.now_ms())  # before any job: they go by no other clock

    def _tick(self) -> None:
        """Time has passed; the next tick comes soon, if anything waits for it."""
        if self.ended.is_set():
            return
        self._is_ticking = True
        self._feed(fx.Tick())
        self._tiers.tick(self.clock.now_ms())
        self._is_ticking = self._is_waiting()
        if self._is_ticking:
            self._loop.call_later(TICK_S, self._tick)

    def _is_waiting(self) -> bool:
        return self.machine.is_waiting(self.clock.now_ms())

    def _pulse(self) -> None:
        if self.ended.is_set():
            return
        self._loop.call_later(PULSE_S, self._pulse)
        self._pulses += 1
        if not self._is_ticking:
            self._tick()
        self._look_at_memory()
        self._look_at_engines()
        if self._pulses % FRESH_PULSES == 0:
            self._keep_fresh()
        if not self._path_is_ours():
            self.stop(f"its socket {self.socket_path} is gone", on_purpose=False)

    def _look_at_engines(self) -> None:
        for instance in self.machine.instances.values():
            self._engine_log.look(instance, self.clock.now_ms())

    def _look_at_memory(self) -> None:
        if self._is_looking:
            return
        self._is_looking = True
        future = asyncio.wrap_future(self._memory.look())
        future.add_done_callback(lambda done: self._looked(done.result()))

    def _looked(self, limit: Look) -> None:
        self._is_looking = False
        if isinstance(limit, str):
            # A strange /proc costs the watching, not the node; allocating asks for itself.
            if limit != self._watch_fault:
                self._watch_fault = limit
                logger.warning("the memory around the node cannot be watched: %s", limit)
        elif limit is not None:
            self._feed(fx.HostLimit(limit))

    def _keep_fresh(self) -> None:
        """Those who clean up temporary directories go by a file's times."""
        for path in (self.socket_path, self.places.lock, self.places.log):
            with contextlib.suppress(OSError):
                os.utime(path)

    def _path_is_ours(self) -> bool:
        try:
            there, ours = self.socket_path.stat(), os.fstat(self._path_fd)
        except OSError:
            return False
        return os.path.samestat(there, ours)

    def _on_exception(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        logger.critical("%s", context["message"], exc_info=error)
        self.stop(f"a fault in kvtide: {error!r}", on_purpose=False, exit_code=EXIT_FAULT)

    # ---- in

    def _on_message(
        self, connection: Connection, message: m.Message, descriptors: list[int]
    ) -> None:
        match message:
            case m.Ping():
                self._server.send(connection.number, m.Pong())
            case m.Pong():
                pass
            case m.Bye():
                self._said_bye(connection.number)
            case m.Command():
                self._server.send(connection.number, self._answer(message))
                self._server.close_after_sending(connection.number)
            case m.SchedulerHello() | m.WorkerHello():
                self._watch_process(connection, descriptors[0])
                self._feed(fx.Received(connection.number, message))
                self._watch_once(connection.number)
            case m.Identity():
                close_all(descriptors)
                self._feed(fx.Received(connection.number, message))
                self._look_at_engines()
            case _:
                close_all(descriptors)
                self._feed(fx.Received(connection.number, message))

    def _on_closed(self, number: int) -> None:
        self._feed(fx.Disconnected(number))
        if number not in self.machine.peers:  # its hello was refused: nothing hangs on it
            self._forget_process(number)

    def _watch_process(self, connection: Connection, pidfd: int) -> None:
        """Take the pidfd that a hello carries; it must be of the process that speaks."""
        fault = "a second hello on one connection"
        if connection.number not in self._processes:
            fault = pidfd_fault(pidfd, connection.peer_pid)
        if fault:
            os.close(pidfd)
            raise WireError(fault)
        self._had_engine = True
        self._processes[connection.number] = pidfd
        self._loop.add_reader(pidfd, self._process_died, connection.number)

    def _watch_once(self, number: int) -> None:
        """A process that is back on a new connection is watched by that alone."""
        peer = self.machine.peers.get(number)
        if peer is None:
            return
        for other in list(self._processes):
            if other != number and self.machine.peers.get(other) is peer:
                self._forget_process(other)

    def _said_bye(self, number: int) -> None:
        """It uses nothing of ours any more, by its own word: as good as dead, though it may live.

        (A notebook that drops its engine goes on; the node shall not wait for it.)
        """
        self._server.drop(number)
        if number in self._processes:
            self._process_is_gone(number, "said good-bye")

    def _process_died(self, number: int) -> None:
        self._server.read_rest(number)
        if number in self._processes:
            self._process_is_gone(number, "has ended")

    def _process_is_gone(self, number: int, why: str) -> None:
        self._forget_process(number)
        before, peer = dict(self.machine.instances), self.machine.peers.get(number)
        self._feed(fx.ProcessDied(number))
        if peer is not None:
            is_last = peer.engine_id not in self.machine.instances
            self._engine_log.process_left(peer, why, self.clock.now_ms(), is_last=is_last)
        for engine_id in before.keys() - self.machine.instances.keys():
            add_left(self._left, before[engine_id].counts)

    def _forget_process(self, number: int) -> None:
        pidfd = self._processes.pop(number, None)
        if pidfd is not None:
            self._loop.remove_reader(pidfd)
            os.close(pidfd)

    def _feed(self, event: fx.Event) -> None:
        """Take an event in; one that arises while effects are carried out waits its turn."""
        self._events.append(event)
        if len(self._events) > 1:
            return
        while self._events and not self.ended.is_set():
            try:
                self._carry_out(self.machine.handle(self._events[0], self.clock.now_ms()))
            except Exception:
                self._give_up(type(self._events[0]).__name__)
            self._events.popleft()

    def _give_up(self, at: str) -> None:
        """Never go on with a change that broke off: engines find or start another node."""
        self._log_broken(at)
        self.stop("its state is broken", on_purpose=False, exit_code=EXIT_FAULT)

    def _log_broken(self, at: str) -> None:
        logger.critical(
            "the node's state is broken, seen at %s; counts %s\n%s",
            at,
            self.machine.counts,
            traceback.format_exc(),
        )

    # ---- out

    def _carry_out(self, effects: list[fx.Effect]) -> None:
        if not self._is_ticking and self._is_waiting():
            self._begin_ticking()
        for effect in effects:
            match effect:
                case fx.Send(connection, m.Welcome() as welcome):
                    self._server.send(connection, welcome, [self._own_pidfd])
                case fx.Send(connection, message):
                    self._server.send(connection, message)
                case fx.SetGenerations(run):
                    generations = self._memory[run.region].generations
                    generations.set(run.first_cell, run.cell_count, run.generation)
                case fx.SendRegion():
                    self._send_region(effect)
                case fx.MakeRegion(region, layout, cell_count):
                    self._make_region(region, layout, cell_count)
                case fx.FreeRegion(region):
                    self._memory.free(region)
                case fx.AskTier() | fx.LoadFrom() | fx.StoreTo() | fx.ClearTiers():
                    self._tiers.carry_out(effect)
                case fx.Close(connection):
                    self._server.close_after_sending(connection)
                case fx.Note(text, is_warning):
                    logger.log(logging.WARNING if is_warning else logging.INFO, "%s", text)
                case fx.Alarm(text):
                    logger.error("%s", text)
                case fx.End(why, on_purpose):
                    self._end(why, on_purpose=on_purpose)

    def _end(self, why: str, *, on_purpose: bool) -> None:
        """The machine says this at each tick; it does not know who started the node, and why."""
        uptime_s = (self.clock.now_ms() - self.started_ms) / 1000
        if not self._had_engine:
            why = f"no engine has come in {uptime_s:.0f} s (linger_s, {FIRST_ENGINE_S:g} at least)"
        if self._had_engine or uptime_s >= FIRST_ENGINE_S:
            self.stop(why, on_purpose=on_purpose)

    def _send_region(self, effect: fx.SendRegion) -> None:
        memory = self._memory[effect.region]
        offer = m.RegionOffer(effect.region, effect.cell_count, effect.cell_bytes)
        descriptors = [memory.shards[effect.shard].fd, memory.generations.fd]
        self._server.send(effect.connection, offer, descriptors)

    def _make_region(self, number: int, layout: KVLayout, cell_count: int) -> None:
        future = asyncio.wrap_future(self._memory.make(number, layout, cell_count))
        future.add_done_callback(lambda done: self._made(number, done.result()))

    def _made(self, number: int, files: RegionFiles | str) -> None:
        if isinstance(files, str):
            self._feed(fx.RegionNotMade(number, files))
        elif self.ended.is_set():
            files.close()
        else:
            self._memory.add(number, files)
            self._feed(fx.RegionMade(number))

    # ---- tiers

    def wake(self) -> None:
        """From any thread: a tier has something to tell."""
        with contextlib.suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(self._poll_tiers)

    def _poll_tiers(self) -> None:
        if not self.ended.is_set():  # from then on they belong to the thread that closes them
            self._tiers.poll()

    # ---- commands

    def _answer(self, command: m.Command) -> m.CommandAnswer:
        """Answer a command; a page that cannot be made costs the page."""
        try:
            return self._command(command)
        except Exception as error:
            logger.exception("the command %r failed", command.name[:NAME_CHARS_SHOWN])
            return m.CommandAnswer({}, error=f"the node cannot answer this: {error!r}"[:1000])

    def _command(self, command: m.Command) -> m.CommandAnswer:
        match command.name:
            case "status":
                return m.CommandAnswer(self.status())
            case "config":
                return m.CommandAnswer(config_values(self._shown))
            case "stop":
                self._loop.call_soon(lambda: self.stop("kvtide stop", on_purpose=True))
                return m.CommandAnswer({"pid": os.getpid()})
            case "clear":
                return self._clear(command.arguments.get("salt_digest"))
            case "check":
                return self._check()
        name = command.name[:NAME_CHARS_SHOWN]
        return m.CommandAnswer(
            {}, error=f"the node knows no command {name!r}: stop it, and start one of this version"
        )

    def _clear(self, salt_digest: str | None) -> m.CommandAnswer:
        try:
            digest = None if salt_digest is None else bytes.fromhex(salt_digest)
        except ValueError:
            digest = b"?"
        if digest is not None and len(digest) not in (0, KEY_BYTES):
            return m.CommandAnswer(
                {}, error="a salt digest is 64 hex digits, or empty for no salt"
            )
        try:
            cleared = self.machine.clear(digest)
            self._carry_out(self.machine.take_effects())
        except Exception:
            self._loop.call_soon(self._give_up, "clear")
            return m.CommandAnswer({}, error="the node's state is broken; it ends")
        tiers = {name: asdict(one) for name, one in self._tiers.cleared.items()}
        of_whom = "all" if digest is None else "one salt" if digest else "requests without a salt"
        below = "".join(
            f", {one['records']} in {name} ({one['state']})" for name, one in tiers.items()
        )
        logger.info("cleared %s: %d entries in memory%s", of_whom, cleared, below)
        return m.CommandAnswer({"entries": cleared, "tiers": tiers})

    def _check(self) -> m.CommandAnswer:
        """Look, and say what was seen; the node goes on either way.

        What a change needs to be right is asserted where it is made, and ends the node there; the
        check may be what is wrong. So whoever asked decides, with the evidence still there.
        """
        try:
            self.machine.check_integrity()
        except MemoryError:
            return m.CommandAnswer({}, error="there is too little memory to check the state")
        except Exception as error:
            self._log_broken("check")
            return m.CommandAnswer({}, error=f"the node's state is broken: {error}"[:1000])
        return m.CommandAnswer({"entries": len(self.machine.index.entries)})

    def status(self) -> dict[str, Any]:
        """What `kvtide status` shows."""
        uptime_ms = self.clock.now_ms() - self.started_ms
        tiers = self._tiers.statistics()
        return status(self.machine, self._left, uptime_ms, self._shown, tiers)

    def health(self) -> str:
        """What `/healthz` says: that the node answers, or what somebody must read. Its code is 200
        all the same: whoever restarts what is not healthy would mend nothing, and lose the alarm.
        """
        alarms = [f"alarm: {one['text']}\n" for one in quarantined(self.machine)]
        return "".join(alarms) or "ok\n"

    def numbers(self) -> dict[str, Any]:
        """What `/metrics` shows; cheap, however much is held."""
        return numbers(self.machine, self._left, self._tiers.statistics())
