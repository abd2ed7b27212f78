"""Digests of files, read once: what names weights and adapters by their content.

Reading a checkpoint takes seconds to minutes, so what was read is kept for later starts by
(device, inode, size, mtime, ctime): the kernel moves the ctime with every write, and nobody can
set it, so equal numbers mean equal bytes. Rejected: samples of a file (a fine-tune may differ in
one layer), and trusting names, sizes or mtimes alone.

Losing what is kept costs time only. It is believed only if the file it stands in belongs to this
user, nobody else can write it, and its own checksum is right; anything else is as if it were not
there. Several processes may share the directory: files appear whole, by renaming.
"""

import contextlib
import hashlib
import json
import os
import re
import secrets
import stat
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from kvtide.errors import KVTideError
from kvtide.units import MiB

READ_BYTES = 4 * MiB
"""Read and hashed at a time: outside the GIL, and short enough to stop within a moment."""

KEPT_MAX = 4096
"""Digests kept on disk, the oldest go first: a few hundred models of many files."""

SETTLE_NS = 2_000_000_000
"""A file changed so shortly before it was read is not kept: file systems have coarse clocks."""

GIT_BYTES_MAX = 16 * MiB
"""Files that a hub keeps in git itself, and names by git's digest, are smaller."""

LINKS_MAX = 40
"""As many as the kernel follows on the way to a file."""

_KEPT_BYTES_MAX = 4096
_SHA256_NAME = re.compile(r"[0-9a-f]{64}")
_GIT_NAME = re.compile(r"[0-9a-f]{40}")


class FileIdentity(NamedTuple):
    """What the kernel says of a file; two reads with equal identities saw equal bytes."""

    device: int
    inode: int
    size_bytes: int
    mtime_ns: int
    ctime_ns: int

    @classmethod
    def of(cls, path: Path) -> "FileIdentity":
        """Ask for it; symbolic links are followed.

        The file is opened first: where machines share files, what they say of one that nobody
        opens may be a minute old, and a reader would find other bytes.
        """
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            return cls._from(os.fstat(descriptor))
        finally:
            os.close(descriptor)

    @classmethod
    def _from(cls, status: os.stat_result) -> "FileIdentity":
        return cls(
            status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns
        )


class ReadStopped(KVTideError):
    """The reader was asked to stop: nothing is known of the file."""


class FileChanged(KVTideError):
    """A file was written while it was read, twice."""


def blob_of(path: Path) -> Path | None:
    """The Hugging Face blob that this file of a snapshot stands for, if it does: its link leads to
    `../../blobs/<name>`, and the name is made from the content."""
    if not path.is_symlink():
        return None
    blob = path.resolve()
    snapshots = blob.parent.parent / "snapshots"
    is_of_snapshot = blob.parent.name == "blobs" and snapshots in path.parent.resolve().parents
    return blob if is_of_snapshot else None


def file_may_be_another(path: Path, identity: FileIdentity, since_ns: int) -> bool:
    """Whether a reader at `since_ns` (realtime) may have found other bytes there."""
    return identity.ctime_ns > since_ns or leads_elsewhere(path, since_ns)


def directory_may_be_another(directory: Path, since_ns: int, *, is_of_blobs: bool) -> bool:
    """Whether a reader at `since_ns` (realtime) may have found another directory there.

    One whose files are all blobs of a hub's cache may be younger, since the reader may just have
    fetched it; then it counts whether the hub's name may have stood for another one.
    """
    if leads_elsewhere(directory, since_ns):
        return True
    if is_of_blobs:
        return has_other_snapshot(directory, since_ns)
    return directory.stat().st_ctime_ns > since_ns


def leads_elsewhere(path: Path, since_ns: int) -> bool:
    """Whether a path may have led to something else at `since_ns` (realtime).

    A link that is followed on the way, however deep, was made since; or a directory there was
    renamed since, which moves its ctime alone, as long as nothing is made in it afterwards.
    """
    at, todo, link_count = Path("/"), [*reversed((Path.cwd() / path).parts[1:])], 0
    while todo:
        part = todo.pop()
        if part == "..":
            at = at.parent
            continue
        here = at / part
        status = here.lstat()
        if not stat.S_ISLNK(status.st_mode):
            at = here
            if status.st_ctime_ns > max(since_ns, status.st_mtime_ns):
                return True
            continue
        link_count += 1
        if status.st_ctime_ns > since_ns or link_count > LINKS_MAX:
            return True
        target = here.readlink()
        todo.extend(reversed(target.parts[1:] if target.is_absolute() else target.parts))
        at = Path("/") if target.is_absolute() else at
    return False


def has_other_snapshot(directory: Path, since_ns: int) -> bool:
    """Whether a hub's names may have stood for another snapshot than this one at `since_ns`."""
    snapshots = directory.resolve().parent
    if snapshots.name != "snapshots" or len(os.listdir(snapshots)) < 2:
        return False
    refs = (ref for ref in (snapshots.parent / "refs").rglob("*") if ref.is_file())
    return any(ref.stat().st_mtime_ns > since_ns for ref in refs)


