"""Lookups of the scheduler role: questions about prefixes, their answers, and how long to wait.

    ask ─► Match, maybe a probe of one more chunk ─► the match in force, with its lease
     └─► nothing within T_answer, or promised and not come within T_load ─► a miss

Of one request at most one question is open. All waiting together is bounded by `STEP_WAIT_S` a
step; whoever has no answer by then is asked again in the next step.
"""

import time
from collections.abc import Callable, Iterable

from kvtide.bounds import T_ANSWER_MS, T_LOAD_MS, T_LOOKUP_S
from kvtide.clock import Clock
from kvtide.core import messages as m
from kvtide.core.leases import LEASE_MS
from kvtide.core.plan import usable_blocks
from kvtide.core.reasons import MissReason
from kvtide.engines.vllm.canaries import Canaries
from kvtide.engines.vllm.session import EngineSession
from kvtide.engines.vllm.tracker import Question, Tracker
from kvtide.metrics import Counters

STEP_WAIT_S = T_LOOKUP_S
"""T_lookup: waiting for answers in one step, all requests together."""
ANSWER_MS_MAX = T_ANSWER_MS
"""T_answer: no first word by then is a miss."""
PENDING_MS_MAX = T_LOAD_MS
"""T_load: so long a promised answer may take."""
FRESH_MS_MAX = LEASE_MS * 3 // 4
"""A match that was asked for longer ago is asked for again, once: its lease may be about to end. A
second one is used all the same, since steps may be longer than leases; generations tell whether it
still holds."""


