"""Blobs of a Hugging Face cache: their names count before they are read, where nothing says that
they were written since, and never against their content."""

import hashlib
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from kvtide.core.reasons import Off, OffReason
from kvtide.engines.vllm.file_digests import (
    SETTLE_NS,
    FileChanged,
    FileDigests,
    FileIdentity,
)
from kvtide.engines.vllm.weights import (
    Hashing,
    Known,
    LocalWeights,
    WeightsDigest,
    combined_digest,
)
from tests.engines.vllm.checkpoints import (
    WAIT_S,
    HeldReads,
    a_snapshot,
    digest_of,
    off_of,
    settled,
)


def test_a_blob_counts_by_its_name_before_it_is_read(tmp_path: Path, held: HeldReads) -> None:
    content = b"weights" * 100
    weights = WeightsDigest(LocalWeights(a_snapshot(tmp_path / "hub", content)), held)
    weights.start()
    expected = Known(combined_digest([hashlib.sha256(content).digest()]))
    assert weights.wait(WAIT_S) == expected
    assert held.began.wait(WAIT_S)
    assert not weights.is_verified
    held.go.set()
    assert weights.wait(WAIT_S, verified=True) == expected
    assert weights.is_verified
    weights.close()


def test_a_blob_that_does_not_hold_what_its_name_says_turns_caching_off(
    tmp_path: Path, held: HeldReads, digests: FileDigests
) -> None:
    snapshot = a_snapshot(tmp_path / "hub", b"other bytes", name="ab" * 32)
    weights = WeightsDigest(LocalWeights(snapshot), held)
    weights.start()
    assert weights.wait(WAIT_S) == Known(combined_digest([bytes.fromhex("ab" * 32)]))
    held.go.set()
    state = weights.wait(WAIT_S, verified=True)
    weights.close()
    assert isinstance(state, Off)
    assert not weights.is_verified
    assert state.reason is OffReason.WEIGHTS_CHANGE
    assert "model.safetensors" in state.detail
    assert off_of(snapshot, digests) == state, "a later start knows at once"


def held_blob(weights: WeightsDigest, held: HeldReads) -> Known | Off:
    """What is known once a blob that does not count by its name has been read."""
    weights.start()
    assert held.began.wait(WAIT_S)
    assert isinstance(weights.poll(), Hashing), "it counts before it was read"
    held.go.set()
    state = weights.wait(WAIT_S, verified=True)
    weights.close()
    assert not isinstance(state, Hashing)
    return state


def write_through(snapshot: Path, content: bytes) -> None:
    """As `save_pretrained` into a snapshot does."""
    with (snapshot / "model.safetensors").open("r+b") as file:
        file.write(content)


def test_a_blob_that_was_read_in_another_state_is_read_before_its_name_counts(
    tmp_path: Path, held: HeldReads, digests: FileDigests
) -> None:
    """Its link is made anew behind the writer, so that only the kept digest tells."""
    snapshot = a_snapshot(tmp_path / "hub", b"weights" * 100)
    digest_of(snapshot, digests)
    write_through(snapshot, b"another model")
    link = snapshot / "model.safetensors"
    blob = link.readlink()
    link.unlink()
    link.symlink_to(blob)
    off = held_blob(WeightsDigest(LocalWeights(snapshot), held), held)
    assert isinstance(off, Off)
    assert off.reason is OffReason.WEIGHTS_CHANGE


def test_a_blob_written_behind_its_link_is_read_before_its_name_counts(
    tmp_path: Path, held: HeldReads
) -> None:
    """No digest of it was ever kept."""
    snapshot = a_snapshot(tmp_path / "hub", b"weights" * 100)
    link = snapshot / "model.safetensors"
    os.utime(link, ns=(0, link.lstat().st_mtime_ns - 10**9), follow_symlinks=False)
    write_through(snapshot, b"another model")
    off = held_blob(WeightsDigest(LocalWeights(snapshot), held), held)
    assert isinstance(off, Off)
    assert off.reason is OffReason.WEIGHTS_CHANGE


def test_a_touched_blob_that_holds_what_its_name_says_counts_once_it_was_read(
    tmp_path: Path, held: HeldReads, digests: FileDigests
) -> None:
    snapshot = a_snapshot(tmp_path / "hub", b"weights" * 100)
    digest = digest_of(snapshot, digests)
    (snapshot / "model.safetensors").chmod(0o600)
    assert held_blob(WeightsDigest(LocalWeights(snapshot), held), held) == Known(digest)


def test_a_blob_fetched_by_the_engine_counts_once_it_was_read(
    tmp_path: Path, held: HeldReads
) -> None:
    """Or somebody may have written it, between the engine's start and now."""
    content = b"weights" * 100
    snapshot = a_snapshot(tmp_path / "hub", content)
    blob = (snapshot / "model.safetensors").stat()
    local, expected = LocalWeights(snapshot), combined_digest([hashlib.sha256(content).digest()])
    just_before_ns = blob.st_ctime_ns + SETTLE_NS
    older = WeightsDigest(local, held, unchanged_since_ns=just_before_ns)
    older.start()
    assert older.wait(WAIT_S) == Known(expected), "older than the engine: it counts at once"
    held.go.set()
    older.wait(WAIT_S, verified=True)
    older.close()
    held.go.clear()
    for kept in (tmp_path / "cache").iterdir():
        kept.unlink()
    held.began.clear()
    young = WeightsDigest(local, held, unchanged_since_ns=just_before_ns - 1)
    assert held_blob(young, held) == Known(expected)


