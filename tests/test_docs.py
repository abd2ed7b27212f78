"""The pages that are made from the code say everything that is there."""

from pathlib import Path

import pytest

from kvtide.core.reasons import DropReason, MissReason, OffReason
from kvtide.metrics import METRICS

DOCS = Path(__file__).parents[1] / "docs"


@pytest.mark.parametrize("reasons", [OffReason, MissReason, DropReason])
def test_every_reason_is_explained(reasons: type[OffReason]) -> None:
    text = (DOCS / "reasons.md").read_text(encoding="utf-8")
    for reason in reasons:
        rows = [line for line in text.splitlines() if line.startswith(f"| `{reason}` | ")]
        assert rows, reason
        assert all(len(row) > len(f"| `{reason}` |  |") for row in rows)


def test_every_metric_is_explained() -> None:
    text = (DOCS / "metrics.md").read_text(encoding="utf-8")
    for metric in METRICS:
        assert text.count(f"| `{metric.name}` | {metric.kind} |") == 1
