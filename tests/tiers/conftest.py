"""What tests of several tiers are given."""

from pathlib import Path

import pytest


@pytest.fixture
def kv(tmp_path: Path) -> Path:
    """Of a place in a file system; it is not there yet."""
    return tmp_path / "kv"
