"""The scheduler role's side of the link: who we are, whether it is on, what the node answered.

    worker facts (through the node) + engine fields + weights digest ─► fingerprint ─► Identity
    ─► Serving ─► a new `Session`, which the hooks see

What the node says is handled on the link's thread, which only hands over: `session` is replaced as
a whole, answers wait in `Answers` until the hooks take them. So the scheduler's thread never waits
for the node, nor, since it reads answers itself, for the link's thread.

Ownership
    session, off, alarms  written by the link's thread, read by the scheduler's; whole objects
    counters to send      the scheduler's thread adds (`count`), the link's takes, under `_owing`
    ends of loads to say  the same
    grants to return      either thread, under `_owing`
    what is to be cleared any thread, under `_owing`
"""

import contextlib
import logging
import os
import secrets
import threading
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

import kvtide
from kvtide.config import Config
from kvtide.core import messages as m
from kvtide.core.keys import FORMAT_VERSION, FieldValue, fingerprint
from kvtide.core.reasons import Off, OffReason
from kvtide.engines.vllm.answers import Answer, Answers
from kvtide.engines.vllm.facts import agreed_facts
from kvtide.engines.vllm.plain import shown_field
from kvtide.engines.vllm.weights import Hashing, Known, WeightsDigest
from kvtide.node.supervise import NodeStarter
from kvtide.units import format_bytes
from kvtide.wire.frames import close_all
from kvtide.wire.link import Link
from kvtide.wire.places import Places

logger = logging.getLogger("vllm.kvtide")

FAILED_LOADS = {
    "recompute": "failed loads are recomputed",
    "fail": "failed loads END their requests (set MultiConnector's kv_load_failure_policy to "
    "recompute)",
}
RETURNS_MAX = 4096
"""Grants returned last, which are returned again on a new connection: the old one may have lost
them. More than a socket's buffers hold need not be remembered."""
KNOWN_S_MAX = 0.1
"""How long an engine's start waits for the digest of weights that were read before: what is not
known when the node asks first is said a second later."""


@dataclass(frozen=True, slots=True, eq=False)
class Session:
    """One time of being served; another object means that everything asked before is void."""

    fingerprint: bytes


@dataclass(frozen=True, slots=True)
class EngineIdentity:
    """What the scheduler role knows of its engine when it is built."""

    engine_id: str
    label: str
    fields: Mapping[str, FieldValue]
    weights: tuple[WeightsDigest, ...]
    """Of the model, then of a draft model with weights of its own."""
    worker_count: int
    block_tokens: int
    chunk_tokens: int
    step_tokens: int
    may_load: bool
    may_store: bool
    failed_loads: str
    """What vLLM does with requests whose load failed: recompute, or fail."""
    drops_last_block: bool
    """The last matched block is computed anew, as in the engine's own cache: a draft model's KV of
    a block's last token depends on the token behind it (EAGLE)."""
    off: Off | None
    """Off for as long as the engine lives: what it is, kvtide does not support."""


