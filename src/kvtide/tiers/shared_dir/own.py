"""The own journal: the one that this node writes.

It is appended to, and written anew where it was torn, or holds more rows of records that are gone
than of others: whole, under another number, and put in place of the old one. A rename that is said
to have failed may have happened, as on NFS, so what is there is looked at before it is added to.
"""

import os
import secrets
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

from kvtide.core.records import Record
from kvtide.errors import CorruptRecord, KVTideError
from kvtide.tiers.files import Files, write_fully
from kvtide.tiers.kinds import Kind
from kvtide.tiers.shared_dir.journal import (
    JOURNAL,
    OPENING_BYTES,
    Cleared,
    ClearedRow,
    GoneRow,
    KeptRow,
    KindRow,
    Position,
    Row,
    encoded,
    opening_of,
    read_on,
    read_opening,
)
from kvtide.tiers.shared_dir.members import FolderLost

GARBAGE_ROWS = 4096
"""So many rows that say nothing any more are no reason to write a journal anew."""


@dataclass(slots=True)
class LiveRows:
    """What of a journal's rows still says something."""

    kinds: dict[int, Kind] = field(default_factory=dict)
    kept: dict[bytes, KeptRow] = field(default_factory=dict)
    cleared: Cleared = field(default_factory=Cleared)
    row_count: int = 0
    sequence: int = 0

    def take(self, row: Row) -> None:
        """The next row."""
        self.row_count += 1
        match row:
            case KindRow(number, kind):
                self.kinds[number] = kind
            case KeptRow():
                self.sequence = max(self.sequence, row.sequence)
                of_kind = self.kinds.get(row.kind)
                if of_kind is not None and row.is_of(of_kind):
                    self.kept[row.key] = row
            case GoneRow(keys):
                for key in keys:
                    self.kept.pop(key, None)
            case ClearedRow(scope, up_to):
                self.cleared.note(scope, up_to)

    def hide(self, member: bytes) -> bool:
        """Forget what was cleared, all rows of this member's journal being taken: a clear means
        numbers, wherever rows stand. Whether there was any."""
        cleared = [
            key
            for key, row in self.kept.items()
            if self.cleared.means(member, self.kinds[row.kind].root, row.sequence)
        ]
        for key in cleared:
            del self.kept[key]
        return bool(cleared)

    def to_write(self) -> list[Row]:
        """The rows that say the same."""
        kinds = {kept.kind for kept in self.kept.values()}
        rows: list[Row] = [KindRow(number, self.kinds[number]) for number in sorted(kinds)]
        rows += self.kept.values()
        return [*rows, *(ClearedRow(scope, up_to) for scope, up_to in self.cleared.items())]


@dataclass(slots=True)
class _Written:
    """The own journal as it stands.

    Attributes:
        position: where it ends.
        kinds: numbers of those that it has told of.
        row_count: how many rows it has.
        live_count: how many of them still say that a record is there.
    """

    position: Position
    kinds: dict[Kind, int]
    row_count: int
    live_count: int


