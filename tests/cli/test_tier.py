"""`kvtide tier test`, as a user runs it."""

import json
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from kvtide import tier_entries
from kvtide.cli import footprint, trial
from kvtide.cli import tier as command
from kvtide.testing import object_servers
from kvtide.testing.memory_tier import MemoryTier
from kvtide.tiers.base import Done, LookupJob
from kvtide.tiers.registry import TierType
from kvtide.tiers.shared_dir.members import Place
from kvtide.units import MiB
from tests.cli.runs import Run, one_line
from tests.node.fixtures import StartNode
from tests.tiers import disk_place, infinistore_edge
from tests.tiers.disk_place import tails
from tests.tiers.shared_place import driven

ROOT = Path(__file__).resolve().parents[2]

STEPS = ["opened", "put 8 records", "found all", "got 8 records", "each byte", "deleted"]


def check(output: str) -> None:
    lines = output.splitlines()
    assert [line.startswith(step) for line, step in zip(lines, STEPS, strict=True)] == [True] * 6


@pytest.mark.parametrize("form", ["{}", "file://{}"])
def test_a_shared_directory_is_tried_by_its_path_or_url(
    run: Run, tmp_path: Path, form: str
) -> None:
    """And is left as it was found: not there, above it neither."""
    place = tmp_path / "above" / "kv"
    result = run("tier", "test", form.format(place))
    assert result.exit_code == 0, result.output
    check(result.stdout)
    assert result.stdout.startswith(f"opened shared_dir: path {place}\n")
    assert list(tmp_path.iterdir()) == []


