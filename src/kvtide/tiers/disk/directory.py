"""The directory of a disk tier: names, how its files are opened, and what the machine grants.

    LOCK                held by the one node that uses the directory; holds its process number
    NNNNNNNN.segment    records, one behind the other
    NNNNNNNN.rows       which of them are complete or gone, since the index was written
    NNNNNNNN.index      the same of a sealed segment, to be read at once
    USED                which records were used lately; from a node's end to the next start
    *.tmp               being written; removed at a start

Anything else in it is somebody else's and left alone.
"""

import errno
import logging
import os
import stat
from contextlib import suppress
from dataclasses import dataclass

from kvtide.errors import ConfigError
from kvtide.tiers.disk_names import LOCK, LOCK_BYTES_MAX, parsed_name
from kvtide.tiers.files import REFUSED, Files, FileSize, page_memory, write_fully

logger = logging.getLogger("kvtide.disk")

USED = "USED"
SEGMENT, ROWS, INDEX = "segment", "rows", "index"
SUFFIXES = (SEGMENT, ROWS, INDEX)
TEMPORARY = ".tmp"
SEGMENT_NUMBER_MAX = 99_999_999
PROBE_BYTES = 4096


@dataclass(frozen=True, slots=True)
class Ours:
    """What the owner knows to be there: whether it is tells an emptied directory from one that has
    lost its lock alone.

    Attributes:
        segments: numbers of those that hold something.
        next_number: that of the next one; whatever has it, or a higher one, is another node's.
    """

    segments: frozenset[int]
    next_number: int


