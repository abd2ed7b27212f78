"""The loop of a fuzzer: change an input, look whether its reader keeps its promise, and keep what
it answered in a way that was not seen before.

A target's `check` raises where the promise is broken. What it returns, a word for how the input
was read or refused (which line of which module raised, say), stands for coverage: an input with a
word of its own is changed further. What is found is made as small as it goes, and kept in
`tests/fuzz/corpus`, which the quick tests read.
"""

import hashlib
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path

from tests.fuzz.mutating import Mutator

CORPUS = Path(__file__).parent / "corpus"
POOL_MAX = 2_000
"""Inputs that are changed further."""
SMALLER_TRIES = 400
"""Inputs that are tried to make one that broke a reader smaller."""

Check = Callable[[bytes], str]


@dataclass(frozen=True, slots=True)
class Target:
    """What is fuzzed.

    Attributes:
        name: also that of its folder in the corpus.
        seeds: inputs that are right, or nearly.
        opened: whatever its checks need, and the check itself.
        words: what its reader looks for.
    """

    name: str
    seeds: Callable[[], Sequence[bytes]]
    opened: Callable[[], AbstractContextManager[Check]]
    words: Sequence[bytes] = ()


@dataclass(slots=True)
class Report:
    """What came of it: how many inputs, how many answers that differ, and what broke."""

    inputs: int = 0
    answers: set[str] = field(default_factory=set)
    found: bytes | None = None
    fault: str = ""


def where(error: BaseException) -> str:
    """A word for an error: what it is, and which line raised it."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__} {Path(last.filename).name}:{last.lineno}"


def kept(target: Target, corpus: Path = CORPUS) -> list[bytes]:
    """What broke this target once."""
    return [path.read_bytes() for path in sorted((corpus / target.name).glob("*"))]


def fuzz(
    target: Target, seed: int, *, until: Callable[[Report], bool], corpus: Path = CORPUS
) -> Report:
    """Change inputs until it is time, or one breaks the promise: it is kept then."""
    report = Report()
    with target.opened() as check:
        for data in _inputs(target, seed, report, corpus):
            report.inputs += 1
            try:
                report.answers.add(check(data))
            except Exception as error:
                report.found = _smallest(check, data, type(error))
                report.fault = "".join(traceback.format_exception(error))
                folder = corpus / target.name
                folder.mkdir(parents=True, exist_ok=True)
                name = hashlib.sha256(report.found).hexdigest()[:16]
                (folder / name).write_bytes(report.found)
                return report
            if until(report):
                return report
    raise AssertionError("inputs never end")


def for_seconds(seconds: float) -> Callable[[Report], bool]:
    """For `fuzz`: until so much time has passed, whatever happens."""
    end_s = time.monotonic() + seconds
    return lambda _: time.monotonic() >= end_s


def _inputs(target: Target, seed: int, report: Report, corpus: Path) -> Iterator[bytes]:
    """First those that are there, then changed ones; of these, what was new goes on."""
    pool = [*target.seeds(), *kept(target, corpus)]
    yield from list(pool)
    mutator = Mutator(seed, target.words)
    while True:
        before = len(report.answers)
        data = mutator.changed(mutator.draw.choice(pool), mutator.draw.choice(pool))
        yield data
        if len(report.answers) > before and len(pool) < POOL_MAX:
            pool.append(data)


def _smallest(check: Check, data: bytes, fault: type[Exception]) -> bytes:
    """Leave out what is not needed for a fault of this kind."""
    step, tries = max(1, len(data) // 2), 0
    while step and tries < SMALLER_TRIES:
        at = 0
        while at < len(data) and tries < SMALLER_TRIES:
            shorter = data[:at] + data[at + step :]
            tries += 1
            if _breaks(check, shorter, fault):
                data = shorter
            else:
                at += step
        step //= 2
    return data


def _breaks(check: Check, data: bytes, fault: type[Exception]) -> bool:
    try:
        check(data)
    except Exception as error:
        return isinstance(error, fault)
    return False
