"""What is offered, copied, taken back and accounted for, of one request."""

from kvtide.core.chain import Chain
from kvtide.core.lending import HELD
from kvtide.core.messages import Run, StoreAnswer, StoreOffer
from kvtide.core.plan import PLANNED, RETRY_MS, StorePlan, cut_runs, usable_blocks
from kvtide.core.reasons import DropReason

BLOCK, PER_CHUNK = 4, 3
CHUNK = BLOCK * PER_CHUNK


def plan(token_count: int, next_chunk: int = 0) -> StorePlan:
    chain = Chain(bytes(32), BLOCK, CHUNK)
    chain.extend(list(range(token_count)))
    return StorePlan(chain, next_chunk)


def ask(store: StorePlan, tokens: int, *, tail: bool = False, now_ms: int = 0) -> StoreOffer:
    offer = store.offer(1, tokens, with_tail=tail, now_ms=now_ms)
    assert offer is not None
    return offer


def answer(store: StorePlan, offer: StoreOffer, *outcomes: str, now_ms: int = 0) -> None:
    """The node answers; grants are numbered from 10 on."""
    granted = [len(d) // 16 for d, o in zip(offer.digests, outcomes, strict=True) if not o]
    runs = [Run(1, 9 * i, blocks, 5) for i, blocks in enumerate(granted)]
    grants = [10 + i for i in range(len(granted))]
    reply = StoreAnswer(offer.number, list(outcomes), grants, runs, [7])
    assert store.answered(reply, now_ms)


def test_one_token_is_left_to_compute() -> None:
    assert [usable_blocks(9, tokens, BLOCK) for tokens in (1, 4, 5, 8, 9)] == [0, 0, 1, 1, 2]


def test_runs_are_cut_where_the_load_begins_and_ends() -> None:
    runs = [Run(1, 0, 3, 5), Run(2, 30, 3, 6), Run(1, 60, 2, 7)]
    cut = [Run(1, 2, 1, 5), Run(2, 30, 3, 6), Run(1, 60, 1, 7)]
    assert cut_runs(runs, PER_CHUNK, 2, 7) == cut
    assert cut_runs(runs, PER_CHUNK, 3, 3) == []


def test_nothing_is_left_to_ask_where_all_is_held() -> None:
    """A matched prompt that ends with a chunk has no tail: no question in any later step."""
    store = plan(2 * CHUNK, next_chunk=2)
    assert store.tail_end_block == 2 * PER_CHUNK
    assert store.offer(1, 2 * CHUNK, with_tail=True, now_ms=0) is None


def test_a_grant_is_due_when_its_blocks_are_whole() -> None:
    store = plan(2 * CHUNK)
    answer(store, ask(store, 2 * CHUNK), "", "")
    assert store.take_storable(CHUNK - 1) == []
    assert [granted.grant for granted in store.take_storable(CHUNK)] == [10]
    assert store.is_waiting


def test_what_will_never_be_computed_is_taken_back_and_the_tail_is_asked_for() -> None:
    """A request that ends in the middle of a chunk that was granted ahead."""
    store = plan(2 * CHUNK)
    answer(store, ask(store, 2 * CHUNK), "", "")
    assert store.take_back(from_block=PER_CHUNK + 1) == [11]
    assert [granted.grant for granted in store.granted] == [10]
    offer = ask(store, CHUNK + BLOCK, tail=True)
    assert [len(digests) // 16 for digests in offer.digests] == [1]


def test_an_answer_to_a_question_that_was_withdrawn_is_not_taken() -> None:
    """So that its grants go back."""
    store = plan(CHUNK)
    offer = ask(store, CHUNK)
    store.withdraw()
    assert not store.answered(StoreAnswer(offer.number, [""], [10], [Run(1, 0, 3, 5)], [7]), 0)
    assert not store.is_waiting


def test_each_block_counts_once_with_its_own_outcome() -> None:
    """A drop behind a grant that is not planned yet says nothing of the granted blocks."""
    store = plan(3 * CHUNK + BLOCK)
    answer(store, ask(store, 2 * CHUNK), HELD, "")
    answer(store, ask(store, 3 * CHUNK), DropReason.IN_FLIGHT)
    for granted in store.take_storable(3 * CHUNK):
        store.mark(granted.first_block, granted.end_block, PLANNED)
    store.mark(0, 2 * PER_CHUNK, DropReason.FAILED)  # too late: they have theirs
    assert store.outcomes(3 * PER_CHUNK + 1, DropReason.TOO_OLD) == {
        HELD: PER_CHUNK,
        PLANNED: PER_CHUNK,
        DropReason.IN_FLIGHT: PER_CHUNK,
        DropReason.TOO_OLD: 1,
    }


def test_only_storable_blocks_count() -> None:
    """What was said of blocks that were never computed does not."""
    store = plan(2 * CHUNK, next_chunk=2)
    assert store.outcomes(1, DropReason.TOO_OLD) == {HELD: 1}


def test_a_drop_that_may_pass_is_asked_again_later() -> None:
    store = plan(CHUNK)
    answer(store, ask(store, CHUNK), DropReason.NO_MEMORY)
    assert store.offer(2, CHUNK, with_tail=False, now_ms=RETRY_MS - 1) is None
    answer(store, ask(store, CHUNK, now_ms=RETRY_MS), "", now_ms=RETRY_MS)
    assert store.granted


def test_what_another_was_storing_is_asked_for_again_at_the_end() -> None:
    """That one may have failed; a bounded number of times, and each block still counts once."""
    store = plan(2 * CHUNK + BLOCK)
    in_flight = [DropReason.IN_FLIGHT] * 2
    answer(store, ask(store, 2 * CHUNK), *in_flight)
    assert store.offer(2, 2 * CHUNK, with_tail=False, now_ms=0) is None
    offer = ask(store, 2 * CHUNK + BLOCK, tail=True)
    assert offer.parent == store.chain.root
    assert [len(digests) // 16 for digests in offer.digests] == [PER_CHUNK, PER_CHUNK, 1]
    answer(store, offer, HELD, *in_flight)
    offer = ask(store, 2 * CHUNK + BLOCK, tail=True)
    assert [len(digests) // 16 for digests in offer.digests] == [PER_CHUNK, 1]
    answer(store, offer, *in_flight)
    assert store.offer(2, 2 * CHUNK + BLOCK, with_tail=True, now_ms=0) is None
    assert store.outcomes(2 * PER_CHUNK + 1, DropReason.TOO_OLD) == {
        HELD: PER_CHUNK,
        DropReason.IN_FLIGHT: PER_CHUNK + 1,
    }


def test_a_lost_anchor_starts_again_from_the_root() -> None:
    store = plan(2 * CHUNK, next_chunk=1)
    answer(store, ask(store, 2 * CHUNK), DropReason.NOT_ANCHORED)
    assert ask(store, 2 * CHUNK).parent == store.chain.root


def test_an_outcome_that_only_a_later_node_knows_is_a_failure() -> None:
    store = plan(CHUNK)
    answer(store, ask(store, CHUNK), "eaten_by_a_grue")
    assert store.outcomes(PER_CHUNK, DropReason.TOO_OLD) == {DropReason.FAILED: PER_CHUNK}


def test_what_may_not_be_copied_yet_stays_in_order() -> None:
    store = plan(4 * CHUNK)
    answer(store, ask(store, 4 * CHUNK), "", "", "", "")
    due = store.take_storable(3 * CHUNK, lambda granted: granted.grant == 11)
    assert [granted.grant for granted in due] == [11]
    assert [granted.grant for granted in store.granted] == [10, 12, 13]
    assert store.has_storable(CHUNK)
    store.take_storable(3 * CHUNK)
    assert not store.has_storable(3 * CHUNK)
