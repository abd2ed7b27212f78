"""The map of the contract: for every clause tests that are there, for every fault an answer."""

import ast
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from kvtide.testing.mover_suite import MoverTests
from kvtide.testing.tier_suite import TierTests

HOUSE = Path(__file__).parents[1]
TABLE: dict[str, Any] = tomllib.loads((HOUSE / "tests" / "contract.toml").read_text("utf-8"))
CLAUSES = [f"C{number:02}" for number in range(1, 24)]
FAULTS = 187
"""So many were collected; one that is left out would be answered by nobody."""
SUITES: dict[str, type] = {"TierTests": TierTests, "MoverTests": MoverTests}
ANSWERS = {"tests", "never", "open"}


def faults() -> Iterator[tuple[str, dict[str, Any]]]:
    for clause in TABLE.values():
        yield from clause["faults"].items()


@cache
def functions_of(path: Path) -> set[str]:
    """Names of the functions of a module, of the tests among them."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def is_there(test: str) -> bool:
    """Whether pytest would find it."""
    place, _, name = test.rpartition("::")
    if not name.startswith("test_"):
        return False
    if place in SUITES:
        return hasattr(SUITES[place], name)
    path = HOUSE / place
    return path.name.startswith("test_") and path.is_file() and name in functions_of(path)


@pytest.mark.parametrize("name", CLAUSES)
def test_every_clause_is_held_by_tests_that_are_there(name: str) -> None:
    clause = TABLE[name]
    assert clause["title"]
    assert clause["promise"]
    assert clause["tests"], "nothing holds it"
    assert clause.keys() <= {"title", "promise", "tests", "open", "numbers", "faults"}
    assert [test for test in clause["tests"] if not is_there(test)] == []
    assert len(set(clause["tests"])) == len(clause["tests"])


def test_every_fault_is_answered_by_tests_that_are_there_or_a_reason() -> None:
    assert list(TABLE) == CLAUSES
    names = [name for name, _ in faults()]
    assert len(set(names)) == len(names) == FAULTS
    for name, fault in faults():
        assert fault["fault"], name
        answers = fault.keys() - {"fault"}
        assert answers, name
        assert answers <= ANSWERS, name
        assert all(fault[answer] for answer in answers), name
        missing = [test for test in fault.get("tests", ()) if not is_there(test)]
        assert not missing, (name, missing)


@pytest.mark.parametrize(
    "test",
    [
        "tests/core/test_keys.py::test_that_is_no_more",
        "tests/core/test_gone.py::test_names_are_those_that_were_committed",
        "tests/core/test_keys.py::names_elsewhere",
        "tests/core/key_vectors.py::names",
        "TierTests::test_that_is_no_more",
        "test_names_are_those_that_were_committed",
    ],
)
def test_a_test_that_is_not_there_is_seen(test: str) -> None:
    assert not is_there(test)
