"""What the host can give: memory, limits on it, pressure, and the kernel's features.

Available memory is the smaller of what the machine says (MemAvailable) and of what each limiting
cgroup leaves. A limit may stand on the process's own group or on any ancestor, and the tightest
counts, whichever is nearest: a sibling may have used up what an ancestor allows.

    /proc/self/cgroup      which group, in each hierarchy:   4:memory:/a/b      0::/a/b
    /proc/self/mountinfo   which part of it is mounted where: root /a  at  /sys/fs/cgroup/memory
    so the own group is    /sys/fs/cgroup/memory/b           and its ancestors end at the mount

Both versions are looked at, since on a hybrid host the memory controller sits in either. Inside a
container the group's path may lie outside the mounted part; then the mount itself is the
container's own group. Functions that read take the root of the file system, so that tests read
recorded trees.

A cgroup limit is met by killing, not by an error: the kernel ends a process of the group when
`fallocate` of a memory file passes it (docs/decisions/ask-before-allocating.md). So this is asked
before each piece that is allocated; a look costs 0.4 ms.
"""

import fcntl
import mmap
import os
import re
import resource
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from kvtide.errors import HostMemoryError
from kvtide.memory.advice import MADV_POPULATE_WRITE, address_of, advise
from kvtide.units import KiB, MiB

RESERVE_BYTES_MIN = 256 * MiB
RESERVE_RATIO = 0.03
"""Left free for everybody else: of the machine, and of each cgroup that limits."""
F_SEAL_FUTURE_WRITE = 0x10  # since Linux 5.1; not yet in Python's fcntl
UNLIMITED_BYTES_MIN = 1 << 60  # cgroup v1 says "none" by the largest number of whole pages


@dataclass(frozen=True, slots=True)
class CgroupLimit:
    """A group that limits this process, and what its members use.

    Attributes:
        directory: where the group's files are.
        limit_bytes: the lower of hard limit and throttling mark.
        used_bytes: without what the kernel takes back before it kills (`_reclaimable`).
    """

    directory: Path
    limit_bytes: int
    used_bytes: int

    @property
    def available_bytes(self) -> int:
        """What may still be allocated below the limit."""
        return max(0, self.limit_bytes - self.used_bytes)

    @property
    def spare_bytes(self) -> int:
        """What is left beyond the reserve; negative where the reserve itself is short."""
        return self.available_bytes - reserve_bytes(self.limit_bytes)


@dataclass(frozen=True, slots=True)
class HostMemory:
    """Memory at one moment.

    Attributes:
        total_bytes: of the machine.
        machine_available_bytes: what the machine could give without swapping.
        limit: the cgroup that spares least, if any limits.
    """

    total_bytes: int
    machine_available_bytes: int
    limit: CgroupLimit | None

    @property
    def available_bytes(self) -> int:
        """What this process could allocate now."""
        if self.limit is None:
            return self.machine_available_bytes
        return min(self.machine_available_bytes, self.limit.available_bytes)

    @property
    def spare_bytes(self) -> int:
        """What a cache may take of it; negative where the reserve itself is short."""
        spare = self.machine_available_bytes - reserve_bytes(self.total_bytes)
        return spare if self.limit is None else min(spare, self.limit.spare_bytes)


@dataclass(frozen=True, slots=True)
class Pressure:
    """Share of the last ten seconds in which some, or all, tasks waited for memory."""

    some_ratio: float
    full_ratio: float


@dataclass(frozen=True, slots=True)
class KernelFeatures:
    """What of the kernel kvtide uses; the first two are required."""

    sealed_memory_files: bool
    pidfd: bool
    populate_write: bool

    @property
    def missing(self) -> list[str]:
        """Required features that are not there, with the version that brings them."""
        return [
            text
            for present, text in (
                (self.sealed_memory_files, "memory files with F_SEAL_FUTURE_WRITE (Linux 5.1)"),
                (self.pidfd, "pidfd_open (Linux 5.3)"),
            )
            if not present
        ]


def host_memory(root: Path = Path("/")) -> HostMemory:
    """Look at the machine's memory and at all limits on this process.

    Raises:
        HostMemoryError: /proc/meminfo cannot be read. (Unreadable cgroups do not limit.)
    """
    fields = dict(re.findall(r"^(\w+):\s+(\d+) kB$", _read(root / "proc/meminfo"), re.MULTILINE))
    if "MemTotal" not in fields or "MemAvailable" not in fields:
        raise HostMemoryError(
            "/proc/meminfo does not say how much memory is available; mount /proc"
        )
    limits = sorted(_limits(root), key=lambda limit: limit.spare_bytes)
    return HostMemory(
        total_bytes=int(fields["MemTotal"]) * KiB,
        machine_available_bytes=int(fields["MemAvailable"]) * KiB,
        limit=limits[0] if limits else None,
    )


def reserve_bytes(whole_bytes: int) -> int:
    """What a cache leaves to everybody else in a machine, or a cgroup, of this size."""
    return max(RESERVE_BYTES_MIN, int(whole_bytes * RESERVE_RATIO))


def available_bytes() -> int:
    """What this process could allocate now."""
    return host_memory().available_bytes


def spare_bytes() -> int:
    """What a cache may allocate now; negative where the reserve itself is short."""
    return host_memory().spare_bytes


def pressure(root: Path = Path("/")) -> Pressure | None:
    """Memory pressure of the machine; None where the kernel does not measure it."""
    text = _read(root / "proc/pressure/memory")
    percent = dict(re.findall(r"^(some|full) avg10=([0-9.]+) ", text, re.MULTILINE))
    if percent.keys() != {"some", "full"}:
        return None
    return Pressure(float(percent["some"]) / 100, float(percent["full"]) / 100)


