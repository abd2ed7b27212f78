"""Regions: allocated ahead, sealed, mapped by workers; generations that only the node writes."""

import ctypes
import errno
import fcntl
import mmap
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtide.errors import HostMemoryError, WireError
from kvtide.memory import region as region_module
from kvtide.memory.advice import MADV_POPULATE_WRITE, address_of, advise
from kvtide.memory.region import GenerationMemory, MappedRegion, RegionMemory
from kvtide.units import GiB, KiB, MiB

CELL_BYTES = 64 * KiB
CELL_COUNT = 40
REGION_BYTES = CELL_COUNT * CELL_BYTES
ROOM = 4 * GiB


@pytest.fixture
def memory() -> Iterator[RegionMemory]:
    made = RegionMemory.create("test", REGION_BYTES)
    yield made
    made.close()


@pytest.fixture
def generations() -> Iterator[GenerationMemory]:
    made = GenerationMemory("test", CELL_COUNT)
    yield made
    made.close()


@pytest.fixture
def mapped(memory: RegionMemory, generations: GenerationMemory) -> Iterator[MappedRegion]:
    made = MappedRegion(memory.fd, REGION_BYTES, generations.fd, CELL_BYTES)
    yield made
    made.close()


def smaps(address: int) -> dict[str, str]:
    """What the kernel says about the mapping that begins at this address."""
    fields: dict[str, str] = {}
    inside = False
    for line in Path("/proc/self/smaps").read_text(encoding="utf-8").splitlines():
        name, _, value = line.partition(":")
        if "-" in line.split(" ", 1)[0]:
            inside = line.startswith(f"{address:x}-")
        elif inside:
            fields[name] = value.strip()
    return fields


def test_all_bytes_are_there_before_the_descriptor_is_handed_out(memory: RegionMemory) -> None:
    assert os.fstat(memory.fd).st_blocks * 512 >= REGION_BYTES


def test_nobody_can_change_the_size_or_lift_that(
    memory: RegionMemory, generations: GenerationMemory
) -> None:
    for fd in (memory.fd, generations.fd):
        for size in (0, 2 * REGION_BYTES):
            with pytest.raises(PermissionError):
                os.ftruncate(fd, size)
        with pytest.raises(PermissionError):
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)


def test_a_descriptor_does_not_survive_exec(
    memory: RegionMemory, generations: GenerationMemory
) -> None:
    assert not os.get_inheritable(memory.fd)
    assert not os.get_inheritable(generations.fd)


def test_what_one_worker_writes_another_reads(
    memory: RegionMemory, generations: GenerationMemory, mapped: MappedRegion
) -> None:
    mapped.cells[5:9] = b"tide"
    other = MappedRegion(memory.fd, REGION_BYTES, generations.fd, CELL_BYTES)
    assert other.cells[5:9] == b"tide"
    other.close()


def test_generations_begin_at_zero_and_are_set_by_runs(
    generations: GenerationMemory, mapped: MappedRegion
) -> None:
    assert list(mapped.generations) == [0] * CELL_COUNT
    generations.set(3, 2, 2**64 - 1)
    generations.set(CELL_COUNT - 1, 1, 7)
    wanted = [0] * CELL_COUNT
    wanted[3] = wanted[4] = 2**64 - 1
    wanted[-1] = 7
    assert list(mapped.generations) == wanted


@pytest.mark.parametrize(("first", "count"), [(-1, 1), (0, 0), (CELL_COUNT, 1), (38, 3)])
def test_a_run_outside_the_region_is_a_bug(
    generations: GenerationMemory, first: int, count: int
) -> None:
    with pytest.raises(AssertionError):
        generations.set(first, count, 1)


