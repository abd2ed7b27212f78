"""Tiers of other packages: the worked example in a real node, and packages that are broken."""

import json
import logging
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from kvtide import config, tier_values
from kvtide.errors import ConfigError
from kvtide.node import build
from kvtide.testing.fake_engine import FakeEngine, Loaded, make_tokens
from kvtide.testing.node_process import NodeProcess
from kvtide.tiers import registry
from kvtide.wire.command import ask
from tests.node.fixtures import StartNode
from tests.node.test_engines import check_sums, idle, wait_status

EXAMPLE = Path(__file__).parents[2] / "examples" / "tier_sqlite"
TOKENS = make_tokens(16 * 10, seed=1)  # two chunks and a tail of two blocks
OTHER_TOKENS = make_tokens(16 * 10, seed=2)
SECRET = "hunter2-and-more"


def install(site: Path, name: str, points: dict[str, str]) -> None:
    """What an installer leaves of a package's entry points."""
    info = site / f"{name}-0.1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 0.1.0\n")
    lines = [f"{point} = {value}\n" for point, value in points.items()]
    (info / "entry_points.txt").write_text("[kvtide.tiers]\n" + "".join(lines))


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory that this process and the nodes that it starts import from."""
    site = tmp_path / "site"
    site.mkdir()
    monkeypatch.syspath_prepend(str(site))
    paths = [str(site), *filter(None, [os.environ.get("PYTHONPATH")])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))
    return site


@pytest.fixture
def example(site: Path) -> None:
    """The example, as its own metadata says that it is installed."""
    project = tomllib.loads((EXAMPLE / "pyproject.toml").read_text())["project"]
    install(site, "kvtide_sqlite", project["entry-points"]["kvtide.tiers"])
    (site / "kvtide_sqlite").symlink_to(EXAMPLE / "src" / "kvtide_sqlite")


UNNAMED = """
from kvtide.tier_entries import Option
from kvtide.tiers.registry import TierType

class Unnamed:
    __slots__ = ()

OPTIONS = tuple(Option(name, str, "", "", default="") for name in ("path", "bytes_max"))
TYPE = TierType(options=OPTIONS, open=lambda *_: Unnamed())
"""
"""A tier that does not take its name."""


def entry(tmp_path: Path, **more: object) -> dict[str, object]:
    """An entry for it."""
    path = str(tmp_path / "kv.sqlite")
    return {"type": "sqlite", "path": path, "bytes_max": "256MiB"} | more


def read(*entries: dict[str, object]) -> config.Config:
    return config.read(environ={"KVTIDE_TIERS": json.dumps(entries)})


@pytest.mark.long
def test_the_example_keeps_every_promise_of_a_tier() -> None:
    """By its own tests, as its author runs them."""
    paths = [str(EXAMPLE / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests"]
    done = subprocess.run(
        command, cwd=EXAMPLE, env=environment, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.usefixtures("example")
def test_a_node_keeps_what_it_holds_in_a_tier_of_another_package(
    new_node: StartNode, tmp_path: Path
) -> None:
    """Behind a disk, with a name of its own; the next node finds it there without the disk."""
    disk = {"type": "disk", "path": str(tmp_path / "disk"), "bytes_max": "256MiB"}
    node = new_node(tiers=json.dumps([disk, entry(tmp_path, name="lite")]))
    node.start()
    with FakeEngine(node.places, "one") as engine:
        assert engine.store(TOKENS).written == 3
        for name in ("disk", "lite"):
            wait_status(node, lambda status, name=name: status["tiers"][name]["records"] == 3)
        node.end()
    node = new_node(tiers=json.dumps([entry(tmp_path, name="lite")]))
    node.start()
    with FakeEngine(node.places, "two") as engine:
        assert engine.load(TOKENS) == Loaded(10, 10)
        status = wait_status(node, idle)
        check_sums(status)
        assert status["counts"]["tier_loads.lite.loaded"] == 3
        assert list(status["tiers"]) == ["lite"]


@pytest.mark.usefixtures("example")
def test_options_of_another_package_are_checked_when_it_is_loaded(tmp_path: Path) -> None:
    """Settings are read without it: engines read them too."""
    node = read(entry(tmp_path, pth="/x")).node
    with pytest.raises(ConfigError, match=r"type sqlite has no 'pth'; did you mean path"):
        build.open_tiers(node, 1 << 30, build.Way.FOREGROUND, lambda: None)
    [opened] = build.open_tiers(node, 1 << 30, build.Way.LAUNCHED, lambda: None)
    opened.tier.tick(1_000)
    assert "did you mean path" in opened.tier.statistics().state
    opened.tier.close(1)


@pytest.mark.usefixtures("example")
def test_values_for_another_package_are_not_shown_where_it_is_not_loaded(tmp_path: Path) -> None:
    found = read(entry(tmp_path, url=f"x://u:{SECRET}@host"))
    (shown,) = [one.value for one in found.effective if one.name == "tiers"]
    assert shown == "sqlite: path given, bytes_max given, url given"
    assert SECRET not in repr(found)


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("import nothing_of_this_name", "ModuleNotFoundError: No module named 'nothing_of"),
        ("1 / 0", "ZeroDivisionError"),
        ("TYPE = 7", "broken_tier:TYPE is no kvtide TierType"),
        ("", "has no attribute 'TYPE'"),
        (UNNAMED, "AttributeError"),
    ],
)
def test_a_package_that_cannot_be_used_costs_its_tier(
    site: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, code: str, said: str
) -> None:
    """Whoever serves in the foreground is told; a node that an engine started goes without it."""
    install(site, "broken_tier", {"broken": "broken_tier:TYPE"})
    (site / "broken_tier.py").write_text(code)
    node = read(entry(tmp_path, type="broken")).node
    try:
        with pytest.raises(ConfigError, match=said):
            build.open_tiers(node, 1 << 30, build.Way.FOREGROUND, lambda: None)
        with caplog.at_level(logging.WARNING):
            [opened] = build.open_tiers(node, 1 << 30, build.Way.LAUNCHED, lambda: None)
            opened.tier.tick(1_000)
        assert "goes without the tier broken until it can be" in caplog.text
        assert said in opened.tier.statistics().state
        opened.tier.close(1)
    finally:
        sys.modules.pop("broken_tier", None)


FAULTY = """
from dataclasses import replace
from kvtide_sqlite import TYPE as SQLITE

