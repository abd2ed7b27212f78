"""The tests are tested: every mutant applies and names what is there; some, by seed, are found."""

import ast
import secrets
from functools import cache

import pytest

from tests.mutants import HOUSE, Mutant, NotApplicable, edited, mutants, run, sample
from tests.test_contract import SUITES, TABLE, is_there

MUTANTS_MIN = 60
SUITE_OF = {"tiers": "TierTests", "movers": "MoverTests"}
"""The suite that test classes below these folders of tests are held to."""


@cache
def claimed(clause: str) -> set[str]:
    """The tests that hold a clause, those of its faults among them."""
    faults = TABLE[clause]["faults"].values()
    return {test for one in (TABLE[clause], *faults) for test in one.get("tests", ())}


@cache
def classes_in(place: str) -> set[str]:
    """Test classes of a module."""
    body = ast.parse((HOUSE / place).read_text(encoding="utf-8")).body
    return {node.name for node in body if isinstance(node, ast.ClassDef)}


def test_there_are_enough_and_no_clause_is_without() -> None:
    every = mutants()
    assert len(every) >= MUTANTS_MIN
    assert {mutant.clause for mutant in every} == TABLE.keys()


@pytest.mark.parametrize("mutant", mutants(), ids=lambda mutant: mutant.name)
def test_a_mutant_applies_and_its_tests_hold_its_clause(mutant: Mutant) -> None:
    path = HOUSE / "src" / "kvtide" / mutant.file
    compile(edited(path.read_text(encoding="utf-8"), mutant), mutant.file, "exec")
    assert mutant.tests
    for test in mutant.tests:
        place, *group, name = test.split("::")
        named = test
        if group:
            assert group[0] in classes_in(place), test
            named = f"{SUITE_OF[place.split('/')[1]]}::{name}"
            assert named.split("::")[0] in SUITES
        assert is_there(named), test
        assert named in claimed(mutant.clause), f"{mutant.clause} does not name {named}"


TEXT = "def f(a):\n    return a + 1\n\n\ndef g(a):\n    return a + 1\n"


def mutant_of(function: str, old: str, new: str) -> Mutant:
    return Mutant("one", "C01", "some.py", function, old, new, ())


def test_an_edit_is_made_in_its_function_alone() -> None:
    assert edited(TEXT, mutant_of("g", "a + 1", "a")) == TEXT[:-5] + "\n"


@pytest.mark.parametrize(
    "mutant",
    [
        mutant_of("h", "a + 1", "a"),
        mutant_of("g", "a + 2", "a"),
        mutant_of("g", "a", "b"),
        mutant_of("g", "a + 1", "a  +  1"),
    ],
    ids=["no function", "no words", "words twice", "nothing changes"],
)
def test_an_edit_that_does_not_apply_is_seen(mutant: Mutant) -> None:
    with pytest.raises(NotApplicable):
        edited(TEXT, mutant)


@pytest.mark.long
@pytest.mark.timeout(300)  # two runs of tests for each; most take a second
def test_ten_mutants_by_seed_are_found() -> None:
    seed = secrets.randbits(32)
    print(f"seed {seed}")
    verdicts = run(sample(10, seed))
    missed = [(one.word, one.mutant.name, one.detail) for one in verdicts if not one.is_found]
    assert not missed, f"of scripts/mutants --sample 10 --seed {seed}"
