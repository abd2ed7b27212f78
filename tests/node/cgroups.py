"""A memory cgroup of a test's own, in whichever version controls memory on this machine."""

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest


class MemoryGroup:
    """One group; its processes may use so much together."""

    def __init__(self, directory: Path, *, is_v2: bool) -> None:
        self.directory = directory
        self._limit, self._usage = (
            ("memory.max", "memory.current")
            if is_v2
            else ("memory.limit_in_bytes", "memory.usage_in_bytes")
        )
        self._is_v2 = is_v2

    def limit(self, limit_bytes: int) -> None:
        """Allow so much from now on."""
        (self.directory / self._limit).write_text(str(limit_bytes), encoding="ascii")

    @property
    def used_bytes(self) -> int:
        """What its processes use, page cache included."""
        return int((self.directory / self._usage).read_text(encoding="ascii"))

    @property
    def kills(self) -> int:
        """How many processes the kernel has killed here for want of memory."""
        name = "memory.events" if self._is_v2 else "memory.oom_control"
        text = (self.directory / name).read_text(encoding="ascii")
        found = re.search(r"^oom_kill (\d+)$", text, re.MULTILINE)
        return int(found[1]) if found else 0

    def run(self, command: Sequence[str], **more: object) -> "subprocess.Popen[bytes]":
        """Start a program in the group."""
        enter = (
            "import os, sys; open(sys.argv[1], 'w').write(str(os.getpid()));"
            "os.execv(sys.argv[2], sys.argv[2:])"
        )
        place = str(self.directory / "cgroup.procs")
        return subprocess.Popen([sys.executable, "-c", enter, place, *command], **more)

    def remove(self) -> None:
        """Remove the group; a process that has just ended may hold it for a moment."""
        for _ in range(200):
            with suppress(OSError):
                self.directory.rmdir()
                return
            time.sleep(0.02)


@contextmanager
def memory_group(limit_bytes: int) -> Iterator[MemoryGroup]:
    """A new group below our own; the test is skipped where none may be made."""
    group = _make(f"kvtide-test-{os.getpid()}")
    if group is None:
        pytest.skip("no memory cgroup may be made here")
    try:
        group.limit(limit_bytes)
        yield group
    finally:
        group.remove()


def _make(name: str) -> MemoryGroup | None:
    for line in Path("/proc/self/cgroup").read_text(encoding="ascii").splitlines():
        number, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            parent, is_v2 = Path("/sys/fs/cgroup/memory") / path.lstrip("/"), False
        elif number == "0":
            parent, is_v2 = Path("/sys/fs/cgroup") / path.lstrip("/"), True
            with suppress(OSError):  # the root's and a delegated group's children may have it
                (parent / "cgroup.subtree_control").write_text("+memory", encoding="ascii")
        else:
            continue
        directory = parent / name
        with suppress(OSError):
            directory.mkdir()
            group = MemoryGroup(directory, is_v2=is_v2)
            if (directory / group._limit).exists():
                return group
            directory.rmdir()
    return None