def test_only_the_node_can_write_generations(
    generations: GenerationMemory, mapped: MappedRegion
) -> None:
    with pytest.raises(TypeError, match="read-only"):
        mapped.generations[0] = 1
    with pytest.raises(PermissionError):
        mmap.mmap(generations.fd, CELL_COUNT * 8)
    with pytest.raises(PermissionError):
        os.pwrite(generations.fd, b"x" * 8, 0)
    with pytest.raises(PermissionError):
        os.posix_fallocate(generations.fd, 0, 2 * CELL_COUNT * 8)
    generations.set(0, 1, 9)
    assert mapped.generations[0] == 9


def test_a_mapping_is_left_out_of_core_dumps(mapped: MappedRegion) -> None:
    assert "dd" in smaps(address_of(mapped._cells))["VmFlags"].split()


def test_what_a_worker_forks_keeps_no_memory(
    memory: RegionMemory, generations: GenerationMemory, mapped: MappedRegion
) -> None:
    """Neither the mapping nor a descriptor; its addresses stay taken, and may be unmapped."""
    mapped.cells[:4] = b"tide"
    inode = str(os.fstat(memory.fd).st_ino)
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            maps = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
            is_mapped = any(line.split()[4] == inode for line in maps)
            is_taken = any(line.startswith(f"{mapped._address:x}-") for line in maps)
            links = [os.readlink(f"/proc/self/fd/{name}") for name in open_descriptors_live()]
            is_open = any(link.startswith("/memfd:kvtide:test") for link in links)
            if not is_mapped and is_taken and not is_open:
                mapped.close()
                code = 0
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert mapped.cells[:4] == b"tide"
    assert os.fstat(memory.fd).st_size == REGION_BYTES


def open_descriptors_live() -> list[str]:
    """Those that are open after they were listed."""
    return [name for name in open_descriptors() if Path(f"/proc/self/fd/{name}").exists()]


