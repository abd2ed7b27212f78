"""The pages that are made from the code say everything that is there."""

from pathlib import Path

import pytest

from kvtide import bounds
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


BOUNDS = {
    "T_lookup": f"{bounds.T_LOOKUP_S * 1000:g} ms",
    "T_answer": f"{bounds.T_ANSWER_MS} ms",
    "heartbeat": f"{bounds.HEARTBEAT_S:g} s",
    "T_load": f"{bounds.T_LOAD_MS / 1000:g} s",
    "T_stop": f"node {bounds.T_STOP_S:g} s, connector {bounds.T_STOP_CONNECTOR_S:g} s",
}


@pytest.mark.parametrize("name", BOUNDS)
def test_bounds_of_the_contract_are_those_of_the_code(name: str) -> None:
    text = (DOCS / "words.md").read_text(encoding="utf-8")
    (row,) = [line for line in text.splitlines() if line.startswith(f"| {name} | ")]
    assert row.split(" | ")[-1] == f"{BOUNDS[name]} |"


def test_bounds_of_the_contract_are_all_compared() -> None:
    names = [name for name in vars(bounds) if name.isupper()]
    source = Path(__file__).read_text(encoding="utf-8")
    assert [name for name in names if f"bounds.{name}" not in source] == []
