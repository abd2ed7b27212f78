"""Digests of adapters: by content, in the background, and never again once files change."""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtide.engines.vllm.file_digests import FileDigests
from kvtide.engines.vllm.weights import AdapterDigests
from tests.engines.vllm.checkpoints import WAIT_S, HeldReads

ANY_AGE_NS = 1 << 62
"""Files may be as young as they like."""


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    directory = tmp_path / "adapter"
    directory.mkdir()
    (directory / "adapter_config.json").write_text('{"r": 8}')
    (directory / "adapter_model.safetensors").write_bytes(b"low rank" * 100)
    return directory


@pytest.fixture
def adapters(digests: FileDigests) -> Iterator[AdapterDigests]:
    adapters = AdapterDigests(digests, ANY_AGE_NS)
    yield adapters
    adapters.close()


def adapter_digest(adapters: AdapterDigests, path: Path) -> bytes:
    """Ask until it is known."""
    deadline_s = time.monotonic() + WAIT_S
    while (digest := adapters.digest(str(path))) is None:
        assert time.monotonic() < deadline_s
    return digest


def test_an_adapter_is_unknown_until_it_was_read_in_the_background(
    adapter: Path, held: HeldReads
) -> None:
    adapters = AdapterDigests(held, ANY_AGE_NS)
    assert adapters.digest(str(adapter)) is None
    assert held.began.wait(WAIT_S)
    assert adapters.digest(str(adapter)) is None
    held.go.set()
    assert len(adapter_digest(adapters, adapter)) == 32
    adapters.close()


def test_adapters_of_equal_content_are_one_wherever_they_lie(
    adapter: Path, tmp_path: Path, adapters: AdapterDigests
) -> None:
    copy = tmp_path / "copy"
    copy.mkdir()
    for path in adapter.iterdir():
        (copy / path.name).write_bytes(path.read_bytes())
    assert adapter_digest(adapters, copy) == adapter_digest(adapters, adapter)


@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors"])
def test_every_byte_of_an_adapter_counts(
    name: str, adapter: Path, tmp_path: Path, adapters: AdapterDigests
) -> None:
    other = tmp_path / "other"
    other.mkdir()
    for path in adapter.iterdir():
        (other / path.name).write_bytes(path.read_bytes())
    content = bytearray((other / name).read_bytes())
    content[-2] ^= 1
    (other / name).write_bytes(content)
    assert adapter_digest(adapters, other) != adapter_digest(adapters, adapter)


def test_an_adapter_written_after_the_engines_start_is_never_known(
    adapter: Path, tmp_path: Path, digests: FileDigests
) -> None:
    """The engine may hold older bytes; but a blob of a hub's cache is what its name says."""
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshot"
    blobs.mkdir()
    snapshot.mkdir()
    for number, path in enumerate(sorted(adapter.iterdir())):
        (blobs / f"{number:040x}").write_bytes(path.read_bytes())
        (snapshot / path.name).symlink_to(blobs / f"{number:040x}")
    adapters = AdapterDigests(digests, min(p.stat().st_ctime_ns for p in adapter.iterdir()) - 1)
    assert adapters.digest(str(adapter)) is None
    assert len(adapter_digest(adapters, snapshot)) == 32  # read in turn, so the other was read too
    assert adapters.digest(str(adapter)) is None
    adapters.close()


def test_an_adapter_changed_in_place_is_never_known_again(
    adapter: Path, adapters: AdapterDigests
) -> None:
    """The engine may still hold the old bytes under the same path, so neither digest is right."""
    adapter_digest(adapters, adapter)
    weights = adapter / "adapter_model.safetensors"
    old = weights.read_bytes()
    weights.write_bytes(b"new")
    assert adapters.digest(str(adapter)) is None
    weights.write_bytes(old)
    assert adapters.digest(str(adapter)) is None


def test_an_adapter_that_is_not_a_directory_is_unknown(
    tmp_path: Path, adapters: AdapterDigests
) -> None:
    assert adapters.digest("someone/adapter-on-the-hub") is None
    assert adapters.digest(str(tmp_path)) is None
    assert adapters._thread is None, "nothing was started for them"


def test_the_table_of_adapters_is_bounded(
    adapter: Path, adapters: AdapterDigests, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvtide.engines.vllm.weights.ADAPTERS_MAX", 1)
    adapter_digest(adapters, adapter)
    alias = adapter.parent / "alias"
    alias.symlink_to(adapter)
    assert adapters.digest(str(alias)) is None
    assert len(adapters._adapters) == 1
