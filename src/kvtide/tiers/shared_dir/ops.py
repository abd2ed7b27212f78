"""What the owner asks of the threads of a shared directory, and how each is done.

    store   temporary name ─► bytes ─► sync ─► the key's name ─► row in the journal
    free    row in the journal ─► the name goes

So a name is there whole or not at all, and nobody finds what no row tells of. What a kill leaves
between two steps has no row, nor what could not be taken away where a store failed: a sweep
removes it, before anything else is written.
"""

import errno
import logging
import os
import random
import re
import secrets
import threading
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TypeAlias

from kvtide.errors import CorruptRecord, KVTideError, UnknownFormat, bare
from kvtide.tiers.base import LoadJob, StoreJob
from kvtide.tiers.files import page_memory, write_fully
from kvtide.tiers.record_io import headers_bytes, read_proven, to_write
from kvtide.tiers.scope import Scope
from kvtide.tiers.shared_dir import view
from kvtide.tiers.shared_dir.journal import (
    EVERY_NUMBER,
    JOURNAL,
    Cleared,
    ClearedRow,
    GoneRow,
    KeptRow,
    Piece,
    Position,
    Row,
    read_on,
)
from kvtide.tiers.shared_dir.members import FolderLost, Place
from kvtide.tiers.shared_dir.own import Journal

logger = logging.getLogger("kvtide.shared_dir")

_GONE = (errno.ENOENT, errno.ESTALE)
"""How a file system says that somebody else has removed a file."""
_NOT_OURS = (errno.ENOENT, errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.ELOOP, errno.EINVAL)
"""Why one member's journal cannot be read though the place is well: it is not there, not for us to
see, or no file."""
_LEFT_ALONE = (errno.ENOENT, errno.EBUSY, errno.EISDIR, errno.ENOTEMPTY, errno.EPERM)
"""How a file system refuses to remove what is no file of ours: what somebody reads or has marked,
or a directory, which some servers make in every one."""
_SILLY = ".nfs"
"""So an NFS client calls what was removed while somebody on the machine reads it. It goes with the
reader (until then nobody can remove it: EBUSY), but stays where the machine died before."""
_FIRST_DIGITS = re.compile(r"[0-9a-f]{2}")
LOOK_RECORDS = 4096
"""A look that tells of so many asks no more members; the next one, which follows at once, goes on.
The owner takes so many in within some ten milliseconds."""


@dataclass(frozen=True, slots=True, eq=False)
class LookOp:
    """Read on in all journals but the own one.

    Attributes:
        own: whose that is.
        positions: where to read on, by member.
        unread: clears that mean all of a member when the look began: see `Others`.
    """

    own: bytes
    positions: dict[bytes, Position]
    unread: frozenset[tuple[Scope, bytes]] = frozenset()


@dataclass(frozen=True, slots=True, eq=False)
class LoadOp:
    """Fill a job's cells from the folder of one of these members, and verify them. `row` is the
    owner's."""

    job: LoadJob
    row: view.Row
    members: tuple[bytes, ...]


@dataclass(frozen=True, slots=True, eq=False)
class StoreOp:
    """Write a job's cells, and a row with this number."""

    job: StoreJob
    sequence: int


@dataclass(frozen=True, slots=True, eq=False)
class FreeOp:
    """Say that own records are gone, and remove them."""

    keys: list[bytes]


@dataclass(frozen=True, slots=True, eq=False)
class ClearOp:
    """Note that nothing of this scope is found which was stored before: up to the numbers that
    are known of each member, or that its journal says by now; all of one whose journal cannot be
    read. `is_done` is set when it has ended,
    well or not; `up_to` says what was noted."""

    scope: Scope
    known: dict[bytes, tuple[Position, int]]
    own_sequence: int
    up_to: dict[bytes, int] = field(default_factory=dict)
    is_done: threading.Event = field(default_factory=threading.Event)


@dataclass(frozen=True, slots=True, eq=False)
class SweepOp:
    """Say that we are there, and remove from the own folder what the journal does not tell of."""

    keys: set[bytes]


@dataclass(frozen=True, slots=True, eq=False)
class AliveOp:
    """Say that we are there; and see whether the place takes writes, and has our journal."""


@dataclass(frozen=True, slots=True, eq=False)
class ClaimOp:
    """Take another folder, the own one being lost; clears hold there too."""

    cleared: Cleared


ReadOp: TypeAlias = LookOp | LoadOp
WriteOp: TypeAlias = StoreOp | FreeOp | ClearOp | SweepOp | AliveOp | ClaimOp
Op: TypeAlias = ReadOp | WriteOp


