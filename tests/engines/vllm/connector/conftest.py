"""Fixtures of the toy engines, and vLLM imported before any test module is."""

import os
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")  # it tells of every reset
with warnings.catch_warnings():
    # Warnings of what vLLM imports are not ours to end.
    warnings.simplefilter("ignore")
    from kvtide.testing.vllm_toy import write_model

from kvtide.engines.vllm import lookups as lookups_side
from kvtide.engines.vllm import stores as stores_side
from kvtide.engines.vllm import worker as worker_side
from tests.engines.vllm.connector.toys import PATIENT_MS, Node, Toys, make_node


@pytest.fixture(scope="module")
def node() -> Iterator[Node]:
    """The node of a module."""
    for made in make_node():
        made.serve()
        yield made


@pytest.fixture(scope="session")
def toy_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The configuration of a tiny model."""
    return write_model(tmp_path_factory.mktemp("toy") / "model")


@pytest.fixture
def toys(node: Node, toy_model: Path) -> Iterator[Toys]:
    """Toy engines; at the end of a test that passed, everything must be at rest and whole."""
    made = Toys(node, toy_model)
    try:
        yield made
        made.check()
    finally:
        made.close()


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bounds that a busy machine does not reach, for tests that are not about them."""
    monkeypatch.setattr(lookups_side, "ANSWER_MS_MAX", PATIENT_MS)
    monkeypatch.setattr(lookups_side, "PENDING_MS_MAX", PATIENT_MS)
    monkeypatch.setattr(stores_side, "ANSWER_MS_MAX", PATIENT_MS)
    monkeypatch.setattr(worker_side, "LOAD_S_MAX", PATIENT_MS / 1000)
