"""Which requests and engines load, which store, what they share, and with how many workers."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.lora.request import LoRARequest

from kvtide.core.keys import CONTENT_ID_BYTES_MAX
from kvtide.core.reasons import MissReason
from kvtide.testing.toy_engine import generated
from kvtide.testing.vllm_toy import VOCABULARY, ToyEngine, ToyOptions, ToyWorker
from tests.engines.vllm.connector.toys import (
    Toys,
    assert_right,
    own_hit,
    scheduler_of,
    stored,
    tokens,
    workers_of,
)

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("patient")]

BLOCK = 16
CHUNK = 64
LENGTH = 150
HIT = own_hit(LENGTH, LENGTH)


def options(**others: Any) -> ToyOptions:
    return ToyOptions(chunk_tokens=CHUNK, step_tokens=CHUNK, **others)


def found(toys: Toys, engine: ToyEngine, prompt: list[int], **arguments: Any) -> int:
    """Tokens of a prompt that an engine which has forgotten everything gets from kvtide."""
    assert engine.reset()
    result = engine.generate(prompt, **arguments)
    assert_right(result, 1, shards=engine.options.workers // engine.options.replicas)
    toys.rest(engine)
    assert engine.reset()
    return result.external


# ---- engines


def test_a_producer_never_loads_and_a_consumer_never_stores(toys: Toys) -> None:
    """What one stores the other loads; what the other computes nobody has."""
    producer = toys.start(options(role="kv_producer"))
    consumer = toys.start(options(role="kv_consumer"))
    prompt = tokens(LENGTH)
    assert found(toys, producer, prompt) == 0
    assert found(toys, producer, prompt) == 0
    assert found(toys, consumer, prompt) == HIT
    mine = tokens(LENGTH)
    before = toys.node.count("stored_blocks")
    assert found(toys, consumer, mine) == 0
    assert found(toys, consumer, mine) == 0
    assert toys.node.count("stored_blocks") == before


def test_two_engines_on_one_node_share(toys: Toys) -> None:
    """As data parallel engine cores do: each finds what the other stored, tails included."""
    engines = [toys.start(options()), toys.start(options(is_async=True))]
    for one, other in (engines, engines[::-1]):
        prompt = tokens(LENGTH)
        assert found(toys, one, prompt) == 0
        assert found(toys, other, prompt) == HIT


def test_both_engines_of_a_node_at_once(toys: Toys) -> None:
    """The same requests in both, step by step: nobody gets a wrong byte, everybody stores once."""
    engines = [toys.start(options()), toys.start(options())]
    base = tokens(100)
    prompts = [[*base, *tokens(n)] for n in (3, 30, 77)]
    ids = [[engine.add(prompt, 9) for prompt in prompts] for engine in engines]
    while engines[0].step() | engines[1].step():
        pass
    for engine, own in zip(engines, ids, strict=True):
        for request_id in own:
            assert_right(engine.results[request_id], 9)
    toys.rest()
    for engine in engines:
        for prompt in prompts:
            assert found(toys, engine, prompt) == own_hit(len(prompt), len(prompt))


def test_without_the_engines_own_prefix_caching(toys: Toys) -> None:
    """Then every turn is served by kvtide."""
    engine = toys.start(options(prefix_caching=False))
    prompt = tokens(LENGTH)
    for expected in (0, HIT, HIT):
        result = engine.generate(prompt)
        assert_right(result, 1)
        assert (result.external, result.local) == (expected, 0)
        toys.rest()
    ids = [engine.add(prompt) for _ in range(3)]
    engine.run()
    for request_id in ids:
        assert_right(engine.results[request_id], 1)


@pytest.mark.parametrize(("workers", "replicas"), [(2, 1), (2, 2), (4, 2)])
@pytest.mark.parametrize("is_async", [False, True])
def test_several_workers(toys: Toys, workers: int, replicas: int, is_async: bool) -> None:
    """Every shard is stored once, and loaded by every worker that has it."""
    engine = toys.start(options(workers=workers, replicas=replicas, is_async=is_async))
    prompt = tokens(LENGTH)
    assert found(toys, engine, prompt) == 0
    assert [worker._is_writer for worker in workers_of(engine)] == [
        rank % replicas == 0 for rank in range(workers)
    ]
    assert found(toys, engine, prompt) == HIT

    # A worker whose bytes are wrong shows, whichever it is.
    for worker, side in zip(engine.workers, workers_of(engine), strict=True):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(side, "_copy_in", _badly(side, worker))
            result = engine.generate(prompt)
        assert result.external == HIT
        with pytest.raises(AssertionError):
            assert_right(result, 1, shards=workers // replicas)
        toys.rest()
        assert engine.reset()


def _badly(side: Any, worker: ToyWorker) -> Callable[..., set[int]]:
    copy_in = side._copy_in

    def copy_badly(load: Any, block_ids: list[int], runs: Any) -> set[int]:
        failed: set[int] = copy_in(load, block_ids, runs)
        worker.memory.scribble(block_ids[1:2])
        return failed

    return copy_badly


# ---- requests


def test_requests_that_skip_reading_take_no_lease_and_still_store(toys: Toys) -> None:
    """Prompt log-probabilities need the whole prompt computed."""
    engine = toys.start(options())
    prompt = tokens(LENGTH)
    before = toys.node.count("lookups.answered")
    engine.generate(prompt, prompt_logprobs=1)
    toys.rest()
    engine.reset()
    engine.generate(prompt, prompt_logprobs=1)
    toys.rest()
    assert toys.node.count("lookups.answered") == before
    assert found(toys, engine, prompt) == HIT


def test_requests_that_opt_out_are_left_alone(toys: Toys) -> None:
    """Neither looked up nor stored."""
    engine = toys.start(options())
    off = {"kv_transfer_params": {"kvtide": "off"}}
    mine, theirs = tokens(LENGTH), stored(toys, engine, LENGTH)
    assert found(toys, engine, mine, extra_args=off) == 0
    assert found(toys, engine, mine) == 0
    assert found(toys, engine, theirs, extra_args=off) == 0
    assert found(toys, engine, theirs) == HIT


def test_salts_isolate(toys: Toys) -> None:
    """An entry is found with its own salt and with no other."""
    engine = toys.start(options())
    prompt = tokens(LENGTH)
    for salt in ("a", "b", None):
        assert found(toys, engine, prompt, salt=salt) == 0
    for salt in ("a", "b", None, ""):
        assert found(toys, engine, prompt, salt=salt) == HIT
    assert found(toys, engine, prompt, salt="c") == 0


def test_priorities(toys: Toys) -> None:
    """Whoever is urgent takes the place of whoever is not, at any step; all outputs are right."""
    engine = toys.start(options(policy="priority", sequences_max=2, block_count=40))
    held = stored(toys, engine, LENGTH)
    ids = []
    for priority in range(6, 0, -1):
        ids.append(engine.add([*held[: 20 * priority], *tokens(60)], 12, priority=priority))
        engine.step()
        engine.step()
    engine.run()
    for request_id in ids:
        assert_right(engine.results[request_id], 12)


# ---- an engine that has nothing else to do


def test_the_tail_of_the_only_request_is_stored_and_the_engine_stops(toys: Toys) -> None:
    """The engine is asked for steps until the last copy is planned, and not longer."""
    engine = toys.start(options())
    prompt = tokens(LENGTH)
    # The last step fills a block, so however late answers come, that one is not yet copied.
    request_id = engine.add(prompt, -LENGTH % BLOCK + 1)
    while request_id in engine.scheduler.requests:
        engine.step()
    assert engine.connector.has_pending_push_work()
    assert engine.scheduler.has_requests()
    engine.run()
    assert not engine.connector.has_pending_push_work()
    toys.rest()
    result = engine.results[request_id]
    prompt = [*prompt, *result.tokens]
    assert found(toys, engine, prompt) == own_hit(len(prompt), len(prompt) - 1)


def test_requests_too_short_to_store(toys: Toys) -> None:
    """Less than a block: no question, no grant, no step beyond the last."""
    engine = toys.start(options())
    before = toys.node.count("lookups.answered")
    for length in (1, 2, BLOCK - 1):
        assert_right(engine.generate(tokens(length)), 1)
        assert not engine.connector.has_pending_push_work()
    assert toys.node.count("lookups.answered") == before


# ---- drafts


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("right", [0, 1, 2, 3])
def test_drafts_are_never_stored(toys: Toys, right: int, is_async: bool) -> None:
    """So many of three drafts are right each time: rejected ones leave KV that is nobody's."""
    engine = toys.start(options(draft_tokens=3, block_count=256, is_async=is_async))
    for length in range(BLOCK, 2 * BLOCK + 2, 3):
        prompt, count = tokens(length), 4 * BLOCK
        known = [*prompt, *generated(prompt, count, VOCABULARY), *tokens(8)]

        def guess(sofar: list[int], known: list[int] = known) -> list[int]:
            behind = known[len(sofar) :]
            return [*behind[:right], *(token ^ 1 for token in behind[right:3])]

        engine.workers[0].guess = guess
        assert_right(engine.generate(prompt, count), count)
        toys.rest()
        assert engine.reset()
        prompt = [*known[: length + count], *tokens(2 * BLOCK)]
        engine.workers[0].guess = lambda sofar: [1, 2, 3]
        result = engine.generate(prompt, 2)
        assert_right(result, 2)
        # The last token is computed where it was the draft behind the one before it.
        least, most = (own_hit(len(prompt), length + count - left) for left in (1, 0))
        assert least <= result.external <= (most if right else least)
        toys.rest()
        assert engine.reset()


