"""Mutants: one function of the product broken on purpose, and the tests that must notice.

tests/mutants.toml has them. Each is an edit of words that stand once in one function; it is made
in a copy of the tree, so what is worked on is never touched. The tests run on that copy, and so do
the processes that they start: all find the package by PYTHONPATH. Tests must be green before the
edit, and one must be red after it; an edit that does not apply any more is a failure, too.

    copy of the tree ─► tests, as it is: green ─► one edit ─► the same tests: red ─► taken back

`scripts/mutants` runs them. tests/simulate/test_findings.py does the same to the whole protocol,
in worlds under faults; what is broken here is seen by the tests of a part.
"""

import argparse
import ast
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

HOUSE = Path(__file__).resolve().parents[1]
TABLE = "tests/mutants.toml"
COPIED = ("src", "tests")
"""What a copy has of its own; the rest of the tree is linked."""
LINKED = ("benchmarks", "changes", "docs", "examples", "requirements", "scripts", ".venv")
TEST_S_MAX = 60
"""For the tests of one mutant; one that makes them hang is found only where it `may_hang`."""


class NotApplicable(Exception):
    """The words of a mutant do not stand exactly once where it says."""


@dataclass(frozen=True, slots=True)
class Mutant:
    """One edit and what must notice it.

    Attributes:
        name: what is broken, in a few words.
        clause: of the contract, which claims it.
        file: below src/kvtide.
        function: its name, behind its class's where it has one: `Class.method`.
        old: words that stand once in it.
        new: what stands there instead.
        tests: ids in pytest, of which one at least must be red.
        may_hang: it also counts as found where its tests do not end in TEST_S_MAX.
    """

    name: str
    clause: str
    file: str
    function: str
    old: str
    new: str
    tests: tuple[str, ...]
    may_hang: bool = False


def mutants(house: Path = HOUSE) -> list[Mutant]:
    """All of the table."""
    table = tomllib.loads((house / TABLE).read_text(encoding="utf-8"))
    return [
        Mutant(name=name, **{**row, "tests": tuple(row["tests"])}) for name, row in table.items()
    ]


@cache
def _functions(text: str) -> dict[str, list[tuple[int, int]]]:
    """First and last line, counted from 1, of the functions of a module, by their names."""
    found: dict[str, list[tuple[int, int]]] = {}

    def look(nodes: Iterable[ast.stmt], before: str) -> None:
        for node in nodes:
            if isinstance(node, ast.ClassDef):
                look(node.body, f"{before}{node.name}.")
            elif isinstance(node, ast.FunctionDef):
                lines = (node.lineno, node.end_lineno or node.lineno)
                found.setdefault(before + node.name, []).append(lines)

    look(ast.parse(text).body, "")
    return found


def edited(text: str, mutant: Mutant) -> str:
    """A module's text with the edit.

    Raises:
        NotApplicable: the function is not there once, its words are not, or nothing would change.
    """
    places = _functions(text).get(mutant.function, [])
    if len(places) != 1:
        raise NotApplicable(f"{mutant.file} has {len(places)} functions {mutant.function}")
    first, last = places[0]
    lines = text.splitlines(keepends=True)
    function = "".join(lines[first - 1 : last])
    count = function.count(mutant.old)
    if count != 1:
        raise NotApplicable(f"its words stand {count} times in {mutant.function}")
    changed = function.replace(mutant.old, mutant.new)
    if ast.dump(ast.parse(text)) == ast.dump(
        ast.parse(made := "".join(lines[: first - 1]) + changed + "".join(lines[last:]))
    ):
        raise NotApplicable("the edit changes nothing")
    return made


@dataclass(frozen=True, slots=True)
class Ran:
    """How a run of tests ended."""

    code: int | None
    """Pytest's; None where time ran out."""
    took_s: float
    output: str

    @property
    def is_green(self) -> bool:
        """All have passed, and there were some."""
        return self.code == 0

    @property
    def is_red(self) -> bool:
        """Some test ran and failed: a run that could not begin shows nothing."""
        return self.code == 1


