"""Multi-round chat of users whose KV together exceeds the engine's cache several times.

Each user has a history of random words; in every round it asks something new and gets an answer,
both of which become history. By the time a user comes again, the others have pushed it out of the
engine's own cache. All arms live at once and take turns round by round, the others idle.

The noise floor is an arm against itself: of one round, users of odd number against those of even
number, whose chats are as long and whose places in the round are drawn at random.
"""

import random
import statistics
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from benchmarks.arms import Arm, serve
from benchmarks.prompts import Prompts
from benchmarks.report import Section
from benchmarks.stats import ratios, rotated, spread
from kvtide.testing.completions import Completion
from kvtide.testing.serving import ServedEngine

ARMS = (Arm.NONE, Arm.OWN, Arm.LMCACHE, Arm.KVTIDE)
BLOCK_TOKENS = 128


@dataclass(frozen=True, slots=True)
class Size:
    """How large the chat is."""

    users: int
    rounds: int
    history_tokens: int
    question_tokens: int
    answer_tokens: int
    at_once: int  # users being answered at the same time
    engine_blocks: int  # of the engine's own cache

    @property
    def engine_tokens(self) -> int:
        """What the engine's own cache holds."""
        return (self.engine_blocks - 1) * BLOCK_TOKENS  # vLLM keeps one for itself

    @property
    def tokens_at_end(self) -> int:
        """What all users' chats come to."""
        each = self.question_tokens + self.answer_tokens
        return self.users * (self.history_tokens + self.rounds * each)


FULL = Size(8, 5, 2000, 60, 40, at_once=2, engine_blocks=48)
QUICK = Size(4, 2, 1000, 60, 16, at_once=2, engine_blocks=24)
QUICK_ARMS = (Arm.OWN, Arm.KVTIDE)


@dataclass(frozen=True, slots=True)
class Answer:
    """One request of one user."""

    round_number: int
    ttft_ms: float
    total_ms: float
    prompt_tokens: int
    cached_tokens: int


@dataclass(slots=True)
class Chat:
    """One arm's copy of all chats; equal ones at the start."""

    histories: list[list[int]]
    answers: list[Answer]
    took_s: list[float]  # of each round


def run(size: Size, arms: Sequence[Arm] = ARMS) -> Section:
    """Measure, and make a section of it."""
    arguments = ("--num-gpu-blocks-override", str(size.engine_blocks))
    # A longest request that the engine's cache cannot hold is refused at the start.
    with serve(arms, "--max-model-len", str(size.engine_tokens), *arguments) as engines:
        chats = _measure(size, engines)
    return _section(size, chats)


def _measure(size: Size, engines: Mapping[Arm, ServedEngine]) -> dict[Arm, Chat]:
    prompts = Prompts(next(iter(engines.values())).tokenize, seed=2)
    for engine in engines.values():  # code and memory are used for the first time here
        for _ in range(2):
            engine.complete(prompts.make(size.history_tokens), 2, ignore_eos=True)
    histories = [prompts.make(size.history_tokens) for _ in range(size.users)]
    chats = {arm: Chat([list(one) for one in histories], [], []) for arm in engines}
    for number in range(size.rounds):
        print(f"  chat: round {number + 1} of {size.rounds}", flush=True)
        questions = [prompts.make(size.question_tokens) for _ in range(size.users)]
        for arm in rotated(tuple(engines), number):
            for engine in engines.values():
                engine.wait_idle()
            _round(size, engines[arm], chats[arm], number, questions)
    return chats


def _round(
    size: Size, engine: ServedEngine, chat: Chat, number: int, questions: list[list[int]]
) -> None:
    """Every user asks once, in an order that differs from round to round but not between arms."""
    order = _order(size.users, number)

    def ask(user: int) -> Completion:
        chat.histories[user] += questions[user]
        return engine.complete(chat.histories[user], size.answer_tokens, ignore_eos=True)

    began_s = time.perf_counter()
    with ThreadPoolExecutor(size.at_once) as pool:
        answers = list(pool.map(ask, order))
    chat.took_s.append(time.perf_counter() - began_s)
    for user, answer in zip(order, answers, strict=True):
        chat.histories[user] += answer.token_ids
        chat.answers.append(
            Answer(
                number,
                answer.ttft_ms,
                answer.total_ms,
                answer.prompt_tokens,
                answer.cached_tokens,
            )
        )


def _order(users: int, round_number: int) -> list[int]:
    """Who asks first, second, …"""
    order = list(range(users))
    random.Random(round_number).shuffle(order)
    return order


def _section(size: Size, chats: Mapping[Arm, Chat]) -> Section:
    times = size.tokens_at_end / size.engine_tokens
    section = Section(
        title="Multi-round chat",
        text=f"{size.users} users, {size.rounds} rounds, {size.at_once} at once; histories of "
        f"{size.history_tokens} tokens, questions of {size.question_tokens}, answers of "
        f"{size.answer_tokens}. The chats come to {size.tokens_at_end} tokens, {times:.1f} times "
        "the engine's own cache. From the second round on: TTFT in ms, median and middle half; "
        "tokens that were not computed again; seconds for a round of all users. Noise: TTFT of "
        "users of odd number against those of even number in the same round, the median ratio "
        "with its 95 % interval: an arm against itself.",
        header=(
            *("arm", "TTFT", "90th percentile", "tokens hit", "round", "TTFT against no cache"),
            "noise",
        ),
    )
    later = {
        arm: [answer for answer in chat.answers if answer.round_number > 0]
        for arm, chat in chats.items()
    }
    base = later.get(Arm.NONE)
    for arm, answers in later.items():
        ttfts_ms = [answer.ttft_ms for answer in answers]
        hit = sum(answer.cached_tokens for answer in answers)
        share = hit / sum(answer.prompt_tokens for answer in answers)
        gain = _median_ttft_ms(base) / _median_ttft_ms(answers) if base else 1.0
        section.rows.append(
            (
                *(arm.value, str(spread(ttfts_ms))),
                f"{statistics.quantiles(ttfts_ms, n=10, method='inclusive')[-1]:.1f}",
                f"{share:.1%}",
                f"{statistics.median(chats[arm].took_s[1:]):.1f}",
                f"{gain:.1f} times faster" if base else "",
                _noise(size.users, answers),
            )
        )
    section.data["answers"] = {arm.value: chat.answers for arm, chat in chats.items()}
    section.data["round_s"] = {arm.value: chat.took_s for arm, chat in chats.items()}
    return section


def _noise(users: int, answers: Sequence[Answer]) -> str:
    """Neighbours by number, in each round; answers stand in the order in which users asked."""
    ttfts_ms: dict[tuple[int, int], float] = {}
    for number in {answer.round_number for answer in answers}:
        of_round = [answer.ttft_ms for answer in answers if answer.round_number == number]
        for user, ttft_ms in zip(_order(users, number), of_round, strict=True):
            ttfts_ms[number, user] = ttft_ms
    keys = sorted(ttfts_ms)
    return ratios(
        [ttfts_ms[key] for key in keys[1::2]], [ttfts_ms[key] for key in keys[::2]]
    ).percent()


def _median_ttft_ms(answers: Sequence[Answer]) -> float:
    return statistics.median(answer.ttft_ms for answer in answers)
