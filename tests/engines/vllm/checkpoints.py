"""Checkpoints for tests of digests, and readers that can be held."""

import hashlib
import threading
import time
from collections.abc import Callable
from pathlib import Path

from kvtide.core.reasons import Off
from kvtide.engines.vllm.file_digests import FileDigests, FileIdentity
from kvtide.engines.vllm.weights import Hashing, Known, LocalWeights, WeightsDigest

WAIT_S = 30.0


def an_hour_ahead() -> int:
    """A clock by which every file of the test was written long ago, so that digests are kept."""
    return time.time_ns() + 3600 * 1_000_000_000


def settled(weights: WeightsDigest, *, verified: bool = True) -> Known | Off:
    weights.start()
    state = weights.wait(WAIT_S, verified=verified)
    weights.close()
    assert not isinstance(state, Hashing), state
    return state


def digest_of(directory: Path, digests: FileDigests, load_format: str = "auto") -> bytes:
    state = settled(WeightsDigest(LocalWeights(directory, load_format), digests))
    assert isinstance(state, Known), state
    return state.digest


def off_of(directory: Path, digests: FileDigests, load_format: str = "auto") -> Off:
    state = settled(WeightsDigest(LocalWeights(directory, load_format), digests))
    assert isinstance(state, Off), state
    return state


def a_snapshot(directory: Path, content: bytes, name: str | None = None) -> Path:
    """A Hugging Face cache: the snapshot's file is a link to a blob named by its SHA-256."""
    snapshot, blobs = directory / "snapshots" / "abc", directory / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    blob = blobs / (name or hashlib.sha256(content).hexdigest())
    blob.write_bytes(content)
    (snapshot / "model.safetensors").symlink_to(Path("../../blobs") / blob.name)
    return snapshot


def a_moment_after(*paths: Path) -> int:
    """A time at which all of these were as they are, and what is changed from now on was not. It
    has to pass: a file's ctime is the kernel's alone to set."""
    newest_ns = max(
        below.lstat().st_ctime_ns for path in paths for below in (path, *path.rglob("*"))
    )
    while time.time_ns() < newest_ns + 50_000_000:  # file systems have coarse clocks
        pass
    return newest_ns + 25_000_000


class HeldReads(FileDigests):
    """Reads wait until they are let go."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory, an_hour_ahead)
        self.go = threading.Event()
        self.began = threading.Event()

    def read(
        self,
        path: Path,
        stopped: Callable[[], bool] = lambda: False,
        progress: Callable[[int], None] = lambda _: None,
    ) -> tuple[FileIdentity, bytes]:
        self.began.set()
        assert self.go.wait(WAIT_S)
        return super().read(path, stopped, progress)
