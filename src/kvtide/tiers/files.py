"""All that tiers ask of a file system: one thin layer, so that tests can be the fault.

`Files` is the protocol, `SystemFiles` the real one. Every method may block, lets other threads
run meanwhile, may be called from any thread, and raises OSError as the kernel does. Paths are
absolute. Reads and writes may be short, as the kernel's are: `write_fully` and `read_fully` go on
where one has ended.
"""

import ctypes
import errno
import fcntl
import mmap
import os
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

Buffer: TypeAlias = memoryview | bytearray | bytes

FILE_MODE = 0o600
DIRECTORY_MODE = 0o700
PARTS_MAX = 1024
"""IOV_MAX of Linux: so many pieces of memory fit one read or write."""
REFUSED = (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)
"""How a file system says that it has no such call."""

_OPEN_FLAGS = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK  # a pipe is refused, not waited for
_FALLOC_KEEP_SIZE = 0x01
_FALLOC_PUNCH_HOLE = 0x02

_libc = ctypes.CDLL(None, use_errno=True)
_libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
_libc.fallocate.restype = ctypes.c_int


@dataclass(frozen=True, slots=True)
class FileSize:
    """How large a file is.

    Attributes:
        length_bytes: where it ends; holes count.
        allocated_bytes: what the file system holds for it (st_blocks × 512), as caps count.
        device: number of the file system that it lies on.
        inode: its number there.
        owner: who it belongs to.
        mode: what it is, and who may do what with it (st_mode).
        modified_s: when it was last written to, by the clock of who keeps it.
    """

    length_bytes: int
    allocated_bytes: int
    device: int = 0
    inode: int = 0
    owner: int = 0
    mode: int = 0
    modified_s: float = 0.0


@dataclass(frozen=True, slots=True)
class FreeSpace:
    """Of a file system.

    Attributes:
        free_bytes: what is free for us.
        total_bytes: all that it has.
    """

    free_bytes: int
    total_bytes: int


class Files(Protocol):
    """The calls of a file system that tiers make."""

    def open(self, path: str, flags: int) -> int:
        """A descriptor of a regular file; close-on-exec, mode 0600 where it is made (flags are of
        `os.open`). Anything else is refused, a link or a pipe that somebody has put there too."""

    def close(self, descriptor: int) -> None:
        """Give a descriptor back."""

    def write_at(self, descriptor: int, parts: Sequence[Buffer], offset_bytes: int) -> int:
        """pwritev: at most `PARTS_MAX` parts, one after the other; how many bytes it took."""

    def read_at(self, descriptor: int, parts: Sequence[memoryview], offset_bytes: int) -> int:
        """preadv: fills at most `PARTS_MAX` parts; how many bytes came (0 at the end)."""

    def truncate(self, descriptor: int, length_bytes: int) -> None:
        """The file ends here from now on."""

    def punch(self, descriptor: int, offset_bytes: int, length_bytes: int) -> None:
        """Give the space of these bytes back; they read as zeros, the file's length stays."""

    def sync(self, descriptor: int) -> None:
        """fdatasync: what was written outlives a loss of power."""

    def drop_cached(self, descriptor: int, offset_bytes: int, length_bytes: int) -> None:
        """These bytes are not needed in the page cache (advice; length 0: to the end)."""

    def want_cached(self, descriptor: int) -> None:
        """All of this file will be read soon (advice; does not wait for it)."""

    def size(self, descriptor: int) -> FileSize:
        """fstat."""

    def size_at(self, path: str) -> FileSize:
        """stat."""

    def link_at(self, path: str) -> FileSize:
        """lstat: of a link itself."""

    def names(self, directory: str) -> list[str]:
        """What lies in a directory, in no order."""

    def make_directory(self, directory: str) -> None:
        """Make it and those above it where they are not there; ours has mode 0700."""

    def remove_directory(self, directory: str) -> None:
        """Remove one that is empty."""

    def sync_directory(self, directory: str) -> None:
        """What was made, renamed or unlinked in it outlives a loss of power."""

    def unlink(self, path: str) -> None:
        """Remove a file."""

    def rename(self, path: str, to: str) -> None:
        """Put a file in place of another, at once."""

    def free_space(self, directory: str) -> FreeSpace:
        """Of its file system (statvfs)."""

    def lock(self, descriptor: int) -> bool:
        """Whether this descriptor now holds the one lock of its file (flock; never waits)."""