@dataclass(slots=True)
class Directory:
    """One directory, as every thread may read it.

    Attributes:
        path: absolute.
        files: the file system.
        sync: when what was written is made to outlive a loss of power: "none", "sealed" (when a
            segment is full), "each" (with each record).
        is_direct: whether reads and writes of records pass by the page cache.
        device, inode: of the file that is locked: a directory with another one is not ours.
        emptied_count: how often it was made ours again, and what had been there was gone.
    """

    path: str
    files: Files
    sync: str = "sealed"
    is_direct: bool = True
    device: int = 0
    inode: int = 0
    lock_descriptor: int = -1
    emptied_count: int = 0

    def at(self, number: int, suffix: str) -> str:
        """Path of a file of a segment."""
        return f"{self.path}/{number:08d}.{suffix}"

    @property
    def lock_path(self) -> str:
        """Path of the lock's file."""
        return f"{self.path}/{LOCK}"

    def open_segment(self, number: int, flags: int) -> int:
        """A descriptor for records; raises OSError."""
        direct = os.O_DIRECT if self.is_direct else 0
        return self.files.open(self.at(number, SEGMENT), flags | direct)

    def is_there(self) -> bool:
        """Whether the directory is the one that was locked: a mount may be gone from above it, or
        another node have it, after somebody emptied it."""
        try:
            found = self.files.link_at(self.lock_path)
        except OSError:
            return False
        return (found.device, found.inode) == (self.device, self.inode)

    def require(self) -> None:
        """Raises OSError ENOENT where `is_there` is not so."""
        if not self.is_there():
            raise OSError(errno.ENOENT, os.strerror(errno.ENOENT), self.path)

    def take(self) -> None:
        """Make the directory if need be, and lock it.

        Raises:
            ConfigError: another node has it, or it cannot be used.
        """
        try:
            self.files.make_directory(self.path)
            self._require_own()
            self._lock(None)
        except OSError as error:
            raise ConfigError(
                f"the disk {self.path} cannot be used: {error.strerror or error};"
                " name a directory of a local drive that this user may write to"
            ) from error

    def _require_own(self) -> None:
        """Nobody else may write to it: records are trusted, and files in it overwritten.

        Raises:
            ConfigError: somebody may.
        """
        user = os.geteuid()
        link, found = self.files.link_at(self.path), self.files.size_at(self.path)
        wrong = ""
        if link.owner not in (0, user):
            wrong = f"is a link that user {link.owner} has made"
        elif found.owner != user:
            wrong = f"belongs to user {found.owner}, and the node runs as user {user}"
        elif found.mode & (stat.S_IWGRP | stat.S_IWOTH):
            wrong = f"may be written to by others (its mode is {stat.S_IMODE(found.mode):o})"
        if wrong:
            raise ConfigError(
                f"the disk {self.path} {wrong}; its records are trusted, so it has to be this"
                " user's alone: name a directory below it, which the node makes, or chown it and"
                " chmod it to 700"
            )

    def _lock(self, ours: Ours | None) -> None:
        """Take the lock; None: for the first time."""
        descriptor, is_made = self._opened_lock()
        try:
            locked = self._locked(descriptor)
            is_emptied = ours is not None and not self._has(ours, is_made=is_made)
        except (OSError, ConfigError) as error:
            if is_made and isinstance(error, OSError):
                self._unmake(descriptor)
            self.files.close(descriptor)
            raise
        self.device, self.inode = locked.device, locked.inode
        try:
            self.files.truncate(descriptor, 0)
            write_fully(self.files, descriptor, [f"{os.getpid()}\n".encode()], 0)
        except OSError as error:  # a full or read-only drive can still be read
            logger.warning("%s: %s", self.lock_path, error)
        self.lock_descriptor = descriptor
        if is_emptied:
            self.emptied_count += 1

    def _opened_lock(self) -> tuple[int, bool]:
        """A descriptor of the lock's file, and whether it was made by that: nobody has one there
        then. Raises OSError."""
        try:
            return self.files.open(self.lock_path, os.O_RDWR | os.O_CREAT | os.O_EXCL), True
        except FileExistsError:
            return self.files.open(self.lock_path, os.O_RDWR), False

    def _locked(self, descriptor: int) -> FileSize:
        """The lock's file, now locked.

        Raises:
            OSError: it cannot be, or is the directory's no more.
            ConfigError: another node has it.
        """
        if self.files.lock(descriptor):
            return self._found(descriptor)
        content = bytearray(LOCK_BYTES_MAX)
        count = self.files.read_at(descriptor, [memoryview(content)], 0)
        holder = content[:count].decode("ascii", "replace").strip() or "unknown"
        raise ConfigError(
            f"the disk {self.path} is used by process {holder}; one node may use it at a time"
        )

    def _found(self, descriptor: int) -> FileSize:
        """The lock's file, if it is the directory's still; raises OSError."""
        opened, there = self.files.size(descriptor), self.files.link_at(self.lock_path)
        if (opened.device, opened.inode) != (there.device, there.inode):
            raise OSError(errno.ENOENT, "replaced before it was locked", self.lock_path)
        return opened

    def _unmake(self, descriptor: int) -> None:
        """A lock's file that we made and cannot take: the next try must not think it another's."""
        with suppress(OSError):
            self._found(descriptor)
            self.files.unlink(self.lock_path)

    def _has(self, ours: Ours, *, is_made: bool) -> bool:
        """Whether what is ours is there; raises OSError where another node's may be."""
        names = [name for name in map(parsed_name, self.files.names(self.path)) if name]
        is_anothers = not is_made or any(number >= ours.next_number for number, _ in names)
        if names and is_anothers:
            raise OSError(errno.ENOTEMPTY, "another node has written to it", self.path)
        return ours.segments <= {number for number, suffix in names if suffix == SEGMENT}

    def renew(self, ours: Ours) -> None:
        """Make a directory ours again whose lock is gone, if it lies where it lay: whoever took it
        meanwhile has left a lock of his own. Where only the lock is gone nothing else changes;
        where it was emptied `emptied_count` says so, and what is left of us is for the owner to
        remove.

        Raises:
            OSError: it does not, or holds another node's segments: their numbers may be ours and
                their records are not, which only a start tells apart.
            ConfigError: another node has it.
        """
        try:
            found = self.files.size_at(self.path)
        except FileNotFoundError:
            found = self.files.size_at(os.path.dirname(self.path))
        if found.device != self.device:
            raise OSError(errno.ENOENT, os.strerror(errno.ENOENT), self.path)
        self.files.make_directory(self.path)
        self._require_own()
        before = self.lock_descriptor
        self._lock(ours)
        if before >= 0:
            self.files.close(before)

    def free(self) -> None:
        """Give the lock back."""
        if self.lock_descriptor >= 0:
            self.files.close(self.lock_descriptor)
            self.lock_descriptor = -1

    def probe(self) -> None:
        """Write, read and punch a page: the place works.

        Raises:
            OSError: it does not.
        """
        path = f"{self.path}/probe{TEMPORARY}"
        direct = os.O_DIRECT if self.is_direct else 0
        page = page_memory(PROBE_BYTES)
        descriptor = self.files.open(path, os.O_RDWR | os.O_CREAT | direct)
        try:
            write_fully(self.files, descriptor, [page], 0)
            self.files.read_at(descriptor, [page], 0)
            self.files.punch(descriptor, 0, PROBE_BYTES)
        finally:
            self.files.close(descriptor)
            self.files.unlink(path)

    def learn(self) -> None:
        """Find out at a start what the file system takes; one line says which and why.

        Raises:
            ConfigError: it cannot give the space of evicted records back.
        """
        for self.is_direct in (True, False):
            try:
                self.probe()
            except OSError as error:
                if error.errno == errno.EOPNOTSUPP:
                    raise ConfigError(
                        f"the disk {self.path}: its file system cannot punch holes, so space of"
                        " evicted records would not come back; use ext4, XFS, Btrfs or tmpfs"
                    ) from error
                if error.errno not in REFUSED:
                    logger.warning("disk %s cannot be written to: %s", self.path, error)
                    return
                logger.info(
                    "disk %s: plain I/O, since its file system refuses O_DIRECT (%s)",
                    self.path,
                    error.strerror,
                )
            else:
                break
        if self.is_direct:
            logger.info("disk %s: O_DIRECT, past the page cache", self.path)
