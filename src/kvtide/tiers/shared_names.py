"""Names by which a shared directory is known, to its members and to who must keep off."""

import os
import re
from pathlib import Path

OWNER, JOURNAL = "owner", "journal"
"""Files of a member's folder: who writes there, and what is there."""
MEMBER = re.compile(r"[0-9a-f]{32}")
"""Name of a folder."""


def is_of_members(path: Path) -> bool:
    """Whether a directory is, or was, that of a shared_dir: it holds the folder of a member.
    Raises OSError."""
    return any(
        os.path.lexists(path / name / file)
        for name in os.listdir(path)
        if MEMBER.fullmatch(name)
        for file in (OWNER, JOURNAL)
    )