class SystemFiles:
    """The kernel's."""

    def open(self, path: str, flags: int) -> int:
        descriptor = os.open(path, flags | _OPEN_FLAGS, FILE_MODE)
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise OSError(errno.EINVAL, "not a regular file", path)
        return descriptor

    def close(self, descriptor: int) -> None:
        os.close(descriptor)

    def write_at(self, descriptor: int, parts: Sequence[Buffer], offset_bytes: int) -> int:
        return os.pwritev(descriptor, parts, offset_bytes)

    def read_at(self, descriptor: int, parts: Sequence[memoryview], offset_bytes: int) -> int:
        return os.preadv(descriptor, parts, offset_bytes)

    def truncate(self, descriptor: int, length_bytes: int) -> None:
        os.ftruncate(descriptor, length_bytes)

    def punch(self, descriptor: int, offset_bytes: int, length_bytes: int) -> None:
        mode = _FALLOC_KEEP_SIZE | _FALLOC_PUNCH_HOLE
        if _libc.fallocate(descriptor, mode, offset_bytes, length_bytes) != 0:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))

    def sync(self, descriptor: int) -> None:
        os.fdatasync(descriptor)

    def drop_cached(self, descriptor: int, offset_bytes: int, length_bytes: int) -> None:
        os.posix_fadvise(descriptor, offset_bytes, length_bytes, os.POSIX_FADV_DONTNEED)

    def want_cached(self, descriptor: int) -> None:
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_WILLNEED)

    def size(self, descriptor: int) -> FileSize:
        return _size_of(os.fstat(descriptor))

    def size_at(self, path: str) -> FileSize:
        return _size_of(os.stat(path))

    def link_at(self, path: str) -> FileSize:
        return _size_of(os.lstat(path))

    def names(self, directory: str) -> list[str]:
        return os.listdir(directory)

    def make_directory(self, directory: str) -> None:
        if not os.path.isdir(directory):
            try:
                os.makedirs(os.path.dirname(directory), exist_ok=True)
                os.mkdir(directory, DIRECTORY_MODE)
            except (FileExistsError, NotADirectoryError) as error:
                if not os.path.isdir(directory):  # else somebody else has made it meanwhile
                    said = "no directory is there, but a file, or a link that leads to none"
                    raise NotADirectoryError(errno.ENOTDIR, said, error.filename) from error

    def remove_directory(self, directory: str) -> None:
        os.rmdir(directory)

    def sync_directory(self, directory: str) -> None:
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def unlink(self, path: str) -> None:
        os.unlink(path)

    def rename(self, path: str, to: str) -> None:
        os.rename(path, to)

    def free_space(self, directory: str) -> FreeSpace:
        found = os.statvfs(directory)
        return FreeSpace(found.f_bavail * found.f_frsize, found.f_blocks * found.f_frsize)

    def lock(self, descriptor: int) -> bool:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True


def _size_of(found: os.stat_result) -> FileSize:
    taken = found.st_blocks * 512
    where = (found.st_dev, found.st_ino)
    return FileSize(found.st_size, taken, *where, found.st_uid, found.st_mode, found.st_mtime)


def write_fully(files: Files, descriptor: int, parts: Sequence[Buffer], offset_bytes: int) -> None:
    """Write all parts one after the other.

    Raises:
        OSError: as the kernel; ENOSPC where it takes nothing more.
    """
    left = [memoryview(part) for part in parts if len(part)]
    while left:
        done = files.write_at(descriptor, left[:PARTS_MAX], offset_bytes)
        if done <= 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        offset_bytes += done
        left = _after(left, done)


def read_fully(
    files: Files, descriptor: int, parts: Sequence[memoryview], offset_bytes: int
) -> int:
    """Fill all parts one after the other; how many bytes came: fewer only where the file ends."""
    left = [part for part in parts if len(part)]
    total = 0
    while left:
        done = files.read_at(descriptor, left[:PARTS_MAX], offset_bytes + total)
        if done <= 0:
            break
        total += done
        left = _after(left, done)
    return total


def _after(parts: list[memoryview], done_bytes: int) -> list[memoryview]:
    """What is left of parts once their first bytes are done."""
    for index, part in enumerate(parts):
        if done_bytes < len(part):
            return [part[done_bytes:], *parts[index + 1 :]]
        done_bytes -= len(part)
    return []


def page_memory(length_bytes: int) -> memoryview:
    """Memory that begins on a page, as direct I/O wants it."""
    return memoryview(mmap.mmap(-1, length_bytes))
