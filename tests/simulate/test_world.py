"""Worlds by seed: what production code does under faults, and that a seed decides all of it."""

import os
import subprocess
import sys

import pytest

from kvtide.testing.simulate.main import shape_of
from kvtide.testing.simulate.world import Outcome, World

SEEDS = (1, 2, 3)


def run(seed: int) -> Outcome:
    return World(seed, shape_of(seed)).run()


@pytest.mark.parametrize("seed", SEEDS)
def test_a_world_under_faults_keeps_its_laws(seed: int) -> None:
    """Each raises what does not hold; and it is no world in which nothing happens."""
    outcome = run(seed)
    assert outcome.requests > 50
    assert outcome.hit_tokens > 0
    assert outcome.faults


def test_the_same_seed_gives_the_same_log() -> None:
    """Byte for byte of what is sent, in another process with other hashes of text, too."""
    code = (
        "from kvtide.testing.simulate.main import shape_of;"
        "from kvtide.testing.simulate.world import World;"
        "print(World(1, shape_of(1)).run().digest)"
    )
    environment = {**os.environ, "PYTHONHASHSEED": "12345"}
    found = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    assert found.stdout.split()[-1] == run(1).digest


def test_another_seed_gives_another_log() -> None:
    """Else the law above would hold of a log that holds nothing."""
    assert run(2).digest != run(3).digest