@dataclass(slots=True)
class Ended:
    """How an operation ended.

    Attributes:
        op: it.
        error: why it failed, without frames; None if it did not. OSError: the place.
            CorruptRecord: the bytes.
        bad: members that do not have the record to be loaded, or not as it was written; without an
            error, and all who were asked: it is nowhere.
        pieces: what a look has read, by member.
        missing: members whose folder is gone.
        has_more: not all members were asked.
        is_partial: one did not answer, and will.
        is_left: files of a store that failed could not be taken away.
        journal: of the folder that was taken.
    """

    op: Op
    error: Exception | None = None
    bad: list[bytes] = field(default_factory=list)
    pieces: dict[bytes, Piece] = field(default_factory=dict)
    missing: list[bytes] = field(default_factory=list)
    has_more: bool = False
    is_partial: bool = False
    is_left: bool = False
    journal: Journal | None = None


def claimed(place: Place) -> Journal:
    """Take a folder whose journal can be read and is understood.

    Raises:
        OSError, KVTideError: nothing can be written there.
    """
    others: list[bytes] = []
    while True:
        place.claim(others)
        try:
            return Journal(
                place.files, place.at(place.own), place.own, is_contested=place.is_contested
            )
        except (OSError, UnknownFormat) as error:
            if place.is_made:  # it is not one file, it is the place
                raise
            logger.warning("shared_dir %s: %s; that folder is left alone", place.path, error)
            place.let_go()
            others.append(place.own)


