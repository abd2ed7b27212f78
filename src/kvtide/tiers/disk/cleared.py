"""Clears that outlive the node: what was cleared is not found again, whatever comes in between.

    UP_TO.SALT.FINGERPRINT.cleared      an empty file in the directory

Rows and holes of what was cleared follow at leisure, and a kill may come first. So a clear begins
with one file: its name says which records it means and up to which segment, and each start goes
by it. What is stored after a clear lies in a later segment. The file goes once no segment up to
that one is left. It is empty because a full drive, or one that refuses writes, still takes a name;
and a name is there whole or not at all.

Ownership: `Clears` is the node's owner's thread's; the writing thread makes and removes the files.
"""

import logging
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from kvtide.errors import reason_of
from kvtide.tiers.disk.ops import ClearOp, Ended
from kvtide.tiers.disk.workers import Workers
from kvtide.tiers.kinds import Kind
from kvtide.tiers.scope import EVERYTHING, Scope

logger = logging.getLogger("kvtide.disk")

CLEARED = ".cleared"
CLEARS_MAX = 4096
"""Files at a time; one clear more means all records."""
WAIT_S_MAX = 0.2
"""So long a clear waits for its file, which takes a millisecond: who is told that it is done may
rely on it. A drive that hangs delays the owner by no more, and makes it when it works again."""
_NAME = re.compile(r"([0-9]{8})\.(all|none|[0-9a-f]{64})\.(all|[0-9a-f]{64})\.cleared")


@dataclass(frozen=True, slots=True)
class Clear:
    """What one file says: records that a scope means are gone, up to this segment."""

    scope: Scope
    up_to: int


def name_of(scope: Scope, up_to: int) -> str:
    """Of its file."""
    salt, fingerprint = scope.salt_digest, scope.fingerprint
    salt_part = "all" if salt is None else salt.hex() or "none"
    fingerprint_part = "all" if fingerprint is None else fingerprint.hex()
    return f"{up_to:08d}.{salt_part}.{fingerprint_part}{CLEARED}"


def parsed(name: str) -> Clear | None:
    """What a file's name says; None: it is no clear."""
    match = _NAME.fullmatch(name)
    if match is None:
        return None
    up_to, salt, fingerprint = match.groups()
    salt_digest = None if salt == "all" else b"" if salt == "none" else bytes.fromhex(salt)
    scope = Scope(salt_digest, None if fingerprint == "all" else bytes.fromhex(fingerprint))
    return Clear(scope, int(up_to))


def told_by(names: Iterable[str]) -> dict[Scope, int]:
    """What the names in a directory say was cleared, up to which segment."""
    up_to: dict[Scope, int] = {}
    for said in filter(None, map(parsed, names)):
        up_to[said.scope] = max(up_to.get(said.scope, 0), said.up_to)
    return up_to


def is_cleared(up_to: Mapping[Scope, int], kind: Kind, segment: int) -> bool:
    """Whether records of this kind in this segment were cleared."""
    salt, fingerprint = kind.root.salt_digest, kind.root.fingerprint
    scopes = (Scope(a, b) for a in (None, salt) for b in (None, fingerprint))
    return bool(up_to) and any(segment <= up_to.get(one, 0) for one in scopes)


class Clears:
    """All that still matter."""

    def __init__(self, disk: str, workers: Workers) -> None:
        """`disk` is what warnings name it."""
        self._disk = disk
        self._workers = workers
        self._up_to: dict[Scope, int] = {}
        self._to_make: dict[str, None] = {}
        self._to_remove: dict[str, None] = {}
        self._unmade: set[str] = set()
        self._left_alone = 0
        self.left_alone_last = 0
        """The last segment of which it is not known what it holds."""
        self._failure = ""  # of the last that was to be done

    @property
    def reason(self) -> str:
        """Why a clear could not be written down, while that is so."""
        is_told = bool(self._unmade and self._failure)
        return f"a clear cannot be written down: {self._failure}" if is_told else ""

    def __len__(self) -> int:
        return len(self._up_to)

    # ---- a start

    def take(self, names: Iterable[str]) -> None:
        """What the directory's files say."""
        names = [name for name in names if name.endswith(CLEARED)]
        self._up_to = told_by(names)
        for said in filter(None, map(parsed, names)):
            if said.up_to < self._up_to[said.scope]:
                self._to_remove[name_of(said.scope, said.up_to)] = None

    @property
    def last(self) -> int:
        """Segments that are begun have higher numbers."""
        return max(self._up_to.values(), default=0)

    def means(self, kind: Kind, segment: int) -> bool:
        """Whether records of this kind in this segment were cleared."""
        return is_cleared(self._up_to, kind, segment)

    def leave_alone(self, segment: int) -> None:
        """What this one holds is not known: all clears of it stay."""
        self._left_alone, self.left_alone_last = self._left_alone or segment, segment

    # ---- later

    def add(self, scope: Scope, up_to: int, *, is_waiting: bool) -> None:
        """A clear of all segments up to this one, 0: none has any of it; with `is_waiting`, of a
        drive that works."""
        wait_s = WAIT_S_MAX if is_waiting else 0.0
        if not up_to:  # the names of segments that had some are gone for good by this
            self._workers.clear(ClearOp((), ()), wait_s)
            return
        gone = [scope] if scope in self._up_to else []
        if scope == EVERYTHING:
            gone = list(self._up_to)
        for one in gone:
            self._remove(one)
        self._up_to[scope] = up_to
        self._to_remove.pop(name_of(scope, up_to), None)
        self._to_make[name_of(scope, up_to)] = None
        self._unmade.add(name_of(scope, up_to))
        self.retry(wait_s)

    def forget(self, segments: Iterable[int]) -> None:
        """Only these segments are left: clears of none of them are done with."""
        left = [*segments, self._left_alone] if self._left_alone else segments
        first = min(left, default=self.last + 1)
        for scope, up_to in list(self._up_to.items()):
            if up_to < first:
                self._remove(scope)

    def _remove(self, scope: Scope) -> None:
        name = name_of(scope, self._up_to.pop(scope))
        self._to_make.pop(name, None)
        self._unmade.discard(name)
        self._to_remove[name] = None

    def retry(self, wait_s: float = 0.0) -> None:
        """Have done what is still to do, ahead of all that waits to be written."""
        if self._to_make or self._to_remove:
            op = ClearOp(tuple(self._to_make), tuple(self._to_remove))
            self._to_make, self._to_remove = {}, {}
            self._workers.clear(op, wait_s)

    def ended(self, ended: Ended) -> bool:
        """What failed is still to do. Whether it tells how well the place works: that what failed
        fails again does not."""
        op = ended.op
        assert isinstance(op, ClearOp), op
        if ended.error is None:
            self._unmade.difference_update(op.names)
            self._failure = ""
            return True
        error, is_news = ended.error, not self._failure
        self._failure = reason_of(error) if isinstance(error, OSError) else str(error)
        if is_news and self._unmade:
            logger.warning(
                "%s: %s; it is tried again, and a start before that finds what was cleared",
                self._disk,
                self.reason,
            )
        held = {name_of(scope, up_to) for scope, up_to in self._up_to.items()}
        self._to_make.update(dict.fromkeys(name for name in op.names if name in held))
        removed = [name for name in (*op.names, *op.old_names) if name not in held]
        self._to_remove.update(dict.fromkeys(removed))
        return is_news

    def tell_unmade(self) -> None:
        """At the end, when nothing is tried any more."""
        if self._unmade:
            logger.error(
                "%s: not written down: %d of the clears; the next start finds what they took"
                " away: clear again then",
                self._disk,
                len(self._unmade),
            )
