"""Regions: memory files that the node allocates and that workers map.

    node                                        worker
    RegionMemory      memfd, allocated ─ fd ──► MappedRegion.cells        read and write
    GenerationMemory  memfd, 8 bytes a cell ──► MappedRegion.generations  read only, by a seal

    region        [ cell 0 | cell 1 | cell 2 | …        ]   cell_bytes each, a multiple of 4 KiB
    generations   [ u64    | u64    | u64    | …        ]   one for each cell, native byte order

Invariants. The bytes are there before a descriptor leaves the node, and neither file can shrink or
grow (seals), so no access in an engine can meet a hole at the end: that would be SIGBUS. A mapping
that could write generations exists in the node alone: it is made before F_SEAL_FUTURE_WRITE, which
forbids every later one, and write(2) too.

Order of writes. The node raises a cell's generation before it lends the cell again; a worker reads
the generation after its copy out has ended. Each is one aligned 8-byte access. x86-64 keeps loads
in order; elsewhere the interpreter's lock, dropped for the copy and taken again before the read,
stands between the two.

Sketch (two cores of an EPYC, Linux 6.18, small pages). Allocating runs at 4.0 GB/s, populating a
mapping at 4.2 GB/s: 0.25 s each for a region of 1 GiB, then copies run at 18-20 GB/s. A copy into
a mapping that was not populated runs at 3.5 GB/s. Without MADV_POPULATE_WRITE, reading a byte of
each page does it at 2.6 GB/s. Page tables take 1/512 of a mapping, in every worker.

Rejected: huge pages (docs/decisions/huge-pages.md); shm_open and files in /dev/shm, which outlive
a killed node and whose size anybody may change; pwrite and pread instead of a mapping, which need
no populating but store at 0.4 of a plain copy.
"""

import contextlib
import errno
import fcntl
import mmap
import os
import threading
import weakref
from collections.abc import Callable, Iterator

from kvtide.errors import HostMemoryError, WireError
from kvtide.memory import probe
from kvtide.memory.advice import (
    MADV_DONTDUMP,
    MADV_POPULATE_WRITE,
    address_of,
    advise,
    map_nothing,
)
from kvtide.units import MiB, format_bytes

ALLOCATE_BYTES = 64 * MiB
"""Allocated between two looks at the memory available: 16 ms, of which the look takes 0.4."""

POPULATE_BYTES = 16 * MiB
"""Populated in one call: it holds off the process's own mmap and munmap for its 4 ms."""

READ_BYTES = MiB
"""Read in one go where the kernel cannot populate: the interpreter's lock is held for 0.5 ms."""

GENERATION_BYTES = 8

SIZE_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
_MFD_NOEXEC_SEAL = 0x8  # since Linux 6.3; asked for by hosts that forbid executable memory files


class RegionMemory:
    """The node's hold on one region of one shard: a descriptor, and a mapping if it looks inside.

    The memory lives until this is closed and every worker has unmapped it or ended.
    """

    def __init__(self, name: str, bytes_total: int, fd: int) -> None:
        self.name = name
        self.bytes_total = bytes_total
        self.fd = fd
        self._mapping: mmap.mmap | None = None
        self._view: memoryview | None = None

    @classmethod
    def create(
        cls,
        name: str,
        bytes_total: int,
        spare_bytes: Callable[[], int] = probe.spare_bytes,
    ) -> "RegionMemory":
        """Allocate; blocks for 0.25 s a GiB, without the interpreter's lock.

        Raises:
            HostMemoryError: there is not as much; nothing stays allocated.
        """
        assert bytes_total > 0, bytes_total
        fd = _allocated_file(name, bytes_total, spare_bytes)
        try:
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SIZE_SEALS | fcntl.F_SEAL_SEAL)
        except OSError as error:
            os.close(fd)
            raise HostMemoryError(f"cannot seal {name}: {error.strerror}") from error
        return cls(name, bytes_total, fd)

    def view(self) -> memoryview:
        """All bytes, mapped into this process when it is first asked for.

        What reads and writes here is the kernel, for a tier; it is quick once `populate` was
        called.

        Raises:
            HostMemoryError: the kernel does not map it.
        """
        if self._view is None:
            try:
                self._mapping = mmap.mmap(self.fd, self.bytes_total)
                advise(address_of(self._mapping), self.bytes_total, MADV_DONTDUMP)
            except OSError as error:
                size = format_bytes(self.bytes_total)
                raise HostMemoryError(f"cannot map {size} of {self.name}: {error}") from error
            self._view = memoryview(self._mapping)
        return self._view

    def populate(self) -> None:
        """Fill the page tables of the view, if there is one; blocks for 0.25 s a GiB, the
        interpreter's lock free.

        Direct I/O goes by page tables too: in a view that was not populated it waits for a fault
        at each page. Where the kernel cannot do it (before 5.14) or has not the memory for tables,
        that is all that is lost.
        """
        mapping = self._mapping
        if mapping is not None:
            with memoryview(mapping), contextlib.suppress(OSError):
                address = address_of(mapping)
                for start, length in _pieces(self.bytes_total):
                    advise(address + start, length, MADV_POPULATE_WRITE)

    def close(self) -> None:
        """Let go of the memory; calling it again does nothing.

        A mapping goes with the last view of it: a tier's thread may hold one until its next job.
        """
        self._view = self._mapping = None
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


