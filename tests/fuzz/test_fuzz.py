"""All that reads bytes of others keeps its promise of any: what broke once, and a little more.

`scripts/fuzz` goes on for as long as one likes.
"""

import contextlib
import secrets
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtide.codec import passing
from kvtide.codec import record as codec
from tests.fuzz.fuzzing import Check, Report, Target, for_seconds, fuzz, kept
from tests.fuzz.targets import TARGETS

SECONDS = 5.0
INPUTS_MIN = {"disk": 10, "shared_dir": 10}
ANSWERS_MIN = 3


@pytest.mark.parametrize("name", TARGETS)
def test_what_broke_once_is_well(name: str) -> None:
    """Three inputs that are right, or nearly, and all of the corpus."""
    target = TARGETS[name]
    with target.opened() as check:
        for data in (*target.seeds()[:3], *kept(target)):
            check(data)


@pytest.mark.long
@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", TARGETS)
def test_bytes_that_are_nearly_right_break_nothing(name: str, tmp_path: Path) -> None:
    seed = secrets.randbits(32)
    report = fuzz(TARGETS[name], seed, until=for_seconds(SECONDS), corpus=tmp_path)
    assert not report.fault, f"seed {seed}, input {report.found!r}:\n{report.fault}"
    assert report.inputs >= INPUTS_MIN.get(name, 500)
    assert len(report.answers) >= ANSWERS_MIN


# ---- the fuzzer finds


def test_what_breaks_is_found_made_small_and_kept(tmp_path: Path) -> None:
    """Two bytes far from one another, the second of which is only looked at behind the first."""

    @contextlib.contextmanager
    def opened() -> Iterator[Check]:
        def check(data: bytes) -> str:
            if b"\x80" not in data:
                return "nothing"
            assert b"END" not in data
            return "half"

        yield check

    target = Target("planted", lambda: [bytes(100)], opened, (b"END",))

    def until(report: Report) -> bool:
        return report.inputs >= 20_000

    report = fuzz(target, 1, until=until, corpus=tmp_path)
    assert report.fault
    assert report.found is not None
    assert sorted(report.found) == sorted(b"\x80END")
    assert kept(target, tmp_path) == [report.found]


@pytest.mark.long
@pytest.mark.parametrize("name", ["disk", "shared_dir"])
def test_checksums_that_nobody_looks_at_are_found(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The twin: without them a changed byte is loaded, and that shows."""
    for module in (codec, passing):
        monkeypatch.setattr(module, "require_checksum", lambda *_: None)
    report = fuzz(TARGETS[name], 1, until=for_seconds(60), corpus=tmp_path)
    assert report.fault
