"""Digests of adapters: by content, in the background, and never again once files change."""

import hashlib
import os
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtide.engines.vllm import adapters as adapters_module
from kvtide.engines.vllm.adapters import CONFIRMED_S_MAX, IDLE_S_MAX, AdapterDigests
from kvtide.engines.vllm.file_digests import FileDigests, FileIdentity
from tests.engines.vllm.checkpoints import WAIT_S, HeldReads, a_moment_after

ANY_AGE_NS = 1 << 62
"""Files may be as young as they like."""
SALT = b"s" * 32


class Cleared(list[set[bytes]]):
    """What was to be cleared."""

    def __call__(self, salts: set[bytes]) -> None:
        self.append(salts)


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    directory = tmp_path / "adapter"
    directory.mkdir()
    (directory / "adapter_config.json").write_text('{"r": 8}')
    (directory / "adapter_model.safetensors").write_bytes(b"low rank" * 100)
    return directory


@pytest.fixture
def adapters(digests: FileDigests) -> Iterator[AdapterDigests]:
    adapters = AdapterDigests(digests, ANY_AGE_NS, Cleared())
    yield adapters
    adapters.close()


class Hanging:
    """A file system whose calls do not come back until they are let go; and the time."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 0.0
        self.threads: set[str] = set()
        self.go = threading.Event()
        self.go.set()
        real = FileIdentity.of

        def of(path: Path) -> FileIdentity:
            self.threads.add(threading.current_thread().name)
            assert self.go.wait(WAIT_S)
            return real(path)

        monkeypatch.setattr(FileIdentity, "of", of)


@pytest.fixture
def hanging(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hanging]:
    found = Hanging(monkeypatch)
    yield found
    found.go.set()


def adapter_digest(adapters: AdapterDigests, path: Path) -> bytes:
    """Ask until it is known."""
    deadline_s = time.monotonic() + WAIT_S
    while (digest := adapters.digest(str(path))) is None:
        assert time.monotonic() < deadline_s
    return digest


def test_an_adapter_is_unknown_until_it_was_read_in_the_background(
    adapter: Path, held: HeldReads
) -> None:
    adapters = AdapterDigests(held, ANY_AGE_NS, Cleared())
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


def until_unknown(adapters: AdapterDigests, path: Path) -> None:
    """Ask until it is known no more: a look finds out within a moment."""
    deadline_s = time.monotonic() + WAIT_S
    while adapters.digest(str(path)) is not None:
        assert time.monotonic() < deadline_s


def distrusted(adapters: AdapterDigests, path: Path) -> None:
    """Name it, and wait until it is known that it will never be known."""
    deadline_s = time.monotonic() + WAIT_S
    while adapters.digest(str(path)) is None:
        adapter = adapters._adapters[str(path)]
        if adapter.is_distrusted:
            return
        assert time.monotonic() < deadline_s
    raise AssertionError(f"{path} is known")


def a_snapshot_of(adapter: Path, directory: Path) -> Path:
    """The adapter as a hub's cache holds it: the config by git's name, the weights by SHA-256."""
    blobs, snapshot = directory / "blobs", directory / "snapshots" / "abc"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for path in adapter.iterdir():
        content = path.read_bytes()
        name = hashlib.sha256(content).hexdigest()
        if path.suffix == ".json":
            name = hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
        (blobs / name).write_bytes(content)
        (snapshot / path.name).symlink_to(blobs / name)
    return snapshot


def test_an_adapter_written_after_the_engines_start_is_never_known(
    adapter: Path, tmp_path: Path, digests: FileDigests
) -> None:
    """The engine may hold older bytes; but a blob that holds what its name says was fetched."""
    snapshot = a_snapshot_of(adapter, tmp_path / "hub")
    adapters = AdapterDigests(
        digests, min(p.stat().st_ctime_ns for p in adapter.iterdir()) - 1, Cleared()
    )
    distrusted(adapters, adapter)
    assert len(adapter_digest(adapters, snapshot)) == 32
    adapters.close()


@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors"])
def test_a_blob_written_through_its_link_after_the_engines_start_is_never_known(
    name: str, adapter: Path, tmp_path: Path, digests: FileDigests
) -> None:
    """The engine has loaded the old bytes; the first request that names it comes later."""
    snapshot = a_snapshot_of(adapter, tmp_path / "hub")
    began_ns = max(path.stat().st_ctime_ns for path in snapshot.iterdir())
    until_ns = began_ns + 50_000_000
    while time.time_ns() < until_ns:
        pass
    with (snapshot / name).open("r+b") as file:
        file.write(b" ")
    adapters = AdapterDigests(digests, began_ns, Cleared())
    distrusted(adapters, snapshot)
    adapters.close()


def test_another_adapter_behind_the_same_link_is_never_known(
    adapter: Path, tmp_path: Path, digests: FileDigests
) -> None:
    """Its files may be old: what counts is when the link came to lead to them."""
    began_ns = a_moment_after(adapter)
    (tmp_path / "current").symlink_to(adapter)
    (tmp_path / "through").symlink_to("current")
    adapters = AdapterDigests(digests, began_ns, Cleared())
    distrusted(adapters, tmp_path / "current")
    distrusted(adapters, tmp_path / "through")
    assert len(adapter_digest(adapters, adapter)) == 32
    adapters.close()


def test_another_adapter_renamed_to_the_same_path_is_never_known(
    adapter: Path, tmp_path: Path, digests: FileDigests
) -> None:
    other = tmp_path / "other"
    shutil.copytree(adapter, other)
    began_ns = a_moment_after(adapter, other)
    adapter.rename(tmp_path / "old")
    other.rename(adapter)
    adapters = AdapterDigests(digests, began_ns, Cleared())
    distrusted(adapters, adapter)
    adapters.close()


def test_an_adapter_in_use_is_unchanged_until_a_look_finds_it_changed(
    adapter: Path, adapters: AdapterDigests
) -> None:
    assert not adapters.is_unchanged(str(adapter), SALT), "nobody has named it"
    adapter_digest(adapters, adapter)
    assert adapters.is_unchanged(str(adapter), SALT)
    (adapter / "adapter_config.json").write_text("{}")
    deadline_s = time.monotonic() + WAIT_S
    while adapters.is_unchanged(str(adapter), SALT):
        assert time.monotonic() < deadline_s


def replace(adapter: Path, content: bytes) -> None:
    """Put another file of weights in the place of the one that is there, atomically."""
    other = adapter.parent / "other"
    other.write_bytes(content)
    other.replace(adapter / "adapter_model.safetensors")


def test_only_a_look_that_began_after_the_engine_was_asked_counts(
    adapter: Path, digests: FileDigests, hanging: Hanging
) -> None:
    """The engine loads what lies there now, which may just have been put there."""
    adapters = AdapterDigests(digests, ANY_AGE_NS, Cleared(), lambda: hanging.now_s)
    digest = adapter_digest(adapters, adapter)
    confirmed_s = adapters._adapters[str(adapter)].confirmed_s
    hanging.now_s += CONFIRMED_S_MAX / 10
    assert adapters.digest(str(adapter), confirmed_s) == digest
    asked_s = hanging.now_s
    assert adapters.digest(str(adapter), asked_s) is None
    deadline_s = time.monotonic() + WAIT_S
    while adapters.digest(str(adapter), asked_s) != digest:
        assert time.monotonic() < deadline_s
    adapters.close()


def test_what_went_by_a_wrong_name_since_the_last_good_look_is_cleared(
    adapter: Path, digests: FileDigests, hanging: Hanging
) -> None:
    """Only that: what a look has found right since stays, and it is told once."""
    cleared = Cleared()
    adapters = AdapterDigests(digests, ANY_AGE_NS, cleared, lambda: hanging.now_s)
    digest, path = adapter_digest(adapters, adapter), str(adapter)
    assert adapters.is_unchanged(path, b"before")
    hanging.now_s += 1
    assert adapters.digest(path, hanging.now_s) is None
    deadline_s = time.monotonic() + WAIT_S
    while adapters.digest(path, hanging.now_s) != digest:
        assert time.monotonic() < deadline_s
    hanging.go.clear()
    assert adapters.is_unchanged(path, SALT)
    assert not adapters.take_changed()
    replace(adapter, b"the next step")
    hanging.now_s += 1
    hanging.go.set()
    while adapters.is_unchanged(path, SALT):
        assert time.monotonic() < deadline_s
    adapters.close()
    assert cleared == [{SALT}]
    assert adapters.take_changed() == {path}
    assert not adapters.take_changed()


@pytest.mark.parametrize("has_ended", [False, True])
def test_a_look_proves_only_what_steps_that_have_ended_computed(
    has_ended: bool, adapter: Path, digests: FileDigests, hanging: Hanging
) -> None:
    """The engine may load the adapter after the look, in a step that was planned before it."""
    cleared = Cleared()
    adapters = AdapterDigests(digests, ANY_AGE_NS, cleared, lambda: hanging.now_s)
    digest, path = adapter_digest(adapters, adapter), str(adapter)
    adapters.step_planned()
    assert adapters.is_unchanged(path, SALT)
    if has_ended:
        adapters.step_ended()
    hanging.now_s += 1
    deadline_s = time.monotonic() + WAIT_S
    while adapters.digest(path, hanging.now_s) != digest:
        assert time.monotonic() < deadline_s
    replace(adapter, b"the next version")
    adapters.close(WAIT_S)
    assert cleared == ([] if has_ended else [{SALT}])


def test_the_last_uses_are_looked_at_when_the_engine_ends(
    adapter: Path, digests: FileDigests, hanging: Hanging
) -> None:
    cleared = Cleared()
    adapters = AdapterDigests(digests, ANY_AGE_NS, cleared, lambda: hanging.now_s)
    adapter_digest(adapters, adapter)
    assert adapters.is_unchanged(str(adapter), SALT)
    replace(adapter, b"the next step")
    adapters.close(WAIT_S)  # no time has passed, so no look was due
    assert cleared == [{SALT}]


def test_an_attribute_that_was_kept_for_a_while_does_not_hide_a_change(
    adapter: Path, adapters: AdapterDigests, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Machines that share files keep what is said of one for up to a minute, until it is opened;
    and the engine opens it."""
    weights = adapter / "adapter_model.safetensors"
    kept, real = weights.stat(), Path.stat
    adapter_digest(adapters, adapter)

    def stat(path: Path, **arguments: bool) -> os.stat_result:
        return kept if path == weights else real(path, **arguments)

    monkeypatch.setattr(Path, "stat", stat)
    replace(adapter, b"low rank" * 100)
    until_unknown(adapters, adapter)


