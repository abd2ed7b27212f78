"""What the node's log says of engines: who has come, what became of it, and why it has left.

An engine that starts and ends all the time must not push everything else out of the log: within a
minute a few lines are said of all engines together, and the next one counts those that were not.

Ownership: the owner's thread.
"""

from collections.abc import Callable
from dataclasses import dataclass

from kvtide.core.instances import Instance, Worker

LINES_MAX = 30
"""Of all engines within a minute; an engine that starts takes two or three."""
MINUTE_MS = 60_000
LINE_CHARS_MAX = 300
"""An engine chooses its label, and the detail of why it is off: as long as it likes."""
AWAY = "away, its process lives"


@dataclass(slots=True)
class _Known:
    """An engine of which something was said.

    Attributes:
        name: who it is, in a line.
        state: what was said of it last.
        why: why it leaves, as the first of its processes to go says; empty until then.
    """

    name: str
    state: str
    why: str = ""


class EngineLog:
    """Tells engines' comings and goings."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._known: dict[str, _Known] = {}
        self._minute_ms = 0
        self._line_count = 0
        self._left_out = 0

    def look(self, instance: Instance, now_ms: int) -> None:
        """Say what the engine is, if that has changed."""
        state, shown = _state(instance)
        known = self._known.get(instance.engine_id)
        if not state or (known is None and state == AWAY):
            return
        if known is None:
            known = self._known[instance.engine_id] = _Known(_name(instance), state)
            self._tell(f"{known.name} has come: {shown}", now_ms)
        elif known.state != state:
            verb = "is back" if known.state == AWAY else "is now"
            known.state = state
            self._tell(f"{known.name} {verb}: {shown}", now_ms)

    def process_left(
        self, peer: Instance | Worker, why: str, now_ms: int, *, is_last: bool
    ) -> None:
        """A process of an engine is gone; with the last, the engine, and the first says why."""
        known = self._known.get(peer.engine_id)
        if known is None:
            return
        whose = f"its worker of rank {peer.rank}" if isinstance(peer, Worker) else "its scheduler"
        known.why = known.why or f"{whose} {why}"
        if is_last:
            del self._known[peer.engine_id]
            self._tell(f"{known.name} has left: {known.why}", now_ms)

    def _tell(self, line: str, now_ms: int) -> None:
        if now_ms - self._minute_ms >= MINUTE_MS:
            self._minute_ms, self._line_count = now_ms, 0
        if self._line_count == LINES_MAX:
            self._left_out += 1
            return
        self._line_count += 1
        line = " ".join(line.split())
        line = line if len(line) <= LINE_CHARS_MAX else line[:LINE_CHARS_MAX] + "…"
        if self._left_out:
            line += f" (before this, {self._left_out} such lines were left out)"
            self._left_out = 0
        self._say(line)


def _name(instance: Instance) -> str:
    hello = instance.hello
    pid, label = (hello.pid, hello.label) if hello is not None else (0, "")
    return f"engine {pid} ({label!r}, {instance.engine_id[:8]!r})"


def _state(instance: Instance) -> tuple[str, str]:
    """What an engine is, of which a change is said, and the same in full; empty while unknown."""
    if instance.connection is None:
        return (AWAY, AWAY) if instance.is_scheduler_alive else ("", "")
    if instance.off is not None:
        return f"off, {instance.off.reason}", f"off, {instance.off}"
    if instance.identity is None or instance.layout is None or not instance.is_identified:
        return "", ""
    identity, layout = instance.identity, instance.layout
    brief = f"on, fingerprint {identity.fingerprint.hex()[:8]}, layout {layout.name}"
    workers = f"{len(instance.workers)} worker{'' if len(instance.workers) == 1 else 's'}"
    sizes = f"blocks of {layout.block_tokens}, chunks of {layout.chunk_tokens}"
    return brief, f"{brief} ({sizes}, {workers})"
