"""What `timed.py` writes in the engine's processes, read without importing an engine."""

import json
from pathlib import Path
from typing import Any

REPORTS = "BENCHMARK_HOOK_REPORTS"
"""The variable that names the directory."""

Reports = dict[str, dict[str, Any]]


def read_reports(directory: Path) -> Reports:
    """What each process has reported so far, by its file's name."""
    return {path.name: json.loads(path.read_text()) for path in directory.glob("*.json")}


def hook_us(before: Reports, after: Reports) -> dict[str, float]:
    """Microseconds a step by hook, between two readings; scheduler and one worker together."""
    spent: dict[str, float] = {}
    for name, late in after.items():
        early = before.get(name, {"steps": 0, "times_ns": {}})
        steps = late["steps"] - early["steps"]
        for hook, total_ns in late["times_ns"].items():
            took_ns = total_ns - early["times_ns"].get(hook, 0)
            if steps:
                spent[hook] = spent.get(hook, 0.0) + took_ns / steps / 1000
    return spent