class EngineSession:
    """Keeps an engine known to the node."""

    def __init__(self, identity: EngineIdentity, config: Config, places: Places) -> None:
        self._identity = identity
        self._config = config
        self._places = places
        self._incarnation = secrets.token_bytes(16)
        self._starter = NodeStarter(config.runtime_dir, config.node_environment)
        self._owing = threading.Lock()
        self._answers = Answers()
        self._returned: list[int] = []
        self._returned_last: deque[int] = deque(maxlen=RETURNS_MAX)
        self._uncleared: dict[m.Clear, None] = {}
        self._clearing: deque[m.Clear] = deque()  # said on this connection, not answered
        self._counts: dict[str, int] = {}
        self._load_ends: list[m.LoadEnd] = []  # those that found no room on their way
        self._facts: m.Workers | None = None
        self._welcome: m.Welcome | None = None
        self._sent = b""  # the fingerprint last said on this connection; b"" where we are off
        self._last_sent = b""  # the one last said on any
        self._said_off: OffReason | None = None  # on this connection, after the fingerprint
        self._said_digests: tuple[bytes, ...] | None = None
        self._line = ""
        self.session: Session | None = None
        self.off: Off | None = None
        self.alarms = 0
        """How many times a canary has turned us off."""
        self._link = Link(places.socket, self, "kvtide-scheduler")

    # ---- the scheduler's thread

    def start(self) -> None:
        """Begin to look for a node, and to read the weights; where that fails, neither goes on."""
        if self._identity.off is not None:
            self._turn_off(self._identity.off)
        with contextlib.ExitStack() as failed:
            failed.callback(self.close, 0.0)
            for weights in self._identity.weights:
                weights.start()
            for weights in self._identity.weights:
                weights.wait(KNOWN_S_MAX)
            self._link.start()
            failed.pop_all()

    @property
    def is_usable(self) -> bool:
        """Served, and the node answers."""
        return self.session is not None and self._link.is_usable

    @property
    def are_weights_verified(self) -> bool:
        """The weights are what their names say: what was computed with them may be stored."""
        return all(weights.is_verified for weights in self._identity.weights)

    def send(self, message: m.Message) -> bool:
        """Send without waiting; False where it cannot be sent."""
        return self._link.send(message)

    def ask(self, question: m.Lookup | m.Probe | m.StoreOffer) -> bool:
        """Send a question, whose answer the engine's next step reads; False where that fails."""
        self._link.leave_reading(True)
        self._answers.asked(question.number)
        is_sent = self._link.send(question)
        if not is_sent:
            self._answers.not_sent(question.number)
        return is_sent

    def leave_reading(self, others_read: bool) -> None:
        """Whether the next step reads what comes; else the link's thread does."""
        self._link.leave_reading(others_read)

    def _take_answer(self, message: m.Message) -> bool:
        """Take an answer in; False for anything else."""
        if not isinstance(message, Answer):
            return False
        self._answered(message)
        return True

    def take_answers(self, wait_s: float | None) -> list[Answer]:
        """What the node has answered, in order.

        Waits at most so long for the first; None takes what has been read before.
        """
        if wait_s is not None:
            wait_s = 0.0 if self._answers.are_waiting else wait_s
            self._link.read_now(self._take_answer, wait_s)
        return self._answers.take()

    def abandon(self, number: int) -> None:
        """Nobody waits for this answer any more: what it grants goes back as soon as it comes."""
        early = self._answers.give_up(number)
        self._link.leave_reading(False)
        for answer in early:
            self._give_back(answer)

    def _abandon_all(self) -> None:
        """Another session: whatever was asked before is void."""
        for answer in self._answers.give_up_all():
            self._give_back(answer)
        self._link.leave_reading(False)

    def return_grants(self, grants: list[int]) -> None:
        """These were never planned: they go back, at once or as soon as there is a connection.

        The engine may take no step for a long time, so nothing here waits for one.
        """
        if grants:
            with self._owing:
                self._returned += grants
            self._send_returned()

    def _send_returned(self) -> None:
        # Under the lock, which a new connection takes: these are due there, or sent here.
        with self._owing:
            if self._returned and self._link.send(m.GrantReturn(self._returned)):
                self._returned_last.extend(self._returned)
                self._returned = []

    def clear(self, salts: set[bytes]) -> None:
        """What was stored for these salts (digests) may be wrong: nobody shall find it. Any thread
        may call this; it is said now, and on each new connection until the node has answered."""
        with self._owing:
            self._uncleared |= {m.Clear(self._last_sent, salt): None for salt in sorted(salts)}
        self._send_clears()

    def _send_clears(self) -> None:
        with self._owing:
            for clear in list(self._uncleared):
                if self._link.send(clear):
                    del self._uncleared[clear]
                    self._clearing.append(clear)

    def end_load(self, end: m.LoadEnd) -> None:
        """A load is over: the node protects what it read until it hears so, however late."""
        if not self._link.send(end):
            with self._owing:
                self._load_ends.append(end)

    def _send_load_ends(self) -> None:
        with self._owing:
            while self._load_ends and self._link.send(self._load_ends[0]):
                del self._load_ends[0]

    def note_silence(self) -> None:
        """A question was not answered in time."""
        self._link.note_silence()

    def count(self, increments: Mapping[str, int]) -> None:
        """Add to what is sent to the node once a second."""
        with self._owing:
            for name, increment in increments.items():
                self._counts[name] = self._counts.get(name, 0) + increment

    def close(self, timeout_s: float) -> None:
        """End in bounded time."""
        until_s = time.monotonic() + timeout_s * 3 / 4  # the rest is for adapters
        with contextlib.ExitStack() as parts:  # each, whatever becomes of those before it
            for weights in self._identity.weights:
                parts.callback(_close_by, weights, until_s)
            parts.callback(self._link.close, timeout_s / 2)
            parts.callback(self._send_counts)

    # ---- the link's thread

    def hello(self) -> m.Message:
        """Who we are."""
        identity = self._identity
        return m.SchedulerHello(
            wire_version=m.WIRE_VERSION,
            version=kvtide.__version__,
            engine_id=identity.engine_id,
            incarnation=self._incarnation,
            pid=os.getpid(),
            label=identity.label,
            worker_count=identity.worker_count,
            last_grant=self._answers.last_grant,
        )

    def on_up(self, welcome: m.Welcome) -> None:
        """The node has taken us; its word on the workers follows."""
        if self._welcome is None or self._welcome.node != welcome.node:
            self._answers.last_grant = 0
            with self._owing:
                self._load_ends.clear()  # another node has protected nothing
        self._welcome = welcome
        self._facts = None
        self._sent, self._said_off = b"", None
        self._said_digests = None
        with self._owing:
            self._returned += self._returned_last
            self._returned_last.clear()
        self._send_returned()
        self._send_clears()
        self._warn_of_settings(welcome)
        if self._identity.off is not None:
            self._link.send(self._message(b"", b"", {}, [], self._identity.off))

    def _warn_of_settings(self, welcome: m.Welcome) -> None:
        for shown in self._config.effective:
            theirs = welcome.settings.get(shown.name)
            if shown.source != "default" and theirs is not None and theirs != shown.value:
                self._say(
                    f"kvtide: {shown.source} asks for {shown.name} {shown.value}, but node "
                    f"{welcome.pid} runs with {theirs} and keeps it until it ends"
                )

    def on_message(self, message: m.Message, descriptors: list[int]) -> None:
        """Answers are handed over; what concerns our identity is handled here."""
        close_all(descriptors)
        match message:
            case m.Match() | m.Pending() | m.StoreAnswer():
                self._answered(message)
            case m.Clear():
                with self._owing, contextlib.suppress(ValueError):  # done once, said twice
                    self._clearing.remove(message)
            case m.Workers():
                self._facts = message
                self._said_digests = None
                self._identify()
            case m.Serving(off_reason, off_detail):
                self._serving(off_reason, off_detail)

    def _answered(self, answer: Answer) -> None:
        if self.session is None:  # asked before the scheduler's thread saw that
            self._answers.give_up(answer.number)
        if not self._answers.arrived(answer):
            self._give_back(answer)

    def _give_back(self, answer: Answer) -> None:
        match answer:
            case m.StoreAnswer() if answer.grants:
                self.return_grants(answer.grants)
            case m.Match() if answer.lease:
                self._link.send(m.LeaseRelease(answer.lease))

    def on_down(self, *, node_is_dead: bool) -> None:
        """Everything asked is void; a dead node is replaced."""
        self.session = None
        self._answers.lost()
        with self._owing:
            self._uncleared = dict.fromkeys([*self._clearing, *self._uncleared])
            self._clearing.clear()
        if node_is_dead:
            self._starter.dead(time.monotonic())

    def on_refused(self, refused: m.Refused) -> None:
        """Another version, or an engine_id that is in use: off until that changes."""
        self._turn_off(_off_of(refused.reason, refused.detail))

    def on_absent(self) -> None:
        """No node: start one, unless settings or `kvtide stop` forbid it."""
        if self._identity.off is not None:
            return
        if not self._config.engine.start_node:
            self._turn_off(Off(OffReason.NODE_UNREACHABLE, f"none at {self._places.socket}"))
        elif self._link.stopped_on_purpose:
            detail = "it was stopped; kvtide serve, or an engine that is started now, starts one"
            self._turn_off(Off(OffReason.NODE_UNREACHABLE, detail))
        else:
            self._starter.absent(time.monotonic())
            if self._starter.has_given_up:
                detail = f"see {self._places.log}"
                if self._starter.error:
                    detail = self._starter.error
                self._turn_off(Off(OffReason.NODE_ENDS_AT_START, detail))

    def on_pulse(self) -> None:
        """Once a second: what is owed, and what the weights' digest has come to."""
        self._send_counts()
        self._send_load_ends()
        self._send_returned()
        self._send_clears()
        self._identify()

    def _send_counts(self) -> None:
        with self._owing:
            counts, self._counts = self._counts, {}
        if counts and not self._link.send(m.Counts(counts)):
            self.count(counts)

    # ---- identity

    def _identify(self) -> None:
        """Say what we are as soon as it is known, and again when it changes."""
        facts = self._facts
        if facts is None or self._identity.off is not None:
            return
        digests = self._weights_digests()
        if isinstance(digests, Off):
            self._identify_as_off(facts, digests)
            return
        if digests == self._said_digests:
            return
        fields = self._fields(facts, digests)
        if isinstance(fields, Off):
            self._identify_as_off(facts, fields)
            return
        self._sent = self._last_sent = fingerprint(fields)
        self._said_off = None
        in_words = {name: shown_field(field) for name, field in fields.items()}
        identity = self._message(self._sent, b"".join(digests), in_words, facts.cell_bytes, None)
        if self._link.send(identity):
            self._said_digests = digests

    def _identify_as_off(self, facts: m.Workers, off: Off) -> None:
        """Say why we are off, once for each reason."""
        self._turn_off(off)
        if off.reason == self._said_off:
            return
        self._sent = b""
        if self._link.send(self._message(b"", b"", {}, facts.cell_bytes, off)):
            self._said_off = off.reason

    def _weights_digests(self) -> tuple[bytes, ...] | Off:
        digests = []
        for weights in self._identity.weights:
            match weights.poll():
                case Known(digest):
                    digests.append(digest)
                case Hashing() as hashing:
                    return Off(OffReason.WEIGHTS_HASHING, str(hashing))
                case Off() as off:
                    return off
        return tuple(digests)

    def _fields(self, facts: m.Workers, digests: tuple[bytes, ...]) -> dict[str, FieldValue] | Off:
        """Everything that the fingerprint is made of."""
        agreed = agreed_facts(facts.facts)
        if isinstance(agreed, Off):
            return agreed
        return {
            **self._identity.fields,
            **agreed,
            "kvtide.format": FORMAT_VERSION,
            "kvtide.chunk_tokens": self._identity.chunk_tokens,
            "kvtide.cell_bytes": list(facts.cell_bytes),
            "weights": list(digests),
        }

    def _message(
        self,
        value: bytes,
        weights: bytes,
        shown: dict[str, str],
        cell_bytes: list[int],
        off: Off | None,
    ) -> m.Identity:
        identity = self._identity
        return m.Identity(
            fingerprint=value,
            weights=weights,
            fields=shown,
            block_tokens=identity.block_tokens,
            chunk_tokens=identity.chunk_tokens,
            cell_bytes=cell_bytes,
            step_tokens=identity.step_tokens,
            off_reason=off.reason if off else "",
            off_detail=off.detail if off else "",
        )

    def _serving(self, off_reason: str, off_detail: str) -> None:
        if off_reason:
            self._turn_off(_off_of(off_reason, off_detail))
            return
        welcome, value = self._welcome, self._sent
        if welcome is None or not value:
            return
        self.off = None
        self._starter.served()
        self.session = None
        self._abandon_all()  # before anything is asked in the new one
        self.session = Session(value)
        self._say(
            f"kvtide on: node {welcome.pid}, host {format_bytes(welcome.host_bytes)}, "
            f"fingerprint {value.hex()[:8]}, blocks of {self._identity.block_tokens}, "
            f"chunks of {self._identity.chunk_tokens}, "
            f"{FAILED_LOADS.get(self._identity.failed_loads, self._identity.failed_loads)}"
            f"{'' if self.are_weights_verified else ', stores wait until weights are verified'}"
        )

    def _turn_off(self, off: Off) -> None:
        self.session = None
        self._abandon_all()
        self.alarms += off.reason is OffReason.CANARY
        is_news = self.off is None or self.off.reason != off.reason
        self.off = off
        if is_news:
            self._say(f"kvtide off: {off}")

    def _say(self, line: str) -> None:
        """One line in the engine's log; the same line is not said twice in a row."""
        if line != self._line:
            self._line = line
            logger.info("%s", line)


def _close_by(weights: WeightsDigest, until_s: float) -> None:
    weights.close(max(0.0, until_s - time.monotonic()))


def _off_of(reason: str, detail: str) -> Off:
    """What a node says; a word that only a later release knows is kept as text."""
    try:
        return Off(OffReason(reason), detail)
    except ValueError:
        return Off(OffReason.WIRE_VERSION, f"the node says {reason}: {detail}")
