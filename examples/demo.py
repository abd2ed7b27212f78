"""The demo: questions about long texts, each text computed once and then taken from kvtide.

    make demo

A real `vllm serve` (CPU) with SmolLM2-135M-Instruct answers one question about each of four
texts, chapters of Python's own documentation, through the OpenAI API: cold; from the engine's own
prefix cache; from kvtide after the engine's cache was reset; after the engine was stopped and
started anew; from a second engine beside it; and, after everything was killed, from kvtide's disk.
It ends with a table, and with exit code 0 only if kvtide served tokens every time and every answer
equals the one from the engine's own cache.

Everything runs in a directory of its own and is stopped at the end, also on Ctrl-C.
"""

import contextlib
import enum
import itertools
import os
import pydoc_data.topics
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvtide.errors import KVTideError
from kvtide.testing.completions import Completion
from kvtide.testing.node_process import node_pids
from kvtide.testing.nodes import stop_nodes
from kvtide.testing.serving import KVTIDE, SMOLLM2, ServedEngine, environment

ANSWER_TOKENS = 40
RESET_S_MAX = 10.0
WARM_UP_TOKENS = 2500
DISK_BYTES_MAX = "4GiB"
LINGER_S = "300"  # should this program be killed, the node ends by itself after this time
EXTERNAL_HITS = "vllm:external_prefix_cache_hits_total"
SPINNER = "|/-\\"
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass(frozen=True, slots=True)
class Document:
    """A text and a question about it."""

    title: str
    topics: tuple[str, ...]  # of pydoc_data.topics
    tokens: int  # the text is cut there
    question: str


DOCUMENTS = (
    Document("imports", ("import",), 2000, "How does Python find a module that is imported?"),
    Document(
        "sequences", ("typesseq",), 4000, "What is the difference between a list and a tuple?"
    ),
    Document("debugger", ("debugger",), 5000, "How do I set a breakpoint?"),
    Document(
        "format strings", ("formatstrings",), 6000, "How do I print a number as a percentage?"
    ),
)
WARM_UP_TOPICS = ("compound",)


class Stage(enum.Enum):
    """Where the KV cache of a text comes from."""

    COLD = "computed"
    OWN = "engine's own cache"
    RESET = "kvtide: engine's cache reset"
    RESTARTED = "kvtide: engine restarted"
    BESIDE = "kvtide: second engine"
    KILLED = "kvtide: all killed, from disk"


@dataclass(frozen=True, slots=True)
class Asked:
    """One question, answered."""

    document: Document
    stage: Stage
    answer: Completion
    kvtide_tokens: int


class Screen:
    """What the user sees: a line for each thing done, and a spinner where there is a terminal."""

    def __init__(self) -> None:
        self._is_terminal = sys.stdout.isatty()
        self._frames = itertools.cycle(SPINNER)
        self._began_s = time.monotonic()

    def say(self, text: str) -> None:
        """One line."""
        clear = "\r\033[K" if self._is_terminal else ""
        print(f"{clear}{text}", flush=True)

    def end(self) -> None:
        """From a signal's handler: `print` may be in use there, and would refuse."""
        clear = "\r\033[K" if self._is_terminal else ""
        os.write(sys.stdout.fileno(), f"{clear}ending engines and node …\n".encode())

    def tick(self, text: str) -> None:
        """Something goes on; nothing to see in a log."""
        if self._is_terminal:
            print(f"\r\033[K  {next(self._frames)} {text}", end="", flush=True)

    def waiting_for(self, text: str) -> Callable[[float], None]:
        """For `ServedEngine`: ticks with the seconds so far."""
        return lambda elapsed_s: self.tick(f"{text} {elapsed_s:.0f} s")


