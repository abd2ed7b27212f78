"""Weights digest: names the bytes a model computes with, so that no hit mixes two checkpoints.

The digest is the SHA-256 of the sorted list of the SHA-256 of each weight file that vLLM's loader
reads. Every byte counts; names and places do not, so a model copied elsewhere has the same digest.
The engine never waits for it:

    start() ─► list files ─► each file:  read at an earlier start, unchanged ─► counts at once
                                         named by its SHA-256 (a Hugging Face blob), and nothing
                                         known contradicts that ─► counts at once, read behind it
                                         else ─► read now
    poll()  ─► Hashing(…) … Known(digest)          or Off: a file cannot be read, changes, or lies
                             └─ is_verified: every file was read

A blob may be written through the link of a snapshot (`save_pretrained` follows links). So its name
counts unread only if it is older than the engine, not written after its link was made, and its
inode was never read in another state. Where a name is a lie after all, the engine goes off with
`weights_change`. Until all are verified it may load, since what others have stored is what the
name says, but not store: its own would outlive it, and nobody could tell it from theirs.

Rejected: storing meanwhile, and taking it back where a name lies. Whoever is killed takes nothing
back, whoever has hit it stores what hangs on it, and what is right under that name would go too.
Rejected: hashing in the workers (they are busy loading, and only the scheduler role needs it), and
a digest of the model's name and revision (says nothing of a directory).

Ownership: of WeightsDigest, `_files` is made by the first thread, which then starts the others; a
file belongs to the thread that took it from `_queue`; results, `_state`, `is_verified`, `_threads`
and the byte counts change under `_lock`. Anybody reads `is_verified`, which never becomes false
again; its creator calls everything else; `close` joins the threads.
"""

import contextlib
import hashlib
import json
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from kvtide.core.reasons import Off, OffReason
from kvtide.engines.vllm.file_digests import (
    SETTLE_NS,
    FileChanged,
    FileDigests,
    FileIdentity,
    ReadStopped,
    directory_may_be_another,
    file_may_be_another,
    is_written_behind_link,
    lower_priority,
    promised_digest,
)
from kvtide.errors import reason_of
from kvtide.processors import leave_binding
from kvtide.units import format_bytes

_PATTERNS: dict[str, tuple[str, ...]] = {
    "hf": ("*.safetensors", "*.bin", "*.pt"),
    "safetensors": ("*.safetensors",),
    "fastsafetensors": ("*.safetensors",),
    "instanttensor": ("*.safetensors",),
    "mistral": ("consolidated*.safetensors",),
    "pt": ("*.pt",),
}
"""Load formats that read local files as they are; the first pattern that fits anything counts."""

_NOT_WEIGHTS = ("training_args.bin", "optimizer.bin", "optimizer.pt", "scheduler.pt", "scaler.pt")
_TOO_NEW = "{path}, or the way to it, changed after the engine began; start it again"


@dataclass(frozen=True, slots=True)
class LocalWeights:
    """Weights in files: a directory and vLLM's `load_format`."""

    directory: Path
    load_format: str = "auto"


@dataclass(frozen=True, slots=True)
class DummyWeights:
    """Weights that the engine makes up from a seed and the model's config, encoded canonically."""

    seed: int
    config: bytes


Weights: TypeAlias = LocalWeights | DummyWeights


@dataclass(frozen=True, slots=True)
class Known:
    """The digest, 32 bytes."""

    digest: bytes


@dataclass(frozen=True, slots=True)
class Hashing:
    """Files are still being read; `eta_s` is None until something can be said."""

    done_bytes: int
    total_bytes: int
    eta_s: float | None

    def __str__(self) -> str:
        known = f"{format_bytes(self.done_bytes)} of {format_bytes(self.total_bytes)} read"
        return known if self.eta_s is None else f"{known}, {self.eta_s:.0f} s to go"


State: TypeAlias = Known | Hashing | Off


def weight_files(weights: LocalWeights) -> tuple[Path, ...] | Off:
    """The files that vLLM's default loader reads, chosen by its own rules.

    The first pattern of the load format that fits anything; of safetensors files only those in
    the index, where there is one; no optimizer states.
    """
    directory, load_format = weights.directory, weights.load_format
    if not directory.is_dir():
        return Off(OffReason.WEIGHTS_NOT_LOCAL, f"{directory} is not a directory")
    if load_format == "auto":
        consolidated = any(path.is_file() for path in directory.rglob("consolidated*.safetensors"))
        load_format = "mistral" if consolidated else "hf"
    if load_format not in _PATTERNS:
        return Off(OffReason.WEIGHTS_NOT_LOCAL, f"load_format {load_format} reads no plain files")
    for pattern in _PATTERNS[load_format]:
        files = sorted(directory.glob(pattern))
        if files:
            break
    else:
        return Off(OffReason.WEIGHTS_NOT_LOCAL, f"no weight files in {directory}")
    if not pattern.endswith(".safetensors"):
        return tuple(path for path in files if not path.name.endswith(_NOT_WEIGHTS))
    prefix = "consolidated" if load_format == "mistral" else "model"
    return _only_indexed(files, directory / f"{prefix}.safetensors.index.json")