def memlock_bytes() -> int | None:
    """Most memory that this process may lock or register with a GPU; None: unlimited."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return None if soft == resource.RLIM_INFINITY else soft


def kernel_features() -> KernelFeatures:
    """Try each feature once."""
    return KernelFeatures(
        sealed_memory_files=_has_sealed_memory_files(),
        pidfd=_has_pidfd(),
        populate_write=_has_populate_write(),
    )


def _has_sealed_memory_files() -> bool:
    try:
        fd = os.memfd_create("kvtide-probe", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    except OSError:
        return False
    try:
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, F_SEAL_FUTURE_WRITE)
    except OSError:
        return False
    finally:
        os.close(fd)
    return True


def _has_pidfd() -> bool:
    try:
        os.close(os.pidfd_open(os.getpid()))
    except OSError:  # also where a container's filter forbids it
        return False
    return True


def _has_populate_write() -> bool:
    with mmap.mmap(-1, mmap.PAGESIZE) as page:
        try:
            advise(address_of(page), mmap.PAGESIZE, MADV_POPULATE_WRITE)
        except OSError:
            return False
    return True


def _limits(root: Path) -> Iterator[CgroupLimit]:
    """Every limiting group, own or ancestor, of every hierarchy that controls memory."""
    mounts = _mounts(root)
    for line in _read(root / "proc/self/cgroup").splitlines():
        number, controllers, group = line.split(":", 2)
        if number == "0":
            kind, limit_of = "cgroup2", _limit_v2
        elif "memory" in controllers.split(","):
            kind, limit_of = "cgroup", _limit_v1
        else:
            continue
        mount = _best_mount([mount for mount in mounts if mount.kind == kind], group)
        if mount is None:
            continue
        for directory in mount.directories(group):
            limit = limit_of(directory)
            if limit is not None:
                yield limit


@dataclass(frozen=True, slots=True)
class _Mount:
    """Part of a hierarchy, from the group `part` down, seen at `directory`."""

    kind: str
    part: str
    directory: Path

    def shows(self, group: str) -> bool:
        return f"{group}/".startswith(f"{self.part.rstrip('/')}/")

    def directories(self, group: str) -> list[Path]:
        """The group and its ancestors as far as mounted; the mount itself where it is outside."""
        inside = group.removeprefix(self.part.rstrip("/")).strip("/") if self.shows(group) else ""
        parts = inside.split("/") if inside and ".." not in inside.split("/") else []
        return [self.directory.joinpath(*parts[:depth]) for depth in range(len(parts), -1, -1)]


def _mounts(root: Path) -> list[_Mount]:
    """Mounts of cgroup v2, and of v1 with the memory controller.

    A line: 35 31 0:32 /part /mount/point rw,relatime shared:9 - cgroup cgroup rw,memory
    """
    mounts = []
    for line in _read(root / "proc/self/mountinfo").splitlines():
        own, _, filesystem = line.partition(" - ")
        kind, _, options = filesystem.split(" ", 2)
        if kind == "cgroup2" or (kind == "cgroup" and "memory" in options.split(",")):
            part, point = (_unescaped(word) for word in own.split(" ")[3:5])
            mounts.append(_Mount(kind, part, root / point.lstrip("/")))
    return mounts


def _best_mount(mounts: list[_Mount], group: str) -> _Mount | None:
    """The mount that shows the group, else any: a container sees its own group at the top."""
    showing = [mount for mount in mounts if mount.shows(group)]
    return next(iter(showing or mounts), None)


def _unescaped(word: str) -> str:
    """mountinfo writes blanks as octal numbers."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), word)


def _limit_v2(directory: Path) -> CgroupLimit | None:
    limit = min(
        _number(directory / name, UNLIMITED_BYTES_MIN) for name in ("memory.max", "memory.high")
    )
    if limit >= UNLIMITED_BYTES_MIN:
        return None  # before its statistics, which the kernel has to add up, are asked for
    used = _number(directory / "memory.current") - _reclaimable(_statistics(directory), "")
    return CgroupLimit(directory, limit, max(0, used))


def _limit_v1(directory: Path) -> CgroupLimit | None:
    own = _number(directory / "memory.limit_in_bytes", UNLIMITED_BYTES_MIN)
    found = _statistics(directory)
    # Counts ancestors too, those outside the mount included.
    limit = min(own, found.get("hierarchical_memory_limit", UNLIMITED_BYTES_MIN))
    if limit >= UNLIMITED_BYTES_MIN:
        return None
    used = _number(directory / "memory.usage_in_bytes") - _reclaimable(found, "total_")
    return CgroupLimit(directory, limit, max(0, used))


def _reclaimable(statistics: dict[str, int], prefix: str) -> int:
    """What of a group's usage the kernel takes back before it kills.

    As in MemAvailable: file cache and slabs, but for half of the files in active use. (A model
    that was just read is all active file cache. Our own regions are none of these.)
    """
    names = ("inactive_file", "active_file", "slab_reclaimable")
    inactive, active, slab = (statistics.get(prefix + name, 0) for name in names)
    return inactive + active // 2 + slab


def _number(path: Path, otherwise: int = 0) -> int:
    """The number that a cgroup file holds; `otherwise` for the word max, or no such file."""
    text = _read(path).strip()
    return int(text) if text.isdecimal() else otherwise


def _statistics(directory: Path) -> dict[str, int]:
    found = re.findall(r"^(\w+) (\d+)$", _read(directory / "memory.stat"), re.MULTILINE)
    return {name: int(number) for name, number in found}


def _read(path: Path) -> str:
    """The file's text; empty where it is not there or not for us."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