class Journal:
    """What this node alone writes.

    Ownership: all under `_lock`; any writing thread appends.
    """

    def __init__(
        self, files: Files, directory: str, member: bytes, *, is_contested: bool = False
    ) -> None:
        """Read what is there: `live`. A journal that is torn, mostly garbage or none is written
        anew, and one that somebody else may still write to: `is_contested`.

        Raises:
            OSError, CorruptRecord, UnknownFormat: it cannot be used.
        """
        self._files = files
        self._directory = directory
        self._path = f"{directory}/{JOURNAL}"
        self._member = member
        self._lock = threading.Lock()
        self._descriptor = -1
        self._written = _Written(Position(), {}, 0, 0)
        self._tried: _Written | None = None  # it may be there, though that was said to have failed
        self._unsure: list[Row] = []  # others may have read them, though their write failed
        self._retry_row_count = 0
        self.live = self._taken(is_contested=is_contested)

    @property
    def size_bytes(self) -> int:
        """What it takes."""
        return self._written.position.at_bytes

    def _taken(self, *, is_contested: bool) -> LiveRows:
        live, position, is_whole = self._read()
        is_false = live.hide(self._member)  # its readers believe rows that no other takes back
        is_garbage = _is_mostly_garbage(live.row_count, len(live.kept))
        if not is_whole or is_contested or is_false or is_garbage:
            self._write_anew(live)
        else:
            kinds = {kind: number for number, kind in live.kinds.items()}
            self._written = _Written(position, kinds, live.row_count, len(live.kept))
        return live

    def _read(self) -> tuple[LiveRows, Position, bool]:
        """What is there by the journal's name; how far it is good, and whether that is all."""
        live, piece = LiveRows(), None
        position = Position()
        while piece is None or piece.has_more:
            try:
                piece = read_on(self._files, self._path, position)
            except (FileNotFoundError, CorruptRecord):
                break
            position = piece.position
            live.sequence = max(live.sequence, piece.sequence)
            for row in piece.rows:
                live.take(row)
        return live, position, piece is not None and piece.length_bytes == position.at_bytes

    def _begin(self, written: _Written) -> None:
        """Go on in a journal that was written anew."""
        self._written, self._tried, self._unsure = written, None, []

    def _write_anew(self, live: LiveRows) -> None:
        """Under another number, so that readers begin again. Raises OSError."""
        number, rows = secrets.randbits(64), live.to_write()
        content = opening_of(number, live.sequence)
        content += encoded(rows, number, OPENING_BYTES)
        kinds = {row.kind: row.number for row in rows if isinstance(row, KindRow)}
        position = Position(number, len(content))
        self._tried = _Written(position, kinds, len(rows), len(live.kept))
        _put(self._files, self._path, content)
        self._begin(self._tried)

    def _rewrite(self) -> None:
        """Without the rows that say nothing any more. Raises OSError."""
        live, position, _ = self._read()
        if position != self._written.position:
            raise FolderLost(f"{self._path} is not the one that was written last")
        live.hide(self._member)
        self._write_anew(live)

    def keep(self, record: Record, sequence: int) -> None:
        """A record is there. Raises OSError: nobody will find it."""
        with self._appending() as written:
            rows: list[Row] = []
            kind = Kind(record.root, record.layout)
            number = written.kinds.get(kind)
            if number is None:
                number = max(written.kinds.values(), default=0) + 1
                rows.append(KindRow(number, kind))
            rows.append(KeptRow(number, sequence, record.key, record.parent, record.digests))
            self._append(rows)
            written.kinds[kind] = number
            written.live_count += 1

    def take_away(self, keys: list[bytes]) -> None:
        """Records will not be there any more. Raises OSError."""
        with self._appending() as written:
            self._append([GoneRow(keys)])
            written.live_count -= len(keys)
            is_garbage = _is_mostly_garbage(written.row_count, written.live_count)
            if not is_garbage or written.row_count < self._retry_row_count:
                return
            self._close()
            try:
                self._rewrite()
            except OSError:  # what was appended stands; it is tried again, but not each time
                self._retry_row_count = written.row_count + GARBAGE_ROWS

    def check(self) -> None:
        """It is still there by its name, as it was written.

        Raises:
            OSError: nobody can say.
            FolderLost: it is not.
        """
        with self._appending():
            self._close()  # what is open may have been removed, or replaced
            self._open()

    def clear(self, row: ClearedRow) -> None:
        """See `ClearedRow`. Raises OSError."""
        with self._appending():
            self._append([row])

    @contextmanager
    def _appending(self) -> Iterator[_Written]:
        """At the end of what is good."""
        with self._lock:
            try:
                if self._descriptor < 0:
                    self._open()
                else:
                    self._require_all()
                yield self._written
            except BaseException:
                self._close()
                raise

    def _open(self) -> None:
        """The journal that was written last, never another one.

        Raises:
            OSError: it cannot be opened.
            FolderLost: it is not there, though its directory is.
        """
        files = self._files
        try:
            self._descriptor = files.open(self._path, os.O_RDWR)
            number, _ = read_opening(files, self._descriptor, self._path)
        except FileNotFoundError:
            files.link_at(self._directory)  # raises where that is not there either
            raise FolderLost(f"{self._path} was removed") from None
        except KVTideError as error:
            raise FolderLost(str(error)) from error
        if self._tried is not None and number == self._tried.position.number:
            self._begin(self._tried)
        if number != self._written.position.number:
            raise FolderLost(f"{self._path} is not the one that was written last")
        self._require_all()

    def _require_all(self) -> None:
        """Raises FolderLost: the end of it is gone; nobody would read what came behind a hole."""
        length_bytes = self._files.size(self._descriptor).length_bytes
        if length_bytes < self._written.position.at_bytes:
            raise FolderLost(f"{self._path} was cut to {length_bytes} bytes")

    def _append(self, rows: Sequence[Row]) -> None:
        """Where a write has failed readers may be behind it or before it, so what it was to say is
        said at the same place, and taken back behind that."""
        files, position = self._files, self._written.position
        every = [*self._unsure, *rows]
        content = encoded(every, position.number, position.at_bytes)
        kept = [row.key for row in rows if isinstance(row, KeptRow)]
        self._unsure = [*every, GoneRow(kept)] if kept else every
        write_fully(files, self._descriptor, [content], position.at_bytes)
        files.sync(self._descriptor)
        self._unsure = []
        self._written.position = Position(position.number, position.at_bytes + len(content))
        self._written.row_count += len(every)

    def _close(self) -> None:
        if self._descriptor >= 0:
            descriptor, self._descriptor = self._descriptor, -1
            with suppress(OSError):  # what it would say was said by the sync
                self._files.close(descriptor)

    def close(self) -> None:
        """Give the descriptor back."""
        with self._lock:
            self._close()


def _is_mostly_garbage(row_count: int, live_count: int) -> bool:
    return row_count > 2 * live_count + GARBAGE_ROWS


def _put(files: Files, path: str, content: bytes) -> None:
    """Put a file in place of what is there. Raises OSError, which may come after it happened."""
    temporary = f"{path}.{secrets.token_hex(8)}.tmp"
    descriptor = files.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    try:
        try:
            write_fully(files, descriptor, [content], 0)
            files.sync(descriptor)
        finally:
            files.close(descriptor)
        files.rename(temporary, path)
    except OSError:
        with suppress(OSError):  # no room is left by it
            files.unlink(temporary)
        raise