def test_a_verified_blob_is_not_read_again(
    tmp_path: Path, digests: FileDigests, reads: list[str]
) -> None:
    snapshot = a_snapshot(tmp_path / "hub", b"weights")
    digest_of(snapshot, digests)
    later = WeightsDigest(LocalWeights(snapshot), digests)
    assert isinstance(settled(later, verified=False), Known)
    assert later.is_verified
    assert len(reads) == 1


def test_a_name_that_was_believed_and_cannot_be_verified_is_taken_for_a_lie(
    tmp_path: Path, held: HeldReads
) -> None:
    snapshot = a_snapshot(tmp_path / "hub", b"weights" * 100)
    weights = WeightsDigest(LocalWeights(snapshot), held)
    weights.start()
    assert isinstance(weights.wait(WAIT_S), Known)
    (snapshot / "model.safetensors").resolve().unlink()
    held.go.set()
    off = weights.wait(WAIT_S, verified=True)
    weights.close()
    assert isinstance(off, Off)
    assert off.reason is OffReason.WEIGHTS_CHANGE


def test_a_blob_that_was_mended_after_it_was_loaded_turns_caching_off(
    tmp_path: Path, held: HeldReads
) -> None:
    """What is read now holds what its name says; what the engine has loaded did not."""
    content = b"weights" * 100
    name = hashlib.sha256(content).hexdigest()
    snapshot = a_snapshot(tmp_path / "hub", b"rotten", name)
    weights = WeightsDigest(LocalWeights(snapshot), held)
    weights.start()
    assert isinstance(weights.wait(WAIT_S), Known)
    (tmp_path / "fetched again").write_bytes(content)
    (tmp_path / "fetched again").rename(tmp_path / "hub" / "blobs" / name)
    held.go.set()
    off = weights.wait(WAIT_S, verified=True)
    weights.close()
    assert isinstance(off, Off)
    assert off.reason is OffReason.WEIGHTS_CHANGE
    assert not weights.is_verified


@pytest.mark.parametrize("name", ["ab" * 20, "AB" * 32, "model.safetensors"])
def test_a_blob_with_another_kind_of_name_is_read_first(
    name: str, tmp_path: Path, held: HeldReads
) -> None:
    weights = WeightsDigest(LocalWeights(a_snapshot(tmp_path / "hub", b"w", name)), held)
    weights.start()
    assert held.began.wait(WAIT_S)
    assert isinstance(weights.poll(), Hashing)
    held.go.set()
    assert weights.wait(WAIT_S) == Known(combined_digest([hashlib.sha256(b"w").digest()]))
    weights.close()


def test_files_that_nothing_is_known_of_are_read_before_blobs(
    tmp_path: Path, digests: FileDigests, reads: list[str]
) -> None:
    """The digest waits for them alone."""
    snapshot = a_snapshot(tmp_path / "hub", b"weights")
    (snapshot / "unnamed.safetensors").write_bytes(b"more")
    settled(WeightsDigest(LocalWeights(snapshot), digests, thread_count=1))
    assert reads == ["unnamed.safetensors", hashlib.sha256(b"weights").hexdigest()]


class OneIsWritten(HeldReads):
    """The file `written` is found changing; reads of others end only when they are let go."""

    def read(
        self,
        path: Path,
        stopped: Callable[[], bool] = lambda: False,
        progress: Callable[[int], None] = lambda _: None,
    ) -> tuple[FileIdentity, bytes]:
        if path.name == "written.safetensors":
            assert self.began.wait(WAIT_S)
            raise FileChanged(str(path))
        return super().read(path)


def test_off_is_final_whatever_another_thread_finds_later(tmp_path: Path) -> None:
    snapshot = a_snapshot(tmp_path / "hub", b"weights")
    blob = tmp_path / "hub" / "blobs" / hashlib.sha256(b"more").hexdigest()
    blob.write_bytes(b"more")
    (snapshot / "written.safetensors").symlink_to(blob)
    held = OneIsWritten(tmp_path / "cache")
    weights = WeightsDigest(LocalWeights(snapshot), held)
    weights.start()
    while not isinstance(weights.poll(), Off):
        pass
    held.go.set()
    weights.close(WAIT_S)
    state = weights.poll()
    assert isinstance(state, Off)
    assert "written.safetensors is being written" in state.detail


def test_a_new_blob_is_fine_because_the_engine_may_have_fetched_it(
    tmp_path: Path, digests: FileDigests
) -> None:
    snapshot = LocalWeights(a_snapshot(tmp_path / "hub", b"weights"))
    assert isinstance(settled(WeightsDigest(snapshot, digests, unchanged_since_ns=0)), Known)
