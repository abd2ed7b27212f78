"""`kvtide tier test`, as a user runs it."""

import json
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from kvtide.cli import tier as command
from kvtide.cli import trial
from kvtide.testing import object_servers
from kvtide.testing.memory_tier import MemoryTier
from kvtide.tiers.base import Done, LookupJob
from kvtide.tiers.registry import TierType
from kvtide.units import MiB
from tests.cli.runs import Run, one_line
from tests.node.fixtures import StartNode

STEPS = ["opened", "put 8 records", "found all", "got 8 records", "each byte", "deleted"]


def check(output: str) -> None:
    lines = output.splitlines()
    assert [line.startswith(step) for line, step in zip(lines, STEPS, strict=True)] == [True] * 6


@pytest.mark.parametrize("form", ["{}", "file://{}"])
def test_a_shared_directory_is_tried_by_its_path_or_url(
    run: Run, tmp_path: Path, form: str
) -> None:
    """What is deleted is the trial's alone."""
    result = run("tier", "test", form.format(tmp_path / "kv"))
    assert result.exit_code == 0, result.output
    check(result.stdout)
    assert not list((tmp_path / "kv").glob("*/??/*")), "no record is left"


def test_a_bucket_is_tried_by_its_url(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where it is, and with which keys, the environment says; no record is left."""
    with object_servers.running("rclone", tmp_path) as server:
        monkeypatch.setenv("AWS_ENDPOINT_URL", server.endpoint)
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", object_servers.ACCESS_KEY)
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", object_servers.SECRET_KEY)
        result = run("tier", "test", f"s3://{object_servers.BUCKET}/trial")
        assert result.exit_code == 0, result.output
        check(result.stdout)
        top = tmp_path / "data" / object_servers.BUCKET / "trial" / "1"
        assert not [path for path in top.glob("r/**/*") if path.is_file()]
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
        said = one_line(run("tier", "test", f"s3://{object_servers.BUCKET}"))
    assert "SignatureDoesNotMatch" in said


def test_a_tier_of_the_settings_is_tried_by_its_name(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entries = [
        {"type": "disk", "path": str(tmp_path / "disk"), "bytes_max": "256MiB"},
        {"type": "shared_dir", "name": "all", "path": str(tmp_path / "kv"), "bytes_max": "1GiB"},
    ]
    monkeypatch.setenv("KVTIDE_TIERS", json.dumps(entries))
    for name in ("disk", "all"):
        result = run("tier", "test", name)
        assert result.exit_code == 0, result.output
        check(result.stdout)
    said = one_line(run("tier", "test", "dsk"))
    assert said == "Error: no tier of the settings is named 'dsk'; there are: disk, all"


def test_a_place_that_does_not_answer_is_said_to(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A node would take it in later; who tries it wants to know now."""
    monkeypatch.setattr(command.Opening, "wait", lambda _: None)
    said = one_line(run("tier", "test", str(tmp_path / "kv")))
    assert said.endswith("has not answered for 5 s")


def test_a_disk_that_a_node_has_says_so(run: Run, new_node: StartNode, tmp_path: Path) -> None:
    node = new_node(disk_path=tmp_path / "disk", disk_bytes_max="256MiB")
    node.start()
    variables = {"KVTIDE_DISK_PATH": str(tmp_path / "disk"), "KVTIDE_DISK_BYTES_MAX": "256MiB"}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in variables.items():
            patch.setenv(name, value)
        said = one_line(run("tier", "test", "disk"))
    assert f"is used by process {node.pid}; one node may use it at a time" in said


def test_what_nobody_takes_is_refused_in_words(run: Run, tmp_path: Path) -> None:
    said = one_line(run("tier", "test", "gopher://host"))
    assert said.startswith("Error: no tier takes URLs of gopher://; known are ")
    (tmp_path / "file").write_text("x")
    assert "cannot be used" in one_line(run("tier", "test", str(tmp_path / "file")))


class Forgetful(MemoryTier):
    """Forgets what it has taken as soon as that has been told."""

    def poll(self) -> list[Done]:
        ended = super().poll()
        self.clear(None)
        return ended


class Silent(MemoryTier):
    """Takes records, and finds none or gives none."""

    finds = True

    def lookup(self, job: LookupJob) -> None:
        self.fails = True
        super().lookup(job if self.finds else replace(job, keys=b"", digests=b""))


def broken(kind: str) -> MemoryTier:
    """A tier that goes wrong in this way."""
    woken = threading.Event()
    if kind == "forgets":
        return Forgetful(64 * MiB, woken.set)
    if kind.endswith("nothing"):
        silent = Silent(64 * MiB, woken.set)
        silent.finds = kind != "finds nothing"
        return silent
    tier = MemoryTier(MiB if kind == "is small" else 64 * MiB, woken.set)
    tier.fails = kind == "fails"
    if kind == "hangs":
        tier.answers.clear()
    return tier


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("is small", "put: there is no room: the place is full, or its cap too small (no_room)"),
        ("fails", "put: the place did not take it (failed)"),
        ("hangs", "no answer within 0.3 s"),
        ("forgets", "put: the record before it is not kept: it was evicted at once"),
        ("gives nothing", "get: the place did not give it (failed)"),
        ("finds nothing", "look up: 0 of 8 records are found, not 8"),
    ],
)
def test_what_goes_wrong_is_said_in_words(
    run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kind: str, said: str
) -> None:
    monkeypatch.setattr(trial, "STEP_S_MAX", 0.3 if kind == "hangs" else 30.0)
    tier = broken(kind)
    try:
        tier_type = TierType(options=(), open=lambda *_: tier)
        monkeypatch.setattr(command.registry, "load", lambda _: tier_type)
        result = run("tier", "test", str(tmp_path / "kv"))
        assert said in one_line(result)
    finally:
        tier.answers.set()
