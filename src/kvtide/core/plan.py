"""What a connector plans for one request: which blocks to load, what to offer, what to copy.

Engine-neutral and pure: positions, keys and runs in, messages and copies out. The connector of
each engine tells it what is known and computed; `kvtide.testing` drives it with a toy engine.

    tokens   |--------- whole chunks ----------|-- tail --|- rest -|
    offered  0 ....... next_chunk                                       asked for, one question
    granted            [chunk, chunk, …]                                at a time
    copied   when storable (known and computed by the end of this step) reaches a grant's end
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kvtide.core.chain import Chain, short
from kvtide.core.lending import HELD
from kvtide.core.messages import Run, StoreAnswer, StoreOffer
from kvtide.core.reasons import DropReason

OFFER_CHUNKS_MAX = 128
"""Chunks in one offer; more follow with the next."""
ANCHOR_RETRIES_MAX = 2
"""How often a request starts again from its root because the chunk before was evicted."""
IN_FLIGHT_RETRIES_MAX = 2
"""How often a request that is at its end asks again for what another was storing before: that one
may have failed. More would only count those that store the same beside it."""
RETRY_MS = 100
"""After a drop that may pass (no memory yet), the chunk is offered again so much later."""
PLANNED = "planned"
"""Outcome of a block that a step copies."""
PASSING = (DropReason.NO_MEMORY, DropReason.QUEUE_FULL, DropReason.NOT_MAPPED)
"""Drops that may pass: what they are about is offered again."""
OUTCOMES = (PLANNED, HELD, *DropReason)
"""What may become of a block; in a plan's marks a block's outcome is its place here, plus one."""
_NONE = b"\0"
"""The mark of a block without an outcome."""


def _mark(outcome: str) -> bytes:
    """The mark of an outcome; a word that only a later release knows is a failure like others."""
    known = outcome if outcome in OUTCOMES else DropReason.FAILED
    return bytes([OUTCOMES.index(known) + 1])


def usable_blocks(matched_blocks: int, token_count: int, block_tokens: int) -> int:
    """How many matched blocks a request may take: one token at least is left to compute."""
    return max(0, min(matched_blocks, (token_count - 1) // block_tokens))


def cut_runs(
    runs: Sequence[Run], blocks_per_chunk: int, first_block: int, end_block: int
) -> list[Run]:
    """The parts of a match's runs that hold blocks [first_block, end_block) of the request."""
    cut: list[Run] = []
    for position, run in enumerate(runs):
        start = position * blocks_per_chunk
        low, high = max(first_block, start), min(end_block, start + run.cell_count)
        if low < high:
            cut.append(run.part(low - start, high - start))
    cell_count = sum(run.cell_count for run in cut)
    assert cell_count == max(0, end_block - first_block), (cut, first_block, end_block)
    return cut


@dataclass(slots=True)
class Granted:
    """One chunk or tail that may be copied: blocks [first_block, first_block + run.cell_count)."""

    grant: int
    connections: list[int]
    run: Run
    first_block: int

    @property
    def end_block(self) -> int:
        """The first block behind it."""
        return self.first_block + self.run.cell_count


class _Part(NamedTuple):
    """One chunk or tail of an offer: which, and how many blocks of it."""

    chunk: int
    blocks: int


@dataclass(frozen=True, slots=True)
class _Question:
    """An offer that is not answered yet."""

    number: int
    parts: list[_Part]