def _only_indexed(files: Sequence[Path], index: Path) -> tuple[Path, ...] | Off:
    if not index.is_file():
        return tuple(files)
    try:
        indexed = set(json.loads(index.read_bytes())["weight_map"].values())
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        return Off(OffReason.FIELD_UNKNOWN, f"weights: cannot read {index}: {error!r}")
    missing = indexed - {path.name for path in files}
    if missing:
        return Off(OffReason.FIELD_UNKNOWN, f"weights: {index} names {min(missing)}, not there")
    return tuple(path for path in files if path.name in indexed)


def combined_digest(digests: Sequence[bytes]) -> bytes:
    """The digest of a set of files, from the digest of each."""
    assert digests, "weights have at least one file"
    return hashlib.sha256(b"".join(sorted(digests))).digest()


def process_began_ns() -> int:
    """When this process was started, on the realtime clock, to about 10 ms."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    ticks = int(fields[19])  # field 22 of the line; the first two are cut off above
    since_boot_ns = ticks * 1_000_000_000 // os.sysconf("SC_CLK_TCK")
    return time.time_ns() - (time.clock_gettime_ns(time.CLOCK_BOOTTIME) - since_boot_ns)


@dataclass(slots=True)
class _File:
    """One weight file: `promised` is what its name says, `digest` what reading it said."""

    path: Path
    identity: FileIdentity
    promised: bytes | None
    digest: bytes | None
    is_believed: bool
    """Its name counts before it is read."""

    @property
    def counting(self) -> bytes | None:
        """The digest that counts now."""
        return self.promised if self.digest is None and self.is_believed else self.digest


class WeightsDigest:
    """Finds the digest of one checkpoint in the background.

    Args:
        weights: what the engine loads.
        digests: how files are read, and where their digests are kept.
        thread_count: threads that read files side by side.
        unchanged_since_ns: files changed after this moment (realtime), or on whose way a link or
            directory was, turn caching off, because the engine may have loaded what was there
            before; `process_began_ns()` of the engine. None: not checked.
    """

    def __init__(
        self,
        weights: Weights,
        digests: FileDigests,
        *,
        thread_count: int = 2,
        unchanged_since_ns: int | None = None,
    ) -> None:
        assert thread_count > 0, thread_count
        self._weights = weights
        self._digests = digests
        self._thread_count = thread_count
        self._unchanged_since_ns = unchanged_since_ns
        self._lock = threading.Condition()
        self._stop = threading.Event()
        self._threads: list[threading.Thread] = []
        self._files: tuple[_File, ...] = ()
        self._queue: deque[_File] = deque()
        self._state: Known | Off | None = None
        self._is_idle = False
        self.is_verified = False
        """Every file was read and holds what its name says: what is Known stays so."""
        self._began_s = 0.0
        self._done_bytes = 0
        self._total_bytes = 0

    def start(self) -> None:
        """Begin; returns at once. Raises RuntimeError where there is no thread to be had."""
        match self._weights:
            case DummyWeights(seed, config):
                said = b"kvtide dummy weights %d " % seed + config
                self._settle(Known(hashlib.sha256(said).digest()))
                self.is_verified = True
                self._rest()
            case LocalWeights():
                self._begin(self._run)

    def poll(self) -> State:
        """What is known now. Known may still become Off, while blobs are being verified."""
        with self._lock:
            if self._state is not None:
                return self._state
            done, total, eta_s = self._done_bytes, self._total_bytes, None
            if done:
                eta_s = (total - done) * (time.monotonic() - self._began_s) / done
            return Hashing(done, total, eta_s)

    def wait(self, timeout_s: float, *, verified: bool = False) -> State:
        """Wait until the digest is known, or until every file has been read as well."""
        with self._lock:
            self._lock.wait_for(
                lambda: self._is_idle or (self._state is not None and not verified), timeout_s
            )
        return self.poll()

    def close(self, timeout_s: float = 1.0) -> None:
        """Stop reading and join the threads; one that is stuck in a read is left behind."""
        self._stop.set()
        deadline_s = time.monotonic() + timeout_s
        with self._lock:
            threads = tuple(self._threads)
        for thread in threads:
            thread.join(max(0.0, deadline_s - time.monotonic()))

    def _begin(self, work: Callable[[], None]) -> None:
        thread = threading.Thread(
            target=self._guarded, args=(work,), name="kvtide-weights", daemon=True
        )
        thread.start()
        with self._lock:
            self._threads.append(thread)

    def _guarded(self, work: Callable[[], None]) -> None:
        """The boundary of each thread: whatever goes wrong in it turns caching off, by name."""
        leave_binding()
        lower_priority()
        try:
            work()
        except Exception as error:
            self._fail(OffReason.FIELD_UNKNOWN, f"weights: {error!r}")
            self._rest()

    def _run(self) -> None:
        """The first thread: list the files, take what is known, share out the rest."""
        files = self._plan()
        if isinstance(files, Off):
            self._settle(files)
            self._rest()
            return
        # Files that nothing is known of come first: the digest waits for them alone.
        unread = sorted(
            (file for file in files if file.digest is None), key=lambda file: file.is_believed
        )
        with self._lock:
            self._files = files
            self._queue.extend(unread)
            self._began_s = time.monotonic()
            self._total_bytes = sum(
                file.identity.size_bytes for file in unread if not file.is_believed
            )
            self._conclude()
        with contextlib.suppress(RuntimeError):  # no thread to be had: then there are fewer
            for _ in range(min(self._thread_count, len(unread)) - 1):
                self._begin(self._drain)
        self._drain()

    def _plan(self) -> tuple[_File, ...] | Off:
        assert isinstance(self._weights, LocalWeights), self._weights
        paths = weight_files(self._weights)
        if isinstance(paths, Off):
            return paths
        files = []
        for path in paths:
            identity = FileIdentity.of(path)
            promised = promised_digest(path)
            is_believed = promised is not None and self._is_believable(path, identity)
            file = _File(path, identity, promised, self._digests.find(identity), is_believed)
            if self._too_new(file, identity):
                return Off(OffReason.WEIGHTS_CHANGE, _TOO_NEW.format(path=path))
            files.append(file)
        if self._is_moved(self._weights.directory, files):
            return Off(OffReason.WEIGHTS_CHANGE, _TOO_NEW.format(path=self._weights.directory))
        return tuple(files)

    def _is_moved(self, directory: Path, files: Sequence[_File]) -> bool:
        """Whether the engine may have loaded what another directory holds."""
        since_ns, are_blobs = self._unchanged_since_ns, [f.promised is not None for f in files]
        return since_ns is not None and directory_may_be_another(
            directory, since_ns, is_of_blobs=all(are_blobs)
        )

    def _is_believable(self, path: Path, identity: FileIdentity) -> bool:
        """Whether nothing says that a blob may have been written since it got its name."""
        since_ns = self._unchanged_since_ns
        is_young = since_ns is not None and identity.ctime_ns > since_ns - SETTLE_NS
        is_written = is_written_behind_link(path, identity)
        return not (is_young or is_written or self._digests.was_otherwise(identity))

    def _too_new(self, file: _File, identity: FileIdentity) -> bool:
        """A blob may be new, if it holds what it is called: the engine may have fetched it. One
        that counts unread must stay as it was, else what is read is not what was loaded."""
        if file.is_believed and identity != file.identity:
            return True
        since_ns = self._unchanged_since_ns
        return (
            file.promised is None
            and since_ns is not None
            and file_may_be_another(file.path, identity, since_ns)
        )

    def _drain(self) -> None:
        """Each thread: read files until none is left. The last one to end says so."""
        while not self._stop.is_set():
            try:
                file = self._queue.popleft()
            except IndexError:
                break
            self._read(file)
        if self._stop.is_set() or all(file.digest is not None for file in self._files):
            self._rest()

    def _read(self, file: _File) -> None:
        progress = (lambda _: None) if file.is_believed else self._progress
        try:
            identity, digest = self._digests.read(file.path, self._stop.is_set, progress)
        except ReadStopped:
            return
        except FileChanged:
            self._fail(OffReason.WEIGHTS_CHANGE, f"{file.path} is being written")
            return
        except OSError as error:
            # A name that was believed and cannot be verified may be a lie.
            reason = OffReason.WEIGHTS_CHANGE if file.is_believed else OffReason.FIELD_UNKNOWN
            self._fail(reason, f"weights: {file.path}: {reason_of(error)}")
            return
        if self._too_new(file, identity):
            self._fail(OffReason.WEIGHTS_CHANGE, _TOO_NEW.format(path=file.path))
            return
        with self._lock:  # so that no lie is found between the last digest and its conclusion
            file.digest = digest
            self._conclude()

    def _progress(self, byte_count: int) -> None:
        with self._lock:
            self._done_bytes += byte_count

    def _conclude(self) -> None:
        """Say what follows from the digests there are. Called under `_lock`."""
        lie = next((file.path for file in self._files if _lies(file)), None)
        if lie is not None:
            self._fail(OffReason.WEIGHTS_CHANGE, f"{lie} does not hold what its name says")
            return
        known = [file.counting for file in self._files if file.counting is not None]
        if len(known) == len(self._files):
            self._settle(Known(combined_digest(known)))
            self.is_verified = all(file.digest is not None for file in self._files)

    def _fail(self, reason: OffReason, detail: str) -> None:
        self._settle(Off(reason, detail))
        self._stop.set()

    def _settle(self, state: Known | Off) -> None:
        """Off is final."""
        with self._lock:
            if not isinstance(self._state, Off):
                self._state = state
            self._lock.notify_all()

    def _rest(self) -> None:
        with self._lock:
            self._is_idle = True
            self._lock.notify_all()


def _lies(file: _File) -> bool:
    return None not in (file.promised, file.digest) and file.promised != file.digest