@pytest.mark.parametrize("mode", [{}, {"is_async": True}, {"is_async": True, "runs_late": True}])
def test_nothing_is_stored_that_was_not_computed_when_its_request_left(
    toys: Toys, mode: dict[str, Any]
) -> None:
    """The last token was only sampled, drafts were wrong, and a step may be under way."""
    engine = toys.start(options(draft_tokens=3, block_count=256, **mode))
    engine.workers[0].guess = lambda sofar: [1, 2, 3]
    found = 0
    for count in range(1, 2 * BLOCK):
        prompt = tokens(BLOCK)
        request_id = engine.add(prompt, 4 * BLOCK)
        known = engine.results[request_id].tokens
        while len(known) < count:
            engine.step()
        engine.abort(request_id)
        engine.run()
        toys.rest()
        assert engine.reset()
        result = engine.generate([*prompt, *known, *tokens(2 * BLOCK)])
        assert_right(result, 1)
        found += result.external
        toys.rest()
        assert engine.reset()
    assert found >= BLOCK * count


# ---- a small pool


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize(("block_count", "drafts"), [(19, 0), (21, 0), (24, 0), (21, 3)])
def test_a_pool_too_small_for_all(
    toys: Toys, block_count: int, drafts: int, is_async: bool
) -> None:
    """vLLM preempts by itself, again and again; blocks change hands in every step. Drafts need
    room beyond what a load was given."""
    engine = toys.start(options(block_count=block_count, draft_tokens=drafts, is_async=is_async))
    engine.workers[0].guess = lambda sofar: [1, 2, 3][:drafts]
    held = tokens(100)
    engine.generate(held)
    toys.rest()
    preemptions = 0
    for _ in range(5):
        engine.reset()
        ids = [engine.add([*held[: 30 * i], *tokens(40 + i)], 50) for i in range(4)]
        requests = dict(engine.scheduler.requests)
        engine.run()
        preemptions += sum(request.num_preemptions for request in requests.values())
        for request_id in ids:
            assert_right(engine.results[request_id], 50)
        toys.rest()
    assert preemptions > 0