def test_of_a_shared_directory_all_stays_that_was_there_or_is_anothers(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One folder is in use, one is free, and one is made and freed with a record meanwhile."""
    (tmp_path / "lost+found").mkdir()
    records = tails(2)
    with driven(tmp_path) as used:
        used.keep(records[:1])
        with driven(tmp_path):
            pass
        before = sorted(tmp_path.iterdir())
        assert run("tier", "test", str(tmp_path)).exit_code == 0
        assert sorted(tmp_path.iterdir()) == before, "the free one was taken, and given back"
        steps = trial.Trial.steps

        def disturbed(own: trial.Trial) -> Iterator[trial.Step]:
            with driven(tmp_path) as other:
                other.keep(records[1:])
            yield from steps(own)

        monkeypatch.setattr(trial.Trial, "steps", disturbed)
        assert run("tier", "test", str(tmp_path)).exit_code == 0
    with driven(tmp_path) as later:
        assert all(later.is_there(record) for record in records)


def test_a_file_that_a_tier_of_another_package_has_made_is_removed(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that was there stays."""
    monkeypatch.syspath_prepend(ROOT / "examples" / "tier_sqlite" / "src")
    monkeypatch.setattr(tier_entries, "installed", lambda: {"sqlite": "kvtide_sqlite:TYPE"})
    for there in ([], [tmp_path / "kv.sqlite"]):
        for path in there:
            path.touch()
        result = run("tier", "test", f"sqlite://{tmp_path / 'kv.sqlite'}")
        assert result.exit_code == 0, result.output
        assert result.stdout.startswith(f"opened sqlite: path {tmp_path / 'kv.sqlite'}\n")
        assert list(tmp_path.iterdir()) == there


@pytest.mark.parametrize(
    ("place", "said"),
    [
        ("file://tmp/kv", "'file://tmp/kv' has 'tmp' in the place of a host, and a path has none"),
        ("file://", "'file://' has '' in the place of a host"),
        ("file:///tmp/a#b", "'file:///tmp/a#b' has more than a path; write ? as %3F and # as %23"),
        ("some/place", "'some/place' is no absolute path, no URL and no name of a tier; write '/"),
        ("file:/tmp/kv", "'file:/tmp/kv' is no absolute path, no URL"),
        ("nope", "no tier of the settings is named 'nope'; none is set (or give an absolute path"),
        ("unix://tmp/x", "url of a tier of type redis: not unix:///path"),
    ],
)
def test_a_place_that_is_none_is_refused_and_nothing_is_made(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str, said: str
) -> None:
    opened: list[object] = []
    monkeypatch.setattr(command, "Opening", opened.append)
    assert said in one_line(run("tier", "test", place))
    assert opened == []


@pytest.mark.parametrize("form", ["{}", "file://{}"])
@pytest.mark.parametrize("holds", ["others", "a disk"])
def test_a_directory_of_something_else_is_not_written_into(
    run: Run, tmp_path: Path, holds: str, form: str
) -> None:
    """Though it holds a folder of 32 hexadecimal digits."""
    path = tmp_path / "place"
    path.mkdir(mode=0o700)
    if holds == "others":
        (path / ("ab" * 16)).mkdir()
        wanted = f"{path} holds '{'ab' * 16}' and is no shared_dir; give a directory that is one"
    else:
        disk_place.keep(path, [])
        wanted = f"shared_dir {path} is the directory of a disk, which one node has alone"
    before = sorted(path.rglob("*"))
    assert wanted in one_line(run("tier", "test", form.format(path)))
    assert sorted(path.rglob("*")) == before


def test_a_node_takes_no_disk_for_a_shared_directory(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the settings say so: as they do in `kvtide serve`."""
    disk_place.keep(tmp_path, [])
    before = sorted(tmp_path.rglob("*"))
    entry = {"type": "shared_dir", "path": str(tmp_path), "bytes_max": "1GiB"}
    monkeypatch.setenv("KVTIDE_TIERS", json.dumps([entry]))
    for arguments in (["tier", "test", "shared_dir"], ["serve"]):
        assert "is the directory of a disk, which one node has" in one_line(run(*arguments))
    assert sorted(tmp_path.rglob("*")) == before


def test_a_mount_that_hangs_is_given_up(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = threading.Event()

    def hang(place: Place) -> set[bytes]:
        answers.wait()
        return set()

    monkeypatch.setattr(footprint, "OPEN_S_MAX", 0.05)
    monkeypatch.setattr(Place, "folders", hang)
    try:
        assert "has not answered for 0.05 s" in one_line(run("tier", "test", str(tmp_path)))
    finally:
        answers.set()


def test_a_bucket_is_tried_by_its_url(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where it is, and with which keys, the environment says; no record is left."""
    with object_servers.running("rclone", tmp_path) as server:
        # rclone fails one of two puts that make one new directory at the same time.
        (tmp_path / "data" / object_servers.BUCKET / "trial" / "1" / "r").mkdir(parents=True)
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
    assert (
        said == "Error: no tier of the settings is named 'dsk'; there are: disk, all (or give"
        " an absolute path, or a URL)"
    )


def test_a_place_that_does_not_answer_is_said_to(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A node would take it in later; who tries it wants to know now."""
    monkeypatch.setattr(command.Opening, "wait", lambda _: None)
    said = one_line(run("tier", "test", str(tmp_path / "kv")))
    assert "has not answered for 5 s; see that it is mounted" in said


def test_a_disk_that_a_node_has_says_so(run: Run, new_node: StartNode, tmp_path: Path) -> None:
    node = new_node(disk_path=tmp_path / "disk", disk_bytes_max="256MiB")
    node.start()
    variables = {"KVTIDE_DISK_PATH": str(tmp_path / "disk"), "KVTIDE_DISK_BYTES_MAX": "256MiB"}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in variables.items():
            patch.setenv(name, value)
        said = one_line(run("tier", "test", "disk"))
    assert f"the disk {tmp_path / 'disk'} is used by process {node.pid}; one node may use" in said


@pytest.mark.long
def test_an_infinistore_server_is_tried_by_its_url(run: Run) -> None:
    """What tells of a clear stays; the next trial is not disturbed by it."""
    with infinistore_edge.edge() as server:
        for _ in range(2):
            result = run("tier", "test", f"infinistore://127.0.0.1:{server.port}")
            assert result.exit_code == 0, result.output
            check(result.stdout)
            assert {name.split(b":")[2] for name in server.values} == {b"life", b"x"}
        assert server.faults == []


def test_what_nobody_takes_is_refused_in_words(run: Run, tmp_path: Path) -> None:
    said = one_line(run("tier", "test", "gopher://host"))
    assert said.startswith("Error: no tier takes URLs of gopher://; known are ")
    (tmp_path / "file").write_text("x")
    said = one_line(run("tier", "test", str(tmp_path / "file")))
    assert "no directory is there, but a file, or a link that leads to none; name a dir" in said
    said = one_line(run("tier", "test", "redis://nowhere.invalid"))
    assert "nowhere.invalid:6379 cannot be reached: " in said
    assert "Errno" not in said


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
