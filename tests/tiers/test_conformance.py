"""Every tier is held to the shipped suite; one that is not is named."""

import importlib
from pathlib import Path

import pytest

from kvtide.testing.memory_tier import MemoryTier
from kvtide.testing.tier_suite import TierTests, tiers_without_tests
from kvtide.tiers.disk.tier import DiskTier
from tests.tiers import test_disk

MADE_UP = """
from kvtide.testing.memory_tier import MemoryTier
from kvtide.tiers.base import Tier

class Shelf(MemoryTier): ...

class Drawer:
    def lookup(self, job): ...
"""


@pytest.fixture(scope="module", autouse=True)
def _all_suites() -> None:
    """Import what is collected from this folder, also where this file is run alone."""
    for path in Path(__file__).parent.glob("test_*.py"):
        importlib.import_module(f"tests.tiers.{path.stem}")


def test_every_tier_is_tested_by_the_suite() -> None:
    assert tiers_without_tests() == []


def test_a_tier_that_nobody_tests_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Below a folder, as the disk is. What it imports, and what is no tier, is not named."""
    folder = tmp_path / "made_up_tiers" / "shelf"
    folder.mkdir(parents=True)
    for package in (folder, folder.parent):
        (package / "__init__.py").touch()
    (folder / "tier.py").write_text(MADE_UP)
    monkeypatch.syspath_prepend(tmp_path)
    made_up = importlib.import_module("made_up_tiers")
    assert tiers_without_tests(made_up) == ["made_up_tiers.shelf.tier.Shelf"]


def test_a_suite_that_pytest_does_not_collect_does_not_count(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """pytest goes by the name of a class."""

    class DiskTierTests(TierTests):
        tier_type = DiskTier

    monkeypatch.setattr(test_disk.TestDiskTier, "tier_type", MemoryTier)
    assert DiskTierTests in TierTests.__subclasses__()
    assert tiers_without_tests() == ["kvtide.tiers.disk.tier.DiskTier"]


def test_a_suite_that_makes_another_tier_than_it_names_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert test_disk.TestDiskTier.tier_type is DiskTier
    monkeypatch.setattr(test_disk.TestDiskTier, "tier_type", int)
    suite = test_disk.TestDiskTier()
    suite.begin(tmp_path)
    with pytest.raises(AssertionError, match="is no <class 'int'>"):
        suite.start()
    suite.end()