class GenerationMemory:
    """The generations of one region's cells: written by the node, seen by its workers."""

    def __init__(self, name: str, cell_count: int) -> None:
        """Allocate, all generations 0.

        Raises:
            HostMemoryError: there is not as much memory.
        """
        assert cell_count > 0, cell_count
        self.cell_count = cell_count
        bytes_total = cell_count * GENERATION_BYTES
        self.fd = _allocated_file(name, bytes_total, probe.spare_bytes)
        try:
            self._mapping = mmap.mmap(self.fd, bytes_total)
            seals = SIZE_SEALS | probe.F_SEAL_FUTURE_WRITE | fcntl.F_SEAL_SEAL
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, seals)
        except OSError as error:
            os.close(self.fd)
            raise HostMemoryError(f"cannot map and seal {name}: {error.strerror}") from error
        self._values = memoryview(self._mapping).cast("Q")

    def set(self, first_cell: int, count: int, value: int) -> None:
        """Give the run its new generation; in force for all processes on return."""
        assert 0 <= first_cell < first_cell + count <= self.cell_count, (first_cell, count)
        for cell in range(first_cell, first_cell + count):  # one 8-byte store each, never torn
            self._values[cell] = value

    def close(self) -> None:
        """Let go of the memory; calling it again does nothing."""
        self._values.release()
        self._mapping.close()
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


class MappedRegion:
    """A worker's view of one region.

    Whoever closes it has first seen all copies in it end and `populate` return: a view or a call
    that is still in it makes `close` raise BufferError, and nothing is unmapped.

    Attributes:
        cells: all bytes of the region, writable.
        generations: one number for each cell; it cannot be written through.
    """

    def __init__(self, fd: int, bytes_total: int, generations_fd: int, cell_bytes: int) -> None:
        """Map what the descriptors name; they stay the caller's and may be closed at once.

        Raises:
            WireError: a descriptor is not what a node hands out.
            HostMemoryError: the kernel does not map it.
        """
        if bytes_total <= 0 or cell_bytes <= 0 or bytes_total % cell_bytes:
            raise WireError(f"a region of {bytes_total} bytes has no whole cells of {cell_bytes}")
        self.bytes_total = bytes_total
        self.cell_bytes = cell_bytes
        self.cell_count = bytes_total // cell_bytes
        generations_bytes = self.cell_count * GENERATION_BYTES
        _check_file(fd, "region", bytes_total, SIZE_SEALS)
        sealed = SIZE_SEALS | probe.F_SEAL_FUTURE_WRITE
        _check_file(generations_fd, "generations", generations_bytes, sealed)
        try:
            self._generations = mmap.mmap(generations_fd, generations_bytes, prot=mmap.PROT_READ)
            self._cells = mmap.mmap(fd, bytes_total)
            advise(address_of(self._cells), bytes_total, MADV_DONTDUMP)
        except OSError as error:
            limits = "the limits on address space and mappings"
            if error.errno == errno.EMFILE:  # a mapping keeps a descriptor of its file
                limits = "the limit on open files (`ulimit -n`), of which each region takes two"
            raise HostMemoryError(
                f"cannot map a region of {format_bytes(bytes_total)}: {error.strerror};"
                f" see {limits}"
            ) from error
        self._address = address_of(self._cells)
        self._files = {_identity(fd), _identity(generations_fd)}
        _mapped.add(self)
        self.cells = memoryview(self._cells)
        self.generations = memoryview(self._generations).cast("Q")

    def populate(self, stop: threading.Event) -> bool:
        """Fill the page tables, so that no later copy pays for it; True when all of it is done.

        Called once, on a thread of its own; blocks for 0.25 s a GiB, the interpreter's lock free.
        Ends early, with False, soon after `stop` is set.

        Raises:
            HostMemoryError: the kernel did not fill the pages.
        """
        with self.cells[:]:  # holds off close()
            address = address_of(self._cells)
            for start, length in _pieces(self.bytes_total):
                if stop.is_set():
                    return False
                try:
                    advise(address + start, length, MADV_POPULATE_WRITE)
                except OSError as error:
                    if error.errno == errno.EINVAL:  # a kernel before 5.14
                        return self._populate_by_reading(stop)
                    raise HostMemoryError(
                        f"cannot populate {format_bytes(self.bytes_total)} at byte {start}:"
                        f" {error.strerror}; the machine is short of memory"
                    ) from error
        return True

    def _populate_by_reading(self, stop: threading.Event) -> bool:
        """Read a byte of each page: in a shared mapping that makes it writable too."""
        for start in range(0, self.bytes_total, READ_BYTES):
            if stop.is_set():
                return False
            bytes(self.cells[start : start + READ_BYTES : mmap.PAGESIZE])
        return True

    def close(self) -> None:
        """Unmap; calling it again does nothing.

        Raises:
            BufferError: somebody still has a view of it.
        """
        self.cells.release()
        self.generations.release()
        self._cells.close()
        self._generations.close()
        _mapped.discard(self)