class Lookups:
    """All open questions of one engine."""

    def __init__(
        self,
        link: EngineSession,
        number: Callable[[], int],
        register: Callable[[m.RegisterRoot], bool],
        take_in: Callable[[float], None],
        clock: Clock,
        counters: Counters,
        canaries: Canaries,
    ) -> None:
        """`take_in` waits so long for what the node says, and hands it to its parts."""
        self._link = link
        self._number = number
        self._register = register
        self._take_in = take_in
        self._clock = clock
        self._counters = counters
        self._canaries = canaries
        self._questions: dict[int, Tracker] = {}
        self._wait_left_s = STEP_WAIT_S

    def next_step(self) -> None:
        """There may be waiting again."""
        self._wait_left_s = STEP_WAIT_S

    # ---- questions

    @property
    def is_asking(self) -> bool:
        """A question is open."""
        return bool(self._questions)

    def ask(self, tracker: Tracker) -> None:
        """Send the lookup; without a node the request simply has no question."""
        chain, root = tracker.chain, tracker.root
        assert chain is not None
        assert root is not None
        tracker.not_asked = None
        if not self._link.is_usable or not self._register(root):
            tracker.not_asked = MissReason.NODE_GONE
            return
        chain.extend(tracker.request.all_token_ids)
        most = _usable(tracker)
        if not most:
            return
        chunks, blocks = divmod(most, chain.blocks_per_chunk)
        lookup = m.Lookup(
            self._number(),
            chain.root,
            b"".join(chain.keys[:chunks]),
            chain.short_digests(chunks, blocks),
        )
        if self._link.ask(lookup):
            now_ms = self._clock.now_ms()
            tracker.question = Question(lookup.number, now_ms, now_ms, time.monotonic())
            self._questions[lookup.number] = tracker

    def _probe(self, tracker: Tracker, question: Question, match: m.Match) -> bool:
        """Ask for the blocks of the chunk behind a match; whether that could be sent."""
        chain, root = tracker.chain, tracker.root
        assert chain is not None
        assert root is not None
        if not self._register(root):  # the node may have forgotten it behind many others
            return False
        blocks = _usable(tracker) - match.chunks * chain.blocks_per_chunk
        probe = m.Probe(
            self._number(),
            chain.root,
            chain.parent(match.chunks),
            chain.short_digests(match.chunks, min(blocks, chain.blocks_per_chunk)),
        )
        if not self._link.ask(probe):
            return False
        question.first = match
        question.number = probe.number
        # The node has spoken: T_answer begins anew.
        question.sent_ms, question.is_overdue = self._clock.now_ms(), False
        self._questions[probe.number] = tracker
        return True

    def drop(self, tracker: Tracker) -> None:
        """The answer, if any, will not be used."""
        self._canaries.not_loaded(tracker)
        question, tracker.question = tracker.question, None
        if question is None:
            return
        if self._questions.pop(question.number, None) is not None:
            self._link.abandon(question.number)
        for lease in question.leases:
            self.release(lease)

    def forget(self, tracker: Tracker) -> None:
        """Nothing is loaded for the request any more, nor compared with what was."""
        self._canaries.drop(tracker)
        self.drop(tracker)

    def release(self, lease: int) -> None:
        """Nobody will load what this lease protects."""
        if lease:
            self._link.send(m.LeaseRelease(lease))

    def session_changed(self, living: Iterable[Tracker]) -> None:
        """Another session: questions are void, and leases ended with the old one."""
        self._questions.clear()
        self._canaries.session_changed()
        for tracker in living:
            tracker.question = None

    # ---- answers

    def pending(self, number: int) -> None:
        """The answer is promised; or, said again, has come closer: T_load begins anew."""
        tracker = self._questions.get(number)
        question = tracker.question if tracker is not None else None
        if question is not None:
            question.is_pending = True
            question.sent_ms, question.is_overdue = self._clock.now_ms(), False

    def matched(self, match: m.Match) -> None:
        """An answer; the chunk where it ends may be worth a second question."""
        tracker = self._questions.pop(match.number, None)
        question = tracker.question if tracker is not None else None
        if tracker is None or question is None:
            self.release(match.lease)
            return
        assert question.number == match.number, (question.number, match.number)
        self._counters.observe_s("lookup", time.monotonic() - question.sent_s)
        if question.first is not None:
            question.match = _joined(question.first, match)
            if match.lease:
                self.release(question.first.lease)
        elif match.probe and self._probe(tracker, question, match):
            return
        else:
            question.match = match

    def match_of(self, tracker: Tracker) -> m.Match | None:
        """The match in force; where there is none, and no question either, there will be none."""
        question = tracker.question
        if question is not None and question.match is not None:
            is_fresh = self._clock.now_ms() - question.asked_ms < FRESH_MS_MAX
            if is_fresh or tracker.is_asked_again:
                return question.match
            tracker.is_asked_again = True
            self.drop(tracker)
            question = None
        if question is None:
            self.ask(tracker)
            question = tracker.question
        if question is None:
            return None
        self._wait_for(question)
        if question.match is None:
            self._give_up_late(tracker, question)
        return question.match

    def _wait_for(self, question: Question) -> None:
        """Wait for a first word as long as this step still may, unless none can come any more."""
        while (
            question.number in self._questions
            and not question.is_pending
            and self._wait_left_s > 0
        ):
            began_s = time.monotonic()
            self._take_in(self._wait_left_s)
            self._wait_left_s -= time.monotonic() - began_s

    def _give_up_late(self, tracker: Tracker, question: Question) -> None:
        waited_ms = self._clock.now_ms() - question.sent_ms
        if waited_ms < (PENDING_MS_MAX if question.is_pending else ANSWER_MS_MAX):
            return
        if not question.is_overdue:
            # Maybe not the node stood still but we: what has come meanwhile is seen next time.
            question.is_overdue = True
            return
        if question.is_pending:
            tracker.no_load = MissReason.WAITED_TOO_LONG
        else:
            tracker.no_load = MissReason.NO_ANSWER
            self._link.note_silence()
        self.drop(tracker)


def _usable(tracker: Tracker) -> int:
    """Blocks that are worth asking for."""
    chain = tracker.chain
    assert chain is not None
    blocks = chain.token_count // chain.block_tokens
    return usable_blocks(blocks, tracker.request.num_tokens, chain.block_tokens)


def _joined(first: m.Match, second: m.Match) -> m.Match:
    """The answers to a lookup and to its probe, as one."""
    return m.Match(
        second.number,
        first.chunks,
        second.blocks,
        first.runs + second.runs,
        second.lease or first.lease,
    )