def test_mapping_without_descriptors_names_their_limit(
    memory: RegionMemory, generations: GenerationMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(region_module.mmap, "mmap", refuse)
    with pytest.raises(HostMemoryError, match="Too many open files; see the limit on open files"):
        MappedRegion(memory.fd, REGION_BYTES, generations.fd, CELL_BYTES)


def test_populating_fills_the_page_tables(mapped: MappedRegion) -> None:
    address = address_of(mapped._cells)
    assert smaps(address)["Rss"] == "0 kB"
    assert mapped.populate(threading.Event())
    assert smaps(address)["Rss"] == f"{REGION_BYTES // KiB} kB"


def test_the_nodes_own_view_is_populated_once_it_is_asked_for(memory: RegionMemory) -> None:
    memory.populate()
    view = memory.view()
    address = ctypes.addressof(ctypes.c_char.from_buffer(view))
    assert smaps(address)["Rss"] == "0 kB", "there was no view to populate"
    memory.populate()
    assert smaps(address)["Rss"] == f"{REGION_BYTES // KiB} kB"


def test_a_kernel_that_cannot_populate_costs_speed_alone(
    memory: RegionMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(region_module, "MADV_POPULATE_WRITE", 9999)
    memory.view()
    memory.populate()


def test_without_the_kernels_help_pages_are_touched(
    mapped: MappedRegion, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(address: int, length_bytes: int, advice: int) -> None:
        assert advice == MADV_POPULATE_WRITE
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

    monkeypatch.setattr(region_module, "advise", refuse)
    mapped.cells[0] = 1
    assert mapped.populate(threading.Event())
    assert smaps(address_of(mapped._cells))["Rss"] == f"{REGION_BYTES // KiB} kB"
    assert mapped.cells[0] == 1


@pytest.mark.parametrize("helped", [True, False])
def test_populating_ends_early_when_told(
    mapped: MappedRegion, monkeypatch: pytest.MonkeyPatch, helped: bool
) -> None:
    stop = threading.Event()

    def stopping(address: int, length_bytes: int, advice: int) -> None:
        stop.set()
        if not helped:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

    monkeypatch.setattr(region_module, "advise", stopping)
    monkeypatch.setattr(region_module, "POPULATE_BYTES", MiB)
    assert not mapped.populate(stop)
    assert smaps(address_of(mapped._cells))["Rss"] == "0 kB"


def test_populating_that_fails_says_so(
    mapped: MappedRegion, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(address: int, length_bytes: int, advice: int) -> None:
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    monkeypatch.setattr(region_module, "advise", fail)
    with pytest.raises(HostMemoryError, match=r"2\.5 MiB at byte 0: Cannot allocate memory"):
        mapped.populate(threading.Event())


def test_a_region_in_use_is_not_unmapped(mapped: MappedRegion) -> None:
    view = mapped.cells[10:20]
    with pytest.raises(BufferError):
        mapped.close()
    view[0] = 3
    assert view[0] == 3
    view.release()
    mapped.close()
    mapped.close()


def test_closing_twice_does_nothing(memory: RegionMemory, generations: GenerationMemory) -> None:
    fd = memory.fd
    for _ in range(2):
        memory.close()
        generations.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)


def test_a_mapping_outlives_the_nodes_descriptors(
    memory: RegionMemory, generations: GenerationMemory, mapped: MappedRegion
) -> None:
    generations.set(1, 1, 5)
    memory.close()
    generations.close()
    mapped.cells[-1] = 1
    assert mapped.populate(threading.Event())
    assert (mapped.cells[-1], mapped.generations[1]) == (1, 5)


def memory_file(bytes_total: int, seals: int, *, allocated: bool = True) -> int:
    fd = os.memfd_create("test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, bytes_total)
    if allocated:
        os.posix_fallocate(fd, 0, bytes_total)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd


SIZE_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW


@pytest.mark.parametrize(
    ("made", "hint"),
    [
        (lambda: os.open("/dev/null", os.O_RDWR), "region descriptor is not a memory file"),
        (lambda: 10_000, "region descriptor is not a memory file: Bad file descriptor"),
        (lambda: memory_file(REGION_BYTES - 1, SIZE_SEALS), "region file has 2621439 bytes, not"),
        (lambda: memory_file(REGION_BYTES, fcntl.F_SEAL_GROW), "seals 0x4, which lack 0x6"),
        (lambda: memory_file(REGION_BYTES, SIZE_SEALS, allocated=False), "only 0 bytes are alloc"),
    ],
)
def test_a_descriptor_that_is_no_region_is_refused(
    generations: GenerationMemory, made: object, hint: str
) -> None:
    assert callable(made)
    fd = made()
    with pytest.raises(WireError, match=hint):
        MappedRegion(fd, REGION_BYTES, generations.fd, CELL_BYTES)
    if fd != 10_000:
        os.close(fd)


@pytest.mark.parametrize(
    ("bytes_total", "seals", "hint"),
    [
        (CELL_COUNT * 8, SIZE_SEALS, "generations file has seals 0x6, which lack 0x16"),
        (CELL_COUNT * 8 - 8, SIZE_SEALS | 0x10, "generations file has 312 bytes, not 320"),
    ],
)
def test_a_descriptor_that_holds_no_generations_is_refused(
    memory: RegionMemory, bytes_total: int, seals: int, hint: str
) -> None:
    fd = memory_file(bytes_total, seals)
    with pytest.raises(WireError, match=hint):
        MappedRegion(memory.fd, REGION_BYTES, fd, CELL_BYTES)
    os.close(fd)


@pytest.mark.parametrize(("total", "cell"), [(REGION_BYTES + 1, CELL_BYTES), (0, 1), (1, 0)])
def test_a_region_without_whole_cells_is_refused(
    memory: RegionMemory, generations: GenerationMemory, total: int, cell: int
) -> None:
    with pytest.raises(WireError, match="no whole cells"):
        MappedRegion(memory.fd, total, generations.fd, cell)


def open_descriptors() -> set[str]:
    return {link.name for link in Path("/proc/self/fd").iterdir()}


def test_a_shortage_is_an_error_that_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine has room for the first piece and not for the second."""
    monkeypatch.setattr(region_module, "ALLOCATE_BYTES", MiB)
    rooms = iter([ROOM, MiB - 1])
    before = open_descriptors()
    with pytest.raises(
        HostMemoryError, match="2 MiB for big: after 1 MiB of it only 1 MiB are"
    ) as caught:
        RegionMemory.create("big", 2 * MiB, lambda: next(rooms))
    assert "host_bytes" in str(caught.value)
    assert open_descriptors() == before


def test_what_cannot_be_finished_is_not_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(region_module, "ALLOCATE_BYTES", MiB)
    with pytest.raises(HostMemoryError, match=r"2 MiB for big: after 0 B of it only 1\.5 MiB are"):
        RegionMemory.create("big", 2 * MiB, lambda: 3 * MiB // 2)


def test_file_that_cannot_be_sealed_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> int:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    before = open_descriptors()
    with monkeypatch.context() as patch:
        patch.setattr(region_module.fcntl, "fcntl", refuse)
        with pytest.raises(HostMemoryError, match="cannot seal r: Operation not permitted"):
            RegionMemory.create("r", MiB)
    assert open_descriptors() == before


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.ENOMEM])
def test_what_the_kernel_refuses_is_an_error_that_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    def refuse(fd: int, offset: int, length: int) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    before = open_descriptors()
    with pytest.raises(HostMemoryError, match=f"1 MiB for r: {os.strerror(code)}"):
        RegionMemory.create("r", MiB)
    with pytest.raises(HostMemoryError, match="cannot allocate"):
        GenerationMemory("r", 8)
    assert open_descriptors() == before


def test_running_out_of_descriptors_is_the_same_kind_of_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(name: str, flags: int) -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(os, "memfd_create", refuse)
    with pytest.raises(HostMemoryError, match="Too many open files"):
        RegionMemory.create("r", MiB)


def test_an_old_kernel_without_executable_seals_will_do(monkeypatch: pytest.MonkeyPatch) -> None:
    make = os.memfd_create

    def old(name: str, flags: int) -> int:
        if flags & 0x8:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return make(name, flags)

    monkeypatch.setattr(os, "memfd_create", old)
    made = RegionMemory.create("r", MiB)
    made.close()


def test_advice_on_memory_that_is_not_there_is_an_error() -> None:
    with pytest.raises(OSError, match="Cannot allocate memory"):
        advise(0, 4096, MADV_POPULATE_WRITE)


V1_MEMORY = Path("/sys/fs/cgroup/memory")

UNDER_A_LIMIT = """
import os, sys
from kvtide.errors import HostMemoryError
from kvtide.memory.region import RegionMemory
from kvtide.units import MiB
open(sys.argv[1] + "/cgroup.procs", "w").write(str(os.getpid()))
RegionMemory.create("fits", 32 * MiB).close()
try:
    RegionMemory.create("too big", 400 * MiB)
except HostMemoryError as error:
    print(error)
"""


@pytest.mark.skipif(not os.access(V1_MEMORY, os.W_OK), reason="no cgroup v1 to make a group in")
def test_under_a_cgroup_limit_a_shortage_is_an_error_and_not_a_kill() -> None:
    """The kernel would end the process: it is asked for what is left, and not asked for more."""
    group = V1_MEMORY / f"kvtide-test-{os.getpid()}"
    try:
        group.mkdir()
    except OSError:
        pytest.skip("cgroups cannot be made here")
    try:
        (group / "memory.limit_in_bytes").write_text(str(512 * MiB), encoding="utf-8")
        done = subprocess.run(
            [sys.executable, "-c", UNDER_A_LIMIT, str(group)],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        assert "cannot allocate 400 MiB for too big: after 0 B of it only" in done.stdout
    finally:
        group.rmdir()