def test_no_thread_for_the_first_request_is_a_miss_and_no_more(
    adapter: Path, adapters: AdapterDigests, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        assert adapters.digest(str(adapter)) is None
        adapters.close()
    adapters._stop.clear()
    assert len(adapter_digest(adapters, adapter)) == 32


def test_an_adapter_changed_in_place_is_never_known_again(
    adapter: Path, adapters: AdapterDigests
) -> None:
    """The engine may still hold the old bytes under the same path, so neither digest is right."""
    adapter_digest(adapters, adapter)
    weights = adapter / "adapter_model.safetensors"
    old = weights.read_bytes()
    weights.write_bytes(b"new")
    until_unknown(adapters, adapter)
    weights.write_bytes(old)
    distrusted(adapters, adapter)


def test_an_adapter_that_is_not_a_directory_is_unknown(
    tmp_path: Path, adapters: AdapterDigests
) -> None:
    for path in ("someone/adapter-on-the-hub", str(tmp_path), "~nobody-of-that-name/adapter"):
        assert adapters.digest(path) is None
    deadline_s = time.monotonic() + WAIT_S
    while adapters._adapters:
        assert time.monotonic() < deadline_s, "they stay in the table"


def test_a_file_system_that_hangs_costs_misses_and_no_waiting(
    adapter: Path, digests: FileDigests, hanging: Hanging
) -> None:
    """What was confirmed within the last second still counts; what was not, does not."""
    adapters = AdapterDigests(digests, ANY_AGE_NS, Cleared(), lambda: hanging.now_s)
    digest = adapter_digest(adapters, adapter)
    hanging.go.clear()
    known = adapters._adapters[str(adapter)]
    began_s = known.confirmed_s
    hanging.now_s = began_s + CONFIRMED_S_MAX
    assert adapters.digest(str(adapter)) == digest
    hanging.now_s += 0.001
    assert adapters.digest(str(adapter)) is None
    hanging.go.set()
    assert adapter_digest(adapters, adapter) == digest
    assert hanging.threads == {"kvtide-adapters"}
    adapters.close()


def test_an_adapter_that_nobody_names_for_long_is_not_looked_at(
    adapter: Path, digests: FileDigests, hanging: Hanging
) -> None:
    adapters = AdapterDigests(digests, ANY_AGE_NS, Cleared(), lambda: hanging.now_s)
    digest = adapter_digest(adapters, adapter)
    assert adapters._in_use()
    hanging.now_s += IDLE_S_MAX + 1
    assert not adapters._in_use()
    assert adapters.digest(str(adapter)) is None, "and costs its next request a miss"
    assert adapter_digest(adapters, adapter) == digest
    adapters.close()


def test_the_table_of_adapters_is_bounded(
    adapter: Path, adapters: AdapterDigests, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adapters_module, "ADAPTERS_MAX", 1)
    adapter_digest(adapters, adapter)
    alias = adapter.parent / "alias"
    alias.symlink_to(adapter)
    assert adapters.digest(str(alias)) is None
    assert len(adapters._adapters) == 1