class Demo:
    """Engines, questions and answers of one run."""

    def __init__(self, directory: Path, screen: Screen) -> None:
        self._directory = directory
        self._screen = screen
        self._messages: dict[Document, list[dict[str, str]]] = {}
        self.runtime_dir = directory / "node"
        self.variables = {
            "KVTIDE_RUNTIME_DIR": str(self.runtime_dir),
            "KVTIDE_LINGER_S": LINGER_S,
            "KVTIDE_DISK_PATH": str(directory / "disk"),
            "KVTIDE_DISK_BYTES_MAX": DISK_BYTES_MAX,
        }
        self.asked: list[Asked] = []

    def run(self) -> None:
        """All stages."""
        with self.engine("engine 1") as engine:
            self.make_texts(engine)
            self.warm_up(engine)
            self.stage(engine, Stage.COLD)
            self.stage(engine, Stage.OWN)
            reset(engine)
            self._screen.say("engine 1 has forgotten its cache (POST /reset_prefix_cache)")
            self.stage(engine, Stage.RESET)
        self._screen.say("engine 1 has ended")
        with self.engine("engine 1, anew") as engine:
            self.warm_up(engine)
            self.stage(engine, Stage.RESTARTED)
            with self.engine("engine 2, beside it") as second:
                self.warm_up(second)
                self.stage(second, Stage.BESIDE)
                for pid in node_pids(self.runtime_dir):
                    os.kill(pid, signal.SIGKILL)
                engine.kill()
                second.kill()
        self._screen.say("node and engines were killed (SIGKILL): what was in memory is gone")
        with self.engine("engine 3") as third:
            self.warm_up(third)
            self.stage(third, Stage.KILLED)

    @contextlib.contextmanager
    def engine(self, name: str) -> Iterator[ServedEngine]:
        """An engine, once kvtide is on in it."""
        began_s = time.monotonic()
        engine = ServedEngine(
            SMOLLM2,
            log=self._directory / f"{name}.log",
            connector=KVTIDE,
            arguments=["--max-model-len", "8192"],
            variables=self.variables,
            on_wait=self._screen.waiting_for(f"{name} starts"),
        )
        with engine:
            said = engine.wait_kvtide()
            took_s = time.monotonic() - began_s
            self._screen.say(f"{name} serves at {engine.address} after {took_s:.0f} s")
            self._screen.say(f"  kvtide on: {said}")
            yield engine

    def make_texts(self, engine: ServedEngine) -> None:
        """Cut each text to its length; the text stands before the question about it."""
        for document in DOCUMENTS:
            text = excerpt(engine, document.topics, document.tokens)
            self._messages[document] = [
                {"role": "system", "content": f"Answer from this text.\n\n{text}"},
                {"role": "user", "content": document.question},
            ]

    def warm_up(self, engine: ServedEngine) -> None:
        """Another text, on every path: whatever happens at first use, happens here."""
        self._screen.tick("warming up")
        text = excerpt(engine, WARM_UP_TOPICS, WARM_UP_TOKENS)
        for _ in range(2):
            for _ in range(2):
                engine.complete(text, ANSWER_TOKENS)
            reset(engine)

    def stage(self, engine: ServedEngine, stage: Stage) -> None:
        """Ask about every text."""
        self._screen.say(f"\n{stage.value}")
        for document in DOCUMENTS:
            self._screen.tick(document.question)
            before = engine.metrics()[EXTERNAL_HITS]
            answer = engine.chat(self._messages[document], ANSWER_TOKENS)
            tokens = int(engine.metrics()[EXTERNAL_HITS] - before)
            self.asked.append(Asked(document, stage, answer, tokens))
            self._screen.say(
                f"  {document.title:<15} {answer.prompt_tokens:>5} tokens, first token after "
                f"{answer.ttft_ms:>6,.0f} ms"
            )
            if stage is Stage.COLD:
                self._screen.say(f"      {document.question}\n      {shorten(answer.text)}")


def excerpt(engine: ServedEngine, topics: Sequence[str], tokens: int) -> str:
    """Chapters of Python's documentation, cut to so many tokens."""
    text = "\n".join(pydoc_data.topics.topics[topic] for topic in topics)
    token_ids = engine.tokenize(text)
    return engine.detokenize(token_ids[:tokens])


