"""The pages that are made from the code say everything that is there."""

import re
from enum import StrEnum
from pathlib import Path

import pytest

from kvtide import bounds
from kvtide.core.host import LAYOUT_REGIONS_MIN, REGION_SLOTS_MIN, Host
from kvtide.core.layout import KVLayout
from kvtide.core.reasons import CutReason, DropReason, MissReason, OffReason
from kvtide.metrics import METRICS
from kvtide.node.main import HOST_BYTES_8B
from kvtide.node.report import LABELS, TIER_LABELS
from kvtide.node.runtime import FIRST_ENGINE_S
from kvtide.units import KiB, format_bytes, parse_bytes
from kvtide.values import CHUNK_TOKENS_DEFAULT

DOCS = Path(__file__).parents[1] / "docs"


@pytest.mark.parametrize("reasons", [OffReason, MissReason, DropReason, CutReason])
def test_every_reason_is_explained(reasons: type[StrEnum]) -> None:
    text = (DOCS / "reasons.md").read_text(encoding="utf-8")
    for reason in reasons:
        rows = [line for line in text.splitlines() if line.startswith(f"| `{reason}` | ")]
        assert rows, reason
        assert all(len(row) > len(f"| `{reason}` |  |") for row in rows)


def test_every_metric_is_explained() -> None:
    text = (DOCS / "metrics.md").read_text(encoding="utf-8")
    for metric in METRICS:
        assert text.count(f"| `{metric.name}` | {metric.kind} |") == 1
        if metric.labels and metric.labels != ("tier",):
            values = (LABELS | TIER_LABELS)[metric.source]
            (row,) = [
                line
                for line in text.splitlines()
                if line.startswith(f"| `{metric.name}` | `{metric.labels[-1]}` |")
            ]
            assert all(f"`{value}`" in row for value in values)


def test_names_of_metrics_end_with_their_unit() -> None:
    """As Prometheus has it: the unit last, and `_total` behind it where the number only grows."""
    for metric in METRICS:
        name = metric.name.removesuffix("_total")
        assert (metric.kind == "counter") == metric.name.endswith("_total"), metric.name
        assert (metric.kind == "histogram") == name.endswith("_seconds"), metric.name
        assert not re.search("_(bytes|seconds|tokens|blocks|records)_", name), metric.name


def test_least_host_that_is_documented_is_the_one_that_is_asked_for() -> None:
    """16 chunks, and the sizes of the two examples, as an engine would come with them."""
    text = (DOCS / "configuration.md").read_text(encoding="utf-8")
    assert f"must hold {LAYOUT_REGIONS_MIN * REGION_SLOTS_MIN} chunks" in text
    for token_bytes, said in ((128 * KiB, "512 MiB"), (512 * KiB, "2 GiB")):
        block_bytes = 16 * token_bytes
        layout = KVLayout(16, CHUNK_TOKENS_DEFAULT, (block_bytes,))
        least = Host(parse_bytes(said.replace(" ", "")), 1).needed_bytes(layout)
        assert format_bytes(least) == said
        assert f"{said} for" in text
        assert f"{token_bytes // KiB} KiB" in text
    assert format_bytes(HOST_BYTES_8B) == "512 MiB"


def test_wait_for_the_first_engine_is_documented() -> None:
    assert f"for {FIRST_ENGINE_S:g} s at least" in (DOCS / "configuration.md").read_text("utf-8")


BOUNDS = {
    "T_lookup": f"{bounds.T_LOOKUP_S * 1000:g} ms",
    "T_answer": f"{bounds.T_ANSWER_MS} ms",
    "heartbeat": f"{bounds.HEARTBEAT_S:g} s",
    "T_load": f"{bounds.T_LOAD_MS / 1000:g} s",
    "T_start": f"{bounds.T_START_MS / 1000:g} s",
    "T_put": f"{bounds.T_PUT_MS / 1000:g} s",
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


def test_what_loading_must_reach_is_what_the_page_says_of_each_model() -> None:
    """Two operations a parameter and token, at 40 % of an H100's 989 TFLOP/s."""
    text = (DOCS / "tiers.md").read_text(encoding="utf-8")
    (table,) = re.findall(r"\| model, KV in 16 bits .*?\n\n", text, re.DOTALL)
    rows = [
        [float(cell.replace(",", "")) for cell in line.split("|")[2:-1]]
        for line in table.strip().splitlines()[2:]
    ]
    assert len(rows) >= 5
    for token_bytes, parameters_1e9, tokens_per_s, gb_per_s in rows:
        assert tokens_per_s == pytest.approx(0.4 * 989e12 / (2e9 * parameters_1e9), rel=0.02)
        assert gb_per_s == pytest.approx(token_bytes * tokens_per_s / 1e9, rel=0.02)