_mapped: "weakref.WeakSet[MappedRegion]" = weakref.WeakSet()
"""Of this process; looked at by what it forks."""


def _let_go() -> None:
    """In a process that a worker forked (a data loader, say): hold nothing of its regions.

    Else their memory would stay after node and worker have let go of it, for as long as the child
    lives. (The mapping of generations stays: 8 bytes a cell.)

    Rejected: MADV_DONTFORK. It leaves the descriptors that mmap keeps, and addresses that come to
    be somebody else's until a copied object unmaps them.
    """
    regions = list(_mapped)
    if not regions:
        return
    files = set().union(*(region._files for region in regions))
    for region in regions:
        map_nothing(region._address, region.bytes_total)
    nothing = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the one that lists
            if _identity(int(name)) in files:
                os.dup2(nothing, int(name), inheritable=False)
    os.close(nothing)


os.register_at_fork(after_in_child=_let_go)


def _identity(fd: int) -> tuple[int, int]:
    status = os.fstat(fd)
    return status.st_dev, status.st_ino


def _pieces(bytes_total: int) -> Iterator[tuple[int, int]]:
    """Start and length of what is populated by one call after the other."""
    for start in range(0, bytes_total, POPULATE_BYTES):
        yield start, min(POPULATE_BYTES, bytes_total - start)


def _allocated_file(name: str, bytes_total: int, spare_bytes: Callable[[], int]) -> int:
    """A memory file whose pages are all there, not yet sealed.

    Before each piece all that is still missing must be to spare: a file that cannot be finished
    shall not take what others need first.
    """
    wanted = f"{format_bytes(bytes_total)} for {name}"
    try:
        fd = _memory_file(name)
    except OSError as error:
        raise HostMemoryError(
            f"cannot make a memory file of {wanted}: {error.strerror}"
        ) from error
    try:
        os.ftruncate(fd, bytes_total)
        for start in range(0, bytes_total, ALLOCATE_BYTES):
            missing = bytes_total - start
            spare = spare_bytes()
            if spare < missing:
                raise HostMemoryError(  # noqa: TRY301 - the file is closed on this way out too
                    f"cannot allocate {wanted}: after {format_bytes(start)} of it only"
                    f" {format_bytes(max(0, spare))} are to spare; set host_bytes lower"
                )
            os.posix_fallocate(fd, start, min(ALLOCATE_BYTES, missing))
    except OSError as error:
        os.close(fd)
        raise HostMemoryError(
            f"cannot allocate {wanted}: {error.strerror}; set host_bytes lower"
        ) from error
    except BaseException:
        os.close(fd)
        raise
    return fd


def _memory_file(name: str) -> int:
    flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
    try:
        return os.memfd_create(f"kvtide:{name}", flags | _MFD_NOEXEC_SEAL)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return os.memfd_create(f"kvtide:{name}", flags)


def _check_file(fd: int, what: str, bytes_wanted: int, seals_wanted: int) -> None:
    """Believe nothing of a descriptor that came over a socket."""
    try:
        status = os.fstat(fd)
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError as error:
        raise WireError(f"the {what} descriptor is not a memory file: {error.strerror}") from error
    if status.st_size != bytes_wanted:
        raise WireError(f"the {what} file has {status.st_size} bytes, not {bytes_wanted}")
    if seals & seals_wanted != seals_wanted:
        raise WireError(f"the {what} file has seals {seals:#x}, which lack {seals_wanted:#x}")
    allocated_bytes = status.st_blocks * 512
    if allocated_bytes < bytes_wanted:
        raise WireError(f"of the {what} file only {allocated_bytes} bytes are allocated")