def reset(engine: ServedEngine) -> None:
    """Make the engine forget its own cache; it refuses for as long as blocks are in use."""
    until_s = time.monotonic() + RESET_S_MAX
    while not engine.reset_prefix_cache():
        if time.monotonic() > until_s:
            raise KVTideError(f"the engine refused to reset its cache for {RESET_S_MAX:g} s")
        time.sleep(0.05)


def shorten(text: str) -> str:
    """One line of an answer."""
    line = " ".join(text.split())
    return line if len(line) <= 90 else f"{line[:87]}..."


def table(asked: Sequence[Asked]) -> tuple[str, bool]:
    """The result, and whether all is as it should be."""
    by_place = {(one.document, one.stage): one for one in asked}
    lines = [
        f"{'text':<15} {'KV cache from':<29} {'prompt':>7} {'from kvtide':>11} "
        f"{'first token':>11} "
        f"{'speed-up':>8}  answer as from own cache"
    ]
    is_good = True
    for document in DOCUMENTS:
        cold = by_place[document, Stage.COLD].answer
        own = by_place[document, Stage.OWN].answer
        for stage in Stage:
            one = by_place[document, stage]
            is_equal = one.answer.token_ids == own.token_ids
            if stage not in (Stage.COLD, Stage.OWN):
                is_good = is_good and is_equal and one.kvtide_tokens > 0
            lines.append(
                f"{document.title if stage is Stage.COLD else '':<15} {stage.value:<29} "
                f"{one.answer.prompt_tokens:>7,} {one.kvtide_tokens:>11,} "
                f"{one.answer.ttft_ms:>8,.0f} ms {cold.ttft_ms / one.answer.ttft_ms:>7.1f}×  "
                f"{'' if stage in (Stage.COLD, Stage.OWN) else 'equal' if is_equal else 'differs'}"
            )
    return "\n".join(lines), is_good


NOTE = """\
The measure is the answer from the engine's own cache. One that was computed from the first token
on may differ from it, with or without kvtide, since bfloat16 rounds other batch shapes
differently: it is the base of the times alone."""


def end_at_first_signal(screen: Screen, *numbers: signal.Signals) -> None:
    """The first one ends the demo in order, and is answered at once; further ones do not disturb
    that."""

    def end(number: int, frame: object) -> None:
        ignore(*numbers)
        screen.end()
        raise KeyboardInterrupt

    for each in numbers:
        signal.signal(each, end)


def ignore(*numbers: signal.Signals) -> None:
    """From now on nothing disturbs the clearing up."""
    for each in numbers:
        signal.signal(each, signal.SIG_IGN)


def main() -> int:
    """Run, show the table, and leave nothing behind but, after a failure, the logs."""
    screen = Screen()
    end_at_first_signal(screen, *SIGNALS)
    directory = Path(tempfile.mkdtemp(prefix="kvtide-demo-"))
    demo = Demo(directory, screen)
    code = 1
    began_s = time.monotonic()
    try:
        try:
            demo.run()
        finally:
            ignore(*SIGNALS)
            stop_nodes(demo.runtime_dir, environment(**demo.variables))
        text, is_good = table(demo.asked)
        screen.say(f"\n{text}\n\n{NOTE}\n")
        screen.say(
            f"{'all well' if is_good else 'NOT as it should be'}, after "
            f"{time.monotonic() - began_s:.0f} s; all processes have ended"
        )
        code = 0 if is_good else 1
    except KeyboardInterrupt:
        screen.say("interrupted; all processes have ended")
        code = 130
    except KVTideError as error:
        screen.say(f"demo: {error}")
    if code == 1:
        screen.say(f"the engines' logs are in {directory}")
    else:
        shutil.rmtree(directory, ignore_errors=True)
    return code


if __name__ == "__main__":
    sys.exit(main())
