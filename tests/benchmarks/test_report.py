"""What is written down names the machine, and says what was met and what was not."""

import json
import os
from pathlib import Path

from benchmarks.report import Section, machine, write


def a_section() -> Section:
    section = Section("Reuse", "In ms.", ("arm", "TTFT"), [("kvtide", "1.0")])
    section.check("hit", "≤ 2 ms", "1 ms", is_met=True)
    section.check("miss", "≤ 2 ms", "3 ms", is_met=False)
    section.check("few", "≤ 2 ms", "1 ms", is_met=None)
    section.data["values"] = [1.0, 2.0]
    return section


def test_the_machine_is_named_with_its_cores_and_versions() -> None:
    facts = machine()
    assert facts["cores"] == str(len(os.sched_getaffinity(0)))
    assert facts["kernel"] == os.uname().release
    assert {"cpu", "memory", "date", "vllm", "torch", "kvtide", "Python"} <= facts.keys()


def test_a_result_is_written_as_text_and_as_data(tmp_path: Path) -> None:
    write(tmp_path / "results", "engine", "A title", {"cpu": "fast"}, [a_section()])
    text = (tmp_path / "results" / "engine.md").read_text(encoding="utf-8")
    assert text.startswith("# A title\n\n- cpu: fast\n\n## Reuse\n\nIn ms.\n\n| arm | TTFT |\n")
    assert "| hit | ≤ 2 ms | 1 ms | met |" in text
    assert "| miss | ≤ 2 ms | 3 ms | **missed** |" in text
    assert "| few | ≤ 2 ms | 1 ms | open |" in text
    data = json.loads((tmp_path / "results" / "engine.json").read_text(encoding="utf-8"))
    assert data["machine"] == {"cpu": "fast"}
    assert data["sections"][0]["data"] == {"values": [1.0, 2.0]}
    assert data["sections"][0]["checks"][1]["verdict"] == "**missed**"