class Hands:
    """Does operations; each thread may, at the same time."""

    def __init__(self, place: Place, journal: Journal) -> None:
        self._place = place
        self._files = place.files
        self._journal = journal

    @property
    def journal_bytes(self) -> int:
        """What the own journal takes."""
        return self._journal.size_bytes

    def leave(self) -> None:
        """Nothing more is to be done: the next one may have the folder."""
        self._journal.close()
        self._place.free()

    def run(self, op: Op) -> Ended:
        """Do it; never raises."""
        ended = Ended(op)
        try:
            self._do(op, ended)
        except (OSError, KVTideError) as error:
            ended.error = bare(error)
        return ended

    def _do(self, op: Op, ended: Ended) -> None:
        match op:
            case LookOp():
                self._look(op, ended)
            case LoadOp():
                self._load(op, ended)
            case StoreOp():
                self._store(op, ended)
            case FreeOp():
                self._free(op)
            case ClearOp():
                self._clear(op)
            case SweepOp():
                self._sweep(op)
            case AliveOp():
                self._place.alive()
                self._journal.check()
            case ClaimOp():
                self._claim(op, ended)

    def _path(self, member: bytes, key: bytes) -> str:
        name = key.hex()
        return self._place.at(member, f"{name[:2]}/{name}")

    # ---- reading

    def _look(self, op: LookOp, ended: Ended) -> None:
        """One open for each member: on NFS that is what makes a look fresh."""
        self._require_place()
        members = self._place.members()
        record_count, failed = 0, None
        for member in random.sample(members, len(members)):
            if member == op.own:
                continue
            if record_count >= LOOK_RECORDS:
                ended.has_more = True
                break
            path = self._place.at(member, JOURNAL)
            try:
                piece = read_on(self._files, path, op.positions.get(member, Position()))
                ended.pieces[member] = piece
                record_count += sum(map(_weight, piece.rows))
            except OSError as error:
                if error.errno in _NOT_OURS:
                    ended.missing.append(member)
                    continue
                ended.is_partial = True
                if error.errno != errno.ESTALE:  # replaced while it was read: the next look
                    failed = bare(error)
            except KVTideError:
                ended.missing.append(member)  # of another version, or damaged: nothing is known
        if failed is not None and not ended.pieces:
            self._require_own(op.own)  # where that fails too it is not one file, it is the place
        ended.missing += op.positions.keys() - set(members)

    def _require_place(self) -> None:
        """Raises OSError: the directory is not there."""
        if not self._place.is_there():
            raise OSError(errno.ENOENT, os.strerror(errno.ENOENT), self._place.path)

    def _require_own(self, own: bytes) -> None:
        """Raises OSError: our own journal cannot be read, though it is there."""
        with suppress(FileNotFoundError, KVTideError):
            read_on(self._files, self._place.at(own, JOURNAL), Position())

    def _load(self, op: LoadOp, ended: Ended) -> None:
        """From the first of the members whose copy is good."""
        failed = corrupt = None
        for member in op.members:
            try:
                self._load_from(self._path(member, op.job.record.key), op.job)
            except CorruptRecord as error:
                logger.warning("shared_dir: %s; nobody gets it", error)
                corrupt = bare(error)  # whose frames hold cells
            except OSError as error:
                if error.errno not in _GONE:
                    failed = bare(error)
                    continue
            else:
                return
            ended.bad.append(member)
        if failed is not None:
            raise failed
        if corrupt is not None:
            raise corrupt
        self._require_place()

    def _load_from(self, path: str, job: LoadJob) -> None:
        memory = page_memory(headers_bytes(job.record))
        descriptor = self._files.open(path, os.O_RDONLY | self._place.direct)
        try:
            read_proven(self._files, descriptor, 0, job, memory, path)
            self._drop_cached(descriptor)
        finally:
            self._files.close(descriptor)

    def _drop_cached(self, descriptor: int) -> None:
        """The host tier is what caches."""
        if not self._place.direct:
            with suppress(OSError):  # advice
                self._files.drop_cached(descriptor, 0, 0)

    # ---- writing

    def _store(self, op: StoreOp, ended: Ended) -> None:
        files, record = self._files, op.job.record
        self._place.require()
        path = self._path(self._place.own, record.key)
        files.make_directory(os.path.dirname(path))
        temporary = f"{path}.{secrets.token_hex(8)}.tmp"
        try:
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | self._place.direct
            descriptor = files.open(temporary, flags)
            try:
                write_fully(files, descriptor, to_write(op.job), 0)
                files.sync(descriptor)  # what a server refuses shows here, and not at a close
                self._drop_cached(descriptor)
            finally:
                files.close(descriptor)
            files.rename(temporary, path)
            self._journal.keep(record, op.sequence)
        except Exception:
            ended.is_left = True
            with suppress(OSError):
                self._remove([temporary, path])  # a rename that "failed" may have happened
                ended.is_left = False
            raise

    def _free(self, op: FreeOp) -> None:
        """Rows first, then files. Where there is no room for rows, files make some: a record
        without its file is absent."""
        self._place.require()
        paths = [self._path(self._place.own, key) for key in op.keys]
        try:
            self._journal.take_away(op.keys)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            self._remove(paths)
            self._journal.take_away(op.keys)
        else:
            self._remove(paths)

    def _remove(self, paths: list[str], but: tuple[int, ...] = (errno.ENOENT,)) -> None:
        """Files are not there any more; raises OSError, but for these."""
        for path in paths:
            try:
                self._files.unlink(path)
            except OSError as error:
                if error.errno not in but:
                    raise

    def _clear(self, op: ClearOp) -> None:
        op.up_to[self._place.own] = op.own_sequence
        for member in self._place.members():
            if member != self._place.own:
                position, known = op.known.get(member, (Position(), 0))
                op.up_to[member] = self._last_sequence(member, position, known)
        self._place.require()
        self._journal.clear(ClearedRow(op.scope, dict(op.up_to)))

    def _last_sequence(self, member: bytes, position: Position, known: int) -> int:
        """The number of a member's last record; where nobody can say, none is higher.

        Raises:
            OSError: the place is not there.
        """
        path = self._place.at(member, JOURNAL)
        piece = None
        try:
            while piece is None or piece.has_more:
                piece = read_on(self._files, path, position)
                position = piece.position
                numbers = (row.sequence for row in piece.rows if isinstance(row, KeptRow))
                known = max(known, piece.sequence, *numbers)
        except FileNotFoundError:
            self._require_place()
        except (OSError, KVTideError) as error:
            self._require_place()
            logger.warning("shared_dir: %s; until it is read all of it counts as cleared", error)
            return EVERY_NUMBER
        return known

    def _claim(self, op: ClaimOp, ended: Ended) -> None:
        self._require_place()  # nothing is made where it was mounted
        lost = self._place.own
        try:
            journal = claimed(self._place)
            own, last = self._place.own, journal.live.sequence
            for scope, up_to in op.cleared.items():  # never what is stored there from now on
                mine = {own: min(up_to[own], last)} if own in up_to else {}
                journal.clear(ClearedRow(scope, up_to | mine))
        except (OSError, KVTideError) as error:
            self._place.let_go()
            self._place.own = lost  # the next probe would take half of another for the whole
            raise FolderLost(f"no other folder could be taken so far: {error}") from error
        self._journal.close()
        self._journal = ended.journal = journal

    def _sweep(self, op: SweepOp) -> None:
        own = self._place.own
        self._place.alive()
        names = self._files.names(self._place.at(own))
        left = [name for name in names if name.endswith(".tmp") or name.startswith(_SILLY)]
        for digits in filter(_FIRST_DIGITS.fullmatch, names):
            try:
                files = self._files.names(self._place.at(own, digits))
            except NotADirectoryError:
                left.append(digits)
            else:
                left += [f"{digits}/{file}" for file in files if _key(file) not in op.keys]
        self._remove([self._place.at(own, name) for name in left], _LEFT_ALONE)


def _weight(row: Row) -> int:
    """Records that it speaks of."""
    return len(row.keys) if isinstance(row, GoneRow) else 1


def _key(name: str) -> bytes:
    try:
        return bytes.fromhex(name)
    except ValueError:
        return b""
