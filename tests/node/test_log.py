"""The node's log: bounded, and all that a full disk costs."""

import logging
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtide.errors import NodeError
from kvtide.node import main
from kvtide.testing.fake_engine import FakeEngine, Loaded, make_tokens
from kvtide.testing.node_process import NodeProcess
from kvtide.units import KiB, MiB
from kvtide.wire.command import ask
from kvtide.wire.places import Places
from tests.node.fixtures import StartNode


@pytest.fixture
def logger() -> Iterator[logging.Logger]:
    """kvtide's logger, as it was afterwards."""
    found = logging.getLogger("kvtide")
    handlers, level, raises = found.handlers[:], found.level, logging.raiseExceptions
    yield found
    for handler in found.handlers[:]:
        if handler not in handlers:
            found.removeHandler(handler)
            handler.close()
    found.setLevel(level)
    logging.raiseExceptions = raises


def test_log_is_bounded(runtime_dir: Path, logger: logging.Logger) -> None:
    """Whatever is written, one file and the one before it are kept, 8 MiB each."""
    places = Places(runtime_dir)
    main.log_to_file(places)
    line = "x" * 64 * KiB
    for _ in range(3 * main.LOG_BYTES_MAX // len(line)):
        logger.info("%s", line)
    kept = {path.name: path.stat().st_size for path in runtime_dir.iterdir()}
    assert kept.keys() == {places.log.name, f"{places.log.name}.1"}
    assert max(kept.values()) <= main.LOG_BYTES_MAX


@pytest.fixture
def full_disk(runtime_dir: Path) -> Iterator[Path]:
    """A runtime directory on a file system without a free byte."""
    place = runtime_dir / "full"
    place.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=64k,mode=700", "tmpfs", str(place)]
    if os.getuid() != 0 or subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("mounting is not permitted here")
    try:
        yield place
    finally:
        NodeProcess(place).end()
        subprocess.run(["umount", str(place)], check=True)


def fill(place: Path) -> None:
    """Write until nothing fits."""
    with (place / "ballast").open("wb", buffering=0) as ballast:
        try:
            while True:
                ballast.write(b"x" * 4096)
        except OSError:
            return


@pytest.mark.usefixtures("new_node")
def test_full_disk_costs_only_the_log(full_disk: Path) -> None:
    fill(full_disk)
    node = NodeProcess(full_disk, host_bytes="64MiB")
    node.start()
    tokens = make_tokens(256, seed=1)
    with FakeEngine(node.places, "one") as engine:
        engine.keep(tokens)
        assert engine.load(tokens) == Loaded(16, 16)
    assert node.log() == ""
    assert node.status()["host"]["grants"] == 0


@pytest.mark.usefixtures("new_node")
def test_disk_that_fills_later_costs_only_the_log(full_disk: Path) -> None:
    """Every line is written in vain from then on; the node does not even notice."""
    node = NodeProcess(full_disk, host_bytes="64MiB")
    node.start()
    written = node.log()
    assert "serves at" in written
    fill(full_disk)
    with FakeEngine(node.places, "one") as engine:
        assert engine.store(make_tokens(64, seed=1)).written == 1
    assert ask(node.places, "clear")["entries"] == 1  # it says so in its log, in vain
    assert node.status()["node"]["pid"] == node.pid


def test_lock_that_cannot_be_made_is_said(
    runtime_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(main.os, "open", full)
    with pytest.raises(main.NodeError, match=r"cannot be made \(No space left on device\)"):
        main.take_lock(Places(runtime_dir))


def test_oversized_words_of_a_peer_do_not_fill_the_log(new_node: StartNode) -> None:
    """An unknown command is named in the answer, but only its beginning."""
    node = new_node()
    node.start()
    with pytest.raises(NodeError, match="knows no command 'xxxx") as raised:
        ask(node.places, "x" * MiB)
    assert len(str(raised.value)) < 250
    assert len(node.log()) < 4 * KiB
