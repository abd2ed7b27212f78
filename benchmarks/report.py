"""Results as people read them (Markdown) and as programs do (JSON), with the machine named."""

import dataclasses
import datetime
import enum
import importlib.metadata
import json
import os
import platform
import re
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from kvtide.units import KiB, format_bytes

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
PACKAGES = ("kvtide", "vllm", "torch", "numpy")


class Verdict(enum.Enum):
    """Whether a budget is met."""

    MET = "met"
    MISSED = "**missed**"
    OPEN = "open"  # not measured, or not exactly enough


@dataclass(frozen=True, slots=True)
class Check:
    """One budget: what was to be reached, and what was."""

    budget: str
    wanted: str
    found: str
    verdict: Verdict


@dataclass(slots=True)
class Section:
    """One table with what must be known to read it."""

    title: str
    text: str
    header: Sequence[str] = ()
    rows: list[Sequence[str]] = field(default_factory=list)
    checks: list[Check] = field(default_factory=list)
    data: dict[str, object] = field(default_factory=dict)  # for the JSON alone

    def check(self, budget: str, wanted: str, found: str, is_met: bool | None) -> None:
        """Note a budget; None where nothing can be said."""
        verdict = Verdict.OPEN if is_met is None else Verdict.MET if is_met else Verdict.MISSED
        self.checks.append(Check(budget, wanted, found, verdict))

    def markdown(self) -> str:
        """The section as text."""
        parts = [f"## {self.title}", self.text]
        if self.rows:
            parts.append(_table(self.header, self.rows))
        if self.checks:
            rows = [(c.budget, c.wanted, c.found, c.verdict.value) for c in self.checks]
            parts.append(_table(("budget", "to reach", "found", ""), rows))
        return "\n\n".join(parts)


def machine() -> dict[str, str]:
    """The machine and the versions, from where each is known."""
    cpu = re.search(r"^model name\s*: (.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    memory = re.search(r"^MemTotal:\s*(\d+) kB$", Path("/proc/meminfo").read_text(), re.MULTILINE)
    return {
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "cpu": cpu[1] if cpu else platform.machine(),
        "cores": str(len(os.sched_getaffinity(0))),
        "memory": format_bytes(int(memory[1]) * KiB) if memory else "unknown",
        "kernel": platform.release(),
        "load average before": f"{os.getloadavg()[0]:.2f}",
        "Python": platform.python_version(),
        **{name: _version(name) for name in PACKAGES},
        "commit": _commit(),
    }


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _commit() -> str:
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty=, changed"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "none"


def write(
    directory: Path,
    name: str,
    title: str,
    facts: Mapping[str, str],
    sections: Sequence[Section],
) -> None:
    """Write NAME.md and NAME.json."""
    directory.mkdir(parents=True, exist_ok=True)
    lines = [f"# {title}", "", *(f"- {key}: {value}" for key, value in facts.items()), ""]
    text = "\n".join(lines) + "\n" + "\n\n".join(section.markdown() for section in sections)
    (directory / f"{name}.md").write_text(text + "\n", encoding="utf-8")
    data = {
        "title": title,
        "machine": dict(facts),
        "sections": [dataclasses.asdict(section) for section in sections],
    }
    text = json.dumps(data, indent=1, default=_plain, ensure_ascii=False)
    (directory / f"{name}.json").write_text(text + "\n", encoding="utf-8")


def _plain(value: object) -> object:
    """What JSON has no word for."""
    if isinstance(value, enum.Enum):
        return value.value
    raise TypeError(f"{value!r} cannot be written as JSON")


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)
