"""The closed list of reasons: what is documented happens, and nothing else does."""

from enum import StrEnum
from pathlib import Path

import pytest

from kvtide.core import reasons
from kvtide.core.reasons import CutReason, DropReason, MissReason, OffReason

SOURCES = Path(reasons.__file__).parents[1]
REASONS = [reason for kind in (OffReason, MissReason, DropReason, CutReason) for reason in kind]


@pytest.fixture(scope="module")
def source() -> str:
    """All code but the list itself."""
    files = [path for path in SOURCES.rglob("*.py") if path != Path(reasons.__file__)]
    return "".join(path.read_text(encoding="utf-8") for path in files)


@pytest.mark.parametrize("reason", REASONS, ids=repr)
def test_every_reason_is_given_somewhere(source: str, reason: StrEnum) -> None:
    assert f"{type(reason).__name__}.{reason.name}" in source
