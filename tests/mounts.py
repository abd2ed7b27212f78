"""File systems for tests, where they may be mounted."""

import os
import shutil
import subprocess
from pathlib import Path


def mount(*arguments: str | Path) -> bool:
    """Whether it may be done here."""
    if os.geteuid() != 0 or shutil.which("mount") is None:
        return False
    return subprocess.run(["mount", *arguments], capture_output=True, check=False).returncode == 0


def unmount(path: Path) -> None:
    """At once, whoever uses it."""
    subprocess.run(["umount", "--lazy", path], capture_output=True, check=True)
