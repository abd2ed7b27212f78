"""Names by which a disk tier's directory is known, to the disk and to who must keep off."""

import os
import re
from pathlib import Path

LOCK = "LOCK"
LOCK_BYTES_MAX = 32
_NAME = re.compile(r"([0-9]{8})\.(segment|rows|index)")


def is_of_a_disk(path: Path) -> bool:
    """Whether a directory is, or was, a disk tier's: it holds a file of a segment, or a lock that
    holds a process number, which other programs' do not. Raises OSError."""
    if any(parsed_name(name) for name in os.listdir(path)):
        return True
    try:
        with (path / LOCK).open("rb") as file:
            return file.read(LOCK_BYTES_MAX).strip().isdigit()
    except FileNotFoundError:
        return False


def parsed_name(name: str) -> tuple[int, str] | None:
    """Number and suffix of a file of a segment; None for anything else."""
    match = _NAME.fullmatch(name)
    return (int(match[1]), match[2]) if match else None