class StorePlan:
    """The stores of one request."""

    def __init__(self, chain: Chain, next_chunk: int = 0) -> None:
        """`next_chunk`: the first chunk that the node is not known to hold."""
        self.chain = chain
        self.next_chunk = next_chunk
        self.granted: deque[Granted] = deque()
        self._question: _Question | None = None
        self._tail_end_block = next_chunk * chain.blocks_per_chunk
        self._anchor_retries = 0
        self._in_flight_retries = 0
        self._in_flight_chunk: int | None = None  # the first one that another was storing
        self._retry_at_ms = 0
        self._passing: DropReason | None = None
        self._marks = bytearray()
        self.mark(0, self._tail_end_block, HELD)

    @property
    def tail_end_block(self) -> int:
        """The end of what was offered last."""
        return self._tail_end_block

    @property
    def is_asking(self) -> bool:
        """An offer is on its way."""
        return self._question is not None

    @property
    def question_number(self) -> int | None:
        """The number of the offer on its way."""
        return self._question.number if self._question is not None else None

    @property
    def is_waiting(self) -> bool:
        """Something is asked for, to be asked for again, or granted and not planned."""
        return bool(self.granted) or self.is_asking or self._passing is not None

    def withdraw(self) -> None:
        """The question was not sent, or nobody waits for its answer any more."""
        self._question = None

    # ---- offering

    def offer(
        self, number: int, horizon_tokens: int, *, with_tail: bool, now_ms: int
    ) -> StoreOffer | None:
        """What should be asked for now, if anything.

        Args:
            number: the question's number, used if there is a question.
            horizon_tokens: known tokens that are, or soon will be, computed.
            with_tail: the blocks behind the last whole chunk too.
            now_ms: for the retry of what was dropped for want of memory.
        """
        if self._question is not None or now_ms < self._retry_at_ms:
            return None
        if with_tail:
            self._go_back_to_in_flight()
        chain = self.chain
        whole_end = min(horizon_tokens, chain.token_count) // chain.chunk_tokens
        chunks = range(self.next_chunk, min(whole_end, self.next_chunk + OFFER_CHUNKS_MAX))
        parts = [_Part(chunk, chain.blocks_per_chunk) for chunk in chunks]
        if with_tail and (chunks.stop == whole_end or not chunks):
            tail = min(horizon_tokens, chain.token_count) // chain.block_tokens
            blocks = tail - whole_end * chain.blocks_per_chunk
            if blocks > 0 and tail > self._tail_end_block and whole_end >= self.next_chunk:
                parts.append(_Part(whole_end, blocks))
        if not parts:
            if with_tail:
                self._passing = None  # nothing is left to wait for
            return None
        keys, digests = [], []
        for chunk, blocks in parts:
            full = chain.digests(chunk, blocks)
            keys.append(full[-1])
            digests.append(short(full))
        self._question = _Question(number, parts)
        return StoreOffer(number, chain.root, chain.parent(parts[0].chunk), keys, digests)

    def _go_back_to_in_flight(self) -> None:
        """Offer once more what another was storing: by now it is held, or that one has failed."""
        chunk = self._in_flight_chunk
        if chunk is None or self.granted or self._in_flight_retries >= IN_FLIGHT_RETRIES_MAX:
            return
        self._in_flight_retries += 1
        self._in_flight_chunk = None
        first_block = chunk * self.chain.blocks_per_chunk
        self.next_chunk, self._tail_end_block = chunk, first_block

    def answered(self, answer: StoreAnswer, now_ms: int) -> bool:
        """Take the node's answer in; False where it comes too late, and its grants go back."""
        question = self._question
        if question is None or question.number != answer.number:
            return False
        self._question = None
        self._take_in(question, answer, now_ms)
        return True

    def _take_in(self, question: _Question, answer: StoreAnswer, now_ms: int) -> None:
        grants = iter(zip(answer.grants, answer.runs, strict=True))
        for (chunk, blocks), outcome in zip(question.parts, answer.outcomes, strict=True):
            if outcome == DropReason.NOT_ANCHORED and self._anchor_retries < ANCHOR_RETRIES_MAX:
                self._anchor_retries += 1
                self.next_chunk = 0
                return
            if outcome in PASSING:
                self._passing = DropReason(outcome)
                self._retry_at_ms = now_ms + RETRY_MS
                return
            self._passing = None
            first_block = chunk * self.chain.blocks_per_chunk
            if not outcome:
                grant, run = next(grants)
                self.granted.append(Granted(grant, answer.connections, run, first_block))
            else:
                self.mark(first_block, first_block + blocks, outcome)
                if outcome == DropReason.IN_FLIGHT and self._in_flight_chunk is None:
                    self._in_flight_chunk = chunk
            self._advance(chunk, blocks)

    def _advance(self, chunk: int, blocks: int) -> None:
        if blocks == self.chain.blocks_per_chunk:
            self.next_chunk = chunk + 1
        self._tail_end_block = chunk * self.chain.blocks_per_chunk + blocks

    # ---- copying

    def has_storable(self, storable_tokens: int) -> bool:
        """Whether `take_storable` has left something."""
        end_block = storable_tokens // self.chain.block_tokens
        return bool(self.granted) and self.granted[0].end_block <= end_block

    def take_storable(
        self, storable_tokens: int, may_copy: Callable[[Granted], bool] = lambda _: True
    ) -> list[Granted]:
        """The grants whose blocks are whole and computed by the end of this step.

        Those that may not be copied yet stay, and are asked about again.
        """
        due: list[Granted] = []
        later: list[Granted] = []
        end_block = storable_tokens // self.chain.block_tokens
        while self.granted and self.granted[0].end_block <= end_block:
            granted = self.granted.popleft()
            (due if may_copy(granted) else later).append(granted)
        self.granted.extendleft(reversed(later))
        return due

    def not_held(self, from_block: int) -> None:
        """A load of these blocks failed: what the node was believed to hold is offered again."""
        chunk = from_block // self.chain.blocks_per_chunk
        self.next_chunk = min(self.next_chunk, chunk)
        first_block = chunk * self.chain.blocks_per_chunk
        self._tail_end_block = min(self._tail_end_block, first_block)
        self._marks[first_block:] = self._marks[first_block:].replace(_mark(HELD), _NONE)

    def take_back(self, from_block: int = 0) -> list[int]:
        """The grants to return of blocks behind this one; they are asked for again when due."""
        grants = []
        while self.granted and self.granted[-1].end_block > from_block:
            granted = self.granted.pop()
            grants.append(granted.grant)
            first_chunk = granted.first_block // self.chain.blocks_per_chunk
            self.next_chunk = min(self.next_chunk, first_chunk)
            self._tail_end_block = min(self._tail_end_block, granted.first_block)
        return grants

    def forget(self) -> list[int]:
        """Another connection: grants are to be returned, and nothing is known of what is held."""
        grants = self.take_back()
        self.withdraw()
        self._in_flight_chunk = None
        self.next_chunk = 0
        self._tail_end_block = 0
        self._retry_at_ms = 0
        return grants

    # ---- accounts

    def mark(self, first_block: int, end_block: int, outcome: str) -> None:
        """What became of these blocks; each keeps its first outcome, but for in flight.

        That is none yet: whoever was storing them may fail, and then they are stored here.
        """
        missing = end_block - len(self._marks)
        self._marks.extend(bytes(max(0, missing)))
        marks = self._marks[first_block:end_block].replace(_mark(DropReason.IN_FLIGHT), _NONE)
        self._marks[first_block:end_block] = marks.replace(_NONE, _mark(outcome))

    def outcomes(self, end_block: int, otherwise: DropReason) -> dict[str, int]:
        """How many of the blocks before this one came to what; `otherwise` where nothing did."""
        missing = end_block - len(self._marks)
        marks = self._marks[:end_block] + bytes(max(0, missing))
        marks = marks.replace(_NONE, _mark(self._passing or otherwise))
        counts = {str(outcome): marks.count(_mark(outcome)) for outcome in OUTCOMES}
        return {outcome: count for outcome, count in counts.items() if count}