def test_counts_add_up(toys: Toys) -> None:
    """Contract C19: local + external + computed = prompt tokens, failed loads being computed."""
    engine = toys.start(options())
    taken: dict[str, int] = {}
    side = scheduler_of(engine)
    count = side._link.count

    def note(increments: dict[str, int]) -> None:
        for name, increment in increments.items():
            taken[name] = taken.get(name, 0) + increment
        count(increments)

    side._link.count = note
    held, wanted = stored(toys, engine, LENGTH), LENGTH
    for length in (10, 100, LENGTH):
        engine.generate([*held[:length], *tokens(30)], 3)
        wanted += length + 30
        toys.rest()
        if length == 10:
            engine.reset()
    assert sum(value for name, value in taken.items() if name.startswith("tokens.")) == wanted
    assert taken["tokens.external"] > 0
    assert taken["tokens.local"] > 0


class Features:
    """A request with an image, as it comes to `on_new_request`."""

    def __init__(self, identifier: object, salt: object) -> None:
        position = SimpleNamespace(offset=3, length=20)
        self.mm_features = [SimpleNamespace(mm_position=position, identifier=identifier)]
        self.request_id = "image"
        self.kv_transfer_params = self.prompt_embeds = None
        self.lora_request: object = None
        self.resumable = self.skip_reading_prefix_cache = False
        self.cache_salt = salt
        self.all_token_ids = tokens(150)
        self.num_tokens = 150


@pytest.mark.parametrize(
    ("identifier", "salt", "refused"),
    [
        ("x" * CONTENT_ID_BYTES_MAX, "salt", None),
        ("x" * (CONTENT_ID_BYTES_MAX + 1), "salt", MissReason.MULTIMODAL),
        ("\ud800", "salt", MissReason.MULTIMODAL),
        ("", "salt", MissReason.MULTIMODAL),
        (None, "salt", MissReason.MULTIMODAL),
        ("x", 5, MissReason.UNREADABLE),
    ],
)
def test_what_a_caller_names_wrongly_costs_that_request_alone(
    toys: Toys, identifier: object, salt: object, refused: MissReason | None
) -> None:
    """An id of any length may come with an image: it must not turn caching off for all."""
    engine = toys.start(options())
    side = scheduler_of(engine)
    engine.generate(tokens(20))  # so that the session is taken in
    engine.connector.on_new_request(Features(identifier, salt))
    tracker = side._trackers.pop("image")
    side._lookups.drop(tracker)
    assert tracker.no_load == refused
    assert not engine.connector._is_off


def test_an_adapter_that_is_loaded_in_place_is_not_cached(toys: Toys) -> None:
    """The engine may read its files anew at any time, so that nothing tells which bytes it has."""
    engine = toys.start(options())
    side = scheduler_of(engine)
    engine.generate(tokens(20))
    request = Features("x", "salt")
    request.lora_request = LoRARequest("a", 1, "/tmp", load_inplace=True)
    engine.connector.on_new_request(request)
    assert side._trackers.pop("image").no_load is MissReason.ADAPTER_UNKNOWN
    assert side._adapters._thread is None, "it is not even looked for"
