"""A memory cgroup for one process, in whatever version this machine has."""

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Cgroup:
    """A group below this process's own."""

    directory: Path
    limit_file: str
    usage_file: str

    def used_bytes(self) -> int:
        """What its processes, and files in memory that they allocated, take."""
        return int((self.directory / self.usage_file).read_text())

    @contextlib.contextmanager
    def ballast(self, size_bytes: int) -> Iterator[None]:
        """Inside, another process of the group holds so much memory."""
        code = f"import sys; kept = b'x' * {size_bytes}; print(flush=True); sys.stdin.read()"
        with subprocess.Popen(
            [sys.executable, "-c", code],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            preexec_fn=self.enter,
        ) as process:
            assert process.stdout is not None
            assert process.stdout.readline(), "the ballast was killed"
            try:
                yield
                assert process.poll() is None, "the ballast was killed"
            finally:
                process.kill()

    def enter(self) -> None:
        """Move the calling process here."""
        (self.directory / "cgroup.procs").write_text(str(os.getpid()))


@contextlib.contextmanager
def limited_cgroup(limit_bytes: int) -> Iterator[Cgroup | None]:
    """A group with this limit inside the `with`; None where none may be made here."""
    group = _make(f"kvtide-test-{os.getpid()}", limit_bytes)
    try:
        yield group
    finally:
        if group is not None:
            group.directory.rmdir()


def _make(name: str, limit_bytes: int) -> Cgroup | None:
    own = Path("/proc/self/cgroup").read_text().splitlines()
    by_controllers = {line.split(":")[1]: line.split(":", 2)[2].lstrip("/") for line in own}
    v1 = next((path for key, path in by_controllers.items() if "memory" in key.split(",")), None)
    if v1 is not None:
        parent = Path("/sys/fs/cgroup/memory", v1)
        files = ("memory.limit_in_bytes", "memory.usage_in_bytes")
    else:
        parent = Path("/sys/fs/cgroup", by_controllers.get("", ""))
        files = ("memory.max", "memory.current")
    directory = parent / name
    try:
        directory.mkdir()
        (directory / files[0]).write_text(str(limit_bytes))
    except OSError:
        with contextlib.suppress(OSError):
            directory.rmdir()
        return None
    return Cgroup(directory, *files)