def open_faulty(*arguments):
    tier = SQLITE.open(*arguments)
    load = tier.load

    def faulty_load(job):
        load(job)
        tier.poll = lambda: 1 // 0

    tier.load = faulty_load
    return tier

TYPE = replace(SQLITE, open=open_faulty)
"""
"""A tier that takes a load, and then fails in a call that has nothing to do with it."""


@pytest.mark.usefixtures("example")
def test_a_fault_in_another_package_costs_its_tier_and_not_the_node(
    new_node: StartNode, site: Path, tmp_path: Path
) -> None:
    """What waits for it is answered in time; the cells that it was lent are accounted for."""
    install(site, "faulty_tier", {"faulty": "faulty_tier:TYPE"})
    (site / "faulty_tier.py").write_text(FAULTY)
    tiers = json.dumps([entry(tmp_path, type="faulty", name="lite")])
    node = new_node(tiers=tiers)
    node.start()
    with FakeEngine(node.places, "one") as engine:
        engine.keep(TOKENS)
        wait_status(node, lambda status: status["tiers"]["lite"]["records"] == 3)
        node.end()
    node = new_node(tiers=tiers)
    node.start()
    pid = node.pid
    with FakeEngine(node.places, "two") as engine:
        assert engine.load(TOKENS) == Loaded(0, 0)
        status = node.status()
        assert "ZeroDivisionError" in status["tiers"]["lite"]["state"]
        assert status["host"]["storing_bytes"], "still lent to the tier"
        engine.keep(OTHER_TOKENS)
        assert engine.load(OTHER_TOKENS) == Loaded(10, 10)
        assert ask(node.places, "check")["entries"]
    assert node.status()["node"]["pid"] == pid
    assert node.log().count("a fault in tier lite") == 1


def test_a_package_that_hangs_does_not_keep_a_node_from_serving(
    site: Path, tmp_path: Path, runtime_dir: Path
) -> None:
    install(site, "stuck_tier", {"stuck": "stuck_tier:TYPE"})
    (site / "stuck_tier.py").write_text("import threading\nthreading.Event().wait()\n")
    tiers = json.dumps([entry(tmp_path, type="stuck")])
    with NodeProcess(runtime_dir, host_bytes="64MiB", tiers=tiers) as node:
        assert node.status()["tiers"]["stuck"]["state"] == "being opened"
        assert "has not answered for 5 s" in node.log()


def test_another_package_cannot_take_the_name_of_a_type_of_ours(site: Path) -> None:
    install(site, "impostor", {"disk": "impostor:TYPE"})
    assert registry.references()["disk"] == registry.BUILT_IN["disk"]
    assert registry.load("disk").options


@pytest.mark.parametrize("name", registry.BUILT_IN)
def test_every_type_of_ours_can_be_loaded(name: str) -> None:
    """And what its entries may say is what settings are read by."""
    assert registry.load(name).options is tier_values.BUILT_IN[name]


HANGING = """
from dataclasses import replace
from threading import Event
from kvtide_sqlite import TYPE as SQLITE

def open_hanging(*arguments):
    tier = SQLITE.open(*arguments)
    tier.close = lambda timeout_s: Event().wait()
    return tier

TYPE = replace(SQLITE, open=open_hanging)
"""
"""A tier whose end does not come."""


@pytest.mark.long
@pytest.mark.usefixtures("example")
def test_a_package_that_hangs_at_its_end_does_not_keep_a_node_from_ending(
    new_node: StartNode, site: Path, tmp_path: Path
) -> None:
    install(site, "hanging_tier", {"hanging": "hanging_tier:TYPE"})
    (site / "hanging_tier.py").write_text(HANGING)
    node = new_node(tiers=json.dumps([entry(tmp_path, type="hanging", name="lite")]))
    node.start()
    node.end()
    assert "tier lite is left behind" in node.log()