def promised_digest(path: Path) -> bytes | None:
    """The SHA-256 that the name of a blob promises; small files' names promise another digest."""
    blob = blob_of(path)
    return bytes.fromhex(blob.name) if blob and _SHA256_NAME.fullmatch(blob.name) else None


def is_written_behind_link(path: Path, identity: FileIdentity) -> bool:
    """Whether a blob was written after its link was made: a download makes the link last."""
    return identity.mtime_ns > path.lstat().st_mtime_ns


def holds_its_name(path: Path, digest: bytes) -> bool:
    """Whether the file, whose SHA-256 this is, is a blob that holds what its name says.

    Large files are named by their SHA-256, small ones by git's digest of them.
    """
    blob = blob_of(path)
    if blob is None or not _GIT_NAME.fullmatch(blob.name):
        return blob is not None and blob.name == digest.hex()
    if blob.stat().st_size > GIT_BYTES_MAX:
        return False
    content = blob.read_bytes()
    named = hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False)
    return named.hexdigest() == blob.name and hashlib.sha256(content).digest() == digest


def lower_priority() -> None:
    """Make the calling thread the last to get a processor (on Linux this is per thread)."""
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)


class FileDigests:
    """SHA-256 of files. Has no state but the directory: any thread may call it.

    Args:
        directory: where digests are kept between starts; made when it is first needed.
        clock_ns: the realtime that the times of files are compared with.
    """

    def __init__(self, directory: Path, clock_ns: Callable[[], int] = time.time_ns) -> None:
        self._directory = directory
        self._clock_ns = clock_ns

    def find(self, identity: FileIdentity) -> bytes | None:
        """The digest of the file with this identity, if it was read before."""
        kept = self._kept(identity)
        return kept[1] if kept is not None and kept[0] == identity else None

    def was_otherwise(self, identity: FileIdentity) -> bool:
        """Whether this inode was read before in another state: it may have been written since."""
        kept = self._kept(identity)
        return kept is not None and kept[0] != identity

    def _kept(self, identity: FileIdentity) -> tuple[FileIdentity, bytes] | None:
        """What was read last of the inode with this identity, in the state that it had then."""
        try:
            with self._place(identity).open("rb", buffering=0) as file:
                status = os.fstat(file.fileno())
                if status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) & 0o022:
                    return None
                kept = json.loads(file.read(_KEPT_BYTES_MAX))
            then, digest = FileIdentity(*kept["identity"]), bytes.fromhex(kept["sha256"])
        except (OSError, ValueError, KeyError, TypeError):
            return None
        return (then, digest) if kept == _record(then, digest) else None

    def read(
        self,
        path: Path,
        stopped: Callable[[], bool] = lambda: False,
        progress: Callable[[int], None] = lambda _: None,
    ) -> tuple[FileIdentity, bytes]:
        """Read a whole file and keep its digest.

        A file that changes meanwhile is read once more; `progress` is told the bytes read, and
        takes them back by a negative number. Raises FileChanged, ReadStopped, or OSError.
        """
        for _ in range(2):
            began_ns = self._clock_ns()
            identity, digest = _identity_and_digest(path, stopped, progress)
            if identity == FileIdentity.of(path):
                if began_ns - identity.ctime_ns > SETTLE_NS:
                    self._keep(identity, digest)
                return identity, digest
            progress(-identity.size_bytes)
        raise FileChanged(f"{path} was written while it was read; nothing is known of its content")

    def _keep(self, identity: FileIdentity, digest: bytes) -> None:
        """A directory that cannot be written is no failure: the next start reads again."""
        place = self._place(identity)
        temporary = place.with_name(f"{place.name}.{os.getpid()}.{secrets.token_hex(4)}")
        try:
            self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
            with open(os.open(temporary, flags, 0o600), "wb", buffering=0) as file:
                file.write(json.dumps(_record(identity, digest)).encode())
            temporary.replace(place)
            self._drop_oldest()
        except OSError:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)

    def _place(self, identity: FileIdentity) -> Path:
        return self._directory / f"{identity.device:x}-{identity.inode:x}.json"

    def _drop_oldest(self) -> None:
        kept = list(os.scandir(self._directory))
        if len(kept) <= KEPT_MAX:
            return
        kept.sort(key=lambda entry: entry.stat(follow_symlinks=False).st_mtime_ns)
        for entry in kept[: len(kept) - KEPT_MAX]:
            os.unlink(entry.path)


def _record(identity: FileIdentity, digest: bytes) -> dict[str, object]:
    said = json.dumps([*identity, digest.hex()]).encode()
    return {
        "identity": list(identity),
        "sha256": digest.hex(),
        "check": hashlib.sha256(said).hexdigest(),
    }


def _identity_and_digest(
    path: Path, stopped: Callable[[], bool], progress: Callable[[int], None]
) -> tuple[FileIdentity, bytes]:
    """The identity of the file that was opened, before its first byte, and its digest."""
    digest = hashlib.sha256()
    buffer = memoryview(bytearray(READ_BYTES))
    with path.open("rb", buffering=0) as file:
        identity = FileIdentity._from(os.fstat(file.fileno()))
        while count := file.readinto(buffer):
            digest.update(buffer[:count])
            progress(count)
            if stopped():
                raise ReadStopped
    return identity, digest.digest()