class Copy:
    """A copy of the tree in which tests run, and edits are made and taken back."""

    def __init__(self, place: Path) -> None:
        self.place = place
        self._green: dict[tuple[str, ...], Ran] = {}
        for name in COPIED:
            shutil.copytree(HOUSE / name, place / name)
        for name in LINKED:
            if (HOUSE / name).exists():
                (place / name).symlink_to(HOUSE / name)
        for path in HOUSE.iterdir():
            if path.is_file():
                shutil.copy2(path, place / path.name)

    @contextmanager
    def broken(self, mutant: Mutant) -> Iterator[None]:
        """The copy has this edit meanwhile."""
        path = self.place / "src" / "kvtide" / mutant.file
        text = path.read_text(encoding="utf-8")
        made = edited(text, mutant)
        try:
            self._write(path, made)
            yield
        finally:
            self._write(path, text)

    def _write(self, path: Path, text: str) -> None:
        """Compiled files go, too: Python tells them by size and second, which edits may share."""
        path.write_text(text, encoding="utf-8")
        for compiled in (path.parent / "__pycache__").glob(f"{path.stem}.*.pyc"):
            compiled.unlink()

    def unedited(self, tests: tuple[str, ...]) -> Ran:
        """These tests on the tree as it is; once for each set."""
        if tests not in self._green:
            self._green[tests] = self.run(tests)
        return self._green[tests]

    def run(self, tests: Sequence[str]) -> Ran:
        """Run tests here, up to the first that is red."""
        kept = {
            name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")
        }
        paths = os.pathsep.join(map(str, (self.place / "src", self.place)))
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider"]
        command += ["--hypothesis-profile", "quick", *tests]
        start_s = time.monotonic()
        with tempfile.TemporaryFile() as output:
            running = subprocess.Popen(
                command,
                cwd=self.place,
                env=kept | {"PYTHONPATH": paths},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            code: int | None = None
            try:
                code = running.wait(TEST_S_MAX)
            except subprocess.TimeoutExpired:
                pass
            finally:
                with suppress(ProcessLookupError):  # the whole session: what tests have started
                    os.killpg(running.pid, signal.SIGKILL)
                running.wait()
            output.seek(0)
            text = output.read().decode(errors="replace")
        return Ran(code, time.monotonic() - start_s, text)


@dataclass(frozen=True, slots=True)
class Verdict:
    """What became of a mutant."""

    mutant: Mutant
    word: str
    """`found`, `survived`, or why neither can be said."""
    detail: str
    took_s: float

    @property
    def is_found(self) -> bool:
        """Tests that were green are red by it."""
        return self.word == "found"


def judged(copy: Copy, mutant: Mutant) -> Verdict:
    """Run the tests of a mutant without and with its edit."""
    try:
        with copy.broken(mutant):
            pass
    except NotApplicable as fault:
        return Verdict(mutant, "does not apply", str(fault), 0.0)
    before = copy.unedited(mutant.tests)
    if not before.is_green:
        tail = " | ".join(before.output.splitlines()[-5:])
        return Verdict(mutant, "not green before", tail, before.took_s)
    with copy.broken(mutant):
        after = copy.run(mutant.tests)
    if after.is_red or (after.code is None and mutant.may_hang):
        word = "found"
    elif after.is_green:
        word = "survived"
    else:
        word = "hangs" if after.code is None else f"ends with {after.code}"
    lines = [line for line in after.output.splitlines() if line.startswith(("FAILED", "ERROR"))]
    tail = lines[:1] or after.output.splitlines()[-1:]
    return Verdict(mutant, word, " ".join(tail)[:160], after.took_s)


def run(chosen: Sequence[Mutant]) -> list[Verdict]:
    """Judge mutants one after the other, in one copy; one line each."""
    verdicts = []
    with tempfile.TemporaryDirectory(prefix="kvtide-mutants-") as place:
        copy = Copy(Path(place))
        for mutant in chosen:
            verdict = judged(copy, mutant)
            verdicts.append(verdict)
            line = f"{verdict.word:9} {verdict.took_s:5.1f} s  {mutant.clause}  {mutant.name}"
            print(line if verdict.is_found else f"{line}: {verdict.detail}", flush=True)
    return verdicts


def sample(count: int, seed: int) -> list[Mutant]:
    """So many of the table, by seed."""
    table = mutants()
    return random.Random(seed).sample(table, min(count, len(table)))


def main(arguments: Sequence[str]) -> int:
    """Run all, some, or those that are named; 0 where each was found."""
    parser = argparse.ArgumentParser(prog="scripts/mutants", description="Test the tests.")
    parser.add_argument(
        "--only", action="append", metavar="NAME", help="this one; may be given again"
    )
    parser.add_argument("--sample", type=int, metavar="N", help="so many, by seed")
    parser.add_argument("--seed", type=int, metavar="S", help="which; otherwise a fresh one")
    given = parser.parse_args(arguments)
    if given.only:
        by_name = {mutant.name: mutant for mutant in mutants()}
        if unknown := [name for name in given.only if name not in by_name]:
            parser.error(f"no mutant is named {', '.join(unknown)}; see {TABLE}")
        chosen = [by_name[name] for name in given.only]
    elif given.sample is not None:
        seed = given.seed if given.seed is not None else random.SystemRandom().randrange(1 << 32)
        print(f"seed {seed}")
        chosen = sample(given.sample, seed)
    else:
        chosen = mutants()
    verdicts = run(chosen)
    missed = [verdict for verdict in verdicts if not verdict.is_found]
    print(f"{len(verdicts) - len(missed)} of {len(verdicts)} mutants were found")
    for verdict in missed:
        mutant = verdict.mutant
        print(f"{verdict.word}: {mutant.name} ({mutant.clause}, {mutant.file} {mutant.function})")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
